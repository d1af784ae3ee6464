"""Trajectories in order of a key, for verbs and sources; memory holds the keys alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from otel_rollout.export import Store
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import dumps


def ordered(items: Iterable[Any], key: Callable[[Any], Any], *, descending: bool) -> list[Any]:
    """The items in order of a key; those whose key is None, or no number, are last."""
    known: list[Any] = []
    unknown: list[Any] = []
    for item in items:
        value = key(item)
        (unknown if value is None or value != value else known).append(item)

    def by(item: Any) -> tuple[bool, Any]:
        value = key(item)  # a file may have a text for a number, and metadata anything
        value = dumps(value) if isinstance(value, list | dict) else value
        return isinstance(value, str), value

    return [*sorted(known, key=by, reverse=descending), *unknown]


def lines_in_order(
    trajectories: Iterable[Trajectory],
    key: Callable[[Trajectory], Any],
    *,
    descending: bool = False,
    folder: Path | None = None,
) -> Iterator[bytes]:
    """Trajectories as lines in order of a key; those whose key is None are last.

    They are in a temporary file, in the folder if one is given; memory holds the keys.
    """
    with Store(folder / "trajectories" if folder else None) as store:
        places: list[tuple[Any, int]] = []
        for trajectory in trajectories:
            line = dumps(trajectory.to_dict()).encode() + b"\n"
            places.append((key(trajectory), store.add("", line)))
        for _, number in ordered(places, lambda place: place[0], descending=descending):
            yield store.item(number)
