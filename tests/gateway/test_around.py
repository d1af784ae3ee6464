"""Programs that a rollout with a gateway starts: their calls are the rollout's. All are real."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import NoActiveRolloutError, gather_group, reconstruct, rollout
from otel_rollout.errors import ConfigurationError
from otel_rollout.gateway import around
from otel_rollout.record import process_state
from otel_rollout.testing import ModelServer
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

OPENAI = """
import sys, openai
client = openai.OpenAI(max_retries=0)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": sys.argv[1]}])
"""
"""A program that nobody changed for us."""
CLIENT = """
import json, os, sys, urllib.request

class Client:
    def __init__(self):
        self.url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        self.headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}

    def ask(self, text):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        headers = {**self.headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request).read()
"""
"""A client that loads in a tenth of the time, for programs whose client does not matter."""
ASK = f"{CLIENT}\nClient().ask(sys.argv[1])"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}, sys.argv[1]])"
SERVER = """
import json, openai, sys
for line in sys.stdin:
    reply = openai.OpenAI(max_retries=0).chat.completions.create(
        model="m", messages=[{"role": "user", "content": json.loads(line)["params"]["text"]}]
    )
    print(json.dumps({"result": reply.choices[0].message.content}), flush=True)
"""
"""A tool server over stdio, as MCP's are."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, clients: Clients) -> ModelServer:
    """The model server that this process would ask, by its environment."""
    server = clients.serve("ok", token_ids=True, logprobs=True)
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-server")
    return server


def ask(text: str, program: str = ASK, **options: Any) -> None:
    subprocess.run([sys.executable, "-c", program, text], check=True, **options)


def said(trajectory: Any) -> list[str]:
    return sorted(each.request_messages[-1]["content"] for each in trajectory.completions)


def test_children_of_every_kind(captured: Recording, model: ModelServer) -> None:
    """A child, its child, curl, a server over stdio with few variables; and calls made here."""
    body = json.dumps({"model": "m", "messages": [user("curl")]})
    curl = (
        f"curl -s -d '{body}' -H 'Content-Type: application/json' $OPENAI_BASE_URL/chat/completions"
    )
    few = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}

    async def ask_a_server() -> None:
        command = (sys.executable, "-c", SERVER)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        server = await asyncio.create_subprocess_exec(*command, env=few, **pipes)
        line = json.dumps({"method": "tools/call", "params": {"text": "server"}}).encode()
        answer, _ = await server.communicate(line + b"\n")
        assert json.loads(answer)["result"] == "ok"

    before = dict(os.environ)
    with rollout("agent", gateway=True) as trajectory:
        ask("child", OPENAI)
        ask("named", env={**os.environ, "MINE": "1"})
        subprocess.run([sys.executable, "-c", GRANDCHILD, "grandchild"], check=True)
        if shutil.which("curl"):
            subprocess.run(curl, shell=True, check=True, stdout=subprocess.DEVNULL)
        asyncio.run(ask_a_server())
        assert dict(os.environ) == before
        assert len(trajectory.completions) >= 4
    expected = ["child", "curl", "grandchild", "named", "server"]
    assert said(trajectory) == [each for each in expected if each != "curl" or shutil.which("curl")]
    assert trajectory.warnings == []
    heads = [each.request_headers for each in model.exchanges]
    keys = {
        {name.lower(): value for name, value in head.items()}["authorization"] for head in heads
    }
    assert keys == {"Bearer key-of-the-server"}
    ask("after")
    assert "after" not in said(trajectory)
    assert reconstruct(captured.spans) == [trajectory]


