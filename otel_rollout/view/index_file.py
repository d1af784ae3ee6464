"""The SQLite file of an index: where it is, who may read it, who writes to it.

An index contains texts of trajectories: only the user can read its folder, or the named file. One
process writes to an index; another one creates its own.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.table import APPLICATION, VERSION, WritableTable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """The folder of indexes, `$XDG_CACHE_HOME/otel-rollout/view`, which only the user may read."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "otel-rollout" / "view"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def cached_file(key: str) -> Path:
    """The file of the index with this key, in the cache."""
    return cache_folder() / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.sqlite"


def lock(path: Path, held: ExitStack) -> bool:
    """Keep the index from other writers until `held` is closed; False if another has it."""
    try:
        file = held.enter_context(_private(path.with_name(path.name + ".lock")))
    except OSError as error:
        raise ConfigurationError(
            f"the index {str(path)!r} cannot be written ({error.strerror}): name another file "
            f"(--index), or keep none (--no-cache)"
        ) from None
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def connect(path: Path, mode: Literal["ro", "rw"]) -> sqlite3.Connection:
    """A connection to an index; readers wait for a writer for some seconds."""
    # It is closed by another thread in the end, when no thread uses it any more.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, check_same_thread=False, timeout=30
    )


def open_table(path: Path) -> WritableTable:
    """The tables of an index, empty where the file is new, damaged or of another version.

    ConfigurationError for a file that is something else.
    """
    _private(path).close()
    with path.open("rb") as file:
        head = file.read(72)
    if head and int.from_bytes(head[68:72], "big") != APPLICATION:
        raise ConfigurationError(
            f"{str(path)!r} is no index of otel-rollout: name a file that does not exist yet"
        )
    if head and not _is_current(path):
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.unlink(missing_ok=True)
        _private(path).close()
        head = b""
    connection = connect(path, "rw")
    try:
        # Before the journal: the mark is then in the file, and not in the journal alone.
        table = WritableTable(connection) if head else WritableTable.create(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return table
    except BaseException:
        connection.close()
        raise


def _is_current(path: Path) -> bool:
    try:
        with closing(connect(path, "rw")) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            connection.execute("SELECT value FROM notes LIMIT 1").fetchone()
            return bool(version == VERSION and found == "ok")
    except sqlite3.Error:
        return False


def _private(path: Path) -> BinaryIO:
    """A file that only the user may read, created if it is not there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
