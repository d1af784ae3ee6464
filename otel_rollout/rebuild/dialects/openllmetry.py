"""OpenLLMetry (Traceloop) since 0.55: messages of the conventions, as JSON in attributes."""

from __future__ import annotations

from collections.abc import Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import Dialect, Fact, ForeignCall, is_true
from otel_rollout.rebuild.dialects.parts import LOST_BY_CONVENTIONS, read_call
from otel_rollout.spans import SpanRecord

SCOPE = "opentelemetry.instrumentation."
_OTHERS = (f"{SCOPE}genai", f"{SCOPE}openai_v2")


def recognises(span: SpanRecord) -> bool:
    return (
        span.scope.startswith(SCOPE)
        and not span.scope.startswith(_OTHERS)
        and span.text(sc.GEN_AI_OPERATION_NAME) in sc.MODEL_OPERATIONS
    )


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    return read_call(span, span, stream=is_true(span, sc.GEN_AI_IS_STREAMING))


LOST = LOST_BY_CONVENTIONS | {
    Fact.STRICT,
    Fact.NAMES,
    Fact.IMAGES,
    Fact.RESPONSE_MODEL,
    Fact.USAGE_DETAILS,
    Fact.CALL_IDS,
    Fact.ITEMS,
    Fact.PREVIOUS,
}
DIALECT = Dialect(
    "openllmetry",
    recognises,
    read,
    loses=LOST,
    loses_in_streams=frozenset((Fact.REPLY_REFUSAL,)),
)
