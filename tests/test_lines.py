"""Lines in files: whole or not at all, on lines of their own, found again behind half a line."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import lines as lines_module
from otel_rollout.lines import append_lines, bounded_lines, is_half, whole_objects
from tests.kit.disks import full_disk

PREFIX = b'{"a":'
JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(['{"a":', '"}', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LINES = st.builds(lambda value: json.dumps({"a": value}, ensure_ascii=False), JSON).filter(
    lambda text: text.isprintable()
)


def compact(text: str) -> bytes:
    """The line as a writer of ours begins it."""
    return text.replace('{"a": ', '{"a":', 1).encode()


def test_what_does_not_fit_is_taken_back(tmp_path: Path):
    """A line that the disk takes half of is not there at all; a smaller one still fits."""
    path = tmp_path / "lines"
    append_lines(path, b"a" * 50 + b"\n")
    with full_disk(100):
        with pytest.raises(OSError, match="large"):
            append_lines(path, b"b" * 100 + b"\n")
        append_lines(path, b"c\n", fsync=True)
    append_lines(path, b"d\n")
    assert path.read_bytes().splitlines() == [b"a" * 50, b"c", b"d"]


def test_a_full_device_is_said():
    """A device takes nothing back, and says so all the same."""
    with pytest.raises(OSError, match="No space left"):
        append_lines("/dev/full", b"a\n")


def test_a_line_begins_below_half_a_line(tmp_path: Path):
    """Whoever left it: also another process, while this one had written already."""
    path = tmp_path / "lines"
    append_lines(path, b"a\n")
    with open(path, "ab") as other:
        other.write(b"half")
    append_lines(path, b"b\n")
    append_lines(path, b"c\n")
    assert path.read_bytes() == b"a\nhalf\nb\nc\n"


def test_a_pipe_takes_lines(tmp_path: Path):
    """What has no end to look at takes lines as well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    append_lines(pipe, b"a\n")
    assert os.read(reading, 100) == b"a\n"
    os.close(reading)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
def test_processes_do_not_take_back_what_others_wrote(tmp_path: Path):
    """Where one has no room, the lines of the others stay whole."""
    path = tmp_path / "lines"
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            for _ in range(100):
                if number == 0:
                    with full_disk(path.stat().st_size + 5 if path.exists() else 5):
                        try:
                            append_lines(path, b"x" * 100_000 + b"\n")
                        except OSError:
                            pass
                else:
                    append_lines(path, b"%d" % number * 50 + b"\n")
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    lines = path.read_bytes().splitlines()
    assert lines.count(b"1" * 50) == lines.count(b"2" * 50) == 100
    assert set(lines) <= {b"1" * 50, b"2" * 50, b"x" * 100_000}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
def test_a_child_that_was_forked_in_the_middle_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It has the locked file open too, for as long as it lives."""
    path, children = tmp_path / "lines", list[int]()
    write = lines_module.write_whole

    def forking(file: Any, content: bytes) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.pause()
        write(file, content)

    monkeypatch.setattr(lines_module, "write_whole", forking)
    append_lines(path, b"a\n")
    began = time.monotonic()
    append_lines(path, b"b\n")
    assert time.monotonic() - began < 4
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    assert path.read_bytes() == b"a\nb\n"


def test_a_lock_that_is_never_released_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever holds it: the line is written all the same."""
    monkeypatch.setattr(lines_module, "_LOCK_SECONDS", 0.1)
    path = tmp_path / "lines"
    with open(path, "ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        append_lines(path, b"a\n")
    assert path.read_bytes() == b"a\n"


def test_threads_write_whole_lines(tmp_path: Path):
    """Each opens the file anew, and each finds its end."""
    path = tmp_path / "lines"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_lines(path, b"%d\n" % n), range(200)))
    assert sorted(map(int, path.read_bytes().split())) == list(range(200))


