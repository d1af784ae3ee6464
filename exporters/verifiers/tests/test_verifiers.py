"""The branches of verifiers' real traces are our token sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from otel_rollout_verifiers import to_trace, to_trace_record
from verifiers.v1 import graph
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects.chat import parse_message, parse_tools
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask, WireTrace
from verifiers.v1.types import Response, TurnTokens

from exporters.kit.agents import (
    AGENTS,
    TOOLS,
    Agent,
    ask,
    chain,
    choices,
    failing_calls,
    forgetful,
    fork,
    play,
    play_group,
    run_readme,
    titled,
    tool_loop,
    truncated,
    user,
)
from exporters.kit.recording import Clients, Recording
from otel_rollout import ExportError, Reward, Trajectory, gather_trajectory, rollout
from otel_rollout.export import row_exporter
from otel_rollout.testing import Reply

pytestmark = pytest.mark.trainer


def committed(trajectory: Trajectory) -> WireTrace:
    """What verifiers' own graph makes of the same calls."""
    trace = WireTrace(
        task=TraceTask(type="t", data=WireTaskData()),
        agent=AgentInfo(config=WireAgentConfig()),
        state=State(),
    )
    for completion in trajectory.completions:
        if completion.status != "complete":
            continue
        prompt: list[Any] = [parse_message(m) for m in completion.request_messages]
        message: Any = parse_message(completion.message or {})
        turn = graph.prepare_turn(trace, prompt, parse_tools(completion.tools))
        turn.commit(
            Response(
                id=completion.id,
                created=0,
                model="m",
                message=message,
                finish_reason=None,
                tokens=TurnTokens(
                    prompt_ids=completion.prompt_token_ids or [],
                    completion_ids=completion.token_ids or [],
                    completion_logprobs=[value or 0.0 for value in completion.logprobs or ()],
                ),
            )
        )
    return trace


def branches(trace: Trace[Any, Any, Any]) -> list[tuple[list[int], list[bool], list[float]]]:
    return [(b.token_ids, b.sampled_mask, b.logprobs) for b in trace.branches]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_branches_are_our_rows(recording: Recording, clients: Clients, agent: Agent):
    """Ids, where the model sampled, and log-probabilities, in the same order."""
    trajectory = await play(clients, agent)
    rows = trajectory.token_sequences()
    assert branches(to_trace(trajectory)) == [
        (row.token_ids, [bool(s) for s in row.sampled], row.logprobs) for row in rows
    ]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_the_graph_is_the_one_that_verifiers_makes(
    recording: Recording, clients: Clients, agent: Agent
):
    """Node by node: parents, messages, tools, tokens, masks and log-probabilities."""
    trajectory = await play(clients, agent)
    ours, theirs = to_trace(trajectory).nodes, committed(trajectory).nodes
    what = {"parent", "message", "sampled", "tools", "token_ids", "mask", "logprobs"}
    assert [n.model_dump(include=what) for n in ours] == [
        n.model_dump(include=what) for n in theirs
    ]


async def test_a_shared_reply_is_stored_once(recording: Recording, clients: Clients):
    """A fork has one node for what both branches go on from."""
    trace = to_trace(await play(clients, fork))
    assert trace.num_branches == 2
    assert trace.num_turns == 3
    assert len(trace.nodes) == 6
    first, second = trace.branches
    assert first.nodes[:2] == second.nodes[:2]


async def test_reasoning_that_was_not_sent_back_forks(recording: Recording, clients: Clients):
    """The next call did not see those tokens: a branch of its own."""
    trace = to_trace(await play(clients, forgetful))
    assert trace.num_branches == 2
    assert trace.assistant_messages[0].reasoning_content == "let me see"


async def test_tools_and_calls(recording: Recording, clients: Clients):
    """Arguments are as they were sampled, tools on the root; calls know their nodes."""
    trace = to_trace(await play(clients, tool_loop))
    (call,) = trace.assistant_messages[0].tool_calls or []
    assert call.arguments == '{"a":  1, "b": "Zürich"}'
    (tool,) = trace.branches[0].tools
    assert (tool.type, tool.name) == ("function", "add")
    assert tool.parameters == TOOLS[0]["function"]["parameters"]
    assert [tool.name for tool in trace.tools] == ["add"]
    assert [trace.nodes[c.node or 0].sampled for c in trace.calls] == [True, True]
    assert [c.finish_reason for c in trace.calls] == ["tool_calls", "stop"]
    assert trace.calls[0].endpoint == "/chat/completions"


