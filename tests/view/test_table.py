"""Rows of overviews: filters, order, search, advantages, and what a list is like in sum."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_rollout import TrajectoryGroup
from otel_rollout.errors import ConfigurationError
from otel_rollout.view.answers import Answers
from otel_rollout.view.html import InMemory
from otel_rollout.view.overview import Overview
from otel_rollout.view.table import Filter, WritableTable
from tests.kit.conversations import said, user
from tests.view.made import Call, ask, made

REWARDS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0]))


@contextmanager
def answers(*trajectories: Any, **options: Any) -> Iterator[Answers]:
    """Answers about some trajectories."""
    with InMemory(trajectories) as held:
        yield Answers(held, **options)


def group(rewards: list[float | None], group_id: str | None = "g") -> list[Any]:
    """A trajectory for each reward."""
    return [
        made(
            Call([user("hi")]),
            id_=f"{group_id}{number}",
            group_id=group_id,
            sample_index=number,
            rewards=[] if reward is None else [{"value": reward}],
        )
        for number, reward in enumerate(rewards)
    ]


@given(st.lists(REWARDS, min_size=1, max_size=8))
def test_advantages_are_those_of_the_group(rewards: list[float | None]):
    """The same numbers as `TrajectoryGroup.advantages`, to the last bit."""
    members = group(rewards)
    with answers(*members) as asked:
        found = [
            row["advantage"] for row in ask(asked, "trajectories", sort="sample_index")["rows"]
        ]
    assert found == TrajectoryGroup(members).advantages()


@given(
    st.lists(REWARDS, min_size=1, max_size=5),
    st.lists(REWARDS, min_size=1, max_size=5),
    st.booleans(),
)
def test_a_list_in_order_of_advantages(
    one: list[float | None], other: list[float | None], descending: bool
):
    """Of whole groups, also where a filter shows a part of them; what has none comes last."""
    lonely = group([1.0, None], None)
    with answers(*group(one, "g"), *group(other, "h"), *lonely) as asked:
        sort = "-advantage" if descending else "advantage"
        for where in ("", "sample_index != 0"):
            rows = ask(asked, "trajectories", sort=sort, where=where)["rows"]
            found = [row["advantage"] for row in rows]
            known = [each for each in found if each is not None]
            assert found == known + [None] * (len(found) - len(known))
            assert known == pytest.approx(sorted(known, reverse=descending), abs=1e-6)
            unsorted = ask(asked, "trajectories", where=where)["rows"]
            assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in unsorted)


def test_without_a_group_there_is_no_advantage():
    """It is compared with nobody."""
    with answers(*group([1.0, 0.0], None)) as asked:
        assert {row["advantage"] for row in ask(asked, "trajectories")["rows"]} == {None}


@given(st.lists(REWARDS, max_size=30))
@example([0.0, 5e-324])
def test_the_sum_of_a_list(rewards: list[float | None]):
    """The mean is that of the numbers; every reward is in one bin, in order."""
    with answers(*group(rewards)) as asked:
        found = ask(asked, "summary")
    known = [reward for reward in rewards if reward is not None]
    said, bins = found["rewards"], found["rewards"]["bins"]
    assert found["total"] == len(rewards)
    assert (said["count"], said["missing"]) == (len(known), len(rewards) - len(known))
    assert sum(each["count"] for each in bins) == len(known)
    for before, after in pairwise(bins):
        assert before["to"] == after["from"]
    if known:
        assert said["mean"] == pytest.approx(fmean(known), abs=1e-6)
        assert (bins[0]["from"], bins[-1]["to"]) == (min(known), max(known))
    else:
        assert (said["mean"], bins) == (None, [])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40))
def test_a_bin_holds_what_lies_in_it(values: list[float]):
    """`from <= x < to`, the last one `to` as well, up to the rounding of an edge."""
    with answers(*group(list(values))) as asked:
        bins = ask(asked, "summary")["rewards"]["bins"]
    for each in bins[:-1]:
        sure = [v for v in values if each["from"] + 1e-9 < v < each["to"] - 1e-9]
        maybe = [v for v in values if each["from"] - 1e-9 <= v <= each["to"] + 1e-9]
        assert len(sure) <= each["count"] <= len(maybe)


def test_edges_of_bins_are_short_numbers_that_hold_what_a_filter_finds():
    """A click on a bin filters by its edges: no 0.11000000000000001, and as many are kept."""
    rewards: list[float | None] = [*(0.055 * n for n in range(20)), 1.1, 0.1 + 0.2]
    with answers(*group(rewards)) as asked:
        bins = ask(asked, "summary")["rewards"]["bins"]
        assert [each["to"] for each in bins[:3]] == [0.055, 0.11, 0.165]
        for each in bins[:-1]:
            where = f"reward >= {each['from']} and reward < {each['to']}"
            assert ask(asked, "trajectories", where=where)["total"] == each["count"]


def test_rewards_that_differ_by_rounding_are_one_bin():
    """0.1 + 0.2 and 0.3 are one reward, and so are what is left of 0.3 and nothing."""
    for rewards in ([0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0]):
        with answers(*group(list(rewards))) as asked:
            said = ask(asked, "summary")["rewards"]
        assert len(said["bins"]) == 1


def test_whole_numbers_have_whole_bins():
    """Turns: no bin is a part of a turn, and one value is one bin."""
    calls = [[Call([user(str(n))]) for n in range(count)] for count in (1, 2, 2, 4)]
    many = [made(*each, id_=f"t{n}") for n, each in enumerate(calls)]
    with answers(*many) as asked:
        assert ask(asked, "summary")["turns"]["bins"] == [
            {"from": 1, "to": 2, "count": 1},
            {"from": 2, "to": 3, "count": 2},
            {"from": 3, "to": 4, "count": 1},
        ]
    with answers(many[0]) as asked:
        assert ask(asked, "summary")["turns"]["bins"] == [{"from": 1, "to": 1, "count": 1}]


def test_groups_and_versions_are_summed():
    """The largest group first; a page of them; versions in their order."""
    members = [*group([1.0, 0.0, None], "a"), *group([0.5], "b"), *group([2.0, 4.0], None)]
    with answers(*members) as asked:
        first, second = ask(asked, "groups")["rows"]
        assert (first["value"], first["count"], first["scored"]) == ("a", 3, 2)
        assert (first["mean"], second["value"]) == (0.5, "b")
        page = ask(asked, "groups", offset=1, limit=1)
        assert (page["total"], [each["value"] for each in page["rows"]]) == (2, ["b"])
        assert ask(asked, "summary")["groupsTotal"] == 2


def test_the_order_of_a_list():
    """By any field, either way; what is not known comes last both times."""
    with answers(*group([0.5, None, 1.0, 0.0])) as asked:
        for sort, expected in (
            ("reward", [0.0, 0.5, 1.0, None]),
            ("-reward", [1.0, 0.5, 0.0, None]),
        ):
            rows = ask(asked, "trajectories", sort=sort)["rows"]
            assert [row["reward"] for row in rows] == expected
        page = ask(asked, "trajectories", sort="reward", offset=1, limit=2)
        assert (page["total"], [row["reward"] for row in page["rows"]]) == (4, [0.5, 1.0])
        with pytest.raises(ConfigurationError, match=r"sort: expected one of id, .*, got 'x; DROP"):
            ask(asked, "trajectories", sort="x; DROP TABLE trajectories")


def test_the_rows_of_a_group_stand_together():
    """In order of their samples, whichever ended first; groups as they were read."""
    ends = [("g", 1), ("h", 0), (None, None), ("g", 0), ("h", 1)]
    many = [
        made(Call([user("hi")]), id_=f"t{n}", group_id=group, sample_index=sample)
        for n, (group, sample) in enumerate(ends)
    ]
    with answers(*many) as asked:
        rows = ask(asked, "trajectories")["rows"]
        assert [row["id"] for row in rows] == ["t3", "t0", "t1", "t4", "t2"]
        page = ask(asked, "trajectories", offset=2, limit=2)["rows"]
        assert [row["id"] for row in page] == ["t1", "t4"]


def test_task_answer_and_error_of_a_row():
    """Of the agent's own calls; what is long ends with an ellipsis."""
    title = Call([user("Make a title"), user("x")], "T")
    thought: Any = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": TOOLS}
    calls = Call([user("Where?")], "There."), Call([user("Where?"), said("There.")], thought)
    long = {"type": "E", "message": "m" * 5000}
    one = made(*calls, id_="t1", group_id="g" * 32, status="error", error=long)
    with answers(one, made(title, id_="t2"), made(id_="t3")) as asked:
        first, second, third = ask(asked, "trajectories", sort="id")["rows"]
        assert (first["question"], first["error_type"]) == ("Where?", "E")
        assert "look" in first["answer"]
        assert "Hm." not in first["answer"]
        assert first["error"][-1] == "…"
        assert (second["question"], second["answer"]) == ("Make a title", "T")
        assert (third["question"], third["answer"], third["error"]) == (None, None, None)
        assert ask(asked, "trajectories", where='error_type == "E"')["total"] == 1
        (error,) = ask(asked, "summary")["errors"]
        assert (error["value"], error["count"]) == ("E", 1)
        assert ask(asked, "group", id="g" * 32)["question"] == "Where?"
        assert ask(asked, "groups")["rows"][0]["task"] == "Where?"


