"""Rollouts of many kinds, to be rebuilt from wherever their spans went."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import openai

import otel_rollout
from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Reply, ToolCall

Run = Callable[[str], None]
"""Runs rollouts against the server at this address."""


@contextlib.contextmanager
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="sk-secret", max_retries=0) as made:
        yield made


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply_to(request: dict[str, Any]) -> Reply:
    """What the server of all scenarios says."""
    messages = request.get("messages") or [{}]
    last = messages[-1].get("content")
    if last == "fail":
        raise ValueError("the server fails")
    if last == "cut":
        return Reply("cut off in the middle of it", cut_after=3)
    if request.get("tools") and messages[-1].get("role") != "tool":
        call = ToolCall("look_up", '{"key": "Zürich",  "n": 1.50}')
        return Reply(tool_calls=[call, call], reasoning="two at once")
    return Reply(f"reply to {last!s:.40}", reasoning="thinking" if last == "think" else None)


def plain(url: str) -> None:
    with client(url) as c, rollout("plain"):
        c.chat.completions.create(model="m", messages=[user("hello")])  # type: ignore[list-item]


def tool_loop(url: str) -> None:
    @otel_rollout.tool
    def look_up(key: str) -> str:
        return f"{key} is sunny"

    tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    with client(url) as c, rollout("tools", task_id=17, group_id="g", sample_index=2):
        messages: list[Any] = [user("weather?")]
        for _ in range(2):
            reply = c.chat.completions.create(model="m", messages=messages, tools=tools)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            for call in reply.choices[0].message.tool_calls or ():
                text = look_up("Zürich")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def streamed(url: str) -> None:
    with client(url) as c, rollout("streamed"):
        for text in ("one", "think"):
            options: Any = {"stream_options": {"include_usage": True}}
            messages: Any = [user(text)]
            list(c.chat.completions.create(model="m", messages=messages, stream=True, **options))


def streams_that_end_early(url: str) -> None:
    messages: Any = [user("long")]
    with client(url) as c, rollout("abandoned"):
        with c.chat.completions.create(model="m", messages=messages, stream=True) as stream:
            next(iter(stream))
        cut: Any = [user("cut")]
        with contextlib.suppress(Exception):
            list(c.chat.completions.create(model="m", messages=cut, stream=True))


def choices(url: str) -> None:
    messages: Any = [user("several")]
    with client(url) as c, rollout("choices") as trajectory:
        reply = c.chat.completions.create(model="m", messages=messages, n=3)
        history = trajectory.get_history(reply.id, 1)
        history.append(user("appended"))
        otel_rollout.record_reward(0.25, completion_id=reply.id)


def failures(url: str) -> None:
    messages: Any = [user("fail")]
    with client(url) as c, rollout("a call fails"), contextlib.suppress(openai.APIError):
        c.chat.completions.create(model="m", messages=messages)
    with contextlib.suppress(ValueError), rollout("the agent fails"):
        raise ValueError("é \u2028 \x00 sk-secret")


def cancelled(url: str) -> None:
    async def agent() -> None:
        with rollout("cancelled"):
            await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.ensure_future(agent())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


def annotated(url: str) -> None:
    for version in ("7", 7, "step-é", None):
        with (
            client(url) as c,
            rollout("annotated", policy_version=version, trainable=version is None) as trajectory,
        ):
            c.chat.completions.create(model="m", messages=[user("a")])  # type: ignore[list-item]
            trajectory.metadata["nested"] = {"a": [1, None, {"b": "\u2028\x7f"}], "true": True}
            trajectory.metadata["text"] = "true"
            trajectory.metrics["n"] = 3
            trajectory.metrics["tiny"] = 1e-300
            trajectory.log("a line\nand another \U0001f600")
            otel_rollout.record_reward(0.1 + 0.2, name="exact")
            trajectory.reward = -0.0


def late_rewards(url: str) -> None:
    with client(url) as c, rollout("judged") as trajectory:
        c.chat.completions.create(model="m", messages=[user("a")])  # type: ignore[list-item]
    trajectory.reward = 0.5
    trajectory.reward = 0.75
    trajectory.rewards["style"] = 1


def nested(url: str) -> None:
    with client(url) as c, rollout("outer"):
        plain(url)
        with rollout("inner"):
            c.chat.completions.create(model="m", messages=[user("in")])  # type: ignore[list-item]
        c.chat.completions.create(model="m", messages=[user("out")])  # type: ignore[list-item]


def other_endpoints(url: str) -> None:
    with client(url) as c, rollout("others"):
        first = c.responses.create(model="m", input="hi", instructions="be kind")
        c.responses.create(model="m", input="again", previous_response_id=first.id)
        c.completions.create(model="m", prompt="once upon", n=2)
        c.embeddings.create(model="m", input=["a", "b"])


def parts_and_unicode(url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    content = [{"type": "text", "text": "\U0001f600"}, image]
    with client(url) as c, rollout("parts"):
        messages: list[Any] = [{"role": "system", "content": ""}, user(content)]
        c.chat.completions.create(model="m", messages=messages, seed=2**53 + 1, temperature=0.1)


def long(url: str) -> None:
    with client(url) as c, rollout("long"):
        messages: list[Any] = []
        for turn in range(30):
            messages.append(user(f"{turn} " + "é" * 1000))
            reply = c.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump())


def at_once(url: str) -> None:
    async def ask(c: openai.AsyncOpenAI, text: str) -> None:
        await c.chat.completions.create(model="m", messages=[user(text)])  # type: ignore[list-item]

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
        async with client as c, rollout("at once"):
            await asyncio.gather(*(ask(c, str(number % 3)) for number in range(8)))

    asyncio.run(run())


def empty(url: str) -> None:
    with rollout("empty"):
        pass


SCENARIOS: dict[str, Run] = {
    run.__name__: run
    for run in (
        plain,
        tool_loop,
        streamed,
        streams_that_end_early,
        choices,
        failures,
        cancelled,
        annotated,
        late_rewards,
        nested,
        other_endpoints,
        parts_and_unicode,
        long,
        at_once,
        empty,
    )
}


def play(*names: str) -> None:
    """Run these scenarios, all without names."""
    with ModelServer(reply_to, token_ids=True, logprobs=True) as server:
        for name in names or SCENARIOS:
            SCENARIOS[name](server.base_url)
