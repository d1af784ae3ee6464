"""LangChain and LangGraph: `ChatOpenAI` in chains, agents and graphs, sync and async."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import pydantic
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from openinference.instrumentation.langchain import LangChainInstrumentor as OpenInference
from opentelemetry.instrumentation.langchain import LangchainInstrumentor as OpenLLMetry

from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Reply, ToolCall
from tests.frameworks.wire import ADD, TOOL_LOOP, checked
from tests.kit.conversations import table
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
STREAMED = pytest.mark.parametrize("streaming", [False, True], ids=["plain", "stream"])
HISTORY = ["user 2 + 3?, 0* add(), tool 5, 1* It is 5."]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def divide(a: int, b: int) -> float:
    """Divide one number by another."""
    return a / b


def model(server: ModelServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=server.base_url, api_key="none-needed", max_retries=0, **options
    )


@ASYNC
@STREAMED
async def test_a_loop_of_ones_own(
    recording: Recording, clients: Clients, is_async: bool, streaming: bool
) -> None:
    """`bind_tools` and a loop: one history, with the token ids that were asked for."""
    server = clients.serve(TOOL_LOOP, token_ids=False, logprobs=False)
    llm = model(
        server, streaming=streaming, logprobs=True, extra_body={"return_token_ids": True}
    ).bind_tools([add])

    async def agent() -> str:
        messages: list[Any] = [HumanMessage("2 + 3?")]
        while True:
            reply = await llm.ainvoke(messages) if is_async else llm.invoke(messages)
            messages.append(reply)
            if not reply.tool_calls:
                return str(reply.text)
            messages += [add.invoke(call) for call in reply.tool_calls]

    async with rollout("agent"):
        assert await agent() == "It is 5."
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == HISTORY
    assert all(completion.token_ids for completion in trajectory.completions)
    assert all(completion.logprobs for completion in trajectory.completions)


@ASYNC
@pytest.mark.parametrize("api", ["chat", "responses"])
@STREAMED
async def test_an_agent(
    recording: Recording, clients: Clients, is_async: bool, api: str, streaming: bool
) -> None:
    """`create_agent` runs its tool loop in a graph: one history, whichever API it asks."""
    server = clients.serve(TOOL_LOOP)
    llm = model(server, streaming=streaming, use_responses_api=api == "responses")
    agent = create_agent(llm, [add])
    question: Any = {"messages": [HumanMessage("2 + 3?")]}
    async with rollout("agent"):
        state = await agent.ainvoke(question) if is_async else agent.invoke(question)
    assert state["messages"][-1].text == "It is 5."
    trajectory = checked(recording, server, calls=2)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert [item.trainable for item in history.items] == [False, True, False, True]


@tool
def now() -> str:
    """The time."""
    return "12:00"


REPLIES: dict[str, list[Any]] = {
    "text": ["It is 5."],
    "reasoning": [Reply("It is 5.", reasoning="2 and 3")],
    "reasoning and a tool": [Reply(tool_calls=[ADD], reasoning="2 and 3"), "It is 5."],
    "parallel tools": [Reply(tool_calls=[ADD, ADD]), "It is 5, twice."],
    "text and a tool": [Reply("Let me see.", tool_calls=[ADD]), "It is 5."],
    "no arguments": [Reply(tool_calls=[ToolCall("now", "")]), "Noon."],
    "odd text": ["It is\n\n 5. \u00e9 "],
}


@pytest.mark.parametrize("name", REPLIES)
@STREAMED
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_agent_that_goes_on(
    recording: Recording, clients: Clients, name: str, api: str, streaming: bool
) -> None:
    """What LangChain makes of a reply and sends again is the message that was sampled."""
    server = clients.serve([*REPLIES[name], "Goodbye."])
    agent = create_agent(
        model(server, use_responses_api=api == "responses", streaming=streaming),
        [add, now],
        system_prompt="You add.",
        checkpointer=InMemorySaver(),
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    async with rollout("agent"):
        await agent.ainvoke({"messages": [HumanMessage("2 + 3?")]}, config)
        await agent.ainvoke({"messages": [HumanMessage("Thank you.")]}, config)
    # LangChain takes "" for broken arguments in the Responses API and then ends its loop.
    calls = (
        len(REPLIES[name]) + 1 - (name == "no arguments" and api == "responses" and not streaming)
    )
    trajectory = checked(recording, server, calls=calls)
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert all(item.trainable for item in history.items if item.completion)


@STREAMED
async def test_a_refusal(recording: Recording, clients: Clients, streaming: bool) -> None:
    """LangChain replays a refusal as an empty message: another one than was sampled.

    The refusal trains in a history of its own, after the main one.
    """
    server = clients.serve([Reply(refusal="I will not say."), "Goodbye."])
    llm = model(server, streaming=streaming)
    async with rollout("agent"):
        reply = await llm.ainvoke("2 + 3?")
        await llm.ainvoke([HumanMessage("2 + 3?"), reply, HumanMessage("Bye.")])
    trajectory = checked(recording, server, calls=2)
    refusal, last = trajectory.completions
    assert [h.completions for h in trajectory.histories] == [[last], [refusal]]


class Sum(pydantic.BaseModel):
    """A sum."""

    value: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(recording: Recording, clients: Clients, method: Any) -> None:
    """`with_structured_output` goes another way through the client: one completion all the same."""
    text = '{ "value":5 }'
    reply = Reply(tool_calls=[ToolCall("Sum", text)])
    server = clients.serve(reply if method == "function_calling" else Reply(text))
    llm = model(server).with_structured_output(Sum, method=method)
    async with rollout("agent"):
        assert llm.invoke("2 + 3 as JSON") == Sum(value=5)
        assert await llm.ainvoke("2 + 3 as JSON?") == Sum(value=5)
    trajectory = checked(recording, server, calls=2)
    assert len(trajectory.histories) == 2


@ASYNC
async def test_streaming(recording: Recording, clients: Clients, is_async: bool) -> None:
    """`stream` and `astream` are recorded as they are read."""
    server = clients.serve("It is five.", chunk_size=3)
    llm = model(server)
    async with rollout("agent"):
        if is_async:
            chunks = [chunk.text async for chunk in llm.astream("2 + 3?")]
        else:
            chunks = [chunk.text for chunk in llm.stream("2 + 3?")]
    assert "".join(chunks) == "It is five."
    trajectory = checked(recording, server, calls=1)
    assert trajectory.completions[0].stream


@ASYNC
async def test_batch(recording: Recording, clients: Clients, is_async: bool) -> None:
    """The threads or tasks of a batch belong to the rollout that started them."""
    server = clients.serve()
    llm = model(server)
    questions = [f"question {n}" for n in range(5)]
    async with rollout("agent"):
        replies = await llm.abatch(questions) if is_async else llm.batch(questions)
    assert [reply.text for reply in replies] == [f"You said: {q}" for q in questions]
    trajectory = checked(recording, server, calls=5)
    assert len(trajectory.histories) == 5


class State(TypedDict):
    """What the graph below works on."""

    topics: list[str]
    topic: str
    found: Annotated[list[str], operator.add]


@ASYNC
async def test_parallel_branches(recording: Recording, clients: Clients, is_async: bool) -> None:
    """Agents in parallel branches of a graph are histories of their own."""

    def reply(body: dict[str, Any]) -> Reply:
        asked = [m["content"] for m in body["messages"] if m["role"] == "user"]
        if body["messages"][-1]["role"] == "tool" or "tools" not in body:
            return Reply(f"Found: {asked[0]}")
        return Reply(tool_calls=[ADD])

    server = clients.serve(reply)
    agent = create_agent(model(server), [add], system_prompt="You look for things.")

    def found(state: Any) -> dict[str, Any]:
        return {"found": [state["messages"][-1].text]}

    def ask(state: State) -> dict[str, Any]:
        return found(agent.invoke({"messages": [HumanMessage(state["topic"])]}))

    async def ask_async(state: State) -> dict[str, Any]:
        return found(await agent.ainvoke({"messages": [HumanMessage(state["topic"])]}))

    def summary(state: State) -> dict[str, Any]:
        return {"found": [model(server).invoke(", ".join(sorted(state["found"]))).text]}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask_async if is_async else ask)
    graph.add_node("summary", summary)
    graph.add_conditional_edges(
        START, lambda state: [Send("ask", {"topic": topic}) for topic in state["topics"]], ["ask"]
    )
    graph.add_edge("ask", "summary")
    graph.add_edge("summary", END)
    compiled = graph.compile()
    task = {"topics": ["a", "b", "c"]}
    async with rollout("agent"):
        state = await compiled.ainvoke(task) if is_async else compiled.invoke(task)
    assert state["found"][-1] == "Found: Found: a, Found: b, Found: c"
    trajectory = checked(recording, server, calls=7)
    assert sorted(
        [message["role"] for message in history.messages()] for history in trajectory.histories
    ) == [["system", "user", "assistant", "tool", "assistant"]] * 3 + [["user", "assistant"]]


async def test_a_tool_that_fails(recording: Recording, clients: Clients) -> None:
    """An exception of a tool ends the rollout as an error; what was said before it is kept."""
    server = clients.serve(Reply(tool_calls=[ToolCall("divide", '{"a": 1, "b": 0}')]))
    agent = create_agent(model(server), [divide])
    with pytest.raises(ZeroDivisionError):
        async with rollout("agent"):
            await agent.ainvoke({"messages": [HumanMessage("1 / 0?")]})
    trajectory = recording.trajectory
    assert trajectory.status == "error"
    assert "ZeroDivisionError" in str(trajectory.error)
    assert table(trajectory) == ["user 1 / 0?, 0* divide()"]
    assert trajectory.warnings == []


async def test_a_tool_error_that_the_model_sees(recording: Recording, clients: Clients) -> None:
    """Arguments that are no JSON come back as LangChain replays them, with the error behind."""
    wrong = ToolCall("add", '{"a": 2, "b": ')
    server = clients.serve([Reply(tool_calls=[wrong]), Reply("Sorry.")])
    llm = model(server).bind_tools([add])
    async with rollout("agent"):
        reply = await llm.ainvoke("2 + 3?")
        (call,) = reply.invalid_tool_calls
        error = ToolMessage("no JSON", tool_call_id=str(call["id"]))
        await llm.ainvoke([SystemMessage(""), HumanMessage("2 + 3?"), reply, error][1:])
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == ["user 2 + 3?, 0* add(), tool no JSON, 1* Sorry."]


@pytest.mark.parametrize("instrumentor", [OpenInference, OpenLLMetry])
@ASYNC
async def test_with_another_instrumentation(
    recording: Recording, clients: Clients, instrumentor: Any, is_async: bool
) -> None:
    """LLM spans of LangChain's callbacks beside the client's are not counted as completions."""
    server = clients.serve(TOOL_LOOP)
    agent = create_agent(model(server), [add])
    question: Any = {"messages": [HumanMessage("2 + 3?")]}
    instrumentor().instrument(tracer_provider=recording.provider)
    try:
        async with rollout("agent"):
            await agent.ainvoke(question) if is_async else agent.invoke(question)
    finally:
        instrumentor().uninstrument()
    assert any("langchain" in str(s.instrumentation_scope) for s in recording.spans)
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == HISTORY
