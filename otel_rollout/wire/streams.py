"""A streamed reply as the reply that the same server would have sent unstreamed.

Pure: server-sent events in, one JSON body out. Every field that a server puts on a chunk
survives: texts are joined, lists of token ids and log-probabilities are chained, the last word
wins for the rest. A stream whose shape is not known stays verbatim.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from functools import reduce
from typing import Any

from otel_rollout.wire.json import Json, dumps, loads

_TERMINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Merged:
    """What a stream amounted to."""

    body: Json
    """The reply in unstreamed shape; None where the shape of the events is not known."""
    complete: bool
    """Whether the server said all it had to say, not merely whether reading ended."""
    error: Json
    """The error that the server reported inside the stream, or None."""


def merge(events: str, choices: int = 1) -> Merged:
    """Merge the server-sent events of one response to a request for `choices` choices."""
    chunks, done = _chunks(events)
    if None in (chunks if done else chunks[:-1]):
        return Merged(None, False, None)  # not a stream that was cut: the client gave up on it
    chunks = [chunk for chunk in chunks if isinstance(chunk, dict)]
    error = next(filter(None, map(_error_of, reversed(chunks))), None)
    final = next((c for c in reversed(chunks) if c.get("type") in _TERMINAL_EVENTS), None)
    if final is not None:
        return Merged(final.get("response"), True, error)
    if any(isinstance(chunk.get("response"), dict) for chunk in chunks):
        return Merged(_merge_items(chunks), False, error)
    if any(chunk.get("type") == "message_start" for chunk in chunks):
        stopped = any(map(_ends_message, chunks))
        try:
            return Merged(_merge_message(chunks), stopped and error is None, error)
        except (AttributeError, KeyError, TypeError, ValueError):
            return Merged(None, stopped and error is None, error)
    if any(_is_piece(chunk) for chunk in chunks):
        body = _merge_pieces(chunks)
        return Merged(body, body.get("stop") is True and error is None, error)
    if not any(isinstance(chunk.get("choices"), list) for chunk in chunks):
        return Merged(None, done and error is None, error)
    try:
        body = _merge_chunks(chunks)
    except (AttributeError, TypeError, ValueError):  # chunks of another shape than they seemed
        return Merged(None, done and error is None, error)
    finished = sum(choice.get("finish_reason") is not None for choice in body["choices"])
    return Merged(body, (done or finished >= choices) and error is None, error)


def events_of_frames(frames: bytes) -> bytes:
    """The server-sent events that AWS (Bedrock) would have sent, did it not frame them its own way.

    A last frame that was cut is left out. ValueError for bytes that are no such frames.
    """
    events: list[bytes] = []
    position = 0
    while position + _FRAME.size <= len(frames):
        length, headers, checksum = _FRAME.unpack_from(frames, position)
        if zlib.crc32(frames[position : position + 8]) != checksum:
            raise ValueError(f"not a frame at byte {position}")
        start, position = position + _FRAME.size + headers, position + length
        if position > len(frames):
            break
        payload = loads(frames[start : position - 4])  # behind it a checksum
        if isinstance(payload.get("bytes"), str):
            event = base64.b64decode(payload["bytes"])
        else:
            event = dumps({"type": "error", "error": payload}).encode()
        events.append(b"data: %b\n\n" % event)
    return b"".join(events)


_FRAME = struct.Struct(">III")
"""How a frame begins: its length, that of its headers, the checksum of the two."""


def pack_events(events: str) -> str:
    """The events in less space: what nearly all of them begin and end with is written once.

    The first two lines are that beginning and end; then `+` and the rest of an event, or `=` and
    a whole one. Lines are separated by an empty one, as events are.
    """
    if "\r" in events:
        events = events.replace("\r\n", "\n").replace("\r", "\n")
    lines = events.split("\n\n")
    # The first event is often special; a few different ones behind it tell what is common.
    some = list(dict.fromkeys(lines[1:7]))
    begin = end = ""
    if len(some) > 1 and len(lines) > 4:
        begin = reduce(_common, some)
        end = reduce(_common, [line[len(begin) :][::-1] for line in some])[::-1]
    first, least = len(begin), len(begin) + len(end)
    last = -len(end) or None
    return "\n\n".join(
        [
            begin,
            end,
            *(
                "+" + line[first:last]
                if line.startswith(begin) and line.endswith(end) and len(line) >= least
                else "=" + line
                for line in lines
            ),
        ]
    )


def _common(first: str, second: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def unpack_events(text: str) -> str:
    """The inverse of `pack_events`, line ends apart. ValueError for anything else."""
    lines = text.split("\n\n")
    if len(lines) < 3 or any(line[:1] not in ("+", "=") for line in lines[2:]):
        raise ValueError("not events that pack_events wrote")
    begin, end = lines[:2]
    return "\n\n".join(
        line[1:] if line[0] == "=" else f"{begin}{line[1:]}{end}" for line in lines[2:]
    )


def _chunks(events: str) -> tuple[list[Json], bool]:
    """The JSON of the events, None for what is none, and whether `[DONE]` came."""
    datas: list[str] = []
    done = False
    if "\r" in events:
        events = events.replace("\r\n", "\n").replace("\r", "\n")
    for event in events.split("\n\n"):
        if event.startswith("data: {") and "\n" not in event:
            datas.append(event[6:])  # what nearly every event is
            continue
        lines = [line for line in event.split("\n") if line.startswith("data:")]
        data = "\n".join(line[5:].removeprefix(" ") for line in lines)
        if data.startswith("[DONE]"):
            done = True
            break
        if data:
            datas.append(data)
    try:
        chunks = loads("[" + ",".join(datas) + "]")
    except (ValueError, RecursionError):  # such as the last event of a stream that was cut
        chunks = list(map(_try_loads, datas))
    return chunks, done


def _try_loads(data: str) -> Json:
    try:
        return loads(data)
    except (ValueError, RecursionError):
        return None


def _error_of(chunk: dict[str, Any]) -> Json:
    """The error that an event reports; one of the Responses API is the error itself."""
    return chunk.get("error") or (chunk if chunk.get("type") == "error" else None)


def _merge_items(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream of the Responses API that did not end: the response as far as it was told."""
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if isinstance(chunk.get("response"), dict):
            response = chunk["response"]
        index = chunk.get("output_index")
        if not isinstance(index, int):
            continue
        if isinstance(chunk.get("item"), dict):
            items[index] = chunk["item"]
        elif index in items:
            _merge_part(items[index], chunk)
    for item in items.values():
        for key in _PARTS:
            if isinstance(item.get(key), list):
                item[key] = [_finish(part) for part in item[key]]
    output = [_finish(items[index]) for index in sorted(items)]
    return {**response, "output": output or response.get("output")}


