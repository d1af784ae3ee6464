"""Observers of what is recorded: called at each step; the code that records knows none of them.

`configure` puts the observers of the look lane in; without them none of their code runs. What an
observer does must not fail or slow the call: an exception is logged at DEBUG, and no lock of a
rollout is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.context import Context

from otel_rollout.record.boundary import NOT_SHOWN
from otel_rollout.record.options import Options
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import ModelApi

logger = logging.getLogger("otel_rollout")


class RunningRollout(Protocol):
    """The parts of an `ActiveRollout` that observers may read."""

    id: str
    is_part: bool
    operation: str
    options: Options
    tracer: trace.Tracer
    span: trace.Span
    ended_early: str | None
    observed: dict[object, Any]
    """What each observer keeps of it."""

    @property
    def parent(self) -> RunningRollout | None:
        """The rollout around it. None: there is none."""

    @property
    def trajectory(self) -> Trajectory:
        """Its trajectory."""

    def scrub(self, text: str) -> str:
        """The text of an error as it may be recorded."""


class RunningCall(Protocol):
    """The parts of an `ExchangeRecorder` that observers may read."""

    path: str
    api: ModelApi | None
    """The API that is asked. None: none generates at the path."""
    began_ns: int
    context: Context
    """Where its span begins; who puts another one around it, replaces it."""
    known: tuple[str, int]
    """Digest and number of the messages that an earlier request of the rollout had."""
    error: tuple[str, str] | None
    """The name of the error that it ended with, and a sentence. None: it ended with none."""
    added: bytes
    """The messages of its request that no earlier one of the rollout had, as JSON."""
    observed: dict[object, Any]
    """What each observer keeps of it."""

    @property
    def messages(self) -> bytes:
        """The messages of its request, as JSON without brackets."""

    @property
    def rollout(self) -> RunningRollout:
        """The rollout that it belongs to."""

    @property
    def is_events(self) -> bool:
        """True if the reply is a stream of events."""

    @property
    def status_code(self) -> int | None:
        """The HTTP status of the reply. None: there is none."""

    @property
    def ended_ns(self) -> int:
        """When the reply was read to its end, or no further."""


class Observer:
    """Base class of observers: a method that a subclass does not have is never called.

    State belongs into `rollout.observed[self]`, until `rollout_ended`, and `call.observed[self]`.
    """

    def rollout_began(self, rollout: RunningRollout) -> None:
        """A rollout, or this process's part of one, began: its span has started."""

    def rollout_ends(self, rollout: RunningRollout, attributes: dict[str, Any]) -> None:
        """A rollout ended. attributes: those that its span is to show; add to them."""

    def rollout_ended(self, rollout: RunningRollout) -> None:
        """The span of a rollout has ended."""

    def scored(self, rollout: RunningRollout, reward: float) -> None:
        """A rollout has this reward at its end, or got it later."""

    def call_begins(self, call: RunningCall) -> None:
        """A model call begins: its span has not started."""

    def call_began(self, call: RunningCall) -> None:
        """A model call began."""

    def requested(self, call: RunningCall, body: bytes, written: Mapping[str, Any]) -> None:
        """A request was sent. body: as it may be recorded. written: its attributes."""

    def replied(self, call: RunningCall, body: bytes, written: Mapping[str, Any]) -> None:
        """A reply has come. body: as it may be recorded. written: attributes of the call's span."""

    def call_ended(self, call: RunningCall, status: str) -> None:
        """A call has ended, and its span with it."""

    def tool_began(self, rollout: RunningRollout, call_id: object, name: str, at_ns: int) -> None:
        """The span of a tool was opened by somebody else. call_id: None: not known."""

    def tool_ended(self, rollout: RunningRollout, *, failed: bool) -> None:
        """A tool whose span is in the rollout has ended."""

    def waits(self, exporter: object, count: int) -> None:
        """So many more trajectories wait for an exporter; below 0: so many fewer."""

    def exported(self, exporter: object, trajectory: Trajectory) -> None:
        """An exporter has taken a trajectory."""

    def dropped(self, exporter: object, count: int, signal: str = "trajectory") -> None:
        """So many trajectories did not reach an exporter, or spans. signal: which."""


class Observers:
    """The observers of a process, by the steps that they have a method for."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        every = tuple(observers)

        def methods(name: str) -> tuple[Callable[..., None], ...]:
            base = getattr(Observer, name)
            return tuple(getattr(o, name) for o in every if getattr(type(o), name) is not base)

        self._methods = {name: methods(name) for name in vars(Observer) if name[0] != "_"}

    def notify(self, event: str, *arguments: Any, **named: Any) -> None:
        """Call the method of this name of each observer that has it."""
        for method in self._methods[event]:
            try:
                method(*arguments, **named)
            except Exception:
                logger.debug(NOT_SHOWN, exc_info=True)
