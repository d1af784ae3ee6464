"""Model APIs: each answers every question of the contract; one that is added is captured whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from otel_rollout import Trajectory, reconstruct, rollout
from otel_rollout.testing import Raw
from otel_rollout.view import format_trajectory
from otel_rollout.wire import (
    ModelApi,
    Sampled,
    Text,
    api_of,
    apis,
    apis_of,
    context_members,
    conversation_members,
    extend,
    merge,
    message,
    path_messages,
    retrieval_of,
    shown_message,
    tool_name,
)
from otel_rollout.wire.anthropic import Messages
from otel_rollout.wire.api import Events
from otel_rollout.wire.apis import context_of
from otel_rollout.wire.chat import ChatCompletions
from otel_rollout.wire.merging import Merging
from otel_rollout.wire.message import Shapes
from otel_rollout.wire.responses import Responses
from otel_rollout.wire.text import TextCompletions
from tests.kit.recording import Clients, Recording
from tests.wire.shape_tables import TABLES

Json = dict[str, Any]
CHAT, TEXT, RESPONSES, MESSAGES = ChatCompletions(), TextCompletions(), Responses(), Messages()
KNOWN = [CHAT, TEXT, RESPONSES, MESSAGES]


# --- an API that is added


class MadeUp(ModelApi):
    """`/made-up`: a dialogue of speakers and words; a stream of words, then why it ended."""

    paths = ("/made-up",)
    conversation = "dialogue"
    context = ("stage",)
    finish_names = ("why",)
    shapes = Shapes(members={"words": lambda words: [Text(f"“{words}”")]})

    def is_last(self, tail: bytes) -> bool:
        return b'\ndata: {"why":' in tail

    def recognises(self, chunks: Sequence[Json]) -> bool:
        return any("begins" in chunk for chunk in chunks)

    def merge(self, chunks: Sequence[Json], merging: Merging) -> Json:
        words = "".join(chunk.get("word", "") for chunk in chunks)
        ids = [token for chunk in chunks for token in chunk.get("token_ids", ())]
        return {
            **chunks[0]["begins"],
            "said": line("machine", words),
            "token_ids": ids,
            "why": chunks[-1].get("why"),
        }

    def is_whole(self, events: Events, body: Any, merging: Merging) -> bool:
        return body is not None and body["why"] is not None

    def sampled(self, params: Any, prompt: Any, reply: Any) -> Iterator[Sampled]:
        yield Sampled(0, reply, (reply["said"],), prompt)


def line(speaker: str, words: str) -> Json:
    return {"speaker": speaker, "words": words}


def reply(number: int, words: str, prompt: list[int], ids: list[int]) -> Json:
    return {
        "id": f"made-up-{number}",
        "model": "m",
        "prompt_token_ids": prompt,
        "said": line("machine", words),
        "token_ids": ids,
        "why": "enough",
    }


FIRST = reply(1, "good morning", [1, 2], [3, 4])
SECOND = reply(2, "so it is", [1, 2, 3, 4, 5], [6, 7])
EVENTS: list[Json] = [
    {"begins": {key: SECOND[key] for key in ("id", "model", "prompt_token_ids")}},
    {"word": "so it ", "token_ids": [6]},
    {"word": "is", "token_ids": [7]},
    {"why": "enough"},
]
ROUTES = {
    "/v1/made-up": Raw(body=json.dumps(FIRST).encode()),
    "/v1/again/made-up": Raw(body=json.dumps(SECOND).encode()),
    "/v1/streamed/made-up": Raw(
        chunks=tuple(f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS),
        content_type="text/event-stream",
    ),
}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """The API, added to those that are known."""
    api = MadeUp()
    monkeypatch.setattr(apis, "APIS", (*apis.APIS, api))
    for name in TABLES:
        monkeypatch.setattr(message, name, dict(getattr(message, name)))
    message.add_shapes(api.shapes)
    return api


def talk(client: openai.OpenAI, second: str) -> None:
    """Two turns; the second goes to this path, streamed where the path says so."""
    stage: Json = {"model": "m", "stage": "a garden " * 60}
    dialogue = [line("human", "good morning")]
    body = {**stage, "dialogue": dialogue}
    said: Any = client.post("/made-up", body=body, cast_to=object)
    body = {**stage, "dialogue": [*dialogue, said["said"], line("human", "a fine day")]}
    if "streamed" not in second:
        client.post(second, body=body, cast_to=object)
        return
    stream: Any = client.post(
        second, body=body, cast_to=object, stream=True, stream_cls=openai.Stream[object]
    )
    assert list(stream) == EVENTS


@pytest.mark.parametrize("second", ["/again/made-up", "/streamed/made-up"])
def test_an_api_that_is_added_is_captured_whole(
    made_up: MadeUp, recording: Recording, clients: Clients, second: str
) -> None:
    """One class: captured, rebuilt equal, linked into one history, shown, and tokenised."""
    client = clients.sync(clients.serve(routes=ROUTES))
    with rollout("agent"):
        talk(client, second)
    trajectory = recording.trajectory
    assert trajectory.warnings == []
    (rebuilt,) = reconstruct(recording.spans)
    assert rebuilt.to_dict() == trajectory.to_dict()
    for each in (trajectory, rebuilt):
        assert [c.id for c in each.completions] == ["made-up-1", "made-up-2"]
        assert [c.response for c in each.completions] == [FIRST, SECOND]
        assert [c.finish_reason for c in each.completions] == ["enough", "enough"]
        assert each.completions[1].api is made_up
        assert each.completions[1].request["dialogue"][1] == FIRST["said"]
        check_one_history(each)


def check_one_history(trajectory: Trajectory) -> None:
    (history,) = trajectory.histories
    assert [item.trainable for item in history.items] == [False, True, False, True]
    (sequence,) = trajectory.token_sequences()
    assert sequence.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert [bool(sampled) for sampled in sequence.loss_mask] == [
        *(False, False, True, True, False, True, True)
    ]
    shown = format_trajectory(trajectory)
    assert "“good morning”" in shown
    assert "“so it is”  [made-up-2]" in shown
    assert "2 of 2 completions train" in shown


def test_an_added_apis_conversation_is_written_once(
    made_up: MadeUp, recording: Recording, clients: Clients
) -> None:
    """Its member for the conversation is a delta on the spans, and its context keeps it apart."""
    client = clients.sync(clients.serve(routes=ROUTES))
    with rollout("agent"):
        talk(client, "/again/made-up")
    spans = recording.spans_named("recording")
    assert [(s.attributes or {})["rollout.exchange.request.key"] for s in spans] == ["dialogue"] * 2
    assert len({c.context_key for c in recording.trajectory.completions} - {b""}) == 1


def test_an_unknown_api_has_no_completions(recording: Recording, clients: Clients) -> None:
    """The same calls without the class are exchanges that nothing is read from."""
    client = clients.sync(clients.serve(routes=ROUTES))
    with rollout("agent"):
        talk(client, "/streamed/made-up")
    assert recording.trajectory.completions == []
    assert len(recording.spans_named("recording")) == 2


# --- paths and members


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/chat/completions", ChatCompletions),
        ("/v1/chat/completions?api-version=1", ChatCompletions),
        ("/openai/deployments/d/chat/completions", ChatCompletions),
        ("/completions", TextCompletions),
        ("http://h/completion", TextCompletions),
        ("/v1/responses", Responses),
        ("/v1/messages", Messages),
        ("/v1/messages?beta=true", Messages),
        ("/threads/t/messages", None),
        ("/responses/resp_1", None),
        ("/v1/messages/count_tokens", None),
        ("/embeddings", None),
        ("", None),
    ],
)
def test_an_api_is_found_by_its_path(path: str, api: type[ModelApi] | None) -> None:
    """By the end of the path, whatever is before and in the query; else all are to be asked."""
    found = api_of(path)
    assert (None if found is None else type(found)) == api
    assert apis_of(path) == (apis.APIS if found is None else (found,))


@pytest.mark.parametrize("api", KNOWN)
def test_an_api_knows_its_own_paths(api: ModelApi) -> None:
    """Each path of an API leads to it, and the API names it."""
    for path in api.paths:
        assert type(api_of(path)) is type(api)
        assert api.path_of(f"http://host{path}") == path
    assert api.path_of("/models") is None


def test_the_members_of_requests() -> None:
    """The members that hold conversations, and those that are seen before them."""
    assert conversation_members() == {"messages", "input", "prompt", "contents"}
    assert context_members() == (
        *("tools", "instructions", "suffix", "agent_id", "system", "systemInstruction"),
        *("system_instruction", "cachedContent", "context", "documents", "toolConfig"),
    )
    config = {"tools": [1], "toolChoice": {"auto": {}}}
    chosen = {**config, "toolChoice": {"any": {}}}
    assert context_of({"toolConfig": config}) == context_of({"toolConfig": chosen})
    assert context_of({"toolConfig": config}) != context_of({"toolConfig": {"tools": [2]}})


# --- requests


@pytest.mark.parametrize(
    ("api", "params", "count"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": "3"}, 1),
        (TEXT, {"prompt": ["a", "b"], "n": 2}, 4),
        (TEXT, {"prompt": [1, 2, 3]}, 1),
        (TEXT, {"prompt": [[1], [2]]}, 2),
        (TEXT, {"prompt": []}, 1),
        (RESPONSES, {"n": 3}, 1),
        (MESSAGES, {}, 1),
    ],
)
def test_choices_that_are_asked_for(api: ModelApi, params: Json, count: int) -> None:
    """`n` of them for each prompt."""
    assert api.choices_asked(params) == count


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", {"return_token_ids": True, "logprobs": True}),
        ("/completions", {"return_token_ids": True, "logprobs": 0}),
        ("/completion", None),
        ("/responses", None),
        ("/v1/messages", None),
    ],
)
def test_what_asks_for_token_ids(path: str, params: Json | None) -> None:
    """VLLM's members, where its endpoints take them."""
    api = api_of(path)
    assert api is not None
    assert api.token_id_params(path) == params


