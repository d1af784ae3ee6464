"""Agents on Gemini, Ollama, Cohere, Converse and Mistral, over real HTTP: captured and rebuilt."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.view import format_trajectory
from tests.kit.comparing import exchange_spans, replayed
from tests.kit.conversations import table
from tests.kit.model_apis import CONVERSE, GEMINI, GEMINI_ARRAY, OLLAMA, TALKS
from tests.kit.recording import Clients, Recording
from tests.kit.talk import Talk, frame, lines, sse

Json = dict[str, Any]
EVERY = pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.name)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def asked(talk: Talk, request: Json, stream: bool) -> Json:
    """The request, with what asks for a stream where the path does not."""
    same = talk.path == talk.streamed
    return {**request, "stream": stream} if same else request


def url_of(server: ModelServer, talk: Talk, stream: bool) -> str:
    return server.base_url.removesuffix("/v1") + (talk.streamed if stream else talk.path)


def post(server: ModelServer, talk: Talk, request: Json, stream: bool) -> None:
    """Ask as a client does, and read all there is."""
    url, body = url_of(server, talk, stream), asked(talk, request, stream)
    with httpx2.Client() as client, client.stream("POST", url, json=body) as response:
        for _ in response.iter_bytes():
            pass


def loop(server: ModelServer, talk: Talk, stream: bool) -> None:
    with rollout("agent"):
        for request in talk.requests():
            post(server, talk, request, stream)


@EVERY
@STREAMED
@pytest.mark.parametrize("compress", [False, True], ids=["identity", "gzip"])
def test_a_tool_loop_is_one_history(
    recording: Recording, clients: Clients, talk: Talk, stream: bool, compress: bool
) -> None:
    """Two calls, parallel tool calls between them: captured whole, linked, shown."""
    server = clients.serve(routes=talk.routes(), compress=compress)
    loop(server, talk, stream)
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert [c.response for c in trajectory.completions] == list(talk.replies)
    assert [c.message for c in trajectory.completions] == list(map(talk.said, talk.replies))
    assert [c.request for c in trajectory.completions] == [
        asked(talk, request, stream) for request in talk.requests()
    ]
    assert [c.stream for c in trajectory.completions] == [stream] * 2
    check(trajectory, talk)
    shown = {(span.attributes or {}).get("gen_ai.provider.name") for span in recording.spans}
    assert shown == {None, PROVIDERS[talk.name]}


PROVIDERS = {
    "gemini": "gcp.gemini",
    "gemini-array": "gcp.vertex_ai",
    "ollama": None,
    "cohere": "cohere",
    "converse": "aws.bedrock",
    "mistral": "openai",
}
"""Names of the conventions; the path of chat completions is OpenAI's."""


def check(trajectory: Trajectory, talk: Talk) -> None:
    """One history, with both replies in it; nothing trains on tokens, and the reason is said."""
    (history,) = trajectory.histories
    sampled = [item.completion for item in history.items if item.completion is not None]
    assert sampled == trajectory.completions
    assert [item.is_break for item in history.items if item.completion is not None] == [False] * 2
    assert [c.status for c in sampled] == ["complete"] * 2
    assert [c.truncated for c in sampled] == [False] * 2
    assert trajectory.steps[1].model_response == "It is 3 and 7."
    assert trajectory.steps[0].model_response in ("Let me see.", "")
    sequences = trajectory.token_sequences()
    assert list(sequences) == []
    assert len(sequences.dropped) == 2
    advice = "ask for them:" if talk.name == "mistral" else "cannot ask for any at"
    assert all(advice in dropped.reason for dropped in sequences.dropped)
    shown = format_trajectory(trajectory, width=None)
    for text in ("(tools: add)", "1 + 2 and 3 + 4?", "I add.", '→ add({"a":', "It is 3 and 7."):
        assert text in shown.replace('{"a": ', '{"a":')
    assert "None" not in shown
    assert "2 of 2 completions train" in shown


@EVERY
def test_conversations_are_written_once(recording: Recording, clients: Clients, talk: Talk) -> None:
    """Of the second request only what is new is on its span."""
    server = clients.serve(routes=talk.routes())
    with rollout("agent"):
        for request in [talk.requests()[0], *[talk.requests()[1]] * 4]:
            post(server, talk, request, stream=False)
    last = exchange_spans(recording)[-1].attributes or {}
    assert last["rollout.exchange.request.messages"] == "[]"
    assert last["rollout.exchange.request.key"] == talk.conversation


