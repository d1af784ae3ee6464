"""The public test kit: a local model server that speaks real HTTP, and reproducible ids.

The one idea: a response is a pure function of the request, its reply and its sequence number, so
the same requests in the same order give the same bytes, token ids and log-probabilities. The
invariant: the prompt ids of a request that continues a conversation start with the previous prompt
ids followed by the completion ids, as on a vLLM server whose client replays messages verbatim.

    with ModelServer(["Paris.", Reply(tool_calls=[ToolCall("add", '{"a": 1}')])]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="unused")

`python -m otel_rollout.testing` runs the default server in the foreground.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from opentelemetry.sdk.trace.id_generator import IdGenerator

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = [
    "ByteTokenizer",
    "ModelServer",
    "Raw",
    "Reply",
    "SequentialIdGenerator",
    "ToolCall",
    "WireExchange",
    "token_logprob",
]

_Json: TypeAlias = dict[str, Any]
_CREATED: Final = 1_700_000_000
_MODEL: Final = "test-model"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the model makes."""

    name: str
    arguments: str = "{}"
    """JSON text, sent verbatim: whitespace, key order and mistakes are kept."""
    id: str | None = None
    """None: `call_{response}_{choice}_{index}`, unique within the server."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says to one request, and how the server sends it."""

    content: str | None = None
    _: KW_ONLY
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    """Sent as `reasoning_content`; on the Responses API as a `reasoning` item."""
    refusal: str | None = None
    finish_reason: str | None = None
    """None: `tool_calls` if there are any, else `stop`. `length` samples no end token."""
    choices: Sequence[Reply] = ()
    """The choices to send, whatever `n` asks for. Empty: this reply, `n` times."""
    id: str | None = None
    """Response id. None: `chatcmpl-000001` and on; empty: the response has no id."""
    delay: float = 0.0
    """Seconds before the response headers."""
    chunk_delay: float = 0.0
    """Seconds before every event of a stream."""
    cut_after: int | None = None
    """Stream: close the connection after so many events, without the end of the HTTP body.
    Otherwise: close it after half the body."""
    usage: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    """Merged last into the response object; of a stream, into every chunk."""
    message_extra: Mapping[str, object] = field(default_factory=dict)
    """Merged last into the message; of a stream, into the first delta that says something."""


@dataclass(frozen=True, slots=True)
class Raw:
    """An HTTP response sent verbatim: malformed JSON, HTML, wrong shapes, any status."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds before the response headers."""
    chunks: Sequence[bytes] = ()
    """Sent one by one behind `body`, as a stream: server-sent events of any shape."""


@dataclass(frozen=True, slots=True)
class WireExchange:
    """One request and its response as they were on the wire."""

    path: str
    request: bytes
    request_headers: Mapping[str, str]
    """Names in lower case."""
    status: int
    response: bytes
    """The body as far as it was sent; of a stream its events, without HTTP's chunk framing."""


class ByteTokenizer:
    """One token per UTF-8 byte, and special tokens that no text encodes to.

    The chat template is, for each message: its role's token, its text, the end token; then the
    assistant's token as the generation prompt. The text is `<think>reasoning</think>`, the content,
    the refusal, and each tool call as `{"name": ..., "arguments": ...}` with verbatim arguments, so
    that a message replayed as received renders to the ids that were sampled. Reasoning that is not
    replayed, tool call ids and tool definitions do not render.
    """

    special_tokens: Final[Mapping[str, int]] = {
        "<|system|>": 256,
        "<|user|>": 257,
        "<|assistant|>": 258,
        "<|tool|>": 259,
        "<|developer|>": 260,
        "<|end|>": 261,
    }
    end_token_id: Final = 261
    vocabulary_size: Final = 262

    def encode(self, text: str) -> list[int]:
        """Ids below 256 only: text that spells a special token is bytes like any other."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(_TOKEN_BYTES[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def encode_messages(
        self, messages: Iterable[_Json], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Apply the chat template. A role that has no token raises `ValueError`."""
        token_ids: list[int] = []
        for message in messages:
            role = message.get("role")
            role_id = self.special_tokens.get(f"<|{role}|>", self.end_token_id)
            if role_id == self.end_token_id:
                raise ValueError(f"no such role: {role!r}")
            spans = _message_spans(message)
            text = "".join(span.prefix + span.text + span.suffix for span in spans)
            token_ids += [role_id, *self.encode(text), self.end_token_id]
        if add_generation_prompt:
            token_ids.append(self.special_tokens["<|assistant|>"])
        return token_ids


