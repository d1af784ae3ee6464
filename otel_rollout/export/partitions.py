"""More items than memory holds, brought together by key: spans of rollouts, groups of trajectories.

Items are written to files as they come. What is held is where they are in one file at a time, and
the items of one key. Keys come out in the order of their first items, file by file; which file a
key is in is the same in every process.
"""

from __future__ import annotations

import pickle
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from otel_rollout import semconv as sc
from otel_rollout.rebuild import reconstruct
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.trajectory import Trajectory

PART = 256_000_000
"""Bytes of a source for which there is one more file."""
_UNKNOWN = 32
_BUFFER = 1 << 16
_HEAD = struct.Struct(">II")


def parts_for(size: int | None) -> int:
    """How many files to take for sources of so many bytes; None where that is not known."""
    return _UNKNOWN if size is None else min(1 + size // PART, 512)


class Partitions:
    """Items in files of a folder, by key. What is there already is taken up with its items."""

    def __init__(self, folder: Path, parts: int) -> None:
        self.parts = parts
        self._folder = folder
        self._buffers: dict[int, bytearray] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, key: str, item: bytes) -> None:
        """Write an item of a key."""
        name = key.encode("utf-8", "surrogatepass")
        part = zlib.crc32(name) % self.parts
        buffer = self._buffers.setdefault(part, bytearray())
        buffer += _HEAD.pack(len(name), len(item))
        buffer += name
        buffer += item
        if len(buffer) > _BUFFER:
            self._write(part)

    def flush(self) -> None:
        """Have everything in the files."""
        for part in list(self._buffers):
            self._write(part)

    def items(self) -> Iterator[bytes]:
        """All items, file by file."""
        self.flush()
        for part in range(self.parts):
            if self._path(part).exists():
                with open(self._path(part), "rb") as file:
                    while head := file.read(_HEAD.size):
                        name, size = _HEAD.unpack(head)
                        file.seek(name, 1)
                        yield file.read(size)

    def groups(self, part: int) -> Iterator[list[bytes]]:
        """The items of each key in one file, in the order in which they came."""
        self.flush()
        path = self._path(part)
        if not path.exists():
            return
        places: dict[bytes, list[tuple[int, int]]] = {}
        with open(path, "rb") as file:
            while head := file.read(_HEAD.size):
                name, size = _HEAD.unpack(head)
                places.setdefault(file.read(name), []).append((file.tell(), size))
                file.seek(size, 1)
            for found in places.values():
                items: list[bytes] = []
                for place, size in found:
                    file.seek(place)
                    items.append(file.read(size))
                yield items

    def remove(self) -> None:
        """Delete the files."""
        self._buffers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, part: int) -> Path:
        return self._folder / f"{part:04}"

    def _write(self, part: int) -> None:
        with open(self._path(part), "ab") as file:
            file.write(self._buffers.pop(part))


def reconstruct_apart(
    records: Iterable[SpanRecord], folder: Path, parts: int, *, infer_rollouts: bool = False
) -> Iterator[Trajectory]:
    """What `reconstruct` gives, holding the spans of one rollout at a time; in no order.

    Rollouts that have to be read together (one has calls of another, or spans of their trace have
    lost whose they are) are. Besides, two numbers are held for each rollout. The folder is removed
    in the end.
    """
    apart = Partitions(folder / "apart", parts)
    together = Partitions(folder / "together", parts)
    links = _Links()
    try:
        for record in map(as_record, records):
            if (key := links.add(record, infer_rollouts=infer_rollouts)) is not None:
                apart.add(key, pickle.dumps(record, pickle.HIGHEST_PROTOCOL))
        if links.close():
            for item in apart.items():
                record = pickle.loads(item)  # noqa: S301 - this process wrote it
                if (joint := links.first(record)) is not None:
                    together.add(joint, item)
            apart.remove()
            apart = together
        for part in range(parts):
            for items in apart.groups(part):
                found = reconstruct(map(pickle.loads, items), infer_rollouts=infer_rollouts)
                items.clear()
                yield from found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Links:
    """Which spans have to be read together, as far as `reconstruct` looks at several rollouts."""

    def __init__(self) -> None:
        self._trace_of: dict[int, int] = {}
        self._ours: set[int] = set()
        self._cut: set[int] = set()
        self._above: dict[int, int] = {}
        self._others = False

    def add(self, record: SpanRecord, *, infer_rollouts: bool) -> str | None:
        """The key of a span; None where nothing looks at it."""
        trace, rollout_id = hash(record.trace_id), record.text(sc.ROLLOUT_ID)
        if sc.ROLLOUT_ID in record.cut:
            self._cut.add(trace)
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
        """Whether spans of several keys have to be read together, or some not at all."""
        for rollout, trace in self._trace_of.items():
            if trace in self._cut:
                self._link(rollout, trace)
        return bool(self._above) or (self._others and bool(self._ours))

    def first(self, record: SpanRecord) -> str | None:
        """The same key for what has to be read together; None for what is not to be read."""
        rollout_id, trace = record.text(sc.ROLLOUT_ID), hash(record.trace_id)
        if rollout_id is None and trace in self._ours and trace not in self._cut:
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
