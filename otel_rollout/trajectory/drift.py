"""Drift: calls whose messages continue a conversation, and whose token ids do not. Pure.

`otel_rollout.view` finds them (`drift.py` there); here are the records that users hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import Json

ForkCause = Literal[
    "reasoning_dropped",
    "arguments_reformatted",
    "tokens_merged",
    "template_changed",
    "truncated",
    "other",
]
"""The classes, as `docs/drift.md` describes them."""


@dataclass(frozen=True, slots=True)
class TokenFork:
    """A call that continues the messages of an earlier one, but not its token ids."""

    before_id: str
    """Id of the completion that is continued."""
    after_id: str
    """Id of the completion that continues it."""
    cause: ForkCause
    """Why the ids differ, as far as messages, ids and the texts of tokens show."""
    position: int
    """The first place where the ids differ, from 0: so many tokens are the same."""
    held: int
    """Number of ids that the conversation had: prompt and reply of the earlier call."""
    prompt: int
    """Number of ids of the prompt of the later call."""
    held_id: int | None
    """The id that the conversation had at `position`."""
    prompt_id: int | None
    """The id of the later prompt at `position`; None: the prompt ends there."""
    before: Completion = field(repr=False, compare=False)
    """The completion that is continued."""
    after: Completion = field(repr=False, compare=False)
    """The completion that continues it."""

    @property
    def prefilled_again(self) -> int:
        """Tokens after the fork, up to those that the conversation had: read by the server again.

        Where the later prompt is so short that some of its new messages are among them, they count.
        """
        return min(self.held, self.prompt) - self.position

    def to_dict(self) -> dict[str, Json]:
        """The fork as JSON."""
        return {
            "before": [self.before_id, self.before.choice_index],
            "after": [self.after_id, self.after.choice_index],
            "cause": self.cause,
            "position": self.position,
            "held": self.held,
            "prompt": self.prompt,
            "held_id": self.held_id,
            "prompt_id": self.prompt_id,
            "prefilled_again": self.prefilled_again,
        }


@dataclass(frozen=True, slots=True)
class Drift:
    """How the token ids of conversations went on; the sum of several is that of all their calls."""

    continued: int = 0
    """Calls whose messages continue an earlier call."""
    merged: int = 0
    """Those of them whose prompt begins with all ids of the call that they continue."""
    unknown: int = 0
    """Those of them of which that is not known: ids are missing, or of two models."""
    forks: tuple[TokenFork, ...] = ()
    """The others, in order of their start."""

    @property
    def merge_ratio(self) -> float | None:
        """Merged calls among those whose ids are known, 1.0 without drift; None where none is."""
        known = self.merged + len(self.forks)
        return self.merged / known if known else None

    @property
    def prefilled_again(self) -> int:
        """Tokens that the server read again because of the forks."""
        return sum(fork.prefilled_again for fork in self.forks)

    @property
    def causes(self) -> dict[ForkCause, int]:
        """Number of forks of each class, the most frequent first."""
        return dict(Counter(fork.cause for fork in self.forks).most_common())

    def __add__(self, other: Drift) -> Drift:
        return Drift(
            self.continued + other.continued,
            self.merged + other.merged,
            self.unknown + other.unknown,
            self.forks + other.forks,
        )

    def to_dict(self) -> dict[str, Json]:
        """The numbers and the forks as JSON."""
        return {
            "continued": self.continued,
            "merged": self.merged,
            "unknown": self.unknown,
            "merge_ratio": self.merge_ratio,
            "prefilled_again": self.prefilled_again,
            "causes": dict(self.causes),
            "forks": [fork.to_dict() for fork in self.forks],
        }
