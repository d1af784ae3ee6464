"""Run rollouts and gather their trajectories: one, or many at once, in order.

Of many, coroutines are taken from the iterable as there is room for them, so that a generator of
ten thousand holds only those that run. A rollout that fails is a trajectory, too, in its place.
Functions that block run in a thread each.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import context as otel_context

from otel_rollout.errors import ConfigurationError, NotARolloutError, NotRecordedError, RolloutError
from otel_rollout.record.context import GATHERING, detach
from otel_rollout.record.current import Gathering
from otel_rollout.record.gathering.progress import RolloutProgress
from otel_rollout.record.options import Options, RolloutOptions, SampleOptions
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.rollouts import is_async, is_rollout
from otel_rollout.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack

Runnable = Coroutine[Any, Any, Any] | Callable[..., Any]
"""A call of a decorated function that is not awaited yet, or a function whose call is a rollout."""
Rollouts = Iterable[Runnable]
Item = TypeVar("Item")
Result = TypeVar("Result")


class TooManyExceptionsError(RolloutError):
    """More rollouts failed than `max_exceptions` allows; the others were cancelled."""

    results: list[Any]
    """Trajectories, or episodes, of the runs that had ended, failures included, in order."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


async def gather_trajectory(
    coroutine: Runnable,
    *arguments: Any,
    raise_errors: bool = True,
    **options: Unpack[RolloutOptions],
) -> Trajectory:
    """Run a decorated function and return its sealed trajectory.

        trajectory = await gather_trajectory(agent(client, task))         # async def agent
        trajectory = await gather_trajectory(agent, client, task)         # def agent
        trajectory = asyncio.run(gather_trajectory(agent, client, task))  # without an event loop

    coroutine: a call of an async function that is not awaited yet, `agent(client, task)`; or a
        function, which is called with the `arguments`: in a thread of its own if it is not async.
        Of a function that is not decorated itself, the first rollout that begins in it counts.
    raise_errors: bool. True (default): an exception in the function propagates as it is; False:
        the trajectory, which has it as `error`, is returned instead. A cancellation of the caller
        always propagates.
    options: those of `rollout` (`task_id=`, `group_id=`, ...); they override the decorator's for
        this run.

    NotARolloutError for a Task, a Future or what is no rollout; NotRecordedError if no span
    processor records rollouts. A thread cannot be cancelled: a function in one runs to its end.
    """
    if arguments:
        coroutine = _with_arguments(coroutine, arguments)
    _check_options(gather_trajectory, options, [coroutine])
    return await _gather_one(coroutine, options, raise_errors=raise_errors)


async def _gather_one(
    runnable: Runnable,
    options: Mapping[str, Any],
    *,
    raise_errors: bool,
    nested: list[Trajectory] | None = None,
) -> Trajectory:
    if (
        inspect.iscoroutine(runnable)
        and inspect.getcoroutinestate(runnable) != inspect.CORO_CREATED
    ):
        raise NotARolloutError(
            f"gather_trajectory: the coroutine of {runnable.__qualname__!r} was given several "
            f"times, or awaited before: call the function anew for each rollout, such as "
            f"[{_name_of(runnable)}(...) for _ in range(4)]"
        )
    try:
        _require_rollout(runnable)
        if not hasattr(rollout_tracer(), "sampler"):
            raise NotRecordedError(
                "gather_trajectory: no OpenTelemetry SDK records this rollout. Call "
                "otel_rollout.configure() at start-up, and unset OTEL_SDK_DISABLED"
            )
    except BaseException:
        _close([runnable])
        raise
    gathering = Gathering(options, nested=nested)
    token = otel_context.attach(otel_context.set_value(GATHERING, gathering))
    try:
        await (_called(runnable) if callable(runnable) else runnable)
    except Exception:
        if raise_errors or (callable(runnable) and gathering.active is None):
            raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        cancelling = getattr(task, "cancelling", None)  # Python 3.11
        if raise_errors or cancelling is None or cancelling():
            raise
    finally:
        detach(token)
        gathering.nested = None
        # A pooled connection keeps its context for long: that must not hold the trajectory.
        trajectory, gathering.trajectory = gathering.trajectory, None
    return _recorded(runnable, gathering, trajectory)


def _recorded(
    runnable: Runnable, gathering: Gathering, trajectory: Trajectory | None
) -> Trajectory:
    """The trajectory of what was gathered; an exception if there is none."""
    if gathering.active is None and callable(runnable):
        raise NotARolloutError(
            f"gather_trajectory: {runnable!r} ran, and no rollout began in it: decorate the "
            f"function that runs the agent with @rollout"
        )
    if trajectory is None or gathering.active is None or not gathering.active.recorded:
        raise NotRecordedError(
            "gather_trajectory: the function ran, but no TrajectorySpanProcessor is on the tracer "
            "provider. Call otel_rollout.configure() at start-up, or "
            "provider.add_span_processor(TrajectorySpanProcessor(...))"
        )
    return trajectory


