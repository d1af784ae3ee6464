"""What is wrong with a trajectory as training data: of what kind it is, why, and what to do. Pure.

Every warning and every completion that no row trains is in one finding at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from otel_rollout.trajectory.tokens import TokenSequences
from otel_rollout.trajectory.trajectory import Trajectory
from otel_rollout.wire import Json

Kind = Literal[
    "incomplete",
    "inexact",
    "damaged",
    "drift",
    "unscored",
    "side_call",
    "duplicate",
    "failed",
    "dropped",
    "uncertain",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know before training on a trajectory."""

    kind: Kind
    text: str
    """What is the matter, a sentence without a full stop; it may have ids."""
    advice: str
    """What to do about it, a sentence with a full stop."""
    completion_id: str | None = None
    """The completion that it is about; None: the trajectory."""
    choice_index: int = 0

    def to_dict(self) -> dict[str, Json]:
        """The finding as JSON."""
        return {
            "kind": self.kind,
            "text": self.text,
            "advice": self.advice,
            "completion_id": self.completion_id,
            "choice_index": self.choice_index,
        }


def findings_of(trajectory: Trajectory, *, rows: TokenSequences | None = None) -> list[Finding]:
    """The findings of a trajectory. `rows`: its token sequences, where they are known already."""
    rows = trajectory.token_sequences() if rows is None else rows
    found = [Finding("uncertain", warning, "") for warning in trajectory.warnings]
    for drop in rows.dropped:
        id_, choice = (
            (drop.completion.id, drop.completion.choice_index) if drop.completion else (None, 0)
        )
        found.append(Finding("dropped", drop.reason, "", id_, choice))
    return found
