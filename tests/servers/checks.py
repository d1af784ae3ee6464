"""What must hold of a rollout on a real server, and the figures that are printed at the end."""

from __future__ import annotations

from collections.abc import Iterable

from exporters.kit.recomputed import Model, Row
from otel_rollout import Completion, TokenSequence, Trajectory

FIGURES: list[tuple[str, int, float]] = []
"""(what was checked, trained tokens, largest gap of a log-probability) of each check so far."""


def rows_of(sequences: Iterable[TokenSequence]) -> list[Row]:
    """Their ids, masks and log-probabilities."""
    return [(row.token_ids, row.loss_mask, row.logprobs) for row in sequences]


def sampled(completions: Iterable[Completion]) -> int:
    """How many tokens the server says it sampled in the calls of these completions."""
    usage = {completion.span_id: completion.usage or {} for completion in completions}
    return sum(counted["completion_tokens"] for counted in usage.values())


def check(
    trajectory: Trajectory, model: Model, tolerance: float, lost: Iterable[Completion] = ()
) -> None:
    """Each token that was sampled trains once, with the log-probability that the model gives it.

    lost: whole completions whose ids or log-probabilities the server did not send; all others
        whose call ended well have to train.
    """
    rows = trajectory.token_sequences()
    gaps = model.gaps(rows_of(rows))
    FIGURES.append((trajectory.name, len(gaps), max(gaps, default=0.0)))
    missing = {completion.id for completion in lost}
    left = [drop.completion for drop in rows.dropped]
    assert {c.id for c in left if c and c.trainable} == missing
    whole = [c for c in trajectory.completions if c.trainable and c.id not in missing]
    assert len(gaps) == sampled(whole) > 0
    assert [gap for gap in gaps if not gap <= tolerance] == []