def test_the_task_is_the_agents_and_not_that_of_a_side_call():
    """Of a trajectory that has both."""
    title, own = Call([user("Make a title")], "T"), Call([user("Where?")], "There.")
    both = made(title, own, id_="t1")
    first = both.completions[0].span_id
    side = both.with_side_calls([lambda c, _: "a title" if c.span_id == first else None])
    assert (side.completions[0].side_call, side.completions[1].side_call) == ("a title", None)
    found = Overview.of(side)
    assert (found.question, found.answer) == ("Where?", "There.")


TOOLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def test_a_filter_and_words():
    """Both have to hold; what the page was opened with holds for all."""
    one = made(Call([user("Where is Paris?")], "In France."), id_="t1", rewards=[{"value": 1}])
    other = made(Call([user("Where is Rome?")], "In Italy."), id_="t2", logs=["slow tool"])
    with answers(one, other) as asked:

        def found(**query: str) -> list[str]:
            return [row["id"] for row in ask(asked, "trajectories", **query)["rows"]]

        assert found(search="where is") == ["t1", "t2"]
        assert found(search="rome ita") == ["t2"]
        assert found(search='"is paris"') == ["t1"]
        assert found(search='"paris is"') == []
        assert found(search="SLOW") == ["t2"]
        assert found(where="reward > 0.5") == ["t1"]
        assert found(where="reward > 0.5", search="rome") == []
        assert ask(asked, "summary", search="rome")["total"] == 1
        with pytest.raises(ConfigurationError, match="reward >"):
            found(where="reward >")
    with answers(one, other, where="reward is None or reward > 2") as asked:
        assert [row["id"] for row in ask(asked, "trajectories")["rows"]] == ["t2"]
        assert ask(asked, "trajectories", where="id == 't1'")["total"] == 0
        with pytest.raises(ConfigurationError):
            ask(asked, "trajectories", where="1 == 1) or (1 == 1")
    with pytest.raises(ConfigurationError), answers(one, where="x") as asked:
        pass


