"""`--jobs`: several processes print, write and report what one does, in the same order."""

from __future__ import annotations

import gzip
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from otel_rollout import Trajectory
from otel_rollout.command.cli import main
from otel_rollout.errors import ExportError, SpanFormatError
from otel_rollout.view import jobs
from tests.kit.groups import recorded as recorded
from tests.kit.recording import Recording

Output = pytest.CaptureFixture[str]
COMMAND = (sys.executable, "-c", "from otel_rollout.command import main; raise SystemExit(main())")


@cache
def line(number: int, name: str = "good") -> bytes:
    """A line of a file of trajectories."""
    group = f"g{number % 3}"
    made = Trajectory(id=f"t{number}", name=name, group_id=group, reward=number / 7)
    return made.to_json().encode() + b"\n"


def name_of(trajectory: Trajectory) -> str | None:
    """What a verb might do: it finds some damaged, and leaves others out."""
    if trajectory.name == "damaged":
        raise KeyError(trajectory.id)
    return trajectory.id if trajectory.name == "good" else None


def some_lines(draw: random.Random) -> Iterator[bytes | None]:
    """Good, damaged, unfinished, empty and too long ones; at the end there may be damage."""
    for number in range(draw.randrange(12)):
        good = line(number)
        half = good[: draw.randrange(1, len(good))]
        kinds = (good, good, line(number, "damaged"), line(number, "other"), half + b"\n")
        others = (half + good, good[:-1] + good, b"\n", b" \t\n", b"no JSON\n", b"{}\n", None)
        place = draw.randrange(len(good))
        changed = good[:place] + draw.choice((b"", b"\n", b"\0", b'"')) + good[place + 2 :]
        yield draw.choice((*kinds, *others, changed))
    if draw.random() < 0.3:
        raise SpanFormatError("cut")


