"""Datums and transitions on Tinker's own classes: each sampled token trains once, as sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from otel_rollout_tinker import (
    TinkerRows,
    to_datum,
    to_tinker_data,
    to_tinker_group,
    to_tinker_trajectory,
)
from tinker_cookbook.rl.data_processing import (
    assemble_training_data,
    compute_advantages,
    trajectory_to_data,
)

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Reward,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.export import row_exporter, row_exporter_from_texts
from otel_rollout.testing import ModelServer, Reply, ToolCall

pytestmark = pytest.mark.trainer

Agent = Callable[[Any], Awaitable[Any]]
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def say(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Message:
    """One call; the reply as the client replays it."""
    completion = await client.chat.completions.create(model="m", messages=messages, **options)
    message: Message = completion.choices[0].message.model_dump(exclude_none=True)
    return message


async def linear(client: openai.AsyncOpenAI) -> None:
    """A tool is called, and its result answered."""
    messages = [user("what is 2+2?")]
    messages.append(await say(client, messages))
    messages.append({"role": "tool", "tool_call_id": "c", "content": "4"})
    messages.append(await say(client, messages))
    await say(client, [*messages, user("sure?")])


async def drifted(client: openai.AsyncOpenAI) -> None:
    """The second request holds another reply than was sampled."""
    await say(client, [user("one")])
    await say(client, [user("one"), {"role": "assistant", "content": "edited"}, user("two")])


async def forked(client: openai.AsyncOpenAI) -> None:
    """Two go on from the same reply."""
    messages = [user("one")]
    messages.append(await say(client, messages))
    await say(client, [*messages, user("two")])
    await say(client, [*messages, user("three")])


async def interleaved(client: openai.AsyncOpenAI) -> None:
    """Two conversations take turns."""
    first, second = [user("the agent")], [user("a sub-agent")]
    for _ in range(3):
        for messages in (first, second):
            messages.append(await say(client, messages))
            messages.append(user("go on"))


async def silent(client: openai.AsyncOpenAI) -> None:
    """The model is never asked."""


AGENTS: list[Agent] = [linear, drifted, forked, interleaved]
ROWS: dict[Agent, int] = {linear: 1, drifted: 2, forked: 2, interleaved: 2}


def replies(body: dict[str, Any]) -> Reply:
    if body["messages"][-1]["content"] == "what is 2+2?":
        return Reply(tool_calls=[ToolCall("add", '{"a": 2, "b": 2}')])
    text = body["messages"][-1]["content"]
    return Reply(f"reply to {text}", finish_reason="length" if text == "more" else None)


async def run(
    clients: Clients, agent: Agent, reward: float | None = 1.0, reply: Any = replies, **options: Any
) -> Trajectory:
    client = clients.asynchronous(clients.serve(reply, **options))

    @rollout
    async def agent_under_test() -> None:
        await agent(client)
        if reward is not None:
            record_reward(reward)

    return await gather_trajectory(agent_under_test())


async def run_group(clients: Clients, agent: Agent, rewards: list[float | None]) -> TrajectoryGroup:
    client = clients.asynchronous(clients.serve(replies))

    @rollout
    async def agent_under_test(reward: float | None) -> None:
        await agent(client)
        if reward is not None:
            record_reward(reward)

    return await gather_group([agent_under_test(reward) for reward in rewards], group_id="g")


def plain(datum: tinker.Datum) -> dict[str, Any]:
    """What is in a datum, as lists."""
    inputs = {name: values.data for name, values in datum.loss_fn_inputs.items()}
    return {"model_input": datum.model_input.to_ints(), **inputs}


@pytest.mark.parametrize("agent", AGENTS)
async def test_datums_are_token_sequences_shifted_by_one(
    recording: Recording, clients: Clients, agent: Agent
):
    """Each position has the next token as target, and its mask, log-probability and advantage."""
    trajectory = await run(clients, agent)
    data = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[0.5])
    rows = trajectory.token_sequences()
    assert len(data) == len(rows) == ROWS[agent]
    for datum, row in zip(data, rows, strict=True):
        values = plain(datum)
        assert values["model_input"] == row.token_ids[:-1]
        assert values["target_tokens"] == row.token_ids[1:]
        assert values["mask"] == row.loss_mask[1:]
        assert values["advantages"] == [0.5 * trained for trained in row.loss_mask[1:]]
        sampled = zip(row.logprobs, row.loss_mask, strict=True)
        assert values["logprobs"] == [value * trained for value, trained in sampled][1:]
        dtypes = {name: value.dtype for name, value in datum.loss_fn_inputs.items()}
        assert dtypes == {
            "target_tokens": "int64",
            "logprobs": "float32",
            "advantages": "float32",
            "mask": "float32",
        }
    trained = sum(sum(plain(datum)["mask"]) for datum in data)
    assert trained == sum(len(c.token_ids or ()) for c in trajectory.completions) > 0


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_cookbook_makes_the_same_datums(
    recording: Recording, clients: Clients, agent: Agent
):
    """`trajectory_to_data` merges our transitions into exactly our datums."""
    trajectory = await run(clients, agent)
    theirs = trajectory_to_data(to_tinker_trajectory(trajectory), 0.5)
    ours = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[0.5])
    assert [plain(datum) for datum in theirs] == [plain(datum) for datum in ours]


@pytest.mark.parametrize("agent", agents.AGENTS)
async def test_every_admitted_token_trains_once(
    recording: Recording, clients: Clients, agent: Agent
):
    """In ours and the cookbook's, whatever the agent does."""
    trajectory = await agents.play(clients, agent)
    rows = trajectory.token_sequences()
    dropped = {id(drop.completion) for drop in rows.dropped}
    admitted = [c for c in trajectory.completions if id(c) not in dropped]
    data = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[0.5])
    trained = sum(sum(plain(datum)["mask"]) for datum in data)
    assert trained == sum(len(c.token_ids or ()) for c in admitted) > 0
    theirs = trajectory_to_data(to_tinker_trajectory(trajectory), 0.5)
    assert [plain(datum) for datum in theirs] == [plain(datum) for datum in data]


