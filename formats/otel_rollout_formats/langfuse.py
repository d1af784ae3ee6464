"""Langfuse: observations of its API and exports, and the spans that its own library writes.

An observation is read as such a span. It has the messages and the tools of a request, the reply's
message, and the parameters that the library knows, with defaults for those that were not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from otel_rollout.rebuild.dialects import (
    KEPT_BY_NONE,
    Dialect,
    Dump,
    Fact,
    ForeignCall,
    objects,
    structure,
    usage,
)
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json
from otel_rollout_formats.products import (
    an_object,
    as_json,
    member,
    span_of,
    take_bodies,
    value_of,
)

SCOPE = "langfuse-sdk"
_PREFIX = "langfuse.observation."
_TYPE, _INPUT, _OUTPUT, _MODEL, _PARAMETERS, _USAGE, _BEGAN, _REASON = (
    _PREFIX + name
    for name in (
        *("type", "input", "output", "model.name", "model.parameters", "usage_details"),
        *("completion_start_time", "metadata.finish_reason"),
    )
)
_TYPES = (
    *("SPAN", "EVENT", "GENERATION", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR"),
    *("EMBEDDING", "GUARDRAIL"),
)
_CALLS = ("generation", "embedding")
_INFINITE = "Infinity"
"""What the library writes for `max_tokens` that was not given."""
_MEDIA = "@@@langfuseMedia:"
"""What a reference to an uploaded image, sound or file begins with."""
_ITEMS = ("message", "function_call", "custom_tool_call", "reasoning")
"""Types of items that a model samples in the Responses API."""


def holds(row: Mapping[str, Json]) -> bool:
    if isinstance(row.get("observations"), list):
        return "timestamp" in row
    is_of_trace = "traceId" in row or "trace_id" in row
    return row.get("type") in _TYPES and is_of_trace and "id" in row


def spans(row: Mapping[str, Json]) -> Iterator[SpanRecord]:
    if "observations" not in row:
        yield _span(row, {})
        return
    metadata = an_object(row.get("metadata"))
    if scores := objects(row.get("scores")):
        metadata["scores"] = {
            str(score.get("name")): member(score, "value", "stringValue") for score in scores
        }
    if row["observations"] and not objects(row["observations"]):
        raise ValueError("a trace with the ids of its observations alone: export those")
    for each in objects(row["observations"]):
        yield _span({"traceId": row.get("id"), **each}, metadata)


def _span(row: Mapping[str, Json], metadata: Mapping[str, Json]) -> SpanRecord:
    parent, kind = member(row, "parentObservationId", "parent_observation_id"), str(row["type"])
    own = an_object(row.get("metadata"))
    failed = row.get("level") == "ERROR"
    attributes = {
        _INPUT: row.get("input"),
        _OUTPUT: row.get("output"),
        _MODEL: member(row, "model", "providedModelName", "provided_model_name"),
        _PARAMETERS: as_json(member(row, "modelParameters", "model_parameters")),
        _USAGE: as_json(member(row, "usageDetails", "usage_details", "usage")),
        _BEGAN: member(row, "completionStartTime", "completion_start_time"),
        _REASON: own.get("finish_reason"),
    }
    is_call = kind.lower() in _CALLS
    return span_of(
        SCOPE,
        kind,
        name=row.get("name"),
        trace=member(row, "traceId", "trace_id"),
        span=row["id"],
        parent=parent,
        times=(member(row, "startTime", "start_time"), member(row, "endTime", "end_time")),
        error=(member(row, "statusMessage", "status_message") or "it failed") if failed else None,
        metadata={} if parent else {**metadata, **own},
        attributes={_TYPE: kind.lower(), **(attributes if is_call else {})},
    )


def recognises(span: SpanRecord) -> bool:
    return span.text(_TYPE) in _CALLS


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call = ForeignCall("/chat/completions", {})
    given = value_of(span, _INPUT, call, prompt=True)
    output = value_of(span, _OUTPUT, call)
    parameters = an_object(structure(span, _PARAMETERS, call))
    request = {name: value for name, value in parameters.items() if value != _INFINITE}
    request["model"] = span.text(_MODEL)
    if span.text(_TYPE) == "embedding":
        call.path, call.request = "/embeddings", request
        return call
    counted = an_object(structure(span, _USAGE, call))
    items = _items(output)
    asked = _request(given, is_responses=bool(items))
    if items:
        reply: dict[str, Json] = {"output": items}
    elif "prompt" in asked:
        reply = {"choices": [{"index": 0, "text": output}] if isinstance(output, str) else []}
    else:
        reply = {"choices": _choices(output, span.text(_REASON))}
    reply |= {"usage": _usage(counted, is_responses=bool(items)), "model": request["model"]}
    take_bodies({**request, **asked}, reply, call)
    call.stream = span.attributes.get(_BEGAN) is not None
    asked_for = parameters.get("n")
    if call.stream and isinstance(asked_for, int) and asked_for > 1:
        call.miss(f"the texts of its {asked_for} choices are one text, as streams are kept")
    for key in (_INPUT, _OUTPUT):
        if _MEDIA in (span.text(key) or ""):
            call.miss(f"media of its {key} are kept elsewhere", prompt=key == _INPUT)
            call.also_loses |= {Fact.IMAGES}
    return call


def _request(given: Json, *, is_responses: bool) -> dict[str, Json]:
    """The members of the request that an observation's input holds."""
    if isinstance(given, dict):
        return given
    if is_responses:
        return {"input": given}
    if isinstance(given, str):
        return {"prompt": given}
    return {"messages": given}


