"""Lines of a source that memory holds, however long they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 1 << 28
"""Bytes of one line, or of one message, at most: 256 MiB. A batch of spans has a few."""
_PIECE = 1 << 20


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """`(number, line)` of each line; None for one that is longer than `LONGEST`.

    Half a line at the end is read again: its writer may be writing.
    """
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        while not line.endswith(b"\n") and len(line) <= LONGEST:
            rest = file.readline(LONGEST + 1 - len(line))
            if not rest:
                yield number, line
                return
            line += rest
        if len(line) <= LONGEST:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_PIECE)
        yield number, None


def too_long(what: str) -> str:
    """The sentence about a line or message that is too long to be read."""
    return f"{what} is longer than {LONGEST} bytes: no sender of spans writes it so"
