"""JSON as model servers and clients write it: parsed as the OpenAI client does, copied, checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from otel_rollout.wire.depth import check_depth

Json = Any
"""A JSON value: None, bool, int, float, str, list or dict with string keys."""
Params: TypeAlias = Mapping[str, Json]
"""The members of a request, such as `model` and `temperature`."""
Message: TypeAlias = dict[str, Json]
"""A message of a conversation in wire form, such as `{"role": "user", "content": "Hi"}`."""
Reply: TypeAlias = Mapping[str, Json]
"""The body of a response, a stream in unstreamed shape."""
Choice: TypeAlias = Mapping[str, Json]
"""One sampled choice as the server sent it; the reply itself where an API has only one."""
Chunk: TypeAlias = dict[str, Json]
"""The JSON of one event of a stream."""


_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


_decoder = json.JSONDecoder(strict=False, parse_constant=_CONSTANTS.__getitem__)


def loads(text: str | bytes) -> Json:
    """Parse JSON as the OpenAI client does; NaN is the one `math.nan`, so equal texts are equal."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return _decoder.decode(text)


scan = _decoder.raw_decode
"""`scan(text, start) -> (value, end)`: the JSON value that begins exactly at `start`."""


def dumps(value: Json) -> str:
    """Compact JSON that any UTF-8 transport carries: lone surrogates are written escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def finite(value: Json) -> Json:
    """A copy with null for NaN and infinities, which are no JSON; tuples become lists."""
    whole = [value]
    unfinished: list[Any] = [whole]
    while unfinished:
        container = unfinished.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, Mapping):
                container[key] = item = dict(item)
                unfinished.append(item)
            elif isinstance(item, list | tuple):
                container[key] = item = list(item)
                unfinished.append(item)
            elif isinstance(item, float) and not math.isfinite(item):
                container[key] = None
    return whole[0]


def copy_json(value: Json) -> Json:
    """A copy of a JSON value that shares nothing mutable with it, however deep it is."""
    if not isinstance(value, (dict, list)):
        return value
    copy = value.copy()
    unfinished = [copy]
    while unfinished:
        container = unfinished.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, (dict, list)):
                container[key] = item = item.copy()
                unfinished.append(item)
    return copy


def checked_json(value: Json, what: str) -> Json:
    """`value` as JSON would carry it; ValueError that names `what` if it cannot."""
    try:
        text = dumps(value)
        check_depth(text)
        return loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: expected a JSON value, got {value!r} ({error})") from None


# --- JSON structure. Writers scan a latin-1 view of the body: offsets are byte offsets, and no
# --- byte of a multi-byte character can be mistaken for JSON syntax.


def _skip(text: str, position: int) -> int:
    match = _space(text, position)
    return match.end() if match else position


def expect(text: str, position: int, wanted: str) -> int:
    position = _skip(text, position)
    if not text.startswith(wanted, position):
        raise ValueError(f"not JSON at character {position}: expected {wanted!r}")
    return position + len(wanted)


def elements(text: str, position: int) -> Iterator[tuple[Json, int, int]]:
    """`(value, start, end)` of the array elements from `position` on; `text[end]` follows each.

    `position` is just after `[` or after an earlier element.
    """
    position = _skip(text, position)
    while not text.startswith("]", position):
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        value, end = scan(text, position)
        yield value, position, end
        position = _skip(text, end)
        if not text.startswith((",", "]"), position):
            raise ValueError(f"not JSON at character {position}: expected ',' or ']'")


def is_list_of_objects(text: str, start: int) -> bool:
    """True if the JSON value at `start` is a list whose first element is an object."""
    return text.startswith("[", start) and text.startswith("{", _skip(text, start + 1))


def members(text: str, ends: Callable[[str, int], int | None]) -> Iterator[tuple[str, int, int]]:
    """`(key, start, end)` of the members of the JSON object that `text` is.

    `ends(key, start)` gives the end of a value where that is known; None has it scanned.
    """
    position = _skip(text, expect(text, 0, "{"))
    while not text.startswith("}", position):
        key, position = scan(text, position)
        if not isinstance(key, str):
            raise ValueError("not JSON: an object's key is a string")
        start = _skip(text, expect(text, position, ":"))
        end = ends(key, start)
        if end is None:
            _, end = scan(text, start)
        yield key, start, end
        position = _skip(text, end)
        if not text.startswith("}", position):
            position = _skip(text, expect(text, position, ","))
    if _skip(text, position + 1) != len(text):
        raise ValueError("not JSON: text after the object")


_space = re.compile(r"[ \t\n\r]*").match
