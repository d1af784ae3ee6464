"""Where the parts of a JSON text begin and end. Pure.

Writers scan a latin-1 view of the body: offsets are byte offsets, and no byte of a multi-byte
character can be mistaken for JSON syntax. It is scanned on the agent's thread: `_space` is C code,
called without a function around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from otel_rollout.wire.json import Json, scan

_space: Callable[[str, int], re.Match[str]] = re.compile(r"[ \t\n\r]*").match  # type: ignore[assignment]
"""The white space at a position: it matches everywhere."""


def expect(text: str, position: int, wanted: str) -> int:
    """Where this character ends, which has to come next. ValueError if it does not."""
    position = _space(text, position).end()
    if not text.startswith(wanted, position):
        raise ValueError(f"not JSON at character {position}: expected {wanted!r}")
    return position + len(wanted)


def elements(text: str, position: int) -> Iterator[tuple[Json, int, int]]:
    """`(value, start, end)` of the array elements from `position` on; `text[end]` follows each.

    `position` is just after `[` or after an earlier element.
    """
    is_first = text.startswith("[", position - 1)
    position = _space(text, position).end()
    if not is_first and not text.startswith((",", "]"), position):
        raise ValueError(f"not JSON at character {position}: expected ',' or ']'")
    while not text.startswith("]", position):
        if text.startswith(",", position):
            position = _space(text, position + 1).end()
        value, end = scan(text, position)
        yield value, position, end
        position = _space(text, end).end()
        if not text.startswith((",", "]"), position):
            raise ValueError(f"not JSON at character {position}: expected ',' or ']'")


def is_list_of_objects(text: str, start: int) -> bool:
    """True if the JSON value at `start` is a list whose first element is an object."""
    return text.startswith("[", start) and text.startswith("{", _space(text, start + 1).end())


def members(text: str, ends: Callable[[str, int], int | None]) -> Iterator[tuple[str, int, int]]:
    """`(key, start, end)` of the members of the JSON object that `text` is.

    `ends(key, start)` gives the end of a value where that is known; None has it scanned.
    """
    position = _space(text, expect(text, 0, "{")).end()
    while not text.startswith("}", position):
        key, position = scan(text, position)
        if not isinstance(key, str):
            raise ValueError("not JSON: an object's key is a string")
        if not text.startswith(":", position):
            position = expect(text, position, ":") - 1
        start = _space(text, position + 1).end()
        end = ends(key, start)
        if end is None:
            _, end = scan(text, start)
        yield key, start, end
        position = _space(text, end).end()
        if text.startswith(",", position):
            position = _space(text, position + 1).end()
        elif not text.startswith("}", position):
            raise ValueError(f"not JSON at character {position}: expected ',' or '}}'")
    if _space(text, position + 1).end() != len(text):
        raise ValueError("not JSON: text after the object")
