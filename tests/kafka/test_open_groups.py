"""Groups out of a partition: each once and whole, wherever its reader is stopped and goes on."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory
from otel_rollout.kafka.open_groups import OpenGroups

Record = tuple[str, Trajectory]


def sample(
    group: str | None, index: int, size: int | None = 2, parent: str | None = None
) -> Record:
    """A record of a rollout, and its key."""
    name = f"{group}-{index}" if parent is None else f"inside-{parent}-{index}"
    made = Trajectory(
        name="agent",
        id=name,
        group_id=group if parent is None else None,
        sample_index=index if parent is None else None,
        group_size=size if parent is None else None,
        parent_id=parent,
    )
    return group or name, made


def read(groups: OpenGroups, records: list[Record], first: int = 0) -> list[tuple[str, list[str]]]:
    """The groups that these records make whole, each with the ids of its rollouts."""
    found = []
    for offset, (key, trajectory) in enumerate(records, first):
        groups.add(key, trajectory, offset, now=0.0)
        if (group := groups.ready(key)) is not None:
            groups.give(group)
            found.append((key, sorted(group.trajectories)))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_each_group_comes_once_wherever_it_is_stopped(seed: int) -> None:
    """Copies of records may come at any later place; each stop goes on from a kept position."""
    chance = random.Random(seed)
    records = [sample(f"g{g}", i) for g in range(8) for i in range(2)]
    chance.shuffle(records)
    for record in chance.choices(records, k=6):
        records.insert(chance.randint(records.index(record) + 1, len(records)), record)
    groups, found, begin = OpenGroups(), list[tuple[str, list[str]]](), 0
    for stop in (*sorted(chance.choices(range(len(records)), k=4)), len(records)):
        found += read(groups, records[begin:stop], begin)
        resume = json.loads(json.dumps(groups.resume))
        groups, begin = OpenGroups(resume=resume), resume["offset"]
    assert sorted(found) == [(f"g{g}", [f"g{g}-0", f"g{g}-1"]) for g in range(8)]


def test_a_former_position_gives_the_same_again() -> None:
    """To train once more from there: what was open at that time comes, what was given does not."""
    records = [sample("a", 0), sample("b", 0), sample("b", 1), sample("c", 0), sample("a", 1)]
    groups = OpenGroups()
    assert read(groups, records[:3]) == [("b", ["b-0", "b-1"])]
    resume = groups.resume
    assert resume["offset"] == 0
    for _ in range(2):
        assert read(OpenGroups(resume=resume), records) == [("a", ["a-0", "a-1"])]


def test_what_ran_inside_a_rollout_is_no_sample() -> None:
    """It is a child of its group, whose size it does not count for."""
    groups = OpenGroups()
    records = [sample("a", 0), sample("a", 0, parent="a-0"), sample("a", 1, parent="a-1")]
    assert read(groups, records) == []
    assert read(groups, [sample("a", 1)], 3) == [
        ("a", ["a-0", "a-1", "inside-a-0-0", "inside-a-1-1"])
    ]


def test_late_records_are_counted() -> None:
    """A copy, and a rollout of a group that was given without it, are told apart."""
    groups = OpenGroups()
    read(groups, [sample("a", 0), sample("a", 1), sample("a", 0), sample("a", 2)])
    assert (groups.copies, groups.late, len(groups)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (sample("a", 0), "group 'a' has 1 of 2 samples: sample 1 missing"),
        (sample("a", 0, size=None), "group 'a' has no size: more of it may come"),
        (sample("a", 0, parent="a-0"), "'a': only rollouts inside it have come"),
    ],
)
def test_a_group_out_of_time_says_what_is_missing(record: Record, missing: str) -> None:
    """It is given as it is, when nothing of it has come for so long."""
    groups = OpenGroups()
    read(groups, [record])
    assert list(groups.due(9.0, 10.0)) == []
    (group,) = groups.due(10.0, 10.0)
    assert group.missing == [missing]


def test_a_rollout_without_a_group_is_whole() -> None:
    """It needs nothing else."""
    assert read(OpenGroups(), [sample(None, 0)]) == [("None-0", ["None-0"])]
