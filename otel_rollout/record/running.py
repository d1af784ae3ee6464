"""The rollout that is running: what the user's view of it, capture and the processor share.

It travels in the OpenTelemetry context, so it follows tasks by itself and threads by
`opentelemetry-instrumentation-threading`. `begin` and `end` never raise: a rollout that cannot be
recorded still runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.rebuild import after_sentence, evaluation_name
from otel_rollout.spans import ExchangeWriter, SpanRecord, carried, label, sealed
from otel_rollout.trajectory import (
    Completion,
    Reward,
    RewardKey,
    Trajectory,
    group_in_workflow,
)
from otel_rollout.wire import Json, checked_json, dumps, loads

logger = logging.getLogger("otel_rollout")

ROLLOUT = otel_context.create_key("otel-rollout-current")
CAPTURE_OFF = otel_context.create_key("otel-rollout-no-capture")
GATHERING = otel_context.create_key("otel-rollout-gathering")
TOKEN_FIELDS = otel_context.create_key("otel-rollout-token-fields")
"""Request fields that ask a server for token ids, or None where they are not asked for."""


# --- where the spans go


class _RecordAnyway(Sampler):
    """The user's sampler, but what it drops is still recorded: training does not sample.

    Such a span is not exported by span exporters; our processor sees it.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        result = self._sampler.should_sample(*args, **kwargs)
        if result.decision is not Decision.DROP:
            return result
        attributes = kwargs.get("attributes", args[4] if len(args) > 4 else None)
        return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)

    def get_description(self) -> str:
        return f"RecordAnyway({self._sampler.get_description()})"


_tracers: weakref.WeakKeyDictionary[trace.TracerProvider, trace.Tracer] = (
    weakref.WeakKeyDictionary()
)
_configured: trace.TracerProvider | None = None


def use_provider(provider: trace.TracerProvider | None) -> None:
    """Open rollout spans on this provider; None goes back to the global one."""
    global _configured
    _configured = provider


def rollout_provider() -> trace.TracerProvider:
    """The provider that rollouts are recorded on."""
    return _configured or trace.get_tracer_provider()


def rollout_tracer() -> trace.Tracer:
    """The tracer of every span that this library opens."""
    provider = rollout_provider()
    tracer = _tracers.get(provider)
    if tracer is None:
        tracer = provider.get_tracer(sc.SCOPE, schema_url="")
        sampler = getattr(tracer, "sampler", None)
        if isinstance(sampler, Sampler) and not isinstance(sampler, _RecordAnyway):
            tracer.sampler = _RecordAnyway(sampler)  # type: ignore[attr-defined]
        if not isinstance(provider, trace.ProxyTracerProvider):
            _tracers[provider] = tracer
    return tracer