@pytest.mark.parametrize(
    ("api", "params", "text"),
    [
        (TEXT, {"prompt": "once"}, "once"),
        (TEXT, {"prompt": [1, 2]}, [1, 2]),
        (RESPONSES, {"input": "hi", "prompt": {"id": "template"}}, "hi"),
        (RESPONSES, {"prompt": {"id": "template"}}, None),
        (CHAT, {"messages": None}, None),
        (MESSAGES, {"messages": []}, None),
    ],
)
def test_a_text_is_the_message_of_a_user(api: ModelApi, params: Json, text: Any) -> None:
    """Where there is no list of messages; which goes first where there is."""
    message = {"role": "user", "content": text}
    assert path_messages(api.asked(params, None)) == ([message] if text else [])
    prompt = extend(None, {"role": "user", "content": "listed"})
    assert api.asked(params, prompt) is prompt


@pytest.mark.parametrize(
    ("api", "params", "reply_id", "conversation"),
    [
        (RESPONSES, {"previous_response_id": "r1"}, "r1", None),
        (RESPONSES, {"conversation": "c1"}, None, "c1"),
        (RESPONSES, {"conversation": {"id": "c1"}}, None, "c1"),
        (MESSAGES, {"thread": {"previous_message_id": "m1"}}, "m1", None),
        (MESSAGES, {"thread": "t"}, None, None),
        (CHAT, {}, None, None),
    ],
)
def test_what_a_request_continues_by_id(
    api: ModelApi, params: Json, reply_id: str | None, conversation: str | None
) -> None:
    """An earlier reply, or a conversation that the server keeps."""
    assert api.previous_reply(params) == reply_id
    assert api.conversation_id(params) == conversation
    assert api.keeps_tools == (api is MESSAGES)


