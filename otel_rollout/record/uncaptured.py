"""Model calls that are in no trajectory: counted, so that the trajectories can say so."""

from __future__ import annotations

import os
import threading

from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.secrets import public_path
from otel_rollout.record.state import process_state

_LONGEST = 200
"""Characters of a path that are kept."""
_MOST = 50
"""Libraries and paths, and places, that are told apart in one rollout."""


def note_uncaptured(active: ActiveRollout, library: str, path: str) -> None:
    """Count a request of a rollout to a model's path that is not captured.

    library: what sends it, such as `ollama (httpx)`.
    """
    with active.lock:
        counts = active.uncaptured
        key = library, public_path(path).partition("?")[0][:_LONGEST]
        if key not in counts and len(counts) >= _MOST:
            key = "other libraries", "other paths"
        counts[key] += 1


def note_outside() -> None:
    """Count a model call that is made here, outside any rollout, on each rollout that runs."""
    place = f"thread {threading.current_thread().name!r}"
    for reference in process_state.rollouts.valuerefs():
        active = reference()
        if isinstance(active, ActiveRollout) and active.running and active.pid == os.getpid():
            with active.lock:
                counts = active.outside
                counts[place if place in counts or len(counts) < _MOST else "other threads"] += 1
