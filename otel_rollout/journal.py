"""A journal: records of bytes in a folder that outlive the process when `append` returns.

Records are appended to segments, which are files. Each record has its length and a checksum, and so
has its header: half a record at the end of a segment, which a killed process leaves, is passed
over, a damaged one is reported, and neither is ever read as a record. The checksums begin with a
random number of the segment, so that no content of a record looks like a record. A segment is
deleted when all of its records are released; which were released is not kept, so that records of
segments that are still there come again after a restart.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.lines import lock, private_file, write_whole
from otel_rollout.spans import crc32

SEGMENT_BYTES = 1 << 26
"""Bytes after which the next record begins a new segment: 64 MiB."""
_MARK = b"\xf0jrn"
_HEADER = struct.Struct("<4sII")
_SUM = struct.Struct("<I")
_HEAD = _HEADER.size + _SUM.size
"""Bytes before each record: mark, length, checksum; and the checksum of these."""
_LONGEST = (1 << 32) - 1
_SEED = (1 << 32) - 1
_is_segment = re.compile(r"[0-9a-f]{16}\.segment").fullmatch
_LOCK = "lock"


class Place(NamedTuple):
    """Where a record is in its journal."""

    segment: int
    """Names the file: its number, then 32 random bits."""
    offset: int
    length: int
    """Bytes of the record itself."""


class Journal:
    """The journal in a folder, which this process owns until `close`. Any thread may call.

    folder: created if it is not there, for this user alone.
    segment_bytes: a segment that has so many bytes takes no further records.
    max_bytes: bytes of all segments at most. None: as many as the disk takes.
    fsync: records are on the disk when `append` returns, and outlive a failure of power. Without,
        they outlive the process alone.
    ConfigurationError if another process owns the folder; OSError if it cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int | None = None,
        fsync: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._segment_bytes, self.max_bytes, self._fsync = segment_bytes, max_bytes, fsync
        self._owned = private_file(self.folder / _LOCK)
        if not lock(self._owned):
            self._owned.close()
            raise ConfigurationError(
                f"the journal {str(folder)!r} is in use by another process: end it, or name another"
                " folder"
            )
        self._sizes = {int(path.stem, 16): path.stat().st_size for path in _segments(self.folder)}
        self._unread = set(self._sizes)
        """Segments of former processes, until `records` has counted what they hold."""
        self._held = dict.fromkeys(self._sizes, 0)
        """Records that are not released, by segment."""
        self._file: BinaryIO | None = None
        self._segment = 0
        """The segment of `_file`, the only one that is appended to."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the folder; what was appended stays. A forked child closes its copies of
        the files alone: its parent goes on.
        """
        if self._pid != os.getpid():  # its lock may be held by a thread that is not here
            for file in (self._file, self._owned):
                if file is not None:
                    file.close()
            return
        with self._lock:
            self._end_segment()
            self._owned.close()

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(self._sizes.values())

    def has_room(self, size: int) -> bool:
        """True if records of so many bytes are likely to fit, by the limit and by the disk."""
        with self._lock:
            self._make_room(size)
            is_below = self.max_bytes is None or self.size + size + _HEAD <= self.max_bytes
        return is_below and shutil.disk_usage(self.folder).free > size

    def _make_room(self, size: int) -> None:
        """End the segment that is appended to, if it is in the way and nothing of it is held."""
        is_over = self.max_bytes is not None and self.size + size + _HEAD > self.max_bytes
        if is_over and self._file is not None and not self._held[self._segment]:
            self._end_segment()

    def sparse(self, held: Iterable[Place]) -> list[Place]:
        """Those of the records which are held that keep more bytes of others on the disk.

        Once they are appended again, and released here, their segments go.
        """
        by_segment: dict[int, list[Place]] = {}
        for place in held:
            by_segment.setdefault(place.segment, []).append(place)
        with self._lock:
            return [
                place
                for segment, places in by_segment.items()
                if len(places) == self._held[segment] and segment != self._segment
                if 2 * sum(place.length for place in places) < self._sizes[segment]
                for place in places
            ]

    def append(self, records: Sequence[bytes], *, reserve: int | None = 0) -> list[Place]:
        """Append records, all or none, with one sync; where each is.

        reserve: bytes of `max_bytes` that are left free. None ignores it, for records that move.
        OSError if the disk does not take them, or with them the journal would have more than
        that (`errno.ENOSPC`): nothing was appended then, and a later try may succeed.
        """
        if not records:
            return []
        needed = sum(map(len, records)) + _HEAD * len(records)
        with self._lock:
            self._make_room(needed + (reserve or 0))
            most = self.max_bytes
            if most is not None and reserve is not None and self.size + needed > most - reserve:
                problem = f"the journal may have {most - reserve} bytes, and has {self.size}"
                raise OSError(errno.ENOSPC, problem, str(self.folder))
            file, begin = self._open_segment(), self._sizes.get(self._segment, 0)
            places, offset = list[Place](), begin
            try:
                for record in records:
                    write_whole(file, _header(record, self._segment))
                    write_whole(file, record)
                    places.append(Place(self._segment, offset, len(record)))
                    offset += _HEAD + len(record)
                if self._fsync:
                    _sync(file.fileno())
            except BaseException:
                # After a failed sync nobody knows what is on the disk: go on in another file.
                with suppress(OSError):
                    file.truncate(begin)
                    _sync(file.fileno())
                with suppress(OSError):
                    self._sizes[self._segment] = file.seek(0, os.SEEK_END)
                self._end_segment()
                raise
            self._sizes[self._segment] = offset
            self._held[self._segment] += len(records)
            return places

    def read(self, place: Place) -> bytes:
        """The record at this place. SpanFormatError if it is damaged; OSError if it is gone."""
        return read_record(self.folder, place)

    def records(self, on_damage: Callable[[str], None]) -> Iterator[tuple[Place, bytes]]:
        """The records that former processes left, in order, once; they are held again.

        on_damage: called with a sentence for each place where records may be lost. OSError for a
        segment that cannot be read.
        """
        for segment in sorted(self._unread):
            path = _path(self.folder, segment)
            with open(path, "rb", buffering=0) as file:
                for place, record in _read_segment(file, segment, on_damage, str(path)):
                    with self._lock:
                        self._held[segment] += 1
                    yield place, record
            with self._lock:
                self._unread.discard(segment)
                self._delete_if_free(segment)

    def release(self, places: Iterable[Place]) -> None:
        """Hold these records no longer. Each is released once."""
        with self._lock:
            for place in places:
                self._held[place.segment] -= 1
                self._delete_if_free(place.segment)

    def _delete_if_free(self, segment: int) -> None:
        is_current = self._file is not None and segment == self._segment
        if not (self._held[segment] or segment in self._unread or is_current):
            with suppress(FileNotFoundError):
                os.unlink(_path(self.folder, segment))
            del self._sizes[segment], self._held[segment]

    def _open_segment(self) -> BinaryIO:
        """The file to append to. OSError if none can be created."""
        if self._file is not None and self._sizes[self._segment] >= self._segment_bytes:
            self._end_segment()
        if self._file is None:
            number = (max(self._sizes, default=0) >> 32) + 1
            segment = number << 32 | int.from_bytes(os.urandom(4), "big")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
            file = os.fdopen(os.open(_path(self.folder, segment), flags, 0o600), "r+b", 0)
            try:
                with suppress(PermissionError):  # the name of the file; Windows keeps it itself
                    found = os.open(self.folder, os.O_RDONLY)
                    try:
                        os.fsync(found)
                    finally:
                        os.close(found)
            except OSError:
                file.close()
                os.unlink(_path(self.folder, segment))
                raise
            self._file, self._segment = file, segment
            self._sizes[segment] = self._held[segment] = 0
        return self._file

    def _end_segment(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
            self._delete_if_free(self._segment)


def read_records(folder: Path, on_damage: Callable[[str], None]) -> Iterator[bytes]:
    """The records of a journal, also one that another process owns and appends to."""
    for path in sorted(_segments(folder)):
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            for _, record in _read_segment(file, int(path.stem, 16), on_damage, str(path)):
                yield record


def read_record(folder: Path, place: Place) -> bytes:
    """A record of a journal, also one that another process owns.

    SpanFormatError if it is damaged; OSError if its segment is gone.
    """
    path = _path(folder, place.segment)
    with open(path, "rb", buffering=0) as file:
        file.seek(place.offset)
        found = _length_and_sum(_read(file, _HEAD), place.segment)
        record = _read(file, place.length)
    if found != (place.length, crc32(record, place.segment & _SEED)):
        raise SpanFormatError(f"{path}: the record at byte {place.offset} is damaged")
    return record


def _read_segment(
    file: BinaryIO, segment: int, on_damage: Callable[[str], None], name: str
) -> Iterator[tuple[Place, bytes]]:
    """The records of a segment; a damaged one is reported, half a one at the end is not."""
    size, offset = os.fstat(file.fileno()).st_size, 0
    while offset < size:
        file.seek(offset)
        found = _length_and_sum(head := _read(file, _HEAD), segment)
        if found is None:
            after = _next_header(file, segment, offset + 1)
            if after < size or (len(head) == _HEAD and head.strip(b"\0")):
                on_damage(f"{name}: bytes {offset} to {after} are damaged")
            offset = after
            continue
        length, checksum = found
        if offset + _HEAD + length > size:
            return  # its writer was stopped before it was acknowledged
        record = _read(file, length)
        if crc32(record, segment & _SEED) == checksum:
            yield Place(segment, offset, length), record
        else:
            on_damage(f"{name}: the record at byte {offset}, of {length} bytes, is damaged")
        offset += _HEAD + length


def _header(record: bytes, segment: int) -> bytes:
    if len(record) > _LONGEST:
        raise OSError(errno.EFBIG, f"a record of {len(record)} bytes: expected {_LONGEST} at most")
    head = _HEADER.pack(_MARK, len(record), crc32(record, segment & _SEED))
    return head + _SUM.pack(crc32(head, segment & _SEED))


def _length_and_sum(head: bytes, segment: int) -> tuple[int, int] | None:
    """Length and checksum of a record by its header; None if that is no whole header."""
    if len(head) < _HEAD or not head.startswith(_MARK):
        return None
    if _SUM.unpack_from(head, _HEADER.size)[0] != crc32(head[: _HEADER.size], segment & _SEED):
        return None
    _, length, checksum = _HEADER.unpack_from(head)
    return length, checksum


_PIECE = 1 << 20


def _next_header(file: BinaryIO, segment: int, offset: int) -> int:
    """Where the next whole header begins, from here on; the end of the file if there is none."""
    kept = b""
    file.seek(offset)
    while piece := _read(file, _PIECE):
        text = kept + piece
        place = text.find(_MARK)
        while 0 <= place <= len(text) - _HEAD:
            if _length_and_sum(text[place : place + _HEAD], segment) is not None:
                return offset + place
            place = text.find(_MARK, place + 1)
        kept = text[1 - _HEAD :]
        offset += len(text) - len(kept)
    return offset + len(kept)


def _read(file: BinaryIO, length: int) -> bytes:
    """So many bytes of a file without a buffer; less at its end."""
    pieces = list[bytes]()
    while length and (piece := file.read(length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _segments(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if _is_segment(path.name))


def _path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:016x}.segment"


_sync = getattr(os, "fdatasync", os.fsync)
