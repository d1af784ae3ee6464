"""Open rollouts and groups: each is handed over once, when it is whole or out of time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Reward
from otel_rollout import semconv as sc
from otel_rollout.evidence import OpenRollouts, Unit
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.spans.seals import with_lengths
from otel_rollout.wire.json import dumps


def made(rollout: str, span_id: str, **attributes: object) -> SpanRecord:
    """A span of a rollout, with further attributes by the names of `semconv`."""
    named = {getattr(sc, name): value for name, value in attributes.items() if value is not None}
    every = with_lengths({sc.ROLLOUT_ID: rollout, **named})
    return as_record(SpanRecord("s", "1" * 32, rollout + span_id, None, 5, 6, every))


def own(rollout: str, calls: int = 0, **attributes: object) -> SpanRecord:
    """A rollout's own span."""
    counts = {"ROLLOUT_EXCHANGE_COUNT": calls, "ROLLOUT_OPEN_COUNT": 0}
    return made(
        rollout, "own", ROLLOUT_SCHEMA_VERSION=1, ROLLOUT_PROCESS="p", **counts, **attributes
    )


def call(rollout: str, number: int, **attributes: object) -> SpanRecord:
    """The span of a call."""
    return made(
        rollout,
        f"call{number}",
        EXCHANGE_VERSION=1,
        EXCHANGE_PROCESS="p",
        EXCHANGE_STARTED=number,
        **attributes,
    )


def start(rollout: str, **attributes: object) -> SpanRecord:
    """The span of its start."""
    named = {getattr(sc, name): value for name, value in attributes.items()}
    every: dict[str, Any] = {sc.ROLLOUT_STARTED: rollout, **named}
    return as_record(SpanRecord("s", "1" * 32, f"{rollout}start", None, 5, 5, every))


def machine(handed: Collection[str] = ()) -> OpenRollouts[int]:
    """Rollouts wait for 10 seconds, groups for 100. handed: groups that are handed over."""
    return OpenRollouts(
        rollout_seconds=10, group_seconds=100, group_is_done=lambda group: group in handed
    )


def names(units: list[Unit[int]]) -> list[list[str]]:
    """The ids of the rollouts in each unit."""
    return [sorted(head.rollout for head in unit.heads) for unit in units]


GROUP: dict[str, Any] = {"ROLLOUT_GROUP_ID": "g", "ROLLOUT_GROUP_SIZE": 2}


def test_a_rollout_is_ready_when_it_is_whole():
    """Whatever came first; then its places are free, and what comes is late."""
    rollouts = machine()
    assert rollouts.add(own("a", 2), 1, 0) == "new"
    assert rollouts.add(call("a", 2), 2, 1) == "new"
    assert (rollouts.whole(), rollouts.due(10.9)) == ([], [])
    assert rollouts.add(call("a", 2), 3, 2) == "copy"
    assert rollouts.add(call("a", 1), 2, 3) == "new"
    [unit] = rollouts.whole()
    assert (unit.name, unit.places, unit.heads[0].is_whole) == ("a", (1, 2), True)
    assert rollouts.add(call("a", 3), 4, 3) == "new"  # until it is done, it may fail
    assert rollouts.add(call("a", 1), 5, 3) == "copy"
    assert rollouts.add(start("a"), 4, 3) == "new"  # and is nothing that came late
    assert (rollouts.whole(), rollouts.due(1000), [*rollouts.held]) == ([], [], [1, 2, 4])
    assert rollouts.came_since(unit) == [("a", "acall3", None)]
    assert rollouts.done(unit) == [1, 2, 4]
    assert (len(rollouts), rollouts.held) == (0, {})


def test_out_of_time_it_is_handed_over_with_what_is_missing():
    """Counted from the last span that came."""
    rollouts = machine()
    rollouts.add(own("a", 2), 1, 0)
    rollouts.add(call("a", 2), 2, 5)
    rollouts.add(start("b"), 3, 5)
    assert rollouts.due(14.9) == []
    first, second = rollouts.due(15)
    assert "1 of 2 model calls are missing" in first.heads[0].missing[0]
    assert (second.heads[0].ended, second.places) == (False, (3,))


