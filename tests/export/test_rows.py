"""Rows for trainers: nothing but other names for what token sequences hold."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import (
    ConfigurationError,
    EmptyRowsWarning,
    Episode,
    ExportError,
    RowExporter,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
    Workflow,
    gather_group,
    gather_trajectory,
    reconstruct,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.command import main
from otel_rollout.export import NoAdvantageWarning, TokenRows, portable, row_exporter
from otel_rollout.export.row_contract import OURS, JsonRows
from otel_rollout.export.rowfile import Tally, rows_of
from otel_rollout.export.store import item_of
from otel_rollout.workflows import reconstruct_episodes, run_workflows
from tests.kit.programs import ROOT
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line


async def play(clients: Clients, rewards: list[float | None]) -> TrajectoryGroup:
    """A group of agents that each have two conversations."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent(reward: float | None) -> None:
        for text in ("one", "two"):
            message: Any = {"role": "user", "content": text}
            await client.chat.completions.create(model="m", messages=[message])
        if reward is not None:
            record_reward(reward)

    return await gather_group([agent(r) for r in rewards], group_id="g", policy_version=3)


async def test_a_row_is_a_token_sequence(recording: Recording, clients: Clients):
    """Its lists are those of the sequence, and it says which trajectory it is of."""
    group = await play(clients, [1.0])
    (trajectory,) = group.trajectories
    rows = to_token_rows([trajectory])
    sequences = trajectory.token_sequences()
    assert len(rows) == len(sequences) == 2
    for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        assert row["input_ids"] == sequence.token_ids
        assert row["loss_mask"] == sequence.loss_mask
        assert row["logprobs"] == sequence.logprobs
        assert row["sampled"] == sequence.sampled
        assert row["prompt_length"] == sequence.prompt_length
        assert row["completion_ids"] == sequence.completion_ids
        assert row["policy_versions"] == [3]
        assert row["policy_version_spans"] is None
        assert (row["row"], row["rows"]) == (number, 2)
        assert (row["trajectory_id"], row["group_id"]) == (trajectory.id, group.key)
        assert row["advantage"] is None


@pytest.mark.parametrize(
    ("credit", "rewards", "advantages"),
    [
        ("broadcast", [1.0, 1.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]),
        ("split", [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, -0.25, -0.25]),
        ("last", [0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, -0.5]),
    ],
)
async def test_what_each_row_of_a_trajectory_gets(
    recording: Recording, clients: Clients, credit: Any, rewards: Any, advantages: Any
):
    """Advantages are relative to trajectories, never to rows."""
    rows = to_token_rows(await play(clients, [1.0, 0.0]), credit=credit)
    assert [row["reward"] for row in rows] == rewards
    assert [row["advantage"] for row in rows] == advantages


async def nested(clients: Clients, rewards: list[float]) -> TrajectoryGroup:
    """A group of agents with a call each, a sub-agent with two conversations, and one in that."""
    client = clients.asynchronous(clients.serve("hello"))

    async def say(text: str) -> None:
        message: Any = {"role": "user", "content": text}
        await client.chat.completions.create(model="m", messages=[message])

    @rollout
    async def inner() -> None:
        await say("inner")

    @rollout
    async def helper() -> None:
        await say("helper one")
        await inner()
        await say("helper two")
        record_reward(-7.0)

    @rollout
    async def agent(reward: float) -> None:
        await say("agent")
        await helper()
        await gather_group([helper()])  # compared in a group of its own
        record_reward(reward)

    return await gather_group([agent(r) for r in rewards], group_id="g")


async def test_what_nested_rollouts_sampled_is_told(recording: Recording, clients: Clients):
    """A group knows the rollouts that ran inside its members; without rows, they are listed."""
    group = await nested(clients, [1.0, 0.0])
    assert sorted(child.name for child in group.children) == ["helper", "helper", "inner", "inner"]
    rows = to_token_rows(group)
    assert [row["name"] for row in rows] == ["agent", "agent"]
    assert {child.id for child in rows.children} == {child.id for child in group.children}
    assert TrajectoryGroup.from_dict(group.to_dict()) == group
    read = TrajectoryGroup.by_id(reconstruct(recording.spans), children=True)
    found = next(other for other in read if other.id == "g")
    assert {child.id for child in found.children} == {child.id for child in group.children}
    assert len(read) == 3  # with the two groups of one helper each


