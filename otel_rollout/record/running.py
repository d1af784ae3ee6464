"""A rollout that is running: what hooks, recorder and processor share with the user's trajectory.

It begins with a span and ends with it (`start_span`, `close`). Ending never raises: a rollout that
cannot be recorded still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.rebuild import after_sentence
from otel_rollout.record.attributes import end_attributes, evaluation, identity, present
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT
from otel_rollout.record.deferred import settle
from otel_rollout.record.late_rewards import late_reward
from otel_rollout.record.options import Options
from otel_rollout.record.secrets import scrub
from otel_rollout.record.state import process_state
from otel_rollout.spans import ExchangeWriter, SpanRecord, sealed
from otel_rollout.trajectory import Completion, Trajectory
from otel_rollout.wire import Json, dumps, loads

logger = logging.getLogger("otel_rollout")

Key = tuple[str, str]
"""Rollout id and process name: together they name a rollout, or a part of one, in a process."""


class Recorder(Protocol):
    """The part of the span processor that a running rollout uses."""

    def completions(self, key: Key) -> list[Completion]: ...

    def export_episode(self, episode: object) -> None: ...

    def add_spans(self, key: Key, records: Sequence[SpanRecord]) -> None: ...


class OpenStream(Protocol):
    """A call whose reply is being read when its rollout ends."""

    def leave(self) -> None:
        """Record the call as it stands."""


class ActiveRollout:
    """One run of an agent, while it runs.

    In a process that continues the rollout of another one (`part_of`) it is this process's part.
    """

    def __init__(
        self,
        options: Options,
        tracer: trace.Tracer,
        parent: ActiveRollout | None,
        *,
        part_of: str | None = None,
        operation: str = sc.OPERATION_INVOKE_AGENT,
    ) -> None:
        self.tracer = tracer
        self.operation = operation
        """The `gen_ai.operation.name` of its span."""
        self.workflow: ActiveRollout | None = parent.workflow if parent else None
        """The innermost workflow that it runs in; itself where it is one. None: in no workflow."""
        self.trajectories: list[Trajectory] = []
        """Of a workflow: those of the rollouts inside it, in order of their start."""
        self.built: dict[str, tuple[Trajectory, frozenset[str]]] = {}
        """Of a workflow: trajectories that agents built by hand, by id, and the span ids of their
        exchanges."""
        self.episode: Json = None
        """Of a workflow: its episode, without the trajectories."""
        self.pid = os.getpid()
        """The process that it was opened in."""
        self.is_part = part_of is not None
        """True if the rollout itself runs in another process."""
        self.lock = threading.RLock()
        """Held while the clock, the counts or the writer are used."""
        self.writer = ExchangeWriter()
        # Two parts that one process has of a rollout have clocks of their own.
        self.process = process_state.name + (f"-{os.urandom(4).hex()}" if self.is_part else "")
        """Name of the process, for the spans."""
        self.handed_on = 0
        """How often it was handed on, less how often it was continued in this very process."""
        self.records: list[SpanRecord] = []
        """Of a part: the spans that it recorded, complete once it has ended."""
        self.clock = 0
        """Logical time: the number of calls that have begun."""
        self.open = 0
        """Calls that have begun and not ended."""
        self.streams: set[OpenStream] = set()
        """Calls whose replies are being read."""
        self.began_late = 0
        """Calls that began after it had ended."""
        self.running = True
        """True if it has not ended."""
        self.recorder: Recorder | None = None
        """The span processor that collects its spans. None: none does."""
        self.begun = False
        """True if its span has been started."""
        self.recording = False
        """True if its span is recorded at all: not without an SDK."""
        self.recorded = False
        """True if a processor took the finished rollout."""
        self.secrets: set[str] = set()
        """Keys that its clients signed requests with, as far as an error made them known."""
        self.span: trace.Span = trace.INVALID_SPAN
        self.id = part_of or os.urandom(16).hex()
        self._trajectory: Trajectory | None = Trajectory(
            id=self.id,
            parent_id=parent.id if parent else None,
            status="running",
            live=self,
        )
        self._ended = weakref.ref(self._trajectory)
        if operation == sc.OPERATION_INVOKE_WORKFLOW:
            self.workflow = self  # its episode is its own, also inside another workflow
        elif self.workflow is not None and not self.is_part:
            self.workflow.trajectories.append(self._trajectory)
        self.apply(options)
        if not self.is_part:
            process_state.rollouts[self.id] = self

    @property
    def key(self) -> Key:
        """Its name among the rollouts of the process."""
        return self.id, self.process

    @property
    def policy_version(self) -> str | int | None:
        """The policy version of a call that is made now. None: not known."""
        version = self.options.policy_version
        if not callable(version):
            return version
        with guarded("rollout(policy_version=...) failed; the version is not known"):
            found = version()
            return found if isinstance(found, str | int) and not isinstance(found, bool) else None
        return None

    @property
    def span_name(self) -> str:
        """Name of its span."""
        if self.is_part:
            return sc.OPERATION_CONTINUE
        return f"{self.operation} {self.trajectory.name}"

    @property
    def trajectory(self) -> Trajectory:
        """The rollout's trajectory; once it has ended, only if somebody still holds it."""
        return self._trajectory or self._ended() or Trajectory(id=self.id, status="unknown")

    def let_go(self) -> None:
        """Release everything once it has ended: a pooled connection keeps its context for long."""
        self._trajectory = self.workflow = None
        self.recorder = None
        self.trajectories, self.built = [], {}
        self.writer = ExchangeWriter()
        self.streams.clear()

    def apply(self, options: Options) -> None:
        """Put the options on the trajectory, and on the span if that has begun."""
        self.options = options
        trajectory = self.trajectory
        trajectory.name = options.name or ""
        trajectory.task_id = None if options.task_id is None else str(options.task_id)
        trajectory.group_id = None if options.group_id is None else str(options.group_id)
        trajectory.sample_index = options.sample_index
        if self.workflow is not None and self.workflow is not self:
            _place(trajectory, self.workflow.trajectory)
        trajectory.policy_version = self.policy_version
        trajectory.trainable = options.trainable
        if options.metadata:
            trajectory.metadata.update(options.metadata)
        if self.span.is_recording():
            self.span.update_name(self.span_name)
            self.span.set_attributes(self.start_attributes())

    def completions(self) -> list[Completion]:
        """The completions recorded so far."""
        settle()
        return self.recorder.completions(self.key) if self.recorder else []

    def add_spans(self, records: Sequence[SpanRecord]) -> None:
        """Take in spans that other processes recorded of it."""
        if self.recorder is not None:
            self.recorder.add_spans(self.key, records)

    def begin_call(self) -> int:
        """Count a call that begins now; the logical time of its beginning."""
        with self.lock:
            self.clock += 1
            if self.running:
                self.open += 1
                return self.clock
            self.began_late += 1
            warnings = self.trajectory.warnings
            if self.began_late > 1 and warnings:
                warnings.remove(after_sentence(self.began_late - 1))
            warnings.append(after_sentence(self.began_late))
            logger.warning(
                "rollout %s has ended, but a model call was made in its context: it is not part "
                "of the trajectory. Await the tasks that a rollout starts.",
                self.id,
            )
            return self.clock

    def scrub(self, text: str) -> str:
        """The text without the keys that its clients sign their requests with."""
        return scrub(text, self.secrets)

    def start_attributes(self) -> dict[str, Any]:
        """Attributes that its span begins with."""
        trajectory = self.trajectory
        if self.is_part:
            return {
                sc.ROLLOUT_PART: True,
                sc.ROLLOUT_ID: self.id,
                sc.ROLLOUT_PROCESS: self.process,
            }
        return present({sc.ROLLOUT_PROCESS: self.process, **identity(trajectory, self.operation)})

    def end(self, output: object, error: BaseException | None) -> dict[str, Any]:
        """End the trajectory; the attributes that its span ends with."""
        trajectory = self.trajectory
        trajectory.status, trajectory.termination_reason = _ending(error)
        if error is not None:
            trajectory.error = {
                "type": type(error).__qualname__,
                "message": self.scrub(str(error)),
                "traceback": self.scrub("".join(traceback.format_exception(error))),
            }
        elif output is not None:
            try:
                trajectory.output = loads(dumps(output))
            except (TypeError, ValueError, RecursionError):
                pass  # what a function returns need not be JSON; then the trajectory has none
        attributes: dict[str, Any] = {
            **end_attributes(trajectory),
            sc.ROLLOUT_EXCHANGE_COUNT: self.clock,
            sc.ROLLOUT_OPEN_COUNT: self.open,
            sc.ROLLOUT_PROPAGATED: self.handed_on > 0 or None,
            sc.ROLLOUT_EPISODE: None if self.episode is None else dumps(self.episode),
        }
        return sealed({**self.start_attributes(), **present(attributes)})


