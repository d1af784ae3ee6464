"""Fine-tuning files, held against the documented shape of each of their lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from otel_rollout_openai import OpenaiRows, to_openai_dpo, to_openai_rft, to_openai_sft

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectory,
    get_current_trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.export import row_exporter_from_texts
from otel_rollout.otlp import read
from otel_rollout.testing import Reply, ToolCall

pytestmark = pytest.mark.trainer

_MESSAGE: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ChatCompletionMessageParam)
_TOOL: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ChatCompletionToolUnionParam)
_ALLOWED = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "refusal", "tool_calls", "weight"},
    "tool": {"role", "content", "tool_call_id"},
}


def check_messages(messages: Any) -> None:
    """A list of the client library's messages, with no key that the format does not have."""
    assert isinstance(messages, list)
    assert messages
    called: set[str] = set()
    for message in messages:
        assert set(message) <= _ALLOWED[message["role"]]
        assert None not in message.values()
        _MESSAGE.validate_python(message)
        if message["role"] == "assistant":
            assert {"content", "tool_calls", "refusal"} & set(message)
            for call in message.get("tool_calls", ()):
                assert set(call) == {"id", "type", "function"}
                assert set(call["function"]) == {"name", "arguments"}
                assert isinstance(call["function"]["arguments"], str)
                called.add(call["id"])
        if message["role"] == "tool":
            assert message["tool_call_id"] in called


def check_settings(row: Mapping[str, Any]) -> None:
    for tool in row.get("tools", ()):
        _TOOL.validate_python(tool)
    assert isinstance(row.get("parallel_tool_calls", True), bool)


def check_sft(row: Mapping[str, Any]) -> None:
    """A line of a supervised file."""
    assert {"messages"} <= set(row) <= {"messages", "tools", "parallel_tool_calls"}
    check_messages(row["messages"])
    check_settings(row)
    for message in row["messages"]:
        assert message.get("weight", 1) in (0, 1)
    assert row["messages"][-1]["role"] == "assistant"
    assert row["messages"][-1].get("weight", 1) == 1


def check_dpo(row: Mapping[str, Any]) -> None:
    """A line of a preference file: one reply each."""
    assert set(row) == {"input", "preferred_output", "non_preferred_output"}
    assert {"messages"} <= set(row["input"]) <= {"messages", "tools", "parallel_tool_calls"}
    check_messages(row["input"]["messages"])
    check_settings(row["input"])
    for name in ("preferred_output", "non_preferred_output"):
        assert len(row[name]) == 1
        check_messages(row[name])
        assert row[name][0]["role"] == "assistant"
        assert "weight" not in row[name][0]


def check_rft(row: Mapping[str, Any], fields: set[str]) -> None:
    """A line of a reinforcement file: a prompt, and what the grader is given."""
    assert set(row) - {"tools", "parallel_tool_calls"} == {"messages", *fields}
    check_messages(row["messages"])
    check_settings(row)
    assert row["messages"][-1]["role"] == "user"


def trained(rows: list[dict[str, Any]]) -> list[str]:
    return [
        message.get("content", "")
        for row in rows
        for message in row["messages"]
        if message["role"] == "assistant" and message["weight"] == 1
    ]


async def play_replies(
    clients: Clients, replies: list[tuple[Reply | str, float | None]], **metadata: Any
) -> TrajectoryGroup:
    """A group of rollouts that are asked the same, and reply differently."""
    texts = iter([reply for reply, _ in replies])
    client = clients.asynchronous(clients.serve(lambda _: next(texts)))

    @rollout
    async def agent(reward: float | None) -> None:
        get_current_trajectory().metadata.update(metadata)
        await client.chat.completions.create(
            model="m",
            messages=[agents.user("one")],  # type: ignore[list-item]
            tools=agents.TOOLS,
            parallel_tool_calls=False,
        )
        if reward is not None:
            record_reward(reward)

    return await gather_group(
        [agent(reward) for _, reward in replies], group_id="g", max_concurrency=1
    )


# --- supervised


@pytest.mark.parametrize("agent", agents.AGENTS)
async def test_each_reply_trains_in_exactly_one_row(
    recording: Recording, clients: Clients, agent: Any
):
    """Whatever the agent; and the shape of the row is the documented one."""
    trajectory = await agents.play(clients, agent)
    rows = to_openai_sft([trajectory], reasoning="drop")
    for row in rows:
        check_sft(json.loads(json.dumps(row)))
    said = [c.message["content"] or "" for c in trajectory.completions if c.trainable and c.message]
    assert sorted(trained(rows)) == sorted(said)


