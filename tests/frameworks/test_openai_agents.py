"""The OpenAI Agents SDK: tool loops, handoffs, streams, on both of its model classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pydantic
import pytest
from agents import Agent, ModelSettings, Runner, function_tool
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

from otel_rollout import rollout
from otel_rollout.testing import Reply, ToolCall
from tests.frameworks.wire import ADD, TOOL_LOOP, checked, continues_on_tokens
from tests.kit.conversations import table
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
APIS = pytest.mark.parametrize("api", ["chat", "responses"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@pytest.fixture(autouse=True)
def no_exporter() -> Iterator[None]:
    """The SDK's own traces go to OpenAI unless they are told not to."""
    agents.set_trace_processors([])
    agents.set_tracing_disabled(False)
    yield
    agents.set_trace_processors([])


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(api: str, client: openai.AsyncOpenAI) -> agents.Model:
    if api == "chat":
        return agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
    return agents.OpenAIResponsesModel(model="m", openai_client=client)


async def run(agent: Agent[Any], given: Any, *, stream: bool = False, **options: Any) -> Any:
    if not stream:
        return await Runner.run(agent, given, **options)
    result = Runner.run_streamed(agent, given, **options)
    async for _ in result.stream_events():
        pass
    return result


@APIS
@STREAMED
async def test_a_tool_loop(recording: Recording, clients: Clients, api: str, stream: bool) -> None:
    """An agent with a tool is one history; what it is asked next goes on in it."""
    server = clients.serve([*TOOL_LOOP, "You are welcome."])
    agent = Agent(
        name="adder",
        instructions="You add.",
        tools=[add],
        model=model(api, clients.asynchronous(server)),
    )
    async with rollout("agent"):
        result = await run(agent, "2 + 3?", stream=stream)
        assert result.final_output == "It is 5."
        thanks = [*result.to_input_list(), {"role": "user", "content": "Thank you."}]
        result = await run(agent, thanks, stream=stream)
        assert result.final_output == "You are welcome."
    trajectory = checked(recording, server, calls=3)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert [item.trainable for item in history.items if item.completion] == [True] * 3
    if api == "chat":
        assert table(trajectory) == [
            "system You add., user 2 + 3?, 0* add(), tool 5, 1* It is 5., user Thank you., "
            "2* You are welcome."
        ]
        assert continues_on_tokens(trajectory)


async def test_token_ids(recording: Recording, clients: Clients) -> None:
    """What `ModelSettings` asks for beyond the API is sent, and its answer is recorded."""
    server = clients.serve(TOOL_LOOP, token_ids=False, logprobs=False)
    settings = ModelSettings(
        extra_body={"return_token_ids": True, "logprobs": True}, temperature=0.5
    )
    client = clients.asynchronous(server)
    agent = Agent(name="a", tools=[add], model=model("chat", client), model_settings=settings)
    async with rollout("agent"):
        await Runner.run(agent, "2 + 3?")
    for completion in checked(recording, server, calls=2).completions:
        assert completion.token_ids
        assert completion.logprobs
        assert completion.sampling["temperature"] == 0.5


REPLIES: dict[str, list[Any]] = {
    "reasoning": [Reply(tool_calls=[ADD], reasoning="2 and 3"), Reply("5", reasoning="5!")],
    "parallel tools": [Reply(tool_calls=[ADD, ADD]), "5 and 5"],
    "text and a tool": [Reply("Let me see.", tool_calls=[ADD]), "5"],
    "no arguments": [Reply(tool_calls=[ToolCall("now", "")]), "noon"],
    "broken arguments": [Reply(tool_calls=[ToolCall("add", '{"a": 2, "b": ')]), "Sorry."],
    "a tool that fails": [Reply(tool_calls=[ToolCall("fail", "{}")]), "Sorry."],
}


@pytest.mark.parametrize("name", REPLIES)
@APIS
@STREAMED
async def test_replies_as_they_are_replayed(
    recording: Recording, clients: Clients, name: str, api: str, stream: bool
) -> None:
    """However the SDK takes a reply apart and puts it together again, it is the same history."""

    @function_tool
    def now() -> str:
        """The time."""
        return "12:00"

    @function_tool
    def fail() -> str:
        """Fail."""
        raise ValueError("no")

    server = clients.serve([*REPLIES[name], "Goodbye."])
    client = clients.asynchronous(server)
    agent = Agent(name="agent", tools=[add, now, fail], model=model(api, client))
    async with rollout("agent"):
        result = await run(agent, "2 + 3?", stream=stream)
        await run(
            agent, [*result.to_input_list(), {"role": "user", "content": "Bye."}], stream=stream
        )
    trajectory = checked(recording, server, calls=3)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert all(item.trainable for item in history.items if item.completion)