def test_pieces_of_any_lines_read_as_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and reports in the same order, with the same numbers of lines, wherever it is cut."""
    for seed in range(300):
        monkeypatch.setattr(jobs, "_PIECE", random.Random(seed).randrange(1, 3000))
        whole: list[object] = []
        lines = some_lines(random.Random(seed))
        for found in jobs.read_lines(name_of, lines, "f", lambda e: whole.append(str(e))):  # noqa: B023
            whole.append(found)
        cut: list[object] = []
        pieces = jobs.pieces_of(some_lines(random.Random(seed)), "f")
        for found in jobs.read_pieces(name_of, pieces, lambda e: cut.append(str(e)), 1):  # noqa: B023
            cut.append(found)
        assert cut == whole


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A damaged file, a gzipped one that is cut, and a good one, each of several pieces."""
    monkeypatch.setattr(jobs, "_PIECE", 2000)
    lines = [line(number) for number in range(30)]
    lines[3:3] = [b"no JSON\n", b"\n", lines[0][:90] + b"\n", lines[1][:200] + lines[2], b"{}\n"]
    contents = {
        "damaged": b"".join(lines),
        "packed.gz": gzip.compress(b"".join(line(number) for number in range(30, 60)))[:-9],
        "good": b"".join(line(number) for number in range(50, 70)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [str(tmp_path / name) for name in contents]


def test_rows_are_the_same(recorded: Recording, tmp_path: Path, capsys: Output) -> None:
    """Groups are exported in order, by one process and by several; what is refused is said."""
    source, output = tmp_path / "t.jsonl", tmp_path / "rows"
    source.write_text("".join(each.to_json() + "\n" for each in recorded.trajectories))
    found = []
    for count in ("1", "3"):
        arguments = [
            "export",
            str(source),
            "--to",
            "tokens",
            "-o",
            str(output),
            "--jobs",
            count,
            "--force",
        ]
        found.append((main(arguments), capsys.readouterr(), output.read_bytes()))
    assert found[0] == found[1]
    assert found[0][0] == 0
    assert len(found[0][2].splitlines()) == 7


@pytest.mark.parametrize(
    "verb",
    [
        ["list"],
        ["list", "--json", "--where", "reward > 1", "--sort=-reward"],
        ["check", "--json", "--require", "reward"],
        ["export", "--to", "tokens"],
    ],
)
def test_the_output_is_the_same(
    verb: list[str], sources: list[str], tmp_path: Path, capsys: Output
) -> None:
    """Of damaged files, packed ones, several: output, reports, exit status, file."""
    output = tmp_path / "rows"
    to_file = ["-o", str(output)] if verb[0] == "export" else []
    found = []
    for count in ("1", "3"):
        status = main([*verb, *sources, *to_file, "--jobs", count])
        found.append((status, capsys.readouterr(), output.exists() and output.read_bytes()))
    assert found[0] == found[1]
    assert "damaged, line 4: not a Trajectory" in found[0][1].err
    assert "packed.gz: its compressed content is damaged or cut" in found[0][1].err


def test_stdin_is_read_by_several(
    sources: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """It needs no file."""
    found = []
    for count in ("1", "3"):
        content = io.BytesIO(Path(sources[0]).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
        found.append((main(["list", "-", "--jobs", count]), capsys.readouterr()))
    assert found[0] == found[1]
    assert "stdin" not in found[0][1].err


def test_a_source_that_is_gone_ends_both_alike(
    sources: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """What was read before it is printed."""
    opened = open

    def fails(path: object, *arguments: object, **options: object) -> object:
        if path == sources[2] and options:
            raise OSError(5, "Input/output error", path)
        return opened(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", fails)
    found = [(main(["list", *sources, "--jobs", n]), capsys.readouterr()) for n in ("1", "2")]
    assert found[0] == found[1]
    assert "Input/output error" in found[0][1].err
    assert found[0][1].out.count("\n") > 50


# --- processes


def doubled(number: int) -> int:
    """Work that fails for a seven, and at eight its process is killed."""
    if number == 7:
        raise ExportError("seven")
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_results_come_in_the_order_of_items() -> None:
    """As long as the number of processes does not divide that of the items, too."""
    assert list(jobs.in_order(doubled, range(6), 4)) == [(n, 2 * n) for n in range(6)]
    assert list(jobs.in_order(doubled, [], 4)) == []


def test_an_error_comes_after_the_results_before_it() -> None:
    """It is raised here as it was there."""
    found = jobs.in_order(doubled, [5, 6, 7, 3], 2)
    assert [next(found), next(found)] == [(5, 10), (6, 12)]
    with pytest.raises(ExportError, match="seven"):
        next(found)


def test_a_worker_that_is_killed_ends_the_work() -> None:
    """The error says what to do."""
    with pytest.raises(ChildProcessError, match=r"--jobs: .* terminated .* smaller number"):
        list(jobs.in_order(doubled, [1, 8, 2], 2))


def is_blocked(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_reaches_no_worker_that_starts() -> None:
    """It would die with a traceback before it could ignore the signal."""
    assert list(jobs.in_order(is_blocked, [1, 2, 3], 2)) == [(1, True), (2, True), (3, True)]
    assert not is_blocked(0)


def test_ctrl_c_while_a_worker_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool does not know it yet: at its end the program would wait for it."""
    start, started = SpawnProcess.start, list[SpawnProcess]()

    def interrupted(self: SpawnProcess) -> None:
        start(self)
        started.append(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(jobs.in_order(is_blocked, [1, 2, 3], 2))
    (worker,) = started
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
    assert not is_blocked(0)


def test_ctrl_c_ends_all_of_them() -> None:
    """Status 130 and no traceback, though stdin stays open; no process has stderr any more."""
    with subprocess.Popen(
        [*COMMAND, "list", "-", "--jobs", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        padded = line(1)[:-1] + b" " * jobs._PIECE + b"\n"
        process.stdin.write(padded * 6)
        process.stdin.flush()
        assert process.stdout is not None
        assert all(process.stdout.readline() for _ in range(3))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")
