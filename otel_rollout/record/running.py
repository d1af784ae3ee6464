"""A rollout that is running: what hooks, recorder and processor share with the user's trajectory.

It begins and ends with its span (`rollout_span`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any, Protocol

from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.attributes import identity
from otel_rollout.record.boundary import guarded
from otel_rollout.record.options import Options
from otel_rollout.record.other_spans import OtherSpans, here_and_now
from otel_rollout.record.privacy.secrets import Secrets
from otel_rollout.record.processes.child_reports import CONTINUED, LOST, read_reports
from otel_rollout.record.settings import verdict
from otel_rollout.record.span_names import PART_NAME, Numbering
from otel_rollout.record.state import process_state
from otel_rollout.record.time_limits import Limits
from otel_rollout.spans import ExchangeWriter, SpanRecord, label, transportable
from otel_rollout.trajectory import Contents, Conversations, Rule, Trajectory, sentences

logger = logging.getLogger("otel_rollout")

Key = tuple[str, str]
"""Rollout id and process name: together they name a rollout, or a part of one, in a process."""


class Recorder(Protocol):
    """The part of the span processor that a running rollout uses."""

    def conversations(self, key: Key) -> Conversations:
        """The completions of the rollout so far, linked."""

    def announce(self, active: ActiveRollout) -> None:
        """Have exporters note that a rollout has begun, or was given other options."""

    def export_episode(self, episode: object) -> None:
        """Hand an episode to the exporters that take episodes."""

    def add_spans(self, key: Key, records: Sequence[SpanRecord]) -> None:
        """Take in what other processes recorded of the rollout."""


class Enclosing(Protocol):
    """Something that the rollouts inside it are reported to, such as a workflow."""

    def began(self, trajectory: Trajectory) -> None:
        """A rollout has begun."""

    def place(self, trajectory: Trajectory) -> None:
        """The options of a rollout were set: add what they leave open, such as the group."""


class OpenStream(Protocol):
    """A call whose reply is being read when its rollout ends."""

    finished: bool
    """True if it has ended, or is about to."""

    def leave(self) -> None:
        """Record the call as it is now."""


class ForPrograms(Protocol):
    """A gateway that records the calls of programs."""

    def environment_of(self, active: ActiveRollout) -> dict[str, str]:
        """Variables with which a program's calls belong to this rollout."""


