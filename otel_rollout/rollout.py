"""Rollouts, as the user writes them: a span around the run of an agent, and what is set in it.

The rollout that is current travels in the OpenTelemetry context, so it follows tasks by itself and
threads by `opentelemetry-instrumentation-threading`. Nothing here raises into the user's function
or changes what it returns; only what the user calls wrongly raises.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import CodeType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from otel_rollout import semconv as sc
from otel_rollout.completion import Completion, Reward, RewardKey
from otel_rollout.errors import (
    ConfigurationError,
    NoActiveRolloutError,
    NotARolloutError,
    NotRecordedError,
)
from otel_rollout.exchange import ExchangeWriter
from otel_rollout.histories import History
from otel_rollout.messages import Json, checked_json, dumps, loads
from otel_rollout.reconstruct import after_sentence
from otel_rollout.trajectory import Trajectory

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("otel_rollout")

_ROLLOUT = otel_context.create_key("otel-rollout-current")
_CAPTURE_OFF = otel_context.create_key("otel-rollout-no-capture")
_GATHERING = otel_context.create_key("otel-rollout-gathering")


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
        self.recorded = False
        """Whether a processor took the finished rollout."""
        self.secrets: set[str] = set()
        self.span: trace.Span = trace.INVALID_SPAN
        self.trajectory: Trajectory = Trajectory(
            id=os.urandom(16).hex(),
            parent_id=parent.trajectory.id if parent else None,
            status="running",
            live=self,
        )
        self.apply(options)

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
        return self.recorder.completions(self.trajectory.id) if self.recorder else []

    def begin_call(self) -> int:
        """The logical time at which a call begins now."""
        with self.lock:
            self.clock += 1
            if self.running:
                self.open += 1
                return self.clock
            self.began_late += 1
            if self.began_late > 1:
                self.trajectory.warnings.remove(after_sentence(self.began_late - 1))
            self.trajectory.warnings.append(after_sentence(self.began_late))
            logger.warning(
                "rollout %s has ended, but a model call was made in its context: it is not part "
                "of the trajectory. Await the tasks that a rollout starts.",
                self.trajectory.id,
            )
            return self.clock

    def scrub(self, text: str) -> str:
        """The text without the keys that the rollout's clients sign their requests with."""
        for secret in self.secrets:
            text = text.replace(secret, "[redacted]")
        return text

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
class _Run:
    """An active rollout and how to leave its context."""

    active: ActiveRollout
    token: Any


def current_rollout() -> ActiveRollout | None:
    """The rollout that a model call made here belongs to; None also under `no_capture()`."""
    context = otel_context.get_current()
    if context.get(_CAPTURE_OFF):
        return None
    return cast("ActiveRollout | None", context.get(_ROLLOUT))


def rollout_of(context: otel_context.Context | None) -> ActiveRollout | None:
    """The rollout whose span is started in this context."""
    found = (otel_context.get_current() if context is None else context).get(_ROLLOUT)
    return found if isinstance(found, ActiveRollout) else None


def _begin(options: Options) -> _Run | None:
    try:
        context = otel_context.get_current()
        gathering = context.get(_GATHERING)
        if isinstance(gathering, _Gathering) and gathering.active is None:
            options = options.overridden(gathering.options)
        else:
            gathering = None
        active = ActiveRollout(options, rollout_tracer(), rollout_of(context))
        if gathering is not None:
            gathering.active = active
        context = otel_context.set_value(_ROLLOUT, active, context)
        context = otel_context.set_value(_CAPTURE_OFF, False, context)
        name = f"{sc.OPERATION_INVOKE_AGENT} {active.trajectory.name}"
        active.span = active.tracer.start_span(
            name, context=context, attributes=active.start_attributes()
        )
        span_context = active.span.get_span_context()
        active.trajectory.trace_id = f"{span_context.trace_id:032x}"
        active.trajectory.span_id = f"{span_context.span_id:016x}"
        active.trajectory.start_time_ns = getattr(active.span, "start_time", None) or 0
        return _Run(active, otel_context.attach(trace.set_span_in_context(active.span, context)))
    except Exception:
        logger.exception("a rollout could not be opened; the function runs without one")
        return None


def _end(run: _Run | None, output: object = None, error: BaseException | None = None) -> None:
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
        logger.exception("rollout %s could not be closed cleanly", active.trajectory.id)
    finally:
        active.running = False
        trajectory = active.trajectory
        late_reward = _late_reward(active.tracer, trajectory.id, active.span.get_span_context())
        trajectory.seal(late_reward)
        active.span.end()
        active.recorder = None
        active.writer = ExchangeWriter()


