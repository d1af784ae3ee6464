"""An index of sources: overview and words of each trajectory; the rest stays in the files.

One pass reads the sources (`index_reader.py`); then the index is kept in a file and read again
at the next start. A trajectory's details are read at its offset in its file. While
the index is open, a thread follows the sources. Unreadable places are listed; reading
goes on. An index contains texts of trajectories: only the user can read its folder, or the named
file. One process writes to an index; another one creates its own.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

from otel_rollout.errors import ConfigurationError, RolloutError
from otel_rollout.lines import lock, private_file
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.view.details import Opened
from otel_rollout.view.fields import sql_text
from otel_rollout.view.index_reader import Reader, check_source
from otel_rollout.view.sources import is_address
from otel_rollout.view.table import APPLICATION, VERSION, Location, Table, WritableTable
from otel_rollout.wire import dumps

_POLL = 1.0
"""Seconds between two looks at the sources."""


class Index:
    """The trajectories of some sources. `with Index(sources) as index:` reads and follows them.

    path: the file of the index. None: one in the user's cache, named after the sources.
    cached: False makes an index that is removed in the end.
    infer_rollouts: as for `reconstruct`.
    follow: False reads the sources once.
    report: called once, in a thread, with what could not be read when all was read for the first
    time.

    OSError for a source that is not there, ConfigurationError for one that cannot be followed.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        path: Path | None = None,
        cached: bool = True,
        infer_rollouts: bool = False,
        follow: bool = True,
        report: Callable[[list[str]], None] | None = None,
    ) -> None:
        for source in sources:
            check_source(source)
        self.sources = list(sources)
        """The sources, as they were given."""
        self._infer_rollouts = infer_rollouts
        self._follow = follow
        self._report = report
        self._wanted = path if path is not None or not cached else self._cached()
        self._path = Path()
        self._held = ExitStack()
        self._readers = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._stop, self._read = threading.Event(), threading.Event()
        self._failure: list[str] = []

    def __enter__(self) -> Index:
        try:
            self._path = self._writable()
            table = open_table(self._path)
        except BaseException as error:
            self._held.close()
            if isinstance(error, sqlite3.Error):
                raise ConfigurationError(
                    f"the index {str(self._path)!r}: {error}: remove it"
                ) from error
            raise
        thread = threading.Thread(
            target=self._run, args=(table,), name="otel-rollout-index", daemon=True
        )
        thread.start()
        self._held.callback(thread.join)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        with self._lock:
            for connection in self._connections:
                connection.close()
        self._held.close()

    @property
    def path(self) -> Path:
        """Its file, while it is open."""
        return self._path

    @property
    def complete(self) -> bool:
        """True once every source was read to its end for the first time."""
        return self._read.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is complete; False if it is not by then."""
        return self._read.wait(timeout)

    @property
    def errors(self) -> list[str]:
        """What could not be read."""
        return [*self._failure, *self.table().errors()]

    def table(self) -> Table:
        """The rows of the index, for this thread to read."""
        table: Table | None = getattr(self._readers, "table", None)
        if table is None:
            connection = connect(self._path, "ro")
            with self._lock:
                self._connections.append(connection)
            table = self._readers.table = Table(connection)
        return table

    def load(self, id_: str) -> Opened:
        """The trajectory of this id, read from its file.

        LookupError where it is not in the index, or no more in the file.
        """
        place = self.table().place(id_)
        if place is None:
            raise LookupError(f"no trajectory {id_[:100]!r}: it may have been replaced just now")
        try:
            trajectory = Trajectory.from_json(_bytes_at(place))
            if sql_text(trajectory.id) != id_:
                raise LookupError(f"there is {trajectory.id!r}")
            return Opened(trajectory)
        except (OSError, LookupError, ValueError) as error:
            raise LookupError(
                f"trajectory {id_[:100]!r} is not at byte {place.start} of {place.path} any more "
                f"({error!s:.200}): the file was changed; it is read again in a moment"
            ) from None

    def _cached(self) -> Path:
        names = [each if is_address(each) else os.path.realpath(each) for each in self.sources]
        return cached_file(dumps([names, self._infer_rollouts]))

    def _writable(self) -> Path:
        """The file of the index: the one that is wanted, if no other process writes to it."""
        if self._wanted is not None and _lock_file(self._wanted, self._held):
            return self._wanted
        folder = tempfile.mkdtemp(prefix="otel-rollout-view-")
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "index.sqlite"

    def _run(self, table: WritableTable) -> None:
        try:
            reader = Reader(
                self.sources,
                table,
                Path(f"{self._path}.rebuilt.jsonl"),
                infer_rollouts=self._infer_rollouts,
                stopped=self._stop.is_set,
            )
            reader.read()
            self._read.set()
            if self._report is not None:
                self._report(table.errors())
            while self._follow and not self._stop.wait(_POLL):
                reader.read()
        except (OSError, sqlite3.Error, *UNREADABLE, RolloutError) as error:
            self._failure.append(f"the index {self._path} is not written any more: {error}")
        finally:
            self._read.set()
            table.connection.close()


def _bytes_at(place: Location) -> bytes:
    with open(place.path, "rb") as file:
        state = os.fstat(file.fileno())
        if f"{state.st_dev}:{state.st_ino}" != place.inode:
            raise LookupError("another file has its name")
        file.seek(place.start)
        return file.read(place.size)


# --- the file of an index


def cached_file(key: str) -> Path:
    """The file of the index with this key, in `$XDG_CACHE_HOME/otel-rollout/view`.

    Only the user may read that folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "otel-rollout" / "view"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.sqlite"


def _lock_file(path: Path, held: ExitStack) -> bool:
    """Keep the index from other writers until `held` is closed; False if another has it."""
    return lock(held.enter_context(_private(path.with_name(path.name + ".lock"))))


def _private(path: Path) -> BinaryIO:
    """A file of an index, this user's alone. ConfigurationError for one that cannot be."""
    try:
        return private_file(path)
    except OSError as error:
        raise ConfigurationError(
            f"the index {str(path)!r} cannot be written ({error.strerror}): name another file "
            f"(OTEL_ROLLOUT_VIEW_INDEX), or keep none (--no-cache)"
        ) from None


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
    head = b""
    if path.exists():
        with path.open("rb") as file:
            head = file.read(72)
    if head and int.from_bytes(head[68:72], "big") != APPLICATION:
        raise ConfigurationError(
            f"{str(path)!r} is no index of otel-rollout: name a file that does not exist yet"
        )
    _private(path).close()
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
    except (sqlite3.Error, ValueError):  # text that is no UTF-8
        return False
