"""Trajectories as rows of an SQLite table: one overview each, found by their fields and words.

`Table` reads, `WritableTable` writes; both work on a connection that one thread uses. The columns
are the fields of `Overview`: scalars as they are, lists and objects as JSON. `words` has the texts
of each trajectory, whole, so that a hit is shown in its context.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version

from otel_rollout.errors import ConfigurationError
from otel_rollout.terminal import shortened
from otel_rollout.trajectory import advantages_of
from otel_rollout.view.fields import COLUMNS, browser_value, row_of, sql_text
from otel_rollout.view.filter_expression import Where
from otel_rollout.view.findings import Finding, replies_by_sentence
from otel_rollout.view.overview import Overview
from otel_rollout.view.search import EXCERPT, SCHEMA, create, phrase_of, pieces_of
from otel_rollout.wire import Json

_COLUMNS = ", ".join(f'"{name}"' for name in COLUMNS)
_TEXTS = ("error", "question", "answer")
_SHOWN = 400
"""Characters of these in a row; a filter and an order are over all that the index has."""
_JSON = tuple(name for name, kind in COLUMNS.items() if kind in ("list", "object"))
VERSION = zlib.crc32(f"3 {version('otel-rollout')}".encode()) & 0x7FFF_FFFF
"""Version of the tables and of the code that fills them; a file of another version is replaced."""
APPLICATION = 0x6F74526C
"""Marks an SQLite file as an index of this library ("otRl")."""
ERRORS_KEPT = 1_000
"""Errors that are kept with their text; the others are counted."""
_SCHEMA = f"""
CREATE TABLE trajectories (number INTEGER PRIMARY KEY AUTOINCREMENT, file, start, size, {_COLUMNS});
CREATE UNIQUE INDEX by_id ON trajectories ("id");
CREATE INDEX by_group ON trajectories ("group_id");
CREATE INDEX by_parent ON trajectories ("parent_id");
CREATE INDEX by_file ON trajectories (file);
CREATE TABLE found (number INTEGER, sentence INTEGER, replies INTEGER);
CREATE INDEX found_by_number ON found (number);
CREATE TABLE sentences (sentence INTEGER PRIMARY KEY, kind, text, advice, UNIQUE (kind, text));
CREATE TABLE files (file INTEGER PRIMARY KEY, path UNIQUE, inode, size, modified, read_to, tail);
CREATE TABLE errors (file INTEGER, text, UNIQUE (file, text));
CREATE TABLE notes (name PRIMARY KEY, value);
{SCHEMA}
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""
_MEANS = (
    'LEFT JOIN (SELECT "group_id" AS group_of_mean, AVG("reward") AS mean FROM trajectories '
    """WHERE "status" != 'cancelled' """
    'GROUP BY 1 HAVING COUNT("reward") > 1) ON group_of_mean = "group_id"'
)
"""The mean reward of each one's group, if several have one."""
_TOGETHER = (
    'MIN(number) OVER (PARTITION BY COALESCE("group_id", "task_id", "id")), '
    '"sample_index" IS NULL, "sample_index", '
)
_BEGINS = '"id" >= ? AND "id" < ?'


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories are asked for: a condition over the columns, with its parameters."""

    sql: str = "1"
    parameters: tuple[Json, ...] = ()
    phrase: str = ""
    """The words that are searched for, as FTS5 takes them."""

    @classmethod
    def of(cls, where: str = "", search: str = "") -> Filter:
        """An expression (see `Where`), and words that all have to be in the trajectory.

        ConfigurationError for an expression that is none.
        """
        parts, parameters = [], list[Json]()
        if where.strip():
            condition = Where.parse(where)
            parts.append(f"({condition.sql})")
            parameters += condition.parameters
        if phrase := phrase_of(search):
            parts.append("number IN (SELECT rowid FROM words WHERE words MATCH ?)")
            parameters.append(phrase)
        return cls(" AND ".join(parts) or "1", tuple(parameters), phrase)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a trajectory is written: so many bytes of a file, from `start`."""

    path: str
    inode: str
    start: int
    size: int
    number: int
    """Its number in the table: another one each time that it is read."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file of trajectories, as it was when it was read last."""

    number: int
    """Its number in the index; 0: it has none yet."""
    path: str
    inode: str
    size: int
    modified: int
    """Nanoseconds since 1970."""
    read_to: int
    """Offset of what was not read yet."""
    tail: bytes
    """Digest of the bytes before that."""

    def is_like(self, other: FileState) -> bool:
        """True if inode, size and time are equal."""
        mine, theirs = ((s.inode, s.size, s.modified) for s in (self, other))
        return mine == theirs

    def unfinished(self) -> FileState:
        """The same, to be read on: whatever its size is, it has grown."""
        return replace(self, size=-1)


