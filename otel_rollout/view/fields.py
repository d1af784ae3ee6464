"""The fields of an overview by which trajectories are filtered, sorted and counted.

A field is a name, `reward`, or a value by its name, `metrics["tests_passed"]`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.overview import Overview
from otel_rollout.wire import Json, finite

Kind = Literal["text", "number", "list", "object", "any", "none", "literals"]
"""What an operand is; "any" is known only when a row is looked at, as a value of `metadata`."""

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("str", "text"),
    ("tuple", "list"),
    ("dict", "object"),
    ("", "number"),
)
"""Kinds of fields, by how their annotation begins; the first that fits counts."""
COLUMNS: dict[str, Kind] = {
    field.name: next(kind for start, kind in _KINDS if str(field.type).startswith(start))
    for field in fields(Overview)
}
"""The columns that a filter's SQL is over, the fields of `Overview`; `row_of` gives their values.
Lists and objects are JSON texts."""


@dataclass(frozen=True, slots=True)
class Field:
    """One value of each overview."""

    name: str
    """Which field of `Overview` has it."""
    _key: str | None

    @classmethod
    def parse(cls, option: str, text: str, *, not_of: tuple[Kind, ...] = ()) -> Field:
        """The single value that a text names, which an option has.

        ConfigurationError, with what is known, for any other text, and for one of these kinds.
        """
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        match node:
            case ast.Name(id=name) if (kind := COLUMNS.get(name)) in (*not_of, "object"):
                one = f', such as {text}["..."]' if kind == "object" else ""
                raise ConfigurationError(f"{option}: expected a single value{one}, got {text!r}")
            case ast.Name(id=name) if name in COLUMNS:
                return cls(name, None)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)) if (
                COLUMNS.get(name) == "object"
            ):
                return cls(name, key)
        names = ", ".join(
            f'{name}["..."]' if kind == "object" else name for name, kind in COLUMNS.items()
        )
        raise ConfigurationError(f"{option}: expected one of {names}, got {text!r}")

    def of(self, overview: object) -> Json:
        """The value of an `Overview`; None where it is not known, or not there."""
        value = getattr(overview, self.name)
        return value if self._key is None else value.get(self._key)


def row_of(overview: Overview) -> list[Parameter]:
    """The values of the columns `COLUMNS`, in their order, as SQLite takes them."""
    return [sql_value(getattr(overview, name)) for name in COLUMNS]


# --- values as SQLite and browsers take them


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
