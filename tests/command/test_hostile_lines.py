"""Odd lines at the command line: no verb ends in a traceback, all say which lines they left out.

The good trajectories of the file are shown, and the exit status says that it is not all.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import Reward, Step, Trajectory, TrajectoryGroup, reconstruct
from otel_rollout.command.cli import main
from otel_rollout.export.rows import TokenRows
from otel_rollout.spans import as_record
from otel_rollout.wire import Json
from tests.kit.fuzzing import damage_bytes, damage_cells, mutated_line
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, play

pytestmark = pytest.mark.not_replayed("lines are changed on purpose")


@pytest.fixture
def recorded(recording: Recording, clients: Clients) -> list[Json]:
    """Rollouts of every kind, as the JSON of their lines."""
    play(*(name for name in SCENARIOS if name != "long"))
    found = list(reconstruct(map(as_record, recording.spans)))
    scored = Reward(0.5, name="a", label="pass")
    by_hand = Trajectory(name="by hand", rewards={("a", None, 0): scored})
    steps = [Step([{"role": "user", "content": "x"}], action={"a": 1}, reward=0.5, done=True)]
    built = Trajectory(steps=steps, name="built", metadata={"m": [1, {"b": None}]})
    return [each.to_dict() for each in (*found, by_hand, built)]


def verbs(source: str, folder: Path) -> dict[str, list[str]]:
    """The command lines that read a file of trajectories."""
    rows, page = str(folder / "rows.jsonl"), str(folder / "page.html")
    return {
        "list": ["list", source],
        "list --json": ["list", source, "--json"],
        "list --where": ["list", source, "--where", "turns >= 0", "--sort=-reward"],
        "show": ["show", source],
        "show --full": ["show", source, "--full", "--sort=seconds", "--where", "seconds != 0.5"],
        "check": ["check", source],
        "check --json": ["check", source, "--json"],
        "drift": ["drift", source],
        "drift --json": ["drift", source, "--json"],
        "export": ["export", source, "--to", "tokens", "-o", rows, "--restart", "--force"],
        "view --html": ["view", source, "--html", page, "--no-cache", "--force"],
    }


VERBS = verbs("", Path())


def good_ones(recorded: list[Json], draw: random.Random, count: int = 3) -> dict[str, bytes]:
    """Lines of some of the rollouts, by ids of their own."""
    chosen = draw.sample(recorded, count)
    return {
        f"good-{n}": json.dumps({**e, "id": f"good-{n}"}).encode() for n, e in enumerate(chosen)
    }


def look(source: Path, name: str, ids: set[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a verb: it does not raise, and what it prints or writes has the good ones; its status."""
    page = source.parent / "page.html"
    status = main(verbs(str(source), source.parent)[name])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if name in ("list --json", "check --json"):
        found = {json.loads(line).get("id") for line in out.strip().split("\n")}
        assert ids <= found
    elif name == "drift --json":
        assert ids <= {each["id"] for each in json.loads(out)["trajectories"]}
    elif name in ("show", "view --html"):
        text = page.read_text() if name == "view --html" else out
        assert [id_ for id_ in ids if id_ not in text] == []
    assert status in ((0, 1, 2) if name.startswith("check") else (0, 1))
    return status


def fuzz(
    recorded: list[Json],
    folder: Path,
    seed: int,
    files: int,
    capsys: pytest.CaptureFixture[str],
    lines: int = 60,
) -> None:
    """Files of so many changed lines and some good ones between them, through every verb."""
    draw = random.Random(seed)
    source = folder / "odd.jsonl"
    for number in range(files):
        good = good_ones(recorded, draw)
        odd = [mutated_line(draw.choice(recorded), draw) for _ in range(lines)]
        every = [*odd, *good.values()]
        draw.shuffle(every)
        source.write_bytes(b"\n".join([b'{"schema_version":', *every]) + b"\n")
        for name in VERBS:
            try:
                look(source, name, set(good), capsys)
            except Exception as error:
                kept = folder / "failed.jsonl"
                source.rename(kept)
                raise AssertionError(f"seed {seed}, file {number}, {name}: {kept}") from error


