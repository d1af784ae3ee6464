"""Which calls a rollout's own span accounts for: anybody may send a span with a rollout's id.

The rollout's span names its process and counts its calls; so does the span of each part that
another process has of it, which is in the same trace. A call that no such span accounts for is
kept, with a warning, and not trained. Calls themselves may lie in any trace: frameworks open roots
of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanKey, SpanRecord


def own_of(rollouts: Iterable[SpanRecord]) -> SpanRecord | None:
    """The rollout's own span among those that say so: of several the first."""
    return min(rollouts, key=lambda r: (r.start_time_ns, r.key), default=None)


def trusted_parts(rollout: SpanRecord | None, parts: Iterable[SpanRecord]) -> list[SpanRecord]:
    """The parts in the rollout's trace, in order; all where its span did not come."""
    return sorted(
        (part for part in parts if rollout is None or part.trace_id == rollout.trace_id),
        key=lambda r: (r.start_time_ns, r.key),
    )


def doubts_of(
    calls: Mapping[SpanKey, SpanRecord], rollout: SpanRecord | None, parts: Iterable[SpanRecord]
) -> dict[SpanKey, str]:
    """Why each call that nothing accounts for may not be the rollout's. parts: the trusted ones."""
    tellers = [record for record in (rollout, *parts) if record is not None]
    told = Counter(record.text(sc.ROLLOUT_PROCESS) for record in tellers)
    counts = {
        record.text(sc.ROLLOUT_PROCESS): record.integer(sc.ROLLOUT_EXCHANGE_COUNT)
        for record in tellers
    }
    # Without the rollout's span, or a process on one of them, any process may be its own.
    all_told = rollout is not None and None not in told
    numbered = {
        key: (record.text(sc.EXCHANGE_PROCESS), record.integer(sc.EXCHANGE_STARTED))
        for key, record in calls.items()
    }
    times = Counter(numbered.values())
    doubts: dict[SpanKey, str] = {}
    for key, (process, number) in numbered.items():
        count = counts.get(process)
        if process is None or number is None:
            if calls[key].cut.isdisjoint(_NUMBER):  # else it is damaged anyway
                doubts[key] = "its span does not say which call of which process it is"
        elif all_told and process not in told:
            doubts[key] = (
                f"neither its rollout nor a part in its trace is of its process {process!r}"
            )
        elif told[process] > 1:
            doubts[key] = f"{told[process]} spans count the calls of its process {process!r}"
        elif count is not None and not 1 <= number <= count:
            doubts[key] = f"it is call {number} of its process, which made {count}"
        elif times[process, number] > 1:
            doubts[key] = f"{times[process, number]} calls of its process are call {number}"
    return doubts


_NUMBER = (sc.EXCHANGE_PROCESS, sc.EXCHANGE_STARTED)
