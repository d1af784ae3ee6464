"""An agent of the OpenAI client for each scenario; `instrumented.py` runs them.

They need the OpenAI client and nothing of this project.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import Any

import openai
import pydantic

MODEL = "org/test-model"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5"
    "ErkJggg=="
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
            "strict": False,
        },
    }
]
RESPONSES_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": False,
    }
]


def instrument_client(client: Any) -> None:
    """Some instrumentations are put on a client rather than on the library."""


class Answer(pydantic.BaseModel):
    city: str


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def create(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """One call, streamed or not; the reply as a client replays it."""
    made = client.chat.completions.create(model=MODEL, messages=messages, **options)
    if not options.get("stream"):
        return made.choices[0].message.model_dump(exclude_none=True)
    text, calls = "", list[dict[str, Any]]()
    for chunk in made:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    reply = {"role": "assistant", "content": text}
    return {**reply, "tool_calls": calls} if calls else reply


def chat(client: openai.OpenAI, **options: Any) -> None:
    messages = [{"role": "system", "content": "Be terse.\n“ü”"}, user("capital of France?")]
    sampling = {"temperature": 0.7, "max_completion_tokens": 64, "seed": 7, **options}
    messages.append(create(client, messages, **sampling))
    create(client, [*messages, user("and of Peru?")], **sampling)


def stream(client: openai.OpenAI) -> None:
    chat(client, stream=True, stream_options={"include_usage": True})


def tools(client: openai.OpenAI, **options: Any) -> None:
    messages = [user("1.50 + 2?")]
    while True:
        reply = create(client, messages, tools=TOOLS, **options)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3.50"}
            messages.append(result)


def stream_tools(client: openai.OpenAI) -> None:
    tools(client, stream=True)


def choices(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=[user("a or b?")], n=2)
    reply = made.choices[1].message.model_dump(exclude_none=True)
    create(client, [user("a or b?"), reply, user("sure?")])


def image(client: openai.OpenAI) -> None:
    urls = ["https://example.com/cat.png", f"data:image/png;base64,{PIXEL}"]
    parts: list[Any] = [{"type": "text", "text": "what is it?"}]
    parts += [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, user("sure?")])


def remote_image(client: openai.OpenAI) -> None:
    url = {"url": "https://example.com/cat.png", "detail": "low"}
    parts = [{"type": "text", "text": "and?"}, {"type": "image_url", "image_url": url}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, user("sure?")])


def structured(client: openai.OpenAI) -> None:
    client.chat.completions.parse(
        model=MODEL, messages=[user("capital of Peru?")], response_format=Answer
    )


def streamed_talk(client: openai.OpenAI) -> None:
    create(client, [user("hm?")], stream=True, stream_options={"include_usage": True})


def talk(client: openai.OpenAI) -> None:
    """Two turns; what the replies hold is the server's to say."""
    messages = [{**user("hm?"), "name": "ann"}]
    messages.append(create(client, messages))
    create(client, [*messages, user("so?")])


def part_list(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, {"role": "user", "content": [{"type": "text", "text": "so?"}]}])


def tokens(client: openai.OpenAI) -> None:
    extra = {"top_k": 20, "return_token_ids": True}
    create(client, [user("hi")], logprobs=True, extra_body=extra)
    create(client, [user("hi there")], stream=True, logprobs=True, extra_body=extra)


def error(client: openai.OpenAI) -> None:
    with contextlib.suppress(openai.BadRequestError):
        create(client, [user("too long")])
    create(client, [user("shorter")])


def cut(client: openai.OpenAI) -> None:
    with contextlib.suppress(Exception):  # which one depends on the client's version
        create(client, [user("go on")], stream=True)
    gc.collect()


def abandoned(client: openai.OpenAI) -> None:
    messages = [user("go on")]
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as made:
        next(iter(made))
    del made
    gc.collect()


def cancelled(client: openai.OpenAI) -> None:
    async def call() -> None:
        slow = openai.AsyncOpenAI(base_url=client.base_url, api_key="k", max_retries=0)
        instrument_client(slow)
        await slow.chat.completions.create(model=MODEL, messages=[user("are you there?")])

    async def run() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(call(), 2)

    asyncio.run(run())
    create(client, [user("hello?")])


def long(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Count."}]
    for number in range(70):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": f"number {number}"})
    messages.append(user("next?"))
    messages.append(create(client, messages, temperature=0.5))
    create(client, [*messages, user("next?")], temperature=0.5)


def value_limit(client: openai.OpenAI) -> None:
    messages = [user("x" * 150)]
    messages.append(create(client, messages))
    create(client, [*messages, user("y" * 170)])


def responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be terse.",
        "tools": RESPONSES_TOOLS,
    }
    items: list[Any] = [user("1.50 + 2?")]
    made = client.responses.create(input=items, **options)
    items += [item.model_dump(exclude_none=True) for item in made.output]
    calls = [item for item in made.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3.50"}
        for call in calls
    ]
    made = client.responses.create(input=items, **options)
    client.responses.create(input="and 1?", previous_response_id=made.id, **options)


def responses_stream(client: openai.OpenAI) -> None:
    for _ in client.responses.create(model=MODEL, input="hi", stream=True):
        pass


def completions(client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8)
    for _ in client.completions.create(model=MODEL, prompt="a time", max_tokens=8, stream=True):
        pass


def embeddings(client: openai.OpenAI) -> None:
    client.embeddings.create(model=MODEL, input="embed this")


SCENARIOS: dict[str, Callable[[openai.OpenAI], None]] = {
    "abandoned": abandoned,
    "cancelled": cancelled,
    "chat": chat,
    "choices": choices,
    "completions": completions,
    "cut": cut,
    "embeddings": embeddings,
    "error": error,
    "image": image,
    "long": long,
    "parallel_tools": tools,
    "part_list": part_list,
    "reasoning": talk,
    "refusal": talk,
    "remote_image": remote_image,
    "responses": responses,
    "responses_stream": responses_stream,
    "stream": stream,
    "stream_reasoning": streamed_talk,
    "stream_refusal": streamed_talk,
    "stream_tools": stream_tools,
    "structured": structured,
    "tokens": tokens,
    "tools": tools,
    "value_limit": value_limit,
}
