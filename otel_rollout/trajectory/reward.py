"""Rewards: how well something went, kept in one place for each trajectory.

Every reward of a trajectory, those of single completions included, is in its `AllRewards`.
Completions, steps and the named view read and write there; nobody keeps a copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, get_type_hints

from otel_rollout.wire import Json

RewardKey = tuple["str | None", "str | None", int]
"""Identity of a reward in its trajectory: name, completion id and choice index.

The name is None for the reward of the trajectory or completion itself; the completion id is None
for a reward of the trajectory.
"""


class Reward(float):
    """A score, as a float that also knows what it is about.

    Without `completion_id` it is a reward of the trajectory, with it a step reward.
    """

    __slots__ = ("choice_index", "completion_id", "explanation", "label", "name", "weight")

    name: str | None
    """None for the reward of the trajectory or completion itself."""
    completion_id: str | None
    """Response id of the completion that it is about; None: about the whole trajectory."""
    choice_index: int
    """Choice of that response; 0 where it has only one."""
    explanation: str | None
    """Reason for the score, in words; None: not given."""
    label: str | None
    """The score in a word, such as `pass` or `relevant`; None: not given."""
    weight: float | None
    """Weight in `Trajectory.reward` while no explicit reward is set. None: not counted."""

    def __new__(
        cls,
        value: float,
        *,
        name: str | None = None,
        completion_id: str | None = None,
        choice_index: int = 0,
        explanation: str | None = None,
        weight: float | None = None,
        label: str | None = None,
    ) -> Reward:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
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
        reward.label = label
        for field, kind in _KINDS.items():
            if not isinstance(found := getattr(reward, field), kind):
                raise ValueError(f"reward {name!r}: expected {field} as {kind}, got {found!r:.80}")
        return reward

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return (float(self),), fields

    @property
    def key(self) -> RewardKey:
        """Identity in the trajectory: a later reward with the same key replaces this one."""
        return self.name, self.completion_id, self.choice_index

    def to_dict(self) -> dict[str, Json]:
        """JSON fields; None and choice 0 are left out."""
        fields: dict[str, Json] = {"value": float(self), "name": self.name}
        fields |= {"completion_id": self.completion_id, "explanation": self.explanation}
        fields |= {"weight": self.weight, "label": self.label}
        if self.choice_index:
            fields["choice_index"] = self.choice_index
        return {key: value for key, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Reward:
        """The reward that `to_dict` described."""
        fields = dict(data)
        return cls(fields.pop("value"), **fields)


_KINDS = {name: kind for name, kind in get_type_hints(Reward).items() if name != "weight"}
"""The type of each field; that of the weight is checked with its value."""


def texts_of(value: float) -> dict[str, Any]:
    """The texts of a reward that is set anew; none of a plain number."""
    return {key: getattr(value, key, None) for key in ("explanation", "label")}


OnChange = Callable[[RewardKey, "Reward | None"], None]
"""Called with each reward that is set; with None for one that was removed."""


class AllRewards(Mapping[RewardKey, Reward]):
    """All rewards of one trajectory by key, in the order in which they were set.

    Any thread may set one; iteration is over a copy.
    """

    def __init__(self, rewards: Mapping[RewardKey, Reward] | None = None) -> None:
        self.on_change: OnChange | None = None
        """Set once the rollout has ended: puts a late reward on its trace."""
        self._by_key: dict[RewardKey, Reward] = {}
        self._of_completions: dict[tuple[str, int], dict[RewardKey, Reward]] = {}
        self._held_back: dict[RewardKey, None] | None = None
        self._lock = threading.RLock()
        for reward in (rewards or {}).values():
            self.put(reward)

    @classmethod
    def of(cls, rewards: Mapping[RewardKey, Reward] | None) -> AllRewards:
        """These rewards themselves, or a store of them."""
        return rewards if isinstance(rewards, AllRewards) else cls(rewards)

    def put(self, reward: Reward) -> None:
        """Set a reward; one with the same key is replaced, and the new one is the last in order."""
        key = reward.key
        with self._lock:
            self._by_key.pop(key, None)
            self._by_key[key] = reward
            if reward.completion_id is not None:
                of_one = self._of_completions.setdefault(key[1:], {})  # type: ignore[arg-type]
                of_one.pop(key, None)
                of_one[key] = reward
        self._changed(key)

    def remove(self, key: RewardKey) -> None:
        """Make a reward unknown again; nothing happens where it is unknown already."""
        with self._lock:
            if self._by_key.pop(key, None) is None:
                return
            if key[1] is not None:
                del self._of_completions[key[1:]][key]  # type: ignore[index]
        self._changed(key)

    def join(self, rewards: AllRewards) -> None:
        """Add rewards that another process recorded; those that are set here stay."""
        added = [reward for reward in rewards.all() if reward.key not in self]
        on_change, self.on_change = self.on_change, None  # they are on the trace already
        for reward in added:
            self.put(reward)
        self.on_change = on_change

    def _changed(self, key: RewardKey) -> None:
        if self._held_back is not None:
            self._held_back[key] = None
        elif self.on_change is not None:
            self.on_change(key, self._by_key.get(key))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Report a reward that changes several times inside only once, as it is at the end."""
        self._held_back = {}
        try:
            yield
        finally:
            changed, self._held_back = self._held_back, None
            for key in changed:
                self._changed(key)

    def of_completion(self, completion_id: str, choice_index: int) -> Reward | None:
        """The step reward of a completion that was set last, whatever its name; None: unscored."""
        found = self._of_completions.get((completion_id, choice_index))
        return list(found.values())[-1] if found else None

    @property
    def total(self) -> float | None:
        """The trajectory's reward: the explicit one, else the weighted sum of its named ones.

        None where neither an explicit reward nor a weighted one is set.
        """
        explicit = self._by_key.get((None, None, 0))
        if explicit is not None:
            return explicit
        weighted = [reward * reward.weight for reward in self.all() if reward.weight is not None]
        return math.fsum(weighted) if weighted else None

    @property
    def has_own(self) -> bool:
        """Whether the trajectory itself was scored, not only completions of it."""
        return any(reward.completion_id is None for reward in self.all())

    def all(self) -> list[Reward]:
        """Every reward, in the order in which they were set."""
        with self._lock:
            return list(self._by_key.values())

    def __reduce__(self) -> tuple[type[AllRewards], tuple[dict[RewardKey, Reward]]]:
        """Copies and pickles are on no trace."""
        return AllRewards, (dict(self),)

    def __getitem__(self, key: RewardKey) -> Reward:
        return self._by_key[key]

    def __iter__(self) -> Iterator[RewardKey]:
        with self._lock:
            return iter(list(self._by_key))

    def __len__(self) -> int:
        return len(self._by_key)


class Rewards(MutableMapping[str, Reward]):
    """The named rewards of a trajectory, by name; a view of its `AllRewards`."""

    __slots__ = ("_rewards",)

    def __init__(self, rewards: AllRewards) -> None:
        self._rewards = rewards

    def __getitem__(self, name: str) -> Reward:
        return self._rewards[name, None, 0]

    def __setitem__(self, name: str, value: float) -> None:
        if not isinstance(name, str):
            raise ValueError(f"trajectory.rewards: expected a name (str), got {name!r}")
        self._rewards.put(Reward(value, name=name, **texts_of(value)))

    def __delitem__(self, name: str) -> None:
        self._rewards.remove(self[name].key)

    def __iter__(self) -> Iterator[str]:
        return iter(
            [
                reward.name
                for reward in self._rewards.all()
                if reward.name is not None and reward.completion_id is None
            ]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr({name: float(reward) for name, reward in self.items()})
