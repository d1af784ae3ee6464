"""Observers of what is recorded: called at each step; the code that records knows none of them.

`configure` puts the observers of the look lane in; without them none of their code runs. What an
observer does must not fail or slow the call: an exception is logged at DEBUG, and no lock of a
rollout is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from otel_rollout.record.boundary import NOT_SHOWN
from otel_rollout.trajectory import Trajectory

logger = logging.getLogger("otel_rollout")


class Observer:
    """Base class of observers: a method that a subclass does not have is never called.

    rollout: an `ActiveRollout`. call: an `ExchangeRecorder`. State belongs into
    `rollout.observed[self]`, until `rollout_ended`, and `call.observed[self]`.
    """

    def rollout_began(self, rollout: Any) -> None:
        """A rollout, or this process's part of one, began: its span has started."""

    def rollout_ends(self, rollout: Any, attributes: dict[str, Any]) -> None:
        """A rollout ended. attributes: those that its span is to show; add to them."""

    def rollout_ended(self, rollout: Any) -> None:
        """The span of a rollout has ended."""

    def scored(self, rollout: Any, reward: float) -> None:
        """A rollout has this reward at its end, or got it later."""

    def call_begins(self, call: Any) -> None:
        """A model call begins: its span has not started."""

    def call_began(self, call: Any) -> None:
        """A model call began."""

    def requested(self, call: Any, body: bytes, written: Mapping[str, Any]) -> None:
        """A request was sent. body: as it may be recorded. written: its attributes."""

    def replied(self, call: Any, body: bytes, written: Mapping[str, Any]) -> None:
        """A reply has come. body: as it may be recorded. written: attributes of the call's span."""

    def call_ended(self, call: Any, status: str) -> None:
        """A call has ended, and its span with it."""

    def tool_began(self, rollout: Any, call_id: object, name: str, at_ns: int) -> None:
        """The span of a tool was opened by somebody else. call_id: None: not known."""

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
