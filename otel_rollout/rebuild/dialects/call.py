"""One model call as a dialect reads it, and the facts that a dialect may lose.

A dialect is a pure function from spans to calls in wire form, plus a declaration of the facts that
it loses. A fact that may be lost is never presented as known: a call has a sentence for each fact
that its dialect loses (`lost`), and for everything that this span should have and lacks (`damage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanRecord, TokenPath
from otel_rollout.wire import Json, ToolCall, check_depth, dumps, loads, media_of, message_parts


class Fact(Enum):
    """A fact of a call that some instrumentations do not record."""

    LOGPROBS = "log-probabilities"
    TOKEN_IDS = "token ids"  # noqa: S105
    EXTRA_BODY = "parameters outside of the API (extra_body)"
    PARAMETERS = "some parameters of the request"
    REQUEST_MODEL = "the model that was asked for (read as the one that answered)"
    TOOLS = "tool definitions"
    STRICT = "strict of tool definitions"
    ARGUMENTS = "the text of tool arguments (parsed and written anew)"
    REQUEST_REASONING = "reasoning that was sent back"
    REPLY_REASONING = "the reply's reasoning"
    REQUEST_REFUSAL = "refusals that were sent back"
    REPLY_REFUSAL = "that a reply is a refusal"
    NAMES = "names of messages"
    PARTS = "how texts were divided into parts"
    BLOCK_FIELDS = "further members of content blocks (signature, cache_control, is_error)"
    FUNCTION_CALL = "calls in the former form (function_call)"
    CUSTOM_TOOLS = "custom tools: definitions, calls and results"
    CALL_IDS = "ids of tool calls of the Responses API (read as ids of items)"
    FILES = "names of files and formats of sound"
    REPLY_START = "where the request ends and the reply begins"
    TEXT_END = "whether a limit cut the end of its longest text"
    IMAGES = "images that are data, not addresses"
    DETAIL = "detail of images"
    RESPONSE_ID = "the response id"
    RESPONSE_MODEL = "the model that answered"
    CHOICES = "all choices but the first"
    FINISH_REASON = "why the reply ended"
    USAGE = "usage"
    USAGE_DETAILS = "details of usage (cached tokens, reasoning tokens)"
    RESPONSE_FIELDS = "other fields of the response (system_fingerprint, stop_reason)"
    END = "why its reply ended: nothing on its span says"
    OTHER_PARTS = "parts that chat has no name for (kept as they were written)"
    SHAPE = "the shape of an API that is not OpenAI's (read as chat messages)"
    ITEMS = "the items of the Responses API (read as chat messages)"
    INSTRUCTIONS = "which items of the Responses API were a text, or its instructions"
    PREVIOUS = "which response a call of the Responses API continues"
    REQUEST = "the request (all messages before the reply are taken for it)"
    PROMPT = "the messages of the request"


KEPT_BY_NONE = frozenset((Fact.LOGPROBS, Fact.TOKEN_IDS, Fact.EXTRA_BODY))
"""Facts that nearly no instrumentation records."""


@dataclass(slots=True)
class ForeignCall:
    """One model call in wire form, as far as its dialect kept it."""

    path: str
    """Endpoint, such as `/chat/completions`."""
    request: dict[str, Json]
    """The request's body; chat messages under `messages`."""
    reply: Json = None
    """The response's body, a stream in its non-streamed shape. None: the span has none."""
    stream: bool = False
    """True if the reply was streamed."""
    ended_ns: int | None = None
    """Unix nanoseconds when the reply was complete. None: at the end of the span."""
    is_responses: bool = False
    """True for a call of the Responses API."""
    damage: list[str] = field(default_factory=list)
    """Sentences about everything that this span should have and lacks."""
    prompt_is_known: bool = True
    """False if messages of the request are missing or incomplete."""
    also_loses: frozenset[Fact] = frozenset()
    """Facts that are lost in this call, although its dialect does not always lose them."""
    prompts: list[TokenPath | None] = field(default_factory=list)
    """Prompt token ids, each in the place of `{PACKED: index}` in the reply."""

    @property
    def choices(self) -> list[dict[str, Json]]:
        """The choices of the response; [] where it has none."""
        return objects(self.reply.get("choices") if isinstance(self.reply, Mapping) else None)

    def miss(self, sentence: str, *, prompt: bool = False) -> None:
        """Add a sentence to `damage`; `prompt`: it concerns the messages of the request."""
        if sentence not in self.damage:
            self.damage.append(sentence)
        if prompt:
            self.prompt_is_known = False

    def miss_messages(self) -> None:
        """Add to `damage` that the span has none of the request's messages."""
        self.miss("its span has no messages: they were not recorded, or not kept", prompt=True)