async def _called(function: Callable[..., Any]) -> None:
    """Call a function: here if it gives a coroutine, else in a thread that is its own."""
    if is_async(function):
        await function()
        return
    context = contextvars.copy_context()
    # The loop's own executor has few threads, which would then bound how many agents run.
    executor = ThreadPoolExecutor(1, thread_name_prefix="otel-rollout-agent")
    try:
        result = await asyncio.get_running_loop().run_in_executor(executor, context.run, function)
    finally:
        executor.shutdown(wait=False)
    if inspect.isawaitable(result):  # a plain function that returns a coroutine, such as a lambda
        await result


def _name_of(runnable: object) -> str:
    """The name of a function or coroutine, as short as people know it."""
    while isinstance(runnable, functools.partial):
        runnable = runnable.func
    return str(getattr(runnable, "__name__", type(runnable).__name__))


def _with_arguments(function: object, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    if callable(function):
        return functools.partial(function, *arguments)
    _close([function])
    raise NotARolloutError(
        f"gather_trajectory: expected a function before its arguments, got {function!r}; of "
        f"several coroutines there is gather_trajectories([...])"
    )


def _require_rollout(coroutine: object) -> None:
    if isinstance(coroutine, asyncio.Future):
        raise NotARolloutError(
            f"gather_trajectory: got the {type(coroutine).__name__} {coroutine!r}, whose context "
            f"is fixed already; pass the coroutine itself: gather_trajectory(agent(...))"
        )
    if is_rollout(coroutine) or callable(coroutine):
        return
    if inspect.iscoroutine(coroutine):
        raise NotARolloutError(
            f"gather_trajectory: {coroutine.__qualname__!r} is not decorated with @rollout. "
            f"Decorate it (outermost, above other decorators), or run it in "
            f'`async with rollout("name") as trajectory:`'
        )
    raise NotARolloutError(
        f"gather_trajectory: expected the coroutine of a function decorated with @rollout, got "
        f"{coroutine!r:.200}; if that is what a function that is not async returned, it has run "
        f"already: pass the function and its arguments, gather_trajectory(agent, client, task)"
    )


async def gather_trajectories(
    coroutines: Rollouts,
    *,
    max_concurrency: int | None = None,
    max_exceptions: int | None = None,
    progress: bool | str = False,
    on_trajectory: Callable[[Trajectory], object] | None = None,
    **options: Unpack[RolloutOptions],
) -> list[Trajectory]:
    """Run coroutines of decorated functions; their trajectories, in the order of the coroutines.

        await gather_trajectories((agent(task) for task in tasks), max_concurrency=64)

    coroutines: an iterable of calls that are not awaited yet. Of agents that are not async, of
        functions without arguments, each of which runs in a thread of its own:
        `(functools.partial(agent, client, task) for task in tasks)`.
    max_concurrency: int, how many run at once. None (default): all.
    max_exceptions: int, how many rollouts may fail; one more cancels the rest and raises
        TooManyExceptionsError, which has the trajectories that had ended. None (default): any
        number. A rollout that failed is a trajectory with `status` "error".
    progress: True, or its text, shows on stderr the rate, what runs, the mean reward, how
        rollouts ended, tokens per second and what runs longest: a bar on a terminal, elsewhere a
        line every half minute. False (default): nothing.
    on_trajectory: function that is called with each trajectory as it ends. None (default): none.
    options: those of `rollout`, for each of them.

    Cancelling it cancels those that run; the exporters have those that had ended. NotARolloutError
    for a coroutine of another function, NotRecordedError if nothing records rollouts.
    """
    _check_options(gather_trajectories, options, coroutines)
    return await _gather(
        coroutines,
        max_concurrency=max_concurrency,
        max_exceptions=max_exceptions,
        progress=progress,
        on_trajectory=on_trajectory,
        options=lambda _: options,
    )


def gather_group(
    coroutines: Rollouts,
    *,
    group_id: str | int | None = None,
    max_concurrency: int | None = None,
    max_exceptions: int | None = None,
    progress: bool | str = False,
    **options: Unpack[SampleOptions],
) -> Coroutine[Any, Any, TrajectoryGroup]:
    """Run coroutines as samples of one task, to be compared with each other.

        group = await gather_group(agent(task) for _ in range(8))

    coroutines: an iterable of calls that are not awaited yet, or of functions, as for
        `gather_trajectories`; each gets its place in it as `sample_index`, and their number as
        `group_size` (of a group that is spread over processes, give both).
    group_id: str or int, the `group_id` of all of them. None (default): a new one. Each call is a
        group of its own, with a `group_run` of its own, also with the same `group_id`; where you
        give a `group_size` or a `group_run` too, all with these are one group.
    max_concurrency, max_exceptions, progress, options: as for `gather_trajectories`, which also
        says what is raised.

    `group.children` has the trajectories of the rollouts that ran inside them.
    """
    if isinstance(coroutines, Iterable) and not inspect.iscoroutine(coroutines):
        # A generator in a loop over tasks would find another task when it is awaited.
        coroutines = list(coroutines)
    name = uuid.uuid4().hex if group_id is None else str(group_id)
    own: dict[str, Any] = {"group_size": len(coroutines)} if isinstance(coroutines, Sized) else {}
    if group_id is None or options.get("group_size") is None:
        own["group_run"] = uuid.uuid4().hex[:12]

    async def gather() -> TrajectoryGroup:
        _check_options(gather_group, options, coroutines)
        nested: list[Trajectory] = []
        trajectories = await _gather(
            coroutines,
            max_concurrency=max_concurrency,
            max_exceptions=max_exceptions,
            progress=progress,
            options=lambda index: {"sample_index": index, **own, **options, "group_id": name},
            nested=nested,
        )
        group = TrajectoryGroup.of(trajectories, name)
        group.adopt(nested)
        return group

    return gather()


async def _gather(
    coroutines: Rollouts,
    *,
    max_concurrency: int | None,
    max_exceptions: int | None,
    progress: bool | str,
    options: Callable[[int], Mapping[str, Any]],
    on_trajectory: Callable[[Trajectory], object] | None = None,
    nested: list[Trajectory] | None = None,
) -> list[Trajectory]:
    _check(coroutines, max_concurrency, max_exceptions)
    size = len(coroutines) if isinstance(coroutines, Sized) else None

    def failure(trajectory: Trajectory) -> object:
        return trajectory.error or trajectory.status != "complete"

    with RolloutProgress(progress, size, "rollouts") as bar:

        async def run(index: int, runnable: Runnable) -> Trajectory:
            with bar.running(f"{_name_of(runnable)}#{index}"):
                return await _gather_one(
                    runnable, options(index), raise_errors=False, nested=nested
                )

        def ended(trajectory: Trajectory) -> None:
            good = trajectory.status == "complete"
            bar.add(trajectory.reward, None if good else trajectory.termination_reason or "error")
            if on_trajectory is not None:
                on_trajectory(trajectory)

        try:
            return await run_bounded(
                coroutines,
                run,
                ended,
                failure,
                max_concurrency=max_concurrency,
                max_exceptions=max_exceptions,
            )
        except BaseException:
            _close(coroutines)
            raise


async def run_bounded(
    items: Iterable[Item],
    run: Callable[[int, Item], Awaitable[Result]],
    ended: Callable[[Result], object],
    failure: Callable[[Result], object],
    *,
    max_concurrency: int | None,
    max_exceptions: int | None,
    keep: bool = True,
) -> list[Result]:
    """Run every item, taken as there is room for it; the results in the order of the items.

    run: given the number of an item, and the item. ended: called with each result as it comes.
    failure: something true for a result that counts as a failure, shown in the message.
    max_concurrency: None: all at once. max_exceptions: None: any number of failures.
    keep: False: the results are dropped, and [] is returned.

    One failure more than `max_exceptions`, or any exception, cancels those that run.
    """
    size = len(items) if isinstance(items, Sized) else None
    if max_concurrency is None:
        items = list(items)
        size = len(items)
    source = enumerate(items)
    results: dict[int, Result] = {}
    failures = count = 0

    async def work() -> None:
        nonlocal failures, count
        for index, item in source:
            result = await run(index, item)
            del item
            count += 1
            if keep:
                results[index] = result
            ended(result)
            failed = failure(result)
            failures += bool(failed)
            if max_exceptions is not None and failures > max_exceptions:
                raise TooManyExceptionsError(
                    f"{failures} of {count} runs failed, {max_exceptions} may (max_exceptions); "
                    f"the last with {failed}",
                    [results[i] for i in sorted(results)],
                )

    room = min(n for n in (size, max_concurrency) if n is not None)
    workers = [asyncio.create_task(work()) for _ in range(room)]
    try:
        await asyncio.gather(*workers)
    except BaseException:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    return [results[index] for index in sorted(results)]


def _check(coroutines: object, max_concurrency: int | None, max_exceptions: int | None) -> None:
    if inspect.iscoroutine(coroutines):
        coroutines.close()
    if not isinstance(coroutines, Iterable) or inspect.iscoroutine(coroutines):
        raise ConfigurationError(
            f"gather: expected an iterable of coroutines, got {coroutines!r}; for a single one "
            f"there is gather_trajectory"
        )
    for name, value, least in (
        ("max_concurrency", max_concurrency, 1),
        ("max_exceptions", max_exceptions, 0),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            _close(coroutines)
            raise ConfigurationError(
                f"gather({name}=...): expected a number from {least} on or None, got {value!r}"
            )


def _check_options(
    caller: Callable[..., object], options: Mapping[str, Any], coroutines: object
) -> None:
    """Close the coroutines, and raise ConfigurationError, where an option is wrong."""
    try:
        Options.of(options, caller.__name__, caller.__kwdefaults__ or ())
    except ConfigurationError:
        _close(coroutines)
        raise


def _close(coroutines: object) -> None:
    """Close coroutines that will not run: Python would warn that they were never awaited."""
    if isinstance(coroutines, list | tuple):
        for coroutine in coroutines:
            if inspect.iscoroutine(coroutine):
                coroutine.close()
