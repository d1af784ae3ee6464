"""Conversations in the shape that verl renders: texts, and calls of tools with their arguments.

verl trains every reply of a conversation, to its end of turn. So a conversation is a row only if
every reply in it was sampled there, trains there, and was not truncated; messages after the last of
those are left out. Anything else has to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from otel_rollout import (
    Completion,
    ExportError,
    History,
    HistoryItem,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import Json, check_choice, dumps, loads, normalised_content

Untrained = Literal["error", "skip", "train"]


def to_verl_sft(
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float | None = None,
    untrained: Untrained = "error",
) -> list[dict[str, Any]]:
    """A conversation for each history that has something to learn, in order.

    messages: role and content (a text) each; tool_calls (arguments are the JSON text that was
    sampled), tool_call_id, name, reasoning_content where there are any. tools: their definitions,
    or None. enable_thinking: what the request said to the chat template, or None. trajectory_id,
    reward.

    min_reward: only trajectories that have a reward of at least that.
    untrained: what to do with a history in which verl would train a reply that is not to be
    trained there: one that another history trains, that a length limit truncated, that was
    written or edited by the agent, or was replayed without its reasoning. "error" refuses, "skip"
    leaves the history out, "train" trains it.

    ExportError names what a conversation of verl cannot hold.
    """
    check_choice("untrained", untrained, Untrained)
    return [
        row
        for trajectory in trajectories
        if _is_good(trajectory, min_reward)
        for history in trajectory.histories
        for row in _conversation(trajectory, history, untrained)
    ]


def _is_good(trajectory: Trajectory, min_reward: float | None) -> bool:
    if min_reward is None:
        return True
    return trajectory.reward is not None and trajectory.reward >= min_reward


def _conversation(
    trajectory: Trajectory, history: History, untrained: Untrained
) -> Iterator[dict[str, Any]]:
    faults = [_fault(item) for item in history.items]
    ends = [n for n, item in enumerate(history.items, 1) if item.completion and not faults[n - 1]]
    if not ends:
        return
    items = history.items[: ends[-1]]
    fault = next(filter(None, faults[: ends[-1]]), None)
    if fault and untrained == "error":
        raise ExportError(
            f"trajectory {trajectory.id!r}: verl trains every reply of a conversation, and in that "
            f"which ends with completion {_last(items).id!r} {fault}; untrained='skip' leaves such "
            f"conversations out, untrained='train' trains such replies too"
        )
    if fault and untrained == "skip":
        return
    where = f"trajectory {trajectory.id!r}"
    for completion in history.completions:
        _check_chat(completion, where)
    template = _last(items).sampling.get("chat_template_kwargs")
    thinking = template.get("enable_thinking") if isinstance(template, dict) else None
    yield {
        "messages": [
            _message(item.message, f"{where}, message {n}") for n, item in enumerate(items)
        ],
        "tools": history.tools,
        "enable_thinking": thinking if isinstance(thinking, bool) else None,
        "trajectory_id": trajectory.id,
        "reward": None if trajectory.reward is None else float(trajectory.reward),
    }


def _last(items: Sequence[HistoryItem]) -> Completion:
    completion = items[-1].completion
    assert completion is not None
    return completion


def _fault(item: HistoryItem) -> str | None:
    """The reason why a reply must not be trained here; None if it may, or is no reply."""
    completion = item.completion
    if completion is None:
        is_reply = isinstance(item.message, dict) and item.message.get("role") == "assistant"
        return "there is a reply that no model sampled" if is_reply else None
    if not item.trainable:
        return f"completion {completion.id!r} is context"
    if completion.truncated:
        return f"completion {completion.id!r} was cut at a length limit"
    if item.is_break:
        return f"completion {completion.id!r} was replayed without its reasoning"
    return None


def to_verl_prompts(
    group: TrajectoryGroup,
    *,
    data_source: str | None = None,
    ability: str = "",
    split: str = "train",
    ground_truth: str = "ground_truth",
    style: str = "rule",
) -> list[dict[str, Any]]:
    """The prompts of a task, each once: the messages of the first call of each of its rollouts.

    data_source (the name of the rollout, unless given), prompt (role and content, a text, each),
    ability, reward_model (style, ground_truth), extra_info (split, task_id). Failed rollouts count
    too; those inside other rollouts do not: what they are asked is no task.

    ground_truth: the metadata of the trajectory that holds it; None without, JSON text if it is
    no text.
    """
    rows: dict[str, dict[str, Any]] = {}
    for trajectory in (*group.trajectories, *group.failures):
        calls = [c for c in trajectory.completions if c.side_call is None]
        if trajectory.parent_id is not None or not calls:
            continue
        first = trajectory.main_start or calls[0]
        where = f"trajectory {trajectory.id!r}"
        _check_chat(first, where)
        prompt = [
            _message(message, f"{where}, message {n}", only_text=True)
            for n, message in enumerate(first.request_messages)
        ]
        truth = trajectory.metadata.get(ground_truth)
        row = {
            "data_source": data_source or trajectory.name,
            "prompt": prompt,
            "ability": ability,
            "reward_model": {
                "style": style,
                "ground_truth": truth if truth is None or isinstance(truth, str) else dumps(truth),
            },
            "extra_info": {"split": split, "task_id": trajectory.task_id},
        }
        rows.setdefault(dumps(prompt), row)
    return list(rows.values())


def _check_chat(completion: Completion, where: str) -> None:
    path = completion.exchange.path
    if not path.split("?")[0].endswith("/chat/completions"):
        raise ExportError(
            f"{where}, completion {completion.id!r}: verl renders messages of chat completions, "
            f"this is of {path!r}; export its tokens (to_verl_outputs)"
        )


def _message(message: Json, where: str, *, only_text: bool = False) -> dict[str, Json]:
    """The message with a text as content, and without fields that are not set."""
    content = normalised_content(message.get("content"))
    if not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, dict) else "text" for part in content]
        raise ExportError(f"{where}: verl's content is one text, got parts {kinds}")
    row: dict[str, Json] = {"role": message["role"], "content": content}
    for names, read in _FIELDS:
        value = next((message[name] for name in names if message.get(name)), None)
        if value:
            if only_text or read is None:
                raise ExportError(f"{where}: a prompt of verl has no place for its {names[0]!r}")
            row[names[0]] = read(value, where)
    return row


def _text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise ExportError(f"{where}: expected a text, got {str(value)[:80]!r}")
    return value


def _tool_calls(calls: Json, where: str) -> list[dict[str, Json]]:
    rows: list[dict[str, Json]] = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict):
            raise ExportError(f"{where}: verl knows calls of functions, got {call.get('type')!r}")
        arguments = function.get("arguments") or ""
        rows.append(
            {
                "id": call.get("id") or "",
                "type": "function",
                "function": {
                    "name": function.get("name") or "",
                    "arguments": arguments if isinstance(arguments, str) else dumps(arguments),
                },
            }
        )
    return rows


_FIELDS: tuple[tuple[tuple[str, ...], Callable[[Json, str], Json] | None], ...] = (
    (("tool_calls",), _tool_calls),
    (("tool_call_id",), _text),
    (("name",), _text),
    (("reasoning_content", "reasoning"), _text),
    (("refusal",), None),
    (("audio",), None),
    (("function_call",), None),
)


def with_objects(message: dict[str, Json], where: str) -> dict[str, Json]:
    """The message with the arguments of its calls as objects, as chat templates want them."""
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Json]] = []
    for call in message["tool_calls"]:
        text = call["function"]["arguments"]
        try:
            arguments = loads(text or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ExportError(
                f"{where}: the model called {call['function']['name']!r} with arguments that are "
                f"no JSON object, {text[:80]!r}; leave the trajectory out (min_reward=), or export "
                f"its tokens (to_verl_outputs)"
            )
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
