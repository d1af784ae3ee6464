"""The index: what was read stays known, what is new is read, what is damaged is listed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import sqlite3
import stat
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter, rollout
from otel_rollout.errors import ConfigurationError
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.view.answers import Answers
from otel_rollout.view.index import Index, cached_file, open_table
from otel_rollout.view.table import WritableTable
from tests.kit.recording import Clients, Recording
from tests.view.made import Call, ask, line, scored, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "otel-rollout" / "view"


def ids(index: Index) -> list[str]:
    """The ids in the index, in order."""
    return sorted(row["id"] for row in ask(Answers(index), "trajectories")["rows"])


def numbers(index: Index) -> list[int]:
    """The numbers of the rows: each time that a trajectory is read it gets a new one."""
    found = index.table().connection.execute("SELECT number FROM trajectories ORDER BY 1")
    return [number for (number,) in found.fetchall()]


def until(index: Index, expected: list[str]) -> None:
    """Wait until the index holds these ids; the test's own time limit ends it."""
    while ids(index) != expected:
        threading.Event().wait(0.05)


def read(*sources: Path, **options: Any) -> Index:
    """An index that reads its sources once."""
    return Index([str(source) for source in sources], follow=False, **options)


def test_trajectories_are_listed_and_read_where_they_stand(tmp_path: Path):
    """Their overviews are rows; each is equal to that of its line when it is opened."""
    path = write(tmp_path / "a.jsonl", scored("t1", 0.5), scored("t2", None))
    with read(path) as index:
        assert index.wait()
        assert ids(index) == ["t1", "t2"]
        expected = list(JsonlTrajectoryExporter.read(path))
        assert [index.load(id_).trajectory for id_ in ids(index)] == expected
        assert index.errors == []


def test_what_was_read_is_known_when_it_is_opened_again(tmp_path: Path):
    """Nothing is read twice; of a file that grew meanwhile only what is new."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1), scored("t2", 0))
    with read(path) as index:
        index.wait()
        before = numbers(index)
    with read(path) as index:
        index.wait()
        assert numbers(index) == before
    write(path, scored("t3", 0))
    with read(path) as index:
        index.wait()
        assert numbers(index)[:2] == before
        assert ids(index) == ["t1", "t2", "t3"]


def test_a_file_that_grows_is_followed(tmp_path: Path):
    """Also a file that is empty at first, and a line that is written in two parts."""
    path = tmp_path / "a.jsonl"
    path.touch()
    with Index([str(path)]) as index:
        assert index.wait()
        assert ids(index) == []
        write(path, scored("t1", 1))
        until(index, ["t1"])
        text = json.dumps(scored("t2", 1))
        with path.open("a") as file:
            file.write(text[:300])
            file.flush()
            write(tmp_path / "b", scored("t9", 1))
            file.write(text[300:] + "\n")
        until(index, ["t1", "t2"])
        assert index.errors == []


def test_the_first_part_of_a_line_is_left_for_later(tmp_path: Path):
    """It is no error, and read when it is whole."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    text = json.dumps(scored("t2", 1))
    with path.open("a") as file:
        file.write(text[:-5])
    with read(path) as index:
        index.wait()
        assert ids(index) == ["t1"]
        assert index.errors == []
    with path.open("a") as file:
        file.write(text[-5:])
    with read(path) as index:
        index.wait()
        assert ids(index) == ["t1", "t2"]


def test_a_replaced_file_is_read_anew(tmp_path: Path):
    """What it held before is not there any more."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1), scored("t2", 1))
    with Index([str(path)]) as index:
        until(index, ["t1", "t2"])
        os.replace(write(tmp_path / "b.jsonl", scored("t3", 1)), path)
        until(index, ["t3"])


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path):
    """Also if it is as before where it was read to, and only grew after that."""
    long = line("t2", Call([{"role": "user", "content": "x" * 10_000}]))
    path = write(tmp_path / "a.jsonl", scored("t1", 0.25), long)
    with read(path) as index:
        index.wait()
    changed = write(tmp_path / "b.jsonl", scored("t1", 0.75), long, scored("t3", 1))
    os.replace(changed, path)
    with read(path) as index:
        index.wait()
        rows = ask(Answers(index), "trajectories", sort="id")["rows"]
        assert [row["reward"] for row in rows] == [0.75, None, 1.0]


def test_a_truncated_file_is_read_anew(tmp_path: Path):
    """Also if it is longer than before when it is looked at again."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    with Index([str(path)]) as index:
        until(index, ["t1"])
        path.write_text("".join(json.dumps(scored(f"u{n}", 1)) + "\n" for n in range(3)))
        until(index, ["u0", "u1", "u2"])


