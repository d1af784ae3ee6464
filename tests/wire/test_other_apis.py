"""Gemini, Ollama, Cohere, Converse and Mistral: requests, replies and streams, read."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import (
    api_of,
    as_events,
    cutter_of,
    framing_by_type,
    media_of,
    merge,
    normalised_key,
    path_messages,
    reasoning_of,
    shown_message,
    tool_name,
)
from otel_rollout.wire.conversation import MessagePath, extend
from otel_rollout.wire.message import content_parts
from tests.kit.model_apis import COHERE, CONVERSE, GEMINI, OLLAMA, TALKS
from tests.kit.talk import Talk, array, lines, sse

Json = dict[str, Any]
EVERY = pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.name)
TURN = pytest.mark.parametrize("turn", [0, 1])


def path_of(messages: list[Json]) -> MessagePath | None:
    path = None
    for message in messages:
        path = extend(path, message)
    return path


def framing_of(talk: Talk) -> Any:
    api = api_of(talk.streamed)
    assert api is not None
    return framing_by_type(talk.content_type) or api.framing(talk.streamed.partition("?")[0])


def events_of(talk: Talk, body: bytes) -> str:
    framing = framing_of(talk)
    events = as_events(body, framing, declared=framing_by_type(talk.content_type) is not None)
    return (body if events is None else events).decode()


@EVERY
@TURN
def test_a_stream_is_merged_to_the_unstreamed_reply(talk: Talk, turn: int) -> None:
    """Whatever framing it comes in."""
    body = b"".join(talk.framed(talk.streams[turn]))
    merged = merge(events_of(talk, body), path=talk.streamed)
    assert (merged.complete, merged.error, merged.malformed) == (True, None, False)
    assert merged.body == talk.replies[turn]


@EVERY
@TURN
def test_a_stream_that_is_cut_anywhere(talk: Talk, turn: int) -> None:
    """It is no error of its shape; and whole only if the reply is."""
    body = b"".join(talk.framed(talk.streams[turn]))
    for end in range(0, len(body), 7):
        merged = merge(events_of(talk, body[:end]), path=talk.streamed)
        assert not merged.malformed
        assert merged.error is None
        if merged.complete:
            api = api_of(talk.streamed)
            assert api is not None
            (whole,) = api.sampled({}, None, merged.body)
            assert whole.items == (talk.said(talk.replies[turn]),)


@EVERY
@TURN
@given(size=st.integers(1, 200))
def test_pieces_are_the_same_wherever_a_stream_is_cut(talk: Talk, turn: int, size: int) -> None:
    """Every byte comes out once and in order; one piece for each chunk."""
    parts = talk.framed(talk.streams[turn])
    stream = b"".join(parts)
    cutter = cutter_of(framing_of(talk))
    pieces = [
        piece
        for start in range(0, len(stream), size)
        for piece in cutter.cut(stream[start : start + size])
    ]
    rest = cutter.rest()
    assert b"".join([*pieces, rest]) == stream
    assert [*pieces, rest][: len(talk.streams[turn])] == parts[: len(talk.streams[turn])]


@given(
    st.lists(st.dictionaries(st.text(), st.text() | st.lists(st.integers())), min_size=1),
    st.sampled_from([None, 2]),
    st.integers(1, 60),
)
def test_any_array_is_cut_at_its_elements(values: list[Any], indent: int | None, size: int) -> None:
    """Also with brackets, quotes and backslashes in texts."""
    stream = json.dumps(values, indent=indent, ensure_ascii=False).encode()
    cutter = cutter_of("array")
    pieces = [
        piece
        for start in range(0, len(stream), size)
        for piece in cutter.cut(stream[start : start + size])
    ]
    assert b"".join([*pieces, cutter.rest()]) == stream
    assert len(pieces) == len(values) + 1
    found = [json.loads(piece.strip(b"[, \n")) for piece in pieces[:-1]]
    assert found == values


@EVERY
def test_a_replay_continues_what_was_sampled(talk: Talk) -> None:
    """The path of the second request has that of the first reply as a prefix."""
    first, second = talk.requests()
    api = api_of(talk.path)
    assert api is not None
    prompt = path_of(first[talk.conversation])
    (sampled,) = api.sampled(first, prompt, talk.replies[0])
    path = prompt
    for item in sampled.items:
        path = extend(path, item)
    assert path is not None
    assert path.key in {node.key for node in path_of(second[talk.conversation]) or ()}


@EVERY
def test_a_changed_reply_is_another_message(talk: Talk) -> None:
    """Another argument of a tool call, or another text, is not what was sampled."""
    for turn, old, new in ((0, '"a": 3', '"a": 4'), (0, '"a\\": 3', '"a\\": 4'), (1, "7.", "8.")):
        said = talk.said(talk.replies[turn])
        text = json.dumps(said)
        changed = json.loads(text.replace(old, new))
        if changed != said:
            assert normalised_key(changed) != normalised_key(said)
    said = copy.deepcopy(talk.said(talk.replies[0]))
    calls = said.get("tool_calls", said.get("parts", said.get("content")))
    calls.pop()
    assert normalised_key(said) != normalised_key(talk.said(talk.replies[0]))


@EVERY
def test_reasoning_counts_for_nothing_in_a_replay(talk: Talk) -> None:
    """It may be left out; whether it was, shows."""
    said = talk.said(talk.replies[0])
    dropped = {name: value for name, value in said.items() if name not in ("thinking", "tool_plan")}
    for name in ("parts", "content"):
        if isinstance(dropped.get(name), list):
            kept = [
                {key: inner for key, inner in part.items() if key != "thoughtSignature"}
                for part in dropped[name]
                if not (
                    part.get("thought")
                    or part.get("type") == "thinking"
                    or "reasoningContent" in part
                )
            ]
            dropped[name] = kept
    assert dropped != said
    assert normalised_key(dropped) == normalised_key(said)
    assert reasoning_of(said)
    assert not reasoning_of(dropped)


@EVERY
def test_facts_of_a_request_and_a_reply(talk: Talk) -> None:
    """Usage in OpenAI's words, how it ended, the model, the tools, what was set."""
    api = api_of(talk.path)
    assert api is not None
    (sampled,) = api.sampled(talk.question, None, talk.replies[1])
    usage = api.usage(talk.replies[1])
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) in ((7, 5), (7, 7))
    assert api.finish_reason(sampled.choice) in ("STOP", "stop", "COMPLETE", "end_turn")
    assert not api.is_truncated(sampled.choice, talk.replies[1])
    assert not api.is_stopped(sampled.choice, talk.replies[1])
    model = talk.question.get("model")
    assert api.request_model(talk.path, talk.question) == (
        model or ("us.anthropic.claude-m:0" if talk.name == "converse" else "gemini-m")
    )
    tools = api.tools(talk.question)
    assert tools is not None
    assert len(tools) == 1
    sampling = api.sampling(talk.question)
    assert sampling["temperature"] == 0.5
    assert 99 in sampling.values()