@pytest.mark.parametrize(
    ("credit", "rewards"),
    [
        ("broadcast", [1.0, 1.0, 1.0, 1.0]),
        ("split", [0.25, 0.25, 0.25, 0.25]),
        ("last", [1.0, 0.0, 0.0, 0.0]),
    ],
)
async def test_rows_of_nested_rollouts(
    recording: Recording, clients: Clients, credit: Any, rewards: list[float]
):
    """They train with the reward and advantage of the member that they ran inside."""
    group = await nested(clients, [1.0, 0.0])
    rows = to_token_rows(group, include_children=True, credit=credit)
    assert rows.children == []
    assert [row["name"] for row in rows] == ["agent", "helper", "helper", "inner"] * 2
    assert [row["reward"] for row in rows[:4]] == rewards
    assert [row["advantage"] for row in rows[:4]] == [0.5 * reward for reward in rewards]
    agent, helper = rows[0], rows[1]
    assert agent["parent_id"] is None
    assert helper["parent_id"] == agent["trajectory_id"]
    assert rows[3]["parent_id"] == helper["trajectory_id"]
    assert {row["group_id"] for row in rows} == {group.key}
    trained = [id_ for row in rows for id_ in row["completion_ids"]]
    assert len(trained) == len(set(trained)) == 8


def test_children_need_a_group():
    """Of a list it is not known which trajectories are compared and which are inside them."""
    with pytest.raises(ValueError, match="TrajectoryGroup"):
        to_token_rows([Trajectory(id="a")], include_children=True)


def test_parents_in_a_circle_are_no_parents():
    """Trajectories that name each other as parents, as spans may, are groups of their own."""
    circle = [Trajectory(id="a", parent_id="b"), Trajectory(id="b", parent_id="a")]
    groups = TrajectoryGroup.by_id(circle, children=True)
    assert [[t.id for t in group] for group in groups] == [["a"], ["b"]]


async def test_rows_name_their_history(recording: Recording, clients: Clients):
    """`history` is the place in `trajectory.histories` of the conversation of the row."""
    group = await play(clients, [1.0])
    for row in to_token_rows(group):
        history = group[0].histories[row["history"]]
        assert history.completion_ids[-1] == row["completion_ids"][-1]
    assert [row["history"] for row in to_token_rows(group)] == [1, 0]


async def test_rows_say_what_they_dropped(recording: Recording, clients: Clients):
    """What is in no row is in `dropped`, with the reason, for each trajectory."""
    client = clients.asynchronous(clients.serve("hello", token_ids=False))

    @rollout
    async def agent() -> None:
        message: Any = {"role": "user", "content": "x"}
        await client.chat.completions.create(model="m", messages=[message])

    group = await gather_group([agent(), agent()])
    with pytest.warns(EmptyRowsWarning, match="2 x the server sends token ids to those who ask"):
        rows = to_token_rows(group)
    assert rows == []
    assert [d.completion and d.completion.id for d in rows.dropped] == [
        t.completions[0].id for t in group
    ]
    assert all("token ids" in d.reason for d in rows.dropped)