class ActiveRollout:
    """One run of an agent, while it runs.

    In a process that continues the rollout of another one (`part_of`) it is this process's part.
    """

    tracer: trace.Tracer
    operation: str
    """The `gen_ai.operation.name` of its span."""
    id: str
    process: str
    """Name of the process, for the spans."""
    key: Key
    """Its name among the rollouts of the process."""
    pid: int
    """The process that it was opened in."""
    is_part: bool
    """True if the rollout itself runs in another process."""
    parent: ActiveRollout | None
    """The rollout around it. None: there is none, or it has ended."""
    outer_group_id: str | None
    """The group whose receiver it is sent to, if that is not its `group_id` alone."""
    lock: threading.RLock
    """Held while the clock, the counts or the writer are used."""
    options: Options
    limits: Limits = ()
    """The time limits around it."""

    # Its span and its record.
    span: trace.Span = trace.INVALID_SPAN
    span_name = PART_NAME
    _named: tuple[str, str | None] | None = None
    """What `span_name` was made of. None: it was not made yet."""
    written: dict[str, Any]
    """Attributes that its span began with; once it has ended, all that were written on it."""
    ending: dict[str, Any] | None = None
    """What was written on the span of the call that ended last. None: none has, or it has ended."""
    further: dict[str, Any]
    """Further attributes that its span ends with."""
    kept_back: dict[str, Any]
    """Attributes that its span would end with if content were exported."""
    running = True
    """True if it has not ended."""
    begun = False
    """True if its span has been started."""
    recording = False
    """True if its span is recorded at all: not without an SDK."""
    recorded = False
    """True if a processor took the finished rollout."""
    recorder: Recorder | None = None
    """The span processor that collects its spans. None: none does."""
    records: list[SpanRecord]
    """Of a part: the spans that it recorded, complete once it has ended."""
    ended_early: str | None = None
    """Why it ended before its work was done, without an exception. None: it did not."""
    observed: dict[object, Any]
    """What each observer keeps of it."""

    # Its calls.
    clock = 0
    """Logical time: the number of calls that have begun."""
    open = 0
    """Calls that have begun and not ended."""
    replies = 0
    """Replies that have come."""
    began_late = 0
    """Calls that began after it had ended."""
    _writer: ExchangeWriter | None = None
    streams: set[OpenStream]
    """Calls whose replies are being read."""
    secrets: Secrets
    """What clients signed requests with, in it and in those around it: an error passes both."""
    others: OtherSpans
    """The spans of other libraries inside it."""
    uncaptured: dict[tuple[str, str], int]
    """How many requests at a model's path were not captured, by library and path."""
    outside: dict[str, int]
    """How many model calls were made outside any rollout while it ran, by place."""
    programs: dict[tuple[str, str], int] | None = None
    """How many programs it started whose calls are not captured, by name and whether they were
    given a model server (`semconv.GIVEN`, or ""). None: none."""
    side_call_rules: tuple[Rule, ...] | None
    """The user's own rules for side calls, which judge its calls when it ends. None: none."""
    # The rollouts inside it and around it, and its parts in other processes.
    inner: Numbering
    """Numbers the rollouts in it."""
    nested_count = 0
    """Rollouts that began inside it; their calls are their own."""
    nested: list[Trajectory] | None
    """Where the trajectories of rollouts inside it are collected. None: nowhere."""
    inside: Enclosing | None
    """The workflow that this rollout is reported to. None: none."""
    versioned: ActiveRollout
    """It, or the one around it whose policy version it has."""
    encloses: Enclosing | None
    """The workflow that the rollouts inside this one are reported to: the innermost. None: none."""
    claims: list[tuple[Trajectory, frozenset[str]]]
    """Trajectories that calls of this rollout belong to, with the span ids of those calls."""
    generator: FrameType | None = None
    """The generator that it was entered in. None: it was entered in none."""
    before: Any = None
    """The context that it was entered in, if that was in a generator; else None."""
    handed_on = 0
    """How often it was handed on, less how often it was continued in this very process."""
    gateway: ForPrograms | None = None
    """Records the calls of the programs that it starts. None: they are not captured."""
    reports: str | None = None
    """The file through which processes that began inside it report. None: none began."""

    def __init__(
        self,
        options: Options,
        tracer: trace.Tracer,
        parent: ActiveRollout | None,
        *,
        part_of: str | None = None,
        outer_group_id: str | None = None,
        operation: str = sc.OPERATION_INVOKE_AGENT,
        enclosing: Enclosing | None = None,
    ) -> None:
        self.tracer, self.operation, self.parent = tracer, operation, parent
        self.pid, self.is_part, self.lock = os.getpid(), part_of is not None, threading.RLock()
        self.id = part_of or os.urandom(16).hex()
        # Two parts that one process has of a rollout have clocks of their own.
        self.process = process_state.name + (f"-{os.urandom(4).hex()}" if self.is_part else "")
        self.key = self.id, self.process
        self.written, self.further, self.kept_back, self.observed = {}, {}, {}, {}
        self.records, self.claims = [], []
        self.streams = set()
        self.uncaptured, self.outside = defaultdict(int), defaultdict(int)
        self.secrets = parent.secrets if parent else Secrets()
        self.others, self.inner = OtherSpans(), Numbering()
        self.side_call_rules = process_state.settings.side_calls
        self.nested = parent.nested if parent else None
        self.gateway = parent.gateway if parent else None
        around = parent.encloses if parent else None
        # A workflow inside another one is an episode of its own.
        self.inside = around if enclosing is None else None
        self.encloses = enclosing or around
        self.options, self.outer_group_id = options, outer_group_id
        self.versioned = self
        if parent is not None:
            self._inherit(parent)
        self._trajectory: Trajectory | None = Trajectory(
            id=self.id,
            parent_id=parent.id if parent else None,
            status="running",
            source=self,
            sealed=False,
            **self._facts(),
        )
        self._ended = weakref.ref(self._trajectory)
        if parent is not None:
            with parent.lock:
                parent.nested_count += 1
            parent.others.called(*here_and_now())
        if self.nested is not None:
            self.nested.append(self._trajectory)
        if self.inside is not None:
            self.inside.began(self._trajectory)
        self._place(self._trajectory)
        if not self.is_part:
            process_state.rollouts[self.id] = self

    @cached_property
    def tools_begun(self) -> Numbering:
        """Numbers the tools that began after the same reply."""
        return Numbering()

    @property
    def writer(self) -> ExchangeWriter:
        """Writes its calls on spans; made when one is made. Hold the lock while it is used."""
        if self._writer is None:
            self._writer = ExchangeWriter()
        return self._writer

    @property
    def policy_version(self) -> str | int | None:
        """The policy version of a call that is made now. None: not known."""
        version = self.versioned.options.policy_version
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

    @property
    def group_of_inner(self) -> str | None:
        """The group that rollouts inside it are sent with, where they have none. None: none."""
        return self.outer_group_id or self.options.group_key

    def _inherit(self, parent: ActiveRollout | None) -> None:
        """Find the group that it is sent with. All of a workflow's run is sent to one place."""
        if parent is not None:
            self.versioned = parent.versioned if self.options.policy_version is None else self
        is_of_run = self.options.group_id is None or self.inside is not None
        self.outer_group_id = parent.group_of_inner if parent and is_of_run else None

    def let_go(self) -> None:
        """Release everything once it has ended: a pooled connection keeps its context for long."""
        self.versioned = self
        self._trajectory = self.inside = self.encloses = self.recorder = self.nested = None
        self.claims, self.further = [], {}
        self.parent = self.gateway = self.generator = None
        self._writer = self.ending = None
        self.streams.clear()

    def apply(self, options: Options) -> None:
        """Put other options on the trajectory, and on the span."""
        self.options, trajectory = options, self.trajectory
        self._inherit(self.parent)
        for name, value in self._facts().items():
            setattr(trajectory, name, value)
        self._place(trajectory)
        if self.span.is_recording():
            self.span.update_name(self.span_name)
            self.written = self.start_attributes()
            self.span.set_attributes(self.written)
        if self.recorder is not None:
            self.recorder.announce(self)

    def _facts(self) -> dict[str, Any]:
        """Fields of the trajectory, as the options have them."""
        options, task_id = self.options, self.options.task_id
        if task_id is None and self.parent is not None:
            task_id = self.parent.trajectory.task_id
        return {
            "name": options.name or "",
            "task_id": None if task_id is None else str(task_id),
            "group_id": None if options.group_id is None else str(options.group_id),
            "group_run": None if options.group_run is None else str(options.group_run),
            "sample_index": options.sample_index,
            "group_size": options.group_size,
            "policy_version": self.policy_version,
            "trainable": options.trainable,
        }

    def _place(self, trajectory: Trajectory) -> None:
        if self.outer_group_id is None and self.options.group_run is not None:
            self.outer_group_id = self.options.group_key
        if self.inside is not None:
            self.inside.place(trajectory)
        if self.options.metadata:
            trajectory.metadata.update(self.options.metadata)
        self._name_span(trajectory)

    def _name_span(self, trajectory: Trajectory) -> None:
        self.inner.task_id = trajectory.task_id
        named, task = f"{self.operation} {trajectory.name}", trajectory.task_id
        if self.is_part or self._named == (named, task):
            return
        self._named = named, task
        self.span_name = named if self.parent is None else self.parent.inner.nested(named, task)

    def read(self) -> Contents:
        """The calls that have ended so far."""
        process_state.do_waiting()
        if self.recorder is None:
            return Contents()
        conversations = self.recorder.conversations(self.key)
        return Contents(lambda: conversations)

    def take(self, records: Sequence[SpanRecord]) -> None:
        """Take in spans that other processes recorded of it."""
        if self.recorder is not None:
            self.recorder.add_spans(self.key, records)

    def begin_call(self, path: str) -> dict[str, Any]:
        """Count a call that begins now at this path; the attributes that its span begins with."""
        with self.lock:
            self.clock += 1
            began = self.clock
            if self.running:
                self.open += 1
            else:
                self._began_late()
        attributes: dict[str, Any] = {
            sc.EXCHANGE_VERSION: sc.SCHEMA_VERSION,
            sc.ROLLOUT_ID: self.id,
            sc.EXCHANGE_PROCESS: self.process,
            sc.EXCHANGE_STARTED: began,
            sc.REQUEST_PATH: path,
        }
        if self.versioned.options.policy_version is not None:
            attributes |= label(sc.EXCHANGE_POLICY_VERSION, self.policy_version)
        if (name := process_state.settings.policy_model) is not None:
            attributes[sc.EXCHANGE_POLICY_MODEL] = name
        if (name := process_state.settings.logprobs_mode) is not None:
            attributes[sc.EXCHANGE_LOGPROBS_MODE] = name
        if self.side_call_rules is not None and self.recorder is not None:
            attributes[sc.EXCHANGE_JUDGED] = True
        trajectory = self.trajectory
        if trajectory.group_id is not None or self.outer_group_id is not None:
            attributes |= self._in_group()  # the rollout's own span may be lost
        if not trajectory.trainable:
            attributes[sc.ROLLOUT_TRAINABLE] = False
        return attributes

    def last_version(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the policy version at the end of a call; {} if it is that of its beginning.

        written: the attributes that `begin_call` gave.
        """
        version = self.policy_version
        first = label(sc.EXCHANGE_POLICY_VERSION, version)
        if all(written.get(name) == value for name, value in first.items()):
            return {}
        return label(sc.EXCHANGE_LAST_POLICY_VERSION, version)

    def _in_group(self) -> dict[str, Any]:
        """Attributes of the groups that its calls are of, and of the size; {} without a group."""
        found: dict[str, Any] = {sc.ROLLOUT_OUTER_GROUP_ID: self.outer_group_id}
        if (group_id := self.trajectory.group_id) is not None:
            found[sc.ROLLOUT_GROUP_ID] = group_id
            found[sc.ROLLOUT_GROUP_RUN] = self.trajectory.group_run
            found[sc.ROLLOUT_GROUP_SIZE] = self.trajectory.group_size
        return {name: transportable(value) for name, value in found.items() if value is not None}

    def _began_late(self) -> None:
        """A call began after the end."""
        self.began_late += 1
        former = sentences.AFTER(count=self.began_late - 1) if self.began_late > 1 else None
        self.trajectory.miss_calls(sentences.AFTER(count=self.began_late), instead_of=former)
        logger.warning(
            "rollout %s has ended, but a model call was made in its context: it is not part "
            "of the trajectory. Await the tasks that a rollout starts.",
            self.id,
        )

    @guarded("reports of the processes that began inside a rollout could not be read")
    def count_reports(self) -> None:
        """Count the reports of the processes that began inside it."""
        with self.lock:
            path, self.reports = self.reports, None
            if path is not None and self.pid == os.getpid():  # else it is the parent's
                came = read_reports(path)
                self.handed_on += came.count(CONTINUED)
                if lost := came.count(LOST):
                    self.outside["a process of a pool"] += lost

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
            part = {sc.ROLLOUT_PART: True, sc.ROLLOUT_ID: self.id}
            return {**part, sc.ROLLOUT_PROCESS: self.process, **self._in_group()}
        about = identity(trajectory, self.operation, self.outer_group_id)
        return {sc.ROLLOUT_PROCESS: self.process, **about}
