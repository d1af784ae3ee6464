"""Which calls a rollout's own span accounts for: anybody may send a span with a rollout's id.

The rollout's span names its process and counts its calls; so does the span of each part that
another process has of it, which is in the same trace. A call that no such span accounts for is
kept, with a warning, and not trained. Calls themselves may lie in any trace: frameworks open roots
of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanKey, SpanRecord


def counted(values: Iterable[Any]) -> dict[Any, int]:
    """How often each of these comes; a `Counter` costs ten times as much for a few."""
    found: dict[Any, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def own_of(rollouts: Iterable[SpanRecord]) -> SpanRecord | None:
    """The rollout's own span among those that say so: of several the first."""
    every = list(rollouts)
    if len(every) > 1:
        return min(every, key=lambda r: (r.start_time_ns, r.key))
    return every[0] if every else None


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
    counting = [record for record in (rollout, *parts) if record is not None]
    counters = counted(record.text(sc.ROLLOUT_PROCESS) for record in counting)
    if rollout is None:
        counters[None] = counters.get(None, 0) + 1
    counts = {
        record.text(sc.ROLLOUT_PROCESS): record.integer(sc.ROLLOUT_EXCHANGE_COUNT)
        for record in counting
    }
    numbered = {
        key: (record.text(sc.EXCHANGE_PROCESS), record.integer(sc.EXCHANGE_STARTED))
        for key, record in calls.items()
    }
    times = counted(numbered.values())
    return {
        key: why
        for key, (process, number) in numbered.items()
        if (why := _why_unknown(process, number, counters, counts, times))
        and calls[key].cut.isdisjoint(_NUMBER)  # else it is damaged anyway
    }


def _why_unknown(
    process: str | None,
    number: int | None,
    counters: Mapping[str | None, int],
    counts: Mapping[str | None, int | None],
    times: Mapping[tuple[str | None, int | None], int],
) -> str | None:
    """Why a call with this number may not be the rollout's.

    counters: how many spans count the calls of each process; with None, any process may be its own.
    """
    if process is None or number is None:
        return "its span does not say which call of which process it is"
    if None not in counters and process not in counters:
        return f"neither its rollout nor a part in its trace is of its process {process!r}"
    if counters.get(process, 0) > 1:
        return f"{counters[process]} spans count the calls of its process {process!r}"
    count = counts.get(process)
    if count is not None and not 1 <= number <= count:
        return f"it is call {number} of its process, which made {count}"
    if times[process, number] > 1:
        return f"{times[process, number]} calls of its process are call {number}"
    return None


_NUMBER = (sc.EXCHANGE_PROCESS, sc.EXCHANGE_STARTED)
