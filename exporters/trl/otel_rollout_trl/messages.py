"""Conversations for SFT, DPO, reward models and KTO, whose trainers render and tokenise messages.

A conversation is handed over only if the trainer learns from it exactly what the model sampled:
it has no way to be told of a message that is not to be learned from. Where that does not fit, each
reply can be a row of its own, after what the model was asked with. Tool arguments are objects,
since that is what chat templates render; on the wire they are text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from otel_rollout import Completion, ExportError, History, HistoryItem, Trajectory, TrajectoryGroup
from otel_rollout.export import Json, check_choice, loads
from otel_rollout_trl.names import named

Per = Literal["history", "completion"]
Context = Literal["error", "keep"]
Pairs = Literal["extremes", "all"]

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_NOT_RENDERED = ("refusal", "function_call", "audio")


def to_trl_sft(
    trajectories: Iterable[Trajectory], *, per: Per = "history", min_reward: float | None = None
) -> list[dict[str, Json]]:
    """Rows for SFTTrainer: conversations that it renders with the model's chat template.

    per="history": {"messages", "tools"} for each history that trains anything; for
    `assistant_only_loss=True`. ExportError where a message of the assistant was not sampled, or
    trains in another history: the format cannot tell those from the others.
    per="completion": {"prompt", "completion", "tools"} for each trainable completion, always
    exact, and longer: each row has its whole past.
    min_reward: leave out what is scored lower or not at all. A rollout that failed without being
    scored is always left out. Messages after the last reply are not handed over.
    """
    check_choice("per", per, Per)
    rows: list[dict[str, Json]] = []
    for trajectory in trajectories:
        if not _wanted(trajectory, min_reward):
            continue
        for history in _histories(trajectory):
            _check_api(trajectory, history)
            if per == "completion":
                rows += [
                    {
                        "prompt": _messages(trajectory, completion.request_messages),
                        "completion": _messages(trajectory, [completion.message]),
                        "tools": history.tools,
                    }
                    for completion in _trained(history)
                ]
            elif any(item.trainable for item in history.items):
                items = _whole(trajectory, history)
                rows.append({"messages": _messages(trajectory, items), "tools": history.tools})
    return rows


def to_trl_preferences(
    group: TrajectoryGroup | Iterable[Trajectory],
    *,
    pairs: Pairs = "extremes",
    context: Context = "error",
) -> list[dict[str, Json]]:
    """Rows for DPOTrainer and RewardTrainer: {"prompt", "chosen", "rejected", "tools"}.

    Of the scored trajectories of a group, the best against the worst ("extremes", the first where
    several are as good), or each against each that is worse ("all"); equal rewards make no pair.
    The prompt is what the first call was asked with, chosen and rejected all that came after it.
    context: these trainers learn from all of it, so what the model did not sample (a tool's
    result, a user's next turn) is refused, unless this is "keep".

    ExportError also where trajectories do not begin with the same prompt and tools, or have
    several histories.
    """
    check_choice("pairs", pairs, Pairs)
    check_choice("context", context, Context)
    if not isinstance(group, TrajectoryGroup):
        group = TrajectoryGroup.of(group)
    scored = [(trajectory.reward, trajectory) for trajectory in group]
    ranked = sorted(
        ((reward, trajectory) for reward, trajectory in scored if reward is not None),
        key=lambda pair: -pair[0],
    )
    if pairs == "extremes":
        worst = next((one for one in ranked if one[0] == ranked[-1][0]), None)
        chosen = [(ranked[0], worst)] if worst else []
    else:
        chosen = [(one, other) for n, one in enumerate(ranked) for other in ranked[n + 1 :]]
    rows: list[dict[str, Json]] = []
    for (reward, better), (less, worse) in chosen:
        if reward == less:
            continue
        (prompt, one, tools), (same, other, same_tools) = (
            _prompt_and_rest(trajectory, context) for trajectory in (better, worse)
        )
        if (prompt, tools) != (same, same_tools):
            raise ExportError(
                f"{named(better)} and {named(worse)} do not begin with the same prompt and tools: "
                f"a preference is between replies to one. Give each task a group_id of its own"
            )
        rows.append({"prompt": prompt, "chosen": one, "rejected": other, "tools": tools})
    return rows


def to_trl_kto(
    trajectories: Iterable[Trajectory], *, threshold: float, context: Context = "error"
) -> list[dict[str, Json]]:
    """Rows for KTOTrainer: {"prompt", "completion", "label", "tools"} of each scored trajectory.

    label: whether its reward is at least `threshold`. The rest is as in `to_trl_preferences`.
    """
    check_choice("context", context, Context)
    rows: list[dict[str, Json]] = []
    for trajectory in trajectories:
        reward = trajectory.reward
        if reward is None:
            continue
        prompt, rest, tools = _prompt_and_rest(trajectory, context)
        label = reward >= threshold
        rows.append({"prompt": prompt, "completion": rest, "label": label, "tools": tools})
    return rows


def _wanted(trajectory: Trajectory, min_reward: float | None) -> bool:
    if min_reward is not None:
        return trajectory.reward is not None and trajectory.reward >= min_reward
    failed = trajectory.status in ("error", "cancelled") and trajectory.reward is None
    return not failed


def _histories(trajectory: Trajectory) -> list[History]:
    """Its conversations, without side calls."""
    return [history for history in trajectory.histories if history.side_call is None]


def _trained(history: History) -> Iterator[Completion]:
    """The completions that train in it, each once: one of several items is one reply."""
    before = None
    for item in history.items:
        if item.trainable and item.completion is not None and item.completion is not before:
            before = item.completion
            yield item.completion


def _whole(trajectory: Trajectory, history: History) -> list[Json]:
    """Its messages up to the last reply, all of which train."""
    items = _up_to_last_reply(history.items)
    for item in items:
        if _role(item) == "assistant" and (not item.trainable or item.is_break):
            raise ExportError(
                f"{named(trajectory)}: the message {_short(item.message)} is the assistant's, and "
                f"is not to be trained here: {_untrained(item)}. SFTTrainer cannot be told; use "
                f"to_trl_sft(per='completion') or to_trl_sft_tokens"
            )
    return [item.message for item in items]


def _prompt_and_rest(
    trajectory: Trajectory, context: Context
) -> tuple[list[Json], list[Json], list[Json] | None]:
    """The messages of the first request, those that came after them, and the tools."""
    histories = _histories(trajectory)
    if len(histories) != 1:
        raise ExportError(
            f"{named(trajectory)} has {len(histories)} histories, and a preference is between "
            f"conversations: expected one. Leave it out"
        )
    (history,) = histories
    _check_api(trajectory, history)
    items = _up_to_last_reply(history.items)
    start = next((n for n, item in enumerate(items) if item.completion is not None), None)
    if start is None:
        raise ExportError(f"{named(trajectory)} has no reply: leave it out")
    for item in items[start:]:
        if item.trainable and not item.is_break:
            continue
        if item.completion is not None or context == "error":
            why = _untrained(item)
            raise ExportError(
                f"{named(trajectory)}: after the prompt is a message that is not to be trained, "
                f"{_short(item.message)}: {why}; the trainer would learn from it. "
                + ("Leave it out" if item.completion else "Leave it out, or take context='keep'")
            )
    messages = [item.message for item in items]
    return (
        _messages(trajectory, messages[:start]),
        _messages(trajectory, messages[start:]),
        history.tools,
    )


def _up_to_last_reply(items: Sequence[HistoryItem]) -> Sequence[HistoryItem]:
    ends = [number for number, item in enumerate(items, 1) if item.completion is not None]
    return items[: ends[-1]] if ends else ()


def _role(item: HistoryItem) -> Json:
    return item.message.get("role") if isinstance(item.message, Mapping) else None


def _check_api(trajectory: Trajectory, history: History) -> None:
    for completion in history.completions:
        path = completion.exchange.path.split("?")[0]
        if not path.endswith("/chat/completions"):
            raise ExportError(
                f"{named(trajectory)}: the completion {completion.id!r} is of {path}, and chat "
                f"templates render the messages of chat completions; use to_trl_sft_tokens, which "
                f"needs no template, or leave it out"
            )


def _untrained(item: HistoryItem) -> str:
    if item.is_break:
        return "its reasoning was sampled, and not sent back to the model"
    if item.completion is None:
        return "the model did not sample it"
    if item.completion.trainable:
        return "it trains in another history"
    if item.completion.side_call is not None:
        return f"it is a side call: {item.completion.side_call}"
    return f"its call ended as {item.completion.status!r}"


def _messages(trajectory: Trajectory, messages: Iterable[Json]) -> list[Json]:
    """The messages as chat templates take them: known keys, tool arguments as objects."""
    return [_message(trajectory, message) for message in messages]


def _message(trajectory: Trajectory, message: Json) -> dict[str, Json]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if (
        not isinstance(message, Mapping)
        or "role" not in message
        or not _is_text(content)
        or any(message.get(key) for key in _NOT_RENDERED)
    ):
        raise ExportError(
            f"{named(trajectory)}: expected chat messages with text, which chat templates render, "
            f"got {_short(message)}; use to_trl_sft_tokens, which needs no template, unless it has "
            f"images, sound or files: then leave it out"
        )
    rendered = {key: message[key] for key in _KEYS if message.get(key) is not None}
    rendered["content"] = _text(content)
    if isinstance(message.get("reasoning"), str):  # vLLM's name for it, which templates do not know
        rendered.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls") or []
    if calls:
        rendered["tool_calls"] = [_tool_call(trajectory, call) for call in calls]
    else:
        rendered.pop("tool_calls", None)
    return rendered


def _is_text(content: Json) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _text(content: Json) -> Json:
    """A single text part is its text; several stay parts, since templates join them as they do."""
    if isinstance(content, list) and len(content) == 1:
        return content[0]["text"]
    return content


def _tool_call(trajectory: Trajectory, call: Json) -> dict[str, Json]:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        parsed = loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None
    if not isinstance(function, Mapping) or not isinstance(parsed, dict):
        raise ExportError(
            f"{named(trajectory)}: the tool call {_short(call)} has arguments that are no JSON "
            f"object, and chat templates render objects; use to_trl_sft_tokens, or leave it out"
        )
    return {**call, "function": {**function, "arguments": parsed}}


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