class Table:
    """The trajectories of an index, to read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def count(self, which: Filter = Filter()) -> int:
        """How many trajectories there are."""
        sql = f"SELECT COUNT(*) FROM trajectories WHERE {which.sql}"
        return int(self.connection.execute(sql, which.parameters).fetchone()[0])

    def rows(
        self, which: Filter, *, sort: str = "", offset: int = 0, limit: int = 100
    ) -> list[dict[str, Json]]:
        """Overviews as JSON, each with its `advantage` within its group and the `hit` of a search.

        sort: a field, or `advantage`; with `-` before it the largest come first, unknown values
        last. Without one: as they were read, but those of a group, or of a task, together and by
        their sample index.
        ConfigurationError for a field that is not there.
        """
        name, descending = sort.removeprefix("-"), sort.startswith("-")
        if name and name not in (*COLUMNS, "advantage"):
            raise ConfigurationError(
                f"sort: expected one of {', '.join(COLUMNS)}, advantage, or one with - before it, "
                f"got {sort!r}"
            )
        key, joined = ('"reward" - mean', _MEANS) if name == "advantage" else (f'"{name}"', "")
        order = f"{key} IS NULL, {key} {'DESC' if descending else 'ASC'}, " if name else ""
        found = self.connection.execute(
            f"SELECT number, {_COLUMNS} FROM trajectories {joined} WHERE {which.sql} "
            f"ORDER BY {order or _TOGETHER}number LIMIT ? OFFSET ?",
            (*which.parameters, limit, offset),
        )
        rows = {number: _overview(row) for number, *row in found}
        for number, row in rows.items() if which.phrase else ():
            row["hit"] = self._hit(number, which.phrase)
        return self._with_advantages([*rows.values()])

    def _hit(self, number: int, phrase: str) -> list[str] | None:
        sql = f"SELECT {EXCERPT} FROM words WHERE words MATCH ? AND rowid = ?"
        found = self.connection.execute(sql, (phrase, number)).fetchone()
        return pieces_of(found[0]) if found else None

    def changes(self, prefix: str | None = None) -> int | None:
        """Grows whenever a trajectory is read, or one whose id begins so; None where none is."""
        which = "" if prefix is None else f" WHERE {_BEGINS}"
        sql = f"SELECT MAX(number) FROM trajectories{which}"
        (found,) = self.connection.execute(sql, () if prefix is None else _range(prefix)).fetchone()
        return None if found is None else int(found)

    def overview(self, id_: str) -> dict[str, Json] | None:
        """The overview of one trajectory; None where it is not there."""
        found = self.rows(Filter('"id" = ?', (id_,)), limit=1)
        return found[0] if found else None

    def find(self, prefix: str) -> str:
        """The id that is this one, or the only one that begins with it. LookupError elsewhere."""
        found = self.connection.execute(
            f'SELECT "id" FROM trajectories WHERE {_BEGINS} ORDER BY "id" LIMIT 3', _range(prefix)
        )
        ids = [row[0] for row in found]
        if ids and (ids[0] == prefix or (len(ids) == 1 and prefix)):
            return str(ids[0])
        several = f"several trajectories, such as {', '.join(map(repr, ids))}" if ids else "none"
        raise LookupError(
            f"no trajectory {prefix[:100]!r}: expected an id that names one, {several}"
        )

    def place(self, id_: str) -> Location | None:
        """Where a trajectory is written; None where it is not there."""
        row = self.connection.execute(
            "SELECT path, inode, start, trajectories.size, number FROM trajectories "
            'JOIN files USING (file) WHERE "id" = ?',
            (id_,),
        ).fetchone()
        return None if row is None else Location(*row)

    def errors(self) -> list[str]:
        """What could not be read, at most `ERRORS_KEPT` sentences."""
        return [text for (text,) in self.connection.execute("SELECT text FROM errors")]

    def task_of(self, group: str) -> tuple[str | None, str | None]:
        """Id and text of a group's task, of its first member; None: it has none."""
        found = self.connection.execute(
            'SELECT "task_id", "question" FROM trajectories WHERE "group_id" = ? '
            'ORDER BY "question" IS NULL, number LIMIT 1',
            (group,),
        ).fetchone()
        task, question = found or (None, None)
        return task, question and shortened(question, _SHOWN)

    def rewards_of(self, group: str) -> list[float]:
        """The rewards of the trajectories of a group that have one."""
        found = self.connection.execute(
            'SELECT "reward" FROM trajectories WHERE "group_id" = ? AND "reward" IS NOT NULL '
            """AND "status" != 'cancelled'""",
            (group,),
        )
        return [float(reward) for (reward,) in found]

    def _with_advantages(self, rows: list[dict[str, Json]]) -> list[dict[str, Json]]:
        groups = {row["group_id"] for row in rows} - {None}
        known: dict[tuple[str | None, float | None], float | None] = {}
        for group in groups:
            rewards = self.rewards_of(group)
            known |= {
                (group, reward): advantage
                for reward, advantage in zip(rewards, advantages_of(rewards), strict=True)
            }
        for row in rows:
            of_group = None if row["status"] == "cancelled" else row["group_id"]
            row["advantage"] = known.get((of_group, row["reward"]))
        return rows


