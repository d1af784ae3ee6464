"""A run of an agent: what it was to do, what the server saw, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from otel_rollout import Trajectory
from otel_rollout.testing import ModelServer, WireExchange

FILE = "sum.py"
WRONG, RIGHT = "print(2 - 2)\n", "print(2 + 2)\n"
TASK = f"{FILE} has to print 4. Read it, mend it, and run it."


@dataclass(frozen=True)
class Again:
    """A run of an agent that got recorded replies."""

    status: int
    out: str
    err: str


@dataclass
class Ran:
    """A run of an agent: what the server saw, and what became of it."""

    status: int
    out: str
    trajectory: Trajectory
    exchanges: list[WireExchange]
    again: Callable[[Sequence[str], Sequence[str]], Again]
    """Replay it to a command; the members of requests that are ignored."""


Agent = Callable[[ModelServer, Sequence[str]], Ran]


def results(body: dict[str, Any]) -> list[str]:
    """The results of tools in a request of any API, as texts."""
    found = [item for item in body.get("input", ()) if item.get("type") == "function_call_output"]
    for message in body.get("messages", ()):
        if message["role"] == "tool":
            found.append(message)
        elif isinstance(message.get("content"), list):
            found += [part for part in message["content"] if part["type"] == "tool_result"]
    for content in body.get("contents", ()):
        found += [part for part in content["parts"] if "functionResponse" in part]
    return [json.dumps(each) for each in found]
