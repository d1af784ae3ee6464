"""The hooks on HTTP libraries: when they are put in, when they are taken out, and what if not."""

from __future__ import annotations

import http.client
import logging
import subprocess
import sys
from typing import Any

import httpx2
import pytest
import requests
import urllib3
import wrapt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import otel_rollout
from otel_rollout import rollout
from otel_rollout.record import capture
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.capture import TRANSPORTS
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY

METHODS: list[tuple[type[Any], str]] = [
    (httpx2.Client, "send"),
    (httpx2.AsyncClient, "send"),
    (requests.Session, "send"),
    (urllib3.PoolManager, "urlopen"),
    (urllib3.HTTPConnectionPool, "urlopen"),
    (http.client.HTTPConnection, "putrequest"),
]


def hooked() -> list[bool]:
    return [hasattr(vars(owner)[name], "_self_wrapper") for owner, name in METHODS]


@pytest.fixture
def before() -> list[Any]:
    """The methods as they are without us."""
    return [vars(owner)[name] for owner, name in METHODS]


def test_they_go_in_and_out(before: list[Any]):
    """Once, however often capture is asked for; then the methods are the very ones they were."""
    for _ in range(2):
        otel_rollout.configure()
        capture.instrument()
        assert hooked() == [True] * len(METHODS)
        assert not any(hasattr(vars(o)[n].__wrapped__, "_self_wrapper") for o, n in METHODS)
        otel_rollout.shutdown()
        assert [vars(owner)[name] for owner, name in METHODS] == before
    capture.instrument()
    capture.uninstrument()
    assert [vars(owner)[name] for owner, name in METHODS] == before


@pytest.mark.parametrize(("owner", "method"), METHODS)
def test_what_others_put_around_a_hook(
    monkeypatch: pytest.MonkeyPatch, before: list[Any], owner: Any, method: str
):
    """It stays when the hooks go out; the hook below it does nothing, until it is wanted again."""
    with monkeypatch.context() as patching:
        otel_rollout.configure()
        theirs = wrapt.FunctionWrapper(vars(owner)[method], lambda f, _, a, k: f(*a, **k))
        patching.setattr(owner, method, theirs)
        otel_rollout.shutdown()
        assert vars(owner)[method] is theirs
        assert not vars(owner)[method].__wrapped__._self_enabled
        otel_rollout.configure()
        assert vars(owner)[method] is theirs
        assert vars(owner)[method].__wrapped__._self_enabled
    otel_rollout.shutdown()
    assert [vars(owner)[name] for owner, name in METHODS] == before


def test_a_hook_that_others_put_back(
    monkeypatch: pytest.MonkeyPatch, before: list[Any], clients: Clients
):
    """A patch that is taken off after `shutdown` leaves a hook that does nothing, and is found."""
    url = clients.serve().base_url + "/chat/completions"
    exporter = otel_rollout.InMemoryTrajectoryExporter()
    provider = TracerProvider()
    provider.add_span_processor(otel_rollout.TrajectorySpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with monkeypatch.context() as patching:
        capture.instrument()
        patching.setattr(requests.Session, "send", requests.Session.send)
        capture.uninstrument()
    with rollout("not hooked"):
        requests.post(url, json=BODY)
    capture.instrument()
    with rollout("hooked"):
        requests.post(url, json=BODY)
    capture.uninstrument()
    assert [len(t.completions) for t in exporter.get_finished_trajectories()] == [0, 1]
    assert [vars(owner)[name] for owner, name in METHODS] == before


def test_a_stream_that_is_read_after_the_hooks_are_out(recording: Recording, clients: Clients):
    """It is read as it was."""
    url = clients.serve("hello").base_url + "/chat/completions"
    with rollout("agent"):
        response = requests.post(url, json={**BODY, "stream": True}, stream=True)
    otel_rollout.shutdown()
    assert b"hello" in response.content


@pytest.mark.parametrize(("owner", "method"), METHODS)
def test_a_version_without_the_method(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, method: str
):
    """It is left as it is, the log says so once, and the other libraries are hooked."""
    monkeypatch.delattr(owner, method)
    process_state.hooks._reported.clear()
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        otel_rollout.configure()
        capture.instrument()
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert len(messages) == 1
    assert f"this version has no {owner.__name__}.{method}" in messages[0]
    others = [each for each in METHODS if each[0].__module__ != owner.__module__]
    assert any(hasattr(vars(o)[n], "_self_wrapper") for o, n in others)


PROGRAM = """
import sys, threading
import otel_rollout
from otel_rollout.testing import ModelServer

def use():
    import requests
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert requests.post(server.base_url + "/chat/completions", json=body).ok

def imports():
    import requests

exporter = otel_rollout.InMemoryTrajectoryExporter()
if "before" in sys.argv:
    imports()
for _ in range(2 if "twice" in sys.argv else 1):
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
if "thread" in sys.argv:
    worker = threading.Thread(target=imports)
    worker.start()
    worker.join()
with ModelServer("hi", token_ids=True, logprobs=True) as server, otel_rollout.rollout("agent"):
    use()
trajectory = exporter.get_finished_trajectories()[-1]
print([c.status for c in trajectory.completions], trajectory.warnings)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after", "thread", "twice"])
def test_the_order_of_imports(how: str):
    """A library is hooked when it is imported, whoever imports it, and nothing is printed."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['complete'] []\n", "")


FORK = """
import os
import otel_rollout, requests
from otel_rollout.testing import ModelServer
body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
exporter = otel_rollout.InMemoryTrajectoryExporter()
otel_rollout.configure(exporters=[exporter], instrumentor=None)
server = ModelServer("hi", token_ids=True, logprobs=True).start()
url = server.base_url + "/chat/completions"
pid = os.fork()
with otel_rollout.rollout("agent"):
    assert requests.post(url, json=body).ok
said = [c.status for t in exporter.get_finished_trajectories() for c in t.completions]
os.write(1, f"{said}\\n".encode())  # at once: two processes write here
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(0)
"""


@pytest.mark.slow
def test_they_are_in_a_child_after_fork():
    """Both sides capture their calls."""
    ran = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300, check=True
    )
    assert ran.stdout == "['complete']\n['complete']\n"


def test_every_library_is_there_for_these_tests():
    """The table names the modules that the tests take from it."""
    assert {"httpx2", "requests.sessions", "http.client"} <= TRANSPORTS.keys()
