"""Files that a collector rotates: all parts of one, each once, also while it is rotated.

The collector's file exporter renames `traces.jsonl` to
`traces-2026-11-22T18-30-00.000-size.jsonl` and begins a new one. What is open stays open under its
new name, so the current file is opened before the others are looked for, and each is known by its
inode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import BinaryIO

from otel_rollout.compressed import BUFFER
from otel_rollout.errors import SpanFormatError
from otel_rollout.lines import STARTED

Inode = tuple[int, int]
_is_time = re.compile(r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}(-[a-z]+)?").fullmatch
# Older collectors write no reason after the time.


def parts_of(
    path: str | os.PathLike[str], others: Collection[Inode] = ()
) -> Iterator[tuple[str, BinaryIO]]:
    """The names and contents of a file and of those that were renamed beside it, oldest first.

    What begins while they are read is there too. `others`: files that were read before.
    """
    name = os.fspath(path)
    read, names = set(others), set[str]()
    with ExitStack() as opened:
        # Those that were current stay open, so that no new file has the inode of one.
        current: BinaryIO = opened.enter_context(open(name, "rb", BUFFER))
        while True:
            inode = inode_of(current)
            is_new = inode not in read
            read.add(inode)
            for rotated in rotated_beside(name):
                if rotated not in names and (file := _opened(rotated, read)) is not None:
                    names.add(rotated)
                    with file:
                        yield rotated, file
            if is_new:
                yield name, current
            following = _opened(name, read) if os.path.isfile(name) else None
            if following is None:
                return
            current = opened.enter_context(following)


def rotated_beside(path: str | os.PathLike[str]) -> list[str]:
    """The names of the files to which a collector has rotated this one, oldest first."""
    folder, file = os.path.split(os.fspath(path))
    stem, extension = os.path.splitext(file)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return []  # e.g. a pipe in a folder that may not be listed
    return [
        os.path.join(folder, each)
        for each in sorted(there)
        if each.startswith(stem)
        and each.endswith(extension)
        and _is_time(each[len(stem) : len(each) - len(extension)])
    ]


_BESIDE = (STARTED, ".tokens.lock", ".tokens.intents", ".tokens.incomplete")
"""Suffixes of files that are not sources: beside trajectories, and in stores of NeMo Gym."""


def files_of(path: str | os.PathLike[str]) -> list[str]:
    """The files of a folder, without those that `parts_of` another one has; of a file itself.

    Folders in it are searched too if they are Hive partitions, named KEY=VALUE.
    SpanFormatError for a folder without files.
    """
    name = os.fspath(path)
    if not os.path.isdir(name):
        return [name]
    files = list(_files_in(name))
    if not files:
        raise SpanFormatError(f"{name}: there is no file in this folder")
    rotated = {part for each in files for part in rotated_beside(each)}
    return [each for each in files if each not in rotated]


def _files_in(folder: str) -> Iterator[str]:
    for each in sorted(os.listdir(folder)):
        path = os.path.join(folder, each)
        if "=" in each and os.path.isdir(path) and not os.path.islink(path):
            yield from _files_in(path)
        elif each[0] != "." and os.path.isfile(path) and not each.endswith(_BESIDE):
            yield path


def inode_of(file: BinaryIO) -> Inode:
    """The device and number of an open file, by which it is known under any name."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _opened(name: str, read: Collection[Inode]) -> BinaryIO | None:
    """A file that was not read so far. None: it was, or it is gone meanwhile."""
    try:
        file = open(name, "rb", BUFFER)  # noqa: SIM115 - its reader closes it
    except FileNotFoundError:
        return None
    if inode_of(file) in read:
        file.close()
        return None
    return file
