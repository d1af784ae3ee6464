"""What several of the functions say in the same words."""

from __future__ import annotations

from typing import Any

from otel_rollout import ConfigurationError, Trajectory


def check(name: str, value: Any, expected: tuple[str, ...]) -> None:
    """ConfigurationError for an option that is none of those expected."""
    if value not in expected:
        raise ConfigurationError(
            f"{name}: expected one of {', '.join(map(repr, expected))}, got {value!r}"
        )


def named(trajectory: Trajectory) -> str:
    """The trajectory in an error message."""
    return f"trajectory {trajectory.id!r} ({trajectory.name})"
