"""Episodes from spans: what a workflow wrote of its task, and the rebuilt trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.rebuild.reconstruction import reconstruct
from otel_rollout.spans import SpanKey, SpanRecord, as_records
from otel_rollout.trajectory import Episode
from otel_rollout.wire import loads


def reconstruct_episodes(spans: Iterable[Any]) -> list[Episode]:
    """The episodes that these spans tell of, in order of their start; see `reconstruct`.

    An episode whose own span is missing is not there, its trajectories are among those of
    `reconstruct`. One of whose trajectories no span came has the others.
    """
    records = list(as_records(spans))
    trajectories = {trajectory.id: trajectory for trajectory in reconstruct(records)}
    workflows: dict[SpanKey, SpanRecord] = {}
    for record in sorted(records, key=lambda r: (r.start_time_ns, r.key)):
        if record.text(sc.ROLLOUT_EPISODE) is not None:
            workflows.setdefault(record.key, record)
    episodes: list[Episode] = []
    for record in workflows.values():
        try:
            episodes.append(Episode.of(loads(record.text(sc.ROLLOUT_EPISODE) or ""), trajectories))
        except (KeyError, TypeError, ValueError):
            continue  # what was cut is not in `attributes`: this one was never whole
    return episodes
