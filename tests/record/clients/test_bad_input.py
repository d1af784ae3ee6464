"""Whatever a server or a caller does wrong: the user sees what a bare client shows."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from otel_rollout import Completion, Trajectory, rollout
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, Json, as_bare
from tests.kit.comparing import attribute, exchange_spans, replayed, sent
from tests.kit.conversations import ASK, chat
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow

DEEP = "[" * 2_000
BIG = "x" * 5_000_000


@pytest.fixture(autouse=True)
def capture_never_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Capture logs what it does not understand; none of this may come to that."""
    yield
    logged = [record for record in caplog.get_records("call") if record.name == "otel_rollout"]
    assert [record.getMessage() for record in logged] == []


def body(**changes: Any) -> Json:
    """A chat completion as servers send it."""
    message = {"role": "assistant", "content": "Paris"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], **changes}


def choice(**changes: Any) -> list[Json]:
    return [{**body()["choices"][0], **changes}]


def raw(value: Any, **options: Any) -> Raw:
    return Raw(200, json.dumps(value).encode(), **options)


def chunk(text: str | None, finish: str | None = None) -> str:
    delta = {} if text is None else {"content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": choices})


def events(*data: str, end: str = "\n\n", **options: Any) -> Raw:
    text = "".join(f"data: {item}{end}" for item in data)
    return Raw(200, text.encode(), content_type="text/event-stream", **options)


def gzipped(said: Raw) -> Raw:
    packed = gzip.compress(said.body)
    return Raw(said.status, packed, said.content_type, {"content-encoding": "gzip"})


WHOLE = (chunk("Par"), chunk("is"), chunk(None, "stop"), "[DONE]")
NAN_LOGPROBS = {"content": [{"token": "a", "logprob": math.nan}, {"token": "b", "logprob": -0.5}]}


@dataclass(frozen=True)
class Case:
    """A reply, and what its completion must be."""

    reply: Any
    status: str = "complete"
    error: str | None = None
    """Type of the error; `*` for whichever exception the client raises."""
    text: str | None = "Paris"
    """Content of the message; None where there is no message."""
    request: Json = field(default_factory=dict)
    warnings: int = 0
    alone: bool = False
    """Capture only: the instrumentor itself raises into the user's code here."""


def failed(reply: Any, error: str = "*", **options: Any) -> Case:
    return Case(reply, "error", error, options.pop("text", None), **options)


