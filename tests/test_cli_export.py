"""`otel-rollout export`: every group once, whole, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    JsonlTrajectoryExporter,
    Trajectory,
    TrajectoryGroup,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.command.cli import main
from otel_rollout.export import TokenRows
from otel_rollout.export import partitions as partitions_module
from otel_rollout.otlp.writing import to_json_line
from otel_rollout.testing import Raw
from tests.conftest import Clients, Recording

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from otel_rollout.cli import main; sys.exit(main())"]


@pytest.fixture
def recorded(recording: Recording, clients: Clients) -> Recording:
    """Three groups of two, a rollout of no group, and one that failed in the second group."""
    client = clients.sync(clients.serve())
    for turn in range(2):
        for group in ("g0", "g1", "g2"):
            with rollout("agent", group_id=group, sample_index=turn):
                message: Any = {"role": "user", "content": f"{group} {turn}"}
                client.chat.completions.create(model="m", messages=[message])
                record_reward(turn)
    with rollout("alone"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(ValueError), rollout("agent", group_id="g1", sample_index=2):
        raise ValueError("no")
    return recording


def spans_of(recorded: Recording, path: Path) -> str:
    path.write_text("".join(to_json_line([span]) for span in recorded.spans))
    return str(path)


def trajectories_of(trajectories: Any, path: Path) -> str:
    exporter = JsonlTrajectoryExporter(path)
    exporter.export(trajectories)
    exporter.shutdown()
    return str(path)


def expected(trajectories: Any) -> list[Any]:
    """What `to_token_rows` gives for the groups, in JSON."""
    rows = [row for group in TrajectoryGroup.by_id(trajectories) for row in to_token_rows(group)]
    return list(json.loads(json.dumps(rows)))


def rows_in(path: Path) -> list[Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text().splitlines()
    return [json.loads(line, parse_constant=no_constants) for line in text]


def export(*arguments: str) -> int:
    return main(["export", "--to", "tokens", *arguments])


def by_place(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row["trajectory_id"], row["row"]))


def test_spans_and_trajectories_are_sources(recorded: Recording, tmp_path: Path, capsys: Any):
    """Either gives the rows that the groups have in Python, in order of the first of each."""
    spans = spans_of(recorded, tmp_path / "spans.jsonl")
    whole = trajectories_of(recorded.trajectories, tmp_path / "trajectories.jsonl")
    for source in (spans, whole):
        assert export(source, "-o", str(tmp_path / "rows")) == 0
        rows = rows_in(tmp_path / "rows")
        assert by_place(rows) == by_place(expected(recorded.trajectories))
        assert rows[0]["advantage"] == -0.5
        assert capsys.readouterr().err.splitlines() == [
            f"4 groups, 8 trajectories -> 7 rows in {tmp_path / 'rows'}",
            "  1 failed without a reward",
        ]
    assert rows == expected(recorded.trajectories)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows",
        "spans.jsonl",
        "trajectories.jsonl",
    ]


def test_a_group_is_one_wherever_it_stands(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Its trajectories come from several sources, in any order, some twice, in many files."""
    monkeypatch.setattr(partitions_module, "PART", 2000)
    monkeypatch.setattr(partitions_module, "_BUFFER", 100)
    shuffled = list(recorded.trajectories)
    random.Random(5).shuffle(shuffled)
    one = trajectories_of(shuffled[:4], tmp_path / "one")
    two = trajectories_of(shuffled[3:], tmp_path / "two")
    spans = list(recorded.spans)
    random.Random(6).shuffle(spans)
    three = tmp_path / "three"
    three.write_text("".join(to_json_line([span]) for span in spans))
    assert export(one, str(three), two, "-o", str(tmp_path / "rows")) == 0
    assert by_place(rows_in(tmp_path / "rows")) == by_place(expected(recorded.trajectories))
    assert "4 groups, 8 trajectories" in (said := capsys.readouterr().err)
    assert "9 came again; the last of each counts" in said


