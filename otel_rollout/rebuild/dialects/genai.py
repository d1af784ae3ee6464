"""The GenAI conventions themselves: OpenTelemetry's own instrumentations, and others like them.

OpenLLMetry (Traceloop) is one of them since 0.55: messages as JSON in attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import Dialect, Fact, ForeignCall, is_true
from otel_rollout.rebuild.dialects.logfire import is_logfire
from otel_rollout.rebuild.dialects.parts import LOST_BY_CONVENTIONS, read_call
from otel_rollout.spans import SpanRecord

_INSTRUMENTATIONS = "opentelemetry.instrumentation."
_V2_SCOPES = ("opentelemetry.util.genai", f"{_INSTRUMENTATIONS}openai_v2")
_RECORDED = (*_V2_SCOPES, f"{_INSTRUMENTATIONS}genai")
"""Scopes of OpenTelemetry's of which there are recordings: what they keep is known."""
_LOST_BY_OTHERS = frozenset((Fact.TOOLS, Fact.NAMES, Fact.PARTS, Fact.IMAGES, Fact.CHOICES))
"""What the recorded instrumentations keep, and others that follow the conventions may not."""


def recognises(span: SpanRecord) -> bool:
    return span.text(sc.GEN_AI_OPERATION_NAME) in sc.MODEL_OPERATIONS and not is_logfire(span)


def recognises_v2(span: SpanRecord) -> bool:
    return recognises(span) and span.scope.startswith(_V2_SCOPES)


def recognises_openllmetry(span: SpanRecord) -> bool:
    return (
        span.text(sc.GEN_AI_OPERATION_NAME) in sc.MODEL_OPERATIONS
        and span.scope.startswith(_INSTRUMENTATIONS)
        and not span.scope.startswith(_RECORDED)
    )


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call = read_call(span, span, stream=is_true(span, sc.GEN_AI_REQUEST_STREAM))
    if not span.scope.startswith(_RECORDED):
        call.also_loses |= _LOST_BY_OTHERS
    return call


def read_openllmetry(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    call = read_call(span, span, stream=is_true(span, sc.GEN_AI_IS_STREAMING))
    if call.is_responses:
        call.also_loses |= {Fact.REPLY_REFUSAL}
    return call


_LOSES = LOST_BY_CONVENTIONS | {Fact.STRICT, Fact.REPLY_REFUSAL, Fact.USAGE_DETAILS}
DIALECT = Dialect("genai", recognises, read, loses=_LOSES | {Fact.FILES, Fact.ITEMS, Fact.PREVIOUS})
DIALECT_V2 = Dialect(
    "openai-v2", recognises_v2, read, loses=_LOSES | {Fact.TOOLS, Fact.NAMES, Fact.IMAGES}
)
LOST_BY_OPENLLMETRY = LOST_BY_CONVENTIONS | {
    Fact.STRICT,
    Fact.NAMES,
    Fact.IMAGES,
    Fact.RESPONSE_MODEL,
    Fact.USAGE_DETAILS,
    Fact.CALL_IDS,
    Fact.ITEMS,
    Fact.PREVIOUS,
}
OPENLLMETRY = Dialect(
    "openllmetry",
    recognises_openllmetry,
    read_openllmetry,
    loses=LOST_BY_OPENLLMETRY,
    loses_in_streams=frozenset((Fact.REPLY_REFUSAL,)),
)