class Pipe(io.BytesIO):
    """A file of which each read gives some bytes, and now and then none yet."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        super().__init__(content)
        self.sizes = iter(sizes)

    def read1(self, size: int | None = -1) -> bytes:
        return super().read1(min(size or 0, next(self.sizes, 1 << 20)))


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"a", b"\0", b"b" * 9, b"c" * 10, b"d" * 11])),
    st.lists(st.integers(1, 12)),
)
def test_lines_are_found_however_a_file_is_read(pieces: list[bytes], sizes: list[int]):
    """Those that are too long have their length alone."""
    content = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "LONGEST", 10)
        found = list(bounded_lines(Pipe(content, sizes)))
    lines = io.BytesIO(content).readlines()
    assert found == [(line if len(line) <= 10 else None, len(line)) for line in lines]


def test_half_a_line_is_read_again():
    """Once nothing came: what its writer adds meanwhile belongs to it."""
    assert list(bounded_lines(Pipe(b"a\nbc\nd", [3, 0, 2, 9, 0]))) == [
        *((b"a\n", 2), (b"bc\n", 3), (b"d", 1)),
    ]
    assert list(bounded_lines(Pipe(b"a\nbc\nd", [3, 0, 0]))) == [(b"a\n", 2), (b"b", 1)]


@given(LINES, LINES, st.data())
def test_an_object_behind_half_a_line_is_found(first: str, second: str, data: Any):
    """Wherever the first writer was stopped, also within a character."""
    half, whole = compact(first), compact(second)
    half = half[: data.draw(st.integers(1, len(half) - 1))]
    objects, is_all = whole_objects(half + whole + b"\n", PREFIX)
    assert not is_all
    assert objects[-1] == whole
    assert is_half(half, PREFIX)


@given(st.lists(LINES, min_size=2, max_size=4))
def test_objects_without_line_breaks_are_found(texts: list[str]):
    """Where only the end of the line was not written, nothing is lost and nothing is half."""
    lines = [compact(text) for text in texts]
    assert whole_objects(b"".join(lines) + b"\n", PREFIX) == (lines, True)


@given(LINES, st.data())
def test_half_a_line_alone_holds_nothing(text: str, data: Any):
    """No object is invented from half of one, unless one of its own stands whole at its end."""
    half = compact(text)
    half = half[: data.draw(st.integers(0, len(half) - 1))]
    for each in whole_objects(half, PREFIX)[0]:
        assert half.endswith(each)
        assert json.loads(each)


def test_what_is_half_a_line():
    """The beginning of an object, some of its prefix, or the zeros of a lost page."""
    assert is_half(b'{"a":1,"b', PREFIX)
    assert is_half(b'{"', PREFIX)
    assert is_half(b"\0\0\0\n", PREFIX)
    assert not is_half(b"hello", PREFIX)
    assert whole_objects(b'\0\0\0{"a":1}\n', PREFIX) == ([b'{"a":1}'], False)
    assert whole_objects(b'{"a":"\xff"}\n', PREFIX) == ([], False)


@pytest.mark.slow
@pytest.mark.parametrize("line", [b'{"a":' * 200_000, b'{"a":[' + b'{"a":1},' * 200_000])
def test_a_hostile_line_takes_no_time(line: bytes):
    """Only some places of a line are looked at."""
    assert whole_objects(line, PREFIX) == ([], False)


@pytest.mark.parametrize("held", [1, 10, 1 << 20])
def test_lines_that_are_many_wait_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
):
    """They come in order, also after all were forgotten once, and the file is gone then."""
    monkeypatch.setattr(lines_module, "_HELD", held)
    spilled = lines_module.SpilledLines(tmp_path / "rows")
    for text in (b"forgotten", b"too"):
        spilled.append(text)
    spilled.clear()
    made = [b"%d\n" % number for number in range(9)]
    for line in made:
        spilled.append(line)
    assert b"".join(pickle.loads(pickle.dumps(spilled)).pieces()) == b"".join(made)
    assert [*tmp_path.iterdir()] == []
