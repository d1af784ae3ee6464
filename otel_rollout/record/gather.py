"""Run many rollouts and gather their trajectories: bounded, in order, each ending accounted for.

Coroutines are taken from the iterable as there is room for them, so a generator of ten thousand
holds only those that run. A rollout that fails gives a trajectory that says so, in its place.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sized
from typing import Any, TypeVar

from otel_rollout.errors import ConfigurationError, RolloutError
from otel_rollout.record.progress import RolloutProgress
from otel_rollout.record.rollouts import gather_trajectory
from otel_rollout.trajectory import Trajectory, TrajectoryGroup

Rollouts = Iterable[Coroutine[Any, Any, Any]]
Item = TypeVar("Item")
Result = TypeVar("Result")


class TooManyExceptionsError(RolloutError):
    """More rollouts failed than `max_exceptions` allows; the others were cancelled."""

    results: list[Any]
    """What had ended by then, trajectories or episodes, failures included, in order."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


async def gather_trajectories(
    coroutines: Rollouts,
    *,
    max_concurrency: int | None = None,
    max_exceptions: int | None = None,
    progress: bool | str = False,
    on_trajectory: Callable[[Trajectory], object] | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Run coroutines of decorated functions; their trajectories, in the order of the coroutines.

        await gather_trajectories((agent(task) for task in tasks), max_concurrency=64)

    max_concurrency: how many run at once; None for all.
    max_exceptions: how many rollouts may fail; one more cancels the rest and raises
    TooManyExceptionsError, which has what had ended. None for any number. A rollout that failed
    is a trajectory with `status` "error".
    progress: a bar on a terminal, with this text or "rollouts".
    on_trajectory: called with each trajectory as it ends.
    options: those of `rollout`, for each of them.

    Cancelling it cancels what runs; what had ended is with the exporters. NotARolloutError for a
    coroutine of another function, NotRecordedError if nothing records rollouts.
    """
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
    **options: Any,
) -> Coroutine[Any, Any, TrajectoryGroup]:
    """Run coroutines as samples of one task, to be compared with each other.

        group = await gather_group(agent(task) for _ in range(8))

    Each gets `group_id` (a new one if none is given) and its place as `sample_index`. The rest is
    as for `gather_trajectories`.
    """
    if isinstance(coroutines, Iterable) and not inspect.iscoroutine(coroutines):
        # A generator in a loop over tasks would find another task when it is awaited.
        coroutines = list(coroutines)
    return _gather_group(coroutines, group_id, max_concurrency, max_exceptions, progress, options)


async def _gather_group(
    coroutines: Rollouts,
    group_id: str | int | None,
    max_concurrency: int | None,
    max_exceptions: int | None,
    progress: bool | str,
    options: dict[str, Any],
) -> TrajectoryGroup:
    name = uuid.uuid4().hex if group_id is None else str(group_id)
    trajectories = await _gather(
        coroutines,
        max_concurrency=max_concurrency,
        max_exceptions=max_exceptions,
        progress=progress,
        on_trajectory=None,
        options=lambda index: {"sample_index": index, **options, "group_id": name},
    )
    return TrajectoryGroup.of(trajectories, name)


async def _gather(
    coroutines: Rollouts,
    *,
    max_concurrency: int | None,
    max_exceptions: int | None,
    progress: bool | str,
    on_trajectory: Callable[[Trajectory], object] | None,
    options: Callable[[int], dict[str, Any]],
) -> list[Trajectory]:
    _check(coroutines, max_concurrency, max_exceptions)

    async def run(index: int, coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
        return await gather_trajectory(coroutine, raise_errors=False, **options(index))

    def failure(trajectory: Trajectory) -> object:
        return trajectory.error or trajectory.status != "complete"

    with RolloutProgress(progress, _size(coroutines), "rollouts") as bar:

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

    Beyond `max_exceptions` results with a `failure`, and for any exception, what runs is cancelled.
    """
    source = enumerate(items)
    results: dict[int, Result] = {}
    failures = count = 0

    async def work(first: tuple[int, Item] | None = None) -> None:
        nonlocal failures, count
        for index, item in _behind(first, source):
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

    if max_concurrency is None:
        workers = [asyncio.create_task(work(item)) for item in source]
    else:
        size = _size(items)
        room = max_concurrency if size is None else min(max_concurrency, size)
        workers = [asyncio.create_task(work()) for _ in range(room)]
    try:
        await asyncio.gather(*workers)
    except BaseException:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    return [results[index] for index in sorted(results)]


def _size(items: object) -> int | None:
    return len(items) if isinstance(items, Sized) else None


def _behind(
    first: tuple[int, Item] | None, source: Iterator[tuple[int, Item]]
) -> Iterator[tuple[int, Item]]:
    """The items of the source that nobody has taken, behind one that was."""
    if first is not None:
        yield first
    yield from source


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


def _close(coroutines: object) -> None:
    """Coroutines that will not run: Python would warn that they were never awaited."""
    if isinstance(coroutines, list | tuple):
        for coroutine in coroutines:
            if inspect.iscoroutine(coroutine):
                coroutine.close()
