"""What a dialect reads of one model call, and what a dialect may be unable to keep of it.

The one idea: a dialect is a pure function from spans to calls in wire form, plus a declaration of
the facts that it loses. A fact that may be lost is never presented as known: a call carries a
sentence for each fact that its dialect loses (`lost`), and for each thing that this one span should
hold and does not (`damage`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json, loads


class Fact(Enum):
    """Something of a call that some instrumentations do not write down."""

    LOGPROBS = "log-probabilities"
    TOKEN_IDS = "token ids"  # noqa: S105
    EXTRA_BODY = "parameters outside of the API (extra_body)"
    PARAMETERS = "some parameters of the request"
    TOOLS = "tool definitions"
    STRICT = "strict of tool definitions"
    ARGUMENTS = "the text of tool arguments (parsed and written anew)"
    REQUEST_REASONING = "reasoning that was sent back"
    REPLY_REASONING = "the reply's reasoning"
    REQUEST_REFUSAL = "refusals that were sent back"
    REPLY_REFUSAL = "that a reply is a refusal"
    NAMES = "names of messages"
    IMAGES = "images that are data, not addresses"
    DETAIL = "detail of images"
    RESPONSE_ID = "the response id"
    RESPONSE_MODEL = "the model that answered"
    CHOICES = "all choices but the first"
    FINISH_REASON = "why the reply ended"
    USAGE = "usage"
    RESPONSE_FIELDS = "other fields of the response (system_fingerprint, stop_reason)"
    ITEMS = "the items of the Responses API (read as chat messages)"
    PREVIOUS = "which response a call of the Responses API continues"


@dataclass(slots=True)
class Call:
    """One model call in wire form, as far as its dialect kept it."""

    path: str
    """Endpoint, such as `/chat/completions`."""
    request: dict[str, Json]
    """The request's body; chat messages under `messages`."""
    reply: Json = None
    """The response's body, a stream in unstreamed shape; None where the span has none."""
    stream: bool = False
    ended_ns: int | None = None
    """When the reply had come, where that is later than the end of the span."""
    is_responses: bool = False
    damage: list[str] = field(default_factory=list)
    """What this span should hold and does not, in sentences."""
    prompt_is_known: bool = True
    """False where the conversation is not whole."""
    also_loses: frozenset[Fact] = frozenset()
    """Lost in this call, though its dialect does not always lose it."""

    def miss(self, sentence: str, *, prompt: bool = False) -> None:
        """Note something that should be there and is not; of the conversation, if `prompt`."""
        if sentence not in self.damage:
            self.damage.append(sentence)
        if prompt:
            self.prompt_is_known = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """One instrumentation's way of writing a model call."""

    name: str
    """What `Completion.exchange.source` says."""
    written_by: str
    """Whose spans these are, with versions, for people."""
    recognises: Callable[[SpanRecord], bool]
    """Whether the span is a model call in this dialect. Exclusive among the dialects."""
    read: Callable[[SpanRecord, Sequence[SpanRecord]], Call]
    """The call of a span that is recognised, given all spans of its trace.

    What it raises for attributes that are not of the dialect's shape becomes the call's damage.
    """
    loses: frozenset[Fact]
    """What it does not write down."""
    loses_in_streams: frozenset[Fact] = frozenset()
    """What it does not write down of a streamed call, besides."""

    def losses(self, call: Call) -> list[str]:
        """A sentence for each fact that is lost, or may be, in this call."""
        lost = self.loses | call.also_loses | (self.loses_in_streams if call.stream else set())
        return [fact.value for fact in Fact if fact in lost and _applies(fact, call)]


def _applies(fact: Fact, call: Call) -> bool:
    """Whether a call can have lost that at all, by what is known of it."""
    if fact is Fact.ARGUMENTS:
        return bool(_with(call, "tool_calls"))
    if fact in (Fact.IMAGES, Fact.DETAIL):
        return not call.prompt_is_known or any(
            isinstance(part, Mapping) and part.get("type") == "image_url"
            for message in _with(call, "content")
            if isinstance(message["content"], list)
            for part in message["content"]
        )
    if fact in (Fact.ITEMS, Fact.PREVIOUS):
        return call.is_responses
    return True