_TOKENIZER: Final = ByteTokenizer()
_TOKEN_BYTES: Final = [bytes([value]) for value in range(256)] + [
    name.encode() for name in ByteTokenizer.special_tokens
]
_TOKEN_TEXT: Final = [token.decode("utf-8", "replace") for token in _TOKEN_BYTES]


def token_logprob(position: int, token_id: int) -> float:
    """The log-probability that the server reports for a token at a position of a completion.

    Strictly negative, at least -4, and exactly representable as a float32.
    """
    return -((position * 2654435761 + token_id * 40503) % 4096 + 1) / 1024


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of an assistant message. Prefix and suffix are sampled, but not part of its JSON."""

    field: str
    text: str
    prefix: str = ""
    suffix: str = ""
    tool_index: int = 0


def _spans(
    reasoning: str | None, content: str | None, refusal: str | None, calls: Iterable[ToolCall]
) -> Iterator[_Span]:
    if reasoning:
        yield _Span("reasoning_content", reasoning, "<think>", "</think>")
    if content:
        yield _Span("content", content)
    if refusal:
        yield _Span("refusal", refusal)
    for index, call in enumerate(calls):
        prefix = f'{{"name": {json.dumps(call.name)}, "arguments": '
        yield _Span("tool_calls", call.arguments, prefix, "}", index)


def _message_spans(message: _Json) -> Iterator[_Span]:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return _spans(
        message.get("reasoning_content") or message.get("reasoning"),
        _content_text(message.get("content")),
        message.get("refusal"),
        [ToolCall(call.get("name", ""), _text(call.get("arguments", ""))) for call in functions],
    )


def _content_text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part["text"] if "text" in part else _text(part) for part in content)
    return "" if content is None else _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _dump(value: object) -> bytes:
    # Raw UTF-8, as real servers send it; a lone surrogate becomes the escape that JSON has for it.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def _split(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def _prompts(prompt: Any) -> list[list[int]]:
    """The four shapes of a prompt (text, texts, ids, lists of ids) as lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [_TOKENIZER.encode(item) if isinstance(item, str) else list(item) for item in prompt]


