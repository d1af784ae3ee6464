"""How two requests differ, member by member: as JSON, and side by side on a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from otel_rollout.terminal import number_of
from otel_rollout.wire import Json, dumps

_MOST_ROWS = 20
"""Differences that are kept; of the others only the number."""
_BEFORE, _LONGEST = 24, 240
"""Characters of a value before its first difference, and in all."""
_ABSENT: Any = object()
"""Stands for a member that a request has not."""


@dataclass(frozen=True, slots=True)
class Row:
    """One place in which two requests differ."""

    at: str
    """Where it is, such as `messages[3].content`."""
    recorded: str | None
    """What was recorded there, as JSON, long values around their first difference. None: nothing
    is."""
    asked: str | None
    """What is asked there."""

    def to_dict(self) -> dict[str, Json]:
        """The row as JSON; without the member of a side that has nothing."""
        both = {"recorded": self.recorded, "asked": self.asked}
        return {"at": self.at, **{name: text for name, text in both.items() if text is not None}}


@dataclass(frozen=True, slots=True)
class Difference:
    """A request that is none of those that were recorded."""

    kind: str
    """`request`: it differs from the closest one. `repeated`: it came more often than recorded.
    `path`: nothing was recorded at its path. `reply`: its reply was read further than recorded."""
    path: str
    """The path of the request."""
    call: str | None
    """The recorded call that it is compared with, in words. None: there is none."""
    rows: list[Row] = field(default_factory=list)
    """What differs, in the order of the recorded request."""
    more: int = 0
    """How many places differ beside these."""
    times: int = 0
    """How often the request was recorded, where it came more often."""

    def __str__(self) -> str:
        if self.kind == "path":
            return f"no call at {self.path} was recorded"
        if self.kind == "reply":
            return f"the reply to {self.path} was read further than recorded in {self.call}"
        if self.kind == "repeated":
            often = "once" if self.times == 1 else f"{self.times} times"
            return f"a request to {self.path} was recorded {often}, and came once more: {self.call}"
        places = ", ".join(row.at for row in self.rows[:3]) + (", ..." if self._many > 3 else "")
        return f"a request to {self.path} differs from {self.call} in {places}"

    @property
    def _many(self) -> int:
        return len(self.rows) + self.more

    def to_dict(self) -> dict[str, Json]:
        """The difference as JSON."""
        found = {"kind": self.kind, "path": self.path, "call": self.call}
        more = {"more": self.more} if self.more else {}
        return {**found, "rows": [row.to_dict() for row in self.rows], **more}

    def lines(self, width: int) -> list[str]:
        """The difference in lines of at most so many characters, the requests side by side."""
        found = wrap(str(self), width, subsequent_indent="  ")
        if not self.rows:
            return found
        half = max(8, (width - 5) // 2)
        found += ["", f"  {'recorded':<{half}} | asked"]
        for row in self.rows:
            found.append(f"{row.at}:")
            cells = (_cell(text, half) for text in (row.recorded, row.asked))
            for one, other in zip_longest(*cells, fillvalue=""):
                found.append(f"  {one:<{half}} | {other}".rstrip())
        if self.more:
            found.append(f"and in {number_of(self.more, 'more place')}")
        return found


def _cell(text: str | None, width: int) -> list[str]:
    """One side of a row, in lines."""
    if text is None:
        return ["(not there)"]
    return [text[start : start + width] for start in range(0, len(text), width)]


def difference_of(path: str, call: str, recorded: Json, asked: Json) -> Difference:
    """How a request differs from a recorded one, which it is not equal to."""
    places = list(_places("", recorded, asked))
    rows = [_row(*place) for place in places[:_MOST_ROWS]]
    return Difference("request", path, call, rows, max(0, len(places) - _MOST_ROWS))


def _places(at: str, recorded: Json, asked: Json) -> Iterator[tuple[str, Json, Json]]:
    """The places in which two values differ, as deep as both have the same kind."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in {**recorded, **asked}:
            inner = f"{at}.{name}" if at else name
            yield from _places(inner, recorded.get(name, _ABSENT), asked.get(name, _ABSENT))
    elif isinstance(recorded, list) and isinstance(asked, list):
        pairs = zip_longest(recorded, asked, fillvalue=_ABSENT)
        for number, (one, other) in enumerate(pairs):
            yield from _places(f"{at}[{number}]", one, other)
    elif type(recorded) is not type(asked) or recorded != asked:
        yield at or "body", recorded, asked


def _row(at: str, recorded: Json, asked: Json) -> Row:
    one, other = (None if side is _ABSENT else dumps(side) for side in (recorded, asked))
    start = 0
    if one is not None and other is not None:
        pairs = enumerate(zip(one, other, strict=False))
        start = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    return Row(at, _around(one, start), _around(other, start))


def _around(text: str | None, place: int) -> str | None:
    """A part of a text around a place."""
    if text is None or len(text) <= _LONGEST:
        return text
    start = max(0, place - _BEFORE)
    end = start + _LONGEST
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
