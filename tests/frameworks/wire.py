"""What every test of a framework checks: the trajectory is what went over the wire, all of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from otel_rollout import Completion, Trajectory
from otel_rollout.testing import ModelServer, Reply, ToolCall
from otel_rollout.trajectory import sentences
from tests.kit.comparing import exchange_spans, replayed
from tests.kit.recording import Recording

ADD = ToolCall("add", ' {"b": 3, "a": 2} ')
"""Arguments as models write them: nobody's `json.dumps` gives this text."""
TOOL_LOOP = [Reply(tool_calls=[ADD]), Reply("It is 5.")]


def checked(recording: Recording, *servers: ModelServer, calls: int) -> Trajectory:
    """The only trajectory. It has `calls` exchanges, those of the wire, and nothing to warn of.

    Its spans give it again, and each completion has the token ids and log-probabilities that the
    server sent.
    """
    trajectory = replayed(recording)
    assert [each for each in trajectory.warnings if each != sentences.NOT_ASKED()] == []
    assert trajectory.status == "complete"
    wire = [exchange for server in servers for exchange in server.exchanges]
    assert len(wire) == len(exchange_spans(recording)) == len(trajectory.completions) == calls
    received = {(e.request, said(e.response)["id"]): e for e in wire}
    assert len(received) == calls
    for completion in trajectory.completions:
        assert completion.status == "complete"
        assert completion.trainable
        (found,) = [
            exchange
            for (_, id_), exchange in received.items()
            if id_ == completion.id and json.loads(exchange.request) == completion.request
        ]
        assert sampled(completion) == said(found.response)
        if not found.response.startswith((b"data:", b"event:")):
            assert completion.response == json.loads(found.response)
    return trajectory


def sampled(completion: Completion) -> dict[str, Any]:
    response = completion.response
    if "output" in response:
        return {"id": response["id"], "output": response["output"]}
    message = completion.message or {}
    logprobs = completion.logprobs
    return {
        "id": completion.id,
        "content": message.get("content") or "",
        "calls": [(c["id"], *c["function"].values()) for c in message.get("tool_calls") or ()],
        "prompt": completion.prompt_token_ids,
        "tokens": completion.token_ids,
        "logprobs": None if logprobs is None else len(logprobs),
    }


def said(response: bytes) -> dict[str, Any]:
    """What a response says, from its JSON or its events, without any code of the library."""
    events = list(_events(response))
    if "type" in events[-1] or "output" in events[-1]:
        final = events[-1].get("response", events[-1])
        return {"id": final["id"], "output": final["output"]}
    said: dict[str, Any] = {"id": events[0]["id"], "content": "", "calls": []}
    said |= {"prompt": events[0].get("prompt_token_ids"), "tokens": None, "logprobs": None}
    for choice in [choice for event in events for choice in event["choices"]]:
        message = choice.get("message") or choice.get("delta")
        said["content"] += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if call.get("id"):
                said["calls"].append((call["id"], function["name"], function["arguments"]))
            else:
                *start, text = said["calls"][-1]
                said["calls"][-1] = (*start, text + function["arguments"])
        if choice.get("token_ids") is not None:
            said["tokens"] = (said["tokens"] or []) + choice["token_ids"]
        if choice.get("logprobs"):
            said["logprobs"] = (said["logprobs"] or 0) + len(choice["logprobs"]["content"])
    return said


def _events(response: bytes) -> Iterator[dict[str, Any]]:
    if response.startswith(b"{"):
        yield json.loads(response)
    for line in response.splitlines():
        if line.startswith(b"data:") and b"[DONE]" not in line:
            yield json.loads(line[5:])


def continues_on_tokens(trajectory: Trajectory) -> bool:
    """Whether every later prompt begins with the token ids of the call before, prompt and reply.

    The test server renders tool arguments verbatim: true only if they were replayed so.
    """
    calls = trajectory.completions
    return all(
        (later.prompt_token_ids or [])[: len(before)] == before
        for first, later in pairwise(calls)
        if (before := [*(first.prompt_token_ids or ()), *(first.token_ids or ())])
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a framework does in the background."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come within a minute")
