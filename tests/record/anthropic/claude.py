"""Sync and async Anthropic clients, the requests they send, and their histories as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import ModelServer
from tests.kit.calling import Caller, done, read
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
KEY = "sk-ant-not-a-real-key"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CACHE = {"type": "ephemeral"}
TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"{name}: " + "what it does, at length. " * 20,
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
    for name in ("add", "find")
]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def said(content: Any) -> Json:
    return {"role": "assistant", "content": content}


def result(name: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


@dataclass(frozen=True)
class Claude(Caller):
    """A sync or an async Anthropic client."""

    def client(self, clients: Clients, server: ModelServer, **options: Any) -> Any:
        url = server.base_url.removesuffix("/v1")
        options = {"base_url": url, "api_key": KEY, "max_retries": 0, **options}
        make = anthropic.Anthropic if self.sync else anthropic.AsyncAnthropic
        client = make(**options)
        _open.append(client)
        return client


_open: list[Any] = []
SYNC = pytest.param(Claude(True), id="sync", marks=pytest.mark.slow)
BOTH = pytest.mark.parametrize("caller", [SYNC, pytest.param(Claude(False), id="async")])
"""A test for each client; `make quick` runs that of the async one."""


async def ask(client: Any, **request: Any) -> Any:
    """Ask; a streamed reply is read to its end."""
    request = {"model": "m", "max_tokens": 100, "messages": ASK, **request}
    reply = await done(client.messages.create(**request))
    return await read(reply) if request.get("stream") else reply


async def played(
    recording: Recording, clients: Clients, caller: Claude, replies: Any, requests: list[Json]
) -> Trajectory:
    """The trajectory of a rollout that sends these requests one after the other."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            for request in requests:
                await ask(client, **request)

    await caller.run(script(caller.client(clients, clients.serve(replies))))
    return replayed(recording)


def table(trajectory: Trajectory) -> list[str]:
    """The histories: `u` a message of the user's, `0*` what completion 0 sampled and trains here,
    `0` the same as context, `0!` where its thinking was dropped, `a` a message nobody sampled.
    """
    number = {completion.span_id: n for n, completion in enumerate(trajectory.completions)}
    return [
        " ".join(
            item.message["role"][0]
            if item.completion is None
            else f"{number[item.completion.span_id]}{'*' * item.trainable}{'!' * item.is_break}"
            for item in history.items
        )
        for history in trajectory.histories
    ]


BLOCKS: list[Any] = [
    {"type": "thinking", "thinking": "France, so ...", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {
        "type": "text",
        "text": "Paris, à côté. 🗼",
        "citations": [{"type": "char_location", "cited_text": c} for c in ("Par", "is")],
    },
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "u", "title": "t", "page_age": None}],
    },
    {"type": "text", "text": ""},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"tool_calls": {"b": 1, "a": 2}}},
]


def events(*chunks: Json) -> str:
    return "".join(f"event: {c['type']}\ndata: {json.dumps(c)}\n\n" for c in chunks)


PARIS = {"type": "text", "text": "Paris"}
