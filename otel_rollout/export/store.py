"""What an export holds on disk: items of bytes by key, and trajectories of more spans than memory.

Used by whoever reads more than memory holds. Items are added and read, never changed. A
store is one SQLite file, of one process.
"""

from __future__ import annotations

import logging
import marshal
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.lines import private_file
from otel_rollout.rebuild import reconstruct
from otel_rollout.spans import SpanEvent, SpanRecord, as_records
from otel_rollout.trajectory import UNREADABLE, Trajectory

logger = logging.getLogger("otel_rollout")

_OPEN = """
PRAGMA page_size = 65536;  -- items are large
PRAGMA synchronous = OFF;  -- a process that is killed damages nothing
BEGIN;
CREATE TABLE IF NOT EXISTS items (number INTEGER PRIMARY KEY, key BLOB, item BLOB);
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_key ON items (key)"
_FIRSTS = "SELECT min(number), key FROM items GROUP BY key HAVING min(number) > ? ORDER BY 1"


class Store:
    """Items by key, in the order in which they were added.

    All is one transaction until `commit`: a file that is opened again has everything or nothing.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it for this user alone. OSError for a link, or others' file."""
        self._path = path
        private_file(path).close()
        with self._disk():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.executescript(_OPEN)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was not committed is lost."""
        self._connection.close()

    def execute(self, sql: str, *values: Any) -> list[Any]:
        """The rows of a statement. OSError for all that SQLite raises, such as a full disk."""
        with self._disk():
            return self._connection.execute(sql, values).fetchall()

    def add(self, key: str, item: bytes) -> None:
        """Add an item of a key. Its number is greater than those of the items before."""
        self.execute("INSERT INTO items (key, item) VALUES (?, ?)", _bytes(key), item)

    def commit(self) -> None:
        """Keep what was added; what is executed from now on is kept at once."""
        self.execute(_INDEX)
        self.execute("COMMIT")
        self.execute("PRAGMA journal_mode = PERSIST")  # many small transactions may follow

    def items(self, *keys: str) -> list[bytes]:
        """The items of keys, key by key."""
        select = "SELECT item FROM items WHERE key = ? ORDER BY number"
        with self._disk():
            return [bytes(item) for key in keys for (item,) in self.execute(select, _bytes(key))]

    def each_key(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """The number of the first item of each key, and the key, in this order.

        after: without the keys whose first item has this number or a smaller one.
        """
        self.execute(_INDEX)
        with self._disk():
            for first, key in self._connection.execute(_FIRSTS, (after,)):
                yield first, key.decode("utf-8", "surrogatepass")

    def every(self) -> Iterator[bytes]:
        """All items."""
        with self._disk():
            for (item,) in self._connection.execute("SELECT item FROM items ORDER BY number"):
                yield item

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, *UNREADABLE) as error:  # a damaged file has values of any type
            raise OSError(f"{self._path}: {error}") from error


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def reconstruct_by_rollout(
    records: Iterable[SpanRecord], path: Path, *, infer_rollouts: bool = False
) -> Iterator[Trajectory]:
    """The trajectories that `reconstruct` returns, in no order; memory holds the spans of one.

    Rollouts are read together if one claims calls of another, or if spans of their trace have lost
    their rollout id. The spans are in a file at this path meanwhile.
    """
    together = _Together()
    path.unlink(missing_ok=True)
    try:
        with Store(path) as store:
            for record in as_records(records):
                if (key := together.key_of(record, infer_rollouts=infer_rollouts)) is not None:
                    try:
                        store.add(key, _dump(record))
                    except ValueError as error:
                        logger.warning("a span of %s was passed over: %s", record.trace_id, error)
            for keys in together.keys_of(store):
                spans = [_load(item) for item in store.items(*keys)]
                found = reconstruct(spans, infer_rollouts=infer_rollouts)
                spans.clear()
                yield from found
    finally:
        path.unlink(missing_ok=True)


def _dump(record: SpanRecord) -> bytes:
    """The record as bytes for `_load` in this process. ValueError for values that have none."""
    fields = [getattr(record, name) for name in SpanRecord.__slots__]
    fields[_ATTRIBUTES] = dict(record.attributes)
    fields[_EVENTS] = [(e.name, e.time_ns, dict(e.attributes)) for e in record.events]
    return marshal.dumps(fields)


def _load(item: bytes) -> SpanRecord:
    fields = marshal.loads(item)  # noqa: S302 - `_dump` wrote it
    fields[_EVENTS] = [SpanEvent(*event) for event in fields[_EVENTS]]
    return SpanRecord(*fields)


_ATTRIBUTES = SpanRecord.__slots__.index("attributes")
_EVENTS = SpanRecord.__slots__.index("events")


def key_of(trajectory: Trajectory) -> str:
    """The key of a trajectory: that of its group, if it has one."""
    group = trajectory.group_key
    return f"trajectory {trajectory.id}" if group is None else f"group {group}"


def item_of(trajectory: Trajectory) -> tuple[str, bytes]:
    """Key and item of a trajectory that was rebuilt; the item of one that was read is its line."""
    return key_of(trajectory), trajectory.to_json().encode()


class _Together:
    """Which spans `reconstruct` has to read together: those of a key, and keys that are joined."""

    def __init__(self) -> None:
        self._joined: dict[str, str] = {}
        """A smaller key that has to be read together with this one."""
        self._truncated: set[str] = set()
        """Traces with a span whose rollout id was truncated."""
        self._foreign: set[str] = set()
        """Traces with spans of other libraries that are to be read if there are none of ours."""

    def key_of(self, record: SpanRecord, *, infer_rollouts: bool) -> str | None:
        """The rollout's id, else the trace's; None for a span that `reconstruct` does not read."""
        rollout_id, parent_id = record.text(sc.ROLLOUT_ID), record.text(sc.ROLLOUT_PARENT_ID)
        if rollout_id is not None:
            if parent_id is not None and sc.ROLLOUT_CLAIMS in record.attributes:
                self._join(rollout_id, parent_id)
            return rollout_id
        if sc.ROLLOUT_ID in record.cut:
            self._truncated.add(record.trace_id)
        elif record.scope != sc.SCOPE:
            if not infer_rollouts:
                return None
            self._foreign.add(record.trace_id)
        return _key_of_trace(record.trace_id)

    def keys_of(self, store: Store) -> Iterator[list[str]]:
        """The keys that are to be read together, for all keys that are to be read."""
        ours = self._read_again(store) if self._truncated or self._foreign else set[str]()
        members: defaultdict[str, list[str]] = defaultdict(list)
        for key in self._joined:
            members[self._top(key)].append(key)
        read = set[str]()
        for _, key in store.each_key():
            top = self._top(key)
            if key in ours or top in read:
                continue
            if top in members:
                read.add(top)
            yield [top, *members.get(top, ())]

    def _read_again(self, store: Store) -> set[str]:
        """Join the rollouts of truncated traces; the keys of foreign spans in traces of ours."""
        ours = set[str]()
        for record in map(_load, store.every()):
            rollout_id, trace = record.text(sc.ROLLOUT_ID), _key_of_trace(record.trace_id)
            if record.trace_id in self._truncated:
                self._join(rollout_id or trace, trace)
            elif record.trace_id in self._foreign and (rollout_id or record.scope == sc.SCOPE):
                ours.add(trace)
        return ours

    def _join(self, one: str, other: str) -> None:
        first, second = sorted((self._top(one), self._top(other)))
        if first != second:
            self._joined[second] = first

    def _top(self, key: str) -> str:
        while (above := self._joined.get(key)) is not None:
            key = above
        return key


def _key_of_trace(trace_id: str) -> str:
    """The key of the spans of a trace that have no rollout id."""
    return f"trace {trace_id}"