@pytest.mark.parametrize("seed", range(4))
async def test_conversations_of_any_shape(recording: Recording, clients: Clients, seed: int):
    """Going on, going back, dropping and editing, at random: the same datums, each token once."""
    choose, numbers = random.Random(seed), itertools.count()

    async def wander(client: openai.AsyncOpenAI) -> None:
        conversations = [[user("start")]]
        for _ in range(15):
            messages = list(choose.choice(conversations))
            if choose.random() < 0.3:
                del messages[choose.randrange(1, len(messages) + 1) :]
            if choose.random() < 0.1:
                messages[-1] = {**messages[-1], "content": "edited"}
            messages.append(user(choose.choice("abc")))
            messages.append(await say(client, messages))
            conversations.append(messages)

    trajectory = await run(clients, wander, reply=lambda _: Reply(f"reply {next(numbers)}"))
    data = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[0.5])
    assert 1 < len(data) < 15
    trained = sum(sum(plain(datum)["mask"]) for datum in data)
    assert trained == sum(len(c.token_ids or ()) for c in trajectory.completions)
    theirs = trajectory_to_data(to_tinker_trajectory(trajectory), 0.5)
    assert [plain(datum) for datum in theirs] == [plain(datum) for datum in data]


async def test_a_conversation_by_hand(recording: Recording, clients: Clients):
    """The numbers of the smallest datum: two prompt tokens, two sampled."""
    trajectory = await run(clients, lambda client: say(client, [user("")]), reply=Reply("A"))
    (datum,) = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[-2.0])
    (completion,) = trajectory.completions
    assert completion.prompt_token_ids == [257, 261, 258]
    assert completion.token_ids == [65, 261]
    assert plain(datum) == {
        "model_input": [257, 261, 258, 65],
        "target_tokens": [261, 258, 65, 261],
        "mask": [0.0, 0.0, 1.0, 1.0],
        "advantages": [0.0, 0.0, -2.0, -2.0],
        "logprobs": [0.0, 0.0, *(completion.logprobs or ())],
    }


async def test_rewards_and_ends_of_transitions(recording: Recording, clients: Clients):
    """The reward counts once, on the transition that ends the episode; step rewards are metrics."""
    client = clients.asynchronous(clients.serve(replies))

    @rollout
    async def agent(cut: bool) -> None:
        await forked(client)
        if cut:
            await say(client, [user("more")], max_tokens=3)

    trajectories = [await gather_trajectory(agent(cut)) for cut in (False, True)]
    for trajectory, stop in zip(trajectories, ("completed", "max_tokens"), strict=True):
        trajectory.reward = 0.25
        first = trajectory.completions[0]
        trajectory.add_reward(Reward(0.125, completion_id=first.id))
        made = to_tinker_trajectory(trajectory)
        ends = [transition.episode_done for transition in made.transitions]
        assert ends == [False] * (len(ends) - 1) + [True]
        assert [t.reward for t in made.transitions] == [0.0] * (len(ends) - 1) + [0.25]
        assert made.transitions[0].metrics["step_reward"] == 0.125
        assert made.stop_reason == stop
        assert made.transitions[-1].metrics[f"stop/{stop}"] == 1.0
        assert made.transitions[-1].ac.stop_reason == ("length" if stop != "completed" else "stop")
        logged = [transition.logs["completion_id"] for transition in made.transitions]
        assert sorted(map(str, logged)) == sorted(c.id for c in trajectory.completions)


