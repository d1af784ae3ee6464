"""Run many rollouts and gather their trajectories: bounded, in order, each ending accounted for.

Coroutines are taken from the iterable as there is room for them, so a generator of ten thousand
holds only those that run. A rollout that fails gives a trajectory that says so, in its place.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sized
from typing import Any

from otel_rollout.errors import ConfigurationError, RolloutError
from otel_rollout.groups import TrajectoryGroup
from otel_rollout.progress import RolloutProgress
from otel_rollout.rollout import gather_trajectory
from otel_rollout.trajectory import Trajectory

Rollouts = Iterable[Coroutine[Any, Any, Any]]


class TooManyExceptionsError(RolloutError):
    """More rollouts failed than `max_exceptions` allows; the others were cancelled."""

    trajectories: list[Trajectory]
    """What had ended by then, failures included, in order of the coroutines."""

    def __init__(self, message: str, trajectories: list[Trajectory]) -> None:
        super().__init__(message)
        self.trajectories = trajectories


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


async def gather_group(
    coroutines: Rollouts,
    *,
    group_id: str | int | None = None,
    max_concurrency: int | None = None,
    max_exceptions: int | None = None,
    progress: bool | str = False,
    **options: Any,
) -> TrajectoryGroup:
    """Run coroutines as samples of one task, to be compared with each other.

        group = await gather_group(agent(task) for _ in range(8))

    Each gets `group_id` (a new one if none is given) and its place as `sample_index`. The rest is
    as for `gather_trajectories`.
    """
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
    total = len(coroutines) if isinstance(coroutines, Sized) else None
    source = enumerate(coroutines)
    ended: dict[int, Trajectory] = {}
    failures = 0

    async def work(first: tuple[int, Coroutine[Any, Any, Any]] | None = None) -> None:
        nonlocal failures
        for index, coroutine in _behind(first, source):
            trajectory = await gather_trajectory(coroutine, raise_errors=False, **options(index))
            ended[index] = trajectory
            bar.add(trajectory)
            if on_trajectory is not None:
                on_trajectory(trajectory)
            failures += trajectory.status in ("error", "cancelled")
            if max_exceptions is not None and failures > max_exceptions:
                raise TooManyExceptionsError(
                    f"{failures} of {len(ended)} rollouts failed, {max_exceptions} may "
                    f"(max_exceptions); the last with {trajectory.error}",
                    [ended[i] for i in sorted(ended)],
                )

    with RolloutProgress(progress, total) as bar:
        if max_concurrency is None:
            workers = [asyncio.create_task(work(item)) for item in source]
        else:
            count = max_concurrency if total is None else min(max_concurrency, total)
            workers = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            _close(coroutines)
            raise
    return [ended[index] for index in sorted(ended)]


def _behind(
    first: tuple[int, Any] | None, source: Iterator[tuple[int, Any]]
) -> Iterator[tuple[int, Any]]:
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