class WritableTable(Table):
    """The trajectories of an index, to read and to write; `commit` publishes the changes."""

    @classmethod
    def create(cls, connection: sqlite3.Connection) -> WritableTable:
        """The tables, empty, in an empty file. ConfigurationError if SQLite has no FTS5."""
        create(connection, _SCHEMA)
        return cls(connection)

    def add(
        self,
        overview: Overview,
        findings: Iterable[Finding],
        words: str,
        *,
        file: int = 0,
        start: int = 0,
        size: int = 0,
    ) -> tuple[int, int] | None:
        """Add a trajectory; file and start of the one with the same id whose place it takes."""
        values = row_of(overview)
        before = self._remove(values[list(COLUMNS).index("id")])
        marks = ", ".join("?" * len(values))
        number = self.connection.execute(
            f"INSERT INTO trajectories (file, start, size, {_COLUMNS}) VALUES (?, ?, ?, {marks})",
            (file, start, size, *values),
        ).lastrowid
        self.connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (number, words))
        for (kind, text, advice), replies in replies_by_sentence(findings).items():
            self.connection.execute(
                "INSERT OR IGNORE INTO sentences (kind, text, advice) VALUES (?, ?, ?)",
                (kind, sql_text(text), advice),
            )
            self.connection.execute(
                "INSERT INTO found SELECT ?, sentence, ? FROM sentences WHERE kind=? AND text=?",
                (number, replies, kind, sql_text(text)),
            )
        return before

    def _remove(self, id_: Json) -> tuple[int, int] | None:
        row = self.connection.execute(
            'SELECT number, file, start FROM trajectories WHERE "id" = ?', (id_,)
        ).fetchone()
        if row is None:
            return None
        self.connection.execute("DELETE FROM words WHERE rowid = ?", row[:1])
        self.connection.execute("DELETE FROM found WHERE number = ?", row[:1])
        self.connection.execute("DELETE FROM trajectories WHERE number = ?", row[:1])
        return row[1], row[2]

    def file(self, path: str) -> FileState | None:
        """What is known of a file; None if it was never read."""
        row = self.connection.execute("SELECT * FROM files WHERE path = ?", (path,)).fetchone()
        return None if row is None else FileState(*row)

    def put_file(self, state: FileState) -> int:
        """Keep what is known of a file; its number."""
        values = state.number or None, *astuple(state)[1:]
        marks = ", ".join("?" * len(values))
        found = self.connection.execute(f"INSERT OR REPLACE INTO files VALUES ({marks})", values)
        return found.lastrowid or 0

    def note(self, name: str) -> str | None:
        """A text that was kept under this name."""
        row = self.connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def put_note(self, name: str, text: str) -> None:
        """Keep a text under this name."""
        self.connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, text))

    def remove_file(self, file: int) -> None:
        """Remove the trajectories of a file, and what could not be read of it."""
        of_file = "IN (SELECT number FROM trajectories WHERE file = ?)"
        self.connection.execute(f"DELETE FROM words WHERE rowid {of_file}", (file,))
        self.connection.execute(f"DELETE FROM found WHERE number {of_file}", (file,))
        self.connection.execute("DELETE FROM trajectories WHERE file = ?", (file,))
        self.connection.execute("DELETE FROM errors WHERE file = ?", (file,))

    def add_error(self, file: int, text: str) -> None:
        """Keep what could not be read, of the first `ERRORS_KEPT` of each file."""
        (count,) = self.connection.execute(
            "SELECT COUNT(*) FROM errors WHERE file = ?", (file,)
        ).fetchone()
        if count < ERRORS_KEPT:
            self.connection.execute(
                "INSERT OR IGNORE INTO errors VALUES (?, ?)", (file, sql_text(text))
            )


def _overview(row: Sequence[Json]) -> dict[str, Json]:
    found: dict[str, Json] = dict(zip(COLUMNS, row, strict=True))
    for name in _JSON:
        found[name] = browser_value(found[name])
    for name in _TEXTS:
        found[name] = None if found[name] is None else shortened(str(found[name]), _SHOWN)
    return found


def _range(prefix: str) -> tuple[str, str]:
    """The parameters of `_BEGINS`."""
    return prefix, prefix + "\U0010ffff"