def test_time_in_which_spans_are_refused_does_not_count():
    """While others are handed over, which makes room: what is missing may be what is refused."""
    rollouts = machine()
    rollouts.add(own("a", 1), 1, 0)
    rollouts.add(own("b"), 2, 0)
    rollouts.add(start("c", **GROUP), 3, 0)
    [whole] = rollouts.whole()
    rollouts.refuse(5)
    assert rollouts.due(1000) == []
    rollouts.done(whole)
    assert rollouts.due(1000) == []
    rollouts.take_again(1005)
    assert rollouts.due(1009) == []
    assert names(rollouts.due(1010)) == [["a"]]
    assert rollouts.due(1099) == []
    assert names(rollouts.due(1100)) == [["c"]]


def test_it_counts_where_nothing_else_can_make_room():
    """Nothing is whole, and nothing is taken."""
    rollouts = machine()
    rollouts.add(own("a", 2), 1, 0)
    rollouts.add(own("b"), 2, 0)
    [whole] = rollouts.whole()
    rollouts.refuse(1)
    rollouts.done(whole)
    rollouts.refuse(2)
    rollouts.add(call("a", 1), 3, 2.5)
    rollouts.refuse(3)
    assert rollouts.due(13.4) == []
    assert names(rollouts.due(13.5)) == [["a"]]


def test_what_an_open_unit_needs():
    """Spans of its group, and those of what its rollouts wait for, or claim calls of."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    rollouts.add(own("inner", ROLLOUT_PARENT_ID="b", ROLLOUT_OUTER_GROUP_ID="h"), 2, 0)
    rollouts.add(own("run", 1, ROLLOUT_EPISODE='{"trajectories": [{"id": "part"}]}'), 3, 0)
    assert [*map(rollouts.is_waiting, ("g", "h", "run", "a", "part", ""))] == [
        *(True, True, True, True, False, False)
    ]
    assert rollouts.needs("g", call("b", 1, ROLLOUT_GROUP_ID="g"))
    assert rollouts.needs("g", call("c", 1, ROLLOUT_GROUP_ID="i", ROLLOUT_OUTER_GROUP_ID="g"))
    assert rollouts.needs("run", call("part", 1))
    assert not rollouts.needs("g", call("part", 1))
    [unit] = rollouts.due(100)[:1]
    rollouts.done(unit)
    assert not rollouts.is_waiting(unit.name)


def test_a_group_is_ready_when_it_has_its_samples():
    """All of them whole; other groups and rollouts do not wait for it."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    rollouts.add(start("b", **GROUP), 2, 0)
    rollouts.add(own("c"), 3, 0)
    assert names(rollouts.whole()) == [["c"]]
    rollouts.add(own("b", **GROUP), 4, 0)
    [unit] = rollouts.whole()
    assert (names([unit]), unit.size, unit.whole, unit.short_by) == ([["a", "b"]], 2, 2, 0)
    assert rollouts.done(unit) == [1, 2, 4]


def test_a_group_that_is_short():
    """It waits for its own time, unless all of its samples are known and none can still come."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    assert rollouts.due(99) == []
    [unit] = rollouts.due(100)
    assert (unit.short_by, unit.whole) == (1, 1)
    rollouts.add(own("b", 1, **GROUP | {"ROLLOUT_GROUP_ID": "h"}), 2, 0)
    rollouts.add(own("c", **GROUP | {"ROLLOUT_GROUP_ID": "h"}), 3, 0)
    [unit] = rollouts.due(10)
    assert (names([unit]), unit.short_by) == ([["b", "c"]], 1)


@pytest.mark.parametrize("size", [None, 0, -3])
def test_a_group_without_a_size_waits(size: int | None):
    """Nobody knows how many there are to be."""
    rollouts = machine()
    rollouts.add(own("a", ROLLOUT_GROUP_ID="g", ROLLOUT_GROUP_SIZE=size), 1, 0)
    rollouts.add(own("b", ROLLOUT_GROUP_ID="g", ROLLOUT_GROUP_SIZE=size), 1, 50)
    assert (rollouts.whole(), rollouts.due(149)) == ([], [])
    [unit] = rollouts.due(150)
    assert (names([unit]), unit.size, unit.short_by) == ([["a", "b"]], None, 0)


def test_a_group_without_a_name_is_none():
    """Each of its rollouts is alone, whatever size they name."""
    every = machine()
    for number, id_ in enumerate("rs"):
        every.add(own(id_, ROLLOUT_GROUP_ID="", ROLLOUT_GROUP_SIZE=2), number, 0.0)
        (unit,) = every.whole()
        assert (unit.group, unit.name, unit.is_extra) == (None, id_, False)
        every.done(unit)


def test_a_sample_that_was_tried_again():
    """The group has each number once; the rollout that never ended is extra, and reported."""
    rollouts = machine()
    rollouts.add(start("a", **GROUP, ROLLOUT_SAMPLE_INDEX=0), 1, 0)
    rollouts.add(own("b", **GROUP, ROLLOUT_SAMPLE_INDEX=1), 2, 0)
    rollouts.add(own("c", **GROUP, ROLLOUT_SAMPLE_INDEX=0), 3, 0)
    [unit] = rollouts.whole()
    assert names([unit]) == [["b", "c"]]
    assert rollouts.done(unit) == [2, 3]
    assert rollouts.whole() == []
    [extra] = rollouts.due(10)
    assert (names([extra]), extra.is_extra, extra.heads[0].ended) == ([["a"]], True, False)
    assert rollouts.done(extra) == [1]


def test_a_part_of_a_sample_is_no_sample():
    """A rollout inside a member of its group, in the same group, is handed over with it."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    rollouts.add(own("b", **GROUP, ROLLOUT_PARENT_ID="a"), 2, 0)
    assert rollouts.whole() == []
    rollouts.add(own("c", **GROUP), 3, 0)
    assert names(rollouts.whole()) == [["a", "b", "c"]]


