"""A reply that is drawn, written as a stream in a server's manner, and put together again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import Merged, merge

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GEMINI = "/v1/responses", "/v1beta/models/m:streamGenerateContent"

Draw = Callable[[st.SearchStrategy[Any]], Any]
words = st.sampled_from(["It is", " warm", ".", " ü", "a", "{", '"x"', "\n"])
arguments = st.dictionaries(
    st.sampled_from(["city", "day", "é"]), st.sampled_from(["Rome", "Oslo", 3, None]), max_size=2
).map(json.dumps)


@dataclass(frozen=True)
class Call:
    """A tool call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """One choice."""

    pieces: list[str]
    thoughts: list[str]
    calls: list[Call]
    ids: list[int]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Manner:
    """How a server writes a stream."""

    index: str = "right"
    ids: str = "once"
    names: str = "once"
    reasons: str = "last"
    done: bool = True
    is_interleaved: bool = False

    def at(self, piece: dict[str, Any], name: str, index: int) -> dict[str, Any]:
        """The piece with its index."""
        values = {"right": index, "zero": 0, "null": None, "text": str(index)}
        return piece if self.index == "missing" else {name: values[self.index], **piece}


@st.composite
def replies(draw: st.DrawFn, choices: int = 3) -> list[Said]:
    """The choices of a reply."""
    found = []
    for number in range(draw(st.integers(1, choices))):
        calls = draw(
            st.lists(
                st.tuples(st.sampled_from(["weather", "time", "tim", "now"]), arguments), max_size=3
            )
        )
        found.append(
            Said(
                draw(st.lists(words, min_size=1, max_size=4)),
                draw(st.lists(words, max_size=2)),
                [Call(f"call_{number}_{i}", name, args) for i, (name, args) in enumerate(calls)],
                draw(st.lists(st.integers(1, 99), min_size=1, max_size=3)),
            )
        )
    return found


manners = st.builds(
    Manner,
    index=st.sampled_from(["right", "zero", "missing", "null", "text"]),
    ids=st.sampled_from(["once", "always", "empty"]),
    names=st.sampled_from(["once", "always", "pieces"]),
    reasons=st.sampled_from(["last", "each", "empty", "early", "none"]),
    done=st.booleans(),
    is_interleaved=st.booleans(),
)


def cut(draw: Draw, text: str) -> list[str]:
    """A text in up to three pieces."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def call_pieces(draw: st.DrawFn, call: Call, place: int, manner: Manner) -> list[dict[str, Any]]:
    """The entries of `tool_calls` that one call is sent in."""
    names = cut(draw, call.name) if manner.names == "pieces" else [call.name]
    texts = [*[""] * (len(names) - 1), *cut(draw, call.arguments)]
    found = []
    for number, text in enumerate(texts):
        name = names[min(number, len(names) - 1)]
        has_name = number < len(names) or manner.names == "always"
        function = {**({"name": name} if has_name else {}), "arguments": text}
        id_ = {"once": call.id if number == 0 else None, "always": call.id, "empty": ""}[manner.ids]
        piece = {**({} if id_ is None else {"id": id_}), "type": "function", "function": function}
        found.append(manner.at(piece, "index", place))
    return found


def mixed(draw: Draw, lists: list[list[Any]], *, is_interleaved: bool) -> list[Any]:
    """The elements of all lists, each list in its order."""
    if not is_interleaved:
        return [each for one in lists for each in one]
    left = [list(one) for one in lists if one]
    found = [one.pop(0) for one in left]  # they begin in their order
    while left := [one for one in left if one]:
        one = draw(st.sampled_from(left))
        found.append(one.pop(0))
    return found


def reasoned(pieces: list[dict[str, Any]], manner: Manner, name: str, last: str) -> None:
    """Say in the pieces of one choice why it ended, as this server does."""
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        if manner.reasons == "each" or (manner.reasons == "early" and number == 0) or is_last:
            piece[name] = last
        elif manner.reasons == "empty":
            piece[name] = ""
        if is_last and manner.reasons in ("empty", "none"):
            piece[name] = "" if manner.reasons == "empty" else None


@st.composite
def chat_streams(draw: st.DrawFn) -> tuple[list[Said], Manner, list[str]]:
    """A reply, and the events that it is sent in."""
    said, manner = draw(replies()), draw(manners)
    is_told = manner.index in ("right", "text")  # else nobody could tell pieces apart
    lists = []
    for index, one in enumerate(said):
        deltas: list[dict[str, Any]] = [{"reasoning_content": text} for text in one.thoughts]
        deltas += [{"content": text} for text in one.pieces]
        are_told = manner.is_interleaved and (is_told or manner.ids == "always")
        calls = [call_pieces(draw, call, i, manner) for i, call in enumerate(one.calls)]
        deltas += [{"tool_calls": [piece]} for piece in mixed(draw, calls, is_interleaved=are_told)]
        pieces: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
        pieces[0]["delta"]["role"] = "assistant"
        pieces[-1]["token_ids"] = one.ids
        reasoned(pieces, manner, "finish_reason", "tool_calls" if one.calls else "stop")
        lists.append([manner.at(piece, "index", index) for piece in pieces])
    chunks: list[Any] = [
        {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [piece]}
        for piece in mixed(draw, lists, is_interleaved=manner.is_interleaved)
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return said, manner, [*events, *(["data: [DONE]\n\n"] if manner.done else [])]


def chat_says(merged: Merged) -> list[Any]:
    """The choices of a merged chat completion, in the words of `Said`."""
    return [
        (
            one["message"]["content"] or "",
            one["message"].get("reasoning_content") or "",
            [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in one["message"].get("tool_calls", ())
            ],
            one.get("token_ids"),
        )
        for one in merged.body["choices"]
    ]


def wanted(said: list[Said]) -> list[Any]:
    """What `chat_says` is of the reply that was drawn."""
    return [
        (
            one.text,
            "".join(one.thoughts),
            [(call.name, json.loads(call.arguments)) for call in one.calls],
            one.ids,
        )
        for one in said
    ]


@given(chat_streams(), st.data())
def test_a_chat_is_what_was_sent_or_is_named(
    drawn: tuple[list[Said], Manner, list[str]], data: st.DataObject
) -> None:
    """Whatever the server's manner, and wherever its stream is cut."""
    said, manner, events = drawn
    merged = merge("".join(events), len(said), CHAT)
    if not merged.contradictions:
        assert chat_says(merged) == wanted(said)
    if manner.index in ("right", "text") and (manner.names != "pieces" or manner.ids != "empty"):
        assert not merged.contradictions
    place = data.draw(st.integers(0, len(events) - 1))
    part = merge("".join(events[:place]), len(said), CHAT)
    is_told = manner.reasons not in ("each", "early")  # else only the connection tells
    if part.complete and not part.contradictions and (is_told or place > 2 * len(said)):
        assert chat_says(part) == wanted(said)