def _ending(error: BaseException | None) -> tuple[str, str | None]:
    """The status and termination reason of a rollout that this exception ended."""
    if error is None:
        return "complete", None
    if not isinstance(error, Exception):  # CancelledError, KeyboardInterrupt, SystemExit, ...
        return "cancelled", "cancelled"
    timeouts = (TimeoutError, asyncio.TimeoutError)
    if isinstance(error, timeouts) or "APITimeoutError" in {t.__name__ for t in type(error).mro()}:
        return "error", "timeout"
    return "error", "error"


def start_span(active: ActiveRollout, context: otel_context.Context) -> otel_context.Context:
    """Start the span of a rollout, or of a part of one; returns the context of its calls."""
    context = otel_context.set_value(ROLLOUT, active, context)
    context = otel_context.set_value(CAPTURE_OFF, False, context)
    active.span = active.tracer.start_span(
        active.span_name, context=context, attributes=active.start_attributes()
    )
    active.begun = True
    active.recording = active.span.is_recording()
    span_context = active.span.get_span_context()
    active.trajectory.trace_id = f"{span_context.trace_id:032x}"
    active.trajectory.span_id = f"{span_context.span_id:016x}"
    active.trajectory.start_time_ns = getattr(active.span, "start_time", None) or 0
    return context


