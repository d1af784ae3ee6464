"""A server's refusal is about that request, until it is shown to be about the server."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
import requests

from otel_rollout import request_token_ids, rollout
from otel_rollout.record import added_fields, process_state
from otel_rollout.record.added_fields import Added
from otel_rollout.testing import ModelServer, Raw
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

HTTPX: Any = importlib.import_module(
    type(openai.DefaultHttpxClient()).__mro__[1].__module__.partition(".")[0]
)
"""The HTTP client of the installed openai: openai 3 has httpx2, older ones httpx."""
HI: Any = [{"role": "user", "content": "hi"}]
NAN = "Out of range float values are not JSON compliant: nan"
Answer = Callable[[int, dict[str, Any]], str | None]
"""The text of a refusal of a request, by its number among those that ask. None: it is taken."""


def error(text: str, status: int = 400) -> Raw:
    return Raw(status, json.dumps({"error": {"message": text, "type": "BadRequestError"}}).encode())


def serve(clients: Clients, answer: Answer) -> ModelServer:
    """A server that refuses some of the requests that ask for token ids."""
    asked = 0

    def reply(body: dict[str, Any]) -> Raw | str:
        nonlocal asked
        if "return_token_ids" not in body:
            return "hello"
        asked += 1
        text = answer(asked, body)
        return "hello" if text is None else error(text)

    return clients.serve(reply, token_ids=False, logprobs=False)


def asks(server: ModelServer) -> list[bool]:
    """For each request whether it asked for token ids."""
    return ["return_token_ids" in json.loads(each.request) for each in server.exchanges]


async def by_openai(clients: Clients, server: ModelServer, **body: Any) -> int:
    client = clients.sync(server)
    try:
        reply = client.chat.completions.create(model="m", messages=HI, **body)
    except openai.BadRequestError:
        return 400
    text = reply.choices[0].message.content if not body.get("stream") else read(list(reply))
    assert text == "hello"
    return 200


async def by_async_openai(clients: Clients, server: ModelServer, **body: Any) -> int:
    client = clients.asynchronous(server)
    try:
        reply = await client.chat.completions.create(model="m", messages=HI, **body)
        if body.get("stream"):
            assert read([chunk async for chunk in reply]) == "hello"
    except openai.BadRequestError:
        return 400
    return 200


def read(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def _post(server: ModelServer, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{server.base_url}/chat/completions"
    return {"url": url, "json": {"model": "m", "messages": HI, **body}}


async def by_httpx(_: Clients, server: ModelServer, **body: Any) -> int:
    with HTTPX.Client() as client:
        if not body.get("stream"):
            return whole(client.post(**_post(server, body)))
        with client.stream("POST", **_post(server, body)) as response:
            text = b"".join(response.iter_raw())
            assert b"hello" in text or "error" in json.loads(text)
            return int(response.status_code)


async def by_async_httpx(_: Clients, server: ModelServer, **body: Any) -> int:
    async with HTTPX.AsyncClient() as client:
        if not body.get("stream"):
            return whole(await client.post(**_post(server, body)))
        async with client.stream("POST", **_post(server, body)) as response:
            await response.aread()
            assert b"hello" in response.content or "error" in response.json()
            return int(response.status_code)


async def by_requests(_: Clients, server: ModelServer, **body: Any) -> int:
    with requests.post(**_post(server, body), stream=body.get("stream"), timeout=60) as response:
        text = b"".join(response.iter_content(7))
        assert b"hello" in text or "error" in json.loads(text)
        return int(response.status_code)


def whole(response: Any) -> int:
    assert "hello" in response.text or "error" in response.json()
    return int(response.status_code)


ASK: dict[str, Callable[..., Awaitable[int]]] = {
    "openai": by_openai,
    "async openai": by_async_openai,
    "httpx": by_httpx,
    "async httpx": by_async_httpx,
    "requests": by_requests,
}
EVERY = pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
STREAMED = pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["plain", "stream"])


@EVERY
@STREAMED
async def test_one_reply_that_is_no_json(
    recording: Recording,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    ask: Callable[..., Awaitable[int]],
    body: dict[str, Any],
):
    """The agent gets its reply, the next calls ask for token ids, and the trajectory says it."""
    server = serve(clients, lambda number, _: NAN if number == 2 else None)
    with request_token_ids(), rollout("agent"):
        assert [await ask(clients, server, **body) for _ in range(5)] == [200] * 5
    assert asks(server) == [True, True, False, True, True, True]
    trajectory = replayed(recording)
    assert [bool(each.token_ids) for each in trajectory.completions] == [1, 0, 1, 1, 1]
    assert [bool(each.exchange.refused) for each in trajectory.completions] == [0, 1, 0, 0, 0]
    (warning,) = trajectory.warnings
    assert warning.startswith("1 replies have no token ids: the server refused the fields that ask")
    assert "refuses" not in caplog.text


@STREAMED
@pytest.mark.parametrize("each", [2, 4, 5])
async def test_each_nth_request_is_refused(
    recording: Recording, clients: Clients, body: dict[str, Any], each: int
):
    """All others train, however many they are."""
    server = serve(clients, lambda number, _: "no" if number % each == 0 else None)
    with request_token_ids(), rollout("agent"):
        for _ in range(40):
            assert await by_openai(clients, server, **body) == 200
    assert sum(asks(server)) == 40
    assert sum(bool(c.token_ids) for c in recording.trajectory.completions) == 40 - 40 // each


@EVERY
@STREAMED
async def test_a_server_that_refuses_without_a_name(
    recording: Recording,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    ask: Callable[..., Awaitable[int]],
    body: dict[str, Any],
):
    """It is asked three times, then no more for a while; the log says so once."""
    server = serve(clients, lambda *_: "Extra inputs are not permitted")
    with caplog.at_level(logging.WARNING), request_token_ids(), rollout("agent"):
        for _ in range(40):
            assert await ask(clients, server, **body) == 200
    assert asks(server) == [True, False] * 3 + [False] * 32 + [True, False] + [False] * 4
    (line,) = [each for each in caplog.messages if "refuses" in each]
    assert "logprobs,return_token_ids" in line
    assert recording.trajectory.warnings == [
        "40 replies have no token ids: the server refused the fields that ask for them "
        f"({recording.trajectory.exchanges[0].refused})"
    ]


async def test_it_is_tried_again_after_a_while(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """By time too; a server that takes the fields then is asked as any other."""
    monkeypatch.setattr(added_fields, "_SECONDS", 0.0)
    server = serve(clients, lambda number, _: "unknown: logprobs" if number < 3 else None)
    with request_token_ids(), rollout("agent"):
        for _ in range(4):
            await by_openai(clients, server)
    assert asks(server) == [True, False, True, False, True, True]
    assert [bool(each.token_ids) for each in recording.trajectory.completions] == [0, 0, 1, 1]


async def test_a_name_counts_after_successes_too(recording: Recording, clients: Clients):
    """A server that begins to refuse a field, such as one that was started anew, is believed."""
    server = serve(clients, lambda number, _: None if number < 3 else "extra: return_token_ids")
    with request_token_ids(), rollout("agent"):
        for _ in range(5):
            assert await by_openai(clients, server) == 200
        assert await by_openai(clients, server, stream=True) == 200  # is another kind of request
    assert asks(server) == [True, True, True, False, False, False, True, False]


OWN: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAI": ({"temperature": 3}, "Invalid 'temperature': decimal above maximum value."),
    "vLLM": ({"temperature": -1}, "temperature must be non-negative, got -1.0."),
    "SGLang": ({"top_p": 2}, "top_p must be in (0, 1], got 2."),
    "llama.cpp": ({"n": 0}, "n must be at least 1"),
    "pydantic": (
        {"max_tokens": "x"},
        "[{'type': 'int_parsing', 'loc': ('body', 'max_tokens'), 'msg': 'Input should be a valid "
        "integer', 'input': 'x'}]",
    ),
    "messages": ({}, "Invalid 'messages[0].role': 'foo' is not one of the roles"),
}


@EVERY
@STREAMED
@pytest.mark.parametrize("name", OWN)
async def test_an_agents_own_mistake(
    recording: Recording,
    clients: Clients,
    ask: Callable[..., Awaitable[int]],
    body: dict[str, Any],
    name: str,
):
    """It is sent once, the agent gets its error, and ids are asked for as before."""
    wrong, text = OWN[name]
    server = clients.serve([error(text), "hello"], token_ids=False, logprobs=False)
    given = {"extra_body": wrong} if "openai" in ask.__name__ else wrong
    with request_token_ids(), rollout("agent"):
        assert await ask(clients, server, **body, **given) == 400
        assert await ask(clients, server, **body) == 200
    assert asks(server) == [True, True]
    first = recording.trajectory.exchanges[0]
    assert (first.status, first.attempts, first.refused) == ("error", 1, None)
    assert text[:20] in str(first.body_text)


BODY = {"model": "m", "messages": [], "temperature": 1, "tools": [], "stream": True, "top_p": 1}
ABOUT: list[tuple[str, str | None]] = [
    ("Unrecognized request argument supplied: return_token_ids", "ours"),
    ("Unknown parameter: 'return_token_ids'.", "ours"),
    ('{"error":{"message":"bad","param":"logprobs","code":400}}', "ours"),
    ("logprobs is not supported with tools + stream", "ours"),
    ("`logprobs` are not available with temperature", "ours"),
    ('{"detail":[{"loc":["body","logprobs"],"msg":"Extra inputs","input":true}]}', "ours"),
    ("('body', 'return_token_ids'), 'msg': 'Extra inputs are not permitted'", "ours"),
    ("Invalid 'top_p': decimal above maximum value.", "client's"),
    ("Invalid 'messages': empty array.", "client's"),
    ('{"error":{"message":"too hot","param":"temperature"}}', "client's"),
    ('{"detail":[{"loc":["body","messages",0],"msg":"Field required"}]}', "client's"),
    ("`top_p` must be > 0.0 and < 1.0", "client's"),
    ('{"error":{"message":"too long","param":"messages"}}', "client's"),
    ("Temperature is out of range", "client's"),
    ("top_logprobs may not be given", None),
    ("Out of range float values are not JSON compliant", None),
    ("Unexpected fields in the request", None),
    ("This model does not support the requested options of messages and tools", None),
    (
        "no: {'logprobs': True, 'temperature': 1, 'return_token_ids': True}",
        None,
    ),
    ('{"msg":"bad","input":{"model":"m","temperature":1,"logprobs":true}}', None),
    ("", None),
]


@pytest.mark.parametrize(("text", "about"), ABOUT)
def test_what_an_error_is_about(text: str, about: str | None):
    """A field is named as a word, not as a member of a request that the error repeats."""
    added = Added({"logprobs": True, "return_token_ids": True}, own=tuple(BODY))
    names = added.take_back(text, 400)
    assert (names is None) == (about == "client's")
    assert added._is_named == (about == "ours")


def test_what_is_remembered_is_bounded(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """However many servers are asked."""
    monkeypatch.setattr(added_fields, "_MOST", 2)
    with request_token_ids(), rollout("agent"):
        for _ in range(4):
            clients.sync(clients.serve("hi")).chat.completions.create(model="m", messages=HI)
    assert len(process_state.refusals) <= 2


@EVERY
@pytest.mark.parametrize("status", [404, 500, 501])
async def test_other_statuses_by_which_fields_are_refused(
    recording: Recording, clients: Clients, ask: Callable[..., Awaitable[int]], status: int
):
    """Where the error names one, the call does not fail for it."""
    text = "No endpoints found that can handle the requested parameters."
    text = text if status == 404 else "logprobs is not supported with tools + stream"
    server = clients.serve(
        lambda body: error(text, status) if "return_token_ids" in body else "hello",
        token_ids=False,
        logprobs=False,
    )
    with request_token_ids(), rollout("agent"):
        assert await ask(clients, server) == 200
    assert asks(server) == [True, False]
    assert replayed(recording).completions[0].status == "complete"


def test_an_error_of_the_server_is_none(recording: Recording, clients: Clients):
    """Without a word about a field it is the call's outcome, and is sent once."""
    server = clients.serve(error("out of memory", 500))
    client = clients.sync(server, max_retries=0)
    with request_token_ids(), rollout("agent"), pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="m", messages=HI)
    assert asks(server) == [True]


def test_a_refusal_for_one_model_is_not_of_another(recording: Recording, clients: Clients):
    """A judge beside the policy, on one server: the policy's calls have ids."""

    def reply(body: dict[str, Any]) -> Raw | str:
        is_refused = body["model"] == "judge" and "return_token_ids" in body
        return error("logprobs is not supported with this model") if is_refused else "hello"

    server = clients.serve(reply, token_ids=False, logprobs=False)
    client = clients.sync(server)
    with request_token_ids(), rollout("agent"):
        for model in ["policy", "judge"] * 4:
            client.chat.completions.create(model=model, messages=HI)
    sent = [json.loads(each.request) for each in server.exchanges]
    assert ["return_token_ids" in each for each in sent if each["model"] == "policy"] == [True] * 4
    assert ["return_token_ids" in each for each in sent if each["model"] == "judge"] == (
        [True, False] + [False] * 3
    )