# --- one run


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said of a rollout beforehand."""

    name: str | None = None
    task_id: str | int | None = None
    group_id: str | int | None = None
    sample_index: int | None = None
    policy_version: str | int | Callable[[], str | int | None] | None = None
    metadata: Mapping[str, Json] | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        expected: dict[str, tuple[type, ...]] = {
            "name": (str,),
            "task_id": (str, int),
            "group_id": (str, int),
            "sample_index": (int,),
            "policy_version": (str, int),
            "metadata": (Mapping,),
        }
        for option, kinds in expected.items():
            value = getattr(self, option)
            if option == "policy_version" and callable(value):
                continue
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigurationError(f"rollout({option}=...): expected {names}, got {value!r}")
        if not isinstance(self.trainable, bool):
            raise ConfigurationError(
                f"rollout(trainable=...): expected True or False, got {self.trainable!r}"
            )
        if self.metadata is not None:
            checked_json(dict(self.metadata), "rollout(metadata=...)")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """These options. ConfigurationError that lists the ones there are for another."""
        known = [item.name for item in fields(cls)]
        if unknown := options.keys() - set(known):
            raise ConfigurationError(
                f"rollout(): expected the options {', '.join(known)}, "
                f"got {', '.join(sorted(unknown))}"
            )
        return cls(**options)

    def overridden(self, options: Mapping[str, Any]) -> Options:
        """These options, but those that are given; metadata is merged."""
        if self.metadata and options.get("metadata"):
            options = {**options, "metadata": {**self.metadata, **options["metadata"]}}
        return replace(self, **options)


Key = tuple[str, str]
"""What tells apart the rollouts, and parts of rollouts, of a process: rollout id, process name."""


class Recorder(Protocol):
    """The part of the span processor that a running rollout uses."""

    def completions(self, key: Key) -> list[Completion]: ...

    def export_episode(self, episode: object) -> None: ...

    def add_spans(self, key: Key, records: Sequence[SpanRecord]) -> None: ...


class OpenStream(Protocol):
    """A call whose reply is being read when its rollout ends."""

    def leave(self) -> None:
        """Record the call as it stands."""


_waiting: deque[Callable[[], None]] = deque()


def later(step: Callable[[], None]) -> None:
    """Have something done at the next call, or at the next look into a rollout.

    For what the garbage collector may ask for: it runs anywhere, also where a lock is held that
    ending a span takes.
    """
    _waiting.append(step)


def settle() -> None:
    """Do what waits."""
    while _waiting:
        try:
            step = _waiting.popleft()
        except IndexError:
            return  # another thread was faster
        step()


class ActiveRollout:
    """One run, while it runs: what capture and the processor share with the user's view of it.

    In a process that continues a rollout of another one (`part_of`) it is this process's part.
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
        self.workflow: ActiveRollout | None = parent.workflow if parent else None
        """The innermost workflow that it runs in; itself where it is one."""
        self.trajectories: list[Trajectory] = []
        """Of a workflow: those of the rollouts inside it, in order of their start."""
        self.built: dict[str, tuple[Trajectory, frozenset[str]]] = {}
        """Of a workflow: trajectories that agents built by hand, by id, and their exchanges."""
        self.episode: Json = None
        """Of a workflow: what it made of its task."""
        self.pid = os.getpid()
        self.is_part = part_of is not None
        self.lock = threading.RLock()
        self.writer = ExchangeWriter()
        # Two parts that one process has of a rollout have clocks of their own.
        self.process = f"{_process()}-{os.urandom(4).hex()}" if self.is_part else _process()
        self.handed_on = 0
        """How often it was handed on, less how often it was continued in this very process."""
        self.records: list[SpanRecord] = []
        """What a part recorded, once it has ended."""
        self.clock = 0
        """Logical time: the number of calls that have begun."""
        self.open = 0
        """Calls that have begun and not ended."""
        self.streams: set[OpenStream] = set()
        self.began_late = 0
        self.running = True
        self.recorder: Recorder | None = None
        self.begun = False
        """Whether its span has been started."""
        self.recording = False
        """Whether its span is recorded at all: not without an SDK."""
        self.recorded = False
        """Whether a processor took the finished rollout."""
        self.secrets: set[str] = set()
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
            _running[self.id] = self

    @property
    def key(self) -> Key:
        return self.id, self.process

    @property
    def policy_version(self) -> str | int | None:
        """The policy version of a call that is made now."""
        version = self.options.policy_version
        if not callable(version):
            return version
        try:
            found = version()
        except Exception:
            logger.exception("rollout(policy_version=...) failed; the version is not known")
            return None
        return found if isinstance(found, str | int) and not isinstance(found, bool) else None

    @property
    def span_name(self) -> str:
        if self.is_part:
            return sc.OPERATION_CONTINUE
        return f"{self.operation} {self.trajectory.name}"

    @property
    def trajectory(self) -> Trajectory:
        """The rollout's trajectory; once it has ended, only if somebody still holds it."""
        return self._trajectory or self._ended() or Trajectory(id=self.id, status="unknown")

    def let_go(self) -> None:
        """Hold nothing of the rollout, which has ended: contexts live long, in connections say."""
        self._trajectory = self.workflow = None
        self.recorder = None
        self.trajectories, self.built = [], {}
        self.writer = ExchangeWriter()
        self.streams.clear()

    def apply(self, options: Options) -> None:
        """Put the options on the trajectory, and on the span where that has begun."""
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
        settle()
        return self.recorder.completions(self.key) if self.recorder else []

    def add_spans(self, records: Sequence[SpanRecord]) -> None:
        if self.recorder is not None:
            self.recorder.add_spans(self.key, records)

    def begin_call(self) -> int:
        """The logical time at which a call begins now."""
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
        """The text without the keys that the rollout's clients sign their requests with.

        Lone surrogates are escaped: one would cost the whole batch that its span is exported in.
        """
        for secret in self.secrets:
            text = text.replace(secret, "[redacted]")
        return text.encode("utf-8", "backslashreplace").decode()

    def start_attributes(self) -> dict[str, Any]:
        trajectory = self.trajectory
        if self.is_part:
            return {
                sc.ROLLOUT_PART: True,
                sc.ROLLOUT_ID: self.id,
                sc.ROLLOUT_PROCESS: self.process,
            }
        return _present({sc.ROLLOUT_PROCESS: self.process, **_identity(trajectory, self.operation)})

    def end(self, output: object, error: BaseException | None) -> dict[str, Any]:
        """Bring the trajectory to its end; the attributes that say so on the span."""
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
            **_end_attributes(trajectory),
            sc.ROLLOUT_EXCHANGE_COUNT: self.clock,
            sc.ROLLOUT_OPEN_COUNT: self.open,
            sc.ROLLOUT_PROPAGATED: self.handed_on > 0 or None,
            sc.ROLLOUT_EPISODE: None if self.episode is None else dumps(self.episode),
        }
        return sealed({**self.start_attributes(), **_present(attributes)})


