"""Lines of a table whose rows are printed as they come: widths are chosen before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from otel_rollout.terminal import escaped
from otel_rollout.view.overview import Overview


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its head, its cell of an overview, and how wide it is."""

    head: str
    cell: Callable[[Overview], object]
    least: int
    """Characters that it has at least, where it is not left out."""
    most: int = 0
    """Characters that it grows to where there is room; 0: it does not grow."""
    is_text: bool = False
    """True if it stands left, and is cut where it is too long."""
    rank: int = 0
    """Columns of the highest rank are left out first where the line is too short."""


def number(value: float | None) -> str:
    """A number that a person reads; `-` for one that is not known."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


COLUMNS = (
    Column("id", lambda o: o.id[:8], 8, is_text=True),
    Column("name", lambda o: o.name, 8, 24, is_text=True, rank=1),
    Column("task", lambda o: o.task_id, 6, 20, is_text=True, rank=3),
    Column("group", lambda o: o.group_id, 6, 20, is_text=True, rank=6),
    Column("#", lambda o: number(o.sample_index), 3, rank=4),
    Column("status", lambda o: o.status, 9, is_text=True),
    Column("reward", lambda o: number(o.reward), 7),
    Column("turns", lambda o: o.turns, 5),
    Column("sampled", lambda o: number(o.sampled_tokens), 7, rank=2),
    Column("trained", lambda o: o.trained_tokens, 7),
    Column("seconds", lambda o: "-" if o.seconds is None else f"{o.seconds:.1f}", 7, rank=5),
    Column("versions", lambda o: ",".join(map(str, o.versions)), 8, 16, is_text=True, rank=7),
    Column("warnings", lambda o: o.warnings, 8, rank=2),
)
_GAP = "  "


class Table:
    """A table of overviews, in lines of one width."""

    def __init__(self, width: int) -> None:
        columns = list(COLUMNS)
        while _width(columns) > width and any(column.rank for column in columns):
            columns.remove(max(columns, key=lambda column: column.rank))
        spare = width - _width(columns)
        self._columns: list[tuple[Column, int]] = []
        for column in columns:
            more = min(max(spare, 0), max(column.most - column.least, 0))
            spare -= more
            self._columns.append((column, column.least + more))

    def head(self) -> str:
        """The first line."""
        return _line([(column, size, column.head) for column, size in self._columns])

    def line(self, overview: Overview) -> str:
        """The line of a trajectory; what could steer a terminal is escaped."""
        cells = [(column, size, column.cell(overview)) for column, size in self._columns]
        return _line([(c, size, "-" if cell is None else str(cell)) for c, size, cell in cells])


def _width(columns: Sequence[Column]) -> int:
    return sum(column.least for column in columns) + len(_GAP) * (len(columns) - 1)


def _line(cells: Sequence[tuple[Column, int, str]]) -> str:
    return _GAP.join(
        padded(text, size) if column.is_text else f"{escaped(text):>{size}}"
        for column, size, text in cells
    ).rstrip()


def padded(text: str, size: int) -> str:
    """The text on one line, cut or filled up to so many characters."""
    text = escaped(" ".join(text[: 10 * size].split()))
    return f"{text if len(text) <= size else text[: size - 1] + '…':<{size}}"