def test_a_trajectory_that_was_overwritten_is_an_error_that_says_so(tmp_path: Path):
    """It is not shown as another one, nor as what stands there now."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1), scored("t2", 1))
    with read(path) as index:
        index.wait()
        path.write_text("".join(json.dumps(scored(id_, 1)) + "\n" for id_ in ("t2", "t1")))
        with pytest.raises(LookupError, match=r"any more \(there is 't1'\)"):
            index.load("t2")
        path.write_text("{}\n" * 100)
        with pytest.raises(LookupError, match=r"'t2' is not at byte .* any more"):
            index.load("t2")
        os.replace(write(tmp_path / "b.jsonl", scored("t1", 1), scored("t2", 1)), path)
        with pytest.raises(LookupError, match="another file has its name"):
            index.load("t2")
        with pytest.raises(LookupError, match="no trajectory 'x'"):
            index.load("x")


def test_damaged_lines_are_listed(tmp_path: Path):
    """Each is one error with its line; what stands beside them is read."""
    good, damaged = scored("t1", 1), scored("t2", 1)
    damaged["exchanges"][0]["prompt"] = 7
    strange: Any = scored("t3", 1) | {"metadata": 5, "logs": 5}
    lines = [json.dumps(each) for each in (good, damaged, strange)]
    lines += ["not JSON", json.dumps({"a": 1}), json.dumps(scored("t4", 1) | {"id": [1]})]
    lines += [json.dumps(scored("t4", 1)), json.dumps(scored("\ud800", 1))]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with read(path) as index:
        index.wait()
        assert ids(index) == [r"\ud800", "t1", "t4"]
        assert index.load(r"\ud800").trajectory.id == "\ud800"
        assert [text.partition(": ")[0] for text in index.errors] == [
            f"{path}, line {number}" for number in (2, 3, 4, 5, 6)
        ]


def test_a_whole_trajectory_after_half_a_line_is_read_there(tmp_path: Path):
    """Its offset is that of its own first byte."""
    text, half = json.dumps(scored("t2", 1)), json.dumps(scored("t1", 1))[:400]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{half}{text}\n{json.dumps(scored('t3', 1))}\n".replace('": ', '":'))
    with read(path) as index:
        index.wait()
        assert ids(index) == ["t2", "t3"]
        assert index.load("t2").trajectory.id == "t2"
        assert "its writer was stopped" in " ".join(index.errors)


def test_of_two_with_one_id_the_last_counts(tmp_path: Path):
    """That is said; reading the file again says nothing more."""
    path = write(tmp_path / "a.jsonl", scored("t1", 0.25), scored("t1", 0.75))
    for _ in range(2):
        with read(path) as index:
            index.wait()
            (row,) = ask(Answers(index), "trajectories")["rows"]
            assert row["reward"] == index.load("t1").trajectory.reward == 0.75
            assert index.errors == [
                f"{path}, line 2: trajectory 't1' was there before; this one counts"
            ]


def test_a_trajectory_that_takes_anothers_place_is_a_change(tmp_path: Path):
    """Of the list and of itself; of another trajectory it is none."""
    path = write(tmp_path / "a.jsonl", scored("t1", 0.25), scored("t2", 0.75))
    with Index([str(path)]) as index:
        index.wait()
        asked = Answers(index)
        before, one, two = (ask(asked, "state", id=id_) for id_ in ("", "t1", "t2"))
        assert before["changed"] is None
        assert one["changed"] == ask(asked, "trajectory", id="t1")["changed"]
        write(path, scored("t1", 0.5), scored("t3", 1))
        until(index, ["t1", "t2", "t3"])
        assert ask(asked, "state")["changes"] > before["changes"]
        assert ask(asked, "state", id="t1")["changed"] > one["changed"]
        assert ask(asked, "state", id="t2")["changed"] == two["changed"]


@pytest.mark.parametrize("page", ["", "/trace/0af7651916cd43dd8448eb211c80319c"])
def test_an_address_that_cannot_be_read_is_listed(recording: Recording, tmp_path: Path, page: str):
    """The other sources of spans are read all the same."""
    with rollout("agent") as trajectory:
        pass
    path = tmp_path / "spans.jsonl"
    JsonLinesSpanExporter(path).export(recording.spans)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}{page}"
    with Index([address, str(path)], follow=False) as index:
        assert index.wait()
        assert ids(index) == [trajectory.id]
        (error,) = index.errors
        assert address in error


def test_spans_are_rebuilt(recording: Recording, clients: Clients, tmp_path: Path):
    """The trajectories are those of the process that recorded them, also when more come."""
    client = clients.sync(clients.serve())
    path = tmp_path / "spans.jsonl"
    exporter = JsonLinesSpanExporter(path)

    def record() -> None:
        with rollout("agent"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        exporter.export(recording.spans)

    record()
    with Index([str(path)]) as index:
        until(index, sorted(each.id for each in recording.trajectories))
        assert index.load(recording.trajectory.id).trajectory == recording.trajectory
        record()
        until(index, sorted(each.id for each in recording.trajectories))
        for each in recording.trajectories:
            assert index.load(each.id).trajectory == each


def test_spans_that_were_rebuilt_are_not_rebuilt_again(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """The index keeps their trajectories beside it."""
    client = clients.sync(clients.serve())
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    path = tmp_path / "spans.jsonl"
    JsonLinesSpanExporter(path).export(recording.spans)
    found = []
    for _ in range(2):
        with read(path) as index:
            index.wait()
            found.append((numbers(index), ids(index)))
    assert found[0] == found[1] == ([1], [recording.trajectory.id])


def test_a_folder_is_its_files(tmp_path: Path):
    """One that comes later is read as well."""
    folder = tmp_path / "runs"
    folder.mkdir()
    write(folder / "a.jsonl", scored("t1", 1))
    with Index([str(folder)]) as index:
        until(index, ["t1"])
        write(folder / "b.jsonl", scored("t2", 1))
        until(index, ["t1", "t2"])


def test_sources_that_cannot_be_read_are_refused_at_once(tmp_path: Path):
    """A file that is not there, and stdin, which cannot be read twice."""
    with pytest.raises(FileNotFoundError):
        Index([str(tmp_path / "none")])
    with pytest.raises(ConfigurationError, match="write it to a file"):
        Index(["-"])


def test_a_file_that_goes_away_keeps_what_was_read(tmp_path: Path):
    """The list stays, an error says that the file is gone."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    with Index([str(path)]) as index:
        until(index, ["t1"])
        path.unlink()
        while not index.errors:
            threading.Event().wait(0.05)
        assert ids(index) == ["t1"]
        assert "No such file" in index.errors[0]


