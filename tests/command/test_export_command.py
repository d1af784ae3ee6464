"""`otel-rollout export`: every group once, whole, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, TrajectoryGroup, rollout
from otel_rollout.command.cli import main
from otel_rollout.export import JsonRows, Tally, item_of, rows_of
from otel_rollout.testing import Raw
from otel_rollout.wire import finite
from tests.command.exports import (
    ROOT,
    by_place,
    expected,
    export,
    plugin,
    rows_in,
    spans_of,
    trajectories_of,
)
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line


def test_spans_and_trajectories_are_sources(recorded: Recording, tmp_path: Path, capsys: Any):
    """Either gives the rows that the groups have in Python, in order of the first of each."""
    spans = spans_of(recorded, tmp_path / "spans.jsonl")
    whole = trajectories_of(recorded.trajectories, tmp_path / "trajectories.jsonl")
    for source in (spans, whole):
        assert export(source, "-o", str(tmp_path / "rows"), "--force") == 0
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


def test_a_group_is_one_wherever_it_stands(recorded: Recording, tmp_path: Path, capsys: Any):
    """Its trajectories come from several sources, in any order, some twice."""
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


class Number(float):
    """As those of NumPy are."""


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.floats().map(Number)
    | st.text()
    | st.text(st.sampled_from('a\ud800"')),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_row_is_written_as_it_is(value: Any):
    """Whatever text or number is in it; NaN and infinities are null, tuples are lists."""

    class Anything(JsonRows):
        def rows(self, group: TrajectoryGroup) -> list[Any]:
            return [{"value": value}]

    _, item = item_of(Trajectory(id="t", name="x"))
    (line,) = rows_of([item], Anything(), Tally(), print, strict=True)
    assert line.endswith(b"\n")
    assert json.loads(line, parse_constant=not_strict) == finite({"value": value})


def not_strict(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


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
    assert "3 completions in no row:\n       3 x the server sends token ids to" in said
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
    assert "3 places could not be read and were left out" in said


def test_spans_of_others_alone(recorded: Recording, tmp_path: Path, capsys: Any):
    """Traces of other instrumentations are read where that is asked for; else there is a hint."""
    source = tmp_path / "spans"
    foreign = [span for span in recorded.spans if span.name == "chat m"]
    source.write_text("".join(to_json_line([span]) for span in foreign))
    assert export(str(source), "-o", str(tmp_path / "rows")) == 1
    assert "try --infer-rollouts" in capsys.readouterr().err
    assert export(str(source), "-o", str(tmp_path / "rows"), "--infer-rollouts") == 1
    said = capsys.readouterr().err
    assert "7 groups, 7 trajectories -> no rows, no file" in said
    assert "7 completions in no row" in said


def test_token_sequences_are_made_once(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For the rows and for what is in none of them."""
    made, of_trajectory = list[str](), Trajectory.token_sequences

    def counted(trajectory: Trajectory, **options: Any) -> Any:
        made.append(trajectory.id)
        return of_trajectory(trajectory, **options)

    monkeypatch.setattr(Trajectory, "token_sequences", counted)
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert export(source, "-o", str(tmp_path / "rows")) == 0
    assert sorted(made) == sorted(trajectory.id for trajectory in recorded.trajectories)


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
    assert "  7 completions in no row:\n       7 x only … came" in said


# --- what a format cannot carry


REFUSING = """
from otel_rollout import ExportError
from otel_rollout.export import JsonRows

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
    cause = "trajectory …: it has an image; leave it out (such as "
    _, _, example = said.partition(f"2 trajectories refused:\n       2 x {cause}")
    assert example.partition(")")[0] in {trajectory.id for trajectory in bad}
    assert said.count("it has an image") == 1


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
    assert "\n    --option credit=broadcast: 'broadcast', 'split' or 'last'\n" in out
    assert "\n    --option max_length=none: a whole number from 1 on or none\n" in out
    assert out.count("--option include_side_calls=false: ") == 5
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
import otel_rollout.command.export, otel_rollout.command.rebuild
from otel_rollout.command import main

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 24_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main())
"""


@pytest.mark.slow
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
