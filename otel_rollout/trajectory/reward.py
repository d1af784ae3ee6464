"""A reward: a number that says how well something went, and what it is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from otel_rollout.wire import (
    Json,
)

RewardKey = tuple["str | None", "str | None", int]
"""What a reward is for: its name, and the completion (id, choice) where it is a step reward."""


class Reward(float):
    """A number that says how well something went, and what: it is a float in every other way.

    Without `completion_id` it is about the trajectory, with it about that one completion.
    """

    __slots__ = ("choice_index", "completion_id", "explanation", "name", "weight")

    name: str | None
    """None for the reward of the trajectory or completion itself."""
    completion_id: str | None
    choice_index: int
    explanation: str | None
    weight: float | None
    """What it counts in the reward of the trajectory, where that is not set itself; None: not."""

    def __new__(
        cls,
        value: float,
        *,
        name: str | None = None,
        completion_id: str | None = None,
        choice_index: int = 0,
        explanation: str | None = None,
        weight: float | None = None,
    ) -> Reward:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            about = "reward" if name is None else f"reward {name!r}"
            raise ValueError(
                f"{about}: expected a finite number, got {value!r}; do not set it while it is "
                f"not known"
            )
        if weight is not None and (
            name is None
            or completion_id is not None
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
        ):
            raise ValueError(
                f"reward {name!r}: expected a weight only for a named reward of the trajectory, "
                f"and a finite number, got {weight!r}"
            )
        reward = super().__new__(cls, number)
        reward.weight = weight
        reward.name = name
        reward.completion_id = completion_id
        reward.choice_index = choice_index
        reward.explanation = explanation
        return reward

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return (float(self),), fields

    @property
    def key(self) -> RewardKey:
        return self.name, self.completion_id, self.choice_index

    def to_dict(self) -> dict[str, Json]:
        """JSON fields; those that say nothing are left out."""
        fields: dict[str, Json] = {"value": float(self), "name": self.name}
        fields |= {"completion_id": self.completion_id, "explanation": self.explanation}
        fields["weight"] = self.weight
        if self.choice_index:
            fields["choice_index"] = self.choice_index
        return {key: value for key, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Reward:
        fields = dict(data)
        return cls(fields.pop("value"), **fields)