# --- streams


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        (b'\ndata: {"x": 1}\n\ndata: [DONE]\n\n', KNOWN),
        (b"\ndata:[DONE]\r\n\r\n", KNOWN),
        (b'\ndata: {"type":"message_stop"   }\n\n', [MESSAGES]),
        (b'\ndata: { "type": "message_stop" }\n\n', [MESSAGES]),
        (b'\ndata: {"text": "data: [DONE]"}\n\n', []),
        (b'\ndata: {"text": "message_stop"}\n\n', []),
        (b"[DONE]", []),
        (b"", []),
    ],
)
def test_the_last_event_of_a_stream(tail: bytes, found: list[ModelApi]) -> None:
    """It stands on a line of its own; texts that mention it are not it."""
    assert [api for api in KNOWN if api.is_last(tail)] == found


CHUNK: Json = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
PIECE: Json = {"content": "a", "stop": True}
ITEM: Json = {"type": "message", "content": []}
STREAMS: list[tuple[ModelApi, list[Json], Any]] = [
    (
        CHAT,
        [CHUNK],
        {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "a"},
                    "finish_reason": "stop",
                }
            ]
        },
    ),
    (TEXT, [{"content": "a", "stop": False}, PIECE], {"content": "aa", "stop": True}),
    (
        TEXT,
        [
            {"choices": [{"index": 0, "text": t, "finish_reason": f}]}
            for t, f in (("a", None), ("b", "stop"))
        ],
        {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}]},
    ),
    (
        RESPONSES,
        [{"type": "response.completed", "response": {"id": "r", "output": [ITEM]}}],
        {"id": "r", "output": [ITEM]},
    ),
    (
        MESSAGES,
        [
            {"type": "message_start", "message": {"id": "m", "content": []}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            {"type": "content_block_delta", "index": 0, "delta": {"text": "a"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        ],
        {"id": "m", "content": [{"type": "text", "text": "a"}], "stop_reason": "end_turn"},
    ),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("api", "chunks", "body"), STREAMS)
def test_a_stream_is_merged_by_its_api(
    api: ModelApi, chunks: list[Json], body: Any, known: bool
) -> None:
    """Recognised by its events, also where the path tells nothing."""
    assert api.recognises(chunks)
    assert not any(api.recognises([{"unknown": 1}]) for api in KNOWN)
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    merged = merge(events, path=api.paths[0] if known else "")
    assert (merged.body, merged.complete, merged.error) == (body, True, None)
    assert api.is_whole(Events(chunks, False, None), body, Merging())
    assert not merge(events.rpartition("data: ")[0] or "data: {}\n\n").complete


def test_a_path_decides_between_apis() -> None:
    """Events that two APIs recognise are merged by the one at the path."""
    events = 'data: {"response": {"id": "r"}, "choices": [{"index": 0, "text": "a"}]}\n\n'
    assert "output" in merge(events).body
    assert merge(events, path="/v1/chat/completions").body["choices"][0]["text"] == "a"


def test_events_of_another_shape_than_they_seemed() -> None:
    """The API raises, the merged reply is None, and the end of the stream still counts."""
    merged = merge('data: {"choices": [1]}\n\ndata: [DONE]\n\n')
    assert (merged.body, merged.complete) == (None, True)
    merged = merge('data: {"type": "message_start"}\n\ndata: {"type": "message_stop"}\n\n')
    assert (merged.body, merged.complete) == (None, True)


# --- replies

ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("api", "said", "items"),
    [
        (CHAT, {"choices": [{"message": ANSWER}, {"index": 5}]}, [(0, (ANSWER,)), (5, ())]),
        (CHAT, {"choices": None}, []),
        (TEXT, {"choices": [{"text": "a"}]}, [(0, (ANSWER,))]),
        (TEXT, {"content": "a"}, [(0, (ANSWER,))]),
        (RESPONSES, {"output": [ITEM, ITEM]}, [(0, (ITEM, ITEM))]),
        (RESPONSES, {"error": {}}, []),
        (
            MESSAGES,
            {"content": [{"type": "text"}]},
            [(0, (ANSWER | {"content": [{"type": "text"}]},))],
        ),
        (MESSAGES, {"content": "a"}, []),
    ],
)
def test_what_was_sampled(api: ModelApi, said: Json, items: list[Any]) -> None:
    """The choices of a reply, each with its index and wire items; none of another shape."""
    prompt = extend(None, {"role": "user", "content": "q"})
    sampled = list(api.sampled({"prompt": "q", "input": "q"}, prompt, said))
    assert [(one.index, one.items) for one in sampled] == items
    assert [path_messages(one.prompt) for one in sampled] == [path_messages(prompt)] * len(items)


@pytest.mark.parametrize(
    ("api", "choice", "finish", "stop", "truncated"),
    [
        (CHAT, {"finish_reason": "stop", "stop_reason": "\n"}, "stop", "\n", False),
        (CHAT, {"finish_reason": "length", "matched_stop": 2}, "length", 2, True),
        (CHAT, {}, None, None, False),
        (TEXT, {"stop_type": "limit", "stopping_word": ""}, "limit", None, True),
        (TEXT, {"stop_type": "word", "stopping_word": "x"}, "word", "x", False),
        (RESPONSES, {"status": "completed"}, "completed", None, False),
        (
            RESPONSES,
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            *("incomplete", None, True),
        ),
        (
            RESPONSES,
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            *("incomplete", None, False),
        ),
        (MESSAGES, {"stop_reason": "max_tokens"}, "max_tokens", None, True),
        (
            MESSAGES,
            {"stop_reason": "stop_sequence", "stop_sequence": "END"},
            *("stop_sequence", "END", False),
        ),
    ],
)
def test_how_a_choice_ended(
    api: ModelApi, choice: Json, finish: str | None, stop: Any, truncated: bool
) -> None:
    """Finish reason, stop string or token, and whether a length limit ended it."""
    assert api.finish_reason(choice) == finish
    assert api.stop_reason(choice) == stop
    assert api.is_truncated(choice, choice) == truncated


@pytest.mark.parametrize(
    ("status", "outcome", "unfinished"),
    [
        ("completed", "complete", False),
        ("incomplete", "complete", False),
        ("failed", "error", False),
        ("cancelled", "cancelled", False),
        ("queued", "abandoned", True),
        ("in_progress", "abandoned", True),
        (None, "complete", True),
    ],
)
def test_the_status_that_a_response_tells(status: Any, outcome: str, unfinished: bool) -> None:
    """A response says itself how it ended, or that it is still being made; others do not."""
    said = {"status": status}
    assert RESPONSES.outcome(said) == outcome
    assert RESPONSES.is_unfinished(said) == unfinished
    for api in (CHAT, TEXT, MESSAGES):
        assert api.outcome(said) is None
        assert not api.is_unfinished(said)


@pytest.mark.parametrize(
    ("path", "reply_id"),
    [
        ("/responses/resp_1", "resp_1"),
        ("http://h/v1/responses/resp_1?stream=true", "resp_1"),
        ("/responses/resp_1/cancel", "resp_1"),
        ("/responses", None),
        ("/responses/resp_1/input_items", None),
        ("/chat/completions/c1", None),
    ],
)
def test_the_path_that_retrieves_a_reply(path: str, reply_id: str | None) -> None:
    """Of the Responses API, with the id in it."""
    found = retrieval_of(path)
    assert (found and found[1]) == reply_id
    assert found is None or isinstance(found[0], Responses)


# --- people


def test_what_people_see() -> None:
    """Calls, refusals, blocks and names of tools, as lines of text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert shown_message({"tool_calls": [call], "refusal": "no"}) == 'refusal: no → f({"a":1})'
    use = {"type": "tool_use", "name": "f", "input": {"a": 1}}
    assert shown_message({"content": [use]}) == '→ f({"a":1})'
    assert shown_message({"content": [{"type": "tool_result", "content": "4"}]}) == "4"
    assert tool_name({"type": "function", "function": {"name": "f"}}) == "f"
    assert tool_name({"type": "function", "name": "f"}) == "f"
    assert tool_name({"type": "web_search"}) == "web_search"