INSIDE: dict[str, Any] = {"ROLLOUT_PARENT_ID": "a", "ROLLOUT_OUTER_GROUP_ID": "g"}


def test_what_runs_inside_a_member_goes_with_its_group():
    """It is no sample, and waited for, as far as it began; also one inside that."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    rollouts.add(start("b", **INSIDE), 2, 0)
    rollouts.add(own("c", **INSIDE | {"ROLLOUT_PARENT_ID": "b"}), 3, 0)
    assert (rollouts.whole(), rollouts.due(9)) == ([], [])
    rollouts.add(own("d", **GROUP), 4, 0)
    assert rollouts.whole() == []
    rollouts.add(own("b", **INSIDE), 5, 9)
    [unit] = rollouts.whole()
    assert (unit.name, names([unit]), unit.size, unit.whole) == ("g", [["a", "b", "c", "d"]], 2, 2)
    assert sorted(rollouts.done(unit)) == [1, 2, 3, 4, 5]
    assert (len(rollouts), rollouts._inner) == (0, {})


def test_what_runs_inside_and_never_ends():
    """The group waits for it as for a sample: until it is out of time."""
    rollouts = machine()
    for name in "ad":
        rollouts.add(own(name, **GROUP), 1, 0)
    rollouts.add(start("b", **INSIDE), 2, 1)
    assert (rollouts.whole(), rollouts.due(10.9)) == ([], [])
    [unit] = rollouts.due(11)
    assert (unit.name, names([unit]), unit.short_by) == ("g", [["a", "b", "d"]], 0)


def test_what_runs_inside_a_sample_that_is_not_needed():
    """A process was killed, and another one repeated its sample: the group does not wait."""
    rollouts = machine()
    rollouts.add(start("a", **GROUP), 1, 0)
    rollouts.add(start("b", **INSIDE), 2, 0)
    for name in "cd":
        rollouts.add(own(name, **GROUP), 3, 0)
    [unit] = rollouts.whole()
    assert names([unit]) == [["c", "d"]]
    rollouts.done(unit)
    assert sorted(map(tuple, names(rollouts.due(10)))) == [("a",), ("b",)]


def test_what_runs_inside_and_comes_before_all_of_its_group():
    """It waits for the group; alone it is handed over when it is out of time."""
    rollouts = machine()
    rollouts.add(own("b", **INSIDE), 1, 0)
    assert (rollouts.whole(), rollouts.due(9)) == ([], [])
    for name in "ad":
        rollouts.add(own(name, **GROUP), 2, 9)
    [unit] = rollouts.whole()
    assert names([unit]) == [["a", "b", "d"]]
    rollouts = machine()
    rollouts.add(own("b", **INSIDE), 1, 0)
    [unit] = rollouts.due(10)
    assert (unit.group, names([unit])) == (None, [["b"]])


def test_what_runs_inside_and_comes_when_the_group_is_handed_over():
    """It is a unit of its own, and not extra."""
    rollouts = machine(handed := set[str]())
    for name in "ad":
        rollouts.add(own(name, **GROUP), 2, 0)
    [unit] = rollouts.whole()
    rollouts.add(own("c", **INSIDE), 3, 0)
    assert rollouts.whole() == []
    rollouts.done(unit)
    handed.add("g")
    [unit] = rollouts.whole()
    assert (unit.group, unit.is_extra, names([unit])) == (None, False, [["c"]])


def test_a_reward_names_the_group_that_its_rollout_is_sent_with():
    """Of one inside a member, too: it is no sample by that, whichever comes first."""
    reward = dumps(Reward(1.0).to_dict())
    for first in (True, False):
        rollouts = machine(handed := set[str]())
        spans = [
            made("b", "r", REWARD=reward, REWARD_NUMBER=0, ROLLOUT_GROUP_ID="g"),
            own("b", **INSIDE),
        ]
        for number, span in enumerate(spans if first else spans[::-1]):
            rollouts.add(span, number, 0)
        rollouts.add(own("a", **GROUP), 3, 0)
        assert rollouts.whole() == []
        rollouts.add(own("d", **GROUP), 4, 0)
        [unit] = rollouts.whole()
        assert {head.rollout: head.group for head in unit.heads} == {"a": "g", "b": None, "d": "g"}
        rollouts.done(unit)
        handed.add("g")
        for span in spans if first else spans[::-1]:
            other = {**span.attributes, sc.ROLLOUT_ID: "c"}
            rollouts.add(replace(span, attributes=other), 4, 1)
        assert [(unit.group, names([unit])) for unit in rollouts.whole()] == [(None, [["c"]])]


def test_parents_in_a_circle():
    """Spans may say anything."""
    rollouts = machine()
    rollouts.add(own("a", **GROUP), 1, 0)
    for name, parent in ("bc", "cb"):
        rollouts.add(own(name, **INSIDE | {"ROLLOUT_PARENT_ID": parent}), 2, 0)
    assert rollouts.whole() == []
    assert names(rollouts.due(10)) == [["b"], ["c"]]


def test_what_fails_comes_again():
    """With what came meanwhile."""
    rollouts = machine()
    for name in "ab":
        rollouts.add(own(name, **GROUP), 1, 0)
    [unit] = rollouts.whole()
    rollouts.failed(unit)
    reward = made("a", "r", REWARD=dumps(Reward(1.0).to_dict()), REWARD_NUMBER=0)
    assert rollouts.add(reward, 2, 1) == "new"
    [again] = rollouts.whole()
    assert again.places == (1, 2)
    assert sorted(rollouts.done(again)) == [1, 2]


def test_rollouts_of_an_episode_are_read_together():
    """A trajectory that claims calls of the run around it needs its spans, and takes them away."""
    rollouts = machine()
    episode = dumps({"trajectories": [{"id": "b"}]})
    rollouts.add(own("a", 1, ROLLOUT_EPISODE=episode), 1, 0)
    rollouts.add(call("a", 1), 2, 0)
    assert rollouts.whole() == []
    claims = dumps(["acall1", "acall2"])
    rollouts.add(own("b", ROLLOUT_PARENT_ID="a", ROLLOUT_CLAIMS=claims), 3, 0)
    [unit] = rollouts.whole()
    assert (unit.name, sorted(unit.places)) == ("a", [1, 2, 3])
    assert rollouts.done(unit) == []
    assert rollouts.movable() == {1, 2, 3}
    [unit] = rollouts.due(10)
    assert rollouts.movable() == set()  # it reads the spans of the run, too
    assert (unit.name, sorted(unit.places)) == ("b", [1, 2, 3])
    assert "1 of 2 model calls are missing" in unit.heads[0].missing[0]
    assert sorted(rollouts.done(unit)) == [1, 2, 3]
    assert (len(rollouts), rollouts._claimers, rollouts._waiting) == (0, {}, {})


def test_places_move():
    """But for those that are read by now."""
    rollouts = machine()
    rollouts.add(own("a", 1), 1, 0)
    rollouts.add(own("b", 1), 1, 0)
    rollouts.add(own("c"), 2, 0)
    [unit] = rollouts.whole()
    assert rollouts.movable() == {1}
    rollouts.move({1: 9})
    assert rollouts.done(unit) == [2]
    assert rollouts.held == {9: 2}
    assert [unit.places for unit in rollouts.due(10)] == [(9,), (9,)]


def test_after_a_restart_what_is_done_is_not_open():
    """Of a group that is done, others are extra."""
    rollouts = OpenRollouts[int](
        rollout_seconds=10,
        group_seconds=100,
        rollout_is_done="ab".__contains__,
        group_is_done="g".__contains__,
    )
    assert rollouts.add(own("a", **GROUP), 1, 0) == "late"
    assert rollouts.add(start("a", **GROUP), 1, 0) == "copy"
    assert rollouts.add(own("c", **GROUP), 2, 0) == "new"
    [unit] = rollouts.whole()
    assert (unit.is_extra, names([unit])) == (True, [["c"]])


def test_spans_of_nobody():
    """Those of other libraries, those for people, and one whose rollout's id was cut."""
    rollouts = machine()
    other = SpanRecord("s", "1" * 32, "2" * 16, None, 5, 6, {"rollout.turn": 1})
    damaged = as_record(
        SpanRecord(
            "s", "1" * 32, "3" * 16, None, 5, 6, {**own("abc").attributes, sc.ROLLOUT_ID: "ab"}
        )
    )
    assert [rollouts.add(each, 1, 0) for each in (other, damaged)] == ["other", "other"]
    assert rollouts.held == {}


