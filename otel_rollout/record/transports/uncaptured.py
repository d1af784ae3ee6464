"""Model calls that are in no trajectory: counted, so that the trajectories can say so."""

from __future__ import annotations

import asyncio
import os
import re
import threading

from otel_rollout.record.other_spans import here_and_now
from otel_rollout.record.privacy.secrets import public_path
from otel_rollout.record.processes.children import report_lost
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state

_LONGEST = 200
"""Characters of a path that are kept."""
_numbered = re.compile(
    r"(?<=^Thread-)\d+|(?<=^ThreadPoolExecutor-)\d+_\d+|(?<=^asyncio-portal-)[0-9a-f]+"
)
"""The numbers in names that Python and anyio give to threads: a server may have thousands."""
_MOST = 50
"""Libraries and paths, and places, that are told apart in one rollout."""


def note_uncaptured(
    active: ActiveRollout, library: str, path: str, *, spanned: bool = False
) -> None:
    """Count a request of a rollout to a model's path that is not captured.

    library: what sends it, such as `ollama (httpx)`.
    path: the path of the request, or an address; or the name of the span that reports it.
    spanned: True if a span reports it; False: a request was seen.
    """
    if path.startswith("/") or "://" in path:
        path = public_path(path).partition("?")[0]
    if not spanned:
        active.others.called(*here_and_now())
    with active.lock:
        counts = active.uncaptured
        key = library, path[:_LONGEST]
        if key not in counts and len(counts) >= _MOST:
            key = "other libraries", "other paths"
        counts[key] += 1


def note_outside() -> None:
    """Count a model call that is made here, outside any rollout, on each rollout that runs."""
    report_lost()
    place = _place()
    for reference in process_state.rollouts.valuerefs():
        active = reference()
        if isinstance(active, ActiveRollout) and active.running and active.pid == os.getpid():
            with active.lock:
                counts = active.outside
                counts[place if place in counts or len(counts) < _MOST else "other threads"] += 1


def _place() -> str:
    """Where a call is made: the thread, and the coroutine of the task."""
    thread = f"thread {_numbered.sub('*', threading.current_thread().name)!r}"
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return thread
    name = getattr(task.get_coro() if task else None, "__qualname__", None)
    return f"{thread}, task of {name}()" if name else thread