@dataclass(frozen=True, slots=True)
class _Call:
    """One request with its reply: everything that the response is a function of."""

    body: _Json
    reply: Reply
    sequence: int
    chunk_size: int
    token_ids: bool
    logprobs: bool

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def head(self, kind: str, prefix: str) -> _Json:
        response_id = f"{prefix}{self.sequence:06d}" if self.reply.id is None else self.reply.id
        head = {"object": kind, "created": _CREATED, "model": self.body.get("model", _MODEL)}
        return {"id": response_id, **head} if response_id else head

    def tool_calls(self, choice: Reply, index: int) -> list[_Json]:
        return [
            {
                "id": call.id or f"call_{self.sequence:06d}_{index}_{position}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for position, call in enumerate(choice.tool_calls)
        ]


def _reply_spans(choice: Reply) -> list[_Span]:
    return list(_spans(choice.reasoning, choice.content, choice.refusal, choice.tool_calls))


def _end_ids(choice: Reply) -> list[int]:
    return [] if choice.finish_reason == "length" else [ByteTokenizer.end_token_id]


def _completion_ids(choice: Reply) -> list[int]:
    text = "".join(span.prefix + span.text + span.suffix for span in _reply_spans(choice))
    return _TOKENIZER.encode(text) + _end_ids(choice)


def _message(call: _Call, choice: Reply, index: int) -> _Json:
    message: _Json = {"role": "assistant", "content": choice.content, "refusal": choice.refusal}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = call.tool_calls(choice, index)
    return {**message, **choice.message_extra}


def _deltas(call: _Call, choice: Reply, index: int) -> Iterator[tuple[_Json, list[int]]]:
    """A message in pieces, each with the ids sampled for it: together `_completion_ids`."""
    spans, extra = _reply_spans(choice), choice.message_extra
    calls = call.tool_calls(choice, index)
    opening: _Json = {"role": "assistant", "content": None if choice.content is None else ""}
    yield {**opening, **({} if spans else extra)}, []
    for span in spans:
        is_call = span.field == "tool_calls"
        texts = [""] * is_call + _split(span.text, call.chunk_size)
        for number, text in enumerate(texts):
            delta: _Json = {span.field: text}
            if is_call:
                opened = {} if number else calls[span.tool_index]
                function = {**opened.get("function", {}), "arguments": text}
                delta = {"tool_calls": [{"index": span.tool_index, **opened, "function": function}]}
            prefix = "" if number else span.prefix
            suffix = span.suffix if number == len(texts) - 1 else ""
            yield {**delta, **extra}, _TOKENIZER.encode(prefix + text + suffix)
            extra = {}
    yield {}, _end_ids(choice)


def _chat_logprobs(call: _Call, token_ids: list[int], start: int) -> _Json:
    def entry(token_id: int, logprob: float) -> _Json:
        as_id = call.body.get("return_tokens_as_token_ids")
        token = f"token_id:{token_id}" if as_id else _TOKEN_TEXT[token_id]
        return {"token": token, "logprob": logprob, "bytes": list(_TOKEN_BYTES[token_id])}

    content, ranks = list[_Json](), range(call.body.get("top_logprobs") or 0)
    for position, token_id in enumerate(token_ids, start):
        logprob = token_logprob(position, token_id)
        top = [entry((token_id + rank) % len(_TOKEN_TEXT), logprob - rank) for rank in ranks]
        content.append({**entry(token_id, logprob), "top_logprobs": top})
    return {"content": content}


def _text_logprobs(token_ids: list[int], start: int, offset: int) -> _Json:
    offsets = list[int]()
    for token_id in token_ids:
        continues = 0x80 <= token_id < 0xC0  # a UTF-8 continuation byte starts no character
        offsets.append(offset - continues)
        offset += not continues
    return {
        "tokens": [_TOKEN_TEXT[token_id] for token_id in token_ids],
        "token_logprobs": [token_logprob(*item) for item in enumerate(token_ids, start)],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _choice_parts(call: _Call, choice: Reply, index: int, chat: bool) -> list[_Json]:
    """A choice as it stands in the `choices` of each chunk, or in those of the one response."""
    pieces: Iterable[tuple[_Json, list[int]]] = _deltas(call, choice, index)
    if not call.stream:
        pieces = [(_message(call, choice, index), _completion_ids(choice))]
    parts, position, offset = list[_Json](), 0, 0
    for said, ids in pieces:
        text, logprobs = said.get("content") or "", None
        if call.logprobs and ids and chat:
            logprobs = _chat_logprobs(call, ids, position)
        elif call.logprobs and ids:
            logprobs = _text_logprobs(ids, position, offset)
        shown = {"delta" if call.stream else "message": said} if chat else {"text": text}
        part = {"index": index, **shown, "logprobs": logprobs, "finish_reason": None}
        if call.token_ids:
            part |= {"stop_reason": None, "token_ids": ids}
        parts.append(part)
        position, offset = position + len(ids), offset + len(text)
    default = "tool_calls" if choice.tool_calls else "stop"
    parts[-1]["finish_reason"] = choice.finish_reason or default
    return parts


def _generation(call: _Call) -> list[_Json]:
    """A chat or a text completion: one response object, or the chunks of a stream."""
    body, reply, chat = call.body, call.reply, "messages" in call.body
    prompts = [_TOKENIZER.encode_messages(body["messages"])] if chat else _prompts(body["prompt"])
    replies = list(reply.choices or [reply] * (body.get("n") or 1))
    if not chat:
        replies = [Reply(said.content, finish_reason=said.finish_reason) for said in replies]
    choices, completion_tokens = list[list[_Json]](), 0
    for index, (prompt_ids, choice) in enumerate(itertools.product(prompts, replies)):
        choices.append(_choice_parts(call, choice, index, chat))
        completion_tokens += len(_completion_ids(choice))
        if call.token_ids and not chat:
            choices[-1][0]["prompt_token_ids"] = prompt_ids
    name, prefix = ("chat.completion", "chatcmpl-") if chat else ("text_completion", "cmpl-")
    head = call.head(f"{name}.chunk" if chat and call.stream else name, prefix)
    # The chunks of several choices take turns, as when a server samples them together.
    turns = [part for turn in itertools.zip_longest(*choices) for part in turn if part is not None]
    shown = [[part] for part in turns] if call.stream else [turns]
    responses = [{**head, "choices": parts} for parts in shown]
    if call.token_ids and chat:
        responses[0]["prompt_token_ids"] = prompts[0]
    usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": completion_tokens}
    usage["total_tokens"] = sum(usage.values())
    if reply.usage and not call.stream:
        responses[0]["usage"] = usage
    elif reply.usage and (body.get("stream_options") or {}).get("include_usage"):
        responses.append({**head, "choices": [], "usage": usage})
    return [{**response, **reply.extra} for response in responses]


def _input_messages(body: _Json) -> list[_Json]:
    """A Responses request as chat messages; reasoning items are dropped."""
    instructions, items = body.get("instructions"), body["input"]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in [{"content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": item.get("content")})
        elif kind == "function_call":
            messages.append({"role": "assistant", "tool_calls": [{"function": item}]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
    return messages


def _output_items(call: _Call) -> list[_Json]:
    reply, number = call.reply, f"{call.sequence:06d}"
    items, parts = list[_Json](), list[_Json]()
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content})
    if reply.content is not None:
        text = {"type": "output_text", "text": reply.content}
        parts.append({**text, "annotations": [], "logprobs": []})
    if reply.refusal is not None:
        parts.append({"type": "refusal", "refusal": reply.refusal})
    if parts:
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        items.append({**message, "status": "completed", "content": parts, **reply.message_extra})
    for index, tool_call in enumerate(call.tool_calls(reply, 0)):
        item = {"id": f"fc_{number}_{index}", "type": "function_call", "status": "completed"}
        items.append({**item, "call_id": tool_call["id"], **tool_call["function"]})
    return items


def _response(call: _Call) -> _Json:
    body, reply = call.body, call.reply
    truncated = reply.finish_reason == "length"
    head = call.head("response", "resp_")
    echoed = ("instructions", "previous_response_id", "temperature", "top_p")
    response = {
        **head,
        "created_at": head.pop("created"),
        "status": "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _output_items(call),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in echoed},
    }
    if reply.usage:
        input_tokens = len(_TOKENIZER.encode_messages(_input_messages(body)))
        output_tokens = len(_completion_ids(reply))
        reasoning_tokens = len(_TOKENIZER.encode(reply.reasoning or ""))
        response["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": input_tokens + output_tokens,
        }
    return {**response, **reply.extra}


def _response_events(call: _Call) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_named_events(call)):
        event = {"type": f"response.{name}", "sequence_number": number, **fields}
        yield b"event: response.%b\ndata: %b\n\n" % (name.encode(), _dump(event))


def _named_events(call: _Call) -> Iterator[tuple[str, _Json]]:
    final = _response(call)
    opened = {**final, "status": "in_progress", "output": [], "usage": None}
    opened["incomplete_details"] = None
    yield "created", {"response": opened}
    yield "in_progress", {"response": opened}
    for output_index, item in enumerate(final["output"]):
        at = {"item_id": item["id"], "output_index": output_index}
        empty: _Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        yield "output_item.added", {"output_index": output_index, "item": added}
        for content_index, part in enumerate(item.get("content", ())):
            here, kind = {**at, "content_index": content_index}, part["type"]
            name = "refusal" if kind == "refusal" else "text"
            logprobs: _Json = {"logprobs": []} if kind == "output_text" else {}
            yield "content_part.added", {**here, "part": {**part, name: ""}}
            for piece in _split(part[name], call.chunk_size):
                yield f"{kind}.delta", {**here, "delta": piece, **logprobs}
            yield f"{kind}.done", {**here, name: part[name], **logprobs}
            yield "content_part.done", {**here, "part": part}
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            for piece in _split(item["arguments"], call.chunk_size):
                yield "function_call_arguments.delta", {**at, "delta": piece}
            yield "function_call_arguments.done", {**at, **said}
        yield "output_item.done", {"output_index": output_index, "item": item}
    yield final["status"], {"response": final}


def _embeddings(body: _Json) -> _Json:
    inputs, dimensions = _prompts(body["input"]), body.get("dimensions") or 16
    data = list[_Json]()
    for index, token_ids in enumerate(inputs):
        digest = hashlib.shake_256(json.dumps(token_ids).encode()).digest(dimensions)
        vector: Any = [(byte - 127.5) / 128 for byte in digest]  # exact as float32
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.get("model", _MODEL), "usage": usage}


