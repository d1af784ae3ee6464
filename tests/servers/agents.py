"""Agents as people write them, small, whose rollouts are hard to record: run on real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import openai

from otel_rollout import Completion
from tests.servers.model import TOOLS, Message, user

CALL_SECONDS = 120.0  # vLLM compiles at its first call


@dataclass
class Chat:
    """Calls of one rollout: plain ones, or streamed ones put together as an agent does."""

    client: openai.AsyncOpenAI
    stream: bool
    seeds: count[int] = field(default_factory=count)

    async def ask(self, messages: list[Any], **options: Any) -> Message:
        """The reply of one choice."""
        return (await self.choices(messages, **options))[0]

    async def choices(self, messages: list[Any], **options: Any) -> list[Message]:
        """The replies of all choices, as they are sent back."""
        options = {"max_tokens": 100, "seed": next(self.seeds), **options}
        create = self.client.chat.completions.create
        if not self.stream:
            made = await create(model="tiny", messages=messages, **options)
            return [choice.message.model_dump(exclude_none=True) for choice in made.choices]
        replies: dict[int, Message] = {}
        async for chunk in await create(
            model="tiny",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        ):
            for choice in chunk.choices:
                reply = replies.setdefault(choice.index, {"role": "assistant", "content": ""})
                _add(reply, choice.delta.model_dump(exclude_none=True))
        return [replies[index] for index in sorted(replies)]


def _add(reply: Message, delta: Message) -> None:
    for key in ("content", "reasoning", "reasoning_content"):
        if key in delta:
            reply[key] = reply.get(key, "") + delta[key]
    for piece in delta.get("tool_calls", ()):
        calls = reply.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            function = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
        calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments", "")


def serving(address: str) -> openai.AsyncOpenAI:
    """A client of a server, which does not wait for ever."""
    return openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=CALL_SECONDS
    )


Agent = Callable[[Chat], Awaitable[None]]


async def tools(chat: Chat) -> None:
    """Five turns in which the model may call a tool, its replies sent back as they came."""
    messages = [user("Add 3 and 14.")]
    for turn in range(5):
        reply = await chat.ask(messages, tools=TOOLS)
        messages += [reply, *(_results(reply) or [user(f"Add {turn} and 14.")])]


def _results(reply: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": "17"}
        for call in reply.get("tool_calls", ())
    ]


async def rewritten_arguments(chat: Chat) -> None:
    """Arguments are parsed and written again, in another style than they were sampled in."""
    messages = [user("Add 3 and 14.")]
    for _ in range(3):
        reply = await chat.ask(messages, tools=TOOLS, temperature=0.3)
        for call in reply.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=1)
        messages += [reply, *(_results(reply) or [user("Add 3 and 14.")])]


async def thinking(chat: Chat) -> None:
    """The template leaves out the thinking of earlier turns: what was sampled is not sent back."""
    messages: list[Message] = []
    for text in ("Say something.", "Are you sure?", "Why?", "Go on."):
        messages.append(user(text))
        messages.append(await chat.ask(messages))


async def sub_agents(chat: Chat) -> None:
    """Three conversations at once beside the one that starts and ends."""
    messages = [user("Say something.")]
    messages.append(await chat.ask(messages))

    async def sub_agent(text: str) -> str:
        asked: list[Message] = [{"role": "system", "content": "You help."}, user(text)]
        asked.append(await chat.ask(asked))
        return str((await chat.ask([*asked, user("Go on.")])).get("content", ""))

    found = await asyncio.gather(*map(sub_agent, ("Why?", "Be brief.", "Why?")))
    await chat.ask([*messages, user(" ".join(found))])


async def four_choices(chat: Chat) -> None:
    """Four samples of one prompt, and the third goes on."""
    messages = [user("Say something.")]
    replies = await chat.choices(messages, n=4)
    await chat.ask([*messages, replies[2], user("Go on.")])


async def compaction(chat: Chat) -> None:
    """A conversation that grew long is replaced by a summary of it."""
    messages = [user("Say something.")]
    for _ in range(2):
        messages += [await chat.ask(messages), user("Go on.")]
    summary = await chat.ask([*messages, user("Be brief.")])
    messages = [user("So far: " + str(summary.get("content")))]
    messages += [await chat.ask(messages), user("Go on.")]
    await chat.ask(messages)


async def prefill(chat: Chat) -> None:
    """The reply goes on from a beginning that the agent wrote, and is sent back in one piece."""
    beginning: Message = {"role": "assistant", "content": "The quick"}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    reply = await chat.ask([user("Go on."), beginning], extra_body=goes_on)
    whole = {**beginning, "content": "The quick" + str(reply.get("content") or "")}
    await chat.ask([user("Go on."), whole, user("Are you sure?")])


async def stop_strings(chat: Chat) -> None:
    """A string ends the reply, and is cut off from what the agent sees."""
    messages = [user("Say something.")]
    for stop in (["dog"], [".", "fish"], ["are", "in"]):
        messages.append(await chat.ask(messages, stop=stop))
        messages.append(user("Go on."))


async def cut(chat: Chat) -> None:
    """A length limit ends the replies, also inside the thinking, a tool call and a character."""
    for limit in (1, 2, 5, 9, 14, 15, 16, 17, 18, 19):
        messages = [user("Say something.")]
        messages.append(await chat.ask(messages, max_tokens=limit))
        await chat.ask([*messages, user("Go on.")], max_tokens=limit)
    await chat.ask([user("Add 3 and 14.")], tools=TOOLS, max_tokens=12)


async def split_characters(chat: Chat) -> None:
    """Hot samples: bytes that are parts of characters, marks out of place, tools half called."""
    for turn in range(6):
        messages = [user("Say something. ☃ 東京 🙂")]
        options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 60}
        if turn % 2:
            options["tools"] = TOOLS
        messages.append(await chat.ask(messages, **options))
        await chat.ask([*messages, user("Why?")], **options)


async def special_tokens(chat: Chat) -> None:
    """The text shows the end token, and is sent back with it."""
    messages = [user("Be brief.")]
    messages.append(await chat.ask(messages, extra_body={"skip_special_tokens": False}))
    await chat.ask([*messages, user("Go on.")])


async def asked_twice(chat: Chat) -> None:
    """The same request twice; the second reply goes on."""
    messages = [user("Say something.")]
    await chat.ask(messages)
    messages.append(await chat.ask(messages))
    await chat.ask([*messages, user("Why?")])


async def left_early(chat: Chat) -> None:
    """A stream that the agent leaves after two chunks; then it asks again."""
    messages: list[Any] = [user("Say something.")]
    stream: Any = await chat.client.chat.completions.create(
        model="tiny", messages=messages, stream=True, max_tokens=50
    )
    async with aclosing(aiter(stream)) as chunks:
        await anext(chunks)
        await anext(chunks)
    await stream.close()
    await chat.ask(messages)


def _called(completions: Sequence[Completion]) -> bool:
    return any(c.finish_reason == "tool_calls" for c in completions)


def _thought(completions: Sequence[Completion]) -> bool:
    return any((c.message or {}).get("reasoning") for c in completions)


def _ended_as(reason: str) -> Callable[[Sequence[Completion]], bool]:
    return lambda completions: any(c.finish_reason == reason for c in completions)


AGENTS: dict[Agent, Callable[[Sequence[Completion]], bool]] = {
    tools: _called,
    rewritten_arguments: _called,
    thinking: _thought,
    sub_agents: lambda completions: len(completions) == 8,
    four_choices: lambda completions: {c.choice_index for c in completions} == {0, 1, 2, 3},
    compaction: _ended_as("stop"),
    prefill: lambda completions: len({(c.prompt_token_ids or [])[-1] for c in completions}) == 2,
    stop_strings: lambda completions: any(c.stop_reason for c in completions),
    cut: _ended_as("length"),
    split_characters: lambda completions: any("\ufffd" in str(c.message) for c in completions),
    special_tokens: _ended_as("stop"),
    asked_twice: lambda completions: len({str(c.prompt_token_ids) for c in completions}) == 2,
    left_early: lambda completions: completions[0].status == "abandoned",
}
"""Each agent, and a sign in its completions that what it is for did happen."""
