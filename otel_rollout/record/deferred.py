"""Work that the garbage collector asks for, and that has to wait.

The collector runs anywhere, also where a lock is held that ending a span takes. Such work is done
at the next model call, or when a rollout is next looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from otel_rollout.record.state import process_state


def later(step: Callable[[], None]) -> None:
    """Have this done by the next `settle`."""
    process_state.waiting.append(step)


def settle() -> None:
    """Do everything that waits."""
    waiting = process_state.waiting
    while waiting:
        try:
            step = waiting.popleft()
        except IndexError:
            return  # another thread was faster
        step()
