"""Agents whose rollouts are hard for a trainer's format, run against the real client and server."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from exporters.kit.recording import Clients
from otel_rollout import (
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply, ToolCall

Agent = Callable[[openai.AsyncOpenAI], Awaitable[None]]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    """The reply, which is appended to the messages as it was received."""
    made = await client.chat.completions.create(model="m", messages=messages, **options)
    message = made.choices[0].message.model_dump(exclude_none=True)
    messages.append(message)
    return message


async def chain(client: openai.AsyncOpenAI) -> None:
    """One conversation of two turns."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}, user("one")]
    await ask(client, messages)
    messages.append(user("two"))
    await ask(client, messages)


async def tool_loop(client: openai.AsyncOpenAI) -> None:
    """A tool is called, with arguments that no JSON library writes so, and answers."""
    messages = [user("tool: add")]
    message = await ask(client, messages, tools=TOOLS)
    while "tool_calls" in message:
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message["tool_calls"]
        ]
        message = await ask(client, messages, tools=TOOLS)


async def fork(client: openai.AsyncOpenAI) -> None:
    """One reply that two conversations go on from."""
    messages = [user("one")]
    await ask(client, messages)
    for text in ("left", "right"):
        await ask(client, [*messages, user(text)])


async def interleaved(client: openai.AsyncOpenAI) -> None:
    """Two conversations that take turns."""
    first, second = [user("first")], [user("second")]
    for text in ("more", "still more"):
        for messages in (first, second):
            await ask(client, messages)
            messages.append(user(text))


async def forgetful(client: openai.AsyncOpenAI) -> None:
    """Reasoning that is not sent back: the next call does not see what was sampled."""
    messages = [user("think")]
    await ask(client, messages)
    del messages[-1]["reasoning_content"]
    messages.append(user("two"))
    await ask(client, messages)


async def truncated(client: openai.AsyncOpenAI) -> None:
    """A length limit truncates both replies, so they have no end token."""
    messages = [user("cut")]
    await ask(client, messages)
    messages.append(user("cut"))
    await ask(client, messages)


async def choices(client: openai.AsyncOpenAI) -> None:
    """Two choices of one call, the second goes on."""
    messages: list[Any] = [user("one")]
    made = await client.chat.completions.create(model="m", messages=messages, n=2)
    messages.append(made.choices[1].message.model_dump(exclude_none=True))
    messages.append(user("two"))
    await ask(client, messages)


async def failing_calls(client: openai.AsyncOpenAI) -> None:
    """One call fails on the way, the rollout goes on."""
    messages = [user("one")]
    await ask(client, messages)
    with contextlib.suppress(openai.APIStatusError):
        await ask(client, [user("fail")])
    messages.append(user("two"))
    await ask(client, messages)


async def titled(client: openai.AsyncOpenAI) -> None:
    """A side call first, for a title, as harnesses make it; then one conversation with tools."""
    title = {"role": "system", "content": "You are a title generator. You output ONLY a title."}
    await ask(client, [title, user("one")])
    messages = [user("one")]
    await ask(client, messages, tools=TOOLS)
    messages.append(user("two"))
    await ask(client, messages, tools=TOOLS)


AGENTS: list[Agent] = [
    chain,
    tool_loop,
    fork,
    interleaved,
    forgetful,
    truncated,
    choices,
    failing_calls,
]


def _reply(request: dict[str, Any]) -> Reply:
    messages = request["messages"]
    text = str(messages[-1]["content"])
    if request.get("n") == 2:
        return Reply(choices=[Reply("heads"), Reply("tails")])
    if text == "fail":
        raise ValueError("the server fails")
    if text == "cut":
        return Reply(f"cut off {len(messages)}", finish_reason="length")
    if text == "think":
        return Reply("héllo ☃", reasoning="let me see")
    if text.startswith("tool"):
        return Reply(tool_calls=[ToolCall("add", '{"a":  1, "b": "Zürich"}')])
    return Reply(f"reply {len(messages)} to {text}")


async def play(
    clients: Clients, agent: Agent, reward: float | None = 1.0, **options: Any
) -> Trajectory:
    """The trajectory of an agent, scored if there is a reward."""

    @rollout(name=agent.__name__)
    async def run() -> None:
        await agent(clients.asynchronous(clients.serve(_reply)))
        if reward is not None:
            record_reward(reward)

    return await gather_trajectory(run(), **options)


async def play_group(clients: Clients, rewards: list[float | None]) -> TrajectoryGroup:
    """A group of `chain`; None is a rollout that fails after its calls."""
    client = clients.asynchronous(clients.serve(_reply))

    @rollout(name="chain")
    async def run(reward: float | None) -> None:
        await chain(client)
        if reward is None:
            raise ValueError("no")
        record_reward(reward)

    coroutines = [run(reward) for reward in rewards]
    return await gather_group(coroutines, group_id="g", policy_version=3)


def run_readme(exporter: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the first example of an exporter's README defines."""
    monkeypatch.setenv("OPENAI_BASE_URL", clients.serve(_reply).base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-a-real-key")
    code = (exporter / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names
