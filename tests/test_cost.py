"""How many functions of ours are called in a rollout, a call and a chunk, which any machine counts;
and how many objects of a finished trajectory the garbage collector looks at.

`benchmarks/instructions.py` counts what they cost. A bound here is one number; it is lowered when
the count falls, and raised only with a reason.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import requests

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, Trajectory, rollout, wiring
from otel_rollout.testing import Reply
from tests.kit.conversations import TOOLS, user
from tests.kit.function_calls import calls_of_ours
from tests.kit.recording import Clients

BOUNDS = {
    "capture": {"rollout": 127, "call": 136, "chunk": 4},
    "default": {"rollout": 147, "call": 318, "chunk": 4},
}

CALLS = 10
OBJECTS = {"unread": 12, "read": 40}
"""A call of a trajectory with ten; read: its messages, token ids, log-probabilities and rows."""

REQUESTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [user("hi")], "logprobs": True},
    "/responses": {"input": "hi", "include": ["message.output_text.logprobs"]},
    "/messages": {"messages": [user("hi")], "max_tokens": 99},
}
"""A request to each model API that the server has."""


def empty_rollout() -> None:
    with rollout("agent"):
        pass


@pytest.fixture(params=BOUNDS)
def bounds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, int]]:
    """The bounds of a set-up that is configured; an instrumentor that tests imported is hidden."""
    instrumentor: Any = "openai" if request.param == "default" else None
    if instrumentor is None:
        monkeypatch.setattr(wiring, "_INSTRUMENTORS", ())
    otel_rollout.configure(exporters=[InMemoryTrajectoryExporter()], instrumentor=instrumentor)
    yield BOUNDS[request.param]
    otel_rollout.shutdown()


def test_an_empty_rollout(bounds: dict[str, int]):
    """The second one: what is made once a process is not counted."""
    empty_rollout()
    assert calls_of_ours(empty_rollout) <= bounds["rollout"]


def test_a_call(bounds: dict[str, int], clients: Clients):
    """The fourth of a growing conversation with tools."""
    client: Any = clients.sync(clients.serve(["one", "two", "three", "four"]))
    messages = [user("hi")]

    def call() -> None:
        reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        messages.append(reply.choices[0].message.to_dict())
        messages.append(user(f"and {len(messages)}"))

    with rollout("agent"):
        for _ in range(3):
            call()
        assert calls_of_ours(call) <= bounds["call"]


def test_a_chunk(bounds: dict[str, int], clients: Clients):
    """The third of a stream, in the second call: where the text is being said."""
    client: Any = clients.sync(clients.serve(Reply("some words, said one by one")))
    with rollout("agent"):
        for _ in range(2):
            stream = client.chat.completions.create(model="m", messages=[user("hi")], stream=True)
            next(stream)
            next(stream)
            count = calls_of_ours(lambda: next(stream))  # noqa: B023 - called here
            stream.close()
    assert count <= bounds["chunk"]


def objects() -> int:
    """Objects that the garbage collector looks at, once it has found what it need not look at."""
    for _ in range(2):
        gc.collect()
    return len(gc.get_objects())


def read(trajectory: Trajectory) -> None:
    """Ask for what a trainer needs, and keep nothing of it but what the trajectory keeps."""
    for history in trajectory.histories:
        history.messages()
    for completion in trajectory.completions:
        assert completion.items
        lists = completion.token_ids, completion.logprobs
        if "chat" in completion.exchange.path:
            assert all(lists)
    for row in trajectory.token_sequences():
        assert row.loss_mask


@pytest.mark.not_replayed("the hook would keep the trajectory")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("state", OBJECTS)
def test_objects_of_a_trajectory(state: str, path: str, stream: bool, clients: Clients):
    """Not of the first one: what is made once a process is not counted.

    The median of three: a thread that an earlier test has left may make objects meanwhile.
    """
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=None, request_token_ids=True)
    server, counts = clients.serve(["one reply. " * 9] * 4 * CALLS), list[int]()
    for _ in range(4):
        with rollout("agent"), requests.Session() as client:
            for _ in range(CALLS):
                body = {"model": "m", "stream": stream, **REQUESTS[path]}
                assert client.post(server.base_url + path, json=body).ok
        trajectories = exporter.take(1)
        if state == "read":
            read(trajectories[0])
        held = objects()
        trajectories.clear()
        counts.append(held - objects())
    otel_rollout.shutdown()
    assert 0 < sorted(counts[1:])[1] <= OBJECTS[state] * CALLS