@dataclass(frozen=True, slots=True)
class _Answer:
    """An HTTP response to send: its body as one part, or as the events of a stream."""

    parts: Sequence[bytes]
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    pace: Reply = field(default_factory=Reply)


def _error(status: int, message: str, code: str | None = None) -> _Answer:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    # The test is at fault, not the network: openai's client obeys this header and does not retry.
    return _Answer([_dump(body)], status, headers={"x-should-retry": "false"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name upstream)
        pass

    def _exchange(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = self.rfile.read(length)
        if len(request) < length:
            self.close_connection = True
            return
        answer = self.server.model._answer(self.command, self.path, request)
        sent, recorded = list[bytes](), False

        def record() -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            exchange = WireExchange(self.path, request, headers, answer.status, b"".join(sent))
            self.server.model._record(exchange)

        frames = _frames(answer)
        try:
            for number, (pause, body, frame) in enumerate(frames, 1):
                if pause > 0 and self.server.stopping.wait(pause):
                    raise ConnectionAbortedError("the server is stopping")
                sent.append(body)
                if number == len(frames):
                    # Before the last bytes leave: a client that has them finds the exchange.
                    record()
                    recorded = True
                self.wfile.write(frame)
        except OSError:
            self.close_connection = True
            if not recorded:
                record()
        if answer.pace.cut_after is not None:
            self.close_connection = True

    # http.server's names
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _exchange  # noqa: N815


def _frames(answer: _Answer) -> list[tuple[float, bytes, bytes]]:
    """What to write: seconds to wait before it, its part of the body, its bytes on the wire."""
    pace, body = answer.pace, b"".join(answer.parts)
    known = answer.status in HTTPStatus._value2member_map_
    phrase = HTTPStatus(answer.status).phrase if known else ""
    framing = "Transfer-Encoding: chunked" if answer.stream else f"Content-Length: {len(body)}"
    lines = [f"HTTP/1.1 {answer.status} {phrase}", f"Content-Type: {answer.content_type}", framing]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    if not answer.stream:
        body = body if pace.cut_after is None else body[: len(body) // 2]
        return [(pace.delay, body, head + body)]
    frames = [(pace.delay, b"", head)]
    frames += [
        (pace.chunk_delay, part, b"%x\r\n%b\r\n" % (len(part), part))
        for part in answer.parts[: pace.cut_after]
    ]
    if pace.cut_after is None:
        pause, part, frame = frames.pop()
        frames.append((pause, part, frame + b"0\r\n\r\n"))
    return frames


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, model: ModelServer, port: int) -> None:
        self.model = model
        self.stopping = threading.Event()
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that hang up are part of what is tested; anything else is a bug in this file.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # its client may have been faster
                connection.shutdown(socket.SHUT_RDWR)


_Said: TypeAlias = Reply | Raw | str
_PARAMETERS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}


class ModelServer:
    """An OpenAI-compatible model server on 127.0.0.1, for tests of agents over real HTTP.

    Endpoints: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` (each also streamed),
    `/v1/embeddings`, `/v1/models`. Anything else is a 404 in OpenAI's error shape.

    `reply` decides what the model says:

    * a function of the parsed request body, called concurrently for concurrent requests;
    * an iterable: each request takes the next. When there is none left, HTTP 500 says so. A
      client's retries take replies too: give it `max_retries=0` where that would matter;
    * one `Reply`, `Raw` or text: the same for every request;
    * None: `You said: {text of the last user message}`.

    An exception in `reply` becomes HTTP 500 with its text, marked as not worth a retry.

    Responses carry what vLLM sends on request (`return_token_ids`, `logprobs`): `prompt_token_ids`
    (of a stream, in its first chunk), `token_ids`, `stop_reason`, log-probabilities. This server
    sends them always; with `token_ids=False` or `logprobs=False` it, too, only on request.

    Thread-safe. After `stop` it can be started again; ids and replies go on where they were.
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], _Said] | Iterable[_Said] | _Said | None = None,
        *,
        token_ids: bool = True,
        logprobs: bool = True,
        chunk_size: int = 8,
        port: int = 0,
    ) -> None:
        """`chunk_size` is in characters per event of a stream; port 0 is any free port."""
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}, expected 1 or more characters")
        self._reply = _reply_function(reply)
        self._token_ids, self._logprobs = token_ids, logprobs
        self._chunk_size, self._port = chunk_size, port
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._exchanges: list[WireExchange] = []
        self._sequence = itertools.count(1)

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:{port}/v1`, while the server runs."""
        if self._server is None:
            raise RuntimeError("ModelServer is not running: use it in `with`, or call start()")
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def exchanges(self) -> list[WireExchange]:
        """A copy of the exchanges so far, in the order in which their responses were complete.

        A client that has read a response to its end finds it here.
        """
        with self._lock:
            return list(self._exchanges)

    def clear(self) -> None:
        """Forget the exchanges so far; response ids go on counting."""
        with self._lock:
            self._exchanges.clear()

    def start(self) -> Self:
        """Serve in a daemon thread, and return the server itself. No-op when it runs."""
        if self._server is None:
            self._server = _Server(self, self._port)
            # The argument is how long stop() may wait for the accepting loop, in seconds.
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Close the port and every connection, also those that wait in a delay. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _record(self, exchange: WireExchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)

    def _answer(self, method: str, path: str, request: bytes) -> _Answer:
        path = path.partition("?")[0]
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": _MODEL, "object": "model", "created": _CREATED, "owned_by": "test"}
            return _Answer([_dump({"object": "list", "data": [model]})])
        if method != "POST" or path not in _PARAMETERS:
            return _error(404, f"ModelServer has no {method} {path}", "not_found")
        parameter = _PARAMETERS[path]
        try:
            body = json.loads(request)
        except ValueError as error:
            return _error(400, f"the request body is not JSON: {error}")
        if not isinstance(body, dict) or not body.get(parameter):
            return _error(400, f"the request has no {parameter!r}")
        try:
            if path == "/v1/embeddings":
                return _Answer([_dump(_embeddings(body))])
            said = self._reply(body)
            if isinstance(said, Raw):
                pace = Reply(delay=said.delay)
                parts = [part for part in (said.body, *said.chunks) if part] or [b""]
                return _Answer(
                    parts,
                    said.status,
                    said.content_type,
                    said.headers,
                    stream=bool(said.chunks),
                    pace=pace,
                )
            return self._generate(body, Reply(said) if isinstance(said, str) else said)
        except Exception as error:  # the reply is the user's code: its failure is a response
            return _error(500, f"{type(error).__name__}: {error}")

    def _generate(self, body: _Json, reply: Reply) -> _Answer:
        if not isinstance(reply, Reply):
            raise TypeError(f"reply gave {reply!r}, expected Reply, Raw or str")
        with self._lock:
            sequence = next(self._sequence)
        token_ids = self._token_ids or bool(body.get("return_token_ids"))
        # Of a text completion `logprobs` is a number, and 0 asks for them.
        logprobs = self._logprobs or body.get("logprobs") not in (None, False)
        call = _Call(body, reply, sequence, self._chunk_size, token_ids, logprobs)
        if not call.stream:
            response = _response(call) if "input" in body else _generation(call)[0]
            return _Answer([_dump(response)], pace=reply)
        if "input" in body:
            events = list(_response_events(call))
        else:
            events = [b"data: %b\n\n" % _dump(chunk) for chunk in _generation(call)]
            events.append(b"data: [DONE]\n\n")
        return _Answer(events, content_type="text/event-stream", stream=True, pace=reply)


def _reply_function(
    reply: Callable[[_Json], _Said] | Iterable[_Said] | _Said | None,
) -> Callable[[_Json], _Said]:
    if reply is None:
        return lambda body: f"You said: {_last_user_text(body)}"
    if isinstance(reply, Reply | Raw | str):
        return lambda _: reply
    if callable(reply):
        return reply
    replies, lock, given = iter(reply), threading.Lock(), itertools.count()

    def take(_: _Json) -> _Said:
        with lock:
            for said in replies:
                next(given)
                return said
            raise LookupError(f"ModelServer ran out of replies: it was given {next(given)}")

    return take


def _last_user_text(body: _Json) -> str:
    if "prompt" in body:
        return _TOKENIZER.decode(_prompts(body["prompt"])[0])
    messages = body["messages"] if "messages" in body else _input_messages(body)
    users = [message for message in messages if message.get("role") == "user"]
    return _content_text(users[-1].get("content")) if users else ""


class SequentialIdGenerator(IdGenerator):
    """Trace ids 1, 2, 3, ... and span ids 1, 2, 3, ...: reproducible traces. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trace_ids, self._span_ids = itertools.count(1), itertools.count(1)

    def generate_trace_id(self) -> int:
        with self._lock:
            return next(self._trace_ids)

    def generate_span_id(self) -> int:
        with self._lock:
            return next(self._span_ids)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the default server until SIGTERM, SIGINT or the end of standard input.

    The first line of output is its base URL.
    """
    parser = argparse.ArgumentParser(prog="python -m otel_rollout.testing")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--chunk-size", type=int, default=8, help="characters per stream event")
    parser.add_argument("--completion-tokens", type=int, help="reply with a text of so many bytes")
    options = parser.parse_args(arguments)
    size = options.completion_tokens
    text = None if size is None else ("lorem ipsum " * (size // 12 + 1))[:size]
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())

    def wait_for_end_of_input() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock, held here, aborts the interpreter's exit
            pass
        stopped.set()

    with ModelServer(text, chunk_size=options.chunk_size, port=options.port) as server:
        print(server.base_url, flush=True)
        threading.Thread(target=wait_for_end_of_input, daemon=True).start()
        stopped.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
