"""Trajectories as traces of verifiers v1: each message once, branches by walking.

to_trace            the live `verifiers.v1.trace.WireTrace`, whose branches are the token sequences
to_trace_record     the same as JSON, without verifiers: a line of `traces.jsonl`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from otel_rollout import Trajectory, TrajectoryGroup
from otel_rollout.export import Dropped, Json, JsonRows, dropped_completions
from otel_rollout_verifiers.record import to_trace_record

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace

__all__ = ["VerifiersRows", "to_trace", "to_trace_record"]


def to_trace(trajectory: Trajectory) -> WireTrace:
    """The trace of a trajectory; what it holds and refuses is said at `to_trace_record`."""
    from verifiers.v1.trace import WireTrace

    return WireTrace.model_validate(to_trace_record(trajectory))


class VerifiersRows(JsonRows):
    """The exporter `verifiers`: a trace for each trajectory, those that failed included.

    Log-probabilities have all their digits, of which verifiers' own records keep four. It has no
    options.
    """

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no branch trains."""
        return dropped_completions([*group.trajectories, *group.failures])

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """In order of the samples; a failed rollout has its errors, and nothing that trains."""
        members = [*group.trajectories, *group.failures]
        for trajectory in sorted(
            members, key=lambda t: (t.sample_index is None, t.sample_index or 0)
        ):
            yield to_trace_record(trajectory)
