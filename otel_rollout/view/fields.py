"""The fields of an overview by which trajectories are filtered, sorted and counted.

A field is a name, `reward`, or a value by its name, `metrics["tests_passed"]`.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Literal

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import Overview
from otel_rollout.wire import Json, dumps

Kind = Literal["text", "number", "list", "object", "any", "none", "literals"]
"""What an operand is; "any" is known only when a row is looked at, as a value of `metadata`."""
Parameter = str | int | float | None

COLUMNS: dict[str, Kind] = {
    "id": "text",
    "name": "text",
    "task_id": "text",
    "group_id": "text",
    "sample_index": "number",
    "parent_id": "text",
    "trace_id": "text",
    "status": "text",
    "termination_reason": "text",
    "reward": "number",
    "turns": "number",
    "calls": "number",
    "histories": "number",
    "rows": "number",
    "sampled_tokens": "number",
    "trained_tokens": "number",
    "dropped": "number",
    "seconds": "number",
    "start_time_ns": "number",
    "versions": "list",
    "models": "list",
    "warnings": "number",
    "findings": "list",
    "metrics": "object",
    "rewards": "object",
    "metadata": "object",
}
"""The columns that a filter's SQL is over, the fields of `Overview`; `row_of` gives their values.
Lists and objects are JSON texts."""


@dataclass(frozen=True, slots=True)
class Field:
    """One value of each overview."""

    text: str
    """The field as it was given."""
    kind: Kind
    _name: str
    _key: str | None

    @classmethod
    def parse(cls, text: str) -> Field:
        """The field that a text names. ConfigurationError, with what is known, for another text."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        match node:
            case ast.Name(id=name) if name in COLUMNS:
                return cls(text, COLUMNS[name], name, None)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)) if (
                COLUMNS.get(name) == "object"
            ):
                return cls(text, "any" if name == "metadata" else "number", name, key)
        names = ", ".join(
            f'{name}["..."]' if kind == "object" else name for name, kind in COLUMNS.items()
        )
        raise ConfigurationError(f"expected one of {names}, got {text!r}")

    def of(self, overview: Overview) -> Json:
        """The value; None where it is not known, or not there."""
        value = getattr(overview, self._name)
        return value if self._key is None else value.get(self._key)


def row_of(overview: Overview) -> list[Parameter]:
    """The values of the columns `COLUMNS`, in their order, as SQLite takes them."""
    return [value_of(getattr(overview, name)) for name in COLUMNS]


def value_of(value: Json) -> Parameter:
    """The value as SQLite takes it; lists and objects are JSON texts."""
    if isinstance(value, str):
        return carried(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return _as_float(value)
    if isinstance(value, tuple | list | dict):
        return dumps(_storable(value))
    return value  # type: ignore[no-any-return]


def digits_kept(value: Json) -> Json:
    """The value with texts for whole numbers that a browser would round."""
    if isinstance(value, dict):
        return {key: digits_kept(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [digits_kept(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > _SAFE else value


_SAFE = (1 << 53) - 1


def carried(text: str) -> str:
    """The text with escapes for lone surrogates, which SQLite does not take."""
    return text.encode(errors="backslashreplace").decode()


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _storable(value: Json) -> Json:
    """The value with null for NaN and infinities, and without lone surrogates."""
    if isinstance(value, dict):
        return {carried(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    if isinstance(value, str):
        return carried(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