@pytest.mark.parametrize(
    ("path", "provider"),
    [
        ("/v1beta/models/m:generateContent", "gcp.gemini"),
        ("/v1/projects/p/locations/l/publishers/google/models/m:generateContent", "gcp.vertex_ai"),
        ("/v1/projects/p/locations/l/endpoints/7:streamGenerateContent", "gcp.vertex_ai"),
        ("/v1beta/tunedModels/m:generateContent", "gcp.gemini"),
        ("/api/chat", None),
        ("/api/generate", None),
        ("/v2/chat", "cohere"),
        ("/model/m/converse", "aws.bedrock"),
        ("/model/arn:aws:bedrock:eu:1:inference-profile/x/converse-stream", "aws.bedrock"),
        ("/model/m/invoke", "aws.bedrock"),
        ("/model/m/invoke-with-response-stream", "aws.bedrock"),
        ("/v1/projects/p/locations/l/publishers/anthropic/models/c:rawPredict", "gcp.vertex_ai"),
        ("/v1/fim/completions", "mistral_ai"),
        ("/v1/agents/completions", "mistral_ai"),
    ],
)
def test_whose_api_it_is(path: str, provider: str | None) -> None:
    """By the conventions' names; a part of the path is enough to find the API again."""
    api = api_of(path)
    assert api is not None
    assert api.provider_of(path) == provider
    end = api.path_of(path)
    assert end is not None
    assert type(api_of(end)) is type(api)
    assert api.provider_of(end) == provider
    assert api.request_model(end, {}) == api.request_model(path, {})


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/m:countTokens",
        "/v1beta/models/m:batchGenerateContent",
        "/v1internal:generateContent",
        "/invoke",
        "/my-agent/invoke",
        "/converse",
        "/model/m/count-tokens",
        "/api/tags",
        "/v1beta/cachedContents",
    ],
)
def test_paths_at_which_nothing_is_sampled(path: str) -> None:
    """Or by something else."""
    assert api_of(path) is None


