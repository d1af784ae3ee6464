"""What a receiver keeps of what it has handed over: heads, without contents, in one SQLite file.

A unit is marked as begun before its trajectories are handed over, and as done after that. One that
was begun and is not done may have been handed over in part, by a process that was killed.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from otel_rollout.evidence import Head, Late, Unit
from otel_rollout.lines import private_file

FILE = "heads.sqlite"
"""The file, in the folder of the journal."""
_TABLES = """
CREATE TABLE IF NOT EXISTS units (
    kind TEXT, name TEXT, size INTEGER, whole INTEGER, times INTEGER, place INTEGER, done INTEGER,
    PRIMARY KEY (kind, name));
CREATE TABLE IF NOT EXISTS rollouts (id TEXT PRIMARY KEY, head BLOB, spans BLOB);
CREATE TABLE IF NOT EXISTS late (
    rollout TEXT, span TEXT, reward TEXT, PRIMARY KEY (rollout, span));
"""
_BEGIN = """
INSERT INTO units VALUES (?, ?, ?, ?, 1, ?, 0)
ON CONFLICT DO UPDATE SET times = times + ?, size = excluded.size, whole = excluded.whole
"""
_LATE = """
INSERT INTO late VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET reward = excluded.reward
WHERE reward IS NULL AND excluded.reward IS NOT NULL
"""
"""Of copies of a reward one that is not damaged is kept."""
_ID = 8
"""Bytes of a span's id."""
_to_json = msgspec.json.Encoder().encode
_head_of = msgspec.json.Decoder(Head).decode


class HandedOver(NamedTuple):
    """A group, or a rollout without one, that is or was being handed over."""

    name: str
    """The id of the group, or of the rollout."""
    is_group: bool
    size: int | None
    whole: int
    times: int
    """How often it was handed over, or may have been."""
    is_done: bool


class HeadFile:
    """The file of heads. Any thread may call. OSError for all that SQLite raises.

    reads: True only reads a file that is there, also while another process writes it.
    """

    def __init__(self, folder: Path, *, reads: bool = False) -> None:
        self._path = folder / FILE
        self._lock = threading.RLock()
        if not reads:
            private_file(self._path).close()
        with self._disk():
            name = f"{self._path.resolve().as_uri()}?mode={'ro' if reads else 'rw'}"
            self._sql = sqlite3.connect(
                name, uri=True, isolation_level=None, check_same_thread=False
            )
            if not reads:
                self._sql.execute("PRAGMA journal_mode = WAL")
                self._sql.execute("PRAGMA synchronous = FULL")
                self._sql.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._sql.close()

    # --- asked for each id that is not known

    def has_rollout(self, rollout_id: str) -> bool:
        """True if this rollout was handed over."""
        return bool(self._rows("SELECT 1 FROM rollouts WHERE id = ?", rollout_id))

    def has_group(self, group: str) -> bool:
        """True if this group was handed over."""
        return bool(self._rows(_DONE + " AND kind = 'group' AND name = ?", group))

    def begun(self, unit: Unit[Any]) -> int | None:
        """The place at which handing over this unit began before; None: it did not."""
        found = self._rows("SELECT place FROM units WHERE kind = ? AND name = ?", *_key(unit))
        return found[0][0] if found else None

    # --- changes

    def begin(self, units: Sequence[tuple[Unit[Any], bool]], place: int) -> None:
        """Mark units that are about to be handed over; each with True if perhaps it was before.

        place: kept for those that are new.
        """
        with self._disk(), self._sql:
            self._sql.execute("BEGIN")
            rows = [(*_key(u), u.size, u.whole, place, again) for u, again in units]
            self._sql.executemany(_BEGIN, rows)

    def done(
        self, units: Sequence[Unit[Any]], spans: Mapping[str, Sequence[str]], late: Sequence[Late]
    ) -> None:
        """Mark units that were handed over, and keep their heads; those of rewards alone are late.

        spans: the ids of the spans of each rollout; late: those that came too late for it.
        """
        with self._disk(), self._sql:
            self._sql.execute("BEGIN")
            for unit in (each for each in units if not each.is_rewards):
                if not unit.is_extra:
                    self._sql.execute(
                        "UPDATE units SET done = 1 WHERE kind = ? AND name = ?", _key(unit)
                    )
                for head in unit.heads:
                    ids = b"".join(map(_packed, spans[head.rollout]))
                    kept = replace(head, is_extra=unit.is_extra)
                    row = head.rollout, _to_json(kept), ids
                    self._sql.execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?)", row)
            self._sql.executemany(_LATE, late)

    def late(self, late: Sequence[Late]) -> list[Late]:
        """Keep that spans came late; those of which no copy came before."""
        new = list[Late]()
        with self._disk(), self._sql:
            self._sql.execute("BEGIN")
            for one in late:
                known = self._rows("SELECT spans FROM rollouts WHERE id = ?", one.rollout)
                ids = known[0][0] if known else b""
                of_span = (ids[at : at + _ID] for at in range(0, len(ids), _ID))
                if _packed(one.span) not in of_span and self._sql.execute(_LATE, one).rowcount > 0:
                    new.append(one)
        return new

    # --- for an audit

    def heads(self) -> Iterator[Head]:
        """Those of all rollouts that were handed over."""
        for (head,) in self._each("SELECT head FROM rollouts"):
            yield _head_of(head)

    def units(self) -> Iterator[HandedOver]:
        """All that was, or was being, handed over."""
        for kind, name, size, whole, times, _, done in self._each("SELECT * FROM units"):
            is_group = kind == "group"
            yield HandedOver(name, is_group, size, whole, times, bool(done))

    def late_spans(self) -> Iterator[Late]:
        """The spans that came late."""
        yield from (Late(*row) for row in self._each("SELECT * FROM late"))

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        with self._disk():
            return self._sql.execute(sql, values).fetchall()

    def _each(self, sql: str) -> Iterator[Any]:
        with self._disk():
            yield from self._sql.execute(sql)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                raise OSError(f"{self._path}: {error}") from error


_DONE = "SELECT 1 FROM units WHERE done = 1"


def _key(unit: Unit[Any]) -> tuple[str, str]:
    return "rollout" if unit.group is None else "group", unit.name


def _packed(span_id: str) -> bytes:
    """A span's id in `_ID` bytes."""
    return bytes.fromhex(span_id)[:_ID].rjust(_ID, b"\0")


def is_journal(folder: Path) -> bool:
    """True for the folder of a receiver's journal."""
    return (folder / FILE).is_file()
