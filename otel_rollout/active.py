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
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from otel_rollout import semconv as sc
from otel_rollout.completion import Completion, Reward, RewardKey
from otel_rollout.errors import ConfigurationError
from otel_rollout.exchange import ExchangeWriter
from otel_rollout.messages import Json, checked_json, dumps, loads
from otel_rollout.reconstruct import after_sentence
from otel_rollout.trajectory import Trajectory

logger = logging.getLogger("otel_rollout")

ROLLOUT = otel_context.create_key("otel-rollout-current")
CAPTURE_OFF = otel_context.create_key("otel-rollout-no-capture")
GATHERING = otel_context.create_key("otel-rollout-gathering")


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


def rollout_tracer() -> trace.Tracer:
    """The tracer of every span that this library opens."""
    provider = _configured or trace.get_tracer_provider()
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
    policy_version: str | int | None = None
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


class Recorder(Protocol):
    """The part of the span processor that a running rollout reads."""

    def completions(self, rollout_id: str) -> list[Completion]: ...


class OpenStream(Protocol):
    """A call whose reply is being read when its rollout ends."""

    def leave(self) -> None:
        """Record the call as it stands."""


class ActiveRollout:
    """One run, while it runs: what capture and the processor share with the user's view of it."""

    def __init__(
        self, options: Options, tracer: trace.Tracer, parent: ActiveRollout | None
    ) -> None:
        self.tracer = tracer
        self.lock = threading.RLock()
        self.writer = ExchangeWriter()
        self.process = _process()
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
        self.id = os.urandom(16).hex()
        self._trajectory: Trajectory | None = Trajectory(
            id=self.id,
            parent_id=parent.id if parent else None,
            status="running",
            live=self,
        )
        self._ended = weakref.ref(self._trajectory)
        self.apply(options)

    @property
    def trajectory(self) -> Trajectory:
        """The rollout's trajectory; once it has ended, only if somebody still holds it."""
        return self._trajectory or self._ended() or Trajectory(id=self.id, status="unknown")

    def let_go(self) -> None:
        """Hold nothing of the rollout, which has ended: contexts live long, in connections say."""
        self._trajectory = None
        self.recorder = None
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
        trajectory.policy_version = options.policy_version
        trajectory.trainable = options.trainable
        if options.metadata:
            trajectory.metadata.update(options.metadata)
        if self.span.is_recording():
            self.span.update_name(f"{sc.OPERATION_INVOKE_AGENT} {trajectory.name}")
            self.span.set_attributes(self.start_attributes())

    def completions(self) -> list[Completion]:
        return self.recorder.completions(self.id) if self.recorder else []

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
        attributes = {
            sc.GEN_AI_OPERATION_NAME: sc.OPERATION_INVOKE_AGENT,
            sc.GEN_AI_AGENT_NAME: trajectory.name,
            sc.ROLLOUT_SCHEMA_VERSION: sc.SCHEMA_VERSION,
            sc.ROLLOUT_ID: trajectory.id,
            sc.ROLLOUT_PARENT_ID: trajectory.parent_id,
            sc.ROLLOUT_TASK_ID: trajectory.task_id,
            sc.ROLLOUT_GROUP_ID: trajectory.group_id,
            sc.ROLLOUT_SAMPLE_INDEX: trajectory.sample_index,
            sc.ROLLOUT_POLICY_VERSION: trajectory.policy_version,
            sc.ROLLOUT_TRAINABLE: trajectory.trainable,
        }
        return _present(attributes)

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
        texts: dict[str, Json] = {
            sc.ROLLOUT_ERROR: trajectory.error,
            sc.ROLLOUT_OUTPUT: trajectory.output,
            sc.ROLLOUT_REWARDS: [r.to_dict() for r in trajectory.all_rewards.values()] or None,
            sc.ROLLOUT_METRICS: dict(trajectory.metrics) or None,
            sc.ROLLOUT_METADATA: dict(trajectory.metadata) or None,
            sc.ROLLOUT_LOGS: trajectory.logs or None,
            sc.ROLLOUT_APPENDED: [[*k, rows] for k, rows in trajectory.appended.items()] or None,
        }
        attributes: dict[str, Any] = {
            sc.ROLLOUT_STATUS: trajectory.status,
            sc.ROLLOUT_TERMINATION_REASON: trajectory.termination_reason,
            sc.ROLLOUT_EXCHANGE_COUNT: self.clock,
            sc.ROLLOUT_OPEN_COUNT: self.open,
            sc.ROLLOUT_REWARD: None if trajectory.reward is None else float(trajectory.reward),
        }
        attributes |= {key: dumps(value) for key, value in texts.items() if value is not None}
        return _present(attributes)


