"""Scenarios of Anthropic's client, which writes spans itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import anthropic

from tests.dialects.agent import PIXEL

TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]
OPTIONS: dict[str, Any] = {"model": "claude-test", "max_tokens": 64}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def create(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    """One call; the reply as a client replays it."""
    made = client.messages.create(messages=messages, **{**OPTIONS, **options})
    content = [block.model_dump(exclude_none=True) for block in made.content]
    return {"role": "assistant", "content": content}


def read(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    """The same through the client's stream helper."""
    with client.messages.stream(messages=messages, **{**OPTIONS, **options}) as stream:
        made = stream.get_final_message()
    content = [block.model_dump(exclude_none=True) for block in made.content]
    return {"role": "assistant", "content": content}


Ask = Callable[..., Any]


def chat(client: anthropic.Anthropic, ask: Ask = create) -> None:
    options = {"system": "Be terse.\n“ü”", "extra_body": {"temperature": 0.7, "top_k": 20}}
    messages = [user("capital of France?")]
    messages.append(ask(client, messages, stop_sequences=["\n\n"], **options))
    ask(client, [*messages, user("and of Peru?")], **options)


def stream(client: anthropic.Anthropic) -> None:
    chat(client, read)


def talk(client: anthropic.Anthropic) -> None:
    """Two turns; what the replies hold is the server's to say."""
    messages = [user("hm?")]
    messages.append(create(client, messages, thinking=THINKING))
    create(client, [*messages, user("so?")], thinking=THINKING)


def read_talk(client: anthropic.Anthropic) -> None:
    messages = [user("hm?")]
    messages.append(read(client, messages, thinking=THINKING))
    read(client, [*messages, user("so?")], thinking=THINKING)


def loop(client: anthropic.Anthropic, ask: Ask, *results: Any) -> None:
    """Ask until no tool is called; the calls of one reply get the results in turn."""
    messages: list[Any] = [user("1.50 + 2?")]
    while True:
        messages.append(ask(client, messages, tools=TOOLS))
        calls = [block for block in messages[-1]["content"] if block["type"] == "tool_use"]
        if not calls:
            return
        messages.append(
            user(
                [
                    {"type": "tool_result", "tool_use_id": call["id"], **result}
                    for call, result in zip(calls, results, strict=True)
                ]
            )
        )


def tools(client: anthropic.Anthropic) -> None:
    loop(client, create, {"content": "3.50"})


def stream_tools(client: anthropic.Anthropic) -> None:
    loop(client, read, {"content": "3.50"})


def tool_results(client: anthropic.Anthropic) -> None:
    parts = [{"type": "text", "text": "3."}, {"type": "text", "text": "50"}]
    failed = {"content": [{"type": "text", "text": "no such tool"}], "is_error": True}
    loop(client, create, {"content": parts}, failed)


def tool_image(client: anthropic.Anthropic) -> None:
    loop(client, create, {"content": [picture()]})


def picture() -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    return {"type": "image", "source": source}


def image(client: anthropic.Anthropic) -> None:
    text = {"type": "text", "text": "what is it?"}
    messages = [user([text, picture()])]
    messages.append(create(client, messages))
    create(client, [*messages, user("sure?")])


def part_list(client: anthropic.Anthropic) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    system = [{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}]
    messages = [user(parts)]
    messages.append(create(client, messages, system=system))
    create(client, [*messages, user("so?")], system=system)


def endings(client: anthropic.Anthropic) -> None:
    for _ in range(3):
        create(client, [user("go on")], stop_sequences=["END"])


def raw_stream(client: anthropic.Anthropic) -> None:
    for _ in client.messages.create(messages=[user("hm?")], stream=True, **OPTIONS):
        pass


def cut(client: anthropic.Anthropic) -> None:
    with contextlib.suppress(Exception):
        read(client, [user("go on")])
    gc.collect()


def abandoned(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=[user("go on")], **OPTIONS) as made:
        for event in made:
            if event.type == "content_block_delta":
                break
    del made
    gc.collect()


def error(client: anthropic.Anthropic) -> None:
    with contextlib.suppress(anthropic.BadRequestError):
        create(client, [user("too long")])
    create(client, [user("shorter")])


def count(client: anthropic.Anthropic) -> None:
    client.messages.count_tokens(model="claude-test", messages=[user("hm?")])
    create(client, [user("hm?")])


def longer(client: anthropic.Anthropic) -> None:
    messages = [user("x" * 150)]
    messages.append(create(client, messages))
    create(client, [*messages, user("y" * 170)])


SCENARIOS: dict[str, Callable[[anthropic.Anthropic], None]] = {
    "abandoned": abandoned,
    "cached": talk,
    "chat": chat,
    "count": count,
    "cut": cut,
    "endings": endings,
    "error": error,
    "image": image,
    "no_content": talk,
    "odd_blocks": talk,
    "part_list": part_list,
    "raw_stream": raw_stream,
    "stream": stream,
    "stream_thinking": read_talk,
    "stream_tools": stream_tools,
    "thinking": talk,
    "tool_image": tool_image,
    "tool_results": tool_results,
    "tools": tools,
    "truncated": longer,
    "value_limit": longer,
}


def run(name: str, url: str) -> None:
    base_url = url.removesuffix("/v1")
    SCENARIOS[name](anthropic.Anthropic(base_url=base_url, api_key="k", max_retries=0))
