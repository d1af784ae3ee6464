"""Groups out of a partition: each once and whole, wherever its reader is stopped and goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory
from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.kafka.open_groups import LateReward, OpenGroups, rewards_of, value_of

Record = tuple[str, Trajectory]
Given = tuple[str, dict[str, float | None]]


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


def reward(rollout: str, number: int, time: int, cut: tuple[str, ...] = ()) -> LateReward:
    """A reward on the span of this number; its value is the number."""
    attributes: dict[str, str | int] = {} if cut else {sc.REWARD: json.dumps({"value": number})}
    return LateReward(rollout, "t" * 32, f"{number:016x}", time, attributes, cut)


def read_all(groups: OpenGroups, records: list[Record | LateReward], first: int) -> list[Given]:
    """As `read`, each group with the rewards of its rollouts."""
    found = list[Given]()
    for offset, record in enumerate(records, first):
        if isinstance(record, LateReward):
            groups.add_reward(record, offset, now=0.0)
            continue
        key, trajectory = record
        groups.add(key, Trajectory.from_json(trajectory.to_json()), offset, now=0.0)
        if (group := groups.ready(key)) is not None:
            groups.give(group)
            found.append((key, {id_: each.reward for id_, each in group.trajectories.items()}))
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_rewards_count_until_their_group_is_given(seed: int) -> None:
    """Before their trajectories, or after, twice, out of order, wherever the reader is stopped."""
    chance = random.Random(seed)
    records: list[Record | LateReward] = [sample(f"g{g}", i) for g in range(4) for i in range(2)]
    rollouts = [*(f"g{g}-{i}" for g in range(4) for i in range(2)), "unknown"]
    records += [reward(chance.choice(rollouts), n, chance.randint(0, 99)) for n in range(12)]
    chance.shuffle(records)
    for record in chance.choices(records, k=6):
        records.insert(chance.randint(records.index(record) + 1, len(records)), record)
    came = {f"g{g}": max(records.index(sample(f"g{g}", i)) for i in range(2)) for g in range(4)}
    counted, late = dict[str, list[LateReward]](), 0
    for each in {r.key: r for r in records if isinstance(r, LateReward)}.values():
        in_time = records.index(each) < came.get(each.rollout[:2], len(records))
        counted.setdefault(each.rollout, []).extend([each] if in_time else [])
        late += not in_time
    truth = {
        id_: float(int(max(each, key=lambda r: (r.time_ns, r.key)).span, 16)) if each else None
        for id_, each in counted.items()
    }
    groups, found, begin, was_late = OpenGroups(), list[Given](), 0, 0
    for stop in (*sorted(chance.choices(range(len(records)), k=4)), len(records)):
        found += read_all(groups, records[begin:stop], begin)
        was_late += groups.late
        waiting = groups.lone_rewards
        resume = json.loads(json.dumps(groups.resume))
        groups, begin = OpenGroups(resume=resume), resume["offset"]
    every = {id_: value for _, of_group in found for id_, value in of_group.items()}
    assert every == {id_: truth.get(id_) for id_ in rollouts[:-1]}
    assert was_late == late
    assert {r.key for r in waiting} == {r.key for r in counted.get("unknown", [])}


def test_a_reward_whose_rollout_does_not_come_is_given_up() -> None:
    """It holds the offset back until then."""
    groups = OpenGroups()
    groups.add_reward(reward("x", 1, 1), 0, now=0.0)
    groups.skip(1)
    assert groups.resume["offset"] == 0
    assert groups.due_rewards(9.0, 10.0) == []
    assert groups.due_rewards(10.0, 10.0) == [reward("x", 1, 1)]
    assert (groups.resume["offset"], groups.late, groups.lone_rewards) == (2, 1, [])


def test_a_reward_that_was_cut_is_not_known() -> None:
    """Nor is the one that it may have replaced; a whole copy is taken instead."""
    groups, (key, trajectory) = OpenGroups(), sample(None, 0)
    trajectory.reward = 1.0
    cut = reward(trajectory.id, 2, 5, cut=(sc.REWARD,))
    assert read_all(groups, [cut, (key, trajectory)], 0) == [(key, {trajectory.id: None})]
    records: list[Record | LateReward] = [cut, reward(trajectory.id, 2, 5), (key, trajectory)]
    assert read_all(OpenGroups(), records, 0) == [(key, {trajectory.id: 2.0})]


def test_a_record_of_rewards_reads_as_it_was_written() -> None:
    """And anything else is an error."""
    some = [reward("x", 1, 1), reward("x", 2, 2, cut=(sc.REWARD,))]
    assert rewards_of(value_of(some)) == some
    for wrong in (b"", b"{}", b'{"late_rewards": [1]}', b"\xff"):
        with pytest.raises(SpanFormatError, match="no late rewards"):
            rewards_of(wrong)


def test_a_position_without_rewards_is_read() -> None:
    """As it was written before there were any."""
    groups, records = OpenGroups(), [sample("a", 0), sample("a", 1)]
    read(groups, records)
    resume: Any = json.loads(json.dumps(groups.resume))
    del resume["given"]["a"]["rewards"]
    groups = OpenGroups(resume=resume)
    assert groups.add_reward(reward("a-0", 1, 1), 2, 0.0) == "late"
    assert groups.add_reward(reward("a-0", 1, 1), 3, 0.0) == "copy"


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


@pytest.mark.parametrize("group", [None, ""])
def test_a_rollout_without_a_group_is_whole(group: str | None) -> None:
    """It needs nothing else."""
    key = f"{group}-0"
    assert read(OpenGroups(), [sample(group, 0)]) == [(key, [key])]