def _identity(trajectory: Trajectory, operation: str) -> dict[str, Any]:
    """What a span says of which trajectory it is of."""
    return {
        sc.GEN_AI_OPERATION_NAME: operation,
        sc.GEN_AI_AGENT_NAME: trajectory.name,
        sc.ROLLOUT_SCHEMA_VERSION: sc.SCHEMA_VERSION,
        sc.ROLLOUT_ID: trajectory.id,
        sc.ROLLOUT_PARENT_ID: trajectory.parent_id,
        sc.ROLLOUT_TASK_ID: trajectory.task_id,
        sc.ROLLOUT_GROUP_ID: trajectory.group_id,
        sc.ROLLOUT_SAMPLE_INDEX: trajectory.sample_index,
        **label(sc.ROLLOUT_POLICY_VERSION, trajectory.policy_version),
        sc.ROLLOUT_TRAINABLE: trajectory.trainable,
    }


def _end_attributes(trajectory: Trajectory) -> dict[str, Any]:
    """What a span says of how its trajectory went."""
    texts: dict[str, Json] = {
        sc.ROLLOUT_ERROR: trajectory.error,
        sc.ROLLOUT_OUTPUT: trajectory.output,
        sc.ROLLOUT_REWARDS: [r.to_dict() for r in list(trajectory.all_rewards.values())] or None,
        sc.ROLLOUT_METRICS: dict(trajectory.metrics) or None,
        sc.ROLLOUT_METADATA: dict(trajectory.metadata) or None,
        sc.ROLLOUT_LOGS: trajectory.logs or None,
        sc.ROLLOUT_APPENDED: [[*k, rows] for k, rows in list(trajectory.appended.items())] or None,
    }
    return {
        sc.ROLLOUT_STATUS: trajectory.status,
        sc.ROLLOUT_TERMINATION_REASON: trajectory.termination_reason,
        sc.ROLLOUT_REWARD: None if trajectory.reward is None else float(trajectory.reward),
        **{key: dumps(value) for key, value in texts.items() if value is not None},
    }


