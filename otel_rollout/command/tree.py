"""A trajectory as text for people: its messages, which of them train, rewards and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from otel_rollout.trajectory import Completion, History, HistoryItem, Trajectory
from otel_rollout.wire import Json, dumps, reasoning_of, shown_calls, shown_part, tool_name

_SHORTEST = 20
_controls = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def format_trajectory(trajectory: Trajectory, *, width: int | None = 80) -> str:
    """The trajectory as a tree of its histories.

    `●` is a completion that trains here, `○` one that does not (it trains in another history, or
    is not whole). Lines are truncated at `width` characters; None truncates nothing and keeps line
    breaks. Control characters are shown as escapes.
    """
    return "\n".join(_lines(trajectory, width))


def _lines(trajectory: Trajectory, width: int | None) -> Iterator[str]:
    yield _line("", f"{trajectory.name or 'rollout'}  {trajectory.id}", width)
    about = (
        ("task", trajectory.task_id),
        ("group", trajectory.group_id),
        ("inside", trajectory.parent_id),
    )
    ids = "".join(f"  {name} {value}" for name, value in about if value is not None)
    yield _line("├─ ", _status(trajectory), width, ids)
    histories = trajectory.histories
    for number, history in enumerate(histories, 1):
        tools = ", ".join(_tool_name(tool) for tool in history.tools or ())
        yield _line("├─ ", f"history {number}" + (f"  (tools: {tools})" if tools else ""), width)
        for item in history.items:
            yield _item(item, histories, history, width)
    failed = [completion for completion in trajectory.completions if not completion.items]
    for completion in failed:
        error = completion.error or {}
        text = f"{completion.status}: {error.get('type', '')} {error.get('message', '')}"
        yield _line(f"├─ call {completion.id}  ", text, width)
    for reward in list(trajectory.all_rewards.values()):
        about_one = f" of {reward.completion_id}" if reward.completion_id else ""
        why = f"  ({reward.explanation})" if reward.explanation else ""
        name = " ".join(filter(None, ("reward", reward.name)))
        yield _line("├─ ", f"{name}{about_one}: {float(reward):g}{why}", width)
    for metric, value in trajectory.metrics.items():
        yield _line("├─ ", f"{metric}: {value}", width)
    for warning in trajectory.warnings:
        yield _line("├─ warning: ", warning, width)
    trained = {c for h in histories for c in map(_trains, h.items) if c is not None}
    tokens = [completion.token_ids for completion in trained]
    count = "" if None in tokens else f", {sum(len(ids or ()) for ids in tokens)} sampled tokens"
    yield f"└─ {len(trained)} of {len(trajectory.completions)} completions train{count}"


def _line(before: str, text: str, width: int | None, after: str = "") -> str:
    """One line; its text is truncated to `width`, or wrapped below its start without one."""
    text = _controls.sub(lambda match: repr(match[0])[1:-1], text)
    if width is None:
        below = "\n│".ljust(len(before) + 1)
        return before + below.join(text.splitlines() or [""]) + after
    text = " ".join(text.split())
    room = max(width - len(before) - len(after), _SHORTEST)
    return before + (text if len(text) <= room else text[: room - 1] + "…") + after


def _status(trajectory: Trajectory) -> str:
    if trajectory.error:
        return f"{trajectory.status} ({trajectory.error['type']}: {trajectory.error['message']})"
    return trajectory.status


def _trains(item: HistoryItem) -> Completion | None:
    return item.completion if item.trainable else None


def _item(item: HistoryItem, histories: list[History], history: History, width: int | None) -> str:
    message = item.message
    role = message.get("role", message.get("type", "")) if isinstance(message, dict) else "text"
    note = ""
    if item.completion is not None:
        note = f"  [{item.completion.id}"
        if item.completion.choice_index:
            note += f" choice {item.completion.choice_index}"
        if not item.completion.trainable:
            note += f", {item.completion.status}"
        elif not item.trainable:
            elsewhere = next(
                (
                    number
                    for number, other in enumerate(histories, 1)
                    if other is not history
                    and any(_trains(found) is item.completion for found in other.items)
                ),
                None,
            )
            note += f", trains in history {elsewhere}" if elsewhere else ", does not train"
        note += ", replayed without its reasoning]" if item.is_break else "]"
    mark = " " if item.completion is None else "●" if item.trainable else "○"
    return _line(f"│    {mark} {role:<10} ", _content(message), width, note)


def _content(message: Json) -> str:
    if not isinstance(message, dict):
        return str(message)
    parts: list[str] = []
    content = message.get("content")
    if reasoning := reasoning_of({**message, "content": None}):
        parts.append(f"({reasoning})")
    if isinstance(content, list):
        parts += map(_part, content)
    elif content:
        parts.append(str(content))
    parts += shown_calls(message)
    if not parts:
        parts.append(dumps({k: v for k, v in message.items() if k != "role" and v is not None}))
    return " ".join(parts)


def _part(part: Json) -> str:
    if not isinstance(part, dict):
        return str(part)
    shown = shown_part(part)
    if shown is None:
        return str(part.get("text", f"<{part.get('type')}>"))
    return shown if isinstance(shown, str) else _content(shown)


def _tool_name(tool: Json) -> str:
    return tool_name(tool) if isinstance(tool, dict) else str(tool)
