"""Streams whose pieces contradict each other, as servers and proxies have sent them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from otel_rollout import Completion, Trajectory, rollout
from otel_rollout.gateway import serve
from otel_rollout.testing import Raw
from tests.kit.calling import Configure, outcome
from tests.kit.conversations import ASK
from tests.kit.outside import send
from tests.kit.recording import Clients
from tests.record.endings.breaking import HEAD

Json = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"


@dataclass(frozen=True)
class Case:
    """A stream, and what is right of it."""

    chunks: list[Json]
    request: Json = field(default_factory=dict)
    path: str = CHAT
    rows: list[list[int]] = field(default_factory=list)
    """Token ids of the rows."""
    named: str | None = None
    """What a contradiction of it has. None: it has none."""
    says: Callable[[Completion], object] = lambda _: None
    said: object = None
    """What `says` gives."""


def chat(delta: Json, reason: str | None = None, **members: Any) -> Json:
    """A chunk with one choice; members: `id`, `model` of the chunk, else of its choice."""
    head: Json = {name: members.pop(name) for name in ("id", "model") if name in members}
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **members}
    prompt = {"prompt_token_ids": [1, 2]} if "role" in delta else {}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        **head,
        **prompt,
        "choices": [choice],
    }


def counted(tokens: int) -> Json:
    usage = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": 2 + tokens}
    return {"id": "c", "model": "m", "choices": [], "usage": usage}


def call(name: str | None, arguments: str, **members: Any) -> Json:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"tool_calls": [{"type": "function", "function": function, **members}]}


def calls(completion: Completion) -> list[tuple[str, str]]:
    assert completion.message is not None
    listed = [each["function"] for each in completion.message["tool_calls"]]
    return [(each["name"], each["arguments"]) for each in listed]


def content(completion: Completion) -> Any:
    assert completion.message is not None
    return completion.message["content"]


FIRST: Json = {"role": "assistant", "content": ""}
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'
TWO = [("weather", ROME), ("weather", OSLO)]
END = chat({}, "tool_calls", token_ids=[5, 8])


def message(*events: Json) -> list[Json]:
    """The events of a message, with its start and its end."""
    start: Json = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": []}
    return [
        {"type": "message_start", "message": start},
        *events,
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]


def block(event: str, index: object, **members: Any) -> Json:
    at = {} if index == "missing" else {"index": index}
    name = {"start": "content_block", "delta": "delta"}[event]
    return {"type": f"content_block_{event}", **at, name: members}


TEXT, THOUGHT = {"type": "text", "text": ""}, {"type": "thinking", "thinking": ""}


def both(index: object) -> list[Json]:
    """A text, and then a thought."""
    return message(
        block("start", index, **TEXT),
        block("delta", index, text="It is"),
        block("start", index, **THOUGHT),
        block("delta", index, thinking="Hm"),
    )


BOTH = [{"type": "text", "text": "It is"}, {"type": "thinking", "thinking": "Hm"}]


def item(text: str, **members: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "i", "role": "assistant", "content": [part], **members}


def response(*events: Json, **last: Any) -> list[Json]:
    """The events of a response; last: members of the response at the end."""
    begun = {"id": "r", "object": "response", "model": "m", "status": "in_progress", "output": []}
    return [
        {"type": "response.created", "response": begun},
        *events,
        {"type": "response.completed", "response": {**begun, "status": "completed", **last}},
    ]


def spoken(text: str) -> list[Json]:
    return [
        {"type": "response.output_item.added", "output_index": 0, "item": item("")},
        *(
            {
                "type": "response.output_text.delta",
                "output_index": 0,
                "content_index": 0,
                "delta": t,
            }
            for t in text.partition(" ")
        ),
        {"type": "response.output_item.done", "output_index": 0, "item": item(text)},
    ]


def function(call_id: str) -> Json:
    return {"type": "function_call", "id": "f", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(completion: Completion) -> list[Any]:
    return [each.get("call_id") or each["content"][0]["text"] for each in completion.items]


CASES: dict[str, Case] = {
    "n choices that all have index 0": Case(
        [
            chat(FIRST, token_ids=[5]),
            chat({"content": "a"}, token_ids=[8]),
            chat({"content": "b"}, "stop", token_ids=[6]),
            chat({"content": "c"}, "stop", token_ids=[9]),
            counted(4),
        ],
        {"n": 2},
        named="2 choices were asked for",
    ),
    "n choices without an index": Case(
        [
            chat(FIRST, index=None, token_ids=[5]),
            chat({"content": "a"}, "stop", index=None, token_ids=[8]),
            counted(2),
        ],
        {"n": 2},
        named="2 choices were asked for",
    ),
    "n choices as they should be": Case(
        [
            chat(FIRST, token_ids=[5]),
            chat(FIRST, token_ids=[6], index="1"),
            chat({"content": "a"}, "stop", token_ids=[8]),
            chat({"content": "b"}, "stop", token_ids=[9], index="1"),
            counted(4),
        ],
        {"n": 2},
        rows=[[1, 2, 5, 8], [1, 2, 6, 9]],
    ),
    "two calls at one index": Case(
        [
            chat(FIRST),
            chat(call("weather", ROME, id="call_a", index=0)),
            chat(call("weather", OSLO, id="call_b", index=0)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=TWO,
    ),
    "two calls without an index": Case(
        [
            chat(FIRST),
            chat(call("weather", "", id="call_a")),
            chat(call(None, ROME)),
            chat(call("weather", "", id="call_b")),
            chat(call(None, OSLO)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=TWO,
    ),
    "two calls with one id": Case(
        [
            chat(FIRST),
            chat(call("weather", ROME, id="x", index=0)),
            chat(call("weather", OSLO, id="x", index=1)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=TWO,
    ),
    "two calls that nothing tells apart": Case(
        [
            chat(FIRST),
            chat(call("weather", ROME, index=0)),
            chat(call("weather", OSLO, index=0)),
            END,
            counted(2),
        ],
        named="arguments of a tool call are those of several",
    ),
    "calls whose pieces are mixed, at one index": Case(
        [
            chat(FIRST),
            chat(call("weather", "", id="call_a", index=0)),
            chat(call("weather", "", id="call_b", index=0)),
            chat(call(None, ROME, index=0)),
            chat(call(None, OSLO, index=0)),
            END,
            counted(2),
        ],
        named="pieces of its tool calls cannot be told apart",
    ),
    "another name at one index": Case(
        [
            chat(FIRST),
            chat(call("weather", ROME, index=0)),
            chat(call("time", OSLO, index=0)),
            END,
            counted(2),
        ],
        named="name changes from 'weather' to 'time'",
    ),
    "the name on every chunk": Case(
        [
            chat(FIRST),
            chat(call("weather", "", id="call_a", index=0)),
            chat(call("weather", ROME[:5], index=0)),
            chat(call("weather", ROME[5:], index=0)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=TWO[:1],
    ),
    "the name in pieces, the id on each": Case(
        [
            chat(FIRST),
            chat(call("wea", "", id="call_a", index=0)),
            chat(call("ther", ROME, id="call_a", index=0)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=TWO[:1],
    ),
    "a reply that goes on elsewhere": Case(
        [
            chat(FIRST, token_ids=[5], id="A"),
            chat({"content": "x"}, "stop", token_ids=[6], id="B", model="another"),
            counted(2),
        ],
        named="model changes from 'm' to 'another'",
    ),
    "a reply that goes on in another": Case(
        [
            chat(FIRST, token_ids=[5], id="A"),
            chat({"content": "x"}, token_ids=[5], id="A"),
            chat({"content": "x"}, "stop", token_ids=[6], id="B"),
        ],
        named="id changes from 'A' to 'B'",
    ),
    "an id for each chunk": Case(
        [
            chat(FIRST, token_ids=[5], id="A"),
            chat({"content": "x"}, token_ids=[6], id="B"),
            chat({"content": "y"}, "stop", token_ids=[7], id="C"),
            counted(3),
        ],
        rows=[[1, 2, 5, 6, 7]],
    ),
    "an error on the choice": Case(
        [
            chat(FIRST, token_ids=[5]),
            chat({}, "error", token_ids=[6], error={"code": 502, "message": "no"}),
            counted(2),
        ],
        says=lambda completion: (completion.status, completion.error),
        said=("error", {"type": "ErrorResponse", "message": "no (code 502)"}),
    ),
    "two blocks of one index": Case(both(0), path=MESSAGES, says=content, said=BOTH),
    "blocks whose index is null": Case(both(None), path=MESSAGES, says=content, said=BOTH),
    "blocks without an index": Case(both("missing"), path=MESSAGES, says=content, said=BOTH),
    "a text that no start began": Case(
        message(block("delta", 0, type="text_delta", text="It is")),
        path=MESSAGES,
        says=content,
        said=BOTH[:1],
    ),
    "a call that no start began": Case(
        message(block("delta", 0, type="input_json_delta", partial_json="{}")),
        path=MESSAGES,
        named="a content block that nothing began",
    ),
    "a response with less at its end": Case(
        response(*spoken("It is warm."), output=[item(".")]),
        path=RESPONSES,
        named="is not in the response at the end",
        says=output,
        said=["It is warm."],
    ),
    "a response with nothing at its end": Case(
        response(*spoken("It is warm."), output=[]),
        path=RESPONSES,
        says=output,
        said=["It is warm."],
    ),
    "a response without an output": Case(
        response(*spoken("It is warm."), output=None),
        path=RESPONSES,
        says=output,
        said=["It is warm."],
    ),
    "a call with two ids": Case(
        response(
            {"type": "response.output_item.done", "output_index": 0, "item": function("a")},
            output=[function("b")],
        ),
        path=RESPONSES,
        named="is not in the response at the end",
        says=output,
        said=["a"],
    ),
    "deltas of another text than their item": Case(
        response(
            *spoken("It is warm.")[:-1], spoken("It is cold.")[-1], output=[item("It is cold.")]
        ),
        path=RESPONSES,
        named="says first 'It is warm.' and then 'It is cold.'",
    ),
    "deltas of an item that nothing began": Case(
        response(spoken("It is warm.")[1], output=[]),
        path=RESPONSES,
        named="an output item that nothing began",
    ),
    "deltas of an item that the end has": Case(
        response(*spoken("It is warm.")[1:-1], output=[item("It is warm.")]),
        path=RESPONSES,
        says=output,
        said=["It is warm."],
    ),
    "deltas of another item than the end has": Case(
        response(spoken("It is warm.")[1], output=[item("It is cold.")]),
        path=RESPONSES,
        named="is not in the response at the end",
    ),
    "choices that begin together, without indexes": Case(
        [
            {**chat({}), "choices": [{"delta": FIRST, "token_ids": [n]} for n in (5, 6)]},
            *(
                {**chat({}), "choices": [{"delta": {"content": t}, "finish_reason": "stop"}]}
                for t in "ab"
            ),
            counted(2),
        ],
        {"n": 2},
        named="2 choices were asked for",
    ),
    "a call without arguments, and one with": Case(
        [
            chat(FIRST),
            chat(call("now", "", id="call_a", index=0)),
            chat(call("weather", "", id="call_b", index=0)),
            chat(call(None, ROME, index=0)),
            END,
            counted(2),
        ],
        rows=[[1, 2, 5, 8]],
        says=calls,
        said=[("now", ""), ("weather", ROME)],
    ),
    "a count of another model": Case(
        [chat({**FIRST, "content": "a"}, "stop", token_ids=[5]), {**counted(1), "model": "p/m"}],
        rows=[[1, 2, 5]],
        says=content,
        said="a",
    ),
    "a tool of the server, by its own name": Case(
        [
            chat(FIRST),
            chat({"tool_calls": [{"index": 0, "type": "web_search", "web_search": {"q": "x"}}]}),
            chat({"content": "a"}, "stop", token_ids=[5]),
            counted(1),
        ],
        rows=[[1, 2, 5]],
    ),
    "pieces after two starts at one index": Case(
        message(
            *(block("start", 0, type="tool_use", id=i, name="f", input={}) for i in "ab"),
            block("delta", 0, partial_json=ROME),
            block("delta", 0, partial_json=OSLO),
        ),
        path=MESSAGES,
        named="cannot be told apart",
    ),
    "a text in a call": Case(
        message(
            block("start", 0, **TEXT),
            block("start", 0, type="tool_use", id="a", name="f", input={}),
            block("delta", 0, text="It is"),
        ),
        path=MESSAGES,
        named="a piece of type 'text' is in a block of type 'tool_use'",
    ),
}


def asked(path: str) -> Json:
    """The least request at a path."""
    apis: dict[str, Json] = {RESPONSES: {"input": "Hi"}, MESSAGES: {"max_tokens": 9}}
    members = apis.get(path, {})
    return {
        "model": "m",
        "stream": True,
        **({} if path == RESPONSES else {"messages": ASK}),
        **members,
    }


@pytest.mark.parametrize("way", ["client", "library", "gateway"])
@pytest.mark.parametrize("name", CASES)
async def test_what_is_put_together_is_the_reply_or_is_named(
    capture_only: Configure, clients: Clients, name: str, way: str
) -> None:
    """Through a client, an HTTP library and a gateway; and read from a file it says the same."""
    case, recording = CASES[name], capture_only()
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in case.chunks]
    done = [b"data: [DONE]\n\n"] if case.path == CHAT else []
    server = clients.serve(Raw(chunks=[*lines, *done], content_type="text/event-stream"))
    request = {**asked(case.path), **case.request}
    with rollout("x"):
        if way == "gateway":
            async with serve(server.base_url) as gateway:
                await send(gateway.base_url() + case.path, request)
        elif way == "client" and case.path == CHAT:
            [_ async for _ in await clients.asynchronous(server).chat.completions.create(**request)]
        else:
            requests.post(f"{server.base_url}{case.path}", json=request, timeout=30)
    trajectory = recording.trajectory
    read = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    for one in (trajectory, read):
        first = one.completions[0]
        assert sorted(row.token_ids for row in one.token_sequences()) == case.rows
        assert case.says(first) == case.said
        if case.named is None:
            assert first.contradictions == []
        else:
            assert case.named in " ".join(first.contradictions)
            assert not first.trainable
            assert any("contradicts itself" in warning for warning in one.warnings)
            assert {drop.cause for drop in one.token_sequences().dropped} == {"contradicted"}


@pytest.mark.slow
@pytest.mark.parametrize("reasons", [("", ""), ("stop", "stop"), (None, "stop")])
async def test_what_the_client_raised_on_does_not_train(
    capture_only: Configure,
    clients: Clients,
    breaking: Callable[..., Any],
    reasons: tuple[str | None, str],
) -> None:
    """Where the connection breaks: whatever had come, and whatever it said of its end."""
    recording = capture_only()
    sent = [
        chat(FIRST, reasons[0], token_ids=[5]),
        chat({"content": "a"}, reasons[1], token_ids=[8]),
    ]
    lines = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in sent]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines)
    client = clients.asynchronous(breaking(HEAD + framed))

    async def read() -> None:
        async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            pass

    with rollout("x"):
        raised = await outcome(read())
    assert "Error" in str(raised)
    (completion,) = recording.trajectory.completions
    assert completion.status == "error"
    assert recording.trajectory.token_sequences() == []


@pytest.mark.parametrize("reasons", [["", ""], ["stop", "stop"]])
async def test_a_stream_that_ends_early_is_no_reply(
    capture_only: Configure, clients: Clients, reasons: list[str]
) -> None:
    """A server that closes without `[DONE]`, and says on each chunk that it ended, or nothing."""
    recording = capture_only()
    sent = [
        chat(FIRST, reasons[0], token_ids=[5]),
        chat({"content": "a"}, reasons[1], token_ids=[8]),
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in sent]
    client = clients.asynchronous(
        clients.serve(Raw(chunks=lines, content_type="text/event-stream"))
    )
    with rollout("x"), contextlib.suppress(Exception):
        async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            pass
    assert recording.trajectory.completions[0].status == "error"
    assert recording.trajectory.token_sequences() == []


async def test_an_unspecified_reason_is_no_end(capture_only: Configure, clients: Clients) -> None:
    """Of generateContent, whose streams have no other end."""
    recording = capture_only()
    part = {"content": {"role": "model", "parts": [{"text": "a"}]}, "index": 0}
    chunk = {"candidates": [{**part, "finishReason": "FINISH_REASON_UNSPECIFIED"}]}
    line = f"data: {json.dumps(chunk)}\n\n".encode()
    server = clients.serve(Raw(chunks=[line, line], content_type="text/event-stream"))
    url = f"{server.base_url}/models/m:streamGenerateContent?alt=sse"
    with rollout("x"):
        requests.post(url, json={"contents": [{"parts": [{"text": "Hi"}]}]}, timeout=30)
    assert recording.trajectory.completions[0].status == "error"
