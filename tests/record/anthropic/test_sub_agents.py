"""Traffic as coding agents send it: sub-agents, compaction, side calls; histories of one rollout.

The requests have the shapes that claude-code's have: the same session header on all, instructions
in blocks that are marked to be cached, a tool `Task` whose result is what a sub-agent said.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import Reply, ToolCall
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import CACHE, Claude, Json, ask, said, table, user

SESSION = "0198f3c2-5f3a-7c11-a1b2-c3d4e5f60718"
AGENT = [
    {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
    {"type": "text", "text": "You are an interactive agent.", "cache_control": CACHE},
]
SUB_AGENT = [
    {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
    {"type": "text", "text": "You are a file search specialist.", "cache_control": CACHE},
]
TOPIC = [
    {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
    {"type": "text", "text": "Analyze if this message indicates a new conversation topic. If so,"},
]
SUMMARISER = [{"type": "text", "text": "You are a helpful AI assistant that summarizes."}]
SUMMARISE = "Your task is to create a detailed summary of the conversation so far."


def tool(name: str) -> Json:
    return {"name": name, "description": name, "input_schema": {"type": "object"}}


READ, TASK = tool("Read"), tool("Task")


def last_text(request: Json) -> str:
    content = request["messages"][-1]["content"]
    block = {"text": content} if isinstance(content, str) else content[-1]
    return str(block.get("text", block.get("content")))


def reply(request: Json) -> Reply:
    """The model: who has a `Task` tool gives two tasks, who searches reads a file first."""
    text = last_text(request)
    if "Fix the tests" in text:
        uses = [ToolCall("Task", f'{{"prompt": "search {n}"}}', id=f"t{n}") for n in (1, 2)]
        return Reply("I'll look.", tool_calls=uses)
    if text.startswith("search"):
        return Reply(tool_calls=[ToolCall("Read", "{}", id=f"read {text}")])
    return Reply(f"said after {len(request['messages'])}: {text[-20:]}")


@dataclass
class Agent:
    """One conversation: instructions, tools, and the messages so far."""

    client: Any
    system: list[Any]
    tools: list[Json]
    messages: list[Json] = field(default_factory=list)

    async def turn(self, content: Any) -> Any:
        """Send this next; the cache mark is on the last message alone, as the harness moves it."""
        self.messages.append(user(content))
        marked = [*self.messages[:-1], user(_marked(content))]
        request: Json = {"messages": marked, "system": self.system}
        if self.tools:
            request["tools"] = self.tools
        message = await ask(self.client, **request)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        self.messages.append(said(blocks))
        return message


def _marked(content: Any) -> list[Json]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*blocks[:-1], {**blocks[-1], "cache_control": CACHE}]


def results(message: Any, *texts: str) -> list[Json]:
    uses = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": use.id, "content": text}
        for use, text in zip(uses, texts, strict=True)
    ]


def client_of(clients: Clients) -> Any:
    server = clients.serve(reply)
    headers = {"x-claude-code-session-id": SESSION}
    return Claude(sync=False).client(clients, server, default_headers=headers)


async def search(client: Any, what: str) -> str:
    """A sub-agent: it reads a file and says what is in it."""
    agent = Agent(client, SUB_AGENT, [READ])
    message = await agent.turn(what)
    message = await agent.turn(results(message, f"file of {what}"))
    return str(message.content[0].text)


async def fixing(client: Any) -> Agent:
    """An agent that has two sub-agents search at the same time, and goes on."""
    agent = Agent(client, AGENT, [READ, TASK])
    message = await agent.turn("Fix the tests")
    found = await asyncio.gather(search(client, "search 1"), search(client, "search 2"))
    await agent.turn(results(message, *found))
    return agent


def sorted_table(trajectory: Trajectory) -> list[str]:
    """The histories without the numbers of their completions, which time decides."""
    return sorted(
        " ".join("*" if "*" in cell else cell for cell in line.split())
        for line in table(trajectory)
    )


async def test_sub_agents_that_take_turns(recording: Recording, clients: Clients):
    """Each is a history of the one rollout, the agent's is the main one, and all of them train."""
    with rollout("agent"):
        await fixing(client_of(clients))
    trajectory = replayed(recording)
    assert table(trajectory)[0].split()[:2] == ["u", "0*"]
    assert sorted_table(trajectory) == ["u * u *"] * 3
    assert [history.tools for history in trajectory.histories] == [[READ, TASK], [READ], [READ]]
    assert all(c.trainable and c.session == SESSION for c in trajectory.completions)
    assert trajectory.warnings == []