def _merge_part(item: dict[str, Any], event: dict[str, Any]) -> None:
    """Add what an event says about a part of an output item, or about the item itself."""
    target = item
    for key, position in _PARTS.items():
        place = event.get(position)
        if isinstance(place, int):
            parts = item.get(key)
            if not isinstance(parts, list):
                parts = item[key] = []
            if isinstance(event.get("part"), dict):
                parts[place : place + 1] = [event["part"]]
            elif place >= len(parts):
                parts.append({})
            target = parts[min(place, len(parts) - 1)]
    kind, _, verb = str(event.get("type")).removeprefix("response.").rpartition(".")
    name, text = _DELTAS.get(kind), event.get("delta")
    if name is not None and verb == "delta" and isinstance(text, str):
        if isinstance(target.get(name), str):
            target[name] = [_Text(target[name])]
        _merge_field(target, name, text)


_PARTS = {"content": "content_index", "summary": "summary_index"}
_DELTAS = {
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "mcp_call_arguments": "arguments",
    "code_interpreter_call_code": "code",
}
"""The field that the deltas of an event of the Responses API are pieces of."""


def _ends_message(chunk: dict[str, Any]) -> bool:
    """Whether it says that the message is over: some clients read no further than its reason."""
    delta = chunk.get("delta") if chunk.get("type") == "message_delta" else None
    reason = delta.get("stop_reason") if isinstance(delta, dict) else None
    return chunk.get("type") == "message_stop" or reason is not None


