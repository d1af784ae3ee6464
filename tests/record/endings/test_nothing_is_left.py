"""Memory does not grow with calls, and what a stream brought is kept when the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, rollout
from otel_rollout.record.running import ActiveRollout
from otel_rollout.testing import ModelServer, Reply
from tests.kit.calling import done, read
from tests.kit.conversations import ASK
from tests.kit.ending import SLOW, TEXT, collect_garbage, said
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow

# --- nothing is left


def _finalizers() -> dict[Any, Any]:
    registry: dict[Any, Any] = vars(weakref.finalize)["_registry"]
    return registry


@pytest.mark.not_replayed("it looks for what is left of the trajectories")
async def test_nothing_grows(recording: Recording, clients: Clients) -> None:
    """Rollouts whose calls end in every way leave no object, no thread and no buffer behind."""
    replies = {"plain": Reply("ok"), "cut": Reply(TEXT, cut_after=2), "left": Reply(TEXT)}
    server = clients.serve(lambda body: replies[body["model"]])
    client, sync = clients.asynchronous(server), clients.sync(server)

    async def one(status: str) -> None:
        with contextlib.suppress(openai.APIError, Exception), rollout("agent"):
            for chosen in (client, sync):
                create = chosen.chat.completions.create
                stream = await done(create(model=status, messages=ASK, stream=status != "plain"))
                if status != "plain":
                    await read(stream, 1 if status == "left" else None)

    async def every() -> set[int]:
        await asyncio.gather(*(one(status) for status in replies))
        references = [weakref.ref(t) for t in recording.trajectories]
        recording.exporter.clear()
        recording.span_exporter.clear()
        await collect_garbage()
        assert [r() for r in references if r() is not None] == []
        return {id(o) for o in gc.get_objects() if type(o) is ActiveRollout and o.streams}

    assert await every() == set()
    registered = len(_finalizers())
    threads = threading.active_count()
    for _ in range(5):
        assert await every() == set()
    assert len(_finalizers()) <= registered + 4
    assert threading.active_count() <= threads + 4  # the server's, one for each connection


async def test_shutdown_keeps_what_a_stream_had_brought(
    recording: Recording, clients: Clients
) -> None:
    """A shutdown in the middle of a stream hands over what had come of it, as abandoned."""
    client = clients.sync(clients.serve(SLOW))
    scope = rollout("agent")
    scope.__enter__()
    try:
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        await read(stream, 3)
        otel_rollout.shutdown()
        (trajectory,) = recording.trajectories
        assert [c.status for c in trajectory.completions] == ["abandoned"]
        assert len(said(trajectory.completions[0])) >= 16
        stream.close()
    finally:
        scope.__exit__(None, None, None)


# --- the process ends


PROGRAM = """
import os, signal, sys, threading, tempfile, openai, otel_rollout
from otel_rollout import rollout, JsonlTrajectoryExporter

tempfile.TemporaryDirectory()  # registers what it does at exit before the library does
otel_rollout.configure(exporters=[JsonlTrajectoryExporter(sys.argv[1])])
client = openai.OpenAI(base_url=sys.argv[2], api_key="k" * 20, max_retries=0)

def ask(**options):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], **options)

with rollout("before"):
    ask()

def agent():
    with rollout("agent"):
        ask()
        stream = ask(stream=True)
        for _ in range(3):
            next(iter(stream))
        END
"""
ENDS: dict[str, tuple[str, str, int]] = {
    "sys.exit": ("agent()", "sys.exit(3)", 3),
    "unhandled": ("agent()", "raise ValueError('unhandled')", 1),
    "os._exit": ("agent()", "os._exit(4)", 4),
    "interrupt": (
        # A shell's background job has it ignored, and so have its children.
        "agent()",
        "print('ready', flush=True); [None for _ in stream]",
        -signal.SIGINT,
    ),
    "SIGTERM": ("agent()", "print('ready', flush=True); [None for _ in stream]", -signal.SIGTERM),
    "SIGTERM handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); agent()",
        "print('ready', flush=True); [None for _ in stream]",
        5,
    ),
    "left in a thread": (
        "held = threading.Event(); threading.Thread(target=agent, daemon=True).start(); "
        "held.wait()",
        "held.set(); threading.Event().wait()",
        0,
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_process_ends_in_a_stream(tmp_path: Path, how: str) -> None:
    """What was begun is in the exporter's file, but for ends at which Python runs nothing."""
    call, end, code = ENDS[how]

    def reply(body: Any) -> Reply:
        return Reply(TEXT, chunk_delay=0.0 if not body.get("stream") else 0.4)

    server = ModelServer(reply)
    program = PROGRAM.replace("END", end) + call + "\n"
    path = tmp_path / "trajectories.jsonl"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL", "OPENAI"))}
    with server:
        command = [sys.executable, "-c", textwrap.dedent(program), str(path), server.base_url]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )
        try:
            if "ready" in end:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
                process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == code, errors
    assert "Exception ignored" not in errors
    assert "not captured" not in errors
    assert "not recorded" not in errors
    assert "closed cleanly" not in errors
    trajectories = list(JsonlTrajectoryExporter.read(path)) if path.exists() else []
    names = [t.name for t in trajectories]
    if how in ("os._exit", "SIGTERM"):
        assert "agent" not in names
        return
    assert names == ["before", "agent"]
    whole, partial = trajectories[1].completions
    assert (whole.status, said(whole)) == ("complete", TEXT)
    assert partial.status in ("abandoned", "cancelled")
    assert said(partial)
    assert TEXT.startswith(said(partial))
    assert not partial.trainable
    statuses = {"unhandled": "error", "left in a thread": "unknown"}
    assert trajectories[1].status == statuses.get(how, "cancelled")
