"""Search by words in whole texts of trajectories: one rule for the index of a page and for verbs.

All words have to be there, each as the beginning of a word, and all "quoted phrases"; case and
accents do not count. SQLite's FTS5 splits texts into words and finds the excerpt around a hit.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import Trajectory
from otel_rollout.view.fields import sql_text
from otel_rollout.wire import Json, ToolCall, ToolResult, dumps, message_parts, shown_message

SCHEMA = "CREATE VIRTUAL TABLE words USING fts5 (text, tokenize='unicode61 remove_diacritics 2');"
EXCERPT = "snippet(words, 0, '\x02', '\x03', '…', 24)"
"""The text around a hit, of about so many words; see `pieces_of`."""
_unspaced = re.compile("(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff])(?=\\w)")
"""Places within a text of a script that has no spaces between words: each character is a word."""
_APART = "\u200b"
_words = re.compile(r'"([^"]*)"?|(\S+)')


def phrase_of(search: str) -> str:
    """A search in the words of FTS5; empty without a letter or digit."""
    found = []
    for phrase, word in _words.findall(search):
        text = (phrase or word).replace('"', " ").replace("\0", " ")
        if any(character.isalnum() for character in text):
            found.append(f'"{_spaced(sql_text(text))}"' + ("*" if word else ""))
    return " ".join(found)


def searched_text(trajectory: Trajectory) -> str:
    """All that is searched of a trajectory: its ids, errors, output, logs and messages, whole."""
    return _spaced(sql_text("\n".join(filter(None, _texts(trajectory)))))


def pieces_of(excerpt: str) -> list[str]:
    """An excerpt in pieces: what is found is at the odd places, what is around it at the others."""
    return re.split("[\x02\x03]", " ".join(excerpt.replace(_APART, "").split()))


@dataclass(frozen=True, slots=True)
class Search:
    """A search in one trajectory after another."""

    phrase: str

    @classmethod
    def parse(cls, option: str, text: str) -> Search:
        """ConfigurationError for a text without a word."""
        if not (phrase := phrase_of(text)):
            raise ConfigurationError(f"{option}: expected words of letters or digits, got {text!r}")
        return cls(phrase)

    def hit(self, trajectory: Trajectory) -> list[str] | None:
        """The excerpt around a hit in pieces; None where the words are not in the trajectory."""
        connection = _memory()
        try:
            connection.execute("INSERT INTO words VALUES (?)", (searched_text(trajectory),))
            found = connection.execute(
                f"SELECT {EXCERPT} FROM words WHERE words MATCH ?",  # noqa: S608 - our own names
                (self.phrase,),
            ).fetchone()
        finally:
            connection.rollback()
        return found and pieces_of(found[0])


@cache
def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    create(connection, SCHEMA)
    return connection


def create(connection: sqlite3.Connection, schema: str) -> None:
    """Create tables, one for words among them. ConfigurationError if SQLite has no FTS5."""
    try:
        connection.executescript(schema)
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise ConfigurationError(
            f"otel_rollout.view needs SQLite with FTS5 to search texts, and that of this "
            f"Python ({sqlite3.sqlite_version}) was built without it: use a Python whose "
            f"sqlite3 has it, such as that of python.org, conda or Debian"
        ) from None


def _spaced(text: str) -> str:
    return text if text.isascii() else _unspaced.sub(_APART, text)


def _texts(trajectory: Trajectory) -> Iterator[str | None]:
    yield from (trajectory.name, trajectory.task_id, trajectory.group_id)
    yield from (trajectory.id, trajectory.parent_id, trajectory.trace_id, trajectory.span_id)
    yield _error(trajectory.error)
    yield from map(_text, (trajectory.output, *trajectory.metadata.values()))
    yield from map(str, trajectory.logs)
    seen = set[bytes]()
    for completion in trajectory.completions:
        yield from (completion.id, completion.span_id, _error(completion.error))
        path, new = completion.path, list[Json]()
        while path is not None and path.key not in seen:
            seen.add(path.key)
            new.append(path.message)
            path = path.parent
        yield from _of_messages(reversed(new))
    yield from chain.from_iterable(map(_of_messages, trajectory.appended.values()))


def _of_messages(messages: Iterable[Json]) -> Iterator[str | None]:
    for message in messages:
        yield shown_message(message)
        yield from message_ids(message)


def message_ids(message: Json) -> Iterator[str | None]:
    """The ids of calls of tools in a message."""
    for part in message_parts(message) if isinstance(message, dict) else ():
        if isinstance(part, ToolCall | ToolResult):
            yield part.id


def _error(error: dict[str, str] | None) -> str:
    return " ".join(str((error or {}).get(name) or "") for name in ("type", "message")).strip()


def _text(value: Json) -> str | None:
    return value if value is None or isinstance(value, str) else dumps(value)
