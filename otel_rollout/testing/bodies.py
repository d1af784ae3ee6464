"""Replies of the model server: their tokens, and their JSON in each API's shape. Pure."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeAlias

Json: TypeAlias = dict[str, Any]
CREATED: Final = 1_700_000_000
MODEL: Final = "test-model"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the model makes."""

    name: str
    """Name of the tool."""
    arguments: str = "{}"
    """JSON text, sent verbatim: whitespace, key order and mistakes are kept."""
    id: str | None = None
    """Id of the call. None: `call_{response}_{choice}_{index}`, unique within the server."""
    custom: bool = False
    """True: a call of a custom tool, whose `arguments` are its input, any text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply to one request, and the way in which the server sends it."""

    content: str | None = None
    """Text of the message. None: it has no text."""
    _: KW_ONLY
    tool_calls: Sequence[ToolCall] = ()
    """Tool calls of the message, in order."""
    reasoning: str | None = None
    """Sent as `reasoning_content`; on the Responses API as a `reasoning` item. None: not sent."""
    refusal: str | None = None
    """Text of a refusal. None: the model does not refuse."""
    finish_reason: str | None = None
    """Sent as it is; `length` samples no end token. None: `tool_calls` if any, else `stop`."""
    choices: Sequence[Reply] = ()
    """The choices to send, whatever `n` the request has. Empty: this reply, `n` times."""
    id: str | None = None
    """Response id. None: `chatcmpl-000001` and so on. Empty: the response has no id."""
    delay: float = 0.0
    """Seconds before the response headers."""
    chunk_delay: float = 0.0
    """Seconds before every event of a stream."""
    cut_after: int | None = None
    """A stream: close the connection after so many events, without the end of the HTTP body.
    Otherwise: close it after half the body. None: send everything."""
    usage: bool = True
    """False: the response has no usage."""
    weight_versions: Sequence[tuple[str, int]] = ()
    """Versions of the weights, each with the number of tokens that it samples; the last one samples
    the rest. Sent as SGLang's `meta_info` of a choice; of a stream, in every chunk so far as it
    came. Empty: not sent."""
    polls: int = 1
    """Responses API, `background`: number of retrievals that find it still in progress."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Merged last into the response object; of a stream, into every chunk."""
    message_extra: Mapping[str, object] = field(default_factory=dict)
    """Merged last into the message; of a stream, into the first delta with content."""


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
        """One id below 256 per byte; text that spells a special token is encoded like any text."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text, with the names of special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(_TOKEN_BYTES[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def encode_messages(
        self, messages: Iterable[Json], *, add_generation_prompt: bool = True
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


TOKENIZER: Final = ByteTokenizer()
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


def _message_spans(message: Json) -> Iterator[_Span]:
    calls = message.get("tool_calls") or ()
    functions = [call.get("function") or call.get("custom") or {} for call in calls]
    return _spans(
        message.get("reasoning_content") or message.get("reasoning"),
        content_text(message.get("content")),
        message.get("refusal"),
        [
            ToolCall(call.get("name", ""), _text(call.get("arguments", call.get("input", ""))))
            for call in functions
        ],
    )


def content_text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part["text"] if "text" in part else _text(part) for part in content)
    return "" if content is None else _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def dump(value: object) -> bytes:
    # Raw UTF-8, as real servers send it; a lone surrogate becomes the escape that JSON has for it.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def split(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def prompt_ids_of(prompt: Any) -> list[list[int]]:
    """The four shapes of a prompt (text, texts, ids, lists of ids) as lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [TOKENIZER.encode(item) if isinstance(item, str) else list(item) for item in prompt]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request with its reply: all inputs of the response."""

    body: Json
    reply: Reply
    sequence: int
    chunk_size: int
    token_ids: bool
    logprobs: bool
    logprobs_mode: str = "raw"

    def logprob(self, position: int, token_id: int) -> float:
        """The log-probability that is sent for a sampled token."""
        raw, temperature = token_logprob(position, token_id), self.body.get("temperature") or 1
        return {"processed": raw / temperature, "wrong": raw - 22}.get(self.logprobs_mode, raw)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[Json | None]:
        """The raw log-probabilities of a prompt: after `<|assistant|>`, those of a reply."""
        start = len(ids) - ids[::-1].index(258) if 258 in ids else 0
        values = [token_logprob(place - start, token) for place, token in enumerate(ids)]
        return [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values[1:], strict=True))]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def head(self, kind: str, prefix: str) -> Json:
        response_id = f"{prefix}{self.sequence:06d}" if self.reply.id is None else self.reply.id
        head = {"object": kind, "created": CREATED, "model": self.body.get("model", MODEL)}
        return {"id": response_id, **head} if response_id else head

    def tool_calls(self, choice: Reply, index: int) -> list[Json]:
        return [
            {
                "id": call.id or f"call_{self.sequence:06d}_{index}_{position}",
                "type": "custom" if call.custom else "function",
                **(
                    {"custom": {"name": call.name, "input": call.arguments}}
                    if call.custom
                    else {"function": {"name": call.name, "arguments": call.arguments}}
                ),
            }
            for position, call in enumerate(choice.tool_calls)
        ]


def _reply_spans(choice: Reply) -> list[_Span]:
    return list(_spans(choice.reasoning, choice.content, choice.refusal, choice.tool_calls))


def _end_ids(choice: Reply) -> list[int]:
    return [] if choice.finish_reason == "length" else [ByteTokenizer.end_token_id]


def completion_ids(choice: Reply) -> list[int]:
    text = "".join(span.prefix + span.text + span.suffix for span in _reply_spans(choice))
    return TOKENIZER.encode(text) + _end_ids(choice)


def _message(call: ModelCall, choice: Reply, index: int) -> Json:
    message: Json = {"role": "assistant", "content": choice.content, "refusal": choice.refusal}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = call.tool_calls(choice, index)
    return {**message, **choice.message_extra}


def _deltas(call: ModelCall, choice: Reply, index: int) -> Iterator[tuple[Json, list[int]]]:
    """A message in pieces, each with the ids sampled for it: together `completion_ids`."""
    spans, extra = _reply_spans(choice), choice.message_extra
    calls = call.tool_calls(choice, index)
    opening: Json = {"role": "assistant", "content": None if choice.content is None else ""}
    yield {**opening, **({} if spans else extra)}, []
    for span in spans:
        is_call = span.field == "tool_calls"
        texts = [""] * is_call + split(span.text, call.chunk_size)
        for number, text in enumerate(texts):
            delta: Json = {span.field: text}
            if is_call:
                opened = {} if number else calls[span.tool_index]
                kind = calls[span.tool_index]["type"]
                argument = "input" if kind == "custom" else "arguments"
                piece = {**opened.get(kind, {}), argument: text}
                delta = {"tool_calls": [{"index": span.tool_index, **opened, kind: piece}]}
            prefix = "" if number else span.prefix
            suffix = span.suffix if number == len(texts) - 1 else ""
            yield {**delta, **extra}, TOKENIZER.encode(prefix + text + suffix)
            extra = {}
    yield {}, _end_ids(choice)


def _chat_logprobs(call: ModelCall, token_ids: list[int], start: int) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        as_id = call.body.get("return_tokens_as_token_ids")
        token = f"token_id:{token_id}" if as_id else _TOKEN_TEXT[token_id]
        return {"token": token, "logprob": logprob, "bytes": list(_TOKEN_BYTES[token_id])}

    content, ranks = list[Json](), range(call.body.get("top_logprobs") or 0)
    for position, token_id in enumerate(token_ids, start):
        logprob = call.logprob(position, token_id)
        top = [entry((token_id + rank) % len(_TOKEN_TEXT), logprob - rank) for rank in ranks]
        content.append({**entry(token_id, logprob), "top_logprobs": top})
    return {"content": content}


def _meta_info(choice: Reply, count: int) -> Json:
    """The versions of the first `count` tokens."""
    spans, start = list[Json](), 0
    for number, (version, tokens) in enumerate(choice.weight_versions, 1):
        is_last = number == len(choice.weight_versions)
        end = count if is_last else min(start + tokens, count)
        if start < count or not start:
            spans.append({"version": version, "start": start, "end": end})
        start = end
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}


def _text_logprobs(token_ids: list[int], start: int, offset: int) -> Json:
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


def _choice_parts(
    call: ModelCall, choice: Reply, index: int, chat: bool, echoed: Sequence[int]
) -> list[Json]:
    """A choice as entries of `choices`: one for each chunk, or one for the whole response.

    `echoed` is the prompt that a text completion repeats, in its text and log-probabilities (of
    which the first is unknown), not in its token ids.
    """
    pieces: Iterable[tuple[Json, list[int]]] = _deltas(call, choice, index)
    if not call.stream:
        pieces = [(_message(call, choice, index), completion_ids(choice))]
    parts, position, offset = list[Json](), 0, 0
    for piece, ids in pieces:
        text, logprobs = piece.get("content") or "", None
        if call.logprobs and ids and chat:
            logprobs = _chat_logprobs(call, ids, position)
        elif call.logprobs and ids:
            logprobs = _text_logprobs(ids, position, offset)
        if echoed and not parts:
            before = TOKENIZER.decode(echoed)
            if call.logprobs:
                own = _text_logprobs(ids, position, len(before)) if ids else None
                logprobs = _text_logprobs(list(echoed), 0, 0)
                logprobs["token_logprobs"][0] = None
                for name in ("tokens", "token_logprobs", "text_offset") if own else ():
                    logprobs[name] += (own or {})[name]
            text = before + text
        shown = {"delta" if call.stream else "message": piece} if chat else {"text": text}
        part = {"index": index, **shown, "logprobs": logprobs, "finish_reason": None}
        part |= {"stop_reason": None, "token_ids": ids if call.token_ids else None}
        parts.append(part)
        position, offset = position + len(ids), offset + len(text)
        if choice.weight_versions:
            part["meta_info"] = _meta_info(choice, position)
    default = "tool_calls" if choice.tool_calls else "stop"
    parts[-1]["finish_reason"] = choice.finish_reason or default
    return parts


def generation(call: ModelCall) -> list[Json]:
    """A chat or a text completion: one response object, or the chunks of a stream."""
    body, reply, chat = call.body, call.reply, "messages" in call.body
    if chat:
        prompts = [TOKENIZER.encode_messages(body["messages"])]
    else:
        prompts = prompt_ids_of(body["prompt"])
    replies = list(reply.choices or [reply] * (body.get("n") or 1))
    if not chat:
        replies = [
            Reply(
                piece.content,
                finish_reason=piece.finish_reason,
                weight_versions=piece.weight_versions,
            )
            for piece in replies
        ]
    choices, completion_tokens = list[list[Json]](), 0
    for index, (prompt_ids, choice) in enumerate(itertools.product(prompts, replies)):
        echoed = prompt_ids if body.get("echo") and not chat else []
        choices.append(_choice_parts(call, choice, index, chat, echoed))
        completion_tokens += len(completion_ids(choice))
        if not chat:
            choices[-1][0]["prompt_token_ids"] = prompt_ids if call.token_ids else None
            if body.get("prompt_logprobs") is not None:
                choices[-1][0]["prompt_logprobs"] = call.prompt_logprobs(prompt_ids)
    name, prefix = ("chat.completion", "chatcmpl-") if chat else ("text_completion", "cmpl-")
    head = call.head(f"{name}.chunk" if chat and call.stream else name, prefix)
    # The chunks of several choices take turns, as when a server samples them together.
    turns = [part for turn in itertools.zip_longest(*choices) for part in turn if part is not None]
    shown = [[part] for part in turns] if call.stream else [turns]
    responses = [{**head, "choices": parts} for parts in shown]
    if chat:
        responses[0]["prompt_token_ids"] = prompts[0] if call.token_ids else None
    usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": completion_tokens}
    usage["total_tokens"] = sum(usage.values())
    if reply.usage and not call.stream:
        responses[0]["usage"] = usage
    elif reply.usage and (body.get("stream_options") or {}).get("include_usage"):
        responses.append({**head, "choices": [], "usage": usage})
    return [{**response, **reply.extra} for response in responses]


def input_messages(body: Json) -> list[Json]:
    """A Responses request as chat messages; reasoning items are dropped."""
    instructions, items = body.get("instructions"), body["input"]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in [{"content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": item.get("content")})
        elif kind == "function_call":
            messages.append({"role": "assistant", "tool_calls": [{"function": item}]})
        elif kind == "custom_tool_call":
            messages.append({"role": "assistant", "tool_calls": [{"custom": item}]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "content": item.get("output")})
    return messages


def embeddings(body: Json) -> Json:
    inputs, dimensions = prompt_ids_of(body["input"]), body.get("dimensions") or 16
    data = list[Json]()
    for index, token_ids in enumerate(inputs):
        digest = hashlib.shake_256(json.dumps(token_ids).encode()).digest(dimensions)
        vector: Any = [(byte - 127.5) / 128 for byte in digest]  # exact as float32
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.get("model", MODEL), "usage": usage}
