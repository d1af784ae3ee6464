"""Where a trajectory gets what was exchanged from: a running rollout, spans, or a file.

A trajectory asks its source; a source never asks back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from otel_rollout.spans import Exchange, SpanRecord
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.reward import AllRewards
from otel_rollout.trajectory.sampling import completions_of, with_retrieved
from otel_rollout.trajectory.side_calls import SideCalls
from otel_rollout.trajectory.steps import Step


@dataclass(frozen=True, slots=True)
class Contents:
    """What was exchanged in a rollout, as far as it has come."""

    conversations: Conversations = field(default_factory=Conversations)
    """The completions, and which of them continues which."""
    exchanges: Sequence[Exchange] = ()
    """Every call, also to endpoints that do not generate; () while the rollout runs."""
    warnings: Sequence[str] = ()
    """Short sentences about what is missing or uncertain; () while the rollout runs."""
    missing_calls: Sequence[str] = ()
    """Those of `warnings` that say which model calls are not here, or that there was none."""


class Source(Protocol):
    """Gives a trajectory its contents.

    A trajectory whose rollout has ended asks once and keeps the answer; a running one asks each
    time. Any thread may ask.
    """

    def read(self) -> Contents:
        """What has come by now."""

    def take(self, records: Sequence[SpanRecord]) -> None:
        """Take in spans of the same rollout that another process recorded, while it runs."""
        return


@dataclass(slots=True)
class Recorded(Source):
    """Contents that are complete already: the exchanges of a file, or none."""

    exchanges: Sequence[Exchange]
    rewards: AllRewards
    trainable: bool = True

    def read(self) -> Contents:
        """The contents."""
        side_calls = SideCalls()
        completions = (
            completion
            for exchange in with_retrieved(self.exchanges)
            for completion in completions_of(
                exchange, self.rewards, trainable=self.trainable, side_calls=side_calls
            )
        )
        return Contents(Conversations(completions, side_calls), list(self.exchanges))


@dataclass(slots=True)
class Built(Source):
    """The calls of the steps of a trajectory that is built by hand, until its workflow ends."""

    steps: Callable[[], Sequence[Step]]

    def read(self) -> Contents:
        """The calls that its steps are of, as far as they were captured."""
        return Contents(Conversations(s.completion for s in self.steps() if s.completion))
