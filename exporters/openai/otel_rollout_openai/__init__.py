"""Trajectories as OpenAI fine-tuning files: supervised, preferences, reinforcement.

Each assistant message says whether it is learned from (`weight`), so a conversation is handed over
as it was: what the model sampled trains in exactly one row, anything else is context. What the
format has no place for is an ExportError; nothing is left out without being asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from otel_rollout import (
    ConfigurationError,
    ExportError,
    History,
    HistoryItem,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import Json, JsonRows, check_choice, copy_json

__all__ = ["OpenaiRows", "to_openai_dpo", "to_openai_rft", "to_openai_sft"]

Format = Literal["sft", "dpo", "rft"]
Reasoning = Literal["error", "drop"]

_KEYS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "refusal", "tool_calls"),
    "tool": ("role", "content", "tool_call_id"),
}
_REASONING = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")


def to_openai_sft(
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float | None = None,
    reasoning: Reasoning = "error",
) -> list[dict[str, Json]]:
    """Rows for supervised fine-tuning: {"messages", "tools", "parallel_tool_calls"}, per history.

    weight, on each assistant message: 1 where it is learned from here, 0 where it was not sampled
    or trains in another row. A row ends with its last message that trains.
    min_reward: leave out what is scored lower or not at all. A rollout that failed without being
    scored is always left out.
    reasoning: the format has no place for it; "drop" leaves it out of what the model said.
    """
    check_choice("reasoning", reasoning, Reasoning)
    rows: list[dict[str, Json]] = []
    for trajectory in trajectories:
        if not _wanted(trajectory, min_reward):
            continue
        for history in trajectory.histories:
            items = _up_to(history, lambda item: item.trainable)
            if not items:
                continue
            messages = _messages(trajectory, history, items, reasoning)
            for message, item in zip(messages, items, strict=True):
                if message["role"] == "assistant":
                    message["weight"] = int(item.trainable)
            rows.append({"messages": messages, **_settings(history)})
    return rows


def to_openai_dpo(
    group: TrajectoryGroup | Iterable[Trajectory], *, reasoning: Reasoning = "error"
) -> list[dict[str, Json]]:
    """Rows for preference fine-tuning: {"input", "preferred_output", "non_preferred_output"}.

    One row of a group: the best against the worst of its scored trajectories, the first where
    several are as good; none where all are equally good. ExportError where they are not single
    replies to one conversation, which is all that the format takes.
    """
    check_choice("reasoning", reasoning, Reasoning)
    if not isinstance(group, TrajectoryGroup):
        group = TrajectoryGroup.of(group)
    scored = [(t.reward, t) for t in group if t.reward is not None]
    if len({reward for reward, _ in scored}) < 2:
        return []
    best = max(scored, key=lambda pair: pair[0])[1]
    worst = min(scored, key=lambda pair: pair[0])[1]
    (asked, good, settings), (same, bad, same_settings) = (
        _asked_and_reply(trajectory, reasoning) for trajectory in (best, worst)
    )
    if (asked, settings) != (same, same_settings):
        raise ExportError(
            f"{_named(best)} and {_named(worst)} differ before their last replies, and a "
            f"preference is between two replies to one conversation. Give each task a group_id of "
            f"its own; for agents of several turns use to_openai_sft"
        )
    return [
        {
            "input": {"messages": asked, **settings},
            "preferred_output": [good],
            "non_preferred_output": [bad],
        }
    ]


def to_openai_rft(
    trajectories: Iterable[Trajectory] | TrajectoryGroup, *, fields: Sequence[str] | None = None
) -> list[dict[str, Json]]:
    """Rows for reinforcement fine-tuning: {"messages", "tools"} and what the grader needs.

    The prompt of each rollout's first call, each once; rollouts of a group share it. fields: names
    of `trajectory.metadata` that the row carries for the grader; without it all there are.
    ExportError where a prompt does not end with the user, or a field is missing.
    """
    members = list(trajectories)
    if isinstance(trajectories, TrajectoryGroup):
        members += trajectories.failures
    rows: list[dict[str, Json]] = []
    for trajectory in members:
        histories = [history for history in trajectory.histories if history.side_call is None]
        if not histories:
            continue
        history = histories[0]
        completion = history.completions[0]
        items = [HistoryItem(message, None, False) for message in completion.request_messages]
        messages = _messages(trajectory, history, items, "error")
        if not messages or messages[-1]["role"] != "user":
            last = messages[-1]["role"] if messages else "nothing"
            raise ExportError(
                f"{_named(trajectory)}: expected a prompt that ends with a user's message, got "
                f"{last!r}; leave it out"
            )
        row = {"messages": messages, **_settings(history), **_fields(trajectory, fields)}
        if row not in rows:
            rows.append(row)
    return rows


@dataclass(frozen=True)
class OpenaiRows(JsonRows):
    """The exporter `openai`: JSON lines to upload for fine-tuning.

    format: "sft" (`to_openai_sft`), "dpo" (`to_openai_dpo`) or "rft" (`to_openai_rft`). The other
    options are those of that function; one of another function is an error.
    min_reward: "sft" leaves out what is scored lower, or not at all; not set: nothing.
    reasoning: "error" (the default) refuses reasoning in "sft" and "dpo", for which the format has
    no place; "drop" leaves it out.
    fields: names of the metadata that "rft" hands to the grader; not set: all there are.
    """

    format: Format = "sft"
    min_reward: float | None = None
    reasoning: Reasoning | None = None
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._options():
            if name not in _OPTIONS[self.format]:
                raise ConfigurationError(
                    f"exporter 'openai', format {self.format!r}: expected the options "
                    f"{', '.join(_OPTIONS[self.format])}, got {name!r}"
                )

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """The rows of a group. ExportError for what the format cannot carry."""
        yield from _FUNCTIONS[self.format](group, **self._options())

    def _options(self) -> dict[str, Any]:
        """The options that were set; the others have the defaults of the format's function."""
        names = dict.fromkeys(name for names in _OPTIONS.values() for name in names)
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_FUNCTIONS: dict[str, Callable[..., list[dict[str, Json]]]] = {
    "sft": to_openai_sft,
    "dpo": to_openai_dpo,
    "rft": to_openai_rft,
}
_OPTIONS = {"sft": ("min_reward", "reasoning"), "dpo": ("reasoning",), "rft": ("fields",)}


