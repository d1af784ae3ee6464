"""Rows and overviews as tables: pandas, Arrow and Parquet, with columns that are always the same.

The columns follow from what a row is, not from the values that happen to be in it, so tables of
different runs go together, and one without rows has all its columns. Unknown is null, never zero;
an unknown log-probability is NaN, as in the rows themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from otel_rollout.errors import ConfigurationError
from otel_rollout.export.contract import TrajectoryExporter
from otel_rollout.export.memory import InMemoryTrajectoryExporter
from otel_rollout.extras import module_of
from otel_rollout.trajectory import Episode, Trajectory, TrajectoryGroup
from otel_rollout.wire import dumps

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """How one kind of value is stored."""

    arrow: Callable[[Any], Any]
    """Its Arrow type, made with the module `pyarrow`."""
    pandas: str = "object"
    """Its dtype in pandas."""
    store: Callable[[Any], Any] = lambda value: value
    """The value that Arrow stores, of one that is not None."""


def _text(value: object) -> str:
    """The value as text; Arrow takes no lone surrogates."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _texts(values: Iterable[object]) -> list[str | None]:
    return [None if value is None else _text(value) for value in values]


def _spans(of: str) -> ColumnKind:
    """Spans of tokens, each of what `of` names."""
    names = (of, "start", "end")

    def store(spans: Iterable[Any]) -> list[dict[str, Any]]:
        return [dict(zip(names, (*_texts([i]), *span), strict=True)) for i, *span in spans]

    def arrow(pa: Any) -> Any:
        types = (pa.string(), pa.int64(), pa.int64())
        return pa.list_(pa.struct(list(zip(names, types, strict=True))))

    return ColumnKind(arrow, store=store)


def _numbers(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(_text(name), float(value)) for name, value in values.items()]


TEXT = ColumnKind(lambda pa: pa.string(), store=_text)
INT = ColumnKind(lambda pa: pa.int64(), "Int64")
FLOAT = ColumnKind(lambda pa: pa.float64(), "float64")
BOOL = ColumnKind(lambda pa: pa.bool_(), "boolean")
TEXTS = ColumnKind(lambda pa: pa.list_(pa.string()), store=_texts)
IDS = ColumnKind(lambda pa: pa.list_(pa.int32()))
FLAGS = ColumnKind(lambda pa: pa.list_(pa.int8()))
FLOATS = ColumnKind(lambda pa: pa.list_(pa.float64()))
NUMBERS = ColumnKind(lambda pa: pa.map_(pa.string(), pa.float64()), store=_numbers)
JSON = ColumnKind(lambda pa: pa.string(), store=lambda value: _text(dumps(value)))
JSONS = ColumnKind(
    lambda pa: pa.list_(pa.string()), store=lambda values: [_text(dumps(each)) for each in values]
)

_ROW_COLUMNS = {
    "input_ids": IDS,
    "loss_mask": FLAGS,
    "logprobs": FLOATS,
    "sampled": FLAGS,
    "prompt_length": INT,
    "truncated": BOOL,
    "completion_ids": TEXTS,
    "spans": _spans("completion_id"),
    "policy_versions": TEXTS,
    "policy_version_spans": _spans("version"),
    "sampling": JSON,
    "logprobs_mode": TEXT,
    "logprobs_modes": TEXTS,
    "reward": FLOAT,
    "advantage": FLOAT,
    "trajectory_id": TEXT,
    "parent_id": TEXT,
    "name": TEXT,
    "task_id": TEXT,
    "group_id": TEXT,
    "sample_index": INT,
    "history": INT,
    "row": INT,
    "rows": INT,
}
_KIND_OF = {
    "str": TEXT,
    "str | None": TEXT,
    "int": INT,
    "int | None": INT,
    "float | None": FLOAT,
    "bool": BOOL,
    "tuple[str, ...]": TEXTS,
    "tuple[str | int, ...]": TEXTS,
    "dict[str, float]": NUMBERS,
    "dict[str, Json]": JSON,
}
"""The kind of a field of a dataclass, by its annotation."""