@given(replies(), manners, st.data())
def test_texts_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, data: st.DataObject
) -> None:
    """Text completions: choices alone."""
    lists = []
    for index, one in enumerate(said):
        pieces: list[dict[str, Any]] = [{"text": text} for text in one.pieces]
        pieces[-1]["token_ids"] = one.ids
        reasoned(pieces, manner, "finish_reason", "stop")
        lists.append([manner.at(piece, "index", index) for piece in pieces])
    sent = mixed(data.draw, lists, is_interleaved=manner.is_interleaved)
    events = [f"data: {json.dumps({'id': 'c', 'choices': [piece]})}\n\n" for piece in sent]
    merged = merge("".join(events) + "data: [DONE]\n\n" * manner.done, len(said), TEXT)
    if not merged.contradictions:
        found = [(one["text"], one["token_ids"]) for one in merged.body["choices"]]
        assert found == [(one.text, one.ids) for one in said]
    assert not merged.contradictions or manner.index not in ("right", "text")


@given(replies(), manners, st.data())
def test_candidates_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, data: st.DataObject
) -> None:
    """generateContent: no reason is written as one that is unspecified, too."""
    lists = []
    for index, one in enumerate(said):
        parts: list[Any] = [{"text": text} for text in one.pieces]
        parts += [
            {"functionCall": {"name": c.name, "args": json.loads(c.arguments)}} for c in one.calls
        ]
        pieces: list[dict[str, Any]] = [
            {"content": {"parts": [part], "role": "model"}} for part in parts
        ]
        reasoned(pieces, manner, "finishReason", "STOP")
        for piece in pieces:
            if piece.get("finishReason", "x") in ("", None):
                piece["finishReason"] = "FINISH_REASON_UNSPECIFIED"
        lists.append([manner.at(piece, "index", index) for piece in pieces])
    sent = mixed(data.draw, lists, is_interleaved=manner.is_interleaved)
    events = [f"data: {json.dumps({'candidates': [piece]})}\n\n" for piece in sent]
    merged = merge("".join(events), len(said), GEMINI)
    if not merged.contradictions:
        found = []
        for one in merged.body["candidates"]:
            parts = one["content"]["parts"]
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            text = "".join(part.get("text", "") for part in parts)
            found.append((text, [(call["name"], call["args"]) for call in calls]))
        assert found == [(text, calls) for text, _, calls, _ in wanted(said)]
    assert not merged.contradictions or manner.index not in ("right", "text")
    if manner.reasons in ("empty", "none"):
        assert merged.complete is False
    if manner.reasons == "each" and len(sent) > len(said):
        assert merged.complete is not True


