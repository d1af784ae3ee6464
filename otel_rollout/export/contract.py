"""The contract of a trajectory exporter: who calls it, on which thread, what may be relied on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from otel_rollout.trajectory import Trajectory


@runtime_checkable
class TrajectoryExporter(Protocol):
    """What `TrajectorySpanProcessor` hands finished trajectories to.

    Calls of `export` never overlap. A trajectory is sealed when it arrives and is the same object
    that the rollout's own code saw; a reward may still be set on it later. Whatever a method
    raises, also what ends a program, is logged, and never reaches the user's code or another
    exporter; only a KeyboardInterrupt passes where `export` is called on the user's thread. The
    trajectories of a failed `export` are counted and not offered again. `force_flush` and
    `shutdown` are called on a thread of their own, which is left behind if they do not end in time;
    `shutdown` also while an `export` hangs. After `shutdown` nothing is called any more.

    It may also have `on_start(trajectory)`, which is called on the user's thread when a rollout
    begins (and again if its options change then), and `on_left_out(trajectory_id)`, when no
    trajectory of one that began is to be exported. Neither may block.
    """

    blocking: bool
    """True (what to use when in doubt): `export` may block and do I/O, so it is called on a
    thread for this exporter alone, soon after the rollout ended. What waits for it is bounded in
    number and bytes; what does not fit is counted as dropped. False: `export` only touches memory
    and is called on the thread that ended the rollout, before the rollout's function returns."""

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        """Take trajectories over."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Finish what was taken over; False if that did not succeed in time."""

    def shutdown(self) -> None:
        """Flush and release what is held."""