async def test_groups_have_the_cookbooks_advantages(recording: Recording, clients: Clients):
    """Its centring, on our group, is ours; its data are ours, row for row."""
    group = await run_group(clients, interleaved, [1.0, 0.0, 0.5])
    theirs = to_tinker_group(group)
    assert theirs.get_total_rewards() == [1.0, 0.0, 0.5]
    (advantages,) = compute_advantages([theirs])
    assert advantages.tolist() == group.advantages()
    data, _ = assemble_training_data([theirs], [advantages])
    assert [plain(datum) for datum in data] == [plain(datum) for datum in to_tinker_data(group)]


async def test_failures_are_errors_of_the_group(recording: Recording, clients: Clients):
    """A rollout that failed is no reward of zero: it is not in the baseline, and has no datum."""
    client = clients.asynchronous(clients.serve(replies))

    @rollout
    async def agent(fails: bool) -> None:
        await linear(client)
        if fails:
            raise ValueError("the database is gone")
        record_reward(1.0)

    group = await gather_group([agent(False), agent(True), agent(False)])
    made = to_tinker_group(group)
    assert len(made.trajectories_G) == 2
    (error,) = made.rollout_errors
    assert error.error_type == "ValueError"
    assert error.error_message == "the database is gone"
    assert len(to_tinker_data(group)) == 2


async def test_what_is_not_scored_is_refused(recording: Recording, clients: Clients):
    """No reward is not zero: it is an error, or left out and in no baseline."""
    group = await run_group(clients, linear, [1.0, None, 0.0])
    unscored = group[1]
    for export in (to_tinker_data, to_tinker_group, lambda g: list(TinkerRows().rows(g))):
        with pytest.raises(ExportError, match=f"{unscored.id}.*no reward.*record_reward"):
            export(group)
    with pytest.raises(ExportError, match="no reward"):
        to_tinker_trajectory(unscored)
    data = to_tinker_data(group, unscored="drop")
    assert [max(plain(d)["advantages"], key=abs) for d in data] == [0.5, -0.5]
    assert to_tinker_group(group, unscored="drop").get_total_rewards() == [1.0, 0.0]
    only = TrajectoryGroup([unscored])
    with pytest.raises(ExportError, match="nothing to compare"):
        to_tinker_group(only, unscored="drop")


async def test_advantages_of_ones_own(recording: Recording, clients: Clients):
    """They need no reward, None leaves one out, and there has to be one for each."""
    group = await run_group(clients, linear, [None, None])
    (datum,) = to_tinker_data(group, advantages=[None, 3.0])
    assert set(plain(datum)["advantages"]) == {0.0, 3.0}
    with pytest.raises(ExportError, match=r"expected one for each of the 2 trajectories.*got 1"):
        to_tinker_data(group, advantages=[1.0])


@pytest.mark.parametrize("export", [to_tinker_data, to_tinker_group])
async def test_unknown_log_probabilities_are_refused(
    recording: Recording, clients: Clients, export: Any
):
    """They are never 0: an error names the reply, or the reply is context."""
    server = clients.serve(replies, logprobs=False)
    client = clients.asynchronous(server)

    @rollout
    async def agent() -> None:
        messages = [user("one")]
        messages.append(await say(client, messages))
        await say(client, [*messages, user("two")], logprobs=True)
        record_reward(1.0)

    trajectory = await gather_trajectory(agent())
    unknown, known = trajectory.completions
    assert unknown.logprobs is None
    group = TrajectoryGroup([trajectory])
    with pytest.raises(ExportError, match=f"{unknown.id}.*log-probability.*unknown_logprobs"):
        export(group)
    made = export(group, unknown_logprobs="mask")
    data = made if isinstance(made, list) else trajectory_to_data(made.trajectories_G[0], 1.0)
    (datum,) = data
    values = plain(datum)
    sampled = len(known.token_ids or ())
    assert values["mask"] == [0.0] * (len(values["mask"]) - sampled) + [1.0] * sampled
    assert not np.isnan(values["logprobs"]).any()
    assert values["logprobs"][-sampled:] == known.logprobs