@dataclass(frozen=True, slots=True)
class Dump:
    """The form in which a product exports what it recorded: a JSON object for each step."""

    holds: Callable[[Mapping[str, Json]], bool]
    """True if the object, whose values may be of any type, is such a record."""
    spans: Callable[[Mapping[str, Json]], Iterator[SpanRecord]]
    """The spans of a record. ValueError, TypeError or LookupError for one of another shape."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The way in which one instrumentation records a model call."""

    name: str
    """Name of the dialect, in `Completion.exchange.source`."""
    recognises: Callable[[SpanRecord], bool]
    """True if the span is a model call in this dialect, or in an earlier one of `DIALECTS`."""
    read: Callable[[SpanRecord, Sequence[SpanRecord]], ForeignCall]
    """Reads the call of a span that is recognised, given all spans of its trace.

    An exception, raised for attributes of another shape, becomes the call's damage.
    """
    loses: frozenset[Fact]
    """Facts that it does not record."""
    loses_in_streams: frozenset[Fact] = frozenset()
    """Further facts that it does not record of a streamed call."""
    dump: Dump | None = None
    """The records that its product exports. None: it writes spans."""

    def losses(self, call: ForeignCall) -> list[str]:
        """A sentence for each fact that is lost, or may be, in this call."""
        return lost_in(call, self.loses | (self.loses_in_streams if call.stream else frozenset()))


def lost_in(call: ForeignCall, declared: frozenset[Fact]) -> list[str]:
    """A sentence for each fact of a call that is lost, or may be, where these are not recorded."""
    lost = {fact for fact in declared if _applies(fact, call)} | call.also_loses
    return [fact.value for fact in Fact if fact in lost]


def _applies(fact: Fact, call: ForeignCall) -> bool:
    """True if this call can have lost the fact at all."""
    if fact is Fact.ARGUMENTS:
        return _has_tool_calls(call)
    if fact is Fact.CALL_IDS:
        return call.is_responses and _has_tool_calls(call)
    if fact in _MEDIA:
        kinds = {kind for message in _messages(call) for kind in media_of(message)}
        return not call.prompt_is_known or not _MEDIA[fact].isdisjoint(kinds)
    if fact is Fact.PARTS:
        return any(isinstance(message.get("content"), list) for message in _messages(call))
    if fact in (Fact.ITEMS, Fact.PREVIOUS, Fact.INSTRUCTIONS):
        return call.is_responses
    return True


_MEDIA = {
    Fact.IMAGES: {"image_url", "image"},
    Fact.DETAIL: {"image_url"},
    Fact.FILES: {"file", "input_audio"},
}
"""Facts of media, with the kinds that have them."""


def _has_tool_calls(call: ForeignCall) -> bool:
    parts = (part for message in _messages(call) for part in message_parts(message))
    return any(isinstance(part, ToolCall) for part in parts)


def _messages(call: ForeignCall) -> list[Mapping[str, Json]]:
    """The messages of request and reply."""
    replies = objects([choice.get("message") for choice in call.choices])
    return [*objects(call.request.get("messages")), *replies]


# --- shared by the dialects


def structure(span: SpanRecord, key: str, call: ForeignCall, *, prompt: bool = False) -> Json:
    """The JSON value of an attribute. None: it is absent, or damaged, which is noted."""
    value: Any = span.attributes.get(key)
    if not isinstance(value, str):
        return value
    try:
        check_depth(value)
        return loads(value)
    except (ValueError, RecursionError):
        call.miss(f"its {key} cannot be read: was it cut by a length limit?", prompt=prompt)
        return None