def blocks_of(one: Said) -> list[dict[str, Any]]:
    """The content blocks of one reply of the Messages API."""
    thinking = [{"type": "thinking", "thinking": "".join(one.thoughts)}] if one.thoughts else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in one.calls
    ]
    return [*thinking, {"type": "text", "text": one.text}, *calls]


@given(replies(choices=1), manners, st.data())
def test_messages_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, data: st.DataObject
) -> None:
    """Blocks whose starts and deltas have indexes in any manner, or whose starts are lost."""
    (one,) = said
    has_starts = data.draw(st.booleans())
    sent: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "role": "assistant"}}
    ]
    for place, block in enumerate(blocks_of(one)):
        name = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        text = json.dumps(block["input"]) if name == "partial_json" else block[name]
        empty: dict[str, Any] = {"input": {}} if name == "partial_json" else {name: ""}
        start: dict[str, Any] = {"type": "content_block_start", "content_block": block | empty}
        deltas = [{"type": "content_block_delta", "delta": {name: t}} for t in cut(data.draw, text)]
        stop = {"type": "content_block_stop"}
        pieces = [*([start] if has_starts else []), *deltas, stop]
        sent += [manner.at(piece, "index", place) for piece in pieces]
    reason = {"last": "end_turn", "empty": "", "none": None}.get(manner.reasons, "end_turn")
    sent.append({"type": "message_delta", "delta": {"stop_reason": reason}})
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in sent)
    merged = merge(events, 1, MESSAGES)
    assert merged.complete is bool(reason)
    if not merged.contradictions:
        assert merged.body["content"] == blocks_of(one)
    assert not (merged.contradictions and has_starts)


def items_of(one: Said) -> list[dict[str, Any]]:
    """The output items of one reply of the Responses API."""
    content = [{"type": "output_text", "text": one.text, "annotations": []}]
    message = {"type": "message", "id": "msg", "role": "assistant", "content": content}
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{i}",
            "call_id": c.id,
            "name": c.name,
            "arguments": c.arguments,
        }
        for i, c in enumerate(one.calls)
    ]
    return [message, *calls]


@given(replies(choices=1), manners, st.data())
def test_responses_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, data: st.DataObject
) -> None:
    """The items that came are not lost, whatever the last event has of them."""
    (one,) = said
    items, sent = (
        items_of(one),
        [{"type": "response.created", "response": {"id": "r", "output": []}}],
    )
    has_ids, has_ends = data.draw(st.booleans()), data.draw(st.booleans())
    for place, item in enumerate(items):
        is_call = item["type"] == "function_call"
        name = "function_call_arguments" if is_call else "output_text"
        opened: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        begun = item | opened
        text = item["arguments"] if is_call else one.text
        id_ = {"item_id": item["id"]} if has_ids else {}
        at = {} if is_call else {"content_index": 0}
        pieces: list[dict[str, Any]] = [{"type": "response.output_item.added", "item": begun}]
        if not is_call:
            part = {"type": "output_text", "text": "", "annotations": []}
            pieces.append({"type": "response.content_part.added", "part": part, **at, **id_})
        for piece in cut(data.draw, text):
            pieces.append({"type": f"response.{name}.delta", "delta": piece, **at, **id_})
        if has_ends:
            pieces.append({"type": "response.output_item.done", "item": item})
        sent += [manner.at(piece, "output_index", place) for piece in pieces]
    last = data.draw(
        st.sampled_from(["whole", "empty", "missing", "less", "other id", "other text"])
    )
    output: list[dict[str, Any]] = json.loads(json.dumps(items))
    if last == "less":
        output.pop()
    if last == "other id":
        output[-1] |= {"call_id": "b"} if len(items) > 1 else {"role": "other"}
    if last == "other text":
        output[0]["content"][0]["text"] = "z"
    response = {"id": "r", "status": "completed", "output": [] if last == "empty" else output}
    if last == "missing":
        del response["output"]
    sent.append({"type": "response.completed", "response": response})
    merged = merge("".join(f"data: {json.dumps(each)}\n\n" for each in sent), 1, RESPONSES)
    assert merged.complete
    if not merged.contradictions:
        assert merged.body["output"] == items
    assert bool(merged.contradictions) == (
        last in ("other id", "other text", "less") and bool(output)
    )


