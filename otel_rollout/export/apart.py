"""Trajectories from more spans than memory holds: `reconstruct`, rollout by rollout."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from otel_rollout import semconv as sc
from otel_rollout.export.partitions import Partitions
from otel_rollout.rebuild import reconstruct
from otel_rollout.spans import SpanRecord, as_records, from_line, to_line
from otel_rollout.trajectory import Trajectory

logger = logging.getLogger("otel_rollout")


def reconstruct_apart(
    records: Iterable[SpanRecord], folder: Path, parts: int, *, infer_rollouts: bool = False
) -> Iterator[Trajectory]:
    """The trajectories that `reconstruct` gives, in no order; memory holds the spans of one.

    Rollouts are read together if one claims calls of another, or if spans of their trace have lost
    their rollout id. Besides, two numbers are held for each rollout. The folder is removed in the
    end.
    """
    apart = Partitions(folder / "apart", parts)
    together = Partitions(folder / "together", parts)
    links = _Links()
    try:
        for record in as_records(records):
            if (key := links.add(record, infer_rollouts=infer_rollouts)) is not None:
                try:
                    apart.add(key, to_line(record))
                except (ValueError, RecursionError) as error:
                    logger.warning("a span of %s was passed over: %s", record.trace_id, error)
        if links.close():
            for item in apart.items():
                record = from_line(item)
                if (joint := links.first(record)) is not None:
                    together.add(joint, item)
            apart.remove()
            apart = together
        for part in range(parts):
            for items in apart.groups(part):
                found = reconstruct(map(from_line, items), infer_rollouts=infer_rollouts)
                items.clear()
                yield from found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Links:
    """The rollouts and traces whose spans `reconstruct` has to read together, as hashes of ids."""

    def __init__(self) -> None:
        self._trace_of: dict[int, int] = {}
        """Trace of each rollout."""
        self._ours: set[int] = set()
        """Traces that have spans of ours."""
        self._truncated: set[int] = set()
        """Traces with a span whose rollout id was truncated."""
        self._above: dict[int, int] = {}
        """A smaller key that has to be read together with this one."""
        self._others = False
        """True if there are spans of other libraries that are to be read."""

    def add(self, record: SpanRecord, *, infer_rollouts: bool) -> str | None:
        """The key of a span; None for a span that `reconstruct` does not read."""
        trace, rollout_id = hash(record.trace_id), record.text(sc.ROLLOUT_ID)
        if sc.ROLLOUT_ID in record.cut:
            self._truncated.add(trace)
        if rollout_id is not None:
            self._ours.add(trace)
            if sc.ROLLOUT_SCHEMA_VERSION in record.attributes:
                self._trace_of[hash(rollout_id)] = trace
            else:
                self._trace_of.setdefault(hash(rollout_id), trace)
            parent_id = record.text(sc.ROLLOUT_PARENT_ID)
            if parent_id is not None and sc.ROLLOUT_CLAIMS in record.attributes:
                self._link(hash(rollout_id), hash(parent_id))
            return rollout_id
        if record.scope == sc.SCOPE or sc.ROLLOUT_ID in record.cut:
            self._ours.add(trace)
            return record.trace_id
        self._others = self._others or infer_rollouts
        return record.trace_id if infer_rollouts else None

    def close(self) -> bool:
        """True if spans of several keys have to be read together, or some are not to be read."""
        for rollout, trace in self._trace_of.items():
            if trace in self._truncated:
                self._link(rollout, trace)
        return bool(self._above) or (self._others and bool(self._ours))

    def first(self, record: SpanRecord) -> str | None:
        """The key that spans to be read together share; None for a span that is not to be read."""
        rollout_id, trace = record.text(sc.ROLLOUT_ID), hash(record.trace_id)
        if rollout_id is None and trace in self._ours and trace not in self._truncated:
            return None
        return str(self._top(trace if rollout_id is None else hash(rollout_id)))

    def _link(self, one: int, other: int) -> None:
        first, second = sorted((self._top(one), self._top(other)))
        if first != second:
            self._above[second] = first

    def _top(self, key: int) -> int:
        while (above := self._above.get(key)) is not None:
            key = above
        return key