class _Built:
    """What a trajectory that was built by hand has, until its workflow ends."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = weakref.ref(trajectory)

    def completions(self) -> list[Completion]:
        trajectory = self._trajectory()
        steps = trajectory.steps if trajectory is not None else []
        return [step.completion for step in steps if step.completion is not None]

    def add_spans(self, records: Sequence[SpanRecord]) -> None:
        """Its calls are those of its steps."""


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
    """Give a trajectory inside a workflow the task of the workflow, and the group of its name."""
    if trajectory.task_id is None:
        trajectory.task_id = workflow.task_id
    if trajectory.group_id is None and workflow.group_id is not None:
        trajectory.group_id = group_in_workflow(workflow.group_id, trajectory.name)
        if workflow.sample_index is not None:
            trajectory.sample_index = workflow.sample_index


def _record_built(workflow: ActiveRollout) -> None:
    """A span for each trajectory that was built by hand, with its steps and the calls it claims."""
    context = trace.set_span_in_context(workflow.span, otel_context.Context())
    for trajectory, _ in list(workflow.built.values()):
        calls = [step.completion for step in trajectory.steps if step.completion is not None]
        claims = sorted({call.span_id for call in calls})
        attributes = {
            **_identity(trajectory, sc.OPERATION_INVOKE_AGENT),
            sc.ROLLOUT_STEPS: dumps([step.to_dict() for step in trajectory.steps]),
            sc.ROLLOUT_CLAIMS: dumps(claims),
            **_end_attributes(trajectory),
        }
        span = workflow.tracer.start_span(
            f"{sc.OPERATION_INVOKE_AGENT} {trajectory.name}",
            context=context,
            attributes=sealed(_present(attributes)),
            start_time=min((call.start_time_ns for call in calls), default=None),
        )
        span_context = span.get_span_context()
        trajectory.span_id = f"{span_context.span_id:016x}"
        trajectory.start_time_ns = getattr(span, "start_time", None) or 0
        span.end()
        trajectory.end_time_ns = getattr(span, "end_time", None)
        trajectory.seal(_late_reward(workflow.tracer, trajectory.id, span_context))
        workflow.built[trajectory.id] = trajectory, frozenset(claims)


def _late_reward(
    tracer: trace.Tracer, rollout_id: str, parent: trace.SpanContext
) -> Callable[[RewardKey, Reward | None], None]:
    """What gives a reward that comes after the rollout a span of its own in the same trace."""
    number = itertools.count()

    def record(key: RewardKey, reward: Reward | None) -> None:
        record_evaluation(tracer, rollout_id, parent, key, reward, next(number))

    return record


def record_evaluation(
    tracer: trace.Tracer,
    rollout_id: str,
    parent: trace.SpanContext | None,
    key: RewardKey,
    reward: Reward | None,
    number: int | None = None,
) -> None:
    """A span for a reward that came after its rollout, or for one that was taken back (None).

    `number` is its place among those that the rollout's own process recorded.
    """
    name, completion_id, choice_index = key
    data: dict[str, Json] = {"name": name, "completion_id": completion_id, "value": None}
    data |= {"choice_index": choice_index} if choice_index else {}
    attributes = {
        sc.ROLLOUT_ID: rollout_id,
        sc.GEN_AI_OPERATION_NAME: sc.OPERATION_EVALUATE,
        sc.REWARD: dumps(data if reward is None else reward.to_dict()),
        sc.REWARD_NUMBER: number,
    }
    span = tracer.start_span(
        evaluation_name(name),
        context=trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent else None,
        attributes=sealed(_present(attributes)),
    )
    if reward is not None:
        span.add_event(sc.GEN_AI_EVALUATION_RESULT, _evaluation(reward))
    span.end()


_process_ids: dict[int, str] = {}


def _process() -> str:
    """A name of this process that no other process has, also not after a fork."""
    pid = os.getpid()
    name = _process_ids.get(pid)
    if name is None:
        name = _process_ids[pid] = f"{pid:x}-{os.urandom(4).hex()}"
    return name


def _evaluation(reward: Reward) -> dict[str, Any]:
    attributes = {
        sc.GEN_AI_EVALUATION_NAME: reward.name or "reward",
        sc.GEN_AI_EVALUATION_SCORE_VALUE: float(reward),
        sc.GEN_AI_EVALUATION_EXPLANATION: reward.explanation,
        sc.GEN_AI_RESPONSE_ID: reward.completion_id,
    }
    return _present(attributes)


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that say something."""
    return {key: carried(value) for key, value in attributes.items() if value is not None}


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


