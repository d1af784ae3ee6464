"""Messages of every shape are shown on LLM spans."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from otel_rollout import rollout
from otel_rollout.testing import Raw
from tests.kit.recording import Clients, Recording
from tests.look.llm_spans import (
    CUSTOM,
    DRAWS_RESPONSES,
    ECHOES,
    IMAGE,
    PIXEL,
    STREAMS,
    USER,
    attribute,
    chat_body,
    chunk,
    inputs,
    kept_responses,
    llm,
    outputs,
    says,
    sse,
)

REQUESTS: dict[str, tuple[list[Any], list[Any]]] = {
    "image": (
        IMAGE,
        [
            {"type": "text", "content": "look"},
            {
                "type": "blob",
                "modality": "image",
                "mime_type": "image/png",
                "content": PIXEL.split(",")[1],
            },
        ],
    ),
    "part of an unknown type": (
        [{"role": "user", "content": [{"type": "quote", "quote": {"of": "x"}}]}],
        [{"type": "generic", "generic_type": "quote", "content": "<quote>"}],
    ),
    "image without address": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": None}},
                    {"type": "image_url", "image_url": PIXEL},
                    {"type": "text", "text": "look"},
                ],
            }
        ],
        [{"type": "text", "content": "look"}],
    ),
    "custom tool": (
        [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [CUSTOM]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        [
            {"type": "text", "content": "hi"},
            {"type": "tool_call", "name": "code", "id": "c", "arguments": "print(1)"},
            {"type": "tool_call_response", "id": "c", "response": "1"},
        ],
    ),
    "tool call without parts": (
        [*USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}],
        [{"type": "text", "content": "hi"}],
    ),
    "functions": (
        [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            {"role": "function", "name": "f", "content": "1"},
        ],
        [
            {"type": "text", "content": "hi"},
            {"type": "tool_call", "name": "f", "id": None, "arguments": {}},
            {"type": "text", "content": "1"},
        ],
    ),
    "refusal": (
        [*USER, {"role": "assistant", "content": None, "refusal": "never"}],
        [{"type": "text", "content": "hi"}, {"type": "text", "content": "refusal: never"}],
    ),
    "reasoning": (
        [*USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}],
        [
            {"type": "text", "content": "hi"},
            {"type": "text", "content": "x"},
            {"type": "reasoning", "content": "because"},
        ],
    ),
    "tuples": (
        [{"role": "assistant", "content": ({"type": "text", "text": "a"},), "tool_calls": ()}],
        [{"type": "text", "content": "a"}],
    ),
    "audio": (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA=="}}]}],
        [{"type": "text", "content": "<input_audio>"}],
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_messages_of_every_shape_are_shown(
    case: str, recording: Recording, clients: Clients, swallowed: list[str]
):
    """No shape of a message costs the LLM span the conversation."""
    messages, expected = REQUESTS[case]
    with rollout("x"):
        client = clients.sync(clients.serve(ECHOES["plain"]))
        client.chat.completions.create(model="m", messages=messages)
    shown = inputs(recording)
    assert [part for part in expected if part not in shown] == []
    assert len(json.loads(attribute(recording, "gen_ai.input.messages"))) == len(messages)
    assert attribute(recording, "gen_ai.response.id") == "c-1"
    assert swallowed == []


REPLIES: dict[str, tuple[Any, list[Any]]] = {
    "custom tool": (
        {"role": "assistant", "content": None, "tool_calls": [CUSTOM]},
        [{"type": "tool_call", "name": "code", "id": "c", "arguments": "print(1)"}],
    ),
    "function": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        [{"type": "tool_call", "name": "f", "id": None, "arguments": {}}],
    ),
    "refusal": (
        {"role": "assistant", "content": None, "refusal": "never"},
        [{"type": "text", "content": "refusal: never"}],
    ),
    "audio": (
        {
            "role": "assistant",
            "content": None,
            "audio": {"id": "a", "data": "AA==", "expires_at": 1, "transcript": "hello"},
        },
        [{"type": "text", "content": "<audio>"}],
    ),
    "reasoning": (
        {"role": "assistant", "content": "x", "reasoning": "because"},
        [{"type": "reasoning", "content": "because"}, {"type": "text", "content": "x"}],
    ),
    "nothing": ({"role": "assistant", "content": None}, []),
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("case", REPLIES)
def test_replies_of_every_shape_are_shown(
    case: str, raw: bool, recording: Recording, clients: Clients, swallowed: list[str]
):
    """No shape of a reply costs the LLM span what was said, nor its usage."""
    message, expected = REPLIES[case]
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    client = clients.sync(clients.serve(chat_body(message, usage=usage, error=None)))
    chat: Any = client.chat.completions
    with rollout("x"):
        (chat.with_raw_response if raw else chat).create(model="m", messages=USER)
    assert outputs(recording) == expected
    assert attribute(recording, "gen_ai.usage.output_tokens") == 2
    assert llm(recording)[0].status.status_code is not StatusCode.ERROR
    assert swallowed == []


def test_streamed_replies_are_shown(recording: Recording, clients: Clients, swallowed: list[str]):
    """Tool calls of any kind and order, refusals and reasoning of a stream are shown."""
    calls = [
        {"index": 1, "id": "b", "type": "custom", "custom": {"name": "code", "input": "1"}},
        {"index": 0, "id": "c", "function": {"name": "g", "arguments": "{}"}},
    ]
    reply = sse(
        chunk(says(0, None, role="assistant", reasoning="because")),
        chunk(says(0, None, tool_calls=calls)),
        chunk(says(0, None, "stop", refusal="never")),
        {**chunk(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}), "id": ""},
    )
    with rollout("x"):
        list(STREAMS["chat"](clients.sync(clients.serve(reply))))
    shown = outputs(recording)
    assert {"type": "text", "content": "refusal: never"} in shown
    assert {"type": "reasoning", "content": "because"} in shown
    named = [(part["id"], part["name"]) for part in shown if part["type"] == "tool_call"]
    assert sorted(named) == [("b", "code"), ("c", "g")]
    assert attribute(recording, "gen_ai.response.id") == "c-1"
    assert attribute(recording, "gen_ai.usage.output_tokens") == 2
    assert swallowed == []


IDS = list(range(100))


@pytest.mark.parametrize(("prompt", "lines"), [(IDS, [100]), ([IDS, IDS[:5]], [100, 5])])
def test_token_ids_as_prompt_are_not_shown_one_by_one(
    recording: Recording, clients: Clients, prompt: Any, lines: list[int]
):
    """Each prompt of token ids is one line for people."""
    with rollout("x"):
        client = clients.sync(clients.serve("ok"))
        client.completions.create(model="m", prompt=prompt)
    shown = [part["content"] for part in inputs(recording)]
    assert shown == [f"({count} token ids)" for count in lines]


def test_unset_arguments_are_not_attributes(
    any_recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
):
    """What the client's own helpers leave unset is neither an attribute nor a warning."""
    client = clients.sync(clients.serve("ok"))
    with rollout("x"):
        chat = client.chat.completions
        chat = chat if hasattr(chat, "stream") else client.beta.chat.completions  # before 1.92
        with chat.stream(model="m", messages=USER) as stream:
            assert stream.get_final_completion().choices[0].message.content == "ok"
        client.responses.create(model="m", input="p", reasoning=None)
    assert [record.getMessage() for record in caplog.records] == []
    for span in llm(any_recording):
        assert None not in (span.attributes or {}).values()
    assert len(llm(any_recording)) in (0, 2)


