"""What is kept of rollouts that are not handed over, and what is handed over together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from otel_rollout.evidence.rollout import Evidence, Head, Late

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class Unit(Generic[Place]):
    """Rollouts that are handed over together: a group and those inside it, or one without."""

    group: str | None
    heads: tuple[Head, ...]
    """Those whose trajectories are to be handed over."""
    places: tuple[Place, ...]
    """Where all their spans are, and those of rollouts that are read with them."""
    reads: frozenset[str] = frozenset()
    """Their ids, and those of the rollouts that are read with them."""
    size: int | None = None
    """Samples that the group was to have."""
    whole: int = 0
    """Samples that are whole."""
    is_extra: bool = False
    """True if the group is handed over already: these are to be reported, not handed over."""

    @property
    def name(self) -> str:
        """What names it: the id of its group, or of its rollout."""
        return self.heads[0].rollout if self.group is None else self.group

    @property
    def is_rewards(self) -> bool:
        """True if only rewards came: they are to be reported, and their rollout may still come."""
        return all(head.came == "rewards" for head in self.heads)

    @property
    def short_by(self) -> int:
        """Samples that are missing, or not whole."""
        return max(0, (self.size or 0) - self.whole)


@dataclass(slots=True)
class OpenRollout(Generic[Place]):
    """A rollout of which spans came."""

    evidence: Evidence
    last: float
    """When the last span came."""
    places: dict[Place, None] = field(default_factory=dict)
    group: str | None = None
    outer: str | None = None
    """The group that it is sent with."""
    head: Head | None = None
    """None: not judged since the last span."""
    is_taken: bool = False
    """True while it is handed over."""
    is_handed: bool = False
    """True when it was, and another one that is read with it was not."""
    since: list[Late] = field(default_factory=list)
    """What came while it was handed over."""

    @property
    def is_waiting(self) -> bool:
        return not (self.is_taken or self.is_handed)

    @property
    def is_whole(self) -> bool:
        """True if it was judged whole."""
        return self.head is not None and self.head.is_whole


@dataclass(slots=True)
class Members:
    """The rollouts of a group that are open."""

    last: float
    ids: dict[str, None] = field(default_factory=dict)
    is_taken: bool = False
    is_handed: bool = False
