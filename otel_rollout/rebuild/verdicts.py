"""Verdicts: what rules of the user's own said of calls, when their rollout ended.

Rules are code, and spans are read elsewhere: so the span of a rollout, or of a part of it, names
the calls of its process that are side calls. Each of these calls says that it was judged; where
the verdict is lost it is not known, and the call does not train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from otel_rollout import semconv as sc
from otel_rollout.rebuild.rollout_span import Fields, expected
from otel_rollout.spans import SpanKey, SpanRecord
from otel_rollout.wire import Json

NOT_KNOWN = "not known: the rules of its rollout were its own, and what they said did not come"


def verdicts_of(
    calls: Mapping[SpanKey, SpanRecord], rollout: SpanRecord | None, parts: Iterable[SpanRecord]
) -> dict[SpanKey, str]:
    """Why calls are side calls, "" where one is none; only of those that own rules judged.

    parts: the trusted ones.
    """
    judged = {key: call for key, call in calls.items() if call.boolean(sc.EXCHANGE_JUDGED)}
    if not judged:
        return {}
    tellers = [record for record in (rollout, *parts) if record is not None]
    told = {record.text(sc.ROLLOUT_PROCESS): _told(record) for record in tellers}
    verdicts: dict[SpanKey, str] = {}
    for key, call in judged.items():
        reasons = told.get(call.text(sc.EXCHANGE_PROCESS))
        verdicts[key] = NOT_KNOWN if reasons is None else reasons.get(call.span_id, "")
    return verdicts


def _told(record: SpanRecord) -> dict[str, str] | None:
    """The reasons on the span of a rollout or a part, by span id; None where they are not there."""
    if sc.ROLLOUT_SIDE_CALLS in record.cut:
        return None
    return Fields(record, []).read(sc.ROLLOUT_SIDE_CALLS, _reasons)


def _reasons(value: Json) -> dict[str, str]:
    expected([value], dict)
    expected(value.values(), str)
    found: dict[str, str] = value
    return found
