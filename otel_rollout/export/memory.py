"""Finished trajectories in memory: to look at, or to feed a trainer in this process."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeVar

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import Episode, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import asyncio

OnFull = Literal["drop_oldest", "drop_newest", "block"]


class InMemoryTrajectoryExporter:
    """Keeps finished trajectories in memory: to look at them, or to feed a trainer in this process.

        exporter.get_finished_trajectories()           # a snapshot; nothing is removed
        batch = exporter.take(64)                      # waits for 64, removes and returns them
        batch = await exporter.take_async(64, timeout=60)
        for trajectory in exporter: ...                # waits for each, removes it
        async for trajectory in exporter: ...          # both end at shutdown

    `max_trajectories` bounds it; None does not. `on_full` decides what happens to a further
    trajectory: `drop_oldest` and `drop_newest` drop one and count it in `dropped`; `block` holds
    it, on the processor's thread and not on the agent's, until one was taken.
    """

    def __init__(
        self, max_trajectories: int | None = None, on_full: OnFull = "drop_oldest"
    ) -> None:
        if max_trajectories is not None and (
            not isinstance(max_trajectories, int) or max_trajectories < 1
        ):
            raise ConfigurationError(
                f"InMemoryTrajectoryExporter(max_trajectories=...): expected a number from 1 on, "
                f"or None for no bound, got {max_trajectories!r}"
            )
        if on_full not in ("drop_oldest", "drop_newest", "block"):
            raise ConfigurationError(
                f"InMemoryTrajectoryExporter(on_full=...): expected 'drop_oldest', 'drop_newest' "
                f"or 'block', got {on_full!r}"
            )
        self.blocking = on_full == "block"
        """True if `export` may wait; see `TrajectoryExporter.blocking`."""
        self.dropped = 0
        """Trajectories that were dropped because the exporter was full."""
        self._limit = max_trajectories
        self._on_full = on_full
        self._finished: deque[Trajectory] = deque()
        self._episodes: deque[Episode] = deque(maxlen=max_trajectories)
        self._changed = threading.Condition()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False
        renew_after_fork(self, _renew)

    def get_finished_trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectories that are held, in the order in which their rollouts ended."""
        with self._changed:
            return tuple(self._finished)

    def get_finished_episodes(self) -> tuple[Episode, ...]:
        """The episodes that are held, in the order in which they ended.

        Their trajectories are among those of `get_finished_trajectories`, too. Of more than
        `max_trajectories` the last ones are held.
        """
        with self._changed:
            return tuple(self._episodes)

    def export_episode(self, episode: Episode) -> None:
        """Hold the episode."""
        with self._changed:
            self._episodes.append(episode)

    def clear(self) -> None:
        """Forget the trajectories and episodes that are held."""
        with self._changed:
            self._finished.clear()
            self._episodes.clear()
            self._notify()

    def groups(self, size: int) -> list[TrajectoryGroup]:
        """Remove and return the groups that are complete: `size` trajectories of one `group_key`.

        In the order in which they became so; failures count. Of more than `size` trajectories the
        first ones are taken. Rollouts that ran inside them and are held, too, are removed with
        them: they are the group's `children`. Other trajectories without a group id stay.
        ValueError for no size.
        """
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"groups(size): expected a number from 1 on, got {size!r}")
        complete: list[TrajectoryGroup] = []
        with self._changed:
            members: dict[str, list[Trajectory]] = {}
            for trajectory in self._finished:
                if (key := trajectory.group_key) is None:
                    continue
                group = members.setdefault(key, [])
                group.append(trajectory)
                if len(group) == size:
                    complete.append(TrajectoryGroup.of(members.pop(key)))
            children = [child for group in complete for child in group.adopt(self._finished)]
            taken = {id(t) for group in complete for t in (*group.trajectories, *group.failures)}
            taken |= set(map(id, children))
            self._finished = deque(t for t in self._finished if id(t) not in taken)
            self._notify()
        return complete

    def take(self, count: int = 1, timeout: float | None = None) -> list[Trajectory]:
        """Wait until `count` trajectories are held, then remove and return the oldest of them.

        TimeoutError after `timeout` seconds, or if the exporter is shut down with fewer; then
        nothing is removed. ValueError for more than `max_trajectories`.
        """
        self._check(count)
        with self._changed:
            self._changed.wait_for(lambda: len(self._finished) >= count or self._closed, timeout)
            return self._remove(count, timeout)

    async def take_async(self, count: int = 1, timeout: float | None = None) -> list[Trajectory]:
        """`take` for a coroutine; other tasks run while it waits."""
        self._check(count)
        asyncio = import_module("asyncio")
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        deadline = None if timeout is None else loop.time() + timeout
        self._waiters.add((loop, event))
        try:
            while True:
                left = None if deadline is None else deadline - loop.time()
                with self._changed:
                    enough = len(self._finished) >= count or self._closed
                    if enough or (left is not None and left <= 0):
                        return self._remove(count, timeout)
                    event.clear()
                try:
                    await asyncio.wait_for(event.wait(), left)
                except asyncio.TimeoutError:
                    pass  # _remove raises, with the number that is held
        finally:
            self._waiters.discard((loop, event))

    def _check(self, count: int) -> None:
        if self._limit is not None and count > self._limit:
            raise ValueError(
                f"waiting for {count} trajectories would never end: this exporter holds fewer "
                f"(InMemoryTrajectoryExporter(max_trajectories={self._limit}))"
            )

    def _remove(self, count: int, timeout: float | None) -> list[Trajectory]:
        if len(self._finished) < count:
            why = "the exporter is shut down" if self._closed else f"{timeout} s have passed"
            raise TimeoutError(
                f"waited for {count} trajectories, {len(self._finished)} are held and {why}"
            )
        taken = [self._finished.popleft() for _ in range(count)]
        self._notify()
        return taken

    def __iter__(self) -> Iterator[Trajectory]:
        with suppress(TimeoutError):  # it is shut down
            while True:
                yield from self.take()

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        with suppress(TimeoutError):
            while True:
                for trajectory in await self.take_async():
                    yield trajectory

    def _notify(self) -> None:
        self._changed.notify_all()
        for loop, event in list(self._waiters):
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # a loop that was closed while something waited on it
                self._waiters.discard((loop, event))

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        """Hold the trajectories; see `on_full`."""
        with self._changed:
            for trajectory in trajectories:
                if self._on_full == "block":
                    self._changed.wait_for(self._has_room)
                is_full = self._limit is not None and len(self._finished) >= self._limit
                if self._closed or (is_full and self._on_full == "drop_newest"):
                    self.dropped += 1
                    continue
                if is_full:
                    self._finished.popleft()
                    self.dropped += 1
                self._finished.append(trajectory)
                self._notify()

    def _has_room(self) -> bool:
        return self._closed or self._limit is None or len(self._finished) < self._limit

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Take no more, and wake whoever waits. What is held can still be read."""
        with self._changed:
            self._closed = True
            self._notify()


def _renew(exporter: InMemoryTrajectoryExporter) -> None:
    exporter._changed = threading.Condition()
    exporter._waiters = set()


Exporter = TypeVar("Exporter")


def renew_after_fork(exporter: Exporter, renew: Callable[[Exporter], None]) -> None:
    """Call `renew` with the exporter in every child that is forked while it exists."""
    if hasattr(os, "register_at_fork"):
        itself = weakref.ref(exporter)

        def renew_copy() -> None:
            copy = itself()
            if copy is not None:
                renew(copy)

        os.register_at_fork(after_in_child=renew_copy)
