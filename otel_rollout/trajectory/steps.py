"""Steps: a trajectory as the environment saw it, one model call and what came of it at a time.

Of a captured trajectory they are a view, one per completion. An agent may also build them by hand,
as agents of other frameworks do; where a step's model call was captured, `tie` finds it by what was
said, and the step is that completion's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import Json, MessagePath, dumps, extend, loads


@dataclass
class Action:
    """What an agent did, where that is not simply text."""

    action: Any = None


@dataclass
class Step:
    """One model call and what came of it."""

    _conversation: list[dict[str, Any]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    chat_completions: list[dict[str, Any]] = field(default_factory=list)
    """The conversation, the model's message included, of a step that was built by hand.

    What the step is made with is copied: an agent goes on with its list.
    """
    completion: Completion | None = None
    """The captured call, if there is one."""
    thought: str = ""
    action: Any = None
    observation: Any = None
    model_response: str = ""
    model_output: Any = None
    """What the caller keeps with the step; it is not recorded."""
    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    raw_reward: float | None = None
    """`reward` before it was shaped; None while it is not."""
    mc_return: float = 0.0
    """Discounted sum of the rewards from here on, where that was asked for."""
    scored: bool = True
    """False for the view of a completion that has no reward, until one is set."""

    def __post_init__(self) -> None:
        self._conversation = [copy.copy(message) for message in self._conversation]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "reward":
            object.__setattr__(self, "scored", True)

    @property
    def is_empty(self) -> bool:
        """Whether its model call was never made."""
        return self.completion is None and not self.chat_completions and not self.model_response

    def to_dict(self) -> dict[str, Json]:
        """JSON fields; what is no JSON is there as its text, what says nothing is left out."""
        own: dict[str, Json] = {}
        if self.completion is not None:
            own["completion"] = [self.completion.span_id, self.completion.choice_index]
        for name in _FIELDS:
            if name in _SAID and self.completion is not None:
                continue  # it is in the completion
            value = getattr(self, name)
            if not _is(value, _DEFAULTS[name]):
                own[name] = json_of(value)
        return own

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Json], completions: Mapping[tuple[str, int], Completion]
    ) -> Step:
        """The step that `to_dict` described, tied to the completion that it names."""
        fields = dict(data)
        named = fields.pop("completion", None)
        completion = completions.get((named[0], named[1])) if named else None
        step = cls(**fields, completion=completion)
        if completion is not None:
            step.model_response = _text(completion)
        return step


def _said(step: Step) -> list[dict[str, Any]]:
    if not step._conversation and step.completion is not None:
        step._conversation = conversation(step.completion)
    return step._conversation


def _say(step: Step, messages: list[dict[str, Any]]) -> None:
    step._conversation = messages


# Of a captured step it is the whole conversation again: made when somebody asks for it.
Step.chat_completions = property(_said, _say)  # type: ignore[assignment]

_SAID = ("chat_completions", "model_response")
_FIELDS = (
    "chat_completions",
    "thought",
    "action",
    "observation",
    "model_response",
    "info",
    "reward",
    "done",
    "raw_reward",
    "mc_return",
    "scored",
)
_DEFAULTS = {
    item.name: item.default_factory() if callable(item.default_factory) else item.default
    for item in dataclasses.fields(Step)
}


def _is(value: Any, default: Any) -> bool:
    """Whether the value says nothing more than its default; arrays compare in ways of their own."""
    return type(value) is type(default) and bool(value == default)


def json_of(value: Any) -> Json:
    """The value as JSON would carry it; its text where it cannot. Never raises."""
    try:
        return _json_of(value)
    except Exception:  # whatever objects of the user's do; RecursionError too
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
    """The messages of a call, the model's own at the end."""
    message = completion.message
    return completion.request_messages + ([message] if message else [])


def steps_of(completions: Iterable[Completion]) -> list[Step]:
    """The view of a captured trajectory: a step for each completion that said something."""
    return [
        Step(
            completion=completion,
            model_response=_text(completion),
            reward=0.0 if completion.reward is None else float(completion.reward),
            scored=completion.reward is not None,
        )
        for completion in completions
        if completion.items
    ]


def tie(steps: Sequence[Step], completions: Iterable[Completion]) -> None:
    """Give each step that was built by hand the captured call that it is of.

    By the conversation in visible form; of equal ones the first that no step has. A step whose
    call was not captured stays as it is.
    """
    taken = {id(step.completion) for step in steps if step.completion is not None}
    by_path: dict[bytes, list[Completion]] = {}
    by_prompt: dict[tuple[bytes, str], list[Completion]] = {}
    for completion in completions:
        if not completion.items or completion.path is None or id(completion) in taken:
            continue
        by_path.setdefault(completion.path.key, []).append(completion)
        prompt = completion.prompt.key if completion.prompt else b""
        by_prompt.setdefault((prompt, _text(completion)), []).append(completion)
    keys = _Keys()
    for step in steps:
        if step.completion is not None:
            continue
        messages = _until_reply(step.chat_completions)
        found = _untaken(by_path.get(keys.of(messages)), taken) if messages else None
        if found is None and step.model_response:
            prompt = keys.of(step.chat_completions)
            found = _untaken(by_prompt.get((prompt, step.model_response)), taken)
        if found is not None:
            taken.add(id(found))
            step.completion = found


class _Keys:
    """Keys of conversations; what one begins with as the one before is not looked at again."""

    def __init__(self) -> None:
        self._messages: Sequence[Json] = ()
        self._paths: list[MessagePath] = []

    def of(self, messages: Sequence[Json]) -> bytes:
        same = 0
        for message, before in zip(messages, self._messages, strict=False):
            if message is not before and message != before:
                break
            same += 1
        paths = self._paths[:same]
        for message in messages[same:]:
            parent = paths[-1] if paths else None
            try:
                paths.append(extend(parent, message))
            except TypeError:  # objects of the client's, say
                paths.append(extend(parent, json_of(message)))
        self._messages, self._paths = messages, paths
        return paths[-1].key if paths else b""


def _untaken(candidates: list[Completion] | None, taken: set[int]) -> Completion | None:
    return next((c for c in candidates or () if id(c) not in taken), None)


def _until_reply(messages: Sequence[Json]) -> Sequence[Json]:
    """The conversation up to the last message of the model: behind it is what came of it."""
    for position in range(len(messages), 0, -1):
        message = messages[position - 1]
        mapped = isinstance(message, Mapping)
        role = message.get("role") if mapped else getattr(message, "role", None)
        if role == "assistant":
            return messages[:position]
    return ()


def _text(completion: Completion) -> str:
    content = (completion.message or {}).get("content")
    return content if isinstance(content, str) else ""
