"""The rollout that is current: entered by `begin`, left by `end`, found by `rollout_of`.

Neither `begin` nor `end` raises: a rollout that cannot be recorded still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextvars import Token
from dataclasses import dataclass
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, GATHERING, ROLLOUT, detach, is_outside
from otel_rollout.record.options import Options
from otel_rollout.record.processes.carrier import Carried, within
from otel_rollout.record.processes.children import here, inherited
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.rollout_span import close, start_span
from otel_rollout.record.running import ActiveRollout, Enclosing
from otel_rollout.record.state import process_state
from otel_rollout.record.time_limits import limits_here
from otel_rollout.trajectory import Trajectory

logger = logging.getLogger("otel_rollout")


@dataclass(slots=True)
class Run:
    """A rollout whose context was entered, here and now."""

    active: ActiveRollout
    token: Token[otel_context.Context]
    """How to leave the context."""


@dataclass(slots=True)
class Gathering:
    """The request of a `gather_trajectory` to the next rollout that begins: options, and back."""

    options: Mapping[str, Any]
    """Options that override the rollout's own."""
    active: ActiveRollout | None = None
    """The rollout that took the request. None: none has yet."""
    trajectory: Trajectory | None = None
    """Its trajectory; `gather_trajectory` takes it out again."""
    nested: list[Trajectory] | None = None
    """Where the trajectories of rollouts inside it are collected. None: nowhere."""

    def take(self, active: ActiveRollout) -> None:
        """Answer the request with this rollout."""
        self.active, self.trajectory = active, active.trajectory
        active.nested = self.nested


def waiting_gathering(context: otel_context.Context) -> Gathering | None:
    """The request in this context that no rollout has taken yet."""
    found = context.get(GATHERING)
    return found if isinstance(found, Gathering) and found.active is None else None


@guarded("a rollout could not be opened; the function runs without one")
def begin(
    options: Options, operation: str = sc.OPERATION_INVOKE_AGENT, enclosing: Enclosing | None = None
) -> Run | None:
    """Open a rollout and enter its context; None, and an error in the log, if that failed.

    enclosing: what the rollouts inside it are reported to.
    """
    context = otel_context.get_current()
    gathering = waiting_gathering(context) if GATHERING in context else None
    if gathering is not None:
        options = options.overridden(gathering.options)
    parent = rollout_of(context)
    if parent is None and context.get(ROLLOUT) is not None:  # of the process that forked this
        context = trace.set_span_in_context(trace.INVALID_SPAN, context)
    active = ActiveRollout(
        options, rollout_tracer(), parent, operation=operation, enclosing=enclosing
    )
    if asyncio._get_running_loop() is not None:
        active.limits = limits_here()
    if gathering is not None:
        gathering.take(active)
    if options.gateway:
        _serve(active, options.upstream)
    run = _enter(active, context)
    if active.recorder is None:
        _warn_unrecorded(active)
    return run


@guarded("no gateway could be started: calls of programs that a rollout starts are not captured")
def _serve(active: ActiveRollout, upstream: str | None) -> None:
    """Let the programs that a rollout starts ask the gateway of this process."""
    if process_state.gateway_here is not None:
        active.gateway = process_state.gateway_here(upstream)


def _warn_unrecorded(active: ActiveRollout) -> None:
    """Log, once in a process, that no processor took a rollout and `configure` was not called."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if process_state.warned_unrecorded or disabled:
        return
    process_state.warned_unrecorded = True
    logger.warning(
        "rollout %r runs, and nothing records it: there will be no trajectory. Call "
        "otel_rollout.configure() once, at start-up, before the first rollout (or add a "
        "TrajectorySpanProcessor to your tracer provider). OTEL_SDK_DISABLED=true says that none "
        "is wanted. Further rollouts are not logged.",
        active.options.name,
    )


def begin_part(carried: Carried, context: otel_context.Context) -> Run:
    """Open this process's part of a rollout that runs in another one, and enter its context."""
    return _enter(carried.part(), context)


def _enter(active: ActiveRollout, context: otel_context.Context) -> Run:
    context = start_span(active, context)
    context = trace.set_span_in_context(active.span, context)
    return Run(active, otel_context.attach(within(active, context)))


@guarded("a rollout could not be closed cleanly")
def end(run: Run | None, output: object = None, error: BaseException | None = None) -> None:
    """Leave the rollout's context and end the rollout. None: it could not be opened.

    After a fork, the child ends its own part, not the parent's rollout.
    """
    if run is None:
        return
    active = here(run.active)
    if rollout_of(None) is active:
        detach(run.token)
        if run.token.old_value not in (run.token.MISSING, {}):
            _leave_ended()
    if active is not None:
        close(active, output, error)


def _leave_ended() -> None:
    """Leave contexts of rollouts in generators that took turns with one, and ended before it."""
    while isinstance(left := otel_context.get_current().get(ROLLOUT), ActiveRollout):
        if left.before is None or left.running:
            return
        otel_context.attach(left.before)


def current_rollout() -> ActiveRollout | None:
    """The rollout that a model call made here belongs to; None also under `no_capture()`."""
    context = otel_context.get_current()
    return None if context.get(CAPTURE_OFF) else rollout_of(context)


def capture_is_off() -> bool:
    """True under `no_capture()`."""
    return bool(otel_context.get_current().get(CAPTURE_OFF))


def rollout_of(context: otel_context.Context | None) -> ActiveRollout | None:
    """The rollout of this context (None: the current one), else the process's default."""
    context = otel_context.get_current() if context is None else context
    found = context.get(ROLLOUT, process_state.default)
    if isinstance(found, ActiveRollout):
        if found.generator is not None and (found := _read_in(found)) is None:
            return None
        return found if found.pid == os.getpid() else here(found)
    return None if ROLLOUT in context else inherited()


def _read_in(active: ActiveRollout | None) -> ActiveRollout | None:
    """The rollout of the code here, which may be what reads the generator of this one."""
    while active is not None and active.generator is not None and is_outside(active.generator):
        active = active.parent
    return active


def running_rollout(rollout_id: str) -> ActiveRollout | None:
    """The rollout of this process that has this id and has not ended."""
    found = process_state.rollouts.get(rollout_id)
    active = found if isinstance(found, ActiveRollout) else None
    if active is None or not active.running or active.pid != os.getpid():
        return None
    return active
