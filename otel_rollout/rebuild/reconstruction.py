"""Spans in, trajectories out: a pure function, whatever the source and the order of the spans.

What belongs to a rollout says so itself (`rollout.id`): names, positions, parents and times decide
nothing. Spans may come twice or not at all; what is missing is a sentence in `warnings`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.rebuild import dialects
from otel_rollout.rebuild.assembly import Assembly
from otel_rollout.spans import Exchange, SpanKey, SpanRecord, as_records, united
from otel_rollout.trajectory import (
    AllRewards,
    Contents,
    Episode,
    Recorded,
    Source,
    Trajectory,
    sentences,
)
from otel_rollout.wire import Json, loads

logger = logging.getLogger("otel_rollout")


def reconstruct(spans: Iterable[Any], infer_rollouts: bool = False) -> list[Trajectory]:
    """The trajectories of these spans, in order of their start.

    `spans`: SDK `ReadableSpan`s or what `otel_rollout.otlp` reads; spans of other libraries are
    passed over, so are spans that no ids name (with a warning in the log). The same trajectories
    come out for any order of the same spans, and for duplicates. A span that is damaged, or that
    somebody else wrote in a rollout's name, is a warning of that rollout, and changes no other.
    SpanFormatError for what is no span.

    `infer_rollouts`: a trace without any span of ours, but with model calls that another
    instrumentation wrote (`rebuild/dialects`), is a trajectory too, with the trace's id. It
    is less than what was on the wire: no completion of it is `exact`, `lost` and the warnings say
    what is not known. All spans that are not ours are then held until the last has come.
    """
    rollouts: dict[str, Assembly] = {}
    foreign: dict[str, dict[str, SpanRecord]] = {}
    ours: set[str] = set()
    nobodys: dict[SpanKey, SpanRecord] = {}
    for record in as_records(spans):
        rollout_id = record.text(sc.ROLLOUT_ID)
        is_cut = sc.ROLLOUT_ID in record.cut or rollout_id == ""
        if rollout_id:
            if rollout_id not in rollouts:
                rollouts[rollout_id] = Assembly(rollout_id)
            rollouts[rollout_id].add(record)
        if rollout_id or record.scope == sc.SCOPE or is_cut:
            ours.add(record.trace_id)
        elif infer_rollouts:
            known = foreign.setdefault(record.trace_id, {})
            known[record.span_id] = united(known.get(record.span_id, record), record)
        if is_cut:
            nobodys[record.key] = record
    found = {rollout_id: assembly.trajectory() for rollout_id, assembly in rollouts.items()}
    for rollout_id, assembly in rollouts.items():
        _claim(assembly, found[rollout_id], rollouts)
    _pass_over(nobodys, rollouts, found)
    trajectories = [found[id_] for id_, each in rollouts.items() if not each.is_empty_workflow]
    for trace_id in foreign.keys() - ours:
        trajectories += _inferred(trace_id, list(foreign[trace_id].values()))
    return sorted(trajectories, key=lambda t: (t.start_time_ns, t.id))


def _claim(assembly: Assembly, trajectory: Trajectory, rollouts: Mapping[str, Assembly]) -> None:
    """Give a trajectory the calls that it claims of the rollout around it, in the same trace."""
    around = rollouts.get(trajectory.parent_id or "")
    if around is None or not (claims := assembly.claims):
        return
    if around is assembly:
        assembly.notes.append(sentences.CLAIMS_ITSELF())
    elif around.trace_id not in (None, assembly.trace_id):
        assembly.notes.append(sentences.CLAIMS_ELSEWHERE(id=around.rollout_id))
    else:
        source = around.claim(
            claims, trajectory.all_rewards, trainable=trajectory.trainable, own=assembly
        )
        trajectory.settle(source, trajectory.end_time_ns)


def _pass_over(
    nobodys: dict[SpanKey, SpanRecord],
    rollouts: Mapping[str, Assembly],
    found: Mapping[str, Trajectory],
) -> None:
    """Report spans of ours whose rollout's id was cut, unless they came whole, too."""
    whole = {key for assembly in rollouts.values() for key in nobodys.keys() & assembly.spans}
    lost = Counter(trace_id for trace_id, span_id in nobodys.keys() - whole)
    for trace_id, count in lost.items():
        sentence = sentences.PASSED_OVER(count=count, key=sc.ROLLOUT_ID)
        logger.warning("trace %s: %s", trace_id, sentence)
        for rollout_id, trajectory in found.items():
            if trajectory.trace_id == trace_id:
                rollouts[rollout_id].lost_calls.append(sentence)


