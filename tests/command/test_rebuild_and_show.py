"""The command `otel-rollout`: what it writes, what it says, and its exit status."""

from __future__ import annotations

import gzip
import io
import os
import pty
import random
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.command.cli import main
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line

ROOT = Path(__file__).parents[2]
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from otel_rollout.command import main; sys.exit(main())",
]


@pytest.fixture
def recorded(recording: Recording, clients: Clients) -> Recording:
    """Three rollouts: two with a call, one that fails."""
    client = clients.sync(clients.serve())
    for name in ("first", "second"):
        with rollout(name, task_id="t1"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
    with pytest.raises(ValueError), rollout("third"):
        raise ValueError("no\x1b[31m")
    return recording


def lines(spans: Any) -> str:
    return "".join(to_json_line([span]) for span in spans)


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
        **options,
    )


# --- rebuild


def test_a_file_is_rebuilt(recorded: Recording, tmp_path: Path, capsys: Any):
    """The output is what `JsonlTrajectoryExporter` would have written, and the summary counts."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    target = tmp_path / "trajectories.jsonl"
    assert main(["rebuild", source, "-o", str(target)]) == 0
    live = JsonlTrajectoryExporter(tmp_path / "live.jsonl")
    live.export(recorded.trajectories)
    live.shutdown()
    assert target.read_bytes() == (tmp_path / "live.jsonl").read_bytes()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"3 rollouts from 7 spans (2 of other libraries) -> {target}",
        "  2 complete, 1 error",
        "  1 with warnings:",
        "       1 x it made no model call that was captured before it ended as 'error'",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "live.jsonl",
        "spans.jsonl",
        "trajectories.jsonl",
    ]


def test_spans_are_spread_over_sources(
    recorded: Recording, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Spans of one rollout come from several files and stdin, in any order and twice."""
    spans = list(recorded.spans)
    random.Random(3).shuffle(spans)
    one = written(tmp_path / "1", lines(spans[:3]))
    two = written(tmp_path / "2.gz", gzip.compress(lines(spans[2:5]).encode()))
    stdin = io.TextIOWrapper(io.BytesIO(lines(spans[4:] + spans[:1]).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["rebuild", two, "-", one]) == 0
    found = capsys.readouterr().out.encode().splitlines()
    written(tmp_path / "out", b"\n".join(found))
    assert list(JsonlTrajectoryExporter.read(tmp_path / "out")) == list(recorded.trajectories)


def test_what_is_missing_is_in_the_summary(recorded: Recording, tmp_path: Path, capsys: Any):
    """Warnings are counted by what they say."""
    kept = [span for span in recorded.spans if not span.name.startswith("recording")]
    source = written(tmp_path / "spans.jsonl", lines(kept))
    assert main(["rebuild", source, "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.splitlines()[2:] == [
        "  3 with warnings:",
        "       2 x model calls are missing: their spans did not come",
        "       1 x it made no model call that was captured before it ended as 'error'",
    ]


def test_a_damaged_line_is_reported_and_left_out(recorded: Recording, tmp_path: Path, capsys: Any):
    """The rest is written, and the exit status says that something was not read."""
    content = lines(recorded.spans) + '{"broken\n{"resourceSpans":[]}\n'
    source = written(tmp_path / "spans.jsonl", content)
    assert main(["rebuild", source, "-o", str(tmp_path / "out")]) == 1
    assert list(JsonlTrajectoryExporter.read(tmp_path / "out")) == list(recorded.trajectories)
    err = capsys.readouterr().err
    assert f"{source}, line 8: not JSON" in err
    assert "1 place could not be read and was left out" in err


def test_many_damaged_lines_do_not_flood(tmp_path: Path, capsys: Any):
    """A file of something else says so a few times only."""
    source = written(tmp_path / "log.jsonl", '{"level":"info"}\n' * 1000)
    assert main(["rebuild", source, "-o", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert "1000 places could not be read" in err
    assert len(err.splitlines()) < 20


@pytest.mark.parametrize("before", [None, b"what was there\n"])
def test_a_source_that_is_not_there(
    before: bytes | None, recorded: Recording, tmp_path: Path, capsys: Any
):
    """A wrong name is said before anything is read, and the output is as it was."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    target = tmp_path / "out"
    if before is not None:
        target.write_bytes(before)
    assert (
        main(["rebuild", source, str(tmp_path / "typo.jsonl"), "-o", str(target), "--force"]) == 1
    )
    assert "typo.jsonl: No such file or directory" in capsys.readouterr().err
    assert (target.read_bytes() if target.exists() else None) == before
    assert len(list(tmp_path.iterdir())) == (1 if before is None else 2)


@pytest.mark.slow
def test_a_failure_while_writing_leaves_what_was_there(recorded: Recording, tmp_path: Path):
    """No half of a file, whatever happens."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    target = tmp_path / "out"
    target.write_bytes(b"old")
    calls: list[Trajectory] = []
    to_json = Trajectory.to_json

    def failing(trajectory: Trajectory) -> Any:
        calls.append(trajectory)
        if len(calls) > 1:
            raise OSError("disk full")
        return to_json(trajectory)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Trajectory, "to_json", failing)
        assert main(["rebuild", source, "-o", str(target), "--force"]) == 1
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "spans.jsonl"]


def test_the_output_may_be_a_link_or_a_pipe(recorded: Recording, tmp_path: Path):
    """A link stays one; a pipe is written to."""
    both = written(tmp_path / "both", lines(recorded.spans))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "made")
    assert main(["rebuild", str(both), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert list(JsonlTrajectoryExporter.read(link)) == list(recorded.trajectories)
    source = written(tmp_path / "spans", lines(recorded.spans))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # what is written fits into its buffer
    assert main(["rebuild", source, "-o", str(pipe)]) == 0
    assert os.read(reading, 1 << 16).count(b"\n") == len(recorded.trajectories)
    os.close(reading)
    assert pipe.is_fifo()


def test_nothing_to_rebuild(recorded: Recording, tmp_path: Path, capsys: Any):
    """Spans of other libraries alone give no trajectory, and a hint; with it, they give one."""
    foreign = [span for span in recorded.spans if span.name == "chat m"]
    assert len(foreign) == 2
    source = written(tmp_path / "spans.jsonl", lines(foreign))
    assert main(["rebuild", source, "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_bytes() == b""
    assert "try --infer-rollouts" in capsys.readouterr().err
    assert main(["rebuild", source, "--infer-rollouts", "-o", str(tmp_path / "out")]) == 0
    assert len(list(JsonlTrajectoryExporter.read(tmp_path / "out"))) == 2


@pytest.mark.parametrize("content", ["", "\n", "{}\n", '{"resourceSpans":[{"resou'])
def test_nothing_to_write_leaves_the_former_file(content: str, tmp_path: Path, capsys: Any):
    """A source without spans is said and is no success, and what was made before stays."""
    source = written(tmp_path / "spans.jsonl", content)
    target = tmp_path / "out"
    target.write_bytes(b"good")
    assert main(["rebuild", source, "-o", str(target), "--force"]) == 1
    assert target.read_bytes() == b"good"
    said = capsys.readouterr().err
    assert f"{source}: there is no span in it" in said
    assert f"nothing to write: {target} stays as it was" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "spans.jsonl"]
    assert main(["show", source]) == 1
    assert f"{source}: there is no span in it" in capsys.readouterr().err


def test_no_file_is_made_of_no_spans(recorded: Recording, tmp_path: Path, capsys: Any):
    """Of trajectories, of other text, of nothing; one sentence says what reads trajectories."""
    spans = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    trajectories = str(tmp_path / "trajectories.jsonl")
    assert main(["rebuild", spans, "-o", trajectories]) == 0
    target = tmp_path / "out"
    for source in (
        trajectories,
        written(tmp_path / "text", "hello\n"),
        written(tmp_path / "empty", ""),
    ):
        capsys.readouterr()
        assert main(["rebuild", source, "-o", str(target)]) == 1
        said = capsys.readouterr().err
        assert said.count(source) == (2 if source is trajectories else 1)
        assert f"nothing to write: no {target} was made" in said
        assert not target.exists()
    capsys.readouterr()
    assert main(["rebuild", trajectories, spans, "-o", str(target)]) == 1
    assert f"`otel-rollout list {trajectories}`" in capsys.readouterr().err
    assert list(JsonlTrajectoryExporter.read(target)) == list(recorded.trajectories)


def test_a_filter_that_nothing_matches_is_said(recorded: Recording, tmp_path: Path, capsys: Any):
    """The file is the empty one that was asked for."""
    spans, target = written(tmp_path / "spans", lines(recorded.spans)), tmp_path / "out"
    assert main(["rebuild", spans, "-o", str(target), "--where", "reward > 9"]) == 0
    assert f"0 of {len(recorded.trajectories)} traject" in capsys.readouterr().err
    assert target.read_bytes() == b""


@pytest.mark.parametrize("verb", [["rebuild"], ["export", "--to", "tokens"]])
def test_a_folder_that_is_not_there_is_named(verb: list[str], tmp_path: Path, capsys: Any):
    """With the option and the file, before anything is read."""
    source = written(tmp_path / "s", "hello\n")
    assert main([*verb, source, "-o", str(tmp_path / "no" / "x.jsonl")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"otel-rollout: -o('{tmp_path}/no/x.jsonl'): the folder '{tmp_path}/no'")
    assert "hello" not in said


def test_one_empty_source_among_others(recorded: Recording, tmp_path: Path, capsys: Any):
    """It is named, and the others are rebuilt."""
    empty = written(tmp_path / "empty.jsonl", "")
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    assert main(["rebuild", empty, source, "-o", str(tmp_path / "out")]) == 1
    assert list(JsonlTrajectoryExporter.read(tmp_path / "out")) == list(recorded.trajectories)
    assert f"{empty}: there is no span in it" in capsys.readouterr().err


def test_trajectories_with_half_a_line_are_shown(recorded: Recording, tmp_path: Path, capsys: Any):
    """What is whole is shown, what is not is said with its line, and the status is 1."""
    path = tmp_path / "t.jsonl"
    JsonlTrajectoryExporter(path).export(recorded.trajectories)
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + whole)
    assert main(["show", str(path)]) == 1
    shown = capsys.readouterr()
    assert f"{path}, line 1: its writer was stopped" in shown.err
    assert all(trajectory.id[:8] in shown.out for trajectory in recorded.trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("verb", [["rebuild"], ["show"], ["rebuild", "-o", "/dev/full"]])
def test_an_output_that_is_full(
    verb: list[str], unbuffered: str, recorded: Recording, tmp_path: Path
):
    """It is said in a sentence, and the status is 1, whenever Python writes what was printed."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*COMMAND, *verb, source],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert run.returncode == 1
    assert "Exception ignored" not in run.stderr
    assert "No space left on device" in run.stderr
    assert "Traceback" not in run.stderr


# --- show


def test_trajectories_are_shown(
    recorded: Recording, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Spans and trajectories look the same, in the width there is, without escapes."""
    monkeypatch.setenv("COLUMNS", "60")
    spans = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    assert main(["rebuild", spans, "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    shown = []
    for source in (spans, str(tmp_path / "out")):
        assert main(["show", source]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "● assistant  You said: first" in shown[0]
    assert "\x1b" not in shown[0]
    assert max(map(len, shown[0].splitlines())) <= 60


def test_one_trajectory_is_shown(recorded: Recording, tmp_path: Path, capsys: Any):
    """By the beginning of its id or of its trace's; one that is not there is said."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    second = recorded.trajectories[1]
    for id_ in (second.id[:12], second.trace_id[:12].upper()):
        assert main(["show", source, "--id", id_]) == 0
        out = capsys.readouterr().out
        assert "second" in out
        assert "first" not in out
    assert main(["show", source, "--id", "zz"]) == 1
    assert "no trajectory whose id begins with 'zz'" in capsys.readouterr().err


def test_whole_texts_are_shown(recording: Recording, clients: Clients, tmp_path: Path, capsys: Any):
    """`--full` cuts nothing and keeps line breaks; what would command a terminal is escaped."""
    text = "a" * 300 + "\nb\x1b[2J\x07\u202e" + "c" * 300
    client = clients.sync(clients.serve(text))
    with rollout("long"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    source = written(tmp_path / "spans.jsonl", lines(recording.spans))
    assert main(["show", source, "--full"]) == 0
    out = capsys.readouterr().out
    assert out.count("a" * 300) == out.count("c" * 300) == 2
    assert r"b\x1b[2J\x07" in out
    assert main(["show", source]) == 0
    assert "a" * 300 not in capsys.readouterr().out


@pytest.mark.slow
def test_colours_on_a_terminal_only(recorded: Recording, tmp_path: Path):
    """A terminal gets colours, unless NO_COLOR is set; a pipe and a file do not."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    assert b"\x1b" not in command("show", source).stdout
    for variables, coloured in (({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False)):
        shown = on_terminal([*COMMAND, "show", source], variables)
        assert (b"\x1b[32m" in shown) is coloured
        assert b"\xe2\x97\x8f assistant" in shown


def on_terminal(arguments: list[str], variables: dict[str, str]) -> bytes:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables}
    environment = {k: v for k, v in environment.items() if k != "NO_COLOR" or k in variables}
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return shown


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(recorded: Recording, tmp_path: Path):
    """`otel-rollout show ... | head -1` ends quietly."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    assert main(["rebuild", source, "-o", str(tmp_path / "out")]) == 0
    many = written(tmp_path / "many", (tmp_path / "out").read_bytes() * 2000)
    with subprocess.Popen(
        [*COMMAND, "show", many],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"first")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.slow
def test_any_locale(recorded: Recording, tmp_path: Path):
    """A terminal of ASCII shows escapes instead of failing."""
    source = written(tmp_path / "spans.jsonl", lines(recorded.spans))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND, "show", source], env=environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert rb"\u25cf assistant" in done.stdout


# --- the command


def test_the_command_is_installed():
    """The project's entry point is the function that is tested here."""
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]\n")[1]
    name, _, target = scripts.splitlines()[0].partition(" = ")
    assert name == "otel-rollout"
    assert EntryPoint(name, target.strip('"'), "console_scripts").load() is main


def test_help_and_version(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """Each command explains itself in 80 columns; the version is that of the distribution."""
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ([], ["rebuild"], ["show"], ["doctor"]):
        with pytest.raises(SystemExit) as raised:
            main([*arguments, "--help"])
        assert raised.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(" ".join(["usage: otel-rollout", *arguments]))
        assert max(map(len, out.splitlines())) <= 80
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.strip() == version("otel-rollout")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["rebuild"], ["show", "a", "--nonsense"]])
def test_a_wrong_command_line(arguments: list[str], capsys: Any):
    """It is an error of its own, and says what there is."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert re.match("usage: otel-rollout", capsys.readouterr().err)


def test_help_imports_no_client_and_no_sdk():
    """`--help` and `--version` answer at once."""
    code = (
        "import sys; from otel_rollout.command import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print([m for m in sys.modules if m in ('openai', 'opentelemetry')])"
    )
    for argument in ("--help", "--version"):
        run = [sys.executable, "-c", code, argument]
        said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == "[]"
