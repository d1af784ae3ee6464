"""Keys of the caller are on no span, whichever way they were sent or echoed."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import openai
import pytest

from otel_rollout import rollout, tool
from otel_rollout.record.privacy.secrets import Secrets, public_path, scrub, secrets_in
from otel_rollout.record.reply import may_be_error
from otel_rollout.testing import Raw
from tests.kit.calling import BOTH, Caller, Configure, Json, as_bare
from tests.kit.comparing import everything, replayed
from tests.kit.conversations import chat
from tests.kit.recording import Clients, Recording

KEY = "sk-proj-Zq8vT3nXw5Rk1Lm7Yp2Bs9Dc4Fg6Hj0"


def echo(status: int) -> Raw:
    said = f"Incorrect API key provided: {KEY}. You sent 'Authorization: Bearer {KEY}'."
    body = {"error": {"message": said, "type": "invalid_request_error", "code": None}}
    return Raw(status, json.dumps(body).encode())


def echo_in_stream() -> Raw:
    event = f'data: {{"error": {{"message": "You sent Bearer {KEY}", "code": 401}}}}\n\n'
    return Raw(200, event.encode(), content_type="text/event-stream")


SECRETS: dict[str, tuple[Any, Json]] = {
    "reply": ("Paris", {}),
    "error": (echo(401), {}),
    "server error": (echo(500), {}),
    "error with status 200": (echo(200), {}),
    "error of a stream": (echo(401), {"stream": True}),
    "error in a stream": (echo_in_stream(), {"stream": True}),
}


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", SECRETS)
async def test_secrets(configure: Configure, clients: Clients, caller: Caller, case: str) -> None:
    """The API key is nowhere in what is recorded, also where an error echoes it."""
    reply, options = SECRETS[case]

    async def script(client: Any) -> Any:
        return await chat(client, **options)

    recording, server, _ = await as_bare(
        configure, clients, caller, lambda: reply, script, api_key=KEY
    )
    assert server.exchanges[0].request_headers["authorization"] == f"Bearer {KEY}"
    replayed(recording)
    found = everything(recording)
    assert "/chat/completions" in found
    assert KEY not in found
    assert re.search("bearer", found.replace("Bearer [redacted]", ""), re.IGNORECASE) is None


# --- placed everywhere, echoed everywhere

PLACES: dict[str, tuple[str, Json]] = {
    "key": (KEY, {"client": {"api_key": KEY}}),
    "plain header": (
        "hunter-in-a-header",
        {"call": {"extra_headers": {"X-Plain": "hunter-in-a-header"}}},
    ),
    "cookie": (
        "cookie-0123456",
        {"call": {"extra_headers": {"Cookie": "a=b; sid=cookie-0123456"}}},
    ),
    "query": ("query value 0815", {"call": {"extra_query": {"sig": "query value 0815"}}}),
    "default query": ("default-0816", {"client": {"default_query": {"code": "default-0816"}}}),
    "user info": ("pass-word-0817", {"user_info": "me:pass-word-0817@"}),
    "custom auth": ("late-secret-0818", {"auth": "late-secret-0818"}),
}


class Reflecting(BaseHTTPRequestHandler):
    """Repeats address and headers of each request in an error, of the kind that `case` says."""

    case: Json

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        said = (
            f"{self.path} {urllib.parse.unquote_plus(self.path)} {json.dumps(dict(self.headers))}"
        )
        self.server.said.append(said)  # type: ignore[attr-defined]
        body: Json = {"error": {"message": said, "code": 401}}
        if self.case.get("late"):
            body = {"id": "chatcmpl-1", "object": "x" * 100, **body}
        stream, sent = bool(self.case.get("stream")), json.dumps(body)
        self.send_response(self.case.get("status", 200))
        self.send_header("content-type", "text/event-stream" if stream else "application/json")
        self.end_headers()
        self.wfile.write((f"data: {sent}\n\n" if stream else sent).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def reflecting(case: Json) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), type("Case", (Reflecting,), {"case": case}))
    server.said = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ECHOES: dict[str, Json] = {
    "refused": {"status": 401},
    "error with status 200": {"status": 200},
    "error behind other members": {"status": 200, "late": True},
    "error in a stream": {"status": 200, "stream": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("echo_of", ECHOES)
def test_no_secret_appears_wherever_it_stands(
    recording: Recording, clients: Clients, place: str, echo_of: str
) -> None:
    """A secret of a request that a server repeats is on no span and in no trajectory.

    Nor is it where the agent raises it again, from a tool or from the rollout itself.
    """
    secret, options = PLACES[place]
    case = ECHOES[echo_of]

    def sign(request: Any) -> Any:
        """Sign a request as it is sent, after the client has built it."""
        request.headers["X-Late"] = options["auth"]
        return request

    http_client = openai.DefaultHttpxClient(auth=sign if "auth" in options else None)
    settings = {"api_key": "none", "max_retries": 0, **options.get("client", {})}
    with reflecting(case) as server:
        address = f"http://{options.get('user_info', '')}127.0.0.1:{server.server_port}/v1"
        client = openai.OpenAI(base_url=address, http_client=http_client, **settings)
        clients.closing.append(client)

        def ask() -> str:
            try:
                return str(ask_once(client, options.get("call", {}), bool(case.get("stream"))))
            except openai.APIError as error:
                return str(error)

        @tool
        def asking() -> str:
            raise RuntimeError(f"the model said {ask()}")

        for fail in (lambda: exec("raise RuntimeError(ask())", {"ask": ask}), asking):
            with contextlib.suppress(RuntimeError), rollout("agent"):
                fail()
        said = "".join(server.said)  # type: ignore[attr-defined]
    assert secret in said or place == "user info"
    texts = [everything(recording), *(span.to_json() for span in recording.spans)]
    assert "RuntimeError" in texts[0]
    assert secret not in "\n".join(texts)


def ask_once(client: openai.OpenAI, options: Json, stream: bool) -> Any:
    reply: Any = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "q"}], stream=stream, **options
    )
    return [chunk.model_extra for chunk in reply] if stream else reply.model_extra


PLAIN = "hunter-in-a-header"
SIGNED: Json = {"default_headers": {"X-Plain": PLAIN}}


def refusing(said: str) -> Raw:
    return Raw(401, json.dumps({"error": {"message": said}}).encode())


def texts_of(recording: Recording) -> str:
    return "\n".join([everything(recording), *(span.to_json() for span in recording.spans)])


def test_an_error_that_leaves_a_rollout_inside_another(
    recording: Recording, clients: Clients
) -> None:
    """The outer rollout, and a tool in it, have the error of the inner one without its secrets."""
    client = clients.sync(clients.serve(refusing(f"not {PLAIN}")), **SIGNED)

    @tool
    def ask_agent() -> None:
        with rollout("inner"):
            chat_once(client)

    with pytest.raises(openai.AuthenticationError, match=PLAIN), rollout("outer"):
        ask_agent()
    assert "execute_tool" in texts_of(recording)
    assert PLAIN not in texts_of(recording)


def test_each_request_is_learned_from(recording: Recording, clients: Clients) -> None:
    """A secret of an earlier call is known, also where a later one differs in nothing else."""
    client = clients.sync(clients.serve("x"))

    @rollout
    def agent() -> None:
        for secret in (PLAIN, "another-in-a-header"):
            chat_once(client, extra_headers={"X-Plain": secret})
        raise RuntimeError(f"they were {PLAIN}")

    with pytest.raises(RuntimeError):
        agent()
    assert PLAIN not in texts_of(recording)


def test_a_secret_that_is_added_while_a_call_is_sent() -> None:
    """Headers are read when somebody asks, and again when the call is over."""
    secrets, headers = Secrets(), {"x-plain": "first-plain-value"}
    secrets.of_request(headers, call=1)
    assert secrets.scrub("first-plain-value second-plain-value") == "[redacted] second-plain-value"
    headers["x-plain"] = "second-plain-value"
    secrets.of_request({}, call=2)
    secrets.close(1)
    assert secrets.scrub("first-plain-value second-plain-value") == "[redacted] [redacted]"


@pytest.mark.parametrize(
    "reply",
    [
        Raw(200, json.dumps({"detail": f"not {PLAIN}"}).encode()),
        Raw(200, f"<p>{'x' * 190}{PLAIN}</p>".encode(), content_type="text/html"),
    ],
    ids=["without an error", "cut"],
)
def test_replies_that_no_model_made(recording: Recording, clients: Clients, reply: Raw) -> None:
    """An error under another name is scrubbed, and so is what a message quotes the start of."""
    client = clients.sync(clients.serve(reply), **SIGNED)
    with rollout("agent"), contextlib.suppress(openai.APIError):
        chat_once(client)
    assert PLAIN[:7] not in texts_of(recording)


@pytest.mark.parametrize("secret", ['quoted"back\\zyxwvut', "key/with+and==zyxwvut"])
@pytest.mark.parametrize("escape", [str, lambda text: text.replace("/", "\\/")])
def test_a_secret_in_the_escapes_of_json(
    recording: Recording, clients: Clients, secret: str, escape: Any
) -> None:
    """A server's JSON may have other characters for it."""
    said = escape(json.dumps({"error": {"message": f"not {secret}"}}))
    client = clients.sync(
        clients.serve(Raw(401, said.encode())), default_headers={"X-Plain": secret}
    )
    with pytest.raises(openai.AuthenticationError), rollout("agent"):
        chat_once(client)
    assert "zyxwvut" not in texts_of(recording).replace("[redacted]", "")


