"""More scenarios of the OpenAI client: kinds of messages, parts and replies beyond plain chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from tests.dialects.agent import (
    MODEL,
    PIXEL,
    TOOLS,
    create,
    instrument_client,
    user,
)
from tests.dialects.agent import RESPONSES_TOOLS as PLAIN_RESPONSES_TOOLS
from tests.dialects.agent import SCENARIOS as PLAIN

LENGTHS = (4000, 4095, 4096, 4777, 9000)
"""Lengths of texts: some that a limit would leave, some that none would."""
CUSTOM_TOOLS: list[Any] = [
    {"type": "custom", "custom": {"name": "shell", "description": "Run a command."}}
]
PDF = "data:application/pdf;base64,"
ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {}}},
}


def text_of(length: int) -> str:
    return "".join(f"{number:04d} words, " for number in range(length // 12 + 1))[:length]


def loop(client: openai.OpenAI, messages: list[Any], result: Any, **options: Any) -> None:
    """Ask until no tool is called; each call gets the same result."""
    while True:
        reply = create(client, messages, **options)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def custom_tools(client: openai.OpenAI) -> None:
    loop(client, [user("list the files")], "a.txt", tools=[*TOOLS, *CUSTOM_TOOLS])


def tool_parts(client: openai.OpenAI) -> None:
    result = [{"type": "text", "text": "3."}, {"type": "text", "text": "50"}]
    loop(client, [user("1.50 + 2?")], result, tools=TOOLS)


def one_tool_part(client: openai.OpenAI) -> None:
    loop(client, [user("1.50 + 2?")], [{"type": "text", "text": "3.50"}], tools=TOOLS)


def odd_texts(client: openai.OpenAI) -> None:
    """Texts that look like what an instrumentation makes of something else."""
    texts = ['[{"type": "text", "text": "x"}]', '{"a": 1.50}', "null", "3.50", " ", "[]", "None"]
    messages = [user(text) for text in texts]
    messages.append(create(client, messages))
    create(client, [*messages, user("so?")])


def tool_texts(client: openai.OpenAI) -> None:
    loop(client, [user("1.50 + 2?")], '{"sum": 3.50, "parts": [ 1, 2 ]}', tools=TOOLS)


def no_result(client: openai.OpenAI) -> None:
    loop(client, [user("1.50 + 2?")], "", tools=TOOLS)


def streamed_choices(client: openai.OpenAI) -> None:
    messages: Any = [user("a or b?")]
    for _ in client.chat.completions.create(model=MODEL, messages=messages, n=2, stream=True):
        pass


def endings(client: openai.OpenAI) -> None:
    for _ in range(3):
        create(client, [user("go on")])
    for _ in range(2):
        create(client, [user("go on")], stream=True)


def long_text(client: openai.OpenAI) -> None:
    for length in LENGTHS:
        create(client, [user(text_of(length))])


def long_reply(client: openai.OpenAI) -> None:
    for _ in LENGTHS:
        create(client, [user("count")])


def functions(client: openai.OpenAI) -> None:
    """The former way of calling a tool, sent back."""
    said = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    create(client, [user("f?"), said, user("so?")])


def files(client: openai.OpenAI) -> None:
    parts = [
        {"type": "text", "text": "what is said?"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"},
        },
    ]
    create(client, [{"role": "user", "content": parts}])


def image_result(client: openai.OpenAI) -> None:
    """A message of a single image, which has no text beside it."""
    url = {"url": f"data:image/png;base64,{PIXEL}"}
    create(client, [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])


def refused_before(client: openai.OpenAI) -> None:
    parts = [{"type": "refusal", "refusal": "I would rather not."}]
    create(client, [user("hm?"), {"role": "assistant", "content": parts}, user("why?")])


def response_format(client: openai.OpenAI) -> None:
    create(client, [user("answer")], response_format=ANSWER, tool_choice="none", tools=TOOLS)


def talk(client: openai.OpenAI) -> None:
    messages = [user("hm?")]
    messages.append(create(client, messages))
    create(client, [*messages, user("so?")])


def streamed(client: openai.OpenAI) -> None:
    create(client, [user("hm?")], stream=True, stream_options={"include_usage": True})


RESPONSES_TOOLS: list[Any] = [
    *PLAIN_RESPONSES_TOOLS,
    {"type": "custom", "name": "shell", "description": "Run a command."},
]


def responses_loop(client: openai.OpenAI) -> None:
    """Items of every kind, sent back as they came."""
    items: list[Any] = [user("1.50 + 2?")]
    options: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be terse.",
        "tools": RESPONSES_TOOLS,
    }
    made = client.responses.create(input=items, **options)
    items += [item.model_dump(exclude_none=True) for item in made.output]
    items += [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "3.50"}
        for item in made.output
        if item.type in ("function_call", "custom_tool_call")
    ]
    client.responses.create(input=items, **options)


def responses_tool_stream(client: openai.OpenAI) -> None:
    for _ in client.responses.create(
        model=MODEL, input="1.50 + 2?", tools=RESPONSES_TOOLS, stream=True
    ):
        pass


SCENARIOS: dict[str, Callable[[openai.OpenAI], None]] = {
    **PLAIN,
    "cached": talk,
    "custom_tools": custom_tools,
    "endings": endings,
    "files": files,
    "functions": functions,
    "image_result": image_result,
    "long_reply": long_reply,
    "long_text": long_text,
    "mixed_reply": tool_texts,
    "named_reasoning": talk,
    "no_result": no_result,
    "odd_texts": odd_texts,
    "one_tool_part": one_tool_part,
    "refused_before": refused_before,
    "response_format": response_format,
    "responses_custom": responses_loop,
    "responses_reasoning": responses_loop,
    "responses_tool_stream": responses_tool_stream,
    "responses_tools": responses_loop,
    "stream_cached": streamed,
    "stream_named_reasoning": streamed,
    "streamed_choices": streamed_choices,
    "tool_parts": tool_parts,
    "tool_texts": tool_texts,
}


def run(name: str, url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
    instrument_client(client)
    SCENARIOS[name](client)