@EVERY
def test_samples_and_forks(recording: Recording, clients: Clients, talk: Talk) -> None:
    """The same question twice; the second sample is continued, and another tool set forks."""
    server = clients.serve(routes=talk.routes())
    first, second = talk.requests()
    with rollout("agent"):
        for request in (first, first, second, {**second, "tools": [{"name": "other"}]}):
            post(server, talk, request, stream=False)
    trajectory = replayed(recording)
    completions = trajectory.completions
    chains = [[i.completion for i in h.items if i.completion] for h in trajectory.histories]
    expected = [[completions[n] for n in numbers] for numbers in ((3,), (0,), (1, 2))]
    assert chains == expected  # the main one first


@EVERY
def test_a_stream_that_is_left_early(recording: Recording, clients: Clients, talk: Talk) -> None:
    """It is abandoned; the reader has what it took and is credited with no more.

    The network may bring all chunks at once.
    """
    chunks = talk.framed(talk.streams[1])
    answer = Raw(chunks=[b"".join(chunks)], content_type=talk.content_type)
    server = clients.serve(routes={talk.streamed.partition("?")[0]: answer})
    with rollout("agent"), httpx2.Client() as client:
        url, body = url_of(server, talk, True), asked(talk, talk.question, True)
        with client.stream("POST", url, json=body) as response:
            reading = response.iter_bytes()
            got = next(reading)
    assert got == chunks[0]
    (completion,) = replayed(recording).completions
    assert completion.status == "abandoned"
    assert not completion.trainable
    assert "7." not in json.dumps(completion.items)


@EVERY
def test_a_stream_that_breaks_off(recording: Recording, clients: Clients, talk: Talk) -> None:
    """It ends before the reply is complete: an error, with what had come."""
    chunks = talk.framed(talk.streams[1])
    kept = b"".join(chunks)[: len(b"".join(chunks[:2])) - 3]
    answer = Raw(chunks=[kept], content_type=talk.content_type)
    server = clients.serve(routes={talk.streamed.partition("?")[0]: answer})
    with rollout("agent"):
        post(server, talk, talk.question, stream=True)
    (completion,) = replayed(recording).completions
    assert (completion.status, (completion.error or {})["type"]) == ("error", "EOFError")
    assert not completion.trainable


BUSY = {"message": "Too many requests"}
CODES = {GEMINI.name: "code 503", CONVERSE.name: "throttlingException"}
"""What the message of an error inside a stream says beside the server's words."""
ERRORS: list[tuple[Talk, Callable[[], list[bytes]]]] = [
    (GEMINI, lambda: [*sse(GEMINI.streams[1][:1]), *sse([{"error": {"code": 503, **BUSY}}])]),
    (
        GEMINI_ARRAY,
        lambda: [
            *GEMINI_ARRAY.framed(GEMINI.streams[1][:1])[:-1],
            b',\n{"error": {"message": "Too many requests"}}]',
        ],
    ),
    (OLLAMA, lambda: lines([OLLAMA.streams[1][0], {"error": "Too many requests"}])),
    (
        CONVERSE,
        lambda: [
            *CONVERSE.framed(CONVERSE.streams[1][:2]),
            frame(BUSY, exception_type="throttlingException", message_type="exception"),
        ],
    ),
]


@pytest.mark.parametrize(("talk", "chunks"), ERRORS, ids=[talk.name for talk, _ in ERRORS])
def test_an_error_inside_a_stream(
    recording: Recording, clients: Clients, talk: Talk, chunks: Callable[[], list[bytes]]
) -> None:
    """The call failed, and why."""
    answer = Raw(chunks=chunks(), content_type=talk.content_type)
    server = clients.serve(routes={talk.streamed.partition("?")[0]: answer})
    with rollout("agent"):
        post(server, talk, talk.question, stream=True)
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    said = "Too many requests" + (f" ({code})" if (code := CODES.get(talk.name)) else "")
    assert completion.error == {"type": "ErrorResponse", "message": said}