class Stop(BaseException):
    """What ends a program and is no `Exception`."""


def test_what_ends_a_program_has_no_secret_either(recording: Recording, clients: Clients) -> None:
    """An LLM span has it without them, as it has any error."""

    def stop(request: Any) -> None:
        raise Stop(f"sent {dict(request.headers)}")

    http_client = openai.DefaultHttpxClient(event_hooks={"request": [stop]})
    client = clients.sync(clients.serve("x"), http_client=http_client, **SIGNED)
    with pytest.raises(Stop), rollout("agent"):
        chat_once(client)
    assert "Stop" in texts_of(recording)
    assert PLAIN not in texts_of(recording)


def chat_once(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "q"}], **options
    )


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("chat/completions", "/chat/completions"),
        ("/chat/completions?api-version=1&key=secret", "/chat/completions?api-version&key"),
        ("https://me:pass@host:80/v1/chat/completions?k=v#f", "/v1/chat/completions?k"),
        ("https://host", "/"),
        ("//me:pass@host/v1", "/v1"),
        (
            "/responses/resp_1?stream=true&starting_after=3",
            "/responses/resp_1?stream&starting_after",
        ),
        ("/models/a:b/chat", "/models/a:b/chat"),
        ("/v1/chat?secret-token&beta=true", "/v1/chat?beta"),
    ],
)
def test_the_path_has_no_secret(url: str, path: str) -> None:
    """Of an address the path is kept, and of its query the names of the fields."""
    assert public_path(url) == path


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"Authorization": f"Bearer {KEY}"}, {f"Bearer {KEY}", KEY}),
        ({"authorization": KEY}, {KEY}),
        ({"X-Plain": "a-long-plain-value"}, {"a-long-plain-value"}),
        (
            {"Cookie": "a=0123456789; b=x"},
            {"a=0123456789; b=x", "0123456789; b=x", "a=0123456789", "0123456789"},
        ),
        (
            {"Authorization": "Basic bWU6cGFzcy13b3JkLTA4MTc="},
            {
                "Basic bWU6cGFzcy13b3JkLTA4MTc=",
                "bWU6cGFzcy13b3JkLTA4MTc=",
                "me:pass-word-0817",
                "pass-word-0817",
            },
        ),
        ({"X-Auth-Token": "short"}, set()),
        ({"X-Secret": None, "api-key": 7}, set()),
        ({"Content-Type": "application/json", "User-Agent": "OpenAI/Python"}, set()),
    ],
)
def test_what_of_headers_is_secret(headers: Any, found: set[str]) -> None:
    """Values of headers, and their parts, but harmless ones and those too short to be told."""
    assert secrets_in(headers) == found


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"key {KEY} is wrong", "key [redacted] is wrong"),
        ("Authorization: Bearer abcdef.123", "Authorization: Bearer [redacted]"),
        ("at https://me:pass@host/v1", "at https://[redacted]@host/v1"),
        ("GET /v1?key=0123456789&x=1", "GET /v1?key=[redacted]&x=1"),
        ('{"api_key": "0123456789"}', '{"api_key": "[redacted]"}'),
        ("OpenAI(api_key='0123456789')", "OpenAI(api_key='[redacted]')"),
        ("at https://me:p@ss@host/v1", "at https://[redacted]@host/v1"),
        (r'"sent {\"api_key\": \"0123456789\"}"', r'"sent {\"api_key\": \"[redacted]\"}"'),
        (r'"sent \"?key=0123456789\""', r'"sent \"?key=[redacted]\""'),
        ("KeyError: 'messages'", "KeyError: 'messages'"),
        ("max_tokens=4096000000", "max_tokens=4096000000"),
        ("see https://host/path?page=1", "see https://host/path?page=1"),
    ],
)
def test_what_looks_like_a_secret(text: str, clean: str) -> None:
    """Keys, bearers, passwords in addresses and assignments are redacted, other text is not."""
    assert scrub(text, ()) == clean