def close(active: ActiveRollout, output: object = None, error: BaseException | None = None) -> None:
    """End a rollout, or a part of one; only the first call counts."""
    if not active.running:
        return
    try:
        with guarded("rollout %s could not be closed cleanly", active.id):
            _close(active, output, error)
    finally:
        active.running = False
        active.span.end()
        active.let_go()


def _close(active: ActiveRollout, output: object, error: BaseException | None) -> None:
    """Seal the trajectory and write its end on the span."""
    settle()
    for stream in tuple(active.streams):
        stream.leave()
    _record_built(active)
    span = active.span
    # Another thread may set a reward just now: from here on it gets a span of its own.
    active.trajectory.seal(late_reward(active.tracer, active.id, span.get_span_context()))
    with active.lock:
        attributes = active.end(output, error)
        active.running = False
    span.set_attributes(attributes)
    for reward in list(active.trajectory.all_rewards.values()):
        span.add_event(sc.GEN_AI_EVALUATION_RESULT, evaluation(reward))
    if error is not None:
        message = active.scrub(f"{type(error).__name__}: {error}")
        span.set_attribute(sc.ERROR_TYPE, type(error).__qualname__)
        span.set_status(trace.StatusCode.ERROR, message)


# --- trajectories that a workflow's agents build by hand


class _Built:
    """The completions of a trajectory that was built by hand, while its workflow runs."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = weakref.ref(trajectory)

    def completions(self) -> list[Completion]:
        trajectory = self._trajectory()
        steps = trajectory.steps if trajectory is not None else []
        return [step.completion for step in steps if step.completion is not None]

    def add_spans(self, records: Sequence[SpanRecord]) -> None:
        """Take in nothing: its calls are those of its steps."""


def adopt(workflow: ActiveRollout, trajectory: Trajectory) -> None:
    """Make a trajectory that was built by hand one of the workflow's."""
    own = workflow.trajectory
    trajectory.open(_Built(trajectory))
    trajectory.parent_id, trajectory.trace_id = workflow.id, own.trace_id
    trajectory.policy_version = own.policy_version
    _place(trajectory, own)
    trajectory.trainable = trajectory.trainable and own.trainable
    workflow.built[trajectory.id] = trajectory, frozenset()


def _place(trajectory: Trajectory, workflow: Trajectory) -> None:
    """Give a trajectory its workflow's task, and the group of those of its name on that task."""
    if trajectory.task_id is None:
        trajectory.task_id = workflow.task_id
    if trajectory.group_id is None and workflow.group_id is not None:
        trajectory.group_id = f"{workflow.group_id}:{trajectory.name}"
        trajectory.sample_index = workflow.sample_index


def _record_built(workflow: ActiveRollout) -> None:
    """Record each trajectory that was built by hand as a span, with its steps and their calls."""
    context = trace.set_span_in_context(workflow.span, otel_context.Context())
    for trajectory, _ in list(workflow.built.values()):
        calls = [step.completion for step in trajectory.steps if step.completion is not None]
        claims = sorted({call.span_id for call in calls})
        attributes = {
            **identity(trajectory, sc.OPERATION_INVOKE_AGENT),
            sc.ROLLOUT_STEPS: dumps([step.to_dict() for step in trajectory.steps]),
            sc.ROLLOUT_CLAIMS: dumps(claims),
            **end_attributes(trajectory),
        }
        span = workflow.tracer.start_span(
            f"{sc.OPERATION_INVOKE_AGENT} {trajectory.name}",
            context=context,
            attributes=sealed(present(attributes)),
            start_time=min((call.start_time_ns for call in calls), default=None),
        )
        span_context = span.get_span_context()
        trajectory.span_id = f"{span_context.span_id:016x}"
        trajectory.start_time_ns = getattr(span, "start_time", None) or 0
        span.end()
        trajectory.end_time_ns = getattr(span, "end_time", None)
        trajectory.seal(late_reward(workflow.tracer, trajectory.id, span_context))
        workflow.built[trajectory.id] = trajectory, frozenset(claims)
