"""The span of a rollout: `start_span` begins it, `started` reports that, `close` ends it.

Ending never raises: a rollout that cannot be recorded still runs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import semconv as sc
from otel_rollout.record.attributes import end_attributes, evaluation, message_of, missed, sentence
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT
from otel_rollout.record.late_rewards import late_reward
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.time_limits import RolloutTimeoutError
from otel_rollout.spans import label, with_lengths
from otel_rollout.trajectory import Reward
from otel_rollout.wire import checked_json


def start_span(active: ActiveRollout, context: otel_context.Context) -> otel_context.Context:
    """Start the span of a rollout, or of a part of one; returns the context of its calls."""
    context = otel_context.set_value(ROLLOUT, active, context)
    context = otel_context.set_value(CAPTURE_OFF, False, context)
    active.written = active.start_attributes()
    active.span = active.tracer.start_span(
        active.span_name, context=context, attributes=active.written
    )
    active.begun = True
    active.recording = active.span.is_recording()
    span_context = active.span.get_span_context()
    trajectory = active.trajectory
    trajectory.trace_id = f"{span_context.trace_id:032x}"
    trajectory.span_id = f"{span_context.span_id:016x}"
    trajectory.start_time_ns = getattr(active.span, "start_time", None) or 0
    process_state.observers.notify("rollout_began", active)
    return context


def is_start(span: ReadableSpan) -> bool:
    """True for the span of a rollout, not of a part of one, that has just started."""
    written = span.attributes or {}
    return sc.ROLLOUT_SCHEMA_VERSION in written and sc.LENGTHS not in written


def started(span: ReadableSpan) -> ReadableSpan:
    """The span `rollout started` of a rollout whose own span has started; it has ended."""
    own, written = span.context, span.attributes or {}
    attributes: dict[str, Any] = {name: written[name] for name in _IDENTITY if name in written}
    attributes[sc.ROLLOUT_STARTED] = written[sc.ROLLOUT_ID]
    attributes |= {sc.HOST_NAME: _host(), sc.PROCESS_PID: os.getpid()}
    span_id = int.from_bytes(os.urandom(8), "big") or 1
    return ReadableSpan(
        _STARTED_NAME,
        context=own and trace.SpanContext(own.trace_id, span_id, False, own.trace_flags),
        parent=own,
        resource=span.resource,
        attributes=attributes,
        instrumentation_scope=span.instrumentation_scope,
        start_time=span.start_time,
        end_time=span.start_time,
    )


_STARTED_NAME = "rollout started"
_ENDING_SECONDS = 0.5
"""How long a rollout that ends waits for a call that another thread is ending, at most."""
_IDENTITY = (
    *(sc.GEN_AI_AGENT_NAME, sc.ROLLOUT_TASK_ID, sc.ROLLOUT_GROUP_ID, sc.ROLLOUT_GROUP_SIZE),
    *(sc.ROLLOUT_SAMPLE_INDEX, *label(sc.ROLLOUT_POLICY_VERSION, 0)),
    *(sc.ROLLOUT_OUTER_GROUP_ID, sc.ROLLOUT_GROUP_RUN, sc.ROLLOUT_PARENT_ID),
)
"""Attributes of a rollout's own span that are on the one of its start, too."""
_host = cache(socket.gethostname)


def close(active: ActiveRollout, output: object = None, error: BaseException | None = None) -> None:
    """End a rollout, or a part of one; only the first call counts."""
    if not active.running:
        return
    try:
        _close(active, output, error)
    finally:
        active.running = False
        active.span.end()
        process_state.observers.notify("rollout_ended", active)
        active.let_go()