# --- Gemini


def content(*parts: Json, role: str = "model") -> Json:
    return {"role": role, "parts": list(parts)}


@given(st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=8), st.data())
def test_contents_of_the_model_that_follow_each_other_are_one(pieces: list[str], data: Any) -> None:
    """As the client's chats replay the chunks of a stream, however they were split."""
    cuts = data.draw(st.lists(st.integers(0, len(pieces)), max_size=4))
    ends = [0, *sorted(cuts), len(pieces)]
    question, text = content({"text": "q"}, role="user"), "".join(pieces)
    split = [
        content(*({"text": piece} for piece in pieces[start:end]))
        for start, end in itertools.pairwise(ends)
    ]
    whole, replayed = path_of([question, content({"text": text})]), path_of([question, *split])
    assert whole is not None
    assert replayed is not None
    assert replayed.key == whole.key
    assert path_messages(replayed) == [question, *split]
    follow = content({"text": "and?"}, role="user")
    assert extend(replayed, follow).key == extend(whole, follow).key


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"function_call": {"name": "f", "args": {"a": 1}}}, None, True),
        ({"functionCall": {"name": "f", "args": {"a": 1}, "id": "x"}}, None, True),
        ({"functionCall": {"name": "f", "args": {"a": 2}}}, None, False),
        ({"functionCall": {"name": "f"}}, {"functionCall": {"name": "f", "args": {}}}, True),
        ({"inline_data": {"mime_type": "a/b"}}, {"inlineData": {"mimeType": "a/b"}}, True),
        ({"text": "a", "thought": False}, {"text": "a"}, True),
        ({"text": "a", "thought": True}, {"text": "a"}, False),
    ],
)
def test_parts_that_are_the_same(one: Json, other: Json | None, same: bool) -> None:
    """In camel case or snake case, with or without an id."""
    other = other or {"functionCall": {"name": "f", "args": {"a": 1}}}
    assert (normalised_key(content(one)) == normalised_key(content(other))) is same


def test_roles_of_results() -> None:
    """`user`, `function`, `tool` and none are the user's; the model's is another one."""
    result = {"functionResponse": {"name": "f", "response": {"result": 1}}}
    keys = {normalised_key(content(result, role=role)) for role in ("user", "function", "tool")}
    assert keys == {normalised_key({"parts": [result]})}
    assert normalised_key(content(result)) not in keys


def test_several_candidates_of_a_stream() -> None:
    """Each chunk names the candidate it is of; whole are as many as were asked for."""
    one = {"index": 0, "content": content({"text": "a"}), "finishReason": "STOP"}
    two = {"index": 1, "content": content({"text": "b"}), "finishReason": "MAX_TOKENS"}
    chunks = [{"candidates": [two]}, {"candidates": [one]}]
    api = api_of(GEMINI.path)
    assert api is not None
    assert api.choices_asked({"generationConfig": {"candidateCount": 2}}) == 2
    merged = merge(b"".join(sse(chunks)).decode(), 2, GEMINI.streamed)
    assert merged.complete
    assert merged.body == {"candidates": [one, two]}
    found = list(api.sampled({}, None, merged.body))
    assert [s.index for s in found] == [0, 1]
    assert [api.is_truncated(s.choice, {}) for s in found] == [False, True]
    assert not merge(b"".join(sse(chunks[:1])).decode(), 2, GEMINI.streamed).complete