def detach(token: Token[otel_context.Context]) -> None:
    """Leave a context that was attached.

    A coroutine that is closed from outside, or a scope that a framework leaves in another task,
    ends in a context that is not its own: that one stays as it is.
    """
    try:
        token.var.reset(token)  # OpenTelemetry's own logs an error where there is none
    except ValueError:
        pass


@dataclass(slots=True)
class Run:
    """An active rollout and how to leave its context."""

    active: ActiveRollout
    token: Any


def current_rollout() -> ActiveRollout | None:
    """The rollout that a model call made here belongs to; None also under `no_capture()`."""
    context = otel_context.get_current()
    return None if context.get(CAPTURE_OFF) else rollout_of(context)


def rollout_of(context: otel_context.Context | None) -> ActiveRollout | None:
    """The rollout whose span is started in this context."""
    found = (otel_context.get_current() if context is None else context).get(ROLLOUT, _default)
    return _here(found) if isinstance(found, ActiveRollout) else None


# --- other processes

_running: weakref.WeakValueDictionary[str, ActiveRollout] = weakref.WeakValueDictionary()
"""The rollouts of this process by id, as long as anything of them is there."""
_default: ActiveRollout | None = None
"""What this whole process continues, if its environment says so."""
_inherited: dict[tuple[int, int], ActiveRollout | None] = {}
"""Of a forked process: its part of each rollout that it was forked in, by `id` of the parent's."""
_forking = threading.Lock()


def running_rollout(rollout_id: str) -> ActiveRollout | None:
    """The rollout of this process that has this id and has not ended."""
    active = _running.get(rollout_id)
    if active is None or not active.running or active.pid != os.getpid():
        return None
    return active


def use_default(active: ActiveRollout | None) -> None:
    """Make this the rollout of calls whose context has none."""
    global _default
    _default = active


def begin_part(rollout_id: str, options: Options, context: otel_context.Context) -> Run:
    """Open this process's part of a rollout that runs elsewhere."""
    return _open(ActiveRollout(options, rollout_tracer(), None, part_of=rollout_id), context)


def _here(active: ActiveRollout) -> ActiveRollout | None:
    """The rollout as this process knows it: a forked one has a part of its own."""
    if active.pid == os.getpid():
        return active
    name = os.getpid(), id(active)
    with _forking:
        if name not in _inherited:
            _inherited[name] = None if _is_pool_worker() else _fork(active)
        return _inherited[name]


def _fork(active: ActiveRollout) -> ActiveRollout:
    context = otel_context.set_value(ROLLOUT, None)
    options = Options(
        policy_version=active.options.policy_version, trainable=active.trajectory.trainable
    )
    part = ActiveRollout(options, active.tracer, None, part_of=active.id)
    _start_span(part, trace.set_span_in_context(active.span, context))
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes.Finalize(None, _end_fork, args=(part,), exitpriority=100)
    return part


def _end_fork(part: ActiveRollout) -> None:
    """A child of multiprocessing ends without atexit: nothing else would export its spans."""
    close(part)
    flush = getattr(_configured or trace.get_tracer_provider(), "force_flush", None)
    if flush is not None:
        flush()