def _with(call: Call, key: str) -> list[Mapping[str, Json]]:
    """The messages of request and reply that have something under this key."""
    messages = objects(call.request.get("messages"))
    if isinstance(call.reply, Mapping):
        choices = objects(call.reply.get("choices"))
        messages += objects([choice.get("message") for choice in choices])
    return [message for message in messages if message.get(key)]


# --- what the dialects have in common


def structure(span: SpanRecord, key: str, call: Call, *, prompt: bool = False) -> Json:
    """The JSON value of an attribute; None where it is absent, or damaged, which is noted."""
    value: Any = span.attributes.get(key)
    if not isinstance(value, str):
        return list(value) if isinstance(value, Sequence) else value
    try:
        return loads(value)
    except (ValueError, RecursionError):
        call.miss(f"its {key} cannot be read: was it cut by a length limit?", prompt=prompt)
        return None


def objects(value: Json) -> list[dict[str, Json]]:
    """The JSON objects of a list; [] for what is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def object_rows(
    span: SpanRecord, key: str, call: Call, *, prompt: bool = False
) -> list[dict[str, Json]] | None:
    """The list of JSON objects that an attribute is; None where it is absent or no such list."""
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


def check_not_empty(call: Call) -> None:
    """Note messages in which there is nothing: their dialect has no words for what they held."""
    for number, message in enumerate(objects(call.request.get("messages"))):
        if message.get("role") != "tool" and _is_empty(message):
            call.miss(
                f"message {number} of its request ({message.get('role')}) has nothing in it: what "
                f"it held was not written down",
                prompt=True,
            )
    for choice in objects(call.reply.get("choices") if isinstance(call.reply, Mapping) else None):
        message = choice.get("message") or {}
        # An empty text too: streamed refusals look so.
        if choice.get("finish_reason") and _is_empty(
            {**message, "content": message.get("content") or None}
        ):
            call.miss("its reply has nothing in it: what it held was not written down")


def _is_empty(message: Mapping[str, Json]) -> bool:
    said = (message.get(key) for key in ("tool_calls", "refusal", "reasoning_content"))
    return message.get("content") in (None, []) and not any(said)


def cut_length(trace: Sequence[SpanRecord]) -> int | None:
    """The length at which texts of this trace seem to have been cut; None if at none.

    Texts of attributes that are not JSON do not show that they were cut. That the longest ones are
    equally long, or as long as people set limits, does: better to doubt a text too many.
    """
    longest: set[str] = set()
    length = 0
    for span in trace:
        for value in span.attributes.values():
            if isinstance(value, str) and len(value) >= max(length, _SHORTEST_LIMIT):
                if len(value) > length:
                    longest, length = set(), len(value)
                longest.add(value)
    if not longest:
        return None
    is_limit = length % 100 == 0 or length & (length - 1) == 0
    return length if is_limit or len(longest) > 1 else None


_SHORTEST_LIMIT = 64


def check_not_cut(texts: Mapping[str, Json], call: Call, trace: Sequence[SpanRecord]) -> None:
    """Note texts, by attribute, that look as if a length limit had cut them."""
    limit = cut_length(trace)
    for key, text in texts.items():
        if limit is not None and isinstance(text, str) and len(text) == limit:
            call.miss(f"its {key} is {limit} characters long: was it cut by a length limit?")


def without_none(fields: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in fields.items() if value is not None}


def completion_reply(
    choices: list[dict[str, Json]], *, is_text: bool = False, **fields: Json
) -> dict[str, Json] | None:
    """A chat completion (or text completion) with these choices; None if nothing is known."""
    known = without_none(fields)
    if not choices and not known:
        return None
    if is_text:
        choices = [
            {**{k: v for k, v in choice.items() if k != "message"}, "text": _text_of(choice)}
            for choice in choices
        ]
    return {
        **known,
        "object": "text_completion" if is_text else "chat.completion",
        "choices": choices,
    }


def _text_of(choice: Mapping[str, Json]) -> Json:
    return (choice.get("message") or {}).get("content") or ""


def usage(prompt: int | None, completion: int | None) -> dict[str, int] | None:
    """Usage in the words of the chat API; None where it is not known."""
    if prompt is None and completion is None:
        return None
    total = None if prompt is None or completion is None else prompt + completion
    return without_none(
        {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    )