async def test_failures_of_a_group_are_said(recording: Recording, clients: Clients):
    """They are in no row, and not silently so; kept, they have rows that nothing compares."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def inner() -> None:
        message: Any = {"role": "user", "content": "x"}
        await client.chat.completions.create(model="m", messages=[message])

    @rollout
    async def agent(fails: bool) -> None:
        await inner()
        message: Any = {"role": "user", "content": "y"}
        await client.chat.completions.create(model="m", messages=[message])
        if fails:
            raise ValueError("no")
        record_reward(1.0)

    group = await gather_group([agent(False), agent(True)])
    (failed,) = group.failures
    (own,) = failed.completions
    for nested, names in ((False, ["agent"]), (True, ["agent", "inner"])):
        rows = to_token_rows(group, include_children=nested)
        assert [row["name"] for row in rows] == names
        assert [d.completion and d.completion.id for d in rows.dropped] == [own.id]
        assert "its rollout failed and has no reward" in rows.dropped[0].reason
        assert failed.id in [child.parent_id for child in rows.children]
        assert len(rows.children) == (1 if nested else 2)
    kept = to_token_rows(group, on_failure="keep", include_children=True)
    assert [row["name"] for row in kept] == ["agent", "inner"] * 2
    assert [row["advantage"] for row in kept] == [None] * 4
    assert (kept.dropped, kept.children) == ([], [])
    assert [d.completion and d.completion.id for d in TokenRows().dropped(group)] == [own.id]


async def play_episodes(clients: Clients) -> list[Episode]:
    """Two tasks, two samples each: a solver and a judge with rewards, one run out of its turns."""
    client = clients.asynchronous(clients.serve("hello"))

    async def say(text: str) -> None:
        message: Any = {"role": "user", "content": text}
        await client.chat.completions.create(model="m", messages=[message])

    @rollout
    async def solver(reward: float) -> None:
        await say("solve")
        record_reward(reward)

    @rollout
    async def judge(reward: float) -> None:
        await say("judge")
        record_reward(reward)

    rewards = iter([(1.0, 3.0), (0.0, 1.0), (5.0, 0.0), (2.0, 2.0)])

    class SolverJudge(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            of_solver, of_judge = next(rewards)
            await solver(of_solver)
            await judge(of_judge)
            if uid == "a:1":
                raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
            raise TerminationEvent(TerminationReason.ENV_DONE)

    tasks = [{"id": "a"}, {"id": "b"}]
    return await run_workflows(SolverJudge, tasks, n_samples=2, n_parallel=1)


GROUPS = ["a:solver", "a:judge"] * 2 + ["b:solver", "b:judge"] * 2
ADVANTAGES = [0.5, 1.0, -0.5, -1.0, 1.5, -1.0, -1.5, 1.0]
"""By hand: solvers of a have 1 and 0, its judges 3 and 1, solvers of b 5 and 2, judges 0 and 2."""


async def test_rows_of_episodes(recording: Recording, clients: Clients):
    """Compared are the trajectories of one task and one name."""
    episodes = await play_episodes(clients)
    rows = to_token_rows(episodes)
    assert [row["group_id"].partition("@")[0] for row in rows] == GROUPS
    assert len({row["group_id"] for row in rows}) == 4
    assert [row["advantage"] for row in rows] == ADVANTAGES
    assert rows.masked == []
    scaled = to_token_rows(iter(episodes), scale_advantages=True)
    signs = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    assert [row["advantage"] for row in scaled] == pytest.approx(signs, abs=1e-5)
    trajectories = recording.trajectories
    assert [t.group_id for t in trajectories] == GROUPS
    assert [t.sample_index for t in trajectories] == [0, 0, 1, 1] * 2
    groups = TrajectoryGroup.by_id(trajectories)
    assert [group.advantages() for group in groups] == [[0.5, -0.5], [1, -1], [1.5, -1.5], [-1, 1]]
    with pytest.warns(NoAdvantageWarning, match="each is the only one of its group"):
        alone = to_token_rows(episodes[0])
    assert [row["advantage"] for row in alone] == [None, None]


async def grouped(clients: Clients, options: dict[str, Any]) -> list[Episode]:
    """Two runs of one task: a solver, a judge with a group of its own, and one built by hand."""
    client = clients.asynchronous(clients.serve("hello"))

    async def agent(name: str, reward: float, group_id: str | None = None) -> None:
        async with rollout(name, group_id=group_id):
            message: Any = {"role": "user", "content": "hi"}
            await client.chat.completions.create(model="m", messages=[message])
            record_reward(reward)

    class Mixed(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            await agent("solver", task)
            await agent("judge", 2 * task, "judges")
            messages: Any = [{"role": "user", "content": "by hand"}]
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            built = Trajectory(name="built", steps=[Step(chat_completions=messages, reward=task)])
            self.commit(trajectory=built)

    return [
        await Mixed().run_with_termination_handling(n, f"task:{n}", options=options)
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("options", "group"), [({}, "task"), ({"task_id": "t:9"}, "t:9"), ({"group_id": "g1"}, "g1")]
)
async def test_a_group_has_one_name_everywhere(
    recording: Recording, clients: Clients, tmp_path: Path, options: dict[str, Any], group: str
):
    """Live, rebuilt from spans, in rows of episodes and in exported rows; and equal advantages."""
    episodes = await grouped(clients, options)
    named = {"solver": f"{group}:solver", "judge": "judges", "built": f"{group}:built"}
    advantages = {"solver": [-0.5, 0.5], "judge": [-1.0, 1.0], "built": [-0.5, 0.5]}

    def check(rows: Any) -> None:
        assert {row["name"]: row["group_id"] for row in rows} == named
        for name, expected in advantages.items():
            found = sorted(row["advantage"] for row in rows if row["name"] == name)
            assert found == expected

    rebuilt = [t for t in reconstruct(recording.spans) if t.name in named]
    for trajectories in ([t for e in episodes for t in e.trajectories], rebuilt):
        assert {t.name: t.group_id for t in trajectories} == named
        groups = TrajectoryGroup.by_id(trajectories)
        assert sorted((len(g), g.id) for g in groups) == sorted((2, id_) for id_ in named.values())
        check([row for g in groups for row in to_token_rows(g)])
    check(to_token_rows(episodes))
    check(to_token_rows(reconstruct_episodes(recording.spans)))
    check(to_token_rows([Episode.from_dict(episode.to_dict()) for episode in episodes]))
    spans = tmp_path / "spans.jsonl"
    spans.write_text("".join(to_json_line([span]) for span in recording.spans))
    assert main(["export", "--to", "tokens", str(spans), "-o", str(tmp_path / "rows")]) == 0
    exported = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    check([row for row in exported if row["name"] in named])


async def test_episodes_whose_trajectories_have_no_group(recording: Recording, clients: Clients):
    """Those that were recorded before runs had a group are grouped by task and name."""
    written = [episode.to_dict() for episode in await play_episodes(clients)]
    for trajectory in (t for episode in written for t in episode["contents"]):
        trajectory["group_id"] = None
    episodes = [Episode.from_dict(episode) for episode in written]
    rows = to_token_rows(episodes)
    assert [row["group_id"] for row in rows] == GROUPS
    assert [row["advantage"] for row in rows] == ADVANTAGES


@pytest.mark.parametrize("reason", [TerminationReason.MAX_TURNS_EXCEEDED, "max_turns_exceeded"])
async def test_episodes_that_are_masked(recording: Recording, clients: Clients, reason: Any):
    """They give no rows and are named; what they got still counts in the mean of their group."""
    episodes = await play_episodes(clients)
    rows = to_token_rows(episodes, mask_reasons={reason, TerminationReason.TIMEOUT})
    assert rows.masked == episodes[1].trajectories
    left = [0, 1, 4, 5, 6, 7]
    assert [row["group_id"].partition("@")[0] for row in rows] == [
        GROUPS[number] for number in left
    ]
    assert [row["advantage"] for row in rows] == [ADVANTAGES[number] for number in left]
    assert to_token_rows(episodes, mask_reasons=list(TerminationReason)) == []


async def test_trajectories_that_are_masked(recording: Recording, clients: Clients):
    """Of a group those that themselves ended so."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent(reward: float) -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        record_reward(reward)
        if not reward:
            raise TimeoutError

    group = await gather_group([agent(reward) for reward in (4.0, 0.0)])
    assert [row["advantage"] for row in to_token_rows(group)] == [2.0, -2.0]
    rows = to_token_rows(group, mask_reasons=["timeout"])
    assert [row["advantage"] for row in rows] == [2.0]
    assert rows.masked == [group[1]]