class rollout:  # noqa: N801 - used as a decorator
    """Run a function, or the body of a `with`, as a rollout.

        @rollout                                   @rollout(name="solver", trainable=False)
        async def agent(client, task): ...         def agent(client, task): ...

        with rollout("solver", task_id="t1", group_id="g1") as trajectory: ...
        async with rollout("solver") as trajectory: ...

    The function keeps its name, signature, return value and exceptions. A rollout inside another
    one is a trajectory of its own, with `parent_id`. ConfigurationError for a wrong option,
    NotARolloutError for a generator function or a class.
    """

    @overload
    def __new__(cls, name: Callable[P, R], /) -> Callable[P, R]: ...  # type: ignore[misc]

    @overload
    def __new__(
        cls,
        name: str | None = None,
        *,
        task_id: str | int | None = None,
        group_id: str | int | None = None,
        sample_index: int | None = None,
        policy_version: str | int | None = None,
        metadata: Mapping[str, Json] | None = None,
        trainable: bool = True,
    ) -> rollout: ...

    def __new__(cls, name: Any = None, **options: Any) -> Any:
        if name is not None and not isinstance(name, str):
            if options:
                raise ConfigurationError(
                    "rollout(function, option=...): expected @rollout or @rollout(option=...)"
                )
            return _decorate(name, Options())
        scope = super().__new__(cls)
        scope._options = Options.of({"name": name, **options})
        scope._run = None
        return scope

    _options: Options
    _run: _Run | None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        decorated: Callable[P, R] = _decorate(function, self._options)
        return decorated

    def __enter__(self) -> Trajectory:
        if self._run is not None:
            raise NotARolloutError(
                "rollout(...) is entered already: open each run with a rollout(...) of its own"
            )
        options = self._options
        if options.name is None:
            options = replace(options, name="rollout")
        self._run = _begin(options)
        if self._run is None:
            return Trajectory(name=options.name or "", status="running")
        return self._run.active.trajectory

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        run, self._run = self._run, None
        _end(run, error=error)

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace_back)


_rollout_code: set[CodeType] = set()
"""The code of coroutines that run as a rollout from their first step on."""


def _decorate(function: Any, options: Options) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_decorate(function.__func__, options))
    call = getattr(function, "__call__", None)  # noqa: B004 - a callable object may be async
    if inspect.isclass(function) or not callable(function):
        raise NotARolloutError(
            f"@rollout: expected a function, got {function!r}; decorate the function that runs "
            f"the agent"
        )
    for target in (function, call):
        if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
            raise NotARolloutError(
                f"@rollout: {function!r} is a generator function: where its run begins and ends "
                f"is not known. Use `with rollout({getattr(function, '__name__', '')!r}):` inside "
                f"it, or decorate the function that consumes it"
            )
    if options.name is None:
        name = getattr(function, "__name__", type(function).__name__)
        options = replace(options, name=name)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return _decorate_async(function, options)

    @functools.wraps(function)
    def run_rollout(*args: Any, **kwargs: Any) -> Any:
        run = _begin(options)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            _end(run, error=error)
            raise
        if inspect.iscoroutine(result) and run is not None:
            # A plain function that hands on a coroutine: the run is that of the coroutine.
            otel_context.detach(run.token)
            return _continue_rollout(run, result)
        _end(run, output=result)
        return result

    return run_rollout


