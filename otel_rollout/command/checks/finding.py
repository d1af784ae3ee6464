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

    @classmethod
    def ok(cls, subject: str, text: str) -> Finding:
        """A finding that nothing is lost."""
        return cls("ok", subject, text)

    @classmethod
    def warning(cls, subject: str, text: str) -> Finding:
        """A finding that something else than training data is lost."""
        return cls("warning", subject, text)

    @classmethod
    def problem(cls, subject: str, text: str) -> Finding:
        """A finding that training data is lost."""
        return cls("problem", subject, text)

    def __str__(self) -> str:
        return f"{self.level:<8} {self.subject}: {self.text}"