@given(st.text(max_size=40))
def test_any_text_can_be_searched(text: str):
    """No sign of it is taken for a word of the query language."""
    with answers(made(Call([user("hi")]))) as asked:
        found = ask(asked, "trajectories", search=text)
        assert found["total"] in (0, 1)
        assert ask(asked, "trajectories", search=f'"{text}" NOT AND OR NEAR( * ^ : -')["total"] == 0


def test_what_is_found_in_a_list_is_counted():
    """The same sentence about several calls is one, without their ids."""
    failed = made(Call([user("hi")], None), Call([user("hi")], None), id_="t1")
    with answers(failed, made(Call([user("hi")], None), id_="t2")) as asked:
        found = ask(asked, "summary")["findings"]
        failed_calls = next(each for each in found if each["kind"] == "failed")
        assert (failed_calls["count"], failed_calls["replies"]) == (2, 3)
        unscored = next(each for each in found if each["kind"] == "unscored")
        assert (unscored["count"], unscored["replies"]) == (2, 0)
        assert all("t1" not in each["text"] for each in found)
        assert len({(each["kind"], each["text"]) for each in found}) == len(found)


def test_an_id_is_found_by_its_beginning():
    """By one that names one; else the error names some."""
    with answers(*(made(Call([user("hi")]), id_=id_) for id_ in ("abc", "abd", "ab"))) as asked:
        assert ask(asked, "trajectory", id="abc")["overview"]["id"] == "abc"
        assert ask(asked, "trajectory", id="ab")["overview"]["id"] == "ab"
        for id_ in ("a", "x"):
            with pytest.raises(LookupError, match="expected an id that names one"):
                ask(asked, "trajectory", id=id_)
        with pytest.raises(ConfigurationError, match="expected id="):
            ask(asked, "trajectory")


