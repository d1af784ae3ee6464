"""Rollouts, as the user writes them: around the run of an agent, and what is set inside it.

Nothing here raises into the user's function or changes what it returns; only what the user calls
wrongly raises.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.errors import (
    ConfigurationError,
    NoActiveRolloutError,
    NotARolloutError,
    NotRecordedError,
)
from otel_rollout.record.context import (
    CAPTURE_OFF,
    GATHERING,
    ROLLOUT,
    TOKEN_FIELDS,
    detach,
)
from otel_rollout.record.current import (
    Gathering,
    Run,
    begin,
    end,
    rollout_of,
    waiting_gathering,
)
from otel_rollout.record.deferred import later
from otel_rollout.record.late_rewards import record_late_reward
from otel_rollout.record.options import Options
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.trajectory import History, Reward, Trajectory
from otel_rollout.wire import Json

P = ParamSpec("P")
R = TypeVar("R")


class rollout:  # noqa: N801 - used as a decorator
    """Run a function, or the body of a `with`, as a rollout.

        @rollout                                   @rollout(name="solver", trainable=False)
        async def agent(client, task): ...         def agent(client, task): ...

        with rollout("solver", task_id="t1", group_id="g1") as trajectory: ...
        async with rollout("solver") as trajectory: ...

    `policy_version` may be a function: it is asked at the start, and for each call as it is made.

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
        policy_version: str | int | Callable[[], str | int | None] | None = None,
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
    _run: Run | None

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
        self._run = begin(options)
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
        end(run, error=error)

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace_back)


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
        run = begin(options)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            end(run, error=error)
            raise
        if inspect.iscoroutine(result) and run is not None:
            # A plain function that hands on a coroutine: the run is that of the coroutine.
            detach(run.token)
            coroutine: Any = _continue_rollout(run, result)
            coroutine.__qualname__ = result.__qualname__
            # A task that is cancelled before it begins runs no line of it.
            weakref.finalize(coroutine, later, functools.partial(_never_ran, run, result))
            return coroutine
        end(run, output=result)
        return result

    return run_rollout


def _decorate_async(
    function: Callable[P, Coroutine[Any, Any, R]], options: Options
) -> Callable[P, Coroutine[Any, Any, R]]:
    @functools.wraps(function)
    async def run_rollout(*args: P.args, **kwargs: P.kwargs) -> R:
        run = begin(options)
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            end(run, error=error)
            raise
        end(run, output=result)
        return result

    return run_rollout


async def _continue_rollout(run: Run, coroutine: Coroutine[Any, Any, R]) -> R:
    """Run the coroutine in the rollout that its making began."""
    gathering = waiting_gathering(otel_context.get_current())
    if gathering is not None:
        gathering.take(run.active)
        run.active.apply(run.active.options.overridden(gathering.options))
    context = otel_context.set_value(ROLLOUT, run.active)
    run.token = otel_context.attach(trace.set_span_in_context(run.active.span, context))
    try:
        result = await coroutine
    except BaseException as error:
        end(run, error=error)
        raise
    end(run, output=result)
    return result


def _never_ran(run: Run, coroutine: Coroutine[Any, Any, Any]) -> None:
    if run.active.running:
        coroutine.close()
        end(run, error=asyncio.CancelledError("its coroutine was dropped before it ran"))


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
    weight: float | None = None,
    trajectory: Trajectory | str | None = None,
) -> Reward:
    """Record a reward of a trajectory, or of one completion of it.

    Of the current trajectory, or of the one given, whose rollout may have ended, here or in
    another process: then it is a span of its own, from which `reconstruct` knows it. `trajectory`
    may also be an id: a judge's process need not have the trajectory.

    `name` makes it one of the named `rewards`; with a `weight` it counts in the reward of the
    trajectory, where that is not set itself. ValueError if `value` is not a finite number,
    NoActiveRolloutError if there is no trajectory, UnknownCompletionError for a completion that
    it does not have.
    """
    reward = Reward(
        value,
        name=name,
        completion_id=completion_id,
        choice_index=choice,
        explanation=explanation,
        weight=weight,
    )
    if isinstance(trajectory, str):
        record_late_reward(rollout_tracer(), trajectory, None, reward.key, reward)
        return reward
    trajectory = get_current_trajectory() if trajectory is None else trajectory
    trajectory.add_reward(reward)
    if trajectory.is_copy:
        record_late_reward(
            rollout_tracer(), trajectory.id, _span_context(trajectory), reward.key, reward
        )
    return reward


def _span_context(trajectory: Trajectory) -> trace.SpanContext | None:
    """Where its rollout span is, so that what is said of it later is on the same trace."""
    try:
        trace_id, span_id = int(trajectory.trace_id, 16), int(trajectory.span_id, 16)
    except ValueError:
        return None
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


@contextmanager
def no_capture() -> Iterator[None]:
    """Model calls inside are not part of the trajectory: a judge's, say.

    They are on the trace like any other call. A rollout opened inside captures its own calls.
    """
    token = otel_context.attach(otel_context.set_value(CAPTURE_OFF, True))
    try:
        yield
    finally:
        detach(token)


@contextmanager
def request_token_ids(enabled: bool = True, **fields: Json) -> Iterator[None]:
    """Ask the server for token ids and log-probabilities with the calls of rollouts made inside.

    To requests of `/chat/completions` and `/completions` it adds what vLLM and servers like it
    take: `return_token_ids` and `logprobs`; and `fields`, such as `return_meta_info=True`. What
    the call itself sets stays. Calls outside rollouts and under `no_capture()` stay as they are,
    and the agent sees whatever the server sends. Servers that do not know the fields may refuse
    the request. `configure(request_token_ids=True)` does it everywhere; `enabled=False` leaves
    the calls inside alone.
    """
    token = otel_context.attach(
        otel_context.set_value(TOKEN_FIELDS, dict(fields) if enabled else False)
    )
    try:
        yield
    finally:
        detach(token)


# --- the trajectory of one coroutine


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
        gathering = Gathering(options)
    except BaseException:
        coroutine.close()
        raise
    if not hasattr(rollout_tracer(), "sampler"):
        coroutine.close()
        raise NotRecordedError(
            "gather_trajectory: no OpenTelemetry SDK records this rollout. Call "
            "otel_rollout.configure() at start-up, and unset OTEL_SDK_DISABLED"
        )
    token = otel_context.attach(otel_context.set_value(GATHERING, gathering))
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
        detach(token)
        # Contexts live long, in pooled connections say: they must not hold the trajectory.
        trajectory, gathering.trajectory = gathering.trajectory, None
    if trajectory is None or gathering.active is None or not gathering.active.recorded:
        raise NotRecordedError(
            "gather_trajectory: the function ran, but no TrajectorySpanProcessor is on the tracer "
            "provider. Call otel_rollout.configure() at start-up, or "
            "provider.add_span_processor(TrajectorySpanProcessor(...))"
        )
    return trajectory


def _require_rollout(coroutine: object) -> None:
    if isinstance(coroutine, asyncio.Future):
        raise NotARolloutError(
            f"gather_trajectory: got the {type(coroutine).__name__} {coroutine!r}, whose context "
            f"is fixed already; pass the coroutine itself: gather_trajectory(agent(...))"
        )
    if getattr(coroutine, "cr_code", None) in _ROLLOUT_CODE:
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


_ROLLOUT_CODE = frozenset(
    (
        _continue_rollout.__code__,
        _decorate_async(_continue_rollout, Options()).__code__,
    )
)
"""The code of every coroutine that runs as a rollout: all decorated functions share theirs."""
