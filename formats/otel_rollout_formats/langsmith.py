"""LangSmith: runs, as its API, its client and its bulk export give them.

`wrap_openai` keeps the arguments of the client and what it returned; LangChain's tracer keeps
messages of LangChain (`langchain.py`), with the request's parameters beside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects import Dialect, Dump, Fact, ForeignCall, structure
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json
from otel_rollout_formats import langchain
from otel_rollout_formats.products import (
    CALL,
    EMBEDDING,
    INPUT,
    OUTPUT,
    PARAMETERS,
    STEP,
    an_object,
    as_json,
    begin,
    is_call,
    span_of,
    take_bodies,
    usage_by_kind,
)

SCOPE = "langsmith"
_KINDS = {"llm": CALL, "embedding": EMBEDDING}
_error_type = re.compile(r"([A-Za-z_][\w.]*)\(").match


def holds(row: Mapping[str, Json]) -> bool:
    return {"run_type", "id", "start_time"} <= row.keys()


def spans(row: Mapping[str, Json]) -> Iterator[SpanRecord]:
    extra, error = an_object(row.get("extra")), row.get("error")
    metadata = an_object(extra.get("metadata"))
    if feedback := as_json(row.get("feedback_stats")):
        metadata["feedback"] = feedback
    kind = _KINDS.get(str(row["run_type"]), STEP)
    attributes: dict[str, Json] = {}
    if kind != STEP:
        parameters = extra.get("invocation_params")
        attributes = {INPUT: row.get("inputs"), OUTPUT: row.get("outputs"), PARAMETERS: parameters}
    if isinstance(error, str) and (found := _error_type(error)):
        attributes[sc.ERROR_TYPE] = found[1]
    parents = row.get("parent_run_ids")
    yield span_of(
        SCOPE,
        kind,
        name=row.get("name"),
        trace=row.get("trace_id") or row["id"],
        span=row["id"],
        parent=row.get("parent_run_id")
        or (parents[-1] if isinstance(parents, list) and parents else None),
        times=(row["start_time"], row.get("end_time")),
        error=error,
        metadata=metadata,
        attributes=attributes,
    )
    for child in row.get("child_runs") or ():
        yield from spans(child)


def recognises(span: SpanRecord) -> bool:
    return span.scope == SCOPE and is_call(span)


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call, inputs, outputs = begin(span)
    if langchain.holds(inputs, outputs):
        parameters = an_object(structure(span, PARAMETERS, call))
        langchain.read(inputs, outputs, parameters, call)
        return call
    counted = outputs.pop("usage_metadata", None) if isinstance(outputs, dict) else None
    take_bodies(inputs, outputs, call)
    if isinstance(counted, dict) and isinstance(call.reply, dict):
        call.reply["usage"] = usage_by_kind(counted, call)
    return call


DIALECT = Dialect(
    "langsmith",
    recognises,
    read,
    loses=frozenset((Fact.PARAMETERS,)),
    loses_in_streams=frozenset(
        (
            Fact.LOGPROBS,
            Fact.TOKEN_IDS,
            Fact.REPLY_REASONING,
            Fact.REPLY_REFUSAL,
        )
    ),
    dump=Dump(holds, spans),
)
