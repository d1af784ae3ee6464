"""A finding: one statement about a set-up, and how bad it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    """`problem`: training data is, or would be, lost. `warning`: something else is."""
    subject: str
    """The thing that was looked at, in a word or two."""
    text: str
    """The finding itself, what it costs, and what to do."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.subject}: {self.text}"
