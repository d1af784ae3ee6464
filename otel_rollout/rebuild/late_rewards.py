"""Rewards that came after their rollout, each on a span of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanKey, SpanRecord
from otel_rollout.trajectory import UNREADABLE, AllRewards, Reward, RewardKey, sentences
from otel_rollout.wire import Json, loads


def apply_rewards(evaluations: Iterable[SpanRecord], rewards: AllRewards) -> None:
    """Set and remove the rewards of these spans, the latest last."""
    for record in _in_order(evaluations):
        change = _change(record)
        if change is None:
            for key in [key for key in rewards if _may_replace(record, key[0])]:
                rewards.remove(key)
        elif change[1] is None:
            rewards.remove(change[0])
        else:
            rewards.put(change[1])


def lost_rewards(evaluations: Collection[SpanRecord]) -> list[str]:
    """A warning where rewards are missing or cannot be read."""
    if not evaluations:
        return []
    unreadable = sum(_change(record) is None for record in evaluations)
    numberless = sum(sc.REWARD_NUMBER in record.cut for record in evaluations)
    numbers = {record.integer(sc.REWARD_NUMBER) for record in evaluations}
    known = {number for number in numbers if number is not None}
    missing = max(known, default=-1) + 1 - len(known) - numberless
    found: list[str] = []
    if unreadable:
        found.append(sentences.CUT_REWARDS(count=unreadable))
    if missing > 0:
        found.append(sentences.LOST_REWARDS(count=missing))
    return found


def _may_replace(record: SpanRecord, name: str | None) -> bool:
    """Whether a reward that cannot be read may have replaced one with this name."""
    label = name or sc.UNNAMED_REWARD
    named = record.text(sc.GEN_AI_EVALUATION_NAME)
    return named is None or named == label


def _change(record: SpanRecord) -> tuple[RewardKey, Reward | None] | None:
    """The key of a reward, and the reward or None if it was removed; None: it cannot be read."""
    if not record.cut.isdisjoint((sc.REWARD, sc.REWARD_NUMBER, sc.CHECKSUMS)):
        return None
    try:
        row: Json = loads(record.text(sc.REWARD) or "")
        if row.get("value") is not None:
            reward = Reward.from_dict(row)
            return reward.key, reward
        removed = Reward.from_dict({**row, "value": 0.0})
        return removed.key, None
    except UNREADABLE:
        return None


def _in_order(evaluations: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Late rewards by time; a process's own ones by their number, whatever its clock said.

    Those that cannot be read come last: what they replaced is not known.
    """
    records = sorted(evaluations, key=lambda r: (r.start_time_ns, r.key))
    numbered = [r for r in records if r.integer(sc.REWARD_NUMBER) is not None]
    times: dict[SpanKey, int] = {}
    latest = 0
    for record in sorted(numbered, key=lambda r: r.integer(sc.REWARD_NUMBER) or 0):
        times[record.key] = latest = max(latest, record.start_time_ns)
    return sorted(
        records,
        key=lambda r: (
            _change(r) is None,
            times.get(r.key, r.start_time_ns),
            r.integer(sc.REWARD_NUMBER) or 0,
        ),
    )
