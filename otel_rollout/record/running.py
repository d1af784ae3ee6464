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
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.attributes import (
    end_attributes,
    evaluation,
    identity,
    message_of,
    missed,
    present,
    sentence,
)
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT
from otel_rollout.record.deferred import settle
from otel_rollout.record.late_rewards import late_reward
from otel_rollout.record.options import Options
from otel_rollout.record.other_spans import OtherSpans, here_and_now
from otel_rollout.record.privacy.secrets import Secrets
from otel_rollout.record.processes.child_reports import CONTINUED, LOST, heard
from otel_rollout.record.side_calls import verdict
from otel_rollout.record.span_names import PART_NAME, Numbering
from otel_rollout.record.state import process_state
from otel_rollout.spans import ExchangeWriter, SpanRecord, with_lengths
from otel_rollout.trajectory import Contents, Conversations, Trajectory, sentences
from otel_rollout.wire import checked_json

logger = logging.getLogger("otel_rollout")

Key = tuple[str, str]
"""Rollout id and process name: together they name a rollout, or a part of one, in a process."""


class Recorder(Protocol):
    """The part of the span processor that a running rollout uses."""

    def conversations(self, key: Key) -> Conversations:
        """The completions of the rollout so far, linked."""

    def export_episode(self, episode: object) -> None:
        """Hand an episode to the exporters that take episodes."""

    def add_spans(self, key: Key, records: Sequence[SpanRecord]) -> None:
        """Take in what other processes recorded of the rollout."""


