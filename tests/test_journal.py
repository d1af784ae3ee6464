"""The journal: what was appended is there after any end of its process, and nothing else is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.journal import Journal, Place, read_record
from tests.kit.disks import full_disk

RECORDS = st.lists(st.binary(max_size=60), min_size=1, max_size=8)


def left(folder: Path, segment_bytes: int = 1 << 20) -> tuple[list[bytes], list[str]]:
    """The records that are found when the journal is opened again, and what is damaged."""
    damage = list[str]()
    with Journal(folder, segment_bytes=segment_bytes) as journal:
        return [record for _, record in journal.records(damage.append)], damage


def segments(folder: Path) -> list[Path]:
    """The files of records, in order."""
    return sorted(folder.glob("*.segment"))


@given(st.lists(RECORDS, max_size=4), st.integers(1, 200))
def test_what_was_appended_is_there(batches: list[list[bytes]], segment_bytes: int):
    """In order, by its place, again after each restart, and for this user alone."""
    with tempfile.TemporaryDirectory() as name:
        folder, places = Path(name, "journal"), list[Place]()
        for batch in batches:
            with Journal(folder, segment_bytes=segment_bytes) as journal:
                places += journal.append(batch)
        every = [record for batch in batches for record in batch]
        assert left(folder, segment_bytes) == (every, [])
        assert [read_record(folder, place) for place in places] == every
        for path in (folder, *folder.iterdir()):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077
        assert left(folder) == (every, [])  # a reader that opens and closes releases nothing


def written(folder: Path, records: Sequence[bytes]) -> Path:
    """A journal of one segment."""
    with Journal(folder) as journal:
        journal.append(records)
    [path] = segments(folder)
    return path


@given(RECORDS, st.data())
def test_half_a_record_at_the_end_is_none(records: list[bytes], data: st.DataObject):
    """Wherever the file ends: what is whole is there, and nothing is reported."""
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), records)
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
        found, damage = left(Path(name))
        assert found == records[: len(found)]
        assert damage == []


@given(RECORDS, st.data())
def test_damage_costs_the_record_that_it_hits(records: list[bytes], data: st.DataObject):
    """It is reported; the others are there, also those after it."""
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), records)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        ends = [sum(16 + len(r) for r in records[: n + 1]) for n in range(len(records))]
        hit = next(number for number, end in enumerate(ends) if place < end)
        found, damage = left(Path(name))
        assert found == records[:hit] + records[hit + 1 :]
        assert len(damage) == 1


def test_the_content_of_a_record_is_no_record(tmp_path: Path):
    """A record that contains a journal, whose own header is damaged, gives none of it."""
    inner = written(tmp_path / "inner", [b"forged"]).read_bytes()
    path = written(tmp_path / "outer", [inner, b"after"])
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    found, damage = left(tmp_path / "outer")
    assert (found, len(damage)) == ([b"after"], 1)


def test_a_damaged_record_is_not_read(tmp_path: Path):
    """By its place, neither."""
    with Journal(tmp_path) as journal:
        [place] = journal.append([b"content"])
        path = segments(tmp_path)[0]
        path.write_bytes(path.read_bytes()[:-1] + b"T")
        with pytest.raises(SpanFormatError, match="at byte 0 is damaged"):
            journal.read(place)


def test_a_segment_goes_when_all_in_it_is_released(tmp_path: Path):
    """Not before, and not while it is appended to; what was released comes again else."""
    with Journal(tmp_path, segment_bytes=50) as journal:
        first, second = journal.append([b"a" * 20, b"b" * 20])
        third = journal.append([b"c" * 50])[0]
        fourth = journal.append([b"d"])[0]
        assert len(segments(tmp_path)) == 3
        journal.release([second, third])
        assert len(segments(tmp_path)) == 2
        journal.release([fourth])
        assert journal.read(first) == b"a" * 20
    assert len(segments(tmp_path)) == 1  # the one that was appended to had nothing left
    with Journal(tmp_path) as journal:
        places = [place for place, _ in journal.records(pytest.fail)]
        assert len(places) == 2
        assert journal.size == 72
        journal.release(places)
        assert (segments(tmp_path), journal.size) == ([], 0)


def test_records_that_keep_others(tmp_path: Path):
    """A record that is held keeps its segment; appended again and released, it no longer does."""
    with Journal(tmp_path, segment_bytes=200, max_bytes=600) as journal:
        first, *others = journal.append([b"a" * 20, *[b"b" * 60] * 3])
        second = journal.append([b"c" * 160])[0]
        last = journal.append([b"d"])[0]
        held = {first, second, last}
        journal.release(others)
        assert journal.sparse(held) == [first]
        assert journal.sparse(held - {first} | {others[0]}) == [others[0]]
        with pytest.raises(OSError, match="the journal may have"):
            journal.append([b"e" * 200])
        moved = journal.append([journal.read(first)], reserve=None)
        journal.release([first])
        assert journal.read(moved[0]) == b"a" * 20
        journal.append([b"e" * 200])


def test_a_segment_of_which_nothing_is_held_is_no_hindrance(tmp_path: Path):
    """It is appended to, and goes when there is no room else."""
    with Journal(tmp_path, max_bytes=100) as journal:
        for _ in range(5):
            assert journal.has_room(60)
            journal.release(journal.append([b"a" * 60]))


def test_a_limit_is_kept(tmp_path: Path):
    """Nothing is written of what does not fit; there is room again once something is released."""
    with Journal(tmp_path, segment_bytes=1, max_bytes=100) as journal:
        places = journal.append([b"a" * 60])
        with pytest.raises(OSError, match="the journal may have 100 bytes, and has 76"):
            journal.append([b"b", b"c" * 10])
        assert journal.size == 76
        journal.append([b"b"])
        journal.release(places)
        journal.append([b"c" * 10])
    assert left(tmp_path) == ([b"b", b"c" * 10], [])


def test_a_full_disk_costs_nothing_but_the_try(tmp_path: Path):
    """None of a batch that did not fit is there, and the next one is."""
    with Journal(tmp_path) as journal:
        journal.append([b"a" * 50])
        with full_disk(150), pytest.raises(OSError, match="large"):
            journal.append([b"b" * 20, b"c" * 200])
        assert journal.size == 66
        with full_disk(150):
            journal.append([b"d" * 20])
        journal.append([b"e"])
    assert left(tmp_path) == ([b"a" * 50, b"d" * 20, b"e"], [])


def test_one_process_owns_a_folder(tmp_path: Path):
    """Another is refused; a child that was forked closes its copies, and keeps its parent's."""
    with Journal(tmp_path) as journal:
        with pytest.raises(ConfigurationError, match="in use by another process"):
            Journal(tmp_path)
        journal.append([b"a"])
        if not (child := os.fork()):
            journal.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(ConfigurationError, match="in use"):
            Journal(tmp_path)
        journal.append([b"b"])
    assert left(tmp_path) == ([b"a", b"b"], [])


PROGRAM = """
import sys
from otel_rollout.journal import Journal
journal = Journal(sys.argv[1], segment_bytes=5000)
for number in range(10**9):
    journal.append([b"%d" % number * 100] * 2)
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_appended(tmp_path: Path):
    """At any moment; the folder is free again."""
    for pause in (0.0, 0.02):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path / str(pause)], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        program.stdout.readline()
        time.sleep(pause)
        program.send_signal(signal.SIGKILL)
        acknowledged = 1 + program.stdout.read().count(b"\n")
        program.wait()
        program.stdout.close()
        found, damage = left(tmp_path / str(pause))
        assert damage == []
        assert len(found) >= 2 * acknowledged
        assert found == [b"%d" % (number // 2) * 100 for number in range(len(found))]