def columns_of(kind: type[Any]) -> dict[str, ColumnKind]:
    """The columns of a table whose rows are objects of a dataclass."""
    return {field.name: _KIND_OF[str(field.type)] for field in fields(kind)}


class TabularList(list[_Row]):
    """A list that is also a table: `to_pandas`, `to_arrow`, `to_parquet`.

    They need pandas or pyarrow: `pip install 'otel-rollout[tables]'`.
    """

    _columns: ClassVar[Mapping[str, ColumnKind]]
    """The columns in order, by name."""

    def _dicts(self) -> list[Any]:
        """The rows, each with all columns."""
        return list(self)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: lists stay lists; not known is None, of a number NA or NaN."""
        pandas = _needed("pandas", "to_pandas")
        rows, columns = self._dicts(), self._columns
        return pandas.DataFrame(
            {
                name: pandas.Series([row[name] for row in rows], dtype=kind.pandas)
                for name, kind in columns.items()
            }
        )

    def to_arrow(self) -> Any:
        """A `pyarrow.Table`, always of the same schema; policy versions are texts there."""
        pyarrow = _needed("pyarrow", "to_arrow")
        rows, columns = self._dicts(), self._columns
        stored = {
            name: pyarrow.array(
                [None if row[name] is None else kind.store(row[name]) for row in rows],
                kind.arrow(pyarrow),
            )
            for name, kind in columns.items()
        }
        return pyarrow.table(stored)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write `to_arrow` to a Parquet file, whole or not at all."""
        table = self.to_arrow()
        part = f"{os.fspath(path)}.part"
        try:
            _needed("pyarrow.parquet", "to_parquet").write_table(table, part)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.remove(part)


def _needed(module: str, method: str) -> Any:
    return module_of("tables", module, f"{method}()")


class RowTable(TabularList[dict[str, Any]]):
    """Token rows as a table."""

    _columns = _ROW_COLUMNS


def members(source: object, caller: str) -> list[Trajectory]:
    """All trajectories of what users hold. caller: the function that was given it."""
    found: list[Trajectory] = []
    for item in checked_items(source, caller):
        if isinstance(item, TrajectoryGroup):
            found += [*item.trajectories, *item.failures, *item.children]
        else:
            found += item.trajectories if isinstance(item, Episode) else [item]
    return found


def checked_items(source: object, caller: str) -> list[Trajectory | Episode | TrajectoryGroup]:
    """The trajectories, episodes and groups of an iterable, or the single one that it is.

    ConfigurationError for anything else: an exporter can be iterated, and would wait for ever.
    """
    if isinstance(source, Trajectory | Episode | TrajectoryGroup):
        return [source]
    if isinstance(source, TrajectoryExporter):
        way = (
            "pass exporter.get_finished_trajectories(), or exporter.take(n), which removes them"
            if isinstance(source, InMemoryTrajectoryExporter)
            else "pass what it was given: InMemoryTrajectoryExporter keeps that"
        )
        raise ConfigurationError(
            f"{caller}: expected trajectories, got the exporter {source!r}; {way}"
        )
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        raise ConfigurationError(
            f"{caller}: expected a trajectory, several of them, groups or episodes, "
            f"got {source!r:.200}{_hint(source)}"
        )
    items = list(source)
    for item in items:
        if not isinstance(item, Trajectory | Episode | TrajectoryGroup):
            raise ConfigurationError(
                f"{caller}: expected trajectories, groups or episodes, got {item!r:.200} among them"
                f"{_hint(item)}"
            )
    return items


def _hint(value: object) -> str:
    if hasattr(value, "__await__"):
        return "; await it first"
    if isinstance(value, Mapping):
        return "; Trajectory.from_dict makes one of what to_dict gave"
    return ""