def test_values_that_sqlite_cannot_hold_are_carried():
    """Numbers beyond 64 bits, lone surrogates, NaN in metadata."""
    strange = made(
        Call([user("\ud800 text \udfff")], "\ud800"),
        sample_index=2**70,
        name="\ud800",
        metadata={"x": float("nan"), "y": [float("inf")]},
    )
    with answers(strange) as asked:
        (row,) = ask(asked, "trajectories", search="text")["rows"]
        assert row["sample_index"] == 2.0**70
        assert row["metadata"] == {"x": None, "y": [None]}


def test_parents_and_children_are_known():
    """A rollout inside another names it, and is listed there."""
    outer, inner = (
        made(Call([user("hi")]), id_="o"),
        made(Call([user("x")]), id_="i", parent_id="o"),
    )
    with answers(outer, inner, jaeger="http://jaeger:16686/") as asked:
        assert [row["id"] for row in ask(asked, "trajectory", id="o")["children"]] == ["i"]
        found = ask(asked, "trajectory", id="i")
        assert found["parent"]["id"] == "o"
        assert found["trace"] == f"http://jaeger:16686/trace/{'a' * 32}"


def test_a_group_and_a_difference():
    """The members by their sample, and the first message or token that differs."""
    asked_ = [user("hi")]
    first, same = (
        made(Call(asked_, "a", prompt_ids=[1], ids=[2]), id_=id_, group_id="g", sample_index=n)
        for n, id_ in enumerate(("x", "y"))
    )
    token = made(Call(asked_, "a", prompt_ids=[1], ids=[3]), id_="z", group_id="h")
    message = made(Call(asked_, "b"), id_="w", group_id="h")
    with answers(first, same, token, message) as asked:
        found = ask(asked, "group", id="g")
        assert [row["id"] for row in found["members"]] == ["x", "y"]
        assert found["first"] == {"a": "x", "b": "y", "place": {"kind": "none", "position": 2}}
        place = ask(asked, "group", id="h")["first"]["place"]
        assert place == {"kind": "message", "position": 1}
        tokens = ask(asked, "diff", a="x", b="z")
        assert tokens["messages"] == {"common": 2, "a": [], "b": []}
        assert (tokens["tokens"]["position"], tokens["tokens"]["b_id"]) == (1, 3)
        texts = ask(asked, "diff", a="x", b="w")["messages"]
        assert (texts["common"], texts["a"][0]["text"], texts["b"][0]["text"]) == (1, "a", "b")
        with pytest.raises(LookupError, match="no group 'none'"):
            ask(asked, "group", id="none")


def test_a_hostile_name_of_a_group_is_a_value():
    """It is a parameter of the query, never a part of it."""
    name = "'; DROP TABLE trajectories; --"
    with answers(*group([1.0, 2.0], name)) as asked:
        assert len(ask(asked, "group", id=name)["members"]) == 2
        assert ask(asked, "trajectories")["total"] == 2


def test_the_tables_are_made_once():
    """A filter without a condition is all of them."""
    connection = sqlite3.connect(":memory:")
    assert WritableTable.create(connection).count(Filter.of()) == 0
    connection.close()