@guarded("a rollout could not be closed cleanly")
def _close(active: ActiveRollout, output: object, error: BaseException | None) -> None:
    """Seal the trajectory and write its end on the span."""
    if isinstance(error, asyncio.CancelledError) and any(is_over() for is_over in active.limits):
        cancelled, error = error, RolloutTimeoutError("a time limit around the rollout was over")
        error.__cause__ = cancelled
    if process_state.waiting:
        process_state.do_waiting()
    if active.streams:
        _leave_streams(active)
    span, observers, trajectory = active.span, process_state.observers, active.trajectory
    if process_state.content.redact is not None:
        trajectory.rewrite(process_state.content.value)
    if active.options.main is not None and trajectory.main_call is None:
        with guarded("rollout(main=...) failed; the main conversation is found by the rules"):
            trajectory.main = active.options.main(trajectory)
    # Another thread may set a reward just now: from here on it gets a span of its own.
    score = partial(observers.notify, "scored", active)
    own = span.get_span_context()
    trajectory.seal(late_reward(active.tracer, trajectory, own, score, active.outer_group_id))
    if active.reports is not None:
        active.count_reports()
    if active.side_call_rules is not None:
        active.judge()
    with active.lock:
        attributes = _end_attributes(active, output, error)
        active.running = False
    # First what may be lost: a limit on the number of attributes drops the oldest.
    shown: dict[str, Any] = {}
    observers.notify("rollout_ends", active, shown)
    span.set_attributes(shown | attributes)
    if getattr(span, "dropped_attributes", 0):
        span.set_attributes(active.written | attributes)
    active.written |= shown | attributes
    if rewards := trajectory.all_rewards.all():
        _write_rewards(active, rewards, score)
    if error is not None:
        span.set_attribute(sc.ERROR_TYPE, type(error).__qualname__)
        text = process_state.content.text(active.scrub(message_of(error)))
        span.set_status(trace.StatusCode.ERROR, sentence(error, text))
    elif active.ended_early is not None:
        span.set_status(trace.StatusCode.ERROR, f"ended early: {active.ended_early}")


def _leave_streams(active: ActiveRollout) -> None:
    """Record the calls whose replies are still read; another thread may be ending one just now."""
    for stream in tuple(active.streams):
        stream.leave()
        last = time.monotonic() + _ENDING_SECONDS
        while stream.finished and stream in active.streams and time.monotonic() < last:
            time.sleep(0.001)


def _write_rewards(
    active: ActiveRollout, rewards: Iterable[Reward], score: Callable[[float], None]
) -> None:
    """Write the rewards as events of the span, and the trajectory's where people look for it."""
    for each in rewards:
        event = process_state.content.shown(evaluation(each))
        active.span.add_event(sc.GEN_AI_EVALUATION_RESULT, event)
    reward = active.trajectory.reward
    if reward is None or active.is_part:
        return
    score(reward)
    if process_state.settings.reward_in_name and active.parent is None:
        active.span.update_name(f"{active.span_name} [{reward:.2f}]")


def _end_attributes(
    active: ActiveRollout, output: object, error: BaseException | None
) -> dict[str, Any]:
    """End the trajectory; the attributes that its span ends with."""
    trajectory = active.trajectory
    trajectory.status, trajectory.termination_reason = _ending(error)
    if error is not None:
        trajectory.error = {
            "type": type(error).__qualname__,
            "message": active.scrub(message_of(error)),
            "traceback": active.scrub("".join(traceback.format_exception(error))),
        }
    elif output is not None:
        try:
            trajectory.output = process_state.content.value(checked_json(output, "output"))
        except ValueError:
            pass  # what a function returns need not be JSON; then the trajectory has none
    attributes: dict[str, Any] = {
        **end_attributes(trajectory),
        sc.ROLLOUT_EXCHANGE_COUNT: active.clock,
        sc.ROLLOUT_OPEN_COUNT: active.open,
        sc.ROLLOUT_NESTED_COUNT: active.nested_count,
        **missed(active.uncaptured, active.outside, active.programs),
        **active.further,
    }
    if active.handed_on > 0:
        attributes[sc.ROLLOUT_PROPAGATED] = True
    content = process_state.content
    shown = whole = attributes
    if not content.exported:
        shown = content.shown(whole)
        active.kept_back = {key: value for key, value in whole.items() if shown.get(key) != value}
        shown[sc.ROLLOUT_CONTENT] = "none"
    # The agent may have changed what the span began with, and a framework the span.
    start = active.written = active.start_attributes()
    there = getattr(active.span, "attributes", None)
    now = there.copy() if there is not None else {}
    changed = {} if start.items() <= now.items() else start
    return with_lengths({**changed, **shown}, start)


def _ending(error: BaseException | None) -> tuple[str, str | None]:
    """The status and termination reason of a rollout that this exception ended."""
    if error is None:
        return "complete", None
    if not isinstance(error, Exception):  # CancelledError, KeyboardInterrupt, SystemExit, ...
        return "cancelled", "cancelled"
    names = {kind.__name__ for kind in type(error).mro()}
    is_late = isinstance(error, TimeoutError | asyncio.TimeoutError) or names & _TIMEOUTS
    return "error", "timeout" if is_late else "error"


_TIMEOUTS = frozenset(("APITimeoutError", "TimeoutException", "Timeout"))
"""Names of the time-outs of openai and anthropic, of httpx, and of requests."""