def _late_reward(
    tracer: trace.Tracer, rollout_id: str, parent: trace.SpanContext
) -> Callable[[RewardKey, Reward | None], None]:
    """What gives a reward that comes after the rollout a span of its own in the same trace."""
    number = itertools.count()

    def record(key: RewardKey, reward: Reward | None) -> None:
        name, completion_id, choice_index = key
        data: dict[str, Json] = {"name": name, "completion_id": completion_id, "value": None}
        data |= {"choice_index": choice_index} if choice_index else {}
        span = tracer.start_span(
            f"{sc.OPERATION_EVALUATE} {name or 'reward'}",
            context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            attributes={
                sc.ROLLOUT_ID: rollout_id,
                sc.GEN_AI_OPERATION_NAME: sc.OPERATION_EVALUATE,
                sc.REWARD: dumps(data if reward is None else reward.to_dict()),
                sc.REWARD_NUMBER: next(number),
            },
        )
        if reward is not None:
            span.add_event(sc.GEN_AI_EVALUATION_RESULT, _evaluation(reward))
        span.end()

    return record


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
    """The attributes that say something, in text that any transport carries."""
    return {
        key: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for key, value in attributes.items()
        if value is not None
    }


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


@dataclass(slots=True)
class Run:
    """An active rollout and how to leave its context."""

    active: ActiveRollout
    token: Any


def current_rollout() -> ActiveRollout | None:
    """The rollout that a model call made here belongs to; None also under `no_capture()`."""
    context = otel_context.get_current()
    if context.get(CAPTURE_OFF):
        return None
    return cast("ActiveRollout | None", context.get(ROLLOUT))


def rollout_of(context: otel_context.Context | None) -> ActiveRollout | None:
    """The rollout whose span is started in this context."""
    found = (otel_context.get_current() if context is None else context).get(ROLLOUT)
    return found if isinstance(found, ActiveRollout) else None


@dataclass(slots=True)
class Gathering:
    """Where the next rollout to begin leaves itself for `gather_trajectory`."""

    options: Mapping[str, Any]
    active: ActiveRollout | None = None
    trajectory: Trajectory | None = None


def begin(options: Options) -> Run | None:
    """Open a rollout and enter its context; None, and a line in the log, if that failed."""
    try:
        context = otel_context.get_current()
        gathering = context.get(GATHERING)
        if isinstance(gathering, Gathering) and gathering.active is None:
            options = options.overridden(gathering.options)
        else:
            gathering = None
        active = ActiveRollout(options, rollout_tracer(), rollout_of(context))
        if gathering is not None:
            gathering.active = active
            gathering.trajectory = active.trajectory
        context = otel_context.set_value(ROLLOUT, active, context)
        context = otel_context.set_value(CAPTURE_OFF, False, context)
        name = f"{sc.OPERATION_INVOKE_AGENT} {active.trajectory.name}"
        active.span = active.tracer.start_span(
            name, context=context, attributes=active.start_attributes()
        )
        active.begun = True
        active.recording = active.span.is_recording()
        span_context = active.span.get_span_context()
        active.trajectory.trace_id = f"{span_context.trace_id:032x}"
        active.trajectory.span_id = f"{span_context.span_id:016x}"
        active.trajectory.start_time_ns = getattr(active.span, "start_time", None) or 0
        return Run(active, otel_context.attach(trace.set_span_in_context(active.span, context)))
    except Exception:
        logger.exception("a rollout could not be opened; the function runs without one")
        return None


def end(run: Run | None, output: object = None, error: BaseException | None = None) -> None:
    """Leave the rollout's context and hand its trajectory over."""
    if run is None:
        return
    active = run.active
    try:
        # A coroutine that the garbage collector closes ends in a context that is not its own.
        if rollout_of(None) is active:
            otel_context.detach(run.token)
        for stream in tuple(active.streams):
            stream.leave()
        with active.lock:
            attributes = active.end(output, error)
            active.running = False
        span = active.span
        span.set_attributes(attributes)
        for reward in active.trajectory.all_rewards.values():
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
        trajectory = active.trajectory
        late_reward = _late_reward(active.tracer, active.id, active.span.get_span_context())
        trajectory.seal(late_reward)
        active.span.end()
        active.let_go()