def test_a_prompt_that_was_blocked() -> None:
    """Nothing was sampled, and why; the stream is whole all the same."""
    chunk = {"promptFeedback": {"blockReason": "SAFETY"}, "responseId": "r"}
    api = api_of(GEMINI.path)
    assert api is not None
    assert api.empty_because(chunk) == "the prompt was blocked: SAFETY"
    assert list(api.sampled({}, None, chunk)) == []
    assert merge(b"".join(sse([chunk])).decode(), path=GEMINI.streamed).complete


def test_an_error_inside_an_array() -> None:
    """It is found, as in events."""
    error = {"code": 503, "message": "overloaded", "status": "UNAVAILABLE"}
    body = b"".join(array([GEMINI.streams[1][0], {"error": error}]))
    events = as_events(body, "array", declared=False)
    assert events is not None
    merged = merge(events.decode(), path=GEMINI.streamed)
    assert (merged.complete, merged.error) == (False, error)


@pytest.mark.parametrize("body", [b'{"error": {}}', b"", b"<html>"])
def test_what_is_no_array(body: bytes) -> None:
    """Stays what it is."""
    assert as_events(body, "array", declared=False) is None


# --- people


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        (content({"inlineData": {"mimeType": "image/png", "data": ""}}), ["inlineData"]),
        (content({"file_data": {"file_uri": "gs://x"}}, {"text": "a"}), ["fileData"]),
        ({"content": [{"image": {"format": "png"}}, {"document": {"name": "d"}}]}, ["document"]),
        ({"content": [{"toolResult": {"content": [{"image": {"format": "png"}}]}}]}, ["image"]),
        ({"role": "user", "content": "a", "images": ["aGk="]}, ["image"]),
        ({"content": [{"text": "image"}]}, []),
    ],
)
def test_what_is_not_text(message: Json, kinds: list[str]) -> None:
    """Images, sound and files, also in the result of a tool."""
    assert set(kinds) <= set(media_of(message))
    assert bool(kinds) is bool(media_of(message))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"inlineData": {"mimeType": "image/png"}}, "<inlineData image/png>"),
        ({"executableCode": {"language": "PYTHON", "code": "1+1"}}, "1+1"),
        ({"codeExecutionResult": {"outcome": "OK", "output": "2"}}, "2"),
        ({"reasoningContent": {"redactedContent": "x"}}, "(redacted)"),
        ({"image": {"format": "png"}}, "<image>"),
        ({"json": {"a": 1}}, '{"a":1}'),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "(hm)"),
        ({"type": "redacted_thinking", "data": "x"}, ""),
        ({"text": "a"}, "a"),
    ],
)
def test_what_people_see_of_a_part(part: Json, text: str) -> None:
    """One line; plain text is shown as it is."""
    (read,) = content_parts([part])
    assert read.shown == text


def test_geminis_members_may_be_in_snake_case() -> None:
    """A content of Gemini has the same parts, also in the result of a tool."""
    image = {"inline_data": {"mime_type": "image/png"}}
    result = {"function_response": {"name": "f", "response": {}, "parts": [image]}}
    assert shown_message({"role": "user", "parts": [image]}) == "<inlineData image/png>"
    assert "<inlineData image/png>" in shown_message({"role": "user", "parts": [result]})


def test_names_of_tools() -> None:
    """Gemini declares several in one; a tool of the server's has only its kind."""
    declared = [{"name": "f"}, {"name": "g"}]
    assert tool_name({"functionDeclarations": declared}) == "f, g"
    assert tool_name({"function_declarations": declared}) == "f, g"
    assert tool_name({"googleSearch": {}}) == "googleSearch"
    assert tool_name({"toolSpec": {"name": "f"}}) == "f"


# --- Ollama