def test_the_cache_is_the_users_alone(tmp_path: Path, cache: Path):
    """Nobody else may read its folder, or an index that is named."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    with read(path) as index:
        index.wait()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    named = tmp_path / "index.sqlite"
    with read(path, path=named) as index:
        index.wait()
        assert ids(index) == ["t1"]
        assert stat.S_IMODE(named.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", ".lock", ".rebuilt.jsonl", ".rebuilt.jsonl.part"])
@pytest.mark.parametrize("planted", ["link", "open to others"])
def test_what_others_planted_is_not_used(tmp_path: Path, name: str, planted: str):
    """In a shared folder: a link is not followed, and a file that others may write is no index."""
    victim = tmp_path / "victim"
    victim.write_text("")
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(write(tmp_path / "a.jsonl", scored("t1", 1)).read_bytes()))
    place = tmp_path / f"index.sqlite{name}"
    if planted == "link":
        place.symlink_to(victim)
    else:
        place.write_text("")
        place.chmod(0o666)
    if "rebuilt" not in name:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            read(source, path=tmp_path / "index.sqlite").__enter__()
    else:
        with read(source, path=tmp_path / "index.sqlite") as index:
            index.wait()
            replaced = name == ".rebuilt.jsonl" and ids(index) == ["t1"]
            assert replaced or place.name in " ".join(index.errors)
    assert victim.read_text() == ""


def test_an_index_that_is_not_kept_leaves_nothing(tmp_path: Path, cache: Path):
    """Not in the cache, nor in the folder of temporary files."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    with read(path, cached=False) as index:
        index.wait()
        folder = index._path.parent
        assert folder.is_dir()
    assert not folder.exists()
    assert not cache.exists()


