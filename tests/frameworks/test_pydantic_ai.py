"""Pydantic AI: agents with tools, structured output and streams, on both of its OpenAI models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.instrumented import InstrumentationSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from otel_rollout import rollout
from otel_rollout.rebuild.documents import Documents, documents_in
from otel_rollout.testing import Reply, ToolCall
from tests.frameworks.wire import ADD, TOOL_LOOP, checked
from tests.kit.conversations import table
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
APIS = pytest.mark.parametrize("api", ["chat", "responses"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def agent_of(client: openai.AsyncOpenAI, api: str = "chat", **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(openai_client=client)
    kind: Any = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    agent: Agent[None, Any] = Agent(kind("m", provider=provider), **options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @agent.tool_plain
    def now() -> str:
        """The time."""
        return "12:00"

    @agent.tool_plain
    def fail() -> str:
        """Fail, so that the model tries again."""
        raise ModelRetry("try something else")

    return agent


async def run(agent: Agent[None, Any], question: str, stream: bool, **options: Any) -> Any:
    if not stream:
        return await agent.run(question, **options)
    async with agent.run_stream(question, **options) as result:
        await result.get_output()
        return result


REPLIES: dict[str, list[Any]] = {
    "text": ["It is 5."],
    "a tool": TOOL_LOOP,
    "reasoning": [Reply(tool_calls=[ADD], reasoning="2 and 3"), Reply("5", reasoning="5!")],
    "parallel tools": [Reply(tool_calls=[ADD, ADD]), "5 and 5"],
    "text and a tool": [Reply("Let me see.", tool_calls=[ADD]), "5"],
    "no arguments": [Reply(tool_calls=[ToolCall("now", "")]), "noon"],
    "a tool that fails": [Reply(tool_calls=[ToolCall("fail", "{}")]), "Sorry."],
    "an unknown tool": [Reply(tool_calls=[ToolCall("multiply", "{}")]), "Sorry."],
}


@pytest.mark.parametrize("name", REPLIES)
@APIS
@STREAMED
async def test_an_agent_that_goes_on(
    recording: Recording, clients: Clients, name: str, api: str, stream: bool
) -> None:
    """However Pydantic AI replays a reply, the conversation is one history."""
    server = clients.serve([*REPLIES[name], "Goodbye."])
    agent = agent_of(clients.asynchronous(server), api, system_prompt="You add.")
    if stream and name == "text and a tool":
        pytest.skip("run_stream takes the first text for the answer")
    async with rollout("agent"):
        result = await run(agent, "2 + 3?", stream)
        await run(agent, "Bye.", stream, message_history=result.all_messages())
    trajectory = checked(recording, server, calls=len(REPLIES[name]) + 1)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert all(item.trainable for item in history.items if item.completion)


async def test_a_tool_loop(recording: Recording, clients: Clients) -> None:
    """The messages, and the token ids that were asked for."""
    server = clients.serve(TOOL_LOOP, token_ids=False, logprobs=False)
    settings: Any = {"extra_body": {"return_token_ids": True, "logprobs": True}, "seed": 7}
    agent = agent_of(clients.asynchronous(server), model_settings=settings)
    async with rollout("agent"):
        assert (await agent.run("2 + 3?")).output == "It is 5."
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == ["user 2 + 3?, 0* add(), tool 5, 1* It is 5."]
    assert all(completion.token_ids for completion in trajectory.completions)
    assert all(completion.logprobs for completion in trajectory.completions)
    assert trajectory.completions[0].sampling["seed"] == 7


@APIS
@STREAMED
async def test_arguments_that_are_no_json(
    recording: Recording, clients: Clients, api: str, stream: bool
) -> None:
    """Pydantic AI replaces them when it replays the call: another message than was sampled.

    The original trains in a history of its own, the edited one is context in the main history.
    """
    replies = [Reply(tool_calls=[ToolCall("add", '{"a": 2, "b": ')]), "Sorry."]
    server = clients.serve(replies)
    async with rollout("agent"):
        await run(agent_of(clients.asynchronous(server), api), "2 + 3?", stream)
    trajectory = checked(recording, server, calls=2)
    original, last = trajectory.completions
    assert [
        [item.completion for item in history.items if item.trainable]
        for history in trajectory.histories
    ] == [[last], [original]]
    assert "INVALID_JSON" in str(trajectory.messages())


class Sum(pydantic.BaseModel):
    """A sum."""

    value: int


@APIS
@STREAMED
async def test_structured_output(
    recording: Recording, clients: Clients, api: str, stream: bool
) -> None:
    """A first output that does not validate is corrected in the same history."""
    replies = [
        Reply(tool_calls=[ToolCall("final_result", '{"value": "five"}')]),
        Reply(tool_calls=[ToolCall("final_result", '{ "value":5 }')]),
    ]
    server = clients.serve(replies[1:] if stream else replies)
    agent = agent_of(clients.asynchronous(server), api, output_type=Sum)
    async with rollout("agent"):
        result = await run(agent, "2 + 3?", stream)
        output = await result.get_output() if stream else result.output
    assert output == Sum(value=5)
    trajectory = checked(recording, server, calls=1 if stream else 2)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions


async def test_a_sync_run(recording: Recording, clients: Clients) -> None:
    """`run_sync`, in a thread that has no loop."""
    server = clients.serve(TOOL_LOOP)

    @rollout
    def add() -> Any:
        return agent_of(clients.asynchronous(server)).run_sync("2 + 3?").output

    assert await asyncio.to_thread(add) == "It is 5."
    assert len(checked(recording, server, calls=2).histories) == 1


async def test_an_agent_that_asks_others(recording: Recording, clients: Clients) -> None:
    """Agents in the tools of another, at once, are histories of their own."""

    def reply(body: dict[str, Any]) -> Reply:
        if "Judge" not in str(body["messages"][0]):
            return Reply("an opinion")
        if body["messages"][-1]["role"] == "tool":
            return Reply("They agree.")
        asked = [ToolCall("ask", f'{{"who": "{who}"}}') for who in ("left", "right")]
        return Reply(tool_calls=asked)

    server = clients.serve(reply)
    client = clients.asynchronous(server)
    judge = agent_of(client, system_prompt="Judge.")

    @judge.tool_plain
    async def ask(who: str) -> str:
        """Ask somebody."""
        return str((await agent_of(client, system_prompt=f"You are {who}.").run("Well?")).output)

    async with rollout("agent"):
        assert (await judge.run("Is it so?")).output == "They agree."
    trajectory = checked(recording, server, calls=4)
    assert sorted(len(history.completions) for history in trajectory.histories) == [1, 1, 2]


async def test_a_tool_that_raises(recording: Recording, clients: Clients) -> None:
    """An exception of a tool ends the rollout as an error; the call before it is kept."""
    server = clients.serve(Reply(tool_calls=[ToolCall("divide", '{"a": 1, "b": 0}')]))
    agent = agent_of(clients.asynchronous(server))

    @agent.tool_plain
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    with pytest.raises(ZeroDivisionError):
        async with rollout("agent"):
            await agent.run("1 / 0?")
    trajectory = recording.trajectory
    assert (trajectory.status, trajectory.warnings) == ("error", [])
    assert table(trajectory) == ["user 1 / 0?, 0* divide()"]


@APIS
@STREAMED
async def test_its_own_telemetry(
    recording: Recording, clients: Clients, api: str, stream: bool
) -> None:
    """With `instrument` on, its own LLM spans are not counted as completions."""
    server = clients.serve(TOOL_LOOP)
    settings = InstrumentationSettings(tracer_provider=recording.provider)
    Agent.instrument_all(settings)
    try:
        async with rollout("agent"):
            await run(agent_of(clients.asynchronous(server), api), "2 + 3?", stream)
    finally:
        Agent.instrument_all(False)
    assert any("pydantic-ai" in str(span.instrumentation_scope) for span in recording.spans)
    assert len(checked(recording, server, calls=2).histories) == 1


async def test_its_own_history(recording: Recording, clients: Clients) -> None:
    """`all_messages_json` is read as the conversation that the server saw, arguments as JSON."""
    called = Reply("Adding.", reasoning="hm", tool_calls=[ADD])
    server = clients.serve([called, Reply("It is 5.")])
    prompts: Any = {"system_prompt": "You add.", "instructions": "Be short."}
    run = await agent_of(clients.asynchronous(server), **prompts).run("2 + 3?")
    (document,) = documents_in(json.loads(run.all_messages_json()))
    (trajectory,) = Documents().read(document)
    asked = [json.loads(exchange.request)["messages"] for exchange in server.exchanges]
    assert [parsed(each.request_messages) for each in trajectory.completions] == [
        parsed(messages) for messages in asked
    ]
    assert table(trajectory) == [
        "system You add., system Be short., user 2 + 3?, 0* Adding. add(), tool 5, 1* It is 5."
    ]


def parsed(messages: list[Any]) -> list[Any]:
    """The messages with the arguments of tools as JSON."""
    made = json.loads(json.dumps(messages))
    for function in (call["function"] for each in made for call in each.get("tool_calls") or ()):
        function["arguments"] = json.loads(function["arguments"])
    return list(made)