@pytest.mark.parametrize(
    ("body", "is_stream"),
    [
        (b'{"done": true}', False),
        (b'{"done": true}\n', False),
        (b'{\n"done": true\n}\n', False),
        (b'{"done": false}\n{"done": true}\n', True),
        (b'{"done": false}\n{"do', True),
        (b"not\njson", False),
    ],
)
def test_lines_under_another_content_type(body: bytes, is_stream: bool) -> None:
    """More than one object is a stream; one that is cut in its first line cannot be told."""
    assert (as_events(body, "lines", declared=False) is not None) is is_stream
    assert as_events(body, "lines", declared=True) is not None


def test_arguments_that_are_objects() -> None:
    """Where a call has a type its id counts, as with Mistral; without one it is Ollama's."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = {"name": "f", "arguments": {"a": 1}}

    def key(*calls: Json) -> bytes:
        return normalised_key({"role": "assistant", "tool_calls": list(calls)})

    assert key(call) == key({**call, "function": given})
    assert key(call) != key({**call, "id": "2", "function": given})
    ollama = {"id": "1", "function": {**given, "index": 0}}
    assert key(ollama) == key({"function": given}) == key({**ollama, "id": "2"})
    assert key(ollama) != key({"function": {"name": "f", "arguments": {"a": 2}}})


def test_log_probabilities_of_ollama_are_chained() -> None:
    """Each chunk has those of its own tokens."""
    chunks = [
        {**chunk, "logprobs": [{"token": "x", "logprob": -float(number)}]}
        for number, chunk in enumerate(OLLAMA.streams[1])
    ]
    merged = merge(
        (as_events(b"".join(lines(chunks)), "lines") or b"").decode(), path="/api/chat"
    ).body
    assert [entry["logprob"] for entry in merged["logprobs"]] == [0.0, -1.0, -2.0]


def test_a_text_that_ollama_continues() -> None:
    """`/api/generate`: the prompt is a message of the user, the response one of the assistant."""
    api = api_of("/api/generate")
    assert api is not None
    reply = {"response": "b", "thinking": "hm", "done": True, "done_reason": "length"}
    (sampled,) = api.sampled({"prompt": "a"}, None, reply)
    assert path_messages(sampled.prompt) == [{"role": "user", "content": "a"}]
    assert sampled.items == ({"role": "assistant", "content": "b", "thinking": "hm"},)
    assert api.is_truncated(sampled.choice, reply)
    chunks = [{"response": "b", "done": False}, {"response": "c", "done": True}]
    events = as_events(b"".join(lines(chunks)), "lines")
    assert merge((events or b"").decode(), path="/api/generate").body == {
        "response": "bc",
        "done": True,
    }


MESSAGE: list[Any] = [
    {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize(
    ("path", "chunks"),
    [
        ("/v1/messages", [*MESSAGE, MESSAGE[2]]),
        ("/v1/messages", [*MESSAGE, *MESSAGE]),
        ("/api/chat", [OLLAMA.streams[1][-1], OLLAMA.streams[1][0]]),
        ("/api/chat", [OLLAMA.streams[1][-1], OLLAMA.streams[1][-1]]),
        ("/v2/chat", [*COHERE.streams[1], COHERE.streams[1][2]]),
        ("/v2/chat", [*COHERE.streams[1], *COHERE.streams[1]]),
        ("/model/m/converse-stream", [*CONVERSE.streams[1], CONVERSE.streams[1][1]]),
        ("/model/m/converse-stream", [*CONVERSE.streams[1], *CONVERSE.streams[1]]),
    ],
)
def test_what_comes_after_the_end_is_named(path: str, chunks: list[Any]) -> None:
    """A piece, or a whole reply."""
    merged = merge("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), path=path)
    assert merged.contradictions == ["more of it comes after its end"]


@pytest.mark.parametrize("part", [{"text": ""}, {"text": "", "thoughtSignature": "c2ln"}])
def test_an_empty_part_after_the_end_of_gemini(part: Any) -> None:
    """Nothing is said in it."""
    first = {"content": {"parts": [{"text": "a"}], "role": "model"}, "finishReason": "STOP"}
    last = {"content": {"parts": [part], "role": "model"}}
    chunks = [{"candidates": [each]} for each in (first, last)]
    assert merge(b"".join(sse(chunks)).decode(), path=GEMINI.streamed).complete