ERROR = {"error": {"message": "out of memory", "type": "server_error", "code": 7}}
PLAIN: dict[str, Case] = {
    "as usual": Case(raw(body())),
    "malformed JSON": failed(Raw(200, b'{"id": "x", "choices": [')),
    "HTML page": failed(
        Raw(200, b"<html>Gateway</html>", content_type="text/html"), "InvalidResponse"
    ),
    "nothing at all": failed(Raw(200, b"")),
    "a list": failed(raw([1, 2]), "InvalidResponse"),
    "a text": failed(raw("Paris"), "InvalidResponse"),
    "bytes that are no UTF-8": failed(Raw(200, b'{"id": "\xff\xfe"}')),
    "400": failed(Raw(400, json.dumps(ERROR).encode())),
    "404 in HTML": failed(Raw(404, b"<h1>Not found</h1>", content_type="text/html")),
    "422 with detail": failed(Raw(422, b'{"detail": [{"msg": "no such model"}]}')),
    "500": failed(Raw(500, json.dumps(ERROR).encode())),
    "503 without a body": failed(Raw(503)),
    "error with status 200": failed(raw(ERROR), "ErrorResponse"),
    "error text with status 200": failed(raw({"error": "overloaded"}), "ErrorResponse"),
    "cut body": failed(Reply("Paris", cut_after=1)),
    "no id": Case(raw({k: v for k, v in body().items() if k != "id"}), warnings=1),
    "null id": Case(raw(body(id=None)), warnings=1),
    "no choices": failed(raw(body(choices=[])), "EmptyResponse"),
    "null choices": failed(raw(body(choices=None)), "EmptyResponse"),
    "null message": failed(raw(body(choices=choice(message=None))), "EmptyResponse"),
    "gzip": Case(gzipped(raw(body()))),
    "5 MB": Case(
        raw(body(choices=choice(message={"role": "assistant", "content": BIG}))), text=BIG
    ),
    "NaN log-probability": Case(raw(body(choices=choice(logprobs=NAN_LOGPROBS))), warnings=1),
    "lone surrogate": Case(
        raw(body(choices=choice(message={"role": "assistant", "content": "a\ud83db"}))),
        text="a\ud83db",
    ),
    "duplicate keys": Case(
        Raw(200, b'{"id":"old",' + json.dumps(body()).encode()[1:]), text="Paris"
    ),
}
STREAMS: dict[str, Case] = {
    "as usual": Case(events(*WHOLE)),
    "no space behind data:": Case(
        Raw(200, "".join(f"data:{d}\n\n" for d in WHOLE).encode(), "text/event-stream")
    ),
    "CRLF": Case(events(*WHOLE, end="\r\n\r\n")),
    "comments": Case(
        Raw(
            200,
            b": keep-alive\n\n"
            + b"".join(b": ping\nid: 7\ndata: %b\n\n" % d.encode() for d in WHOLE),
            "text/event-stream; charset=utf-8",
        )
    ),
    "gzip": Case(gzipped(events(*WHOLE))),
    "no [DONE]": Case(events(*WHOLE[:-1])),
    "no [DONE], no finish reason": failed(events(*WHOLE[:2]), "EOFError", text="Paris"),
    "cut": failed(
        Reply("Paris is the capital", cut_after=3), "RemoteProtocolError", text="Paris is the cap"
    ),
    "no events": failed(events(), "EOFError"),
    "only [DONE]": failed(events("[DONE]"), "InvalidResponse"),
    "malformed event": failed(events(WHOLE[0], '{"id": "x", ', *WHOLE[1:]), "InvalidResponse"),
    "error event": failed(events(WHOLE[0], json.dumps(ERROR)), "ErrorResponse", text="Par"),
    "HTML page": failed(Raw(200, b"<html/>", "text/html"), "InvalidResponse"),
    "not streamed": Case(raw(body())),
    "not streamed, but called events": Case(
        Raw(200, json.dumps(body()).encode(), "text/event-stream")
    ),
    "a number called events": failed(Raw(200, b"-5", "text/event-stream"), "EOFError"),
    "a text called events": failed(Raw(200, b'"busy"', "text/event-stream"), "EOFError"),
    "400": failed(Raw(400, json.dumps(ERROR).encode())),
    "chunk without choices": Case(events(json.dumps({"id": "chatcmpl-1"}), *WHOLE), alone=True),
    "5 MB event": Case(events(chunk(BIG), *WHOLE[2:]), text=BIG),
    "lone surrogate": Case(events(chunk("a\ud83d"), chunk("b"), *WHOLE[2:]), text="a\ud83db"),
}


def check(case: Case, recording: Recording, seen: tuple[Any, ...]) -> tuple[Trajectory, Completion]:
    """The one completion, which must be what the case says."""
    (span,) = exchange_spans(recording)
    trajectory = replayed(recording)
    (completion,) = trajectory.completions
    raised = seen[1].__qualname__ if seen[0] == "raised" else None
    assert (completion.error or {}).get("type") == (raised if case.error == "*" else case.error)
    assert completion.status == case.status
    assert completion.trainable is (case.status == "complete")
    content = completion.message.get("content") if completion.message else None
    assert content == case.text
    assert len(trajectory.warnings) == case.warnings
    assert trajectory.status == ("error" if raised else "complete")
    assert completion.request_messages == ASK
    assert len(trajectory.histories) == (case.text is not None)
    if raised and case.error == "*":
        assert attribute(span, "status") == "error"
        assert not span.status.is_ok
    return trajectory, completion