async def test_side_calls_are_no_rows(recording: Recording, clients: Clients):
    """A title that was asked beside the agent is in no format; a copy without side calls has it."""
    titled = await agents.play(clients, agents.titled, 1.0)
    (row,) = to_openai_sft([titled])
    assert row["messages"][0] == agents.user("one")
    assert len(to_openai_sft([titled.with_side_calls(())])) == 2
    (row,) = to_openai_rft([titled])
    assert row["messages"] == [agents.user("one")]
    with pytest.raises(ExportError, match="differ before their last replies"):
        to_openai_dpo([titled, await agents.play(clients, agents.chain, 0.0)])


async def test_tools_are_as_they_were_on_the_wire(recording: Recording, clients: Clients):
    """Arguments stay the text that the model wrote."""
    (row,) = to_openai_sft([await agents.play(clients, agents.tool_loop)])
    (call,) = row["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == '{"a":  1, "b": "Zürich"}'
    assert row["tools"] == agents.TOOLS
    assert "parallel_tool_calls" not in row


async def test_what_was_not_sampled_is_context(recording: Recording, clients: Clients):
    """An example in the prompt has the weight 0; what comes after the last reply is left out."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        example = {"role": "assistant", "content": "an example"}
        made = await client.chat.completions.create(
            model="m",
            messages=[agents.user("a"), example, agents.user("b")],  # type: ignore[list-item]
        )
        history = get_current_trajectory().get_history(made.id)
        history.append({"role": "user", "content": "not answered"})

    (row,) = to_openai_sft([await gather_trajectory(agent())])
    assert [(m["content"], m.get("weight")) for m in row["messages"]] == [
        ("a", None),
        ("an example", 0),
        ("b", None),
        ("hello", 1),
    ]


async def test_reasoning_is_left_out_only_if_asked_for(recording: Recording, clients: Clients):
    """It is part of what was sampled, also where the client did not send it back."""
    trajectory = await agents.play(clients, agents.forgetful)
    with pytest.raises(ExportError, match=r"no place for it.*reasoning='drop'"):
        to_openai_sft([trajectory])
    (row,) = to_openai_sft([trajectory], reasoning="drop")
    check_sft(row)


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (Reply(message_extra={"audio": {"id": "a"}}), "audio"),
        (Reply(tool_calls=[ToolCall("sh", "ls", custom=True)]), "custom tools"),
    ],
)
async def test_what_has_no_place_is_refused(
    recording: Recording, clients: Clients, reply: Reply, what: str
):
    """It is named."""
    group = await play_replies(clients, [(reply, 1.0)])
    with pytest.raises(ExportError, match=f"no place for '{what}'"):
        to_openai_sft(group)


async def test_other_apis_are_refused(recording: Recording, clients: Clients):
    """Their instructions are no messages."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        await client.responses.create(model="m", instructions="be brief", input="hi")

    with pytest.raises(ExportError, match=r"is of .*/responses"):
        to_openai_sft([await gather_trajectory(agent())])


async def test_a_refusal_is_a_reply(recording: Recording, clients: Clients):
    """The format has a place for it."""
    (row,) = to_openai_sft(await play_replies(clients, [(Reply(refusal="no"), 1.0)]))
    check_sft(row)
    assert row["messages"][-1]["refusal"] == "no"


async def test_what_was_not_good_enough_is_left_out(recording: Recording, clients: Clients):
    """Nor is what nobody scored, or what failed, taken for good."""
    group = await agents.play_group(clients, [1.0, 0.25, None])
    everything = [*group, *group.failures, await agents.play(clients, agents.chain, None)]
    assert len(to_openai_sft(everything, min_reward=0.5)) == 1
    assert len(to_openai_sft(everything)) == 3


# --- preferences


async def test_a_preference_is_the_best_against_the_worst(recording: Recording, clients: Clients):
    """Of those that are scored, with the tools that they were asked with."""
    call = Reply(tool_calls=[ToolCall("add", '{"a": 1}')])
    group = await play_replies(clients, [("fair", 0.5), (call, 1.0), ("?", None), ("bad", 0.0)])
    (row,) = to_openai_dpo(group)
    check_dpo(json.loads(json.dumps(row)))
    assert row["input"]["messages"] == [agents.user("one")]
    assert (row["input"]["tools"], row["input"]["parallel_tool_calls"]) == (agents.TOOLS, False)
    assert row["preferred_output"][0]["tool_calls"][0]["function"]["name"] == "add"
    assert row["non_preferred_output"][0]["content"] == "bad"


async def test_equal_rewards_make_no_preference(recording: Recording, clients: Clients):
    """Nor does one scored trajectory alone."""
    assert to_openai_dpo(await play_replies(clients, [("a", 1.0), ("b", 1.0)])) == []
    assert to_openai_dpo(await play_replies(clients, [("a", 1.0), ("b", None)])) == []


async def test_preferences_are_between_single_replies(recording: Recording, clients: Clients):
    """Conversations that differ before their last reply are refused, and so are forks."""

    async def played(texts: list[str], reward: float) -> Trajectory:
        client = clients.asynchronous(clients.serve(texts))

        @rollout
        async def agent() -> None:
            await agents.chain(client)
            record_reward(reward)

        return await gather_trajectory(agent())

    one, other = await played(["a", "b"], 1.0), await played(["c", "d"], 0.0)
    with pytest.raises(ExportError, match=r"differ before their last replies"):
        to_openai_dpo([one, other])
    (row,) = to_openai_dpo([one, await played(["a", "e"], 0.0)])
    check_dpo(row)
    with pytest.raises(ExportError, match=r"has 2 histories"):
        to_openai_dpo([one, await agents.play(clients, agents.fork, 0.0)])


# --- reinforcement


async def test_a_prompt_comes_once_with_what_its_grader_needs(
    recording: Recording, clients: Clients
):
    """A group shares its prompt; metadata is the reference of the grader."""
    group = await play_replies(clients, [("a", 1.0), ("b", None)], answer="42", level=3)
    (row,) = to_openai_rft(group)
    check_rft(json.loads(json.dumps(row)), {"answer", "level"})
    (row,) = to_openai_rft(group, fields=["answer"])
    check_rft(row, {"answer"})
    with pytest.raises(ExportError, match=r"has no metadata 'solution'.*it has answer, level"):
        to_openai_rft(group, fields=["solution"])


async def test_names_of_the_format_are_not_for_metadata(recording: Recording, clients: Clients):
    """They would overwrite the prompt."""
    group = await play_replies(clients, [("a", 1.0)], messages="mine")
    with pytest.raises(ExportError, match="'messages' is a name of the format's own"):
        to_openai_rft(group)


async def test_a_prompt_ends_with_the_user(recording: Recording, clients: Clients):
    """A prompt that goes on from a reply is refused."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        await agents.ask(client, [agents.user("a"), {"role": "assistant", "content": "b"}])

    with pytest.raises(ExportError, match="ends with a user's message, got 'assistant'"):
        to_openai_rft([await gather_trajectory(agent())])


# --- the exporter


async def test_the_exporter_writes_each_format(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """Options are texts, since they come from a command line."""
    group = await play_replies(clients, [("good", 1.0), ("bad", 0.0)], answer="42", other=1)
    for options, check, count in (
        ({}, check_sft, 2),
        ({"format": "sft", "min_reward": "0.5"}, check_sft, 1),
        ({"format": "dpo", "reasoning": "drop"}, check_dpo, 1),
        ({"format": "rft", "fields": "answer"}, lambda row: check_rft(row, {"answer"}), 1),
    ):
        exporter = row_exporter_from_texts("openai", options)
        assert isinstance(exporter, OpenaiRows)
        part, output = tmp_path / "rows.part", tmp_path / "rows.jsonl"
        part.write_text("".join(json.dumps(row) + "\n" for row in exporter.rows(group)))
        exporter.finish(part, output)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            check(row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "ppo"}, "format: expected 'sft', 'dpo' or 'rft', got 'ppo'"),
        ({"format": "dpo", "fields": "a"}, "expected the options reasoning, got 'fields'"),
        ({"reasoning": "keep"}, "reasoning: expected 'error' or 'drop'"),
        ({"min_reward": "high"}, "min_reward: expected a number or none, got 'high'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_read(options: dict[str, str], message: str):
    """With what was expected."""
    with pytest.raises(ConfigurationError, match=message):
        row_exporter_from_texts("openai", options)


def test_the_readme_runs(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    names = agents.run_readme(Path(__file__).parents[1], clients, monkeypatch)
    rows = [json.loads(line) for line in names["lines"].splitlines()]
    assert len(rows) == 2
    for row in rows:
        check_sft(row)


@pytest.mark.parametrize("product", ["langchain", "langfuse", "langsmith", "litellm", "weave"])
def test_exports_of_tracing_products_become_lines(product: str):
    """What a product recorded of a real client is messages that the format takes."""
    found = reconstruct(read(RECORDED / f"{product}.jsonl"), infer_rollouts=True)
    trajectories = [each for each in found if each.name in SHORT or each.id in IDS]
    rows = [row for each in trajectories for row in to_openai_sft([each])]
    assert len(rows) >= len(trajectories) >= 2
    for row in rows:
        check_messages(row["messages"])
    assert any(row.get("tools") for row in rows)


SHORT = ("chat", "stream", "tools", "stream_tools", "parallel_tools")
IDS = [hashlib.sha256(name.encode()).hexdigest()[:32] for name in SHORT]
RECORDED = Path(__file__).parents[3] / "tests" / "dialects" / "recorded"
