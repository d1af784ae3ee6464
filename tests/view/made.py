"""Trajectories made by hand, as the JSON of their lines: any conversation, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_rollout import Trajectory
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page

Json = dict[str, Any]
PAGE = Page(
    {
        "": (
            b'<!doctype html><html><head><meta charset="utf-8" /><title>x</title>'
            b'<script type="module" crossorigin src="./assets/app.js"></script>'
            b'<link rel="stylesheet" crossorigin href="./assets/app.css"></head>'
            b'<body><div id="app"></div></body></html>',
            "text/html; charset=utf-8",
        ),
        "assets/app.js": (b'"</script><!--";', "text/javascript; charset=utf-8"),
        "assets/app.css": (b"body { color: red }", "text/css; charset=utf-8"),
    }
)
"""A page of three small files, with a script that could end the element it is put into."""


@dataclass
class Call:
    """One call: what was asked, and what came."""

    messages: Sequence[Json]
    says: str | Json | None = "yes"
    """The reply. None: the call failed."""
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    choice: Json = field(default_factory=dict)
    """Further members of the choice."""
    params: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)
    """Further members of the reply."""
    path: str = "/chat/completions"


def line(id_: str, *calls: Call, **fields: Any) -> Json:
    """The JSON of a trajectory whose calls were made one after the other."""
    tree: dict[str, int] = {}
    messages: list[Any] = []
    tokens: list[Any] = []
    exchanges = []
    for number, call in enumerate(calls):
        row = 0
        for message in call.messages:
            key = json.dumps([row, message])
            if key not in tree:
                messages.append([row, message])
                tree[key] = len(messages)
            row = tree[key]
        if call.prompt_ids is not None:
            tokens.append([0, call.prompt_ids])
        named = len(tokens) if call.prompt_ids is not None else 0
        exchanges.append(_exchange(id_, number, call, row, named))
    return {
        **_FIELDS,
        "id": id_,
        "exchanges": exchanges,
        "params": [[{"model": "m", "messages": None, **call.params}] for call in calls],
        "messages": messages,
        "tokens": tokens,
        **fields,
    }


def made(*calls: Call, id_: str = "t1", **fields: Any) -> Trajectory:
    """The same as a trajectory."""
    return Trajectory.from_dict(line(id_, *calls, **fields))


def write(path: Path, *lines: Json) -> Path:
    """Append trajectories to a file, as their exporter does."""
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)
    return path


def scored(id_: str, reward: float | None, **fields: Any) -> Json:
    """A trajectory of one call with a reward."""
    rewards = [] if reward is None else [{"value": reward}]
    asked = {"role": "user", "content": f"ask {id_}"}
    return line(id_, Call([asked]), reward=reward, rewards=rewards, **fields)


def ask(answers: Answers, name: str, **query: object) -> Any:
    """The answer of this name."""
    return answers.named()[name]({key: str(value) for key, value in query.items()})


_FIELDS: Json = {
    "schema_version": 1,
    "name": "agent",
    "trace_id": "a" * 32,
    "span_id": "b" * 16,
    **dict.fromkeys(("parent_id", "task_id", "group_id", "sample_index", "policy_version")),
    "trainable": True,
    "status": "complete",
    "termination_reason": None,
    "error": None,
    "output": None,
    "logs": [],
    "start_time_ns": 10**9,
    "end_time_ns": 3 * 10**9,
    "warnings": [],
    "metrics": {},
    "metadata": {},
    "reward": None,
    "rewards": [],
    "appended": [],
}


def _exchange(id_: str, number: int, call: Call, prompt: int, tokens: int) -> Json:
    said: Any = (
        {"role": "assistant", "content": call.says} if isinstance(call.says, str) else call.says
    )
    reply = None
    if said is not None:
        choice = {"index": 0, "message": said, "finish_reason": "stop", **call.choice}
        if call.ids is not None:
            choice["token_ids"] = call.ids
        counts = {
            "prompt_tokens": len(call.prompt_ids or ()),
            "completion_tokens": len(call.ids or ()),
        }
        reply = {
            "id": f"{id_}-{number}",
            "object": "chat.completion",
            "model": "m",
            "choices": [choice],
            **({"prompt_token_ids": {"~packed": 0}} if tokens else {}),
            **({"usage": counts} if call.ids is not None else {}),
            **call.extra,
        }
    return {
        "span_id": f"{number:016x}",
        "start_time_ns": 10**9 + number * 10**6,
        "end_time_ns": 10**9 + number * 10**6 + 500_000,
        "process": "p",
        "started": number + 1,
        "ended": number + 1,
        "path": call.path,
        "status": "error" if reply is None else "complete",
        "error": {"type": "Timeout", "message": "too slow"} if reply is None else None,
        "attempts": 1,
        "status_code": None if reply is None else 200,
        "policy_version": None,
        "stream": False,
        "response_id": None if reply is None else reply["id"],
        "key": "messages",
        "raw_request": None,
        "prompt_is_known": True,
        "damage": [],
        "prompt": prompt,
        "params": number,
        "response": reply,
        "response_text": None,
        "prompt_token_ids": [tokens] if tokens else [],
    }