def _wanted(trajectory: Trajectory, min_reward: float | None) -> bool:
    if min_reward is not None:
        return trajectory.reward is not None and trajectory.reward >= min_reward
    return trajectory.reward is not None or trajectory.status not in ("error", "cancelled")


def _up_to(history: History, ends: Callable[[HistoryItem], bool]) -> list[HistoryItem]:
    """Its items up to the last one that is such."""
    found = [number for number, item in enumerate(history.items, 1) if ends(item)]
    return history.items[: found[-1]] if found else []


def _asked_and_reply(
    trajectory: Trajectory, reasoning: Reasoning
) -> tuple[list[Json], Json, dict[str, Json]]:
    """The conversation before the last reply, that reply, and what it was asked with."""
    histories = [history for history in trajectory.histories if history.side_call is None]
    items = _up_to(histories[0], lambda item: item.trainable) if len(histories) == 1 else []
    if not items:
        raise ExportError(
            f"{_named(trajectory)} has {len(histories)} histories with a reply to learn from: "
            f"expected one; leave it out"
        )
    messages = _messages(trajectory, histories[0], items, reasoning)
    return messages[:-1], messages[-1], _settings(histories[0])


def _settings(history: History) -> dict[str, Json]:
    """Tools, and whether several may be called at once, where the requests said so."""
    settings: dict[str, Json] = {}
    if history.tools:
        settings["tools"] = copy_json(history.tools)
        parallel = history.completions[0].sampling.get("parallel_tool_calls")
        if isinstance(parallel, bool):
            settings["parallel_tool_calls"] = parallel
    return settings


def _messages(
    trajectory: Trajectory, history: History, items: Sequence[HistoryItem], reasoning: Reasoning
) -> list[dict[str, Json]]:
    for completion in history.completions:
        path = completion.exchange.path.split("?")[0]
        if not path.endswith("/chat/completions"):
            raise ExportError(
                f"{_named(trajectory)}: the completion {completion.id!r} is of {path}, and the "
                f"format has the messages of chat completions; leave it out"
            )
    return [_message(trajectory, item, reasoning) for item in items]


def _message(trajectory: Trajectory, item: HistoryItem, reasoning: Reasoning) -> dict[str, Json]:
    """The message with the keys that the format has, and no others."""
    message = item.message
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _KEYS:
        raise ExportError(
            f"{_named(trajectory)}: expected messages of {', '.join(_KEYS)}, got "
            f"{_short(message)}; leave it out"
        )
    said = item.completion.message if item.completion is not None else message
    thought = any((said or {}).get(key) or message.get(key) for key in _REASONING)
    if thought and reasoning == "error":
        raise ExportError(
            f"{_named(trajectory)}: the model's reasoning is part of what it said, and the format "
            f"has no place for it: {_short(message)}; reasoning='drop' leaves it out"
        )
    calls = message.get("tool_calls") or ()
    for key, there in (
        ("audio", message.get("audio")),
        ("function_call", message.get("function_call")),
        ("custom tools", any(call.get("type", "function") != "function" for call in calls)),
    ):
        if there:
            raise ExportError(
                f"{_named(trajectory)}: the format has no place for {key!r} in "
                f"{_short(message)}; leave it out"
            )
    kept = {key: copy_json(message[key]) for key in _KEYS[role] if message.get(key) is not None}
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
        if "refusal" not in kept:
            kept.setdefault("content", "")
    return kept


def _fields(trajectory: Trajectory, names: Sequence[str] | None) -> dict[str, Json]:
    metadata = trajectory.metadata
    wanted = list(metadata) if names is None else names
    for name in wanted:
        if name not in metadata:
            there = ", ".join(metadata) or "none"
            raise ExportError(
                f"{_named(trajectory)} has no metadata {name!r} for the grader; it has {there}"
            )
        if name in ("messages", "tools", "parallel_tool_calls"):
            raise ExportError(
                f"{_named(trajectory)}: metadata {name!r} is a name of the format's own; choose "
                f"others (fields=...)"
            )
    return {name: copy_json(metadata[name]) for name in wanted}


def _named(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.id!r} ({trajectory.name})"


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