@given(replies(choices=1), manners, st.booleans())
def test_blocks_of_cohere_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, has_starts: bool
) -> None:
    """Content and tool calls, by their events' names and in any manner of indexes."""
    (one,) = said
    sent: list[dict[str, Any]] = [{"type": "message-start", "id": "c"}]
    plans = [
        {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": t}}} for t in one.thoughts
    ]
    for place, (name, member, whole) in enumerate(
        [
            ("content", "content", {"type": "text", "text": one.text}),
            *(("tool-call", "tool_calls", call) for call in called(one)),
        ]
    ):
        is_call = name == "tool-call"
        pieces = one.pieces if not is_call else [whole["function"]["arguments"]]
        start = (
            {**whole, "function": {**whole["function"], "arguments": ""}}
            if is_call
            else {**whole, "text": ""}
        )
        deltas = [{"function": {"arguments": t}} if is_call else {"text": t} for t in pieces]
        events = [{"type": f"{name}-start", "delta": {"message": {member: start}}}] * has_starts
        events += [{"type": f"{name}-delta", "delta": {"message": {member: d}}} for d in deltas]
        sent += [manner.at(each, "index", max(0, place - is_call)) for each in events]
    reason = {"last": "COMPLETE", "empty": "", "none": None}.get(manner.reasons, "COMPLETE")
    sent += [*plans, {"type": "message-end", "delta": {"finish_reason": reason}}]
    merged = merge("".join(f"data: {json.dumps(each)}\n\n" for each in sent), 1, "/v2/chat")
    assert merged.complete
    if not merged.contradictions:
        message = merged.body["message"]
        found = [text["text"] for text in message["content"]]
        assert (found, message.get("tool_calls", [])) == ([one.text], called(one))
        assert message.get("tool_plan", "") == "".join(one.thoughts)
    assert not (merged.contradictions and has_starts)


def called(one: Said) -> list[dict[str, Any]]:
    """The tool calls as Cohere's."""
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in one.calls
    ]


@given(replies(choices=1), manners, st.data())
def test_blocks_of_converse_are_what_was_sent_or_are_named(
    said: list[Said], manner: Manner, data: st.DataObject
) -> None:
    """Texts and thoughts have no start; calls have one."""
    (one,) = said
    sent: list[dict[str, Any]] = [{"messageStart": {"role": "assistant"}}]
    thoughts = [{"delta": {"reasoningContent": {"text": t}}} for t in one.thoughts]
    blocks: list[list[dict[str, Any]]] = [thoughts] if thoughts else []
    blocks.append([{"delta": {"text": t}} for t in one.pieces])
    for call in one.calls:
        pieces = [{"delta": {"toolUse": {"input": t}}} for t in cut(data.draw, call.arguments)]
        blocks.append([{"start": {"toolUse": {"toolUseId": call.id, "name": call.name}}}, *pieces])
    for place, block in enumerate(blocks):
        sent += [
            {
                "contentBlock" + ("Start" if "start" in e else "Delta"): manner.at(
                    e, "contentBlockIndex", place
                )
            }
            for e in block
        ]
    reason = {"last": "end_turn", "empty": "", "none": None}.get(manner.reasons, "end_turn")
    sent.append({"messageStop": {"stopReason": reason}})
    path = "/model/m/converse-stream"
    merged = merge("".join(f"data: {json.dumps(each)}\n\n" for each in sent), 1, path)
    assert merged.complete
    if not merged.contradictions:
        thought = [{"reasoningContent": {"reasoningText": {"text": "".join(one.thoughts)}}}]
        uses = [
            {"toolUse": {"toolUseId": c.id, "name": c.name, "input": json.loads(c.arguments)}}
            for c in one.calls
        ]
        assert merged.body["output"]["message"]["content"] == [
            *(thought if one.thoughts else []),
            {"text": one.text},
            *uses,
        ]
    assert not merged.contradictions or manner.index not in ("right", "text")


@given(replies(choices=1), manners)
def test_lines_of_ollama_are_what_was_sent_or_are_named(said: list[Said], manner: Manner) -> None:
    """Each line has a piece of each member, whole calls among them."""
    (one,) = said
    calls = [
        {"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in one.calls
    ]
    messages: list[dict[str, Any]] = [{"thinking": t, "content": ""} for t in one.thoughts]
    messages += [{"content": t} for t in one.pieces]
    messages += [
        {"content": "", "tool_calls": [{"function": manner.at(c["function"], "index", i)}]}
        for i, c in enumerate(calls)
    ]
    lines = [{"model": "m", "message": {"role": "assistant", **m}, "done": False} for m in messages]
    reason = {"last": "stop", "empty": "", "none": None}.get(manner.reasons, "stop")
    lines.append({"model": "m", "message": {"content": ""}, "done": True, "done_reason": reason})
    merged = merge("".join(f"data: {json.dumps(each)}\n\n" for each in lines), 1, "/api/chat")
    assert not merged.contradictions
    message = merged.body["message"]
    assert (message["content"], message.get("thinking", "")) == (one.text, "".join(one.thoughts))
    for call in message.get("tool_calls", []):
        call["function"].pop("index", None)
    assert message.get("tool_calls", []) == calls
    part = merge("".join(f"data: {json.dumps(each)}\n\n" for each in lines[:-1]), 1, "/api/chat")
    assert not part.complete
