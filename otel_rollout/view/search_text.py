"""The words by which a trajectory is found: a bounded part of its messages and logs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps, shown_message

MOST = 100_000
"""Characters of a trajectory that are searched."""
MOST_OF_ONE = 4_000
"""Characters of one message, log line or output that are searched: its beginning."""


def words_of(trajectory: Trajectory) -> str:
    """Name, task, group, error, output, logs and messages with tool calls, up to `MOST` characters.

    Of each text its first `MOST_OF_ONE` characters count.
    """
    found, left = [], MOST
    for text in _texts(trajectory):
        text = text[: min(MOST_OF_ONE, left)]
        found.append(text)
        left -= len(text) + 1
        if left <= 0:
            break
    return "\n".join(found)


def _texts(trajectory: Trajectory) -> Iterator[str]:
    yield from filter(None, (trajectory.name, trajectory.task_id, trajectory.group_id))
    if trajectory.error:
        yield " ".join(str(trajectory.error.get(key) or "") for key in ("type", "message"))
    yield from map(_text, (trajectory.output, *trajectory.metadata.values()))
    yield from map(str, trajectory.logs)
    for message in _messages(trajectory):
        yield shown_message(message)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)


def _messages(trajectory: Trajectory) -> Iterator[Json]:
    """Each message of the conversations once, also where several share it."""
    seen = set[bytes]()
    for completion in trajectory.completions:
        path, new = completion.path, list[Json]()
        while path is not None and path.key not in seen:
            seen.add(path.key)
            new.append(path.message)
            path = path.parent
        yield from reversed(new)
    for messages in trajectory.appended.values():
        yield from messages
