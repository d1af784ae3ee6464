"""The verb `reward`: a reward for a rollout that has ended, as a span on its trace."""

from __future__ import annotations

import argparse

from otel_rollout.command.recording import endpoint, note_places, recording
from otel_rollout.record import record_reward
from otel_rollout.terminal import note
from otel_rollout.trajectory import Trajectory
from otel_rollout.view import Sources, note_unreadable


def reward(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    if not options.spans and not endpoint():
        options.wrong(
            "where to? Give --spans FILE, or set OTEL_EXPORTER_OTLP_ENDPOINT to a collector"
        )
    names = options.sources or [options.spans]
    if names == [None]:
        options.wrong("--in SOURCE is required: the rollout's trace is looked up there")
    sources = Sources(names)
    trajectory = _found(sources, options.id.lower())
    unreadable = note_unreadable(sources.errors)
    if trajectory is None:
        return 1
    with recording(spans=options.spans) as recorded:
        record_reward(options.value, name=options.name, trajectory=trajectory)
    named = f"reward {options.name}" if options.name else "reward"
    note(f"{named} of {trajectory.id}: {options.value:g}")
    return max(unreadable, note_places(recorded, spans=options.spans))


def _found(sources: Sources, wanted: str) -> Trajectory | None:
    """The trajectory whose id begins with this; None, and a sentence, unless it is one."""
    found = {
        trajectory.id: trajectory
        for trajectory in sources.trajectories(
            lambda each: each if each.id.startswith(wanted) else None, infer_rollouts=False
        )
    }
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        note(f"{len(found)} rollouts have an id that begins with {wanted!r}: give more of it")
    else:
        note(f"no rollout whose id begins with {wanted!r}")
    return None