def test_options_reach_the_exporter(recorded: Recording, tmp_path: Path):
    """They are texts; the last of the same name counts."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    options = [f"--option={text}" for text in ("credit=split", "max_length=5", "max_length=11")]
    assert export(source, "-o", str(tmp_path / "rows"), *options) == 0
    assert {len(row["input_ids"]) for row in rows_in(tmp_path / "rows")} == {11}


def test_what_is_not_known_is_null(recording: Recording, clients: Clients, tmp_path: Path):
    """JSON has no NaN."""
    client = clients.sync(clients.serve(logprobs=False))
    with rollout("x"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    source = spans_of(recording, tmp_path / "spans")
    assert export(source, "-o", str(tmp_path / "rows")) == 0
    (row,) = rows_in(tmp_path / "rows")
    known = [value for value, mask in zip(row["logprobs"], row["sampled"], strict=True) if mask]
    assert set(known) == {None}


def test_what_trains_in_no_row_is_counted(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: Any
):
    """Completions are counted by why they are in no row; without any row there is no file."""
    client = clients.sync(clients.serve(token_ids=False))
    for _ in range(3):
        with rollout("x"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    source = spans_of(recording, tmp_path / "spans")
    assert export(source, "-o", str(tmp_path / "rows")) == 1
    said = capsys.readouterr().err
    assert "3 groups, 3 trajectories -> no rows, no file" in said
    assert "3 completions in no row:\n       3 x the server sent no token ids" in said
    assert [path.name for path in tmp_path.iterdir()] == ["spans"]


def test_damaged_lines_are_reported(recorded: Recording, tmp_path: Path, capsys: Any):
    """Each with its place, and the others are exported; a cut last line is no error."""
    source = Path(trajectories_of(recorded.trajectories, tmp_path / "t"))
    lines = source.read_bytes().splitlines(True)
    broken = lines[0].replace(b'"exchanges":', b'"exchange":')
    lines[2:2] = [b"what is this\n", broken.replace(b"g0", b"g9"), b'{"schema_version":1}\n']
    source.write_bytes(b"".join(lines) + lines[-1][:40])
    assert export(str(source), "-o", str(tmp_path / "rows")) == 1
    assert by_place(rows_in(tmp_path / "rows")) == by_place(expected(recorded.trajectories))
    said = capsys.readouterr().err
    for number in (3, 4, 5):
        assert f"{source}, line {number}: " in said
    assert "3 places could not be read and was left out" in said


def test_spans_of_others_alone(recorded: Recording, tmp_path: Path, capsys: Any):
    """Traces of other instrumentations are read where that is asked for; else there is a hint."""
    source = tmp_path / "spans"
    foreign = [span for span in recorded.spans if span.name == "openai.chat"]
    source.write_text("".join(to_json_line([span]) for span in foreign))
    assert export(str(source), "-o", str(tmp_path / "rows")) == 1
    assert "try --infer-rollouts" in capsys.readouterr().err
    assert export(str(source), "-o", str(tmp_path / "rows"), "--infer-rollouts") == 1
    said = capsys.readouterr().err
    assert "7 groups, 7 trajectories -> no rows, no file" in said
    assert "7 completions in no row" in said


REPORTING = """
from otel_rollout.export import Dropped, JsonRows

class OtherRows(JsonRows):
    def rows(self, group):
        return [{"id": trajectory.id} for trajectory in group]

    def dropped(self, group):
        return [Dropped(c, f"only {len(group)} came") for t in group for c in t.completions]
"""


def test_an_exporter_says_what_it_drops(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """The optional method `dropped` is asked once for each group."""
    monkeypatch.syspath_prepend(str(plugin(tmp_path / "site", REPORTING)))
    monkeypatch.delitem(sys.modules, "other_rows", raising=False)
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert main(["export", "--to", "other", source, "-o", str(tmp_path / "rows")]) == 0
    said = capsys.readouterr().err
    assert "  7 completions in no row:\n       7 x only N came" in said


# --- interruptions


class Stopped:
    """An exporter that is interrupted before its `at`th group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.groups: list[str | None] = []
        rows = TokenRows.rows

        def stopping(exporter: TokenRows, group: TrajectoryGroup) -> Any:
            if len(self.groups) == at:
                raise KeyboardInterrupt
            self.groups.append(group.id)
            return rows(exporter, group)

        monkeypatch.setattr(TokenRows, "rows", stopping)


def cut_journal(rows: Path) -> None:
    journal = rows.with_name("rows.journal")
    journal.write_bytes(journal.read_bytes()[:-7])


def half_a_row(rows: Path) -> None:
    with open(rows.with_name("rows.part"), "ab") as file:
        file.write(b'{"input_ids":[1,2')