ANSWERED = '"choices":[{"index":0,"finish_reason":"stop"}]'
FAILED = '"error":{"code":1}'


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((ANSWERED,), False),
        ((ANSWERED, '"error":null'), False),
        (('"choices":[{"error":1,"finish_reason":"stop"}]',), False),
        ((FAILED,), True),
        ((FAILED, ANSWERED), True),
        ((ANSWERED, FAILED), True),
        (('"choices":[]', FAILED), True),
        (('"finish_reason":null', FAILED, '"choices":[]'), True),
        (('"content":"x"', FAILED), True),
        ((ANSWERED, '"prompt_token_ids":[1,2]'), False),
        ((ANSWERED, FAILED, '"prompt_token_ids":[1,2]'), True),
        ((ANSWERED, '"prompt_token_ids":[1,2]', FAILED), True),
        ((ANSWERED, '"details":[{"error":1}]'), True),
    ],
)
def test_a_reply_may_be_an_error_wherever_it_says_so(
    members: tuple[str, ...], expected: bool
) -> None:
    """That a choice failed is what the model's server says of it: nothing of it is scrubbed."""
    assert may_be_error(f"{{{','.join(members)}}}".encode()) is expected


def test_secrets_from_many_threads() -> None:
    """Requests are learned from while errors are scrubbed; none is lost and nothing raises."""
    secrets = Secrets()
    failed: list[BaseException] = []

    def learn(number: int) -> None:
        try:
            for turn in range(200):
                secrets.of_request({"x-key": f"secret-{number}-{turn:04}"}, f"/?n={turn:08}")
                secrets.scrub("text")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=learn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    text = " ".join(f"{number:08}" for number in range(200))
    assert re.search(r"\d", secrets.scrub(text)) is None