async def test_trajectories_of_a_file_are_compared_by_their_group(
    recording: Recording, clients: Clients
):
    """A mixed list has the advantages of its groups, and so has a list of groups."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent(reward: float | None) -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        if reward is not None:
            record_reward(reward)

    await gather_group([agent(3.0), agent(1.0), agent(None)], group_id="g")
    await gather_group([agent(0.0), agent(0.5)], group_id="h")
    await agent(7.0)
    read = [Trajectory.from_json(each.to_json()) for each in recording.trajectories]
    read.sort(key=lambda each: (each.group_id or "z", each.sample_index or 0))
    mixed = [read[place] for place in (3, 0, 5, 1, 4, 2)]
    expected = {
        read[place].id: value for place, value in enumerate([1.0, -1.0, None, -0.25, 0.25, None])
    }
    for source in (mixed, iter(mixed), TrajectoryGroup.by_id(mixed)):
        rows = to_token_rows(source)
        assert {row["trajectory_id"]: row["advantage"] for row in rows} == expected
    with pytest.warns(
        NoAdvantageWarning, match=r"2 trajectories have a reward.*1 have no group_id"
    ):
        assert len(to_token_rows([read[0], read[5]])) == 2


def test_a_wrong_reason_is_named():
    """What there is is said."""
    with pytest.raises(ConfigurationError, match=r"expected some of .*timeout.*, got 'late'"):
        to_token_rows([], mask_reasons=["late"])


async def test_unknown_rewards_stay_unknown(recording: Recording, clients: Clients):
    """A trajectory that nobody scored has neither reward nor advantage."""
    rows = to_token_rows(await play(clients, [None, 2.0]))
    assert [row["reward"] for row in rows] == [None, None, 2.0, 2.0]
    assert [row["advantage"] for row in rows] == [None] * 4


def test_a_wrong_credit_is_named():
    """What was expected is said."""
    wrong: Any = "all"
    with pytest.raises(ConfigurationError, match="expected 'broadcast', 'split' or 'last'"):
        to_token_rows([], credit=wrong)


async def test_the_exporter_that_is_always_there(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """`tokens` is found by its name, and writes the same rows."""
    exporter = row_exporter("tokens", credit="split", max_length=4)
    assert isinstance(exporter, RowExporter)
    group = await play(clients, [1.0])
    rows = list(exporter.rows(group))
    with pytest.warns(EmptyRowsWarning, match="2 x beyond … tokens"):
        assert rows == to_token_rows(group, credit="split", max_length=4)
    lines = tmp_path / "rows.part"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exporter.finish(lines, tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert not lines.exists()


async def test_failed_rollouts_only_if_asked_for(recording: Recording, clients: Clients):
    """`on_failure=keep` gives the rows of rollouts that failed without a reward."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        raise ValueError("no")

    failed = TrajectoryGroup.of([await gather_trajectory(agent(), raise_errors=False)])
    assert list(row_exporter("tokens").rows(failed)) == []
    (row,) = row_exporter("tokens", on_failure="keep").rows(failed)
    assert row["reward"] is None
    assert not any(math.isnan(value) for value in row["logprobs"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x" * 9, {}, "there is no exporter 'xxxxxxxxx': installed are .*tokens; .* art, .*verl"),
        ("trl", {}, r"; in a clone, .* --find-links dist 'otel-rollout-exporter-trl'\Z"),
        ("tlr", {}, r"; is it 'trl' \(.*dist 'otel-rollout-exporter-trl'\)\?\Z"),
        ("token", {}, r"; is it 'tokens'\?\Z"),
        ("tokens", {"colour": "red"}, "exporter 'tokens': .*colour"),
    ],
)
def test_what_is_not_there_is_named(name: str, options: dict[str, Any], message: str):
    """An unknown exporter is said with those that are installed, and the way to get it."""
    with pytest.raises(ConfigurationError, match=message):
        row_exporter(name, **options)