async def test_usage_is_counted_once(recording: Recording, clients: Clients):
    """Choices of one call share its usage."""
    trajectory = await play(clients, choices)
    usages = {c.span_id: c.usage for c in trajectory.completions}
    trace = to_trace(trajectory)
    assert len(trace.calls) == 3
    assert trace.usage is not None
    assert trace.usage.completion_tokens == sum(
        u["completion_tokens"] for u in usages.values() if u
    )


async def test_failed_calls_have_no_node(recording: Recording, clients: Clients):
    """They are calls with their error."""
    trace = to_trace(await play(clients, failing_calls))
    (failed,) = [c for c in trace.calls if c.node is None]
    assert failed.error is not None
    assert failed.error.status_code == 500
    assert trace.ok


async def test_side_calls_have_no_node(recording: Recording, clients: Clients):
    """They are calls of the trace, and no turns of its agent."""
    record = to_trace_record(await play(clients, titled))
    assert [call["node"] is None for call in record["calls"]] == [True, False, False]
    assert sum(node["sampled"] for node in record["nodes"]) == 2
    assert len(to_trace(await play(clients, titled)).branches) == 1


async def test_truncation_is_seen(recording: Recording, clients: Clients):
    """Verifiers sees that the last reply was cut."""
    assert to_trace(await play(clients, truncated)).is_truncated
    assert not to_trace(await play(clients, chain)).is_truncated


async def test_rewards_add_up_to_ours(recording: Recording, clients: Clients):
    """None is a reward that is not known; named ones count as they do for us."""
    trajectory = await play(clients, chain, reward=None)
    assert to_trace(trajectory).rewards == {"reward": None}
    trajectory.add_reward(Reward(0.5, name="style", weight=0.5))
    trajectory.add_reward(Reward(3.0, name="seen"))
    trace = to_trace(trajectory)
    assert trace.reward == trajectory.reward == 0.25
    assert {n: (r.score, r.weight) for n, r in trace.rewards.items() if r} == {
        "style": (0.5, 0.5),
        "seen": (3.0, 0.0),
    }
    trajectory.reward = 1.0
    trace = to_trace(trajectory)
    assert trace.reward == 1.0
    assert set(trace.rewards) == {"reward", "style", "seen"}
    trajectory.rewards["reward"] = 2.0
    with pytest.raises(ExportError, match="a reward named 'reward' beside its own"):
        to_trace(trajectory)


async def test_what_else_a_trace_knows(recording: Recording, clients: Clients):
    """Ids, metrics, metadata, times and what verifiers has no place for."""
    trajectory = await play(clients, chain, task_id="t", group_id="g", policy_version=7)
    trace = to_trace(trajectory)
    assert (trace.id, trace.task.type, trace.task.key) == (trajectory.id, "chain", "t")
    assert trace.task.data.id == "t"
    assert (trace.agent.name, trace.agent.trainable) == ("chain", True)
    assert trace.agent.config.model == "m"
    assert trace.info["otel_rollout"]["group_id"] == "g"
    assert trace.info["otel_rollout"]["policy_versions"] == [7]
    assert (trace.ok, trace.stop_condition) == (True, "agent_completed")
    assert 0 < sum(c.time.duration for c in trace.calls) <= trace.timing.agent.duration