def test_rollouts_at_once_do_not_mix(captured: Recording, model: ModelServer) -> None:
    """Threads and tasks, each with its own rollout; one of them without a gateway."""

    def run(name: str) -> Any:
        with rollout(name, gateway=name != "bare") as trajectory:
            ask(name)
        return trajectory

    with ThreadPoolExecutor(4) as pool:
        found = {each.name: said(each) for each in pool.map(run, ("a", "b", "c", "bare"))}
    assert found == {"a": ["a"], "b": ["b"], "c": ["c"], "bare": []}

    @rollout(gateway=True)
    async def agent(text: str) -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", ASK, text)
        assert await child.wait() == 0

    group = asyncio.run(gather_group(agent(text) for text in "xyz"))
    assert [said(each) for each in group.trajectories] == [["x"], ["y"], ["z"]]
    assert len(process_state.gateways) == 1
    assert otel_rollout.shutdown()
    assert not process_state.gateways


def test_around(captured: Recording, clients: Clients, model: ModelServer) -> None:
    """For a part of a rollout, and another model server; a rollout inside has its own calls."""
    other = clients.serve("other")
    with rollout("agent") as trajectory:
        with around(upstream=other.base_url) as gateway:
            ask("in")
            with rollout("inner") as inner:
                ask("inner")
            elsewhere = {
                **os.environ,
                "OPENAI_BASE_URL": f"{other.base_url}/",
                "OPENAI_API_KEY": "k",
            }
            ask("elsewhere", env=elsewhere)
            assert gateway.environment()["OPENAI_BASE_URL"].startswith(gateway.url)
        ask("out")
    assert said(trajectory) == ["in"]
    assert said(inner) == ["inner"]
    assert len(other.exchanges) == 3
    assert [b'"out"' in each.request for each in model.exchanges] == [True]


def test_wrong_uses(
    captured: Recording, model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says what is wrong, where it was written."""
    with pytest.raises(NoActiveRolloutError, match="no rollout is current"), around():
        pass
    with pytest.raises(ConfigurationError, match="expected True or False, got 'yes'"):
        rollout("agent", gateway="yes")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="add gateway=True"):
        rollout("agent", upstream="http://127.0.0.1:1/v1")
    with rollout("agent"), pytest.raises(ConfigurationError, match="got 'nowhere'"):
        around("nowhere").__enter__()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigurationError, match=r"install .*'otel-rollout\[gateway\]'"):
        rollout("agent", gateway=True)
    with rollout("agent"), pytest.raises(ConfigurationError, match=r"otel-rollout\[gateway\]"):
        around("http://127.0.0.1:1/v1").__enter__()


def test_a_gateway_that_cannot_start_costs_no_run(
    captured: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the agent runs."""
    with rollout("agent", gateway=True, upstream="nowhere") as trajectory:
        pass
    assert trajectory.status == "complete"
    assert "no gateway could be started" in caplog.text


SPAWNED = f"""{CLIENT}
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout

client = Client()  # made when a child imports this, too

def ask(text):
    client.ask(text)

def said(trajectory):
    return sorted(each.request_messages[-1]["content"] for each in trajectory.completions)

if __name__ == "__main__":
    otel_rollout.configure(exporters=[InMemoryTrajectoryExporter()], instrumentor=None)
    ways = multiprocessing.get_context(sys.argv[1])
    older = ProcessPoolExecutor(1, mp_context=ways)
    with rollout("one", gateway=True) as one:
        process = ways.Process(target=ask, args=("process",))
        process.start()
        process.join()
        with ProcessPoolExecutor(1, mp_context=ways) as pool:
            pool.submit(ask, "executor").result()
        with ways.Pool(1) as pool:
            pool.apply(ask, ("pool",))
        older.submit(ask, "older").result()
    with rollout("two", gateway=True) as two:
        older.submit(ask, "again").result()
    older.shutdown()
    otel_rollout.shutdown()
    print(json.dumps([said(one), said(two)]))
"""


@pytest.mark.parametrize(
    "way", [way for way in multiprocessing.get_all_start_methods() if way != "fork"]
)
def test_processes_that_are_begun_anew(way: str, model: ModelServer, tmp_path: Path) -> None:
    """Also a client that their main module makes; not a pool that is older than the rollout."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    found = subprocess.run([sys.executable, str(script), way], check=True, capture_output=True)
    assert json.loads(found.stdout) == [["executor", "pool", "process"], []]
    assert len(model.exchanges) == 5
