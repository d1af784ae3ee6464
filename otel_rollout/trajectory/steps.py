"""Steps: a trajectory as pairs of one model call and its outcome in the environment.

The steps of a captured trajectory are a view, one per completion. An agent may also build them by
hand, as agents of other frameworks do; in a workflow such a step gets the completion of its call.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.fixed import Fixed
from otel_rollout.trajectory.reward import AllRewards, Reward
from otel_rollout.wire import Json, dumps, loads, texts_of


@dataclass
class Action:
    """An action of an agent that is more than a text."""

    action: Any = None
    """The action, any object; recorded as JSON, or as its text."""


CallKey = tuple[str, int]
"""Span id and choice index: identifies one sampled reply in every copy of it."""


@dataclass(slots=True, eq=False, repr=False)
class _StepFields(Fixed):
    """The fields of a step, each declared once; `Step` has what follows from them."""

    chat_completions: InitVar[Iterable[dict[str, Any]]] = ()
    completion: Completion | None = None
    """The captured call. None: none was found."""
    thought: str = ""
    """Reasoning that the agent stored; "" if it stored none."""
    action: Any = None
    """The agent's action. None: not set."""
    observation: Any = None
    """The environment's observation before the call. None: not set."""
    model_response: str = ""
    """Text of the reply; "" if it has none."""
    model_output: Any = None
    """Any object that the agent keeps with the step; not recorded."""
    info: dict[str, Any] = None  # type: ignore[assignment]
    """Further values of the environment, by name."""
    reward: InitVar[float] = 0.0
    done: bool = False
    """True if the environment ended with this step."""
    raw_reward: float | None = None
    """`reward` before it was shaped. None: not shaped."""
    mc_return: float = 0.0
    """Discounted sum of the rewards from here on; 0.0 unless `gamma` is above 0."""
    scored: InitVar[bool] = True
    missing: CallKey | None = field(default=None, init=False)
    """Key of the recorded call whose completion is not found yet. None: nothing is missing."""
    _conversation: list[dict[str, Any]] = field(init=False)
    _reward: float = field(init=False)
    _scored: bool = field(init=False)
    _rewards: AllRewards | None = field(default=None, init=False)
    """The store of the completion's reward. None: the step keeps its reward itself."""

    def __post_init__(
        self, chat_completions: Iterable[dict[str, Any]], reward: float, scored: bool
    ) -> None:
        # Copies, because the agent goes on to change its list and messages.
        self._conversation = [copy.copy(message) for message in chat_completions]
        self._reward, self._scored = reward, scored
        self.info = {} if self.info is None else self.info


class Step(_StepFields):
    """One model call and its outcome.

    A step of a captured trajectory is a view of one completion: both have the same reward, wherever
    it is set. A step that is built by hand has a reward of its own.
    """

    __slots__ = ()

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        """The conversation, including the model's message."""
        if not self._conversation and self.completion is not None:
            self._conversation = conversation(self.completion)
        return self._conversation

    @chat_completions.setter
    def chat_completions(self, messages: list[dict[str, Any]]) -> None:
        self._conversation = messages

    @property
    def reward(self) -> float:
        """The reward; 0.0 if it is not `scored`."""
        if self._rewards is None or self.completion is None:
            return self._reward
        found = self.completion.reward
        return 0.0 if found is None else float(found)

    @reward.setter
    def reward(self, value: float) -> None:
        self._reward, self._scored = value, True
        if self._rewards is not None and self.completion is not None:
            self._rewards.put(
                Reward(
                    value,
                    completion_id=self.completion.id,
                    choice_index=self.completion.choice_index,
                )
            )

    @property
    def scored(self) -> bool:
        """False for the view of a completion that has no reward, until one is set."""
        if self._rewards is None or self.completion is None:
            return self._scored
        return self.completion.reward is not None

    @property
    def call_key(self) -> CallKey | None:
        """Span id and choice index of its captured call. None: it has none."""
        return None if self.completion is None else call_key(self.completion)

    @property
    def is_empty(self) -> bool:
        """True if its model call was never made."""
        return self.completion is None and not self.chat_completions and not self.model_response

    def show(self, completion: Completion) -> None:
        """Make this step a view of a captured completion and its reward."""
        self.completion, self._rewards = completion, completion.rewards
        self.model_response = text_of(completion)

    def find(self, completions: Mapping[CallKey, Completion]) -> None:
        """Take the completion of its call from these, as it is after the rollout."""
        key = self.call_key or self.missing
        found = completions.get(key) if key is not None else None
        if found is not None:
            if self.completion is None:
                self.model_response = text_of(found)
            self.completion, self.missing = found, None

    def to_dict(self) -> dict[str, Json]:
        """JSON fields; other values as text, defaults are left out."""
        own: dict[str, Json] = {}
        if (key := self.call_key or self.missing) is not None:
            own["completion"] = list(key)
        for name, default in _DEFAULTS.items():
            if name in _REPLIES and self.completion is not None:
                continue  # the completion has it
            value = getattr(self, name)
            if not _is(value, default):
                own[name] = json_of(value)
        return own

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Step:
        """The step that `to_dict` described; the completion that it names is `missing`."""
        fields = dict(data)
        named = fields.pop("completion", None)
        step = cls(**fields)
        step.missing = (named[0], named[1]) if named else None
        return step

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Step({', '.join(f'{name}={getattr(self, name)!r}' for name in _COMPARED)})"


def call_key(completion: Completion) -> CallKey:
    """The key that identifies one sampled reply in its trace."""
    return completion.span_id, completion.choice_index


_REPLIES = ("chat_completions", "model_response")
_WRITTEN = (
    *("chat_completions", "thought", "action", "observation", "model_response", "info"),
    *("reward", "done", "raw_reward", "mc_return", "scored"),
)
_DEFAULTS = {name: getattr(Step(), name) for name in _WRITTEN}
_COMPARED = ("completion", "model_output", *_DEFAULTS)


def _is(value: Any, default: Any) -> bool:
    """True if the value equals its default; other types (arrays) are not compared."""
    return type(value) is type(default) and bool(value == default)


def json_of(value: Any) -> Json:
    """The value as JSON, or its text if it is no JSON. Never raises."""
    try:
        return _json_of(value)
    except Exception:  # objects of the user may raise anything; RecursionError too
        return _shown(value)


def _json_of(value: Any) -> Json:
    try:
        return loads(dumps(value))
    except (TypeError, ValueError):
        pass
    if isinstance(value, Action):
        return _json_of(value.action)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _json_of(getattr(value, item.name)) for item in dataclasses.fields(value)
        }
    if hasattr(value, "model_dump"):
        return _json_of(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): _json_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_of(item) for item in value]
    if hasattr(value, "tolist"):  # a number or an array of NumPy or torch
        return _json_of(value.tolist())
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def conversation(completion: Completion) -> list[dict[str, Any]]:
    """The messages of a call, ending with the model's own."""
    message = completion.message
    return completion.request_messages + ([message] if message else [])


def text_of(completion: Completion) -> str:
    """The text of a sampled message, without its reasoning; empty where it has none."""
    return "".join(texts_of(completion.message))