@APIS
@STREAMED
async def test_a_handoff(recording: Recording, clients: Clients, api: str, stream: bool) -> None:
    """The agent that takes over has other tools and instructions: a history of its own."""
    replies = [Reply(tool_calls=[ToolCall("transfer_to_adder", "{}")]), *TOOL_LOOP]
    server = clients.serve(replies)
    asked = model(api, clients.asynchronous(server))
    adder = Agent(name="adder", instructions="You add.", tools=[add], model=asked)
    triage = Agent(name="triage", instructions="Hand over.", handoffs=[adder], model=asked)
    async with rollout("agent"):
        result = await run(triage, "2 + 3?", stream=stream)
    assert result.last_agent.name == "adder"
    trajectory = checked(recording, server, calls=3)
    main, handed_over = trajectory.histories
    assert main.completions == trajectory.completions[1:]
    assert handed_over.completions == trajectory.completions[:1]
    assert all(item.trainable for h in trajectory.histories for item in h.items if item.completion)


@APIS
async def test_agents_as_tools(recording: Recording, clients: Clients, api: str) -> None:
    """Agents that run at once as tools of another are histories of their own."""

    def reply(body: dict[str, Any]) -> Reply:
        said = str(body.get("messages") or body["input"])
        if "Weigh" not in str(body.get("instructions")) + said:
            return Reply("an opinion")
        if "an opinion" in said:
            return Reply("Both agree.")
        ask = [ToolCall(f"ask_{name}", '{"input": "Well?"}') for name in ("left", "right")]
        return Reply(tool_calls=ask)

    server = clients.serve(reply)
    asked = model(api, clients.asynchronous(server))
    experts = [
        Agent(name=name, instructions=f"You are {name}.", model=asked) for name in ("left", "right")
    ]
    judge: Agent[Any] = Agent(
        name="judge",
        instructions="Weigh.",
        model=asked,
        tools=[e.as_tool(f"ask_{e.name}", "Ask.") for e in experts],
    )
    async with rollout("agent"):
        result = await Runner.run(judge, "Is it so?")
    assert result.final_output == "Both agree."
    trajectory = checked(recording, server, calls=4)
    assert sorted(len(history.completions) for history in trajectory.histories) == [1, 1, 2]


class Sum(pydantic.BaseModel):
    """A sum."""

    value: int


@APIS
async def test_structured_output(recording: Recording, clients: Clients, api: str) -> None:
    """An `output_type` is one completion."""
    server = clients.serve('{ "value":5 }')
    agent = Agent(name="a", output_type=Sum, model=model(api, clients.asynchronous(server)))
    async with rollout("agent"):
        assert (await Runner.run(agent, "2 + 3?")).final_output == Sum(value=5)
    checked(recording, server, calls=1)


async def test_previous_response(recording: Recording, clients: Clients) -> None:
    """A run that sends only what is new and names the response before is one history."""
    server = clients.serve(TOOL_LOOP)
    client = clients.asynchronous(server)
    agent = Agent(name="adder", tools=[add], model=model("responses", client))
    async with rollout("agent"):
        await Runner.run(agent, "2 + 3?", auto_previous_response_id=True)
    trajectory = checked(recording, server, calls=2)
    assert "previous_response_id" in trajectory.completions[1].request
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions


@APIS
async def test_its_own_telemetry(recording: Recording, clients: Clients, api: str) -> None:
    """With the SDK's tracing on, and turned into LLM spans, calls are not counted twice."""
    server = clients.serve(TOOL_LOOP)
    agent = Agent(name="adder", tools=[add], model=model(api, clients.asynchronous(server)))
    OpenAIAgentsInstrumentor().instrument(tracer_provider=recording.provider)
    try:
        async with rollout("agent"):
            await Runner.run(agent, "2 + 3?")
    finally:
        OpenAIAgentsInstrumentor().uninstrument()
    assert any("openai_agents" in str(span.instrumentation_scope) for span in recording.spans)
    trajectory = checked(recording, server, calls=2)
    assert len(trajectory.histories) == 1


async def test_concurrent_rollouts(recording: Recording, clients: Clients) -> None:
    """Runs at the same time, each in its rollout, do not mix."""
    server = clients.serve()
    agent = Agent(name="echo", model=model("chat", clients.asynchronous(server)))

    @rollout
    async def echo(text: str) -> Any:
        return (await Runner.run(agent, text)).final_output

    texts = [f"text {n}" for n in range(8)]
    assert await asyncio.gather(*map(echo, texts)) == [f"You said: {text}" for text in texts]
    assert sorted(str(t.messages()[0]["content"]) for t in recording.trajectories) == texts
    assert all(len(t.completions) == 1 for t in recording.trajectories)