class Enclosing(Protocol):
    """Something that the rollouts inside it are told to, such as a workflow."""

    def began(self, trajectory: Trajectory) -> None:
        """A rollout has begun."""

    def place(self, trajectory: Trajectory) -> None:
        """The options of a rollout were set: add what they leave open, such as the group."""


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
        enclosing: Enclosing | None = None,
    ) -> None:
        self.tracer = tracer
        self.operation = operation
        """The `gen_ai.operation.name` of its span."""
        self.inside: Enclosing | None = parent.encloses if parent else None
        """What is told of this rollout. None: nothing."""
        self.encloses: Enclosing | None = enclosing or self.inside
        """What is told of the rollouts inside this one; the innermost one counts. None: nothing."""
        if enclosing is not None:
            self.inside = None  # a workflow inside another one is an episode of its own
        self.claims: list[tuple[Trajectory, frozenset[str]]] = []
        """Trajectories that calls of this rollout belong to, with the span ids of those calls."""
        self.further: dict[str, Any] = {}
        """Further attributes that its span ends with."""
        self.ended_early: str | None = None
        """Why it ended before its work was done, without an exception. None: it did not."""
        self.kept_back: dict[str, Any] = {}
        """Attributes that its span would end with if content were exported."""
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
        self.side_call_rules = process_state.settings.side_calls
        """The user's own rules for side calls, which judge its calls when it ends. None: none."""
        self.handed_on = 0
        """How often it was handed on, less how often it was continued in this very process."""
        self.records: list[SpanRecord] = []
        """Of a part: the spans that it recorded, complete once it has ended."""
        self.clock = 0
        """Logical time: the number of calls that have begun."""
        self.open = 0
        """Calls that have begun and not ended."""
        self.providers: set[str | None] = set()
        """Whose APIs were asked, by the conventions' names; None: one that has no name there."""
        self.streams: set[OpenStream] = set()
        """Calls whose replies are being read."""
        self.nested_count = 0
        """Rollouts that began inside it; their calls are their own."""
        self.began_late = 0
        """Calls that began after it had ended."""
        self.uncaptured: Counter[tuple[str, str]] = Counter()
        """How many requests at a model's path were not captured, by library and path."""
        self.outside: Counter[str] = Counter()
        """How many model calls were made outside any rollout while it ran, by place."""
        self.told: str | None = None
        """The file in which processes that began inside it tell it of their calls. None: none
        began."""
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
        self.secrets: Secrets = parent.secrets if parent else Secrets()
        """What clients signed requests with, in it and in those around it: an error passes both."""
        self.span: trace.Span = trace.INVALID_SPAN
        self.id = part_of or os.urandom(16).hex()
        self.key: Key = self.id, self.process
        """Its name among the rollouts of the process."""
        self.others = OtherSpans()
        """The spans of other libraries inside it."""
        self._trajectory: Trajectory | None = Trajectory(
            id=self.id,
            parent_id=parent.id if parent else None,
            status="running",
            source=self,
            sealed=False,
        )
        self._ended = weakref.ref(self._trajectory)
        if parent is not None:
            with parent.lock:
                parent.nested_count += 1
            parent.others.called(*here_and_now())
        self.span_name = PART_NAME
        """Name of its span."""
        self.is_root = parent is None and not self.is_part
        """True if it is in no other rollout."""
        self.parent = parent
        """The rollout around it. None: there is none, or it has ended."""
        self.observed: dict[object, Any] = {}
        """What each observer keeps of it."""
        self.replies = 0
        """Replies that have come."""
        self.inner = Numbering()
        """Tells the rollouts in it apart."""
        self.tools_begun = Numbering()
        """Tells the tools apart that began after the same reply."""
        self._beside = parent.inner if parent else None
        """Tells it apart from the rollouts beside it. None: it is in none."""
        self._named: tuple[str, str | None] | None = None
        """What `span_name` was made of. None: it was not made yet."""
        self.nested: list[Trajectory] | None = parent.nested if parent else None
        """Where the trajectories of rollouts inside it are collected. None: nowhere."""
        if self.nested is not None:
            self.nested.append(self._trajectory)
        if self.inside is not None:
            self.inside.began(self._trajectory)
        self.apply(options)
        if not self.is_part:
            process_state.rollouts[self.id] = self

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
    def trajectory(self) -> Trajectory:
        """The rollout's trajectory; once it has ended, only if somebody still holds it."""
        return self._trajectory or self._ended() or Trajectory(id=self.id, status="unknown")

    def let_go(self) -> None:
        """Release everything once it has ended: a pooled connection keeps its context for long."""
        self._trajectory = self.inside = self.encloses = self.recorder = self.nested = None
        self.claims, self.further = [], {}
        self.parent = None
        if self.clock:  # else it has written nothing
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
        if self.inside is not None:
            self.inside.place(trajectory)
        self._name_span(trajectory)
        trajectory.policy_version = self.policy_version
        trajectory.trainable = options.trainable
        if options.metadata:
            trajectory.metadata.update(options.metadata)
        if self.span.is_recording():
            self.span.update_name(self.span_name)
            self.span.set_attributes(self.start_attributes())

    def _name_span(self, trajectory: Trajectory) -> None:
        self.inner.task_id = trajectory.task_id
        named, task = f"{self.operation} {trajectory.name}", trajectory.task_id
        if self.is_part or self._named == (named, task):
            return
        self._named = named, task
        self.span_name = named if self._beside is None else self._beside.nested(named, task)

    def read(self) -> Contents:
        """The calls that have ended so far."""
        settle()
        if self.recorder is None:
            return Contents()
        return Contents(self.recorder.conversations(self.key))

    def take(self, records: Sequence[SpanRecord]) -> None:
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
            former = sentences.AFTER(count=self.began_late - 1) if self.began_late > 1 else None
            self.trajectory.miss_calls(sentences.AFTER(count=self.began_late), instead_of=former)
            logger.warning(
                "rollout %s has ended, but a model call was made in its context: it is not part "
                "of the trajectory. Await the tasks that a rollout starts.",
                self.id,
            )
            return self.clock

    @guarded("the processes that began inside a rollout could not be heard")
    def hear(self) -> None:
        """Count what the processes that began inside it have told it."""
        with self.lock:
            path, self.told = self.told, None
            if path is not None and self.pid == os.getpid():  # else it is the parent's
                said = heard(path)
                self.handed_on += said.count(CONTINUED)
                self.outside += Counter({"a process of a pool": said.count(LOST)})

    @guarded("the rules for side calls could not be asked: the calls of this rollout do not train")
    def judge(self) -> None:
        """Ask the user's own rules for side calls about its calls: all that count have ended."""
        if self.side_call_rules is not None and self.recorder is not None:
            completions = self.recorder.conversations(self.key).completions
            self.further |= verdict(self.side_call_rules, completions)

    def scrub(self, text: str) -> str:
        """The text of an error as it may be recorded: without keys, and redacted."""
        return process_state.content.recorded(self.secrets.scrub(text))

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
                "message": self.scrub(message_of(error)),
                "traceback": self.scrub("".join(traceback.format_exception(error))),
            }
        elif output is not None:
            try:
                trajectory.output = process_state.content.value(checked_json(output, "output"))
            except ValueError:
                pass  # what a function returns need not be JSON; then the trajectory has none
        attributes: dict[str, Any] = {
            **end_attributes(trajectory),
            # Of several none is the rollout's.
            sc.GEN_AI_PROVIDER_NAME: next(iter(self.providers))
            if len(self.providers) == 1
            else None,
            sc.ROLLOUT_EXCHANGE_COUNT: self.clock,
            sc.ROLLOUT_OPEN_COUNT: self.open,
            sc.ROLLOUT_NESTED_COUNT: self.nested_count,
            sc.ROLLOUT_PROPAGATED: self.handed_on > 0 or None,
            **missed(self.uncaptured, self.outside),
            **self.further,
        }
        content = process_state.content
        whole = present(attributes)
        shown = whole
        if not content.exported:
            shown = content.shown(whole)
            self.kept_back = {key: value for key, value in whole.items() if shown.get(key) != value}
            shown[sc.ROLLOUT_CONTENT] = "none"
        return with_lengths({**self.start_attributes(), **shown})


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
    trajectory = active.trajectory
    trajectory.trace_id = f"{span_context.trace_id:032x}"
    trajectory.span_id = f"{span_context.span_id:016x}"
    trajectory.start_time_ns = getattr(active.span, "start_time", None) or 0
    process_state.observers.notify("rollout_began", active)
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
        process_state.observers.notify("rollout_ended", active)
        active.let_go()