def _merge_message(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream of the Messages API. The input of a tool that was cut stays the text that it is."""
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    texts: dict[tuple[int, str], list[str]] = {}
    for chunk in chunks:
        kind = chunk.get("type")
        if kind == "message_start":
            message = chunk["message"]
        elif kind == "content_block_start":
            blocks[chunk["index"]] = chunk["content_block"]
        elif kind == "content_block_delta":
            index = chunk["index"]
            block = blocks.setdefault(index, {})
            for key, value in chunk["delta"].items():
                if key == "partial_json":
                    texts.setdefault((index, "input"), []).append(value)
                elif key in ("text", "thinking"):
                    texts.setdefault((index, key), [block.get(key) or ""]).append(value)
                elif key == "citation":
                    block["citations"] = [*(block.get("citations") or ()), value]
                elif key != "type" and value is not None:
                    block[key] = value
        elif kind == "message_delta":
            said = {key: value for key, value in chunk.items() if key not in ("type", "delta")}
            if isinstance(said.get("usage"), dict):
                said["usage"] = _known(message.get("usage") or {}, said["usage"])
            message = _known(message, said, chunk.get("delta") or {})
    for (index, key), pieces in texts.items():
        text = "".join(pieces)
        if key != "input":
            blocks[index][key] = text
        elif text:
            parsed = _try_loads(text)
            blocks[index][key] = text if parsed is None else parsed
    if blocks:
        message["content"] = [blocks[index] for index in sorted(blocks)]
    return message


def _known(first: dict[str, Any], *later: dict[str, Any]) -> dict[str, Any]:
    """All in one, the later ones winning, but not with None."""
    known = dict(first)
    for fields in later:
        known |= {k: v for k, v in fields.items() if v is not None or k not in known}
    return known


def _is_piece(chunk: dict[str, Any]) -> bool:
    return isinstance(chunk.get("content"), str) and isinstance(chunk.get("stop"), bool)


def _merge_pieces(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream of llama.cpp's own `/completion`: pieces of the reply, until one says `stop`."""
    body: dict[str, Any] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key in _PIECEWISE:
                _merge_field(body, key, value)
            elif value is not None or key not in body:
                body[key] = value
    return {key: _finish(value) for key, value in body.items()}


_PIECEWISE = ("content", "tokens", "completion_probabilities")


def _merge_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key == "choices":
                for choice in value or ():
                    _merge_choice(choices, choice)
            elif key == _EXTENSION and isinstance(value, dict) and isinstance(body.get(key), dict):
                body[key] = {**body[key], **value}
            elif (value is not None or key not in body) and key != _PADDING:
                body[key] = value
    if body.get("object") == "chat.completion.chunk":
        body["object"] = "chat.completion"
    body["choices"] = [_finish(choices[index]) for index in sorted(choices)]
    return body


def _merge_choice(choices: dict[int, dict[str, Any]], choice: dict[str, Any]) -> None:
    index = choice.get("index") or 0
    merged = choices.get(index)
    if merged is None:
        merged = choices[index] = {"index": index}
    for key, value in choice.items():
        if key == "delta":
            message = merged.get("message")
            if message is None:
                message = merged["message"] = {"role": "assistant", "content": None}
            for name, part in (value or {}).items():
                if name == "tool_calls":
                    _merge_tool_calls(message, part or [])
                else:
                    _merge_field(message, name, part)
        elif key == "text" or isinstance(value, list | dict):
            _merge_field(merged, key, value)
        elif value is not None or key not in merged:
            merged[key] = value


def _merge_field(target: dict[str, Any], key: str, value: Json) -> None:
    """Chain texts and lists, merge objects; other values replace."""
    old = target.get(key)
    if old is None:
        if isinstance(value, str) and key not in _WHOLE:
            value = [_Text(value)]
        elif isinstance(value, dict):
            target[key] = {}
            for name, part in value.items():
                _merge_field(target[key], name, part)
            return
        elif isinstance(value, list):
            value = list(value)
        if value is not None or key not in target:
            target[key] = value
    elif isinstance(value, str) and isinstance(old, list) and old and isinstance(old[0], _Text):
        old.append(_Text(value))
    elif isinstance(value, list) and isinstance(old, list):
        old.extend(value)
    elif isinstance(value, dict) and isinstance(old, dict):
        for name, part in value.items():
            _merge_field(old, name, part)
    elif value is not None:
        target[key] = value


_WHOLE = ("role", "id", "type")
"""Texts that a server may repeat, but never gives in pieces."""
_EXTENSION = "sglext"
"""What SGLang adds to a reply, in one chunk or in two."""
_PADDING = "obfuscation"
"""Noise on the chunks of a stream, so that their lengths tell nothing."""


class _Text(str):
    """A piece of a text that is still growing: joined once, at the end."""

    __slots__ = ()


def _merge_tool_calls(message: dict[str, Any], deltas: list[dict[str, Any]]) -> None:
    calls = message.setdefault("tool_calls", {})
    for position, delta in enumerate(deltas):
        index = delta.get("index", position)
        call = calls.setdefault(index, {})
        again = bool(call.get("id")) and delta.get("id") == call.get("id")
        for key, value in delta.items():
            if key == "index":
                continue
            if key in ("id", "type"):
                if value:
                    call[key] = value
            elif key == "function" and again and "name" in (value or {}):
                # A server that repeats who is called on every delta.
                _merge_field(call, key, {k: v for k, v in value.items() if k != "name"})
            else:
                _merge_field(call, key, value)


def _finish(value: Json) -> Json:
    if isinstance(value, dict):
        return {
            key: [_finish(part[index]) for index in sorted(part)]
            if key == "tool_calls" and isinstance(part, dict)
            else _finish(part)
            for key, part in value.items()
        }
    if isinstance(value, list) and value and isinstance(value[0], _Text):
        return "".join(value)
    return value
