"""Names of spans, for people who look through a list of them.

Backends list the operations of a service by span name, so there are few names: what marks spans
apart is a number, and what comes from the user is bounded.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state
from otel_rollout.wire import retrieval_of

_NUMBERED = 32
"""The highest number in a name; those beyond it have the same."""
_TASKS = 64
"""Tasks that this process puts into names; a rollout with another one has it as attribute only."""
_LONGEST = 40
"""Characters of a task in a name."""
_ID = "{id}"
_ids = re.compile(
    r"(?<=/)(?:[a-z]+[_-])*(?=[^/]*\d)(?:[0-9]{3,}|[0-9A-Za-z]{12,}|[0-9a-f-]{32,})(?=/|$)"
).sub
PART_NAME = "continue_rollout in another process"
"""The name of the span of another process's part of a rollout."""


class Numbering:
    """Numbers spans of the same name that are side by side, the second one on."""

    def __init__(self) -> None:
        self.task_id: str | None = None
        """The task of the rollout that they are in. None: not known."""
        self._counts: dict[str, itertools.count[int]] = {}
        self._after = 0

    def numbered(self, name: str, after: int = 0) -> str:
        """The name, with its number if it had been given before.

        after: the call that they follow; after another one they are numbered from the start.
        """
        if after != self._after:
            self._after = after
            self._counts.clear()
        number = next(self._counts.setdefault(name, itertools.count(1)))
        return with_number(name, number)

    def nested(self, name: str, task_id: str | None) -> str:
        """The numbered name of a rollout in this one, with its task if that is its own."""
        if task_id is not None and task_id != self.task_id:
            name = _with_task(name, task_id)
        return self.numbered(name)


def with_number(name: str, number: int) -> str:
    """The name of the span that is the `number`-th of its name, from 1."""
    if number > _NUMBERED:
        return f"{name} #{_NUMBERED}+"
    return name if number == 1 else f"{name} #{number}"


def _with_task(name: str, task_id: str) -> str:
    known = process_state.tasks_in_names
    if task_id not in known and len(known) >= _TASKS:
        return name
    known.add(task_id)
    shown = task_id if len(task_id) <= _LONGEST else task_id[: _LONGEST - 1] + "…"
    return f"{name} [{shown}]"


@lru_cache(maxsize=256)
def recording_name(path: str) -> str:
    """The name of the span that records a call at this path: its ids are left out."""
    path = path.partition("?")[0]
    retrieved = retrieval_of(path)
    if retrieved is not None:
        path = path.replace(f"/{retrieved[1]}", f"/{_ID}")
    return f"{sc.OPERATION_EXCHANGE} {_ids(_ID, path)}"


def evaluation_name(name: str | None) -> str:
    """The name of the span of a reward that came after its rollout. name: the reward's."""
    return f"{sc.OPERATION_EVALUATE} rollout: reward{f' {name}' if name else ''}"