def _close(active: ActiveRollout, output: object, error: BaseException | None) -> None:
    """Seal the trajectory and write its end on the span."""
    if process_state.waiting:
        settle()
    for stream in tuple(active.streams):
        stream.leave()
    span = active.span
    content = process_state.content
    trajectory = active.trajectory
    if content.redact is not None:
        trajectory.rewrite(content.value)
    # Another thread may set a reward just now: from here on it gets a span of its own.
    observers = process_state.observers
    score = partial(observers.notify, "scored", active)
    trajectory.seal(late_reward(active.tracer, trajectory, span.get_span_context(), score))
    if active.told is not None:
        active.hear()
    if active.side_call_rules is not None:
        active.judge()
    with active.lock:
        attributes = active.end(output, error)
        active.running = False
    # First what may be lost: a limit on the number of attributes drops the oldest.
    shown: dict[str, Any] = {}
    observers.notify("rollout_ends", active, shown)
    span.set_attributes(shown | attributes)
    rewards = trajectory.all_rewards.all()
    for each in rewards:
        span.add_event(sc.GEN_AI_EVALUATION_RESULT, content.shown(evaluation(each)))
    reward = trajectory.reward if rewards else None
    if reward is not None and not active.is_part:
        score(reward)
    if process_state.settings.reward_in_name and active.is_root and reward is not None:
        span.update_name(f"{active.span_name} [{reward:.2f}]")
    if error is not None:
        span.set_attribute(sc.ERROR_TYPE, type(error).__qualname__)
        said = sentence(error, content.text(active.scrub(message_of(error))))
        span.set_status(trace.StatusCode.ERROR, said)
    elif active.ended_early is not None:
        span.set_status(trace.StatusCode.ERROR, f"ended early: {active.ended_early}")
