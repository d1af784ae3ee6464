"""The verb `check`: samples that are missing from groups, and numbers that were expected."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    ExportError,
    PartialGroupWarning,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    rollout,
    to_token_rows,
)
from otel_rollout.command.cli import main
from otel_rollout.export import Groups, Sample
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

Output = pytest.CaptureFixture[str]


def member(group: str | None, index: int | None, *, of: int | None = None, **more: Any) -> Any:
    """A trajectory of a group."""
    return Trajectory(
        id=f"{group}-{index}-{more.pop('id', '')}",
        group_id=group,
        sample_index=index,
        group_size=of,
        **more,
    )


def found(members: Iterable[Trajectory], expected: int | None = None) -> list[str]:
    """What is said of their groups."""
    groups = Groups(expected)
    for each in members:
        groups.add(Sample.of(each))
        groups.ask_for(each.group_id)
    return [str(each) for each in groups.not_whole()]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member("g", n, of=4) for n in range(4)], []),
        ([member("g", n) for n in (0, 1, 3)], ["group 'g' has 3 samples: sample 2 missing"]),
        ([member("g", n) for n in (1, 2)], ["group 'g' has 2 samples: sample 0 missing"]),
        (
            [member("g", n, of=8) for n in range(7)],
            ["group 'g' has 7 of 8 samples: sample 7 missing"],
        ),
        (
            [member("g", n, of=14) for n in (3, 5)],
            [
                "group 'g' has 2 of 14 samples: "
                "sample 0, 1, 2, 4, 6, 7, 8, 9, 10, 11 and 2 more missing"
            ],
        ),
        ([member("g", None, of=3, id=n) for n in range(2)], ["group 'g' has 2 of 3 samples"]),
        ([member("g", None, id=n) for n in range(2)], []),
        # What was rebuilt without the rollout's span has no number: it may be the one that is open.
        ([member("g", 0, of=3), member("g", 2, of=3), member("g", None, of=3)], []),
        # Several agents have a trajectory each of every sample.
        ([member("g", n, of=2, id=name, name=name) for n in range(2) for name in "ab"], []),
        (
            [member("g", 0, of=2, id=name, name=name) for name in "abc"],
            ["group 'g' has 1 of 2 samples: sample 1 missing"],
        ),
        # Two runs of one group, such as two epochs.
        (
            [member("g", n, of=2, id=epoch) for epoch in range(2) for n in range(2)],
            ["group 'g' has 4 samples, but 2 were expected: sample 0, 1 there more than once"],
        ),
        (
            [member("g", n, id=epoch) for epoch in range(2) for n in range(2)],
            ["group 'g' has 4 samples: sample 0, 1 there more than once"],
        ),
        (
            [member("g", None, of=2, id=number) for number in range(3)],
            ["group 'g' has 3 samples, but 2 were expected"],
        ),
        # What failed was run again.
        ([member("g", n, of=2, id=n) for n in (0, 1)] + [member("g", 1, of=2, status="error")], []),
        # Four processes that number their two samples alike.
        ([member("g", n, of=8, id=host) for n in range(2) for host in range(4)], []),
        # A role of a workflow plays in some of its samples only.
        ([member("g:judge", n, parent_id="p") for n in (1, 5)], []),
        ([member("g", 1 << 70), member("g", -3)], []),
        ([member(None, 3)], []),
        # A damaged size, which no memory would hold the numbers of.
        (
            [member("g", 0, of=10**12)],
            [
                "group 'g' has 1 of 1000000000000 samples: "
                "sample 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 65525 more missing"
            ],
        ),
    ],
)
def test_what_is_missing_from_a_group(members: list[Trajectory], said: list[str]) -> None:
    """Its numbers have gaps, or there are fewer than its size."""
    assert found(members) == said
    assert found(reversed(members)) == said


def test_a_size_that_is_expected_goes_before_the_recorded_one() -> None:
    """Fewer and more are both wrong."""
    members = [member("g", n, of=2) for n in range(2)]
    assert found(members, 2) == []
    assert found(members, 3) == ["group 'g' has 2 of 3 samples: sample 2 missing"]
    assert found(members, 1) == ["group 'g' has 2 samples, but 1 were expected"]


@pytest.fixture
async def lines(recording: Recording, clients: Clients, tmp_path: Path) -> list[str]:
    """Two groups of four, as lines of a file."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def agent() -> None:
        await client.chat.completions.create(model="m", messages=[user("hi")])

    for group in ("g", "h"):
        made = await gather_group((agent() for _ in range(4)), group_id=group, group_size=4)
        for each in made:
            each.reward = 1.0
    return [json.dumps(each.to_dict()) for each in recording.exporter.get_finished_trajectories()]