def test_every_distribution_is_named():
    """The ones that a message tells how to install are those that there are."""
    folders = (ROOT / "exporters").glob("*/pyproject.toml")
    assert sorted(OURS) == sorted(folder.parent.name for folder in folders)


class Given(JsonRows):
    """An exporter of a user's, with one row whose field `extra` is given."""

    extra: Any = None

    def rows(self, group: TrajectoryGroup) -> list[dict[str, Any]]:
        return [{"id": 1, "extra": self.extra}]


def line_with(extra: Any) -> bytes:
    with rollout("agent") as trajectory:
        pass
    exporter = Given()
    exporter.__dict__["extra"] = extra
    items = [item_of(trajectory)[1]]
    return b"".join(rows_of(items, exporter, Tally(), print, strict=True))


@pytest.mark.parametrize("extra", [b"x", {1}, date(2026, 1, 1), [{"a": ([1], b"x")}]])
def test_what_is_no_json_is_an_error_that_names_the_field(recording: Recording, extra: Any):
    with pytest.raises(ExportError, match=r"field 'extra' of a row: expected JSON .* got "):
        line_with(extra)


def test_what_is_json_is_written(recording: Recording):
    extra = OrderedDict(a=(1, math.nan, None, True), b=[{"c": "\ud800"}, 1.5, []])
    said = {"a": [1, None, None, True], "b": [{"c": "\ud800"}, 1.5, []]}
    assert json.loads(line_with(extra)) == {"id": 1, "extra": said}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(st.integers() | st.integers(2**31, 2**70))
            | st.lists(st.floats())
            | st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(), inner)
        ),
    )
)
def test_portable_json_has_no_nan(value: Any):
    """Null stands for each NaN and infinity, in long lists of numbers too; all else is kept."""
    expected = json.loads(json.dumps(value), parse_constant=lambda _: None)
    assert repr(portable(value)) == repr(expected)


@pytest.mark.parametrize(
    ("wrong", "hint"), [("max_len", "; did you mean 'max_length'?"), ("zzz", "")]
)
def test_an_option_that_is_none(wrong: str, hint: str):
    """An option that neither the rows nor token sequences have is named, with the closest one."""
    options: Any = {wrong: 3}
    with pytest.raises(ConfigurationError, match=re.escape(f"no option {wrong!r}{hint}") + "$"):
        to_token_rows([], **options)


def test_groups_of_what_are_no_trajectories():
    """`by_id` names what is no trajectory."""
    with pytest.raises(ConfigurationError, match="by_id: expected trajectories, got 'a'"):
        TrajectoryGroup.by_id(["a"])  # type: ignore[list-item]