def _decorate_async(
    function: Callable[P, Coroutine[Any, Any, R]], options: Options
) -> Callable[P, Coroutine[Any, Any, R]]:
    @functools.wraps(function)
    async def run_rollout(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _begin(options)
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            _end(run, error=error)
            raise
        _end(run, output=result)
        return result

    _rollout_code.add(run_rollout.__code__)  # type: ignore[attr-defined]
    return run_rollout


async def _continue_rollout(run: _Run, coroutine: Coroutine[Any, Any, R]) -> R:
    gathering = otel_context.get_value(_GATHERING)
    if isinstance(gathering, _Gathering) and gathering.active is None:
        gathering.active = run.active
        run.active.apply(run.active.options.overridden(gathering.options))
    context = otel_context.set_value(_ROLLOUT, run.active)
    run.token = otel_context.attach(trace.set_span_in_context(run.active.span, context))
    try:
        result = await coroutine
    except BaseException as error:
        _end(run, error=error)
        raise
    _end(run, output=result)
    return result


# --- inside a rollout


def get_current_trajectory() -> Trajectory:
    """The live trajectory of the innermost rollout that is running here.

    NoActiveRolloutError outside of one.
    """
    active = rollout_of(None)
    if active is None:
        raise NoActiveRolloutError(
            "there is no rollout here: decorate the function that runs the agent with @rollout, or "
            'open one with `with rollout("name") as trajectory:`. A thread that was not started '
            "through threading or a pool needs the context of the rollout "
            "(opentelemetry.context.attach)"
        )
    return active.trajectory


def get_history(completion_id: str, choice: int = 0) -> History:
    """The conversation of the current trajectory that ends in this completion.

    NoActiveRolloutError outside a rollout, UnknownCompletionError for an id that it does not have.
    """
    return get_current_trajectory().get_history(completion_id, choice)


def record_reward(
    value: float,
    *,
    name: str | None = None,
    completion_id: str | None = None,
    choice: int = 0,
    explanation: str | None = None,
    trajectory: Trajectory | None = None,
) -> Reward:
    """Record a reward of a trajectory, or of one completion of it.

    Of the current trajectory, or of the one given, whose rollout may have ended. `name` makes it
    one of the named `rewards`. ValueError if `value` is not a finite number, NoActiveRolloutError
    if there is no trajectory, UnknownCompletionError for a completion that it does not have.
    """
    trajectory = get_current_trajectory() if trajectory is None else trajectory
    reward = Reward(
        value,
        name=name,
        completion_id=completion_id,
        choice_index=choice,
        explanation=explanation,
    )
    trajectory.add_reward(reward)
    return reward


@contextmanager
def no_capture() -> Iterator[None]:
    """Model calls inside are not part of the trajectory: a judge's, say.

    They are on the trace like any other call. A rollout opened inside captures its own calls.
    """
    token = otel_context.attach(otel_context.set_value(_CAPTURE_OFF, True))
    try:
        yield
    finally:
        otel_context.detach(token)


# --- the trajectory of one coroutine


@dataclass(slots=True)
class _Gathering:
    """Where the next rollout to begin leaves itself for `gather_trajectory`."""

    options: Mapping[str, Any]
    active: ActiveRollout | None = None


async def gather_trajectory(
    coroutine: Coroutine[Any, Any, Any], *, raise_errors: bool = True, **options: Any
) -> Trajectory:
    """Run a coroutine of a decorated function and return its sealed trajectory.

    `options` are those of `rollout` and override them for this run (`task_id=`, `group_id=`, ...).
    An exception in the function propagates as it is; with `raise_errors=False` the trajectory,
    which has it as `error`, is returned instead. A cancellation of the caller always propagates.
    NotARolloutError for a Task, a Future or a coroutine of another function; NotRecordedError if
    no span processor records rollouts.
    """
    _require_rollout(coroutine)
    try:
        Options.of(options)
        gathering = _Gathering(options)
    except BaseException:
        coroutine.close()
        raise
    if not hasattr(rollout_tracer(), "sampler"):
        coroutine.close()
        raise NotRecordedError(
            "gather_trajectory: no OpenTelemetry SDK records this rollout. Call "
            "otel_rollout.configure() at start-up, and unset OTEL_SDK_DISABLED"
        )
    token = otel_context.attach(otel_context.set_value(_GATHERING, gathering))
    try:
        await coroutine
    except Exception:
        if raise_errors:
            raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        cancelling = getattr(task, "cancelling", None)  # Python 3.11
        if raise_errors or cancelling is None or cancelling():
            raise
    finally:
        otel_context.detach(token)
    if gathering.active is None or not gathering.active.recorded:
        raise NotRecordedError(
            "gather_trajectory: the function ran, but no TrajectorySpanProcessor is on the tracer "
            "provider. Call otel_rollout.configure() at start-up, or "
            "provider.add_span_processor(TrajectorySpanProcessor(...))"
        )
    return gathering.active.trajectory


def _require_rollout(coroutine: object) -> None:
    if isinstance(coroutine, asyncio.Future):
        raise NotARolloutError(
            f"gather_trajectory: got the {type(coroutine).__name__} {coroutine!r}, whose context "
            f"is fixed already; pass the coroutine itself: gather_trajectory(agent(...))"
        )
    code = getattr(coroutine, "cr_code", None)
    if code in _rollout_code:
        return
    if inspect.iscoroutine(coroutine):
        coroutine.close()
        raise NotARolloutError(
            f"gather_trajectory: {coroutine.__qualname__!r} is not decorated with @rollout. "
            f"Decorate it (outermost, above other decorators), or run it in "
            f'`async with rollout("name") as trajectory:`'
        )
    hint = "; call it: gather_trajectory(agent(...))" if callable(coroutine) else ""
    raise NotARolloutError(
        f"gather_trajectory: expected the coroutine of a function decorated with @rollout, got "
        f"{coroutine!r}{hint}"
    )


_rollout_code.add(_continue_rollout.__code__)
