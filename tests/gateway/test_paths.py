"""What the token of a rollout opens at the model server: model calls, and harmless questions."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import ConfigurationError, rollout
from otel_rollout.gateway import serve
from otel_rollout.gateway.paths import asked_of, is_open, plain_path
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.wire.apis import APIS
from tests.gateway.programs import Serve
from tests.kit.conversations import ASK
from tests.kit.outside import send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
OPEN = [
    *(("POST", f"/v1{end}") for api in APIS for end in api.paths if not end.startswith("/v1")),
    ("POST", "/v1/messages"),
    ("POST", "/openai/deployments/d/chat/completions"),
    ("POST", "/v1beta/models/gemini-3:streamGenerateContent"),
    ("POST", "/model/anthropic.claude:0/converse-stream"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1beta/models/gemini-3:countTokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/name"),
    ("GET", "/v1beta/models/gemini-3"),
    ("GET", "/v1/responses/resp_1"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/ping"),
    ("HEAD", "/"),
    ("HEAD", "/api/hello"),
    ("HEAD", "/v1/models"),
]
CLOSED = [
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/sleep"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("HEAD", "/flush_cache"),
    ("POST", "/pause"),
    ("POST", "/release_memory_occupation"),
    ("GET", "/server_info"),
    ("GET", "/metrics"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("DELETE", "/v1/files/file-1"),
    ("GET", "/v1/chat/completions"),
    ("DELETE", "/v1/models/m"),
    ("DELETE", "/v1/chat/completions"),
    ("PUT", "/v1/chat/completions"),
    ("OPTIONS", "/v1/models"),
    ("POST", "/v1/models"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("POST", "/v1/threads/t/runs"),
    ("POST", "/v1/threads/t/messages"),
    ("POST", "/interactions"),
    ("POST", "/invocations"),
    ("POST", "/generate"),
    ("POST", "/V1/CHAT/COMPLETIONS"),
    ("POST", "/v1/chat/completions/x"),
    ("GET", "/"),
    ("GET", "/v1/models/a/b/c"),
    ("GET", "/rollouts"),
]


@pytest.fixture
def everything() -> Any:
    """A model server that answers every path that is asked here."""
    found = {path: Raw(body=b"{}") for _, path in (*OPEN, *CLOSED)}
    with ModelServer("Hello", routes=found) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), OPEN)
async def test_a_token_opens_model_calls_and_questions(
    captured: Recording, everything: ModelServer, gateway_to: Serve, method: str, path: str
):
    """They arrive as they were sent, and the trajectory has no warning about their path."""
    gateway = await gateway_to(everything.base_url, api_key="sk-of-the-server")
    with rollout("agent") as trajectory:
        url = f"{gateway.url}/r/{gateway.token()}{path}"
        answer = await send(url, CHAT if method == "POST" else None, method)
    assert answer.status != 403
    if method == "POST":  # the test server keeps no other exchanges of all paths
        assert [wire.path for wire in everything.exchanges] == [path]
    assert not any("refuses" in warning for warning in trajectory.warnings)


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_a_token_opens_nothing_else(
    captured: Recording, everything: ModelServer, gateway_to: Serve, method: str, path: str
):
    """403: the server is not asked, and the error names the request and the option."""
    gateway = await gateway_to(everything.base_url, api_key="sk-of-the-server")
    with rollout("agent"):
        url = f"{gateway.url}/r/{gateway.token()}{path}"
        answer = await send(url, {"a": 1} if method == "POST" else None, method)
    assert answer.status == 403
    assert everything.exchanges == []
    if method != "HEAD":
        error = answer.json()["error"]
        assert f"{method} {path} is not open" in error["message"]
        assert "--allow-path PREFIX" in error["message"]
        assert error["type"] == "permission_error"


LEAVING = [
    "/v1/../admin",
    "/../../x",
    "/v1/chat/completions/..",
    "/v1/./models",
    "/v1/.../models",
    "/v1/%2e%2e/%2e%2e/admin",
    "/v1/.%2E/admin",
    "/v1/%252e%252e/admin",
    "/v1/%25252e%25252e/admin",
    "//evil/v1/models",
    "/v1//models",
    "/v1%2fmodels",
    "/v1%2F..%2Fchat/completions",
    "/v1%252fmodels",
    "/v1\\models",
    "/v1/..\\admin/v1/models",
    "/v1%5cmodels",
    "/v1%255cmodels",
    "/v1/..;/admin",
    "/v1/models;x=1",
    "/admin%3bx=/v1/models",
    "/admin%3f/v1/models",
    "/admin%23/v1/models",
    "/admin%00/v1/models",
    "/admin%0d%0aX:%20y/v1/models",
    "/v1/%c0%ae%c0%ae/admin",
    "/v1/%ef%bc%8e%ef%bc%8e/admin",
    "/v1/models/%zz",
    "/v1/models%",
]


@pytest.mark.parametrize("path", LEAVING)
@pytest.mark.parametrize("prefix", [(), ("/",)], ids=["", "everything is allowed"])
async def test_no_path_leaves_the_base_url(
    captured: Recording,
    everything: ModelServer,
    gateway_to: Serve,
    path: str,
    prefix: tuple[str, ...],
):
    """400 for whatever a server could understand as another path, also where all is allowed."""
    gateway = await gateway_to(everything.base_url, allow_paths=prefix)
    with rollout("agent"):
        for url in (f"{gateway.url}/r/{gateway.token()}{path}", gateway.url + path):
            answer = await send(url, CHAT, x_api_key=f"or-{gateway.token()}")
            assert answer.status == 400
    assert everything.exchanges == []
    # As what is refused with 403 is: no call of the agent is lost without a word.
    (warning,) = [each for each in captured.trajectory.warnings if "not captured" in each]
    assert warning.startswith("2 requests to /")
    assert "the gateway, which refuses" in warning


@given(st.binary(max_size=40))
def test_a_plain_path_has_one_meaning(raw: bytes):
    """Decoding it again changes nothing, and it leads nowhere else."""
    path = plain_path(b"/" + raw)
    if path is not None:
        assert plain_path(path.encode()) == path
        assert not {"..", ".", ""} & set(path.strip("/").split("/")) - {""}
        assert "//" not in path
        assert not set(path) & set("%\\;?#")
        assert path.isascii()


async def test_letters_that_were_encoded_are_read(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """The call is recorded as what it is, and sent on as it was understood."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        answer = await send(gateway.base_url() + "/chat/completion%73?a=%2e%2e", CHAT)
    assert answer.status == 200
    assert [completion.status for completion in trajectory.completions] == ["complete"]
    assert trajectory.warnings == []
    assert server.exchanges[0].path.startswith("/v1/chat/completions")