@dataclass
class Sent:
    """A rollout's spans, and whether all of them are sent."""

    group: str | None
    spans: list[SpanRecord] = field(default_factory=list)
    kept: list[SpanRecord] = field(default_factory=list)
    inside: str | None = None
    """The group of the member that it is inside."""


@st.composite
def sent(draw: st.DrawFn) -> dict[str, Sent]:
    """Rollouts in groups of their sizes, of which some spans are lost; others inside them."""
    found: dict[str, Sent] = {}
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 3))
        for index in range(size or 1):
            name = f"r{number}{index}"
            group: dict[str, Any] = {
                "ROLLOUT_GROUP_ID": f"g{number}" if size else None,
                "ROLLOUT_GROUP_SIZE": size or None,
                "ROLLOUT_SAMPLE_INDEX": index if size else None,
            }
            each = found[name] = Sent(f"g{number}" if size else None)
            calls = draw(st.integers(0, 3))
            each.spans = [call(name, n + 1, **group) for n in range(calls)]
            each.spans.append(own(name, calls, **group))
            is_lost = draw(st.sampled_from([False] * 5 + [True]))
            each.kept = [s for s in each.spans if not (is_lost and draw(st.booleans()))]
            if size and draw(st.booleans()):
                outer = {"ROLLOUT_OUTER_GROUP_ID": f"g{number}"}
                inner = [own(f"i{name}", 1, ROLLOUT_PARENT_ID=name, **outer)]
                inner.append(call(f"i{name}", 1, **outer))
                found[f"i{name}"] = Sent(None, inner, inner, f"g{number}")
    return found