# --- the Responses API


@pytest.mark.skipif(not DRAWS_RESPONSES, reason="draws none of them")
def test_a_response_outside_of_rollouts_is_a_chat(recording: Recording, clients: Clients):
    """Its span has the name and the operation of one, and the API."""
    clients.sync(clients.serve("a")).responses.create(model="m", input="p")
    (span,) = recording.spans
    assert span.name == "chat m"
    attributes = span.attributes or {}
    assert attributes["openai.api.type"] == "responses"
    assert attributes["gen_ai.operation.name"] == "chat"


@pytest.mark.skipif(not DRAWS_RESPONSES, reason="draws none of them")
def test_responses_are_not_kept(recording: Recording, clients: Clients):
    """The instrumentor keeps nothing of a response that is complete, and each has its span."""
    body = response_body(id="resp-same", status="completed")
    client = clients.sync(clients.serve(Raw(200, json.dumps(body).encode())))
    with rollout("x"):
        for text in ("a", "b", "c"):
            client.responses.create(model="m", input=text)
        list(client.responses.create(model="m", input="d", stream=True))
    assert kept_responses().responses == {}
    spans = [span for span in llm(recording) if "gen_ai.input.messages" in (span.attributes or {})]
    shown = [json.loads(str((span.attributes or {})["gen_ai.input.messages"])) for span in spans]
    assert [message[0]["parts"][0]["content"] for message in shown][:3] == ["a", "b", "c"]
    starts = [span.start_time or 0 for span in spans]
    assert len(set(starts)) == len(starts)


def response_body(**fields: Any) -> dict[str, Any]:
    text = {"type": "output_text", "text": "ok", "annotations": []}
    message = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed"}
    return {
        "id": "r-1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": [{**message, "content": [text]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
        **fields,
    }


def test_pending_responses_are_bounded(recording: Recording):
    """Responses that are queued are kept for whoever comes back, but not without end."""
    pending = kept_responses().responses
    for number in range(5000):
        pending[f"r-{number}"] = kept_responses().TracedData(
            start_time=1, response_id=f"r-{number}", input="x", response_status="queued"
        )
    assert len(pending) <= 1000
    assert "r-4999" in pending
    assert "r-0" not in pending


@pytest.mark.parametrize(
    "odd",
    [
        response_body(output=None),
        response_body(output=[{"type": "unknown"}], usage={"input_tokens": None}),
        response_body(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        {"id": None},
        {},
    ],
)
def test_odd_responses_reach_the_agent(odd: Any, any_recording: Recording, clients: Clients):
    """A response of an odd shape is the client's own result, not the instrumentor's error."""
    client = clients.sync(clients.serve(Raw(200, json.dumps(odd).encode())))
    with rollout("x"):
        tools: Any = [{"type": "function", "name": "f"}]
        response = client.responses.create(model="m", input="p", tools=tools)
    assert getattr(response, "id", None) == odd.get("id")
    assert len(any_recording.trajectories) == 1
