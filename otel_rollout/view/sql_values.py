"""JSON values as SQLite takes them, and as browsers do."""

from __future__ import annotations

import json
import math
import re

from otel_rollout.wire import Json, finite

Parameter = str | int | float | None

_SAFE = (1 << 53) - 1
"""The greatest whole number that a browser does not round."""
_SAFE_DIGITS = 16
_surrogates = re.compile("[\ud800-\udfff]")


def sql_value(value: Json) -> Parameter:
    """The value as SQLite takes it; lists and objects are JSON texts."""
    if isinstance(value, str):
        return sql_text(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return _as_float(value)
    if isinstance(value, tuple | list | dict):
        text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))
        return _surrogates.sub(_escaped, text)
    return value  # type: ignore[no-any-return]


def sql_text(text: str) -> str:
    """The text with escapes for lone surrogates, which SQLite does not take."""
    return text.encode(errors="backslashreplace").decode()


def browser_value(text: str) -> Json:
    """What a JSON text holds, with texts for whole numbers that a browser would round."""
    return json.loads(text, parse_int=_whole)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _escaped(surrogate: re.Match[str]) -> str:
    """What `sql_text` makes of it, as JSON writes that."""
    return f"\\\\u{ord(surrogate[0]):x}"


def _whole(digits: str) -> int | str:
    if len(digits) > _SAFE_DIGITS + digits.startswith("-"):
        return digits
    number = int(digits)
    return number if abs(number) <= _SAFE else digits