def lost_rows(rows: Path) -> None:
    part = rows.with_name("rows.part")
    os.truncate(part, part.stat().st_size - 10)


def both(rows: Path) -> None:
    cut_journal(rows)
    half_a_row(rows)


def nothing(rows: Path) -> None:
    pass


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("damage", [nothing, cut_journal, half_a_row, lost_rows, both])
def test_an_interrupted_export_goes_on(
    recorded: Recording,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    at: int,
    damage: Callable[[Path], None],
):
    """The file is that of an export that was not interrupted; what is whole is not done again."""
    if at == 0 and damage is lost_rows:
        pytest.skip("there are no rows yet")
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    with monkeypatch.context() as context:
        Stopped(context, at)
        assert export(source, "-o", str(rows)) == 130
    assert not rows.exists()
    assert "the same command goes on from here" in capsys.readouterr().err
    damage(rows)
    with monkeypatch.context() as context:
        second = Stopped(context, 99)
        assert export(source, "-o", str(rows)) == 0
    assert rows_in(rows) == expected(recorded.trajectories)
    done = at if damage in (nothing, half_a_row) else max(0, at - 1)
    assert len(second.groups) == 4 - done
    assert "4 groups, 8 trajectories -> 7 rows" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_an_export_that_was_killed_while_it_read_begins_anew(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Half of the trajectories, brought together, are no beginning."""
    source = spans_of(recorded, tmp_path / "spans")
    rows = tmp_path / "rows"
    add, seen = partitions_module.Partitions.add, list[str]()

    def stopping(partitions: Any, key: str, item: bytes) -> None:
        add(partitions, key, item)
        seen.append(key)
        if key.startswith("group"):
            partitions.flush()
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(partitions_module.Partitions, "add", stopping)
        assert export(source, "-o", str(rows)) == 130
    assert (tmp_path / "rows.groups").exists()
    assert export(source, "-o", str(rows)) == 0
    assert by_place(rows_in(rows)) == by_place(expected(recorded.trajectories))
    assert "going on" not in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "spans"]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.02)


def plugin(folder: Path, source: str) -> Path:
    """A folder with an installed distribution: an exporter `other` that this source defines."""
    information = folder / "other-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entry = "[otel_rollout_exporter]\nother = other_rows:OtherRows\n"
    (information / "entry_points.txt").write_text(entry)
    (folder / "other_rows.py").write_text(source)
    return folder


HANGING = """
import os, time
from otel_rollout.rows import TokenRows
from otel_rollout.testing import Raw

class OtherRows(TokenRows):
    def rows(self, group):
        with open(os.environ["GROUPS"], "a") as file:
            file.write(f"{group.id}\\n")
        yield from super().rows(group)
        if group.id == os.environ.get("HANG", ""):
            while True:
                time.sleep(1)
"""


def test_an_export_that_was_killed_goes_on(recorded: Recording, tmp_path: Path):
    """Kill -9 in the middle of a group: no half row, no row twice, no group done again."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    path = os.pathsep.join([str(plugin(tmp_path / "site", HANGING)), str(ROOT)])
    groups, rows = tmp_path / "groups", tmp_path / "rows"
    environment = {**os.environ, "PYTHONPATH": path, "GROUPS": str(groups)}
    command = [*COMMAND, "export", "--to", "other", source, "-o", str(rows)]
    process = subprocess.Popen(command, env={**environment, "HANG": "g2"})
    wait_for(lambda: groups.exists() and groups.read_text().endswith("g2\n"))
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert not rows.exists()
    again = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    assert b"going on with rows: 2 groups are done" in again.stderr
    assert groups.read_text().split() == ["g0", "g1", "g2", "g2", "None"]
    assert rows_in(rows) == expected(recorded.trajectories)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_export_that_was_killed_at_its_end(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
):
    """Before or after its rows became the file: both end with the file, and nothing beside it."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    finish = TokenRows.finish

    def stopped(exporter: TokenRows, part: Path, output: Path) -> None:
        if is_renamed:
            finish(exporter, part, output)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(TokenRows, "finish", stopped)
        assert export(source, "-o", str(rows)) == 130
    with monkeypatch.context() as context:
        second = Stopped(context, 99)
        assert export(source, "-o", str(rows)) == 0
    assert second.groups == []
    assert rows_in(rows) == expected(recorded.trajectories)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_another_export_is_refused(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """What was begun with other options or sources is not mixed with this; it may begin anew."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    with monkeypatch.context() as context:
        Stopped(context, 2)
        assert export(source, "-o", str(rows)) == 130
    capsys.readouterr()
    assert export(source, "-o", str(rows), "--option", "credit=last") == 1
    said = capsys.readouterr().err
    assert "options was {} and is {'credit': 'last'}" in said
    assert "--restart" in said
    trajectories_of(recorded.trajectories[:1], tmp_path / "t")
    assert export(source, "-o", str(rows)) == 1
    assert "sources was" in capsys.readouterr().err
    with monkeypatch.context() as context:
        again = Stopped(context, 99)
        assert export(source, "-o", str(rows), "--option", "credit=last", "--restart") == 0
    assert len(again.groups) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_two_exports_of_one_file(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """While one writes another is refused, with `--restart` too, and does not harm the first."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    statuses: list[int] = []
    inner = TokenRows.rows

    def meanwhile(exporter: TokenRows, group: TrajectoryGroup) -> Any:
        if not statuses:
            statuses.append(export(source, "-o", str(rows)))
            statuses.append(export(source, "-o", str(rows), "--restart"))
        return inner(exporter, group)

    monkeypatch.setattr(TokenRows, "rows", meanwhile)
    assert export(source, "-o", str(rows)) == 0
    assert statuses == [1, 1]
    assert "another process is writing rows" in capsys.readouterr().err
    assert rows_in(rows) == expected(recorded.trajectories)


def test_a_bar_on_a_terminal_only(recorded: Recording, tmp_path: Path):
    """How far it is, where somebody looks; nothing of it elsewhere."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    command = [*COMMAND, "export", "--to", "tokens", source, "-o"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run([*command, str(tmp_path / "1")], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # all has been read
        pass
    os.close(ours)
    assert b"| 0/8 [" in shown
    assert b"4 groups, 8 trajectories" in shown
    quiet = subprocess.run(
        [*command, str(tmp_path / "2")], env=environment, capture_output=True, check=True
    )
    assert len(quiet.stderr.splitlines()) == 2


# --- what a format cannot carry


REFUSING = """
from otel_rollout import ExportError
from otel_rollout.rows import JsonRows

class OtherRows(JsonRows):
    \"\"\"Rows of names.\"\"\"

    def __init__(self, least: str = "0"):
        self.least = int(least)

    def rows(self, group):
        if len(group) < self.least:
            raise ExportError(f"group {group.id!r}: expected {self.least}, got {len(group)}")
        for trajectory in group:
            yield {"id": trajectory.id, "of": len(group)}
            if trajectory.sample_index == 1 and trajectory.group_id != "g2":
                raise ExportError(f"trajectory {trajectory.id}: it has an image; leave it out")
"""


def other(*arguments: str) -> int:
    return main(["export", "--to", "other", *arguments])


@pytest.fixture
def refusing(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(plugin(folder, REFUSING)))
    monkeypatch.delitem(sys.modules, "other_rows", raising=False)


@pytest.mark.usefixtures("refusing")
def test_what_cannot_be_carried_is_counted(recorded: Recording, tmp_path: Path, capsys: Any):
    """A trajectory that the format cannot carry is said and left out, with no row of it."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert other(source, "-o", str(tmp_path / "rows")) == 0
    bad = [t for t in recorded.trajectories if t.sample_index == 1 and t.group_id != "g2"]
    rows = rows_in(tmp_path / "rows")
    scored = [t for t in recorded.trajectories if t.status == "complete" and t not in bad]
    assert {row["id"] for row in rows} == {t.id for t in scored}
    assert sorted(row["of"] for row in rows) == [1, 1, 1, 2, 2]
    said = capsys.readouterr().err
    for trajectory in bad:
        assert f"trajectory {trajectory.id}: it has an image; leave it out\n" in said
    assert "2 trajectories refused:\n       2 x trajectory ...: it has an image" in said


@pytest.mark.usefixtures("refusing")
def test_a_group_that_cannot_be_carried(recorded: Recording, tmp_path: Path, capsys: Any):
    """Where the reason is the group, it is refused as a whole."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert other(source, "-o", str(tmp_path / "rows"), "--option", "least=2") == 0
    assert [row["of"] for row in rows_in(tmp_path / "rows")] == [2, 2]
    assert "6 trajectories refused:" in capsys.readouterr().err


@pytest.mark.usefixtures("refusing")
def test_strictly(recorded: Recording, tmp_path: Path, capsys: Any):
    """`--strict` ends with the first trajectory that cannot be carried, and names it."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert other(source, "-o", str(tmp_path / "rows"), "--strict") == 1
    assert f"trajectory {recorded.trajectories[3].id}: it has an image" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


@pytest.mark.usefixtures("refusing")
def test_exporters_are_listed(capsys: Any, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch):
    """Each with its package and what it says of itself; one that is broken does not hide others."""
    assert main(["export", "--list"]) == 0
    out = capsys.readouterr().out
    assert "other          other 1.0: Rows of names.\n" in out
    assert "\ntokens         otel-rollout " in out
    folder = plugin(tmp_path_factory.mktemp("site"), "import nothing_like_it")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "other_rows", raising=False)
    assert main(["export", "--list"]) == 0
    out = capsys.readouterr().out
    assert "cannot be loaded: ModuleNotFoundError" in out
    assert "\ntokens " in out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["t"], 2, "required: --to, -o/--output"),
        (["--to", "tokens", "-o", "rows"], 2, "required: SOURCE"),
        (["--to", "tokens", "t", "-o", "-"], 2, "-o: expected a file"),
        (["--to", "tokens", "t", "-o", "rows", "--option", "x"], 2, "expected KEY=VALUE"),
        (["--to", "nobody", "t", "-o", "rows"], 1, "there is no exporter 'nobody': installed"),
        (["--to", "tokens", "t", "-o", "rows", "--option", "max_length=x"], 1, "'tokens'"),
        (["--to", "tokens", "t", "-o", "rows", "--option", "on_failure=x"], 1, "'keep'"),
        (["--to", "tokens", "t", "-o", "rows", "--option", "mask_truncated=x"], 1, "'true'"),
        (["--to", "tokens", "t", "-o", "rows", "--option", "unheard=x"], 1, "unheard"),
        (["--to", "tokens", "typo", "-o", "rows"], 1, "typo: No such file"),
    ],
)
def test_a_wrong_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    arguments: list[str],
    status: int,
    said: str,
):
    """What is wrong is said before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    Path("t").touch()
    try:
        found = main(["export", *arguments])
    except SystemExit as error:
        found = error.code if isinstance(error.code, int) else -1
    assert (found, said in capsys.readouterr().err) == (status, True)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


# --- memory


LIMITED = """
import resource, sys
from otel_rollout.cli import main

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 24_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is used of memory is read from /proc")
@pytest.mark.parametrize("kind", ["trajectories", "spans", "rebuild"])
def test_memory_is_that_of_one_group(
    recording: Recording, clients: Clients, tmp_path: Path, kind: str
):
    """50 MB of groups of 0.5 MB are exported, and rebuilt, with less than half of that."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "token_ids": [4, 5]}
    reply = {"id": "c", "model": "m", "choices": [choice], "prompt_token_ids": [1, 2, 3]}
    client = clients.sync(clients.serve(Raw(body=json.dumps(reply).encode())))
    with rollout("agent", group_id="group-000000"):
        message: Any = {"role": "user", "content": "x" * 250_000}
        client.chat.completions.create(model="m", messages=[message])
    source = tmp_path / "source"
    if kind == "trajectories":
        text = Path(trajectories_of(recording.trajectories, tmp_path / "one")).read_text()
    else:
        kept = [span for span in recording.spans if not span.name.startswith("openai")]
        text = "".join(to_json_line([span]) for span in kept)
    trajectory: Trajectory = recording.trajectory
    with open(source, "w") as file:
        for number in range(200):
            file.write(
                text.replace(trajectory.id, f"{number:032x}").replace(
                    "group-000000", f"group-{number % 100:06}"
                )
            )
    assert source.stat().st_size > 50_000_000
    arguments = ["export", "--to", "tokens"] if kind != "rebuild" else ["rebuild"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments, str(source), "-o", str(tmp_path / "rows")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    with open(tmp_path / "rows", "rb") as file:
        assert sum(1 for _ in file) == 200