def _items(output: Json) -> list[dict[str, Json]]:
    """The items of a reply of the Responses API; [] for any other reply."""
    rows = objects([output] if isinstance(output, dict) else output)
    return rows if rows and all(row.get("type") in _ITEMS for row in rows) else []


def _choices(output: Json, reason: str | None) -> list[Json]:
    if isinstance(output, str):
        output = {"content": output}
    rows = objects([output] if isinstance(output, dict) else output)
    return [
        {"index": index, "finish_reason": reason, "message": {"role": "assistant", **_reply(row)}}
        for index, row in enumerate(rows)
    ]


def _reply(message: dict[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in message.items() if name != "role" or value}


def _usage(counted: Mapping[str, Json], *, is_responses: bool) -> dict[str, Json] | None:
    """Usage by an API's names, or by Langfuse's, in the shape of the call's API.

    Langfuse's server counts tokens of each kind apart: `input` is without `input_cached_tokens`.
    """
    return usage(
        _number(counted, "prompt_tokens", "input_tokens") or _sum(counted, "input"),
        _number(counted, "completion_tokens", "output_tokens") or _sum(counted, "output"),
        cached=_number(counted, "input_cached_tokens", "input_cache_read"),
        reasoning=_number(counted, "output_reasoning_tokens", "output_reasoning"),
        is_responses=is_responses,
    )


def _number(counted: Mapping[str, Json], *names: str) -> int | None:
    found = member(counted, *names)
    return found if isinstance(found, int) else None


def _sum(counted: Mapping[str, Json], kind: str) -> int | None:
    """The tokens of a kind and of its kinds, such as `input` and `input_cached_tokens`."""
    if _number(counted, kind) is None:
        return None
    return sum(
        number
        for name, number in counted.items()
        if name.split("_")[0] == kind and isinstance(number, int)
    )


DIALECT = Dialect(
    "langfuse",
    recognises,
    read,
    loses=KEPT_BY_NONE
    | {
        Fact.PARAMETERS,
        Fact.REQUEST_MODEL,
        Fact.RESPONSE_ID,
        Fact.REPLY_REASONING,
        Fact.REPLY_REFUSAL,
        Fact.FINISH_REASON,
        Fact.RESPONSE_FIELDS,
        Fact.USAGE_DETAILS,
        Fact.INSTRUCTIONS,
        Fact.PREVIOUS,
    },
    dump=Dump(holds, spans),
)