def test_two_indexes_of_the_same_sources_do_not_meet(tmp_path: Path):
    """The second makes one of its own while the first is open."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    with Index([str(path)]) as first, Index([str(path)]) as second:
        until(first, ["t1"])
        until(second, ["t1"])
        assert first._path != second._path


def test_a_damaged_index_is_made_anew(tmp_path: Path, cache: Path):
    """Whatever stands in its middle, or an older version of its tables."""
    path = write(tmp_path / "a.jsonl", *(scored(f"t{n}", n) for n in range(300)))
    for damage in ("bytes", "version"):
        with read(path) as index:
            index.wait()
            file = index._path
        if damage == "bytes":
            content = bytearray(file.read_bytes())
            content[4096:40000] = b"\xff" * (40000 - 4096)
            file.write_bytes(content)
        else:
            table = open_table(file)
            table.connection.execute("PRAGMA user_version = 99999")
            table.connection.close()
        with read(path) as index:
            index.wait()
            assert len(ids(index)) == 100  # of a page
            assert index.table().count() == 300


def test_an_index_whose_process_was_killed_is_gone_on_with(tmp_path: Path):
    """What was written by then is known, also what still stands in its journal."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    named, copy = tmp_path / "one.sqlite", tmp_path / "two.sqlite"
    with Index([str(path)], path=named) as index:
        until(index, ["t1"])
        before = numbers(index)
        for ending in ("", "-wal"):
            shutil.copy(f"{named}{ending}", f"{copy}{ending}")
    with read(path, path=copy) as index:
        index.wait()
        assert numbers(index) == before
        assert ids(index) == ["t1"]


def test_a_file_that_is_no_index_is_left_as_it_is(tmp_path: Path):
    """A file that is named is one of its own: no trajectory is overwritten."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    before = path.read_bytes()
    with (
        pytest.raises(ConfigurationError, match="is no index of otel-rollout"),
        read(path, path=path),
    ):
        pass
    assert path.read_bytes() == before
    with pytest.raises(ConfigurationError, match="cannot be written"):
        read(path, path=tmp_path / "none" / "index").__enter__()


def test_sqlite_without_fts5_is_named(tmp_path: Path):
    """The error says what is missing and which Python has it."""

    class Without(sqlite3.Connection):
        def executescript(self, script: str) -> sqlite3.Cursor:
            return super().executescript(script.replace("fts5", "fts5_that_is_not_built_in"))

    with (
        closing(sqlite3.connect(":memory:", factory=Without)) as connection,
        pytest.raises(ConfigurationError, match="SQLite with FTS5"),
    ):
        WritableTable.create(connection)


def test_the_index_is_keyed_by_what_the_sources_are(tmp_path: Path):
    """A link to a file is that file; other options are another index."""
    path = write(tmp_path / "a.jsonl", scored("t1", 1))
    (tmp_path / "link").symlink_to(path)
    with read(path) as index:
        index.wait()
        first = index._path
    with read(tmp_path / "link") as index:
        index.wait()
        assert index._path == first
    with read(path, infer_rollouts=True) as index:
        index.wait()
        assert index._path != first
    assert cached_file("a") != cached_file("b")


def test_reading_does_not_hold_what_it_read(tmp_path: Path):
    """A line is forgotten before the next: the table alone grows, and it is a file."""
    path = tmp_path / "a.jsonl"
    text = {"role": "user", "content": "x" * 200_000}
    write(path, *(line(f"t{n}", Call([text])) for n in range(40)))
    tracemalloc.start()
    with read(path) as index:
        index.wait()
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 8_000_000
    assert peak < 4_000_000