def _is_pool_worker() -> bool:
    """Whether this process was forked to work for whoever asks, in whatever rollout they are."""
    process = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    target = getattr(process() if process else None, "_target", None)
    if getattr(target, "__module__", None) not in _POOLS:
        return False
    logger.warning(
        "a model call in a process pool was made without a rollout: a worker serves many. Hand "
        "the rollout on with each task: otel_rollout.propagate() where it is submitted, "
        "`with otel_rollout.continue_rollout(carrier):` in the task"
    )
    return True


_POOLS = ("concurrent.futures.process", "multiprocessing.pool")


def _renew_after_fork() -> None:
    global _forking
    _forking = threading.Lock()  # another thread of the parent may have held it
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


@dataclass(slots=True)
class Gathering:
    """Where the next rollout to begin leaves itself for `gather_trajectory`."""

    options: Mapping[str, Any]
    active: ActiveRollout | None = None
    trajectory: Trajectory | None = None


def begin(options: Options, operation: str = sc.OPERATION_INVOKE_AGENT) -> Run | None:
    """Open a rollout and enter its context; None, and a line in the log, if that failed."""
    try:
        context = otel_context.get_current()
        gathering = context.get(GATHERING)
        if isinstance(gathering, Gathering) and gathering.active is None:
            options = options.overridden(gathering.options)
        else:
            gathering = None
        parent = rollout_of(context)
        if parent is None and context.get(ROLLOUT) is not None:  # of the process that forked this
            context = trace.set_span_in_context(trace.INVALID_SPAN, context)
        active = ActiveRollout(options, rollout_tracer(), parent, operation=operation)
        if gathering is not None:
            gathering.active = active
            gathering.trajectory = active.trajectory
        return _open(active, context)
    except Exception:
        logger.exception("a rollout could not be opened; the function runs without one")
        return None


def _open(active: ActiveRollout, context: otel_context.Context) -> Run:
    context = _start_span(active, context)
    return Run(active, otel_context.attach(trace.set_span_in_context(active.span, context)))


def _start_span(active: ActiveRollout, context: otel_context.Context) -> otel_context.Context:
    """Start the span of a rollout, or of a part of one; the context that its calls are made in."""
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


def end(run: Run | None, output: object = None, error: BaseException | None = None) -> None:
    """Leave the rollout's context and hand its trajectory over."""
    if run is None:
        return
    try:
        # Where the function forked, its end in the child is that of the child's part.
        active = _here(run.active)
        if rollout_of(None) is active:
            detach(run.token)
        if active is not None:
            close(active, output, error)
    except Exception:
        logger.exception("a rollout could not be closed cleanly")


def close(active: ActiveRollout, output: object = None, error: BaseException | None = None) -> None:
    """End a rollout, or a part of one; only the first call counts."""
    if not active.running:
        return
    try:
        settle()
        for stream in tuple(active.streams):
            stream.leave()
        _record_built(active)
        # Another thread may set a reward just now: from here on it gets a span of its own.
        active.trajectory.seal(
            _late_reward(active.tracer, active.id, active.span.get_span_context())
        )
        with active.lock:
            attributes = active.end(output, error)
            active.running = False
        span = active.span
        span.set_attributes(attributes)
        for reward in list(active.trajectory.all_rewards.values()):
            span.add_event(sc.GEN_AI_EVALUATION_RESULT, _evaluation(reward))
        if error is not None:
            span.set_attribute(sc.ERROR_TYPE, type(error).__qualname__)
            span.set_status(
                trace.StatusCode.ERROR, active.scrub(f"{type(error).__name__}: {error}")
            )
    except Exception:
        logger.exception("rollout %s could not be closed cleanly", active.id)
    finally:
        active.running = False
        active.span.end()
        active.let_go()
