"""Which addresses ask a model, and who is named as the sender."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import rollout
from otel_rollout.record.transports.model_post import model_path
from otel_rollout.record.transports.post import client_of
from otel_rollout.testing import Raw
from otel_rollout.wire import endpoint_of
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://host/v1/chat/completions", "/chat/completions"),
        ("http://127.0.0.1:8000/v1/completions", "/completions"),
        ("https://h/openai/deployments/m/chat/completions?api-version=1", "/chat/completions"),
        ("https://h/v1/chat/completions/", "/chat/completions"),
        ("https://h/v1/responses#x", "/responses"),
        ("https://h/anthropic/v1/messages", "/v1/messages"),
        ("https://h/v1/embeddings", "/embeddings"),
        ("https://h/chat/completions/responses", "/responses"),
    ],
)
def test_where_models_are_asked(url: str, endpoint: str):
    """The call is named by the end of the path, as a client library names it."""
    path = model_path(url)
    assert path is not None
    assert endpoint_of(path) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "https://h/v1/chat/completions/logs",
        "https://h/log?to=/chat/completions",
        "https://h/log#/chat/completions",
        "https://h/v1/messages/count_tokens",
        "https://h/v1/responses/resp_1/cancel",
        "https://h/api/subcompletions",
        "https://h/messages",
        "https://generate",
        "http://[::1/v1/chat/completions",
        "",
    ],
)
def test_what_asks_no_model(url: str):
    """Logs, counts of tokens, hosts, and what is no address."""
    assert model_path(url) is None


@given(st.text(max_size=80), st.sampled_from(["", "/chat/completions", "/v1/messages"]))
def test_any_address(text: str, end: str):
    """No address raises, and what ends at a model's path asks a model."""
    url = f"http://host/{text}{end}"
    path = model_path(url)
    if end and not {"?", "#"} & set(text):
        assert path is not None
        assert path.endswith(end)


@pytest.mark.parametrize(
    ("body", "captured"),
    [
        (b'{"model": "m", "messages": []}', True),
        (b'{"model": "m"}', False),
        (b'["messages"]', False),
        (b"no JSON", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_bodies_that_ask_nothing(
    recording: Recording, clients: Clients, body: bytes, captured: bool
):
    """They are counted: the path is a model's, and nobody knows what was asked."""
    server = clients.serve(routes={"/v1/chat/completions": Raw(body=b'{"choices": []}')})
    with rollout("agent"):
        assert httpx2.post(server.base_url + "/chat/completions", content=body).is_success
    trajectory = recording.trajectory
    assert len(trajectory.exchanges) == captured
    assert any("not captured" in each for each in trajectory.warnings) is not captured


def through(modules: list[str]) -> str:
    """`client_of`, called by functions of these modules, the user's first, as if installed."""
    call: Any = client_of
    for name in reversed(modules):
        path = f"/env/site-packages/{name}.py"
        scope = {"__name__": name, "inner": call}
        exec(compile("def call(library):\n    return inner(library)", path, "exec"), scope)
        call = scope["call"]
    found: str = call("http.client")
    return found


@pytest.mark.parametrize(
    ("modules", "sender"),
    [
        (["ollama._client", "httpx._client", "wrapt"], "ollama (httpx)"),
        (["google.genai.models", "requests.sessions"], "google.genai (requests)"),
        (["google.genai", "google.auth.transport.requests", "requests"], "google.genai (requests)"),
        (["langchain_aws", "botocore.client", "urllib3.connection"], "langchain_aws (botocore)"),
        (["replicate", "urllib.request", "http.client"], "replicate (urllib)"),
        (["client", "http.client"], "client (http.client)"),
        (["client", "tenacity", "contextlib", "requests.api"], "client (requests)"),
        (["dspy.clients", "dspy._vendor.lm15"], "dspy (http.client)"),
    ],
)
def test_who_sends(modules: list[str], sender: str):
    """The package that is above the libraries, and the outermost of those."""
    assert through(modules) == sender


def test_the_sender(recording: Recording, clients: Clients):
    """The user's own code is no client; the library is the one that it called."""
    with rollout("agent"):
        httpx2.post(clients.serve("hi").base_url + "/chat/completions", content=b"?")
        httpx2.post(clients.serve("hi").base_url + "/chat/completions", json=BODY)
    trajectory = recording.trajectory
    assert "went through httpx2 and" in trajectory.warnings[-1]
    assert len(trajectory.exchanges) == 1
