"""Where a trajectory gets what was exchanged from: a running rollout, spans, or a file.

A trajectory asks its source; a source never asks back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from otel_rollout.spans import Exchange, SpanRecord
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.reward import AllRewards
from otel_rollout.trajectory.sampling import completions_of, with_retrieved
from otel_rollout.trajectory.side_calls import SideCalls
from otel_rollout.trajectory.steps import Step
from otel_rollout.trajectory.uncertain import uncertain


class Contents:
    """What was exchanged in a rollout, as far as it has come; replies are read when asked for."""

    def __init__(
        self,
        link: Callable[[], Conversations] = Conversations,
        exchanges: Sequence[Exchange] = (),
        warnings: Sequence[str] = (),
        missing_calls: Sequence[str] = (),
    ) -> None:
        self._link: Callable[[], Conversations] | None = link
        """Reads the replies and links them."""
        self._conversations: Conversations | None = None
        self._uncertain: list[str] | None = None
        self._lock = threading.RLock()
        self.exchanges = exchanges
        """Every call, also to endpoints that do not generate; () while the rollout runs."""
        self.warnings = warnings
        """What is missing or uncertain, and does not follow from `exchanges`."""
        self.missing_calls = missing_calls
        """Those of `warnings` that say which model calls are not here, or that there was none."""

    @property
    def conversations(self) -> Conversations:
        """The completions, and which of them continues which."""
        with self._lock:
            if self._conversations is None:
                assert self._link is not None
                self._conversations, self._link = self._link(), None
            return self._conversations

    def tokens_first(self) -> None:
        """Have replies that were not read yet read with their tokens."""
        for exchange in self.exchanges:
            exchange.tokens_first = True

    @property
    def uncertain(self) -> list[str]:
        """What is missing or uncertain in the exchanges; [] while the rollout runs."""
        with self._lock:
            if self._uncertain is None:
                self._uncertain = []
                if self.exchanges:
                    self._uncertain = uncertain(self.exchanges, self.conversations)
            return self._uncertain


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
        return Contents(self.conversations, list(self.exchanges))

    def conversations(self) -> Conversations:
        """Their completions, linked."""
        side_calls = SideCalls()
        completions = (
            completion
            for exchange in with_retrieved(self.exchanges)
            for completion in completions_of(
                exchange, self.rewards, trainable=self.trainable, side_calls=side_calls
            )
        )
        return Conversations(completions, side_calls)


@dataclass(slots=True)
class Built(Source):
    """The calls of the steps of a trajectory that is built by hand, until its workflow ends."""

    steps: Callable[[], Sequence[Step]]

    def read(self) -> Contents:
        """The calls that its steps are of, as far as they were captured."""
        return Contents(lambda: Conversations(s.completion for s in self.steps() if s.completion))
