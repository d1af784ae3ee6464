"""LiteLLM: payloads that it hands to callbacks (`StandardLoggingPayload`), and rows of spend logs.

Their calls have no parents: those of one session, or else of one trace, are a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects import Dialect, Dump, Fact, ForeignCall
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json
from otel_rollout_formats.products import (
    CALL,
    EMBEDDING,
    INPUT,
    OUTPUT,
    an_object,
    as_json,
    begin,
    is_call,
    member,
    span_of,
    take_bodies,
)

SCOPE = "litellm"
_MEMBERS = {"responses": "input", "text_completion": "prompt"}
"""The member that holds the conversation, by the type of the call; else it is `messages`."""
_CUT = (
    "[base64_data truncated",
    "litellm_truncated",
    "truncated by litellm",
    "redacted-by-litellm",
)
"""What LiteLLM writes in the place of data, of long texts, and of what is not to be logged."""
_FAILED = ("failure", "error")


def holds(row: Mapping[str, Json]) -> bool:
    return {"call_type", "startTime"} <= row.keys() and ("id" in row or "request_id" in row)


def spans(row: Mapping[str, Json]) -> Iterator[SpanRecord]:
    kind = str(row["call_type"])
    call_id = member(row, "litellm_call_id", "request_id", "id")
    body = an_object(row.get("proxy_server_request"))
    body = an_object(body.get("body")) or body
    request = {**an_object(row.get("model_parameters")), **body}
    request["model"] = row.get("model")
    asked = as_json(row.get("messages"))
    key = next((name for end, name in _MEMBERS.items() if kind.endswith(end)), "messages")
    if asked and key not in body:
        request[key] = _prompt(asked) if key == "prompt" else asked
    if row.get("stream") is True:
        request["stream"] = True
    about = an_object(row.get("error_information"))
    error = row.get("error_str") or (row.get("status") in _FAILED and "it failed") or None
    metadata = an_object(row.get("metadata"))
    yield span_of(
        SCOPE,
        EMBEDDING if kind.endswith("embedding") else CALL,
        name=kind,
        trace=row.get("session_id") or row.get("trace_id") or call_id,
        span=call_id,
        parent=None,
        # The end of a stream is measured late, in a thread that logs: perhaps in the next call.
        times=(row["startTime"], member(row, "completionStartTime", "endTime")),
        error=error,
        metadata=metadata,
        attributes={
            INPUT: request,
            OUTPUT: row.get("response"),
            sc.ERROR_TYPE: about.get("error_class") or None,
        },
    )


def _prompt(asked: Json) -> Json:
    """The text that was to be continued, which LiteLLM keeps as a message of the user."""
    match asked:
        case [{"role": "user", "content": text}]:
            return text
    return asked


def recognises(span: SpanRecord) -> bool:
    return span.scope == SCOPE and is_call(span)


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call, request, reply = begin(span)
    take_bodies(request, reply, call)
    for choice in call.choices:
        message = choice.get("message")
        for holder in (choice, message if isinstance(message, dict) else {}):
            holder.pop("provider_specific_fields", None)
        if call.path == "/completions" and isinstance(message, dict):
            choice["text"] = message.get("content")
            del choice["message"]
    for key in (INPUT, OUTPUT):
        if any(sign in (span.text(key) or "") for sign in _CUT):
            call.miss(f"something in its {key} was cut or redacted by LiteLLM", prompt=key == INPUT)
            call.also_loses |= {Fact.IMAGES}
    if not call.prompt_is_known and not an_object(request).keys() & {"messages", "input", "prompt"}:
        call.miss("spend logs have messages where `store_prompts_in_spend_logs` is on")
    return call


DIALECT = Dialect(
    "litellm",
    recognises,
    read,
    loses=frozenset(
        (
            Fact.EXTRA_BODY,
            Fact.FINISH_REASON,
            Fact.INSTRUCTIONS,
            Fact.REPLY_REASONING,
            Fact.RESPONSE_FIELDS,
            Fact.RESPONSE_ID,
            Fact.USAGE_DETAILS,
        )
    ),
    loses_in_streams=frozenset(
        (Fact.LOGPROBS, Fact.TOKEN_IDS, Fact.REPLY_REFUSAL, Fact.RESPONSE_MODEL, Fact.USAGE)
    ),
    dump=Dump(holds, spans),
)