@BOTH
@pytest.mark.parametrize("name", PLAIN)
async def test_replies(configure: Configure, clients: Clients, caller: Caller, name: str) -> None:
    """The user sees what a bare client shows, and the trajectory keeps what came and says so."""
    case = PLAIN[name]
    recording, server, seen = await as_bare(configure, clients, caller, lambda: case.reply, chat)
    _, completion = check(case, recording, seen)
    (wire,) = server.exchanges
    assert completion.request == sent(wire)
    if name == "cut body":
        assert completion.response is None
        return
    assert completion.exchange.status_code == wire.status
    came = gzip.decompress(wire.response) if name == "gzip" else wire.response
    try:
        expected = json.loads(came)
    except ValueError:
        expected = came.decode("utf-8", "backslashreplace")
    if isinstance(expected, str):
        assert completion.response == expected or (name == "404 in HTML" and completion.response)
    else:
        assert repr(completion.response) == repr(expected)  # NaN is not equal to itself


@BOTH
@pytest.mark.parametrize("name", STREAMS)
async def test_streams(
    configure: Configure, capture_only: Configure, clients: Clients, caller: Caller, name: str
) -> None:
    """The same for what a server may send when it was asked to stream."""
    case = STREAMS[name]

    async def script(client: Any) -> Any:
        return await chat(client, stream=True)

    start = capture_only if case.alone else configure
    recording, server, seen = await as_bare(start, clients, caller, lambda: case.reply, script)
    _, completion = check(case, recording, seen)
    assert completion.request == sent(server.exchanges[0])
    assert completion.exchange.status_code == server.exchanges[0].status


REPORTED = [("plain", name) for name in ("400", "500", "error with status 200")]
REPORTED += [("stream", name) for name in ("400", "error event")]


@BOTH
@pytest.mark.parametrize(("way", "name"), REPORTED)
async def test_an_error_of_the_server_keeps_its_numbers(
    configure: Configure, clients: Clients, caller: Caller, way: str, name: str
) -> None:
    """The completion's error has the server's own code, and the HTTP status of a refusal."""
    reply = (STREAMS if way == "stream" else PLAIN)[name].reply

    async def script(client: Any) -> Any:
        return await chat(client, **({"stream": True} if way == "stream" else {}))

    recording, _, _ = await as_bare(configure, clients, caller, lambda: reply, script)
    (completion,) = replayed(recording).completions
    assert completion.error is not None
    numbers = ["7"] if reply.status == 200 else ["7", str(reply.status)]
    assert [number in completion.error["message"] for number in numbers] == [True] * len(numbers)


@BOTH
@STREAMED
async def test_deeply_nested_arguments(
    configure: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """Tool arguments that no parser takes are text like any other, also when replayed."""
    reply = Reply(tool_calls=[ToolCall("add", DEEP, id="call_1")])
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": DEEP}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "invalid"},
    ]

    async def script(client: Any) -> Any:
        options = {"stream": True} if stream else {}
        return [await chat(client, **options), await chat(client, messages=messages, **options)]

    recording, _, seen = await as_bare(configure, clients, caller, lambda: reply, script)
    assert seen[0] == "returned"
    trajectory = replayed(recording)
    (history,) = trajectory.histories
    assert [item.trainable for item in history.items] == [False, True, False, True]
    assert history.messages()[-1]["tool_calls"][0]["function"]["arguments"] == DEEP