def objects(value: Json) -> list[dict[str, Json]]:
    """The JSON objects of a list; [] if the value is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def object_rows(
    span: SpanRecord, key: str, call: ForeignCall, *, prompt: bool = False
) -> list[dict[str, Json]] | None:
    """An attribute that is a list of JSON objects. None: it is absent, or no such list."""
    value = structure(span, key, call, prompt=prompt)
    rows = objects(value)
    if value is not None and (not isinstance(value, list) or len(rows) < len(value)):
        call.miss(f"its {key} should be a list of JSON objects and is not", prompt=prompt)
    return rows if isinstance(value, list) else None


def is_true(span: SpanRecord, key: str) -> bool:
    return span.attributes.get(key) in (True, "true", "True")


def numbered(attributes: Mapping[str, Any], prefix: str) -> dict[int, dict[str, Any]]:
    """Attributes `{prefix}{N}.{rest}` as `{N: {rest: value}}`, in order of N."""
    rows: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            number, _, rest = key[len(prefix) :].partition(".")
            if number.isdecimal():
                rows.setdefault(int(number), {})[rest] = value
    return dict(sorted(rows.items()))


def check_flags(span: SpanRecord, call: ForeignCall) -> None:
    """Note flags of the span that say that something was left out, whoever set them."""
    for key, value in span.attributes.items():
        if key.endswith(_TRUNCATED) and value not in _NOT_TRUNCATED:
            call.miss(f"its {key} says that content was left out", prompt=True)


_TRUNCATED = (".truncated", "_truncated")
_NOT_TRUNCATED: tuple[Any, ...] = (False, 0, None, "", "0", "false", "False", "null", "[]", [])


def check_whole(span: SpanRecord, call: ForeignCall) -> None:
    """Note that attributes of the span were dropped, where no other attribute has the same."""
    check_flags(span, call)
    if span.dropped_attributes:
        call.miss(
            f"{span.dropped_attributes} attributes of its span were dropped by a limit", prompt=True
        )


def check_not_empty(call: ForeignCall) -> None:
    """Note empty messages: their dialect could not record their content."""
    for number, message in enumerate(objects(call.request.get("messages"))):
        if message.get("role") != "tool" and _is_empty(message):
            call.miss(
                f"message {number} of its request ({message.get('role')}) has nothing in it: what "
                f"it held was not written down",
                prompt=True,
            )
    for choice in call.choices:
        message = choice.get("message") or {}
        # An empty text counts as empty too: streamed refusals look like this.
        if (choice.get("finish_reason") or not call.stream) and _is_empty(
            {**message, "content": message.get("content") or None}
        ):
            call.miss("its reply has nothing in it: what it held was not written down")


def check_roles(call: ForeignCall) -> None:
    """Note a request without messages or roles, and replies that are not what a model sampled."""
    messages = call.request.get("messages")
    if call.path != "/embeddings" and messages == [] and call.prompt_is_known:
        call.miss_messages()
    if not all(isinstance(message.get("role"), str) for message in objects(messages)):
        call.miss("the role of a message of its request is missing", prompt=True)
    _check_choices(call, call.choices)


def _check_choices(call: ForeignCall, choices: list[dict[str, Json]]) -> None:
    for choice in choices:
        message = choice.get("message") or {}
        if message.get("role") in _NOT_SAMPLED:
            call.miss(f"its reply is of the role {message['role']!r}, which no model samples")
        if not isinstance(message.get("content"), str | list | None):
            call.miss("its reply has a content that is no text")
    asked = call.request.get("n")
    if choices and isinstance(asked, int) and len(choices) < asked:
        call.also_loses |= {Fact.CHOICES}
    if not all(choice.get("finish_reason") for choice in choices) and not call.is_responses:
        call.also_loses |= {Fact.END}


_NOT_SAMPLED = ("system", "developer", "user", "tool", "function")


def _is_empty(message: Mapping[str, Json]) -> bool:
    values = map(
        message.get, ("tool_calls", "function_call", "refusal", "reasoning_content", "audio")
    )
    return message.get("content") in (None, []) and not any(values)


class Trace(list[SpanRecord]):
    """The spans of one trace, with what each of its calls asks of all of them."""

    @cached_property
    def longest(self) -> dict[Callable[[str], int], tuple[int, frozenset[str]]]:
        """The longest texts of the trace and their length, in characters and in bytes."""
        texts = {v for span in self for v in span.attributes.values() if isinstance(v, str)}
        found: dict[Callable[[str], int], tuple[int, frozenset[str]]] = {}
        for size in (len, _bytes_in):
            length = max(map(size, texts), default=0)
            found[size] = length, frozenset(text for text in texts if size(text) == length)
        return found


def check_not_cut(
    texts: Mapping[str, Json], call: ForeignCall, trace: Sequence[SpanRecord]
) -> None:
    """Note texts, by attribute, that a length limit may have cut.

    A text that is no JSON does not show where it was cut. But a limit that cuts leaves nothing
    longer: only the longest texts of a trace are in question. They are damage if there is a sign:
    a usual limit, several texts of that length, or a reply that is short of its tokens. Without a
    sign nothing can be known, and `Fact.TEXT_END` says so.
    """
    found = trace.longest if isinstance(trace, Trace) else Trace(trace).longest
    for size, (length, longest) in found.items():
        cut = {k: t for k, t in texts.items() if t in longest} if length >= _SHORTEST_LIMIT else {}
        if not cut:
            continue
        if len(longest) > 1 or _is_usual_limit(length) or _is_short_of_tokens(call):
            for key in cut:
                call.miss(
                    f"its {key} is {length} {_UNITS[size]} long: was it cut by a length limit?"
                )
        else:
            call.also_loses |= {Fact.TEXT_END}


def _bytes_in(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


_UNITS = {len: "characters", _bytes_in: "bytes"}
_SHORTEST_LIMIT = 64


def _is_usual_limit(length: int) -> bool:
    """True for round numbers and powers of two, and for one less: some count an end mark."""
    return any(n % 100 == 0 or n & (n - 1) == 0 for n in (length, length + 1))


def _is_short_of_tokens(call: ForeignCall) -> bool:
    """True if the reply's usage counts more tokens than its choices have bytes."""
    if not isinstance(call.reply, Mapping):
        return False
    counted = call.reply.get("usage") or {}
    hidden = (counted.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    tokens = (counted.get("completion_tokens") or 0) - hidden
    return tokens > len(dumps(call.reply.get("choices")).encode())


def check_tool_call(name: Json, arguments: Json, call: ForeignCall, *, prompt: bool) -> None:
    """Note what a tool call lacks: each has a name and arguments, if only an empty object."""
    if not name:
        call.miss("a tool call has no name: it was not written down", prompt=prompt)
    if arguments is None:
        call.miss("a tool call has no arguments: they were not written down", prompt=prompt)


def chat_tool_call(
    call_id: Json, name: Json, arguments: Json, call: ForeignCall, *, prompt: bool
) -> dict[str, Json]:
    """A call of a function as chat has it; whatever it lacks is noted."""
    check_tool_call(name, arguments, call, prompt=prompt)
    function = {"name": name, "arguments": arguments or ""}
    return {"id": call_id, "type": "function", "function": function}


def without_none(fields: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in fields.items() if value is not None}


def completion_reply(
    span: SpanRecord,
    choices: list[dict[str, Json]],
    usage: dict[str, Json] | None,
    *,
    is_text: bool = False,
    model: str = sc.GEN_AI_RESPONSE_MODEL,
) -> dict[str, Json] | None:
    """A chat completion (or text completion) with these choices. None: nothing is known.

    model: the attribute of the span that names the model which answered.
    """
    named = span.text(model) if choices else None
    known = without_none({"id": span.text(sc.GEN_AI_RESPONSE_ID), "model": named, "usage": usage})
    if not choices and not known:
        return None
    if is_text:
        choices = [dict(choice) for choice in choices]
        for choice in choices:
            choice["text"] = (choice.pop("message") or {}).get("content") or ""
    return {
        **known,
        "object": "text_completion" if is_text else "chat.completion",
        "choices": choices,
    }


def usage(
    prompt: int | None,
    completion: int | None,
    *,
    cached: int | None = None,
    written: int | None = None,
    reasoning: int | None = None,
    is_responses: bool = False,
) -> dict[str, Json] | None:
    """Usage in the shape of the chat API, or of the Responses API. None: unknown.

    cached, written: prompt tokens that a cache gave, and that were written to it.
    """
    if prompt is None and completion is None:
        return None
    total = None if prompt is None or completion is None else prompt + completion
    of_prompt = without_none({"cached_tokens": cached, "cache_write_tokens": written})
    of_reply = without_none({"reasoning_tokens": reasoning})
    into, out = ("input", "output") if is_responses else ("prompt", "completion")
    return without_none(
        {
            f"{into}_tokens": prompt,
            f"{out}_tokens": completion,
            "total_tokens": total,
            f"{into}_tokens_details": of_prompt or None,
            f"{out}_tokens_details": of_reply or None,
        }
    )