@EVERY
def test_a_request_that_is_refused(recording: Recording, clients: Clients, talk: Talk) -> None:
    """The error is the server's, whatever framing its streams have."""
    answer = Raw(status=400, body=b'[{"error": {"message": "no"}}]')
    server = clients.serve(routes={talk.streamed.partition("?")[0]: answer})
    with rollout("agent"):
        post(server, talk, talk.question, stream=True)
    (completion,) = replayed(recording).completions
    assert completion.error == {
        "type": "ErrorResponse",
        "message": 'HTTP 400: [{"error": {"message": "no"}}]',
    }


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=utf-8"])
def test_lines_of_ollama_under_another_content_type(
    recording: Recording, clients: Clients, content_type: str
) -> None:
    """They are a stream all the same."""
    talk = replace(OLLAMA, content_type=content_type)
    loop(clients.serve(routes=talk.routes()), talk, stream=True)
    trajectory = replayed(recording)
    assert [c.stream for c in trajectory.completions] == [True, True]
    assert [c.response for c in trajectory.completions] == list(talk.replies)


def test_a_chat_of_gemini_that_replays_chunks(recording: Recording, clients: Clients) -> None:
    """The client's chats replay a streamed reply as one content for each chunk: one history."""
    server = clients.serve(routes=GEMINI.routes())
    chunks = [chunk["candidates"][0]["content"] for chunk in GEMINI.streams[0]]
    first, second = GEMINI.requests()
    contents = [*first["contents"], *chunks, *second["contents"][2:]]
    with rollout("agent"):
        post(server, GEMINI, first, stream=True)
        post(server, GEMINI, {**second, "contents": contents}, stream=True)
    (history,) = replayed(recording).histories
    sampled = [item.completion.id if item.completion else None for item in history.items]
    assert sampled == [None, *["response-1"] * len(chunks), None, "response-2"]
    assert [item.is_break for item in history.items] == [False] * len(history.items)


def test_a_turn_of_gemini_that_the_request_began(recording: Recording, clients: Clients) -> None:
    """Sent back as two contents both are what they were; merged, it was sampled only in part."""
    server = clients.serve(routes=GEMINI.routes())
    text = GEMINI.said(GEMINI.replies[1])
    begun = [*GEMINI.question["contents"], {"role": "model", "parts": [{"text": "So: "}]}]
    merged = {"role": "model", "parts": [{"text": "So: It is 3 and 7."}]}
    follow = {"role": "user", "parts": [{"text": "and?"}]}
    with rollout("agent"):
        for contents in (begun, [*begun, text, follow], [begun[0], merged, follow]):
            post(server, GEMINI, {**GEMINI.question, "contents": contents}, stream=False)
    first, second, third = replayed(recording).completions
    chains = [
        [i.completion for i in h.items if i.completion] for h in replayed(recording).histories
    ]
    assert chains == [[third], [first, second]]


def test_several_candidates_and_the_one_that_is_continued(
    recording: Recording, clients: Clients
) -> None:
    """`candidateCount`: each is a completion, and each trains in one history."""
    said = [{"role": "model", "parts": [{"text": text}]} for text in ("a", "b")]
    candidates = [
        {"index": n, "content": one, "finishReason": "STOP"} for n, one in enumerate(said)
    ]
    reply = {"candidates": candidates, "responseId": "r1"}

    def answer(body: Json) -> Raw:
        whole = reply if len(body["contents"]) == 1 else GEMINI.replies[1]
        return Raw(body=json.dumps(whole).encode())

    server = clients.serve(routes={GEMINI.path: answer})
    request = {**GEMINI.question, "generationConfig": {"candidateCount": 2}}
    follow = [*request["contents"], said[1], {"role": "user", "parts": [{"text": "and?"}]}]
    with rollout("agent"):
        post(server, GEMINI, request, stream=False)
        post(server, GEMINI, {**request, "contents": follow}, stream=False)
    assert table(replayed(recording)) is not None
    chains = [
        [(i.completion.id, i.completion.choice_index) for i in h.items if i.completion]
        for h in replayed(recording).histories
    ]
    assert chains == [[("r1", 1), ("response-2", 0)], [("r1", 0)]]