async def test_anthropics_path_without_its_version(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A client whose base URL should end in `/v1`, given the one of Anthropic's clients."""
    server = clients.serve("Hello", routes={"/v1/messages/count_tokens": Raw(body=b"{}")})
    gateway = await gateway_to(server.base_url, api_key="sk-of-the-server")
    with rollout("agent") as trajectory:
        root = gateway.environment()["ANTHROPIC_BASE_URL"]
        assert (await send(root + "/messages", {**CHAT, "max_tokens": 9})).status == 200
        assert (await send(root + "/messages/count_tokens", CHAT)).status == 200
    assert [wire.path for wire in server.exchanges] == ["/v1/messages", "/v1/messages/count_tokens"]
    assert {wire.request_headers.get("x-api-key") for wire in server.exchanges} == {
        "sk-of-the-server"
    }
    assert len(trajectory.completions) == 1
    assert asked_of(b"/r/abc/messages-of-others", []).path == "/messages-of-others"


async def test_what_is_refused_is_counted_by_its_path(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Each POST with JSON; other requests are no model calls."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        root = f"{gateway.url}/r/{gateway.token()}"
        for _ in range(2):
            await send(root + "/v1/threads/t/runs", CHAT)
        await send(root + "/v1/files", b"x", content_type="multipart/form-data")
        await send(root + "/v1/files", None, "GET")
        await send(root + "/v1/chat/completions", CHAT)
    assert trajectory.warnings == [
        "2 requests to /v1/threads/t/runs went through the gateway, which refuses what is no "
        "model API, and were not captured"
    ]


async def test_what_is_allowed_is_counted_by_its_path(
    captured: Recording,
    clients: Clients,
    gateway_to: Serve,
    caplog: pytest.LogCaptureFixture,
):
    """The option opens a path and all below it, with a warning at the start."""
    routes = {"/v1/threads/t/runs": Raw(body=b"{}"), "/v1/files": Raw(body=b"{}")}
    server = clients.serve("Hello", routes=routes)
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        gateway = await gateway_to(
            server.base_url, api_key="sk-of-the-server", allow_paths=["/v1/threads"]
        )
    assert "agents may send any request to /v1/threads, with the model server's key" in caplog.text
    with rollout("agent") as trajectory:
        root = f"{gateway.url}/r/{gateway.token()}"
        assert (await send(root + "/v1/threads/t/runs", CHAT)).status == 200
        assert (await send(root + "/v1/files", CHAT)).status == 403
        assert (await send(root + "/v1/threads-of-others", CHAT)).status == 403
    assert (
        "1 request to /v1/threads/t/runs went through the gateway, which knows no model API "
        "there, and was not captured"
    ) in trajectory.warnings


@pytest.mark.parametrize("path", ["v1", "/v1/../x", "/a?b", "", "/%61"])
def test_an_allowed_path_is_a_path(path: str):
    """Another one would open nothing, or more than it says."""
    with pytest.raises(ConfigurationError, match="allow_paths"):
        serve("http://127.0.0.1:1", allow_paths=[path])


def test_what_is_opened_is_opened_with_all_below_it():
    """And nothing whose name only begins alike."""
    assert is_open("DELETE", "/v1/files", ["/v1/files/"])
    assert is_open("GET", "/v1/files/f/content", ["/v1/files"])
    assert is_open("PUT", "/any/thing", ["/"])
    assert not is_open("GET", "/v1/files2", ["/v1/files"])


async def test_no_header_makes_another_request_of_it(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Servers of some frameworks take method and path from headers."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    given = {"x_http_method_override": "DELETE", "x_original_url": "/admin", "x_rewrite_url": "/a"}
    with rollout("agent"):
        answer = await send(gateway.base_url() + "/chat/completions", CHAT, **given)
    assert answer.status == 200
    assert not {name.replace("_", "-") for name in given} & set(server.exchanges[0].request_headers)


async def test_a_websocket_is_not_found(captured: Recording, clients: Clients, gateway_to: Serve):
    """Codex asks for one first, and then by HTTP."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        answer = await send(
            gateway.base_url() + "/responses",
            None,
            "GET",
            upgrade="websocket",
            connection="upgrade",
        )
    assert answer.status == 404
    assert server.exchanges == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/org%2Fname", 200),
        ("GET", "/v1/models/org%2fname", 200),
        ("POST", "/model/arn%3Aaws%3Abedrock%3Ax%2Fname/converse", 200),
        ("DELETE", "/v1/models/org%2Fname", 403),
        ("POST", "/model/x%2Fconverse", 403),
        ("POST", "/v1/models/org%2Fname", 403),
        ("GET", "/v1/models/org%2F..%2F..%2Ffiles", 400),
        ("GET", "/v1/models/org%2F%2e%2e%2Ffiles", 400),
        ("GET", "/v1/models/org%252Fname", 400),
        ("GET", "/v1/models/%2Fname", 400),
        ("GET", "/v1/models%2Fname", 400),
        ("GET", "/v1/models/org%2F%2Fname", 400),
    ],
)
async def test_a_slash_in_the_name_of_a_model(
    captured: Recording, clients: Clients, gateway_to: Serve, method: str, path: str, status: int
):
    """It is sent on as it came where the path stays below that of models, and nowhere else."""
    server = clients.serve("Hello", routes={path: Raw(body=b"{}")})
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        url = f"{gateway.url}/r/{gateway.token()}{path}"
        answer = await send(url, {} if method == "POST" else None, method)
    if status == 200:
        assert answer.status not in (400, 403)
    else:
        assert answer.status == status
    assert [wire.path for wire in server.exchanges] == ([path] if status == 200 else [])