async def test_failures_are_traces_that_do_not_train(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """The file has them in their place, with their error and their messages, without tokens."""
    group = await play_group(clients, [1.0, None, 0.0])
    exporter = row_exporter("verifiers")
    (tmp_path / "part").write_text(
        "".join(json.dumps(row, allow_nan=False) + "\n" for row in exporter.rows(group))
    )
    exporter.finish(tmp_path / "part", tmp_path / "traces.jsonl")
    lines = (tmp_path / "traces.jsonl").read_text().splitlines()
    traces = [WireTrace.model_validate_json(line) for line in lines]
    assert [trace.ok for trace in traces] == [True, False, True]
    assert [trace.rewards["reward"] is None for trace in traces] == [False, True, False]
    failed = traces[1]
    assert (failed.stop_condition, failed.errors[0].message) == ("error", "no")
    assert failed.num_turns == 2
    assert not any(any(branch.sampled_mask) for branch in failed.branches)
    expected = [row for t in group for row in t.token_sequences()]
    assert [branches(t)[0] for t in (traces[0], traces[2])] == [
        (row.token_ids, [bool(s) for s in row.sampled], row.logprobs) for row in expected
    ]


async def test_a_reply_without_ids_is_context_of_the_next(recording: Recording, clients: Clients):
    """Its node has no tokens; they stand with the reply behind it, masked."""
    servers = [clients.serve("one"), clients.serve("two", token_ids=False), clients.serve("three")]

    @rollout
    async def agent() -> None:
        messages: list[Any] = []
        for server in servers:
            messages.append(user("go on"))
            await ask(clients.asynchronous(server), messages)

    trajectory = await gather_trajectory(agent())
    (row,) = trajectory.token_sequences()
    trace = to_trace(trajectory)
    assert branches(trace) == [(row.token_ids, [bool(s) for s in row.sampled], row.logprobs)]
    assert [
        (n.sampled, bool(n.token_ids)) for n in trace.nodes if n.message.role == "assistant"
    ] == [
        (True, True),
        (True, False),
        (True, True),
    ]


async def test_models_share_nothing(recording: Recording, clients: Clients):
    """What one model goes on from that another said is context in a branch of its own."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        messages: list[Any] = [user("hi")]
        for model in ("small", "large"):
            made = await client.chat.completions.create(model=model, messages=messages)
            messages += [made.choices[0].message.model_dump(exclude_none=True), user("again")]

    trajectory = await gather_trajectory(agent())
    rows = trajectory.token_sequences()
    assert len(rows) == 2
    assert [ids for ids, _, _ in branches(to_trace(trajectory))] == [r.token_ids for r in rows]
    assert branches(to_trace(trajectory))[1][1] == [bool(s) for s in rows[1].sampled]


async def test_clocks_of_two_processes(recording: Recording, clients: Clients):
    """A reply that another process went on from may seem to have come later."""
    data = (await play(clients, chain)).to_dict()
    first, second = data["exchanges"]
    first["process"], second["process"] = "a", "b"
    second["start_time_ns"] = first["start_time_ns"] - 10**9
    trajectory = Trajectory.from_dict(data)
    (row,) = trajectory.token_sequences()
    assert trajectory.completions[0].id == row.completions[1].id
    (branch,) = branches(to_trace(trajectory))
    assert branch == (row.token_ids, [bool(s) for s in row.sampled], row.logprobs)


async def test_images_without_tokens(recording: Recording, clients: Clients):
    """Where nothing trains, images are carried; sound has no place at all."""
    client = clients.asynchronous(clients.serve("a cat", token_ids=False))
    image = {"type": "image_url", "image_url": {"url": "data:,cat"}}
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}

    @rollout
    async def agent(part: Any) -> None:
        await ask(client, [{"role": "user", "content": [part]}])

    trace = to_trace(await gather_trajectory(agent(image)))
    assert trace.nodes[0].message.model_dump()["content"] == [image]
    with pytest.raises(ExportError, match=r"type 'input_audio'.*text and images only"):
        to_trace(await gather_trajectory(agent(audio)))


async def test_what_it_cannot_carry_is_said(recording: Recording, clients: Clients):
    """No log-probabilities, audio, another API: refused, with what to do."""
    client = clients.asynchronous(clients.serve("hello", logprobs=False))
    other = clients.asynchronous(clients.serve(Reply("hello")))
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}

    @rollout
    async def without_logprobs() -> None:
        await ask(client, [user("hi")])

    @rollout
    async def listens() -> None:
        await ask(other, [{"role": "user", "content": [audio]}])

    @rollout
    async def responds() -> None:
        await other.responses.create(model="m", input="hi")

    for agent, reason in (
        (without_logprobs, "log-probability that is not known.*request_token_ids"),
        (listens, "type 'input_audio'.*text and images only"),
        (responds, "/chat/completions by .*got one of '/responses'"),
    ):
        with pytest.raises(ExportError, match=reason):
            to_trace_record(await gather_trajectory(agent()))


def test_the_readme_runs(recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example gives a trace with a branch that trains."""
    trace = run_readme(Path(__file__).parents[1], clients, monkeypatch)["trace"]
    assert trace.reward == 1.0
    assert any(trace.branches[0].sampled_mask)
