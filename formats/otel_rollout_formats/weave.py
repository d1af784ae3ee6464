"""Weave: calls of its API and client: the arguments of a traced function, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects import Dialect, Dump, Fact, ForeignCall
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json
from otel_rollout_formats import langchain
from otel_rollout_formats.products import (
    CALL,
    INPUT,
    OUTPUT,
    STEP,
    an_object,
    as_json,
    begin,
    is_call,
    span_of,
    take_bodies,
)

_SCOPE = "weave."
_ASKED = ("messages", "input", "prompt")
_REPLY_MEMBERS = ("choices", "output", "generations")
_NOT_GIVEN = "NOT_GIVEN"
_NO_ARGUMENTS = ("self", "_weave_stream_start_time")
_MEASURED = ("request_id", "time_to_first_token")


def holds(row: Mapping[str, Json]) -> bool:
    return {"op_name", "trace_id", "started_at", "id"} <= row.keys()


def spans(row: Mapping[str, Json]) -> Iterator[SpanRecord]:
    inputs, output = as_json(row.get("inputs")), as_json(row.get("output"))
    attributes, summary = an_object(row.get("attributes")), an_object(row.get("summary"))
    about = an_object(attributes.get("weave"))
    failed = an_object(row.get("exception"))
    operation = str(row["op_name"]).rpartition("/")[2].partition(":")[0]
    asks = about.get("kind") == "llm" or (_has(inputs, _ASKED) and _has(output, _REPLY_MEMBERS))
    kept = {
        name: value for name, value in attributes.items() if name not in ("weave", "integration")
    }
    if feedback := about.get("feedback") or an_object(summary.get("weave")).get("feedback"):
        kept["feedback"] = feedback
    yield span_of(
        _SCOPE + operation.partition(".")[0],
        CALL if asks else STEP,
        name=row.get("display_name") or operation,
        trace=row["trace_id"],
        span=row["id"],
        parent=row.get("parent_id"),
        times=(row["started_at"], row.get("ended_at")),
        error=failed.get("message") or row.get("exception"),
        metadata=kept,
        attributes={sc.ERROR_TYPE: failed.get("type")}
        | ({INPUT: inputs, OUTPUT: output} if asks else {}),
    )


def _has(value: Json, names: Sequence[str]) -> bool:
    return isinstance(value, dict) and any(name in value for name in names)


def recognises(span: SpanRecord) -> bool:
    return span.scope.startswith(_SCOPE) and is_call(span)


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call, inputs, output = begin(span)
    if langchain.holds(inputs, output):
        langchain.read(inputs, output, {}, call)
        return call
    given = {
        name: value
        for name, value in an_object(inputs).items()
        if name not in _NO_ARGUMENTS and value != _NOT_GIVEN
    }
    if isinstance(output, dict):
        output = {name: value for name, value in output.items() if name not in _MEASURED}
    take_bodies(given, output, call)
    return call


DIALECT = Dialect(
    "weave",
    recognises,
    read,
    loses=frozenset((Fact.PARAMETERS,)),
    loses_in_streams=frozenset((Fact.REPLY_REASONING, Fact.REPLY_REFUSAL)),
    dump=Dump(holds, spans),
)
