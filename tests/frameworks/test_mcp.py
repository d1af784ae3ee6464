"""MCP: the rollout goes along to servers over stdio and HTTP, whose tools ask a model."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

import otel_rollout
from otel_rollout import Trajectory, no_capture, propagate, reconstruct, rollout
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.testing import ModelServer
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
FOREIGN = """
import openai
from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")

@server.tool()
def summarise(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    reply = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=messages)
    return reply.choices[0].message.content

server.run("stdio")
"""
"""A server that nobody changed for us."""
GIVEN = "1 program ({}) was started with the address or the key of a model server"
TRANSPORTS = pytest.mark.parametrize("transport", ["stdio", "http"])
HANDED_ON = (
    "it was handed on to another process, of which no span is here: calls that were made there "
    "are missing (reconstruct from the spans of both, or add_spans)"
)


@asynccontextmanager
async def tools(
    transport: str, server: ModelServer, path: Path, how: str = "continue", **environ: str
) -> AsyncIterator[Client]:
    """A client of a server in a process of its own."""
    arguments = [server.base_url, str(path), how]
    environ = {**os.environ, **environ}
    if transport == "stdio":
        program = StdioServerParameters(
            command=sys.executable, args=[PROGRAM, "stdio", *arguments], env=environ
        )
        async with Client(program) as client:
            yield client
        return
    # It listens here already: a free port that the server binds later may be another's by then.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, inherited = listening.getsockname()[1], listening.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, PROGRAM, str(inherited), *arguments),
            env=environ,
            stderr=subprocess.DEVNULL,
            pass_fds=[inherited],
        )
    try:
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


def saved(path: Path) -> list[SpanRecord]:
    spans: list[SpanRecord] = []
    with path.open("rb") as file:
        while file.peek(1):
            spans.append(pickle.load(file))
    return spans


def whole(recording: Recording, path: Path, *texts: str) -> Trajectory:
    """The rollout rebuilt from the spans of both processes: it has these calls, in any order."""
    spans = [*map(as_record, recording.spans), *saved(path)]
    (trajectory,) = reconstruct(spans)
    assert trajectory.warnings == []
    asked = [c.request_messages[-1]["content"] for c in trajectory.completions]
    assert sorted(asked) == sorted(texts)
    assert all(c.trainable for c in trajectory.completions)
    assert reconstruct(reversed(spans)) == [trajectory]
    return trajectory


async def agent(client: Client, server: ModelServer, clients: Clients, **options: Any) -> None:
    """A call of its own, and two of a tool's at once."""
    await clients.asynchronous(server).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "lead"}]
    )
    calls = [client.call_tool("summarise", {"text": text}, **options) for text in ("one", "two")]
    for result in await asyncio.gather(*calls):
        assert not result.is_error, result


@TRANSPORTS
async def test_the_call_brings_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path, transport: str
) -> None:
    """`call_tool(meta=propagate())`: the live trajectory misses the calls, both together do not."""
    server, path = clients.serve("hello"), tmp_path / "spans"
    async with tools(transport, server, path) as client, rollout("agent"):
        await agent(client, server, clients, meta=propagate())
    assert recording.trajectory.warnings == [HANDED_ON]
    whole(recording, path, "lead", "one", "two")


@TRANSPORTS
async def test_the_baggage_brings_the_rollout(
    recording: Recording,
    clients: Clients,
    tmp_path: Path,
    transport: str,
) -> None:
    """With the rollout in the baggage, MCP's client hands it on with every request of its own."""
    otel_rollout.configure(baggage=True)
    server, path = clients.serve("hello"), tmp_path / "spans"
    async with tools(transport, server, path) as client:
        async with rollout("agent"):
            await agent(client, server, clients)
            with no_capture():
                await client.call_tool("summarise", {"text": "a judge"})
        await client.call_tool("summarise", {"text": "nobody's"})
    whole(recording, path, "lead", "one", "two")


async def test_the_environment_brings_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path
) -> None:
    """A server that is started for one rollout needs nothing else."""
    server, path = clients.serve("hello"), tmp_path / "spans"
    async with rollout("agent"):
        environ = propagate(environ=True)
        async with tools("stdio", server, path, "alone", **environ) as client:
            await agent(client, server, clients)
    whole(recording, path, "lead", "one", "two")


@TRANSPORTS
async def test_rollouts_at_once_share_a_server(
    recording: Recording, clients: Clients, tmp_path: Path, transport: str
) -> None:
    """Each tool call is in the rollout that made it."""
    server, path = clients.serve("hello"), tmp_path / "spans"
    async with tools(transport, server, path) as client:

        @rollout
        async def solver(name: str) -> None:
            for turn in range(3):
                await client.call_tool("summarise", {"text": f"{name} {turn}"}, meta=propagate())

        await asyncio.gather(*(solver(name) for name in "abcd"))
    rebuilt = reconstruct([*map(as_record, recording.spans), *saved(path)])
    assert len(rebuilt) == 4
    for trajectory in rebuilt:
        assert trajectory.warnings == []
        texts = [c.request_messages[-1]["content"] for c in trajectory.completions]
        assert texts in [[f"{name} {turn}" for turn in range(3)] for name in "abcd"]


@pytest.mark.parametrize("gateway", [True, False])
async def test_a_server_that_knows_nothing_of_rollouts(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch, gateway: bool
) -> None:
    """With a gateway the calls of its tools are the rollout's; without one the program is named."""
    server = clients.serve("hello")
    given = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "k"}
    if gateway:
        for name, value in given.items():
            monkeypatch.setenv(name, value)
    program = StdioServerParameters(
        command=sys.executable, args=["-c", FOREIGN], env=None if gateway else given
    )
    async with rollout("agent", gateway=gateway) as trajectory, Client(program) as client:
        await agent(client, server, clients)
    assert len(server.exchanges) == 3
    asked = sorted(c.request_messages[-1]["content"] for c in trajectory.completions)
    assert asked == (["lead", "one", "two"] if gateway else ["lead"])
    warnings = [warning.partition(":")[0] for warning in trajectory.warnings]
    assert warnings == ([] if gateway else [GIVEN.format(Path(sys.executable).name)])
    assert reconstruct(recording.spans) == [trajectory]
