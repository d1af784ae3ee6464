"""The check after each test: every rollout that ended is equal when rebuilt from its spans."""

from __future__ import annotations

import functools
import random

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import Trajectory, TrajectorySpanProcessor, reconstruct
from otel_rollout.trajectory.sentences import UNKNOWN, sentence_of
from otel_rollout.view import findings_of
from tests.kit.transports import TRANSPORTS

MANY_SPANS = 3000
MUCH_TEXT = 30_000_000
"""Rollouts above these are only shuffled: the transports would take seconds."""


class Witness:
    """Records every span that our processors see, and every trajectory that they hand over.

    Every warning of these has a sentence that is known, with its kind and advice.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[ReadableSpan] = []
        self.trajectories: dict[str, Trajectory] = {}
        on_end, hand_over = TrajectorySpanProcessor.on_end, TrajectorySpanProcessor._hand_over

        @functools.wraps(on_end)
        def seen(processor: TrajectorySpanProcessor, span: ReadableSpan) -> None:
            self.spans.append(span)
            on_end(processor, span)

        @functools.wraps(hand_over)
        def handed_over(processor: TrajectorySpanProcessor, trajectory: Trajectory) -> None:
            self.trajectories[trajectory.id] = trajectory
            hand_over(processor, trajectory)

        monkeypatch.setattr(TrajectorySpanProcessor, "on_end", seen)
        monkeypatch.setattr(TrajectorySpanProcessor, "_hand_over", handed_over)

    def check(self) -> None:
        """Assert that each rollout that ended is equal when rebuilt, over every transport."""
        ended = {
            id_: trajectory
            for id_, trajectory in self.trajectories.items()
            if trajectory.status in ("complete", "error", "cancelled")
        }
        if not ended:
            return
        for trajectory in ended.values():
            told = {finding.text for finding in findings_of(trajectory)}
            for warning in trajectory.warnings:
                assert sentence_of(warning)[0] is not UNKNOWN, f"nothing makes {warning!r}"
                assert warning in told, warning
        spans = [*self.spans, *self.spans[::3]]
        random.Random(len(spans)).shuffle(spans)
        text = sum(
            len(value)
            for span in spans
            for value in (span.attributes or {}).values()
            if isinstance(value, str)
        )
        large = len(spans) > MANY_SPANS or text > MUCH_TEXT
        lines = {id_: live.to_json() for id_, live in ended.items()}
        for transport in TRANSPORTS[:1] if large else TRANSPORTS:
            found = {trajectory.id: trajectory for trajectory in reconstruct(transport(spans))}
            for id_, live in ended.items():
                assert id_ in found, f"{transport.__name__}: {live!r} was not rebuilt"
                # Equal lines say the same; others may, and are read, which costs more.
                if found[id_].to_json() != lines[id_]:
                    assert found[id_].to_dict() == live.to_dict(), transport.__name__