async def test_a_sub_agent_without_tools_is_no_side_call(recording: Recording, clients: Clients):
    """Its calls look like those for a title, but for what they ask."""
    client = client_of(clients)
    with rollout("agent"):
        agent = await fixing(client)
        await Agent(client, SUMMARISER, []).turn("Summarise the file")
        await agent.turn("Thanks")
    trajectory = replayed(recording)
    assert all(c.trainable for c in trajectory.completions)
    assert sorted_table(trajectory) == ["u *", "u * u *", "u * u *", "u * u * u *"]


async def test_side_calls_beside_sub_agents(recording: Recording, clients: Clients):
    """What the harness asks at the same time, before and after, is told from all of them."""
    client = client_of(clients)

    async def beside() -> None:
        await ask(client, messages=[user("quota")], max_tokens=1)
        await ask(client, system=TOPIC, messages=[user("Fix the tests"), said("{")], tools=[])

    with rollout("agent"):
        await asyncio.gather(beside(), fixing(client))
    trajectory = replayed(recording)
    found = sorted(c.side_call for c in trajectory.completions if c.side_call)
    assert found == ["it asks for a title", "it asks how much quota is left"]
    of_agents = [history.side_call is None for history in trajectory.histories]
    assert of_agents == [True, True, True, False, False]
    assert trajectory.messages()[0] == user("Fix the tests")
    assert len(trajectory.steps) == 6


async def test_compaction_is_a_new_history(recording: Recording, clients: Clients):
    """The summary is the agent's own and trains; what begins with it is a conversation of its own.

    The request for it has the whole conversation, with other instructions.
    """
    client = client_of(clients)
    with rollout("agent"):
        agent = await fixing(client)
        compact = Agent(client, SUMMARISER, [], list(agent.messages))
        message = await compact.turn(SUMMARISE)
        later = Agent(client, AGENT, [READ, TASK])
        await later.turn(f"This session is being continued.\n{message.content[0].text}")
        await later.turn("Go on")
    trajectory = replayed(recording)
    assert all(c.trainable for c in trajectory.completions)
    assert sorted_table(trajectory) == [
        "u * u *",  # the agent
        "u * u *",  # what goes on from the summary
        "u * u *",
        "u * u *",
        "u a u a u *",  # the summary: with other instructions nothing of it is replayed
    ]
    assert trajectory.warnings == []


async def test_a_rewound_conversation_forks(recording: Recording, clients: Clients):
    """Who goes back to an earlier message makes a fork; the shared reply trains once."""
    client = client_of(clients)
    with rollout("agent"):
        agent = await fixing(client)
        fork = Agent(client, AGENT, [READ, TASK], agent.messages[:2])
        await fork.turn(results_of(agent.messages[1], "nothing", "nothing"))
    trajectory = replayed(recording)
    assert sorted_table(trajectory) == ["u * u *", "u * u *", "u * u *", "u 0 u *"]
    items = [item for history in trajectory.histories for item in history.items]
    trained = [item.completion for item in items if item.trainable]
    assert len(trained) == len(set(trained)) == len(trajectory.completions)


def results_of(message: Json, *texts: str) -> list[Json]:
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": use["id"], "content": text}
        for use, text in zip(uses, texts, strict=True)
    ]
