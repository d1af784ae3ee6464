"""`rollout`, as users write it: around a function that runs an agent, or as a `with` block.

Nothing here raises into the user's function or changes what it returns; only a wrong use raises.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.errors import ConfigurationError, NotARolloutError
from otel_rollout.record.context import (
    ENTERING,
    GATHERING,
    GENERATOR,
    ROLLOUT,
    detach,
    entering_generator,
)
from otel_rollout.record.current import Run, begin, end, waiting_gathering
from otel_rollout.record.options import Options
from otel_rollout.record.processes.carrier import within
from otel_rollout.record.state import process_state
from otel_rollout.record.time_limits import TimeLimit, in_time
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json

P = ParamSpec("P")
R = TypeVar("R")


class rollout:  # noqa: N801 - used as a decorator
    """Run a function, or the body of a `with`, as a rollout.

        @rollout                                   @rollout(name="solver", trainable=False)
        async def agent(client, task): ...         def agent(client, task): ...

        with rollout("solver", task_id="t1", group_id="g1") as trajectory: ...
        async with rollout("solver") as trajectory: ...

    name: str, the trajectory's name and the span's. None (default): the function's name, or
        "rollout" for a `with`.
    task_id: str or int, the task that the agent works on. None (default): not known.
    group_id: str or int, the group of samples that a trainer compares with each other (GRPO).
        None (default): no group.
    group_run: str or int, which run of that group it is, such as the epoch: two runs are two
        groups. None (default): all with the `group_id` are one group.
    sample_index: int, the number of this sample in its group, from 0. None (default): not numbered.
    group_size: int, how many samples the group is to have, here and elsewhere: `otel-rollout check`
        and rows then know a group of which some are missing. None (default): not known.
    policy_version: str or int, the version of the weights that sample; or a function that gives
        it, which is called at the start, and for each model call as it is made and when its reply
        has come. None (default): not known.
    metadata: a mapping of JSON values that the trajectory's `metadata` begins with. None
        (default): {}.
    timeout: seconds, int or float, that it may take; then its task is cancelled, it ends with the
        reason `timeout`, and TimeoutError is raised. Only of async functions and `async with`. None
        (default): no limit.
    main: a function that is given the trajectory as the rollout ends, and returns the history of
        the agent itself, or a completion of it, or its id: `main=lambda t: t.histories[-1]`.
        None (default): as `Trajectory.main` says, which may also be set while it runs.
    trainable: bool. True (default): a trainer may learn from it; False: recorded, but not to be
        trained on.
    gateway: bool. True: model calls of the programs that it starts, in any language, are its calls:
        they go through a gateway in this process, whose address the programs have from their
        environment (`otel_rollout.gateway.around`). False (default): only calls in Python are
        captured, in this process and in those that continue the rollout.
    upstream: str, the address of the model server of that gateway. None (default): the one that
        this process would ask, such as that of OPENAI_BASE_URL.

    The function keeps its name, signature, return value and exceptions. A rollout inside another
    one is a trajectory of its own, with `parent_id`, and the `task_id` and `policy_version` of that
    one where it is given none. ConfigurationError for a wrong option,
    NotARolloutError for a generator function or a class.
    """

    @overload
    def __new__(cls, name: Callable[P, R], /) -> Callable[P, R]:  # type: ignore[misc]  # noqa: D418
        """Decorate this function (`@rollout`); every option has its default."""

    @overload
    def __new__(  # noqa: D418 - an editor shows it
        cls,
        name: str | None = None,
        *,
        task_id: str | int | None = None,
        group_id: str | int | None = None,
        group_run: str | int | None = None,
        sample_index: int | None = None,
        group_size: int | None = None,
        policy_version: str | int | Callable[[], str | int | None] | None = None,
        metadata: Mapping[str, Json] | None = None,
        main: Callable[[Trajectory], object] | None = None,
        timeout: float | None = None,
        trainable: bool = True,
        gateway: bool = False,
        upstream: str | None = None,
    ) -> rollout:
        """A decorator (`@rollout(...)`) or a context manager (`with rollout(...)`).

        name: the trajectory's name and the span's. None: the function's name, or "rollout".
        task_id: the task that the agent works on. None: not known.
        group_id: the group of samples that a trainer compares. None: no group.
        group_run: which run of that group it is. None: all with the `group_id` are one group.
        sample_index: the number of this sample in its group, from 0. None: not numbered.
        group_size: the number of samples that its group is to have. None: not known.
        policy_version: the version of the weights that sample, or a function that gives it,
            called at the start, for each model call and at the end of its reply. None: not known.
        metadata: JSON values that the trajectory's `metadata` begins with. None: {}.
        timeout: seconds that it may take, of async functions and `async with`. None: no limit.
        main: returns the main history of the trajectory that it is given. None: `Trajectory.main`.
        trainable: False: recorded, but not to be trained on.
        gateway: True: model calls of the programs that it starts are its calls, too.
        upstream: the model server that these ask. None: the one that this process would ask.
        """

    def __new__(cls, name: Any = None, **options: Any) -> Any:
        if name is not None and not isinstance(name, str):
            if options:
                raise ConfigurationError(
                    "rollout(function, option=...): expected @rollout or @rollout(option=...)"
                )
            return _decorate(name, Options())
        scope = super().__new__(cls)
        scope._options = Options.of({"name": name, **options})
        scope._run = scope._limit = None
        return scope

    _options: Options
    _run: Run | None
    _limit: TimeLimit | None
    _is_async = False

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        decorated: Callable[P, R] = _decorate(function, self._options)
        return decorated

    def __enter__(self) -> Trajectory:
        is_limited = self._options.timeout or GATHERING in otel_context.get_current()
        if is_limited and not self._is_async:
            _refuse_timeout(self._options, "with rollout(...)", "Write `async with`")
        if self._run is not None:
            raise NotARolloutError(
                "rollout(...) is entered already: open each run with a rollout(...) of its own"
            )
        options = self._options
        if options.name is None:
            options = replace(options, name="rollout")
        before, self._run = otel_context.get_current(), begin(options)
        if self._run is None:
            return Trajectory(name=options.name or "", status="running")
        caller, active = sys._getframe(1), self._run.active
        if caller.f_code.co_flags & GENERATOR or caller.f_globals.get("__name__") in ENTERING:
            active.generator = entering_generator(caller)
            active.before = active.generator and before
        return self._run.active.trajectory

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run, self._run = self._run, None
        end(run, error=error)

    async def __aenter__(self) -> Trajectory:
        self._is_async = True
        trajectory = self.__enter__()
        options = self._options if self._run is None else self._run.active.options
        if options.timeout is not None:
            self._limit = TimeLimit(options.timeout)
        return trajectory

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        limit, self._limit = self._limit, None
        ended = error if limit is None else limit.end(error)
        self.__exit__(kind, ended, trace)
        if ended is not None and ended is not error:
            raise ended from error


def _refuse_timeout(options: Options, what: str, instead: str) -> None:
    """ConfigurationError if what cannot be stopped is given a time limit."""
    gathering = waiting_gathering(otel_context.get_current())
    asked = gathering.options.get("timeout") if gathering is not None else None
    if asked is not None or options.timeout is not None:
        raise ConfigurationError(
            f"timeout={options.timeout if asked is None else asked!r}: {what} is not async, and "
            f"cannot be stopped. {instead}, or give the model client a timeout"
        )


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
                f"it, which leaves out what its reader does between two items, or decorate a "
                f"function that runs it to its end"
            )
    if options.name is None:
        name = getattr(function, "__name__", type(function).__name__)
        options = replace(options, name=name)
    if is_async(function):
        return _decorate_async(function, options)

    what = f"the function {options.name!r}", "Make it async"
    _refuse_timeout(options, *what)

    @functools.wraps(function)
    def run_rollout(*args: Any, **kwargs: Any) -> Any:
        if GATHERING in otel_context.get_current():
            _refuse_timeout(options, *what)
        run = begin(options)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            end(run, error=error)
            raise
        if inspect.iscoroutine(result) and run is not None:
            # A plain function that returns a coroutine: the rollout ends with the coroutine.
            detach(run.token)
            coroutine: Any = _continue_rollout(run, result)
            coroutine.__qualname__ = result.__qualname__
            # A task that is cancelled before it begins runs no line of it.
            step = functools.partial(_never_ran, run, result)
            weakref.finalize(coroutine, process_state.waiting.append, step)
            return coroutine
        end(run, output=result)
        return result

    return run_rollout


def is_async(function: object) -> bool:
    """True if a call of it gives a coroutine, as far as is known without one."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - a callable object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _decorate_async(
    function: Callable[P, Coroutine[Any, Any, R]], options: Options
) -> Callable[P, Coroutine[Any, Any, R]]:
    @functools.wraps(function)
    async def run_rollout(*args: P.args, **kwargs: P.kwargs) -> R:
        run = begin(options)
        try:
            seconds = options.timeout if run is None else run.active.options.timeout
            work = function(*args, **kwargs)
            result = await (work if seconds is None else in_time(seconds, work))
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
    context = trace.set_span_in_context(run.active.span, context)
    run.token = otel_context.attach(within(run.active, context))
    try:
        seconds = run.active.options.timeout
        result = await (coroutine if seconds is None else in_time(seconds, coroutine))
    except BaseException as error:
        end(run, error=error)
        raise
    end(run, output=result)
    return result


def _never_ran(run: Run, coroutine: Coroutine[Any, Any, Any]) -> None:
    if run.active.running:
        coroutine.close()
        end(run, error=asyncio.CancelledError("its coroutine was dropped before it ran"))


_ROLLOUT_CODE = frozenset(
    (_continue_rollout.__code__, _decorate_async(_continue_rollout, Options()).__code__)
)
"""The code of every coroutine that runs as a rollout: all decorated functions share theirs."""


def is_rollout(coroutine: object) -> bool:
    """True if a coroutine runs as a rollout from its first step on."""
    return getattr(coroutine, "cr_code", None) in _ROLLOUT_CODE
