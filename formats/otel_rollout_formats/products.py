"""Records that tracing products export, as spans: what all products have in common.

A record becomes a span with what the call got and gave as JSON (`input.value`, `output.value`), as
OpenInference has them, in the product's own shape; its dialect reads them. Ids that are no hex of
a span's length are their digests; a UUID is a trace's id without its dashes.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects import (
    ForeignCall,
    check_not_empty,
    objects,
    structure,
    usage,
    without_none,
)
from otel_rollout.spans import AttributeValue, SpanRecord, nanoseconds_of
from otel_rollout.wire import Json, dumps

CALL, EMBEDDING, STEP = "LLM", "EMBEDDING", "CHAIN"
"""What a record is: a model call, one that makes embeddings, or anything else."""
INPUT, OUTPUT = sc.INPUT_VALUE, sc.OUTPUT_VALUE
PARAMETERS = "llm.invocation_parameters"
_HEX = frozenset(string.hexdigits)
_DIGITS = {"trace": 32, "span": 16}
_SECOND = 1_000_000_000


def id_of(value: Json, what: str) -> str:
    """The id of a trace or a span, in lower-case hex. ValueError for none."""
    if not isinstance(value, str | int) or not str(value):
        raise ValueError(f"expected the id of a {what}, got {value!r:.80}")
    text, digits = str(value), _DIGITS[what]
    bare = text.replace("-", "")
    if len(bare) == digits and _HEX.issuperset(bare):
        return bare.lower()
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def time_of(value: Json) -> int | None:
    """A time as nanoseconds since 1970: of a text, or a number of (milli, micro, nano)seconds."""
    if isinstance(value, str) and value:
        return nanoseconds_of(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        return None
    unit = next((unit for unit in (_SECOND, 1_000_000, 1_000) if value * unit < 1e19), 1)
    return value * unit if isinstance(value, int) else round(value * unit)


def as_json(value: Json) -> Json:
    """The value; that of a text which is JSON, as tables hold it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def member(row: Mapping[str, Json], *names: str) -> Json:
    """The first of these members that the record has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def an_object(value: Json) -> dict[str, Json]:
    """The value if it is an object, also as a text; else an empty one."""
    found = as_json(value)
    return found if isinstance(found, dict) else {}


def span_of(
    scope: str,
    kind: str,
    *,
    name: Json,
    trace: Json,
    span: Json,
    parent: Json,
    times: tuple[Json, Json],
    error: Json,
    metadata: Mapping[str, Json],
    attributes: Mapping[str, Json],
) -> SpanRecord:
    """A record as a span. `attributes`: written as JSON, but for texts; None is left out."""
    start, end = map(time_of, times)
    made: dict[str, AttributeValue] = {sc.OPENINFERENCE_KIND: kind}
    known = {**attributes, sc.METADATA: metadata or None}
    for key, value in known.items():
        if value is not None:
            made[key] = value if isinstance(value, str) else dumps(value)
    return SpanRecord(
        name=name if isinstance(name, str) and name else scope,
        trace_id=id_of(trace, "trace"),
        span_id=id_of(span, "span"),
        parent_span_id=None if parent in (None, "") else id_of(parent, "span"),
        start_time_ns=start or 0,
        end_time_ns=end,
        attributes=made,
        scope=scope,
        status_error=None if error in (None, "", {}) else _text(error),
    )


def _text(value: Json) -> str:
    return value if isinstance(value, str) else dumps(value)


def is_call(span: SpanRecord) -> bool:
    """True for the span of a record that is a model call."""
    return span.text(sc.OPENINFERENCE_KIND) in (CALL, EMBEDDING)


def begin(span: SpanRecord) -> tuple[ForeignCall, Json, Json]:
    """The call of a span, not yet read, and what it got and gave."""
    call = ForeignCall("/chat/completions", {})
    if span.text(sc.OPENINFERENCE_KIND) == EMBEDDING:
        call.path = "/embeddings"
    return call, value_of(span, INPUT, call, prompt=True), value_of(span, OUTPUT, call)


def value_of(span: SpanRecord, key: str, call: ForeignCall, *, prompt: bool = False) -> Json:
    """What a call got or gave; a text that is no JSON is a text."""
    text = span.text(key)
    if text is not None and text.lstrip()[:1] not in ("{", "[", '"') and text != "null":
        return text
    return structure(span, key, call, prompt=prompt)


def take_bodies(request: Json, reply: Json, call: ForeignCall) -> None:
    """Take the arguments of a client and what it returned, as bodies of the API that they show."""
    call.request = _as_sent(an_object(request))
    if not _is_sent_so(call.request.get("response_format")):
        call.request.pop("response_format")
    if isinstance(reply, str) and reply:
        call.miss("what it gave is a text, not the response: it was not kept as it came")
    call.stream = call.request.get("stream") is True
    reply = _as_came(an_object(reply), is_merged=call.stream)
    if call.path != "/embeddings":
        if isinstance(call.request.get("prompt"), str | list):
            call.path = "/completions"
        elif "input" in call.request and isinstance(reply.get("data"), list):
            call.path = "/embeddings"
        elif "input" in call.request:
            call.path, call.is_responses = "/responses", True
        elif not isinstance(call.request.get("messages"), list):
            call.miss("what it got is no request of a known API", prompt=True)
        elif reply.get("type") == "message":
            call.path = "/v1/messages"
    call.reply = reply if any(reply.get(key) for key in _REPLY_MEMBERS) else None
    check_not_empty(call)


def _is_sent_so(response_format: Json) -> bool:
    """False for a class that a client makes the parameter of: only its name or schema was kept."""
    if response_format is None:
        return True
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    return kind in ("text", "json_object", "json_schema")


_REPLY_MEMBERS = ("choices", "output", "content", "data")
_OPTIONS = ("extra_headers", "extra_query", "timeout")
"""Arguments of OpenAI's clients that are no part of the request's body."""


def _as_sent(arguments: dict[str, Json]) -> dict[str, Json]:
    """The body that a client makes of its arguments."""
    sent = {name: value for name, value in arguments.items() if name not in _OPTIONS}
    return sent | an_object(sent.pop("extra_body", None))


def _as_came(reply: dict[str, Json], *, is_merged: bool) -> dict[str, Json]:
    """A response without what a client's types and its merging of streams add to it.

    is_merged: it is of a stream, of whose token ids nobody knows whether they are all.
    """
    if is_merged:
        for holder in (reply, *objects(reply.get("choices"))):
            for key in ("token_ids", "prompt_token_ids"):
                holder.pop(key, None)
    if reply.get("object") == "chat.completion.chunk":
        reply["object"] = "chat.completion"
    reply = without_none(reply)
    if isinstance(reply.get("output"), list):
        reply["output"] = [
            without_none(item) if isinstance(item, dict) else item for item in reply["output"]
        ]
    if isinstance(reply.get("choices"), list):
        reply["choices"] = [
            _choice(choice) if isinstance(choice, dict) else choice for choice in reply["choices"]
        ]
    return reply


def _choice(choice: dict[str, Json]) -> dict[str, Json]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return without_none(choice)
    kept = {k: v for k, v in message.items() if k != "parsed" and (v is not None or k == "content")}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            _tool_call(made) if isinstance(made, dict) else made for made in calls
        ]
    return without_none({**choice, "message": kept})


def _tool_call(made: dict[str, Json]) -> dict[str, Json]:
    function = made.get("function")
    if isinstance(function, dict):
        function = {k: v for k, v in function.items() if k != "parsed_arguments"}
    return without_none({**made, "function": function, "index": None})


def usage_by_kind(counted: Mapping[str, Any], call: ForeignCall) -> dict[str, Json] | None:
    """Usage by the names of LangChain and LangSmith, in the shape of the call's API."""
    of_prompt, of_reply = (
        an_object(counted.get(f"{kind}_token_details")) for kind in ("input", "output")
    )
    return usage(
        counted.get("input_tokens"),
        counted.get("output_tokens"),
        cached=of_prompt.get("cache_read"),
        written=of_prompt.get("cache_creation"),
        reasoning=of_reply.get("reasoning"),
        is_responses=call.is_responses,
    )