def _inferred(trace_id: str, records: Sequence[SpanRecord]) -> list[Trajectory]:
    """The trajectory of a trace that is not ours; [] if there is no model call in it."""
    exchanges = dialects.read_trace(records)
    if not exchanges:
        return []
    first = _top(records)
    is_root = first.parent_span_id is None and first.end_time_ns is not None
    is_alone = sum(record.parent_span_id is None for record in records) == 1
    ends = [record.end_time_ns for record in records if record.end_time_ns is not None]
    status, error = ("complete" if is_root else "unknown"), None
    if first.status_error is not None:
        error = dialects.error_of(first)
        cancelled = error["type"].rpartition(".")[2] == "CancelledError"
        status = "cancelled" if cancelled else "error"
    return [
        Trajectory(
            id=trace_id,
            name=first.name,
            trace_id=trace_id,
            span_id=first.span_id,
            start_time_ns=first.start_time_ns
            if is_root
            else min(record.start_time_ns for record in records),
            end_time_ns=first.end_time_ns if is_root and is_alone else max(ends, default=None),
            status=status,
            termination_reason=None if error is None else status,
            error=error,
            metadata=_metadata(first),
            source=_Inferred(exchanges, is_whole=is_root),
        )
    ]


def _metadata(record: SpanRecord) -> dict[str, Json]:
    """The metadata that a span has as JSON, as OpenInference and exports of products have them."""
    text = record.text(sc.METADATA) or ""
    try:
        found = loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return {}  # cut, or another's
    return found if isinstance(found, dict) else {}


def _top(records: Sequence[SpanRecord]) -> SpanRecord:
    """The span that is above the others; in a ring, which only a broken writer makes, the first."""
    ids = {record.span_id for record in records}
    tops = [record for record in records if record.parent_span_id not in ids]
    return min(tops or records, key=lambda r: (r.parent_span_id is not None, r.start_time_ns))


@dataclass(slots=True)
class _Inferred(Source):
    """Source of a trajectory that was inferred from other instrumentations' spans."""

    exchanges: list[Exchange]
    is_whole: bool

    def read(self) -> Contents:
        """The calls, with a warning for what each dialect does not keep."""
        warnings: list[str] = []
        for source in sorted({exchange.source for exchange in self.exchanges}):
            lost = {fact for e in self.exchanges if e.source == source for fact in e.lost}
            kept = "; ".join(sorted(lost)) or "all of a call"
            warnings.append(sentences.INFERRED(dialect=repr(source), lost=kept))
        if not self.is_whole:
            warnings.append(sentences.NO_ROOT())
        return Contents(
            Recorded(self.exchanges, AllRewards()).conversations, self.exchanges, warnings
        )


def reconstruct_episodes(spans: Iterable[Any]) -> list[Episode]:
    """The episodes of these spans, in order of their start; see `reconstruct`.

    An episode whose own span is missing is not there, its trajectories are among those of
    `reconstruct`. One of whose trajectories no span came has the others.
    """
    records = list(as_records(spans))
    trajectories = {trajectory.id: trajectory for trajectory in reconstruct(records)}
    workflows: dict[SpanKey, SpanRecord] = {}
    for record in sorted(records, key=lambda r: (r.start_time_ns, r.key)):
        if record.text(sc.ROLLOUT_EPISODE) is not None:
            workflows.setdefault(record.key, record)
    episodes: list[Episode] = []
    for record in workflows.values():
        try:
            episodes.append(Episode.of(loads(record.text(sc.ROLLOUT_EPISODE) or ""), trajectories))
        except (KeyError, TypeError, ValueError):
            continue  # what was cut is not in `attributes`: this one was never whole
    return episodes