def test_a_prompt_that_gemini_blocked(recording: Recording, clients: Clients) -> None:
    """Nothing was sampled: an error that says why."""
    reply = {"promptFeedback": {"blockReason": "SAFETY"}, "responseId": "r"}
    server = clients.serve(routes={GEMINI.path: Raw(body=json.dumps(reply).encode())})
    with rollout("agent"):
        post(server, GEMINI, GEMINI.question, stream=False)
    (completion,) = replayed(recording).completions
    assert completion.error == {
        "type": "EmptyResponse",
        "message": "the response has no message (the prompt was blocked: SAFETY)",
    }


def test_token_ids_of_gemini(recording: Recording, clients: Clients) -> None:
    """Vertex AI sends the sampled ids, and no prompt's: they are read, and train nothing."""
    chosen = [{"token": "x", "tokenId": n, "logProbability": -0.5} for n in (4, 5)]
    candidate = {
        **GEMINI.replies[1]["candidates"][0],
        "logprobsResult": {"chosenCandidates": chosen},
    }
    reply = {**GEMINI.replies[1], "candidates": [candidate]}
    server = clients.serve(routes={GEMINI.path: Raw(body=json.dumps(reply).encode())})
    with rollout("agent"):
        post(server, GEMINI, GEMINI.question, stream=False)
    trajectory = replayed(recording)
    (completion,) = trajectory.completions
    assert (completion.token_ids, completion.logprobs) == ([4, 5], [-0.5, -0.5])
    (dropped,) = trajectory.token_sequences().dropped
    assert dropped.reason == "the server sent no token ids of the prompt"


CLAUDE = {
    "id": "msg",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 2},
}
TITAN = {"results": [{"outputText": "hi", "completionReason": "FINISH"}]}
INVOKE = replace(CONVERSE, name="invoke", path="/model/m/invoke")
CHUNKS = [
    frame({"bytes": "eyJvdXRwdXRUZXh0IjogImhpIn0="}, event_type="chunk", message_type="event")
]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (CLAUDE, {"role": "assistant", "content": CLAUDE["content"]}),
        (CONVERSE.replies[1], CONVERSE.said(CONVERSE.replies[1])),
    ],
    ids=["claude", "nova"],
)
def test_a_model_that_bedrock_hands_a_request_on_to(
    recording: Recording, clients: Clients, reply: Json, message: Json
) -> None:
    """Its reply is read in the shape that it has."""
    server = clients.serve(routes={INVOKE.path: Raw(body=json.dumps(reply).encode())})
    with rollout("agent"):
        post(server, INVOKE, CONVERSE.question, stream=False)
    trajectory = replayed(recording)
    (completion,) = trajectory.completions
    assert completion.message == message
    assert completion.request_model == "m"
    assert not completion.truncated


def test_a_stream_that_bedrock_hands_on(recording: Recording, clients: Clients) -> None:
    """Claude's own events in Amazon's frames, asked for with `invoke_model`."""
    said: list[Json] = [
        {"type": "message_start", "message": {**CLAUDE, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    chunks = [
        frame({"bytes": b64encode(json.dumps(e).encode()).decode()}, event_type="chunk")
        for e in said
    ]
    path = "/model/m/invoke-with-response-stream"
    answer = Raw(chunks=chunks, content_type=CONVERSE.content_type)
    server = clients.serve(routes={path: answer})
    with rollout("agent"):
        post(server, replace(INVOKE, streamed=path), CONVERSE.question, stream=True)
    (completion,) = replayed(recording).completions
    assert completion.response == CLAUDE
    assert completion.status == "complete"
    assert completion.tools == CONVERSE.question["toolConfig"]["tools"]


@STREAMED
def test_a_reply_of_a_shape_that_is_not_read(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """No completion and no error is made up; the trajectory says so."""
    path = "/model/m/invoke-with-response-stream"
    talk = replace(INVOKE, streamed=path)
    routes = {
        INVOKE.path: Raw(body=json.dumps(TITAN).encode()),
        path: Raw(chunks=CHUNKS, content_type=CONVERSE.content_type),
    }
    server = clients.serve(routes=routes)
    with rollout("agent"):
        post(server, talk, {"prompt": "hello"}, stream)
    trajectory = replayed(recording)
    assert trajectory.completions == []
    (warning,) = trajectory.warnings
    assert "its response has a shape that is not read at '/model/m/invoke" in warning
    (exchange,) = trajectory.exchanges
    assert exchange.status == "complete"