@BOTH
async def test_a_reply_that_is_nested_too_deeply(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """JSON that exhausts the client's parser is kept as text."""
    text = '{"id": "x", "choices": ' + "[" * 100_000
    reply = Raw(200, text.encode())
    recording, _, seen = await as_bare(configure, clients, caller, lambda: reply, chat)
    assert seen[0] == "raised"
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert completion.response == text


@BOTH
async def test_one_of_two_choices_has_no_message(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """A choice that is not whole says so; the other one is as good as ever."""
    first, second = choice(message=None)[0], choice(index=1)[0]
    reply = raw(body(choices=[first, second]))
    recording, _, _ = await as_bare(
        configure, clients, caller, lambda: reply, lambda client: chat(client, n=2)
    )
    empty, whole = replayed(recording).completions
    assert (empty.status, empty.trainable, empty.message) == ("error", False, None)
    assert (whole.status, whole.trainable, whole.error) == ("complete", True, None)
    assert whole.message == second["message"]


class Odd:
    """Something that is no JSON."""

    def __repr__(self) -> str:
        return "<Odd>"


REQUESTS: dict[str, Json] = {
    "object in a message": {"messages": [{"role": "user", "content": Odd()}]},
    "object as a message": {"messages": [*ASK, Odd()]},
    "set in a parameter": {"messages": ASK, "stop": {1, 2}},
    "bytes": {"messages": [{"role": "user", "content": b"raw"}]},
    "NaN": {"messages": ASK, "temperature": math.nan},
    "lone surrogate": {"messages": [{"role": "user", "content": "a\ud83db"}]},
    "no messages": {"messages": []},
    "keys that are no text": {"messages": [{"role": "user", "content": "x", 7: (1, 2)}]},
    "5 MB": {"messages": [{"role": "user", "content": BIG}]},
    "messages that are no list": {"messages": "hello"},
    "null messages": {"messages": None},
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "messages without a role": {"messages": [{"content": "x"}]},
}


@BOTH
@pytest.mark.parametrize("name", REQUESTS)
async def test_requests(configure: Configure, clients: Clients, caller: Caller, name: str) -> None:
    """A request that cannot be sent fails as with a bare client; what can be kept of it is."""

    async def script(client: Any) -> Any:
        return await chat(client, **REQUESTS[name])

    recording, server, seen = await as_bare(configure, clients, caller, lambda: raw(body()), script)
    trajectory = replayed(recording)
    (span,) = exchange_spans(recording)
    (completion,) = trajectory.completions
    if server.exchanges:
        assert completion.request == sent(server.exchanges[0])
        assert completion.status == ("complete" if seen[0] == "returned" else "error")
    else:
        assert seen[0] == "raised"
        assert completion.status == "error"
        assert completion.error is not None
        assert completion.error["type"] == seen[1].__qualname__
        assert isinstance(completion.request, dict)
        assert completion.request["model"] == "m"
        assert len(completion.request["messages"]) == len(REQUESTS[name]["messages"])
        assert attribute(span, "attempts") == 0
    assert trajectory.warnings == []


async def test_what_is_refused_before_a_request_is_made(
    recording: Recording, clients: Clients
) -> None:
    """A call that the client refuses outright is no exchange, and raises as ever."""
    client = clients.asynchronous(clients.serve("Paris"))
    with pytest.raises(TypeError, match="Missing required arguments"):
        async with rollout("agent"):
            await client.chat.completions.create(model="m")  # type: ignore[call-overload]
    trajectory = replayed(recording)
    assert trajectory.exchanges == []
    assert trajectory.error is not None
    assert trajectory.error["type"] == "TypeError"


async def test_one_bad_reply_does_not_spoil_the_next(
    recording: Recording, clients: Clients
) -> None:
    """After every kind of bad reply the same rollout goes on as if nothing had been."""
    bad = [*(case.reply for case in PLAIN.values()), *(case.reply for case in STREAMS.values())]
    replies = [said for reply in bad for said in (reply, Reply("fine"))]
    client = clients.asynchronous(clients.serve(replies))
    async with rollout("agent"):
        for number in range(len(bad)):
            for _ in range(2):
                try:
                    await chat(client, stream=number >= len(PLAIN))
                except Exception:
                    pass
    trajectory = replayed(recording)
    assert len(trajectory.completions) == 2 * len(bad)
    assert [c.status for c in trajectory.completions[1::2]] == ["complete"] * len(bad)
    assert all((c.message or {})["content"] == "fine" for c in trajectory.completions[1::2])