@given(sent(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_each_is_handed_over_once(every: dict[str, Sent], order: random.Random):
    """In any order, with copies: whole ones at once, others in time; no place is left."""
    done, done_groups = set[str](), set[str | None]()
    rollouts = OpenRollouts[int](
        rollout_seconds=10,
        group_seconds=100,
        rollout_is_done=done.__contains__,
        group_is_done=done_groups.__contains__,
    )
    spans = [span for each in every.values() for span in each.kept]
    spans += spans[::3]
    order.shuffle(spans)
    units = list[Unit[int]]()

    def hand_over(found: list[Unit[int]]) -> None:
        units.extend(found)
        for unit in found:
            done.update(head.rollout for head in unit.heads)
            done_groups.add(unit.group)
            rollouts.done(unit)

    for now, span in enumerate(spans):
        rollouts.add(span, now // 2, 0)
        hand_over(rollouts.whole())
    at_once = {head.rollout for unit in units for head in unit.heads}
    groups = {each.group: True for each in every.values()}
    for each in every.values():
        groups[each.group] &= len(each.kept) == len(each.spans)
    for name, each in every.items():
        is_ready = len(each.kept) == len(each.spans) and (each.group is None or groups[each.group])
        if each.inside is None or groups[each.inside]:
            assert (name in at_once) == is_ready
    hand_over(rollouts.due(1000))
    came = Counter(head.rollout for unit in units for head in unit.heads)
    assert came == Counter(name for name, each in every.items() if each.kept)
    whole = {head.rollout for unit in units for head in unit.heads if head.is_whole}
    assert whole == {name for name, each in every.items() if len(each.kept) == len(each.spans)}
    assert (len(rollouts), rollouts.held, rollouts._groups, rollouts._inner) == (0, {}, {}, {})
