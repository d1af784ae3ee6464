"""Time limits of rollouts: those of `timeout=`, and asyncio's own that somebody put around one.

A limit cancels the task. Who is cancelled cannot see why, so the limits of a task are noted as a
rollout begins, and asked when it ends by a cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

R = TypeVar("R")
_MOST_TIMERS = 1_024
"""Timers of a loop that are looked at: limits around a rollout are not searched among more."""


class RolloutTimeoutError(TimeoutError):
    """The rollout took longer than its `timeout`, or than a limit around it."""


class TimeLimit:
    """Cancels the current task once so many seconds have passed, until `end` is called."""

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.seconds, self._task, self._is_over = seconds, task, False
        self._cancelling = self._count("cancelling")
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _count(self, name: str) -> int:
        """A count of cancellations of the task; Python 3.10 keeps none."""
        return int(getattr(self._task, name, lambda: 0)())

    def _expire(self) -> None:
        self._is_over = True
        self._task.cancel()

    def expired(self) -> bool:
        """True if the time was over before the end."""
        return self._is_over

    def end(self, error: BaseException | None) -> BaseException | None:
        """How the work ended that ended with this error: with a RolloutTimeoutError if it was late.

        None: it returned. A cancellation of somebody else's stays one.
        """
        self._timer.cancel()
        if not self._is_over:
            return error
        by_others = self._count("uncancel") > self._cancelling
        if isinstance(error, asyncio.CancelledError) and by_others:
            return error
        if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
            return error
        return RolloutTimeoutError(f"the rollout took longer than timeout={self.seconds:g} seconds")


async def in_time(seconds: float, work: Awaitable[R]) -> R:
    """Await this; RolloutTimeoutError once so many seconds have passed."""
    limit, failure, result = TimeLimit(seconds), None, None
    try:
        result = await work
    except BaseException as error:
        failure = error
        if (ended := limit.end(error)) is error:
            raise
    else:
        ended = limit.end(None)
    if ended is not None:
        raise ended from failure
    return result  # type: ignore[return-value]


Limits = tuple[Callable[[], bool], ...]
"""Functions that are true once a time is over."""


def limits_here() -> Limits:
    """The limits of the current task that asyncio lets find: none of another task's."""
    loop = asyncio._get_running_loop()
    return () if loop is None else tuple(_limits_of(loop, asyncio.current_task(loop)))


def _limits_of(loop: Any, task: Any) -> Iterator[Callable[[], bool]]:
    # asyncio.timeout, and wait_for from Python 3.12 on.
    timers = getattr(loop, "_scheduled", ())
    for timer in timers if len(timers) <= _MOST_TIMERS else ():
        owner: Any = getattr(getattr(timer, "_callback", None), "__self__", None)
        if getattr(owner, "_task", None) is task and hasattr(owner, "expired"):
            yield owner.expired
        elif getattr(owner, "_host_task", None) is task and hasattr(owner, "deadline"):  # anyio's
            yield partial(
                lambda scope: scope.cancel_called and loop.time() >= scope.deadline, owner
            )
    # wait_for before that: it waits in another task, for a future that only its timer fulfils.
    for callback, _ in getattr(task, "_callbacks", None) or ():
        if getattr(callback, "func", None) is getattr(asyncio.tasks, "_release_waiter", task):
            yield partial(lambda waiter: waiter.done() and not waiter.cancelled(), callback.args[0])