async def test_truncated_replies_keep_their_tokens(recording: Recording, clients: Clients):
    """No end of turn is invented; masked, the reply is context."""
    agent = lambda client: say(client, [user("go")])  # noqa: E731
    trajectory = await run(clients, agent, reply=Reply("and so", finish_reason="length"))
    (completion,) = trajectory.completions
    group = TrajectoryGroup([trajectory])
    (datum,) = to_tinker_data(group, advantages=[1.0])
    assert plain(datum)["target_tokens"][-6:] == completion.token_ids == list(b"and so")
    (transition,) = to_tinker_trajectory(trajectory).transitions
    assert transition.ac.stop_reason == "length"
    assert to_tinker_data(group, mask_truncated=True) == []
    (cut,) = to_tinker_data(group, advantages=[1.0], max_length=len(plain(datum)["mask"]) - 1)
    assert plain(cut)["target_tokens"][-4:] == list(b"and ")


async def test_rows_that_are_cut_are_cut_alike(recording: Recording, clients: Clients):
    """Of a reply that a length limit of ours cut, the transition has what is left."""
    trajectory = await run(clients, linear)
    (row,) = trajectory.token_sequences()
    limit = len(row) - 3
    made = to_tinker_trajectory(trajectory, max_length=limit)
    assert made.transitions[-1].ac.stop_reason == "length"
    theirs = trajectory_to_data(made, 1.0)
    ours = to_tinker_data(TrajectoryGroup([trajectory]), advantages=[1.0], max_length=limit)
    assert [plain(datum) for datum in theirs] == [plain(datum) for datum in ours]
    assert len(plain(ours[0])["mask"]) == limit - 1


async def test_a_rollout_without_a_call_counts_and_trains_nothing(
    recording: Recording, clients: Clients
):
    """It is one empty transition: its reward is in the baseline, and it makes no datum."""
    trajectory = await run(clients, silent, reward=0.5)
    made = to_tinker_trajectory(trajectory)
    (transition,) = made.transitions
    assert (transition.reward, transition.episode_done) == (0.5, True)
    assert trajectory_to_data(made, 1.0) == []
    assert to_tinker_data(TrajectoryGroup([trajectory]), advantages=[1.0]) == []


async def test_pictures_do_not_train(recording: Recording, clients: Clients):
    """Token ids hold placeholders where they stand: no datum, and the reason once."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}
    trajectory = await run(clients, lambda client: say(client, [message]), reply=Reply("a dot"))
    assert trajectory_to_data(to_tinker_trajectory(trajectory), 1.0) == []
    trajectory.reward = 1.0
    group = TrajectoryGroup([trajectory])
    assert to_tinker_data(group) == []
    (drop,) = row_exporter("tinker").dropped(group)  # type: ignore[attr-defined]
    assert "has image_url, for which its token ids are placeholders" in drop.reason


async def test_the_file_exporter(recording: Recording, clients: Clients, tmp_path: Path):
    """Rows survive JSON, and are the same datums again."""
    group = await run_group(clients, forked, [1.0, 0.0, None])
    exporter = row_exporter_from_texts("tinker", {"unscored": "drop", "scale_advantages": "True"})
    lines = tmp_path / "rows.part"
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in exporter.rows(group))
    lines.write_text(text)
    exporter.finish(lines, tmp_path / "data.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    read = [plain(to_datum(row)) for row in rows]
    data = to_tinker_data(group, unscored="drop", scale_advantages=True)
    assert read == [plain(datum) for datum in data]
    assert len(rows) == 4
    assert {row["group_id"].partition("@")[0] for row in rows} == {"g"}
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert rows[0]["trajectory_id"] == group[0].id


def test_wrong_options_are_named():
    """What was expected is said."""
    with pytest.raises(ConfigurationError, match="unscored: expected 'error' or 'drop', got 'no'"):
        row_exporter_from_texts("tinker", {"unscored": "no"})
    with pytest.raises(ConfigurationError, match="unknown_logprobs: expected 'error' or 'mask'"):
        row_exporter_from_texts("tinker", {"unknown_logprobs": "zero"})
    with pytest.raises(ConfigurationError, match="colour"):
        row_exporter("tinker", colour="red")


def test_tinker_is_imported_only_when_it_is_needed():
    """Rows are made without it: a machine that only exports does not need the trainer."""
    code = (
        "import sys, otel_rollout_tinker as t\n"
        "from otel_rollout import TrajectoryGroup\n"
        "assert list(t.TinkerRows().rows(TrajectoryGroup([]))) == []\n"
        "assert not {'tinker', 'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_readme_runs(recording: Recording, capsys: pytest.CaptureFixture[str]):
    """Its code, as it stands."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = (block.split("```")[0] for block in text.split("```python\n")[1:])
    with ModelServer(token_ids=True, logprobs=True) as server:
        scope = {"client": openai.AsyncOpenAI(base_url=server.base_url, api_key="k")}
        exec(code, scope)
        asyncio.run(scope["main"]())  # type: ignore[operator]
    assert "4 datums" in capsys.readouterr().out
