"""More items than memory holds, brought together by key in files of a folder.

Items are written to files as they come. Held in memory are the places of the items of one file at a
time, and the items of one key. Keys come out in the order of their first items, file by file; the
file of a key is the same in every process.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from otel_rollout.errors import ConfigurationError

PART = 256_000_000
"""Bytes of a source for which there is one more file."""
_UNKNOWN = 32
"""Files for sources whose size is not known."""
_BUFFER = 1 << 16
"""Bytes of a file that are held before they are written."""
_HEAD = struct.Struct(">II")
"""Lengths of key and item, before each item."""


def without_links(path: str, flags: int) -> int:
    """An `opener` for files beside an output: a link is not followed (OSError)."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def parts_for(size: int | None) -> int:
    """The number of files for sources of so many bytes; None: the size is not known."""
    return _UNKNOWN if size is None else min(1 + size // PART, 512)


class Partitions:
    """Items in files of a folder, by key. Files that are there already keep their items."""

    def __init__(self, folder: Path, parts: int) -> None:
        self.parts = parts
        """Number of files."""
        self._folder = folder
        self._buffers: dict[int, bytearray] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink():
            raise ConfigurationError(
                f"{folder}: expected a folder of our own, got a link: somebody else may read and "
                f"change what is written there; remove it"
            )

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
        """Write everything to the files."""
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
        with open(self._path(part), "ab", opener=without_links) as file:
            file.write(self._buffers.pop(part))