def test_odd_lines(recorded: list[Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Changed in any place, they are read or left out."""
    fuzz(recorded, tmp_path, 1, 2, capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(200, 210))
def test_many_odd_lines(
    recorded: list[Json], tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
):
    """The same for long: `make fuzz`."""
    fuzz(recorded, tmp_path, seed, 100, capsys)


def text_for_a_number(data: Json) -> None:
    data["exchanges"][0]["started"] = "1"


def path_in_a_list(data: Json) -> None:
    data["exchanges"][0]["path"] = ["x"]


def text_for_a_time(data: Json) -> None:
    data["start_time_ns"] = "x"


def no_row_of_messages(data: Json) -> None:
    data["exchanges"][0]["prompt"] = 99


def last_row_of_messages(data: Json) -> None:
    data["exchanges"][0]["prompt"] = -1


def name_of_a_reward(data: Json) -> None:
    data["rewards"] = [{"value": 1.0, "name": 5}]


def label_of_a_reward(data: Json) -> None:
    data["rewards"] = [{"value": 1.0, "label": [5]}]


def value_of_a_reward(data: Json) -> None:
    data["rewards"] = [{"value": 10**400}]


ODD: dict[Callable[[Json], None], str] = {
    text_for_a_number: r"Expected `int`, got `str` - at `$.exchanges[0].started`",
    path_in_a_list: r"Expected `str`, got `array` - at `$.exchanges[0].path`",
    text_for_a_time: r"Expected `int`, got `str` - at `$.start_time_ns`",
    no_row_of_messages: "a row is named that is not there",
    last_row_of_messages: r"Expected `int` >= 0 - at `$.exchanges[0].prompt`",
    name_of_a_reward: "expected name as str | None, got 5",
    label_of_a_reward: "expected label as str | None, got [5]",
    value_of_a_reward: "expected a finite number",
}


@pytest.fixture
def few(recording: Recording, clients: Clients) -> list[Json]:
    """Three rollouts as the JSON of their lines."""
    play("plain", "streamed", "annotated")
    return [each.to_dict() for each in reconstruct(map(as_record, recording.spans))]


def written(source: Path, few: list[Json], odd: Json) -> set[str]:
    """Write the odd line between three good ones, whose ids are returned."""
    good = {f"good-{n}": json.dumps({**each, "id": f"good-{n}"}) for n, each in enumerate(few)}
    first, *others = good.values()
    source.write_text("\n".join([first, json.dumps({**odd, "id": "odd"}), *others]) + "\n")
    return set(good)


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_an_odd_line_is_one_odd_line(
    few: list[Json],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Json], None],
):
    """Each verb says the line, the field, what is there and what was expected, and goes on."""
    source, odd = tmp_path / "some.jsonl", json.loads(json.dumps(few[0]))
    change(odd)
    good = written(source, few, odd)
    for name in VERBS:
        assert look(source, name, good, capsys) == (2 if name.startswith("check") else 1)
        main(verbs(str(source), tmp_path)[name])
        out, err = capsys.readouterr()
        assert f"{source}, line 2: " in err
        assert "'odd' is damaged: " in err
        assert ODD[change] in err
        assert "odd" not in out


def test_a_line_that_is_read_and_damaged_all_the_same(
    few: list[Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What is found out when a value is used is said as well as what reading finds."""
    source = tmp_path / "some.jsonl"
    good = written(source, few, {**few[0], "start_time_ns": 1, "end_time_ns": 10**400})
    for name in VERBS:
        status = look(source, name, good, capsys)
        main(verbs(str(source), tmp_path)[name])
        said = "line 2: damaged (OverflowError" in capsys.readouterr().err
        uses_times = name not in ("drift", "drift --json", "export")
        assert said == uses_times
        assert status == (0 if not uses_times else 2 if name.startswith("check") else 1)


def test_what_an_exporter_stumbles_over_is_left_out(
    few: list[Json],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The others of its group are exported; what it stumbles over in any group is its own fault."""
    source, target = tmp_path / "some.jsonl", tmp_path / "rows.jsonl"
    grouped = [{**each, "group_id": "g"} for each in few]
    good = written(source, grouped, {**few[0], "group_id": "g"})
    rows, stumbles = TokenRows.rows, [True]

    def stumbling(exporter: TokenRows, group: TrajectoryGroup) -> Any:
        if "odd" in [each.id for each in group] and (stumbles[0] or len(group) > 1):
            raise TypeError("a text for a number")
        return rows(exporter, group)

    monkeypatch.setattr(TokenRows, "rows", stumbling)
    export = ["export", str(source), "--to", "tokens", "-o", str(target), "--restart", "--force"]
    assert main(export) == 1
    assert "'odd': damaged (TypeError('a text for a number'))" in capsys.readouterr().err
    ids = {json.loads(line)["trajectory_id"] for line in target.read_text().splitlines()}
    assert {"good-0", "good-1"} <= ids <= good
    with pytest.raises(TypeError):
        main([*export, "--strict"])
    stumbles[0] = False
    with pytest.raises(TypeError):
        main(export)


@pytest.fixture
def interrupted(
    few: list[Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Path]:
    """The command line of an export that was interrupted, and a copy of what it left."""
    source, target = tmp_path / "some.jsonl", tmp_path / "rows.jsonl"
    written(source, few, few[0])
    export = ["export", str(source), "--to", "tokens", "-o", str(target), "--force"]
    groups: list[str | None] = []

    def stopping(exporter: TokenRows, group: TrajectoryGroup) -> Any:
        groups.append(group.id)
        if len(groups) == 3:
            raise KeyboardInterrupt
        return rows(exporter, group)

    rows = TokenRows.rows
    with monkeypatch.context() as patch:
        patch.setattr(TokenRows, "rows", stopping)
        assert main(export) == 130
    left = tmp_path / "left"
    shutil.copytree(f"{target}.groups", left / "rows.jsonl.groups")
    shutil.copy(f"{target}.part", left)
    return export, left


def go_on(export: list[str], left: Path, seed: int, count: int, said: Any) -> None:
    """Go on with the export after its files were damaged, in so many ways."""
    draw = random.Random(seed)
    for number in range(count):
        for each in left.parent.glob("rows.jsonl.groups/*"):
            each.unlink()
        shutil.copytree(left, left.parent, dirs_exist_ok=True)
        store = left.parent / "rows.jsonl.groups" / "trajectories"
        damage = draw.choice((damage_bytes, damage_cells))
        damage(store, draw)
        try:
            assert main(export) in (0, 1)
        except Exception as error:
            raise AssertionError(f"seed {seed}, export {number}") from error
        assert "Traceback" not in said.readouterr().err


def test_an_export_whose_files_were_damaged(
    interrupted: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
):
    """It goes on, or ends with a sentence."""
    go_on(*interrupted, 1, 40, capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(400, 405))
def test_many_exports_whose_files_were_damaged(
    interrupted: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], seed: int
):
    """The same for long: `make fuzz`."""
    go_on(*interrupted, seed, 500, capsys)