def check(path: Path, lines: Iterable[str], capsys: Output, *more: str) -> tuple[int, str]:
    """The status and what is printed of a file of these lines."""
    path.write_text("".join(f"{line}\n" for line in lines))
    return main(["check", str(path), *more]), capsys.readouterr().out


def test_a_missing_sample_fails_by_default(
    lines: list[str], tmp_path: Path, capsys: Output
) -> None:
    """The group and the sample are named; the JSON has the same, and a line a trajectory."""
    path, left = tmp_path / "t.jsonl", lines[:5] + lines[6:]
    assert check(path, lines, capsys)[0] == 0
    lost = json.loads(lines[5])["sample_index"]
    status, out = check(path, left, capsys)
    assert status == 1
    assert f"whole: group 'h' has 3 of 4 samples: sample {lost} missing" in out
    assert out.endswith("\n7 trajectories; 1 of 2 groups is not whole\n")
    status, out = check(path, left, capsys, "--json")
    *each, last = map(json.loads, out.splitlines())
    assert (status, len(each), last["summary"]["ok"]) == (1, 7, False)
    group = {"group_id": "h", "samples": 3, "size": 4, "missing": [lost]}
    assert last["summary"]["groups"] == [group]
    assert check(path, left, capsys, "--require", "complete,undamaged")[0] == 0


def test_what_a_filter_leaves_out_is_not_missing(
    lines: list[str], tmp_path: Path, capsys: Output
) -> None:
    """And groups of which it keeps nothing are not judged."""
    path, left = tmp_path / "t.jsonl", lines[:5] + lines[6:]
    assert check(path, left, capsys, "--where", "group_id == 'g' and sample_index > 1")[0] == 0
    assert check(path, left, capsys, "--where", "group_id == 'h' and sample_index > 1")[0] == 1


def test_numbers_that_are_expected(lines: list[str], tmp_path: Path, capsys: Output) -> None:
    """Of trajectories, each once, and of the samples of each group; other numbers fail."""
    path = tmp_path / "t.jsonl"
    assert check(path, lines, capsys, "--expect", "8", "--expect-groups", "4")[0] == 0
    status, out = check(path, lines[:4], capsys, "--expect", "8", "--require", "reward")
    assert (status, out) == (1, "\n4 trajectories; 8 trajectories expected, 4 there\n")
    twice = [*lines[:7], lines[0]]
    assert check(path, twice, capsys, "--expect", "8", "--require", "reward")[0] == 1
    for number in ("3", "5"):
        asked = ("--expect-groups", number, "--require", "reward")
        status, out = check(path, lines, capsys, *asked)
        assert status == 1
        assert "2 of 2 groups are not whole" in out
    alone = [json.dumps(json.loads(line) | {"group_id": None}) for line in lines]
    status, out = check(path, alone, capsys, "--expect-groups", "4")
    assert status == 1
    assert "groups of 4 expected, no trajectory has a group" in out


def test_rows_of_a_group_that_is_not_whole(
    lines: list[str], tmp_path: Path, capsys: Output
) -> None:
    """A warning names it; with `require_whole_groups` it has no rows, and the others have."""
    members = [Trajectory.from_dict(json.loads(line)) for line in lines]
    of_g, of_h = members[:4], members[4:7]
    whole, partial = TrajectoryGroup.of(of_g), TrajectoryGroup.of(of_h)
    assert len(to_token_rows(whole, require_whole_groups=True)) == 4
    with pytest.warns(PartialGroupWarning, match="group 'h' has 3 of 4 samples"):
        assert len(to_token_rows(partial)) == 3
    with pytest.raises(ExportError, match="expected whole groups, but group 'h' has 3 of 4"):
        to_token_rows([*of_g, *of_h], require_whole_groups=True)
    path, output = tmp_path / "t.jsonl", tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines[:7]))
    export = ["export", str(path), "--to", "tokens", "-o", str(output)]
    assert main(export) == 0
    assert "1 group not whole:" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 7
    output.unlink()
    main([*export, "--option", "require_whole_groups=true"])
    error = capsys.readouterr().err
    assert "3 trajectories refused:" in error
    assert error.count("expected whole groups, but group 'h' has some of the samples") == 1
    assert {json.loads(line)["group_id"] for line in output.read_text().splitlines()} == {"g"}
