"""A trajectory as text that a person reads: who said what, what of it trains, how it went."""

from __future__ import annotations

from collections.abc import Iterator

from otel_rollout.completion import Completion
from otel_rollout.histories import History, HistoryItem
from otel_rollout.messages import Json, dumps, reasoning_of
from otel_rollout.trajectory import Trajectory

_WIDTH = 76


def format_trajectory(trajectory: Trajectory, *, width: int = _WIDTH) -> str:
    """The trajectory as a tree of its histories; texts are cut at `width` characters.

    `●` is a completion that trains here, `○` one that does not (it trains in another history, or
    is not whole).
    """
    return "\n".join(_lines(trajectory, width))


def _lines(trajectory: Trajectory, width: int) -> Iterator[str]:
    ids = "  ".join(
        f"{name} {value}"
        for name, value in (
            ("task", trajectory.task_id),
            ("group", trajectory.group_id),
            ("inside", trajectory.parent_id),
        )
        if value is not None
    )
    yield f"{trajectory.name or 'rollout'}  {trajectory.id}  {_status(trajectory)}  {ids}".rstrip()
    histories = trajectory.histories
    for number, history in enumerate(histories, 1):
        tools = ", ".join(_tool_name(tool) for tool in history.tools or ())
        yield f"├─ history {number}" + (f"  (tools: {tools})" if tools else "")
        for item in history.items:
            yield "│    " + _item(item, histories, history, width)
    failed = [completion for completion in trajectory.completions if not completion.items]
    for completion in failed:
        error = completion.error or {}
        text = f"{completion.status}: {error.get('type', '')} {error.get('message', '')}"
        yield f"├─ call {completion.id}  {_cut(text, width)}"
    for reward in trajectory.all_rewards.values():
        about = f" of {reward.completion_id}" if reward.completion_id else ""
        why = f"  ({reward.explanation})" if reward.explanation else ""
        yield f"├─ reward {reward.name or ''}{about}: {float(reward):g}{why}".replace(" :", ":")
    for name, value in trajectory.metrics.items():
        yield f"├─ {name}: {value}"
    for warning in trajectory.warnings:
        yield f"├─ warning: {warning}"
    trained = {c for h in histories for c in map(_trains, h.items) if c is not None}
    tokens = [completion.token_ids for completion in trained]
    count = "" if None in tokens else f", {sum(len(ids or ()) for ids in tokens)} sampled tokens"
    yield f"└─ {len(trained)} of {len(trajectory.completions)} completions train{count}"


def _status(trajectory: Trajectory) -> str:
    if trajectory.error:
        return f"{trajectory.status} ({trajectory.error['type']}: {trajectory.error['message']})"
    return trajectory.status


def _trains(item: HistoryItem) -> Completion | None:
    return item.completion if item.trainable else None


def _item(item: HistoryItem, histories: list[History], history: History, width: int) -> str:
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
    return f"{mark} {role:<10} {_cut(_content(message), width)}{note}"


def _content(message: Json) -> str:
    if not isinstance(message, dict):
        return str(message)
    parts: list[str] = []
    content = message.get("content")
    if reasoning := reasoning_of({**message, "content": None}):
        parts.append(f"({reasoning})")
    if isinstance(content, list):
        parts += map(_part, content)  # where the Messages API has the reasoning
    elif content:
        parts.append(str(content))
    if message.get("refusal"):
        parts.append(f"refusal: {message['refusal']}")
    for call in message.get("tool_calls") or ():
        body = call.get(call.get("type") or "function") or {}
        parts.append(f"→ {body.get('name')}({body.get('arguments', body.get('input', ''))})")
    if not parts:
        parts.append(dumps({k: v for k, v in message.items() if k != "role" and v is not None}))
    return " ".join(parts)


def _part(part: Json) -> str:
    if not isinstance(part, dict):
        return str(part)
    if part.get("type") == "tool_use":
        return f"→ {part.get('name')}({dumps(part.get('input'))})"
    if part.get("type") == "tool_result":
        return _content({"content": part.get("content")})
    if "thinking" in part:
        return f"({part['thinking']})"
    return str(part.get("text", f"<{part.get('type')}>"))


def _tool_name(tool: Json) -> str:
    if not isinstance(tool, dict):
        return str(tool)
    body = tool.get(tool.get("type", "function"))
    return str((body if isinstance(body, dict) else tool).get("name", tool.get("type")))


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
