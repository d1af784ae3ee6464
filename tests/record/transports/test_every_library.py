"""What holds for every HTTP library: the call is captured, and the caller sees what it saw."""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable
from typing import Any

import pytest

import otel_rollout
from otel_rollout import Trajectory, gather_trajectory, no_capture, rollout
from otel_rollout.record import capture
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.state import process_state
from otel_rollout.testing import Raw, Reply
from tests.kit.calling import Configure
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import (
    BODY,
    COUNTED,
    EVERY,
    HEADERS,
    STREAMED,
    Library,
    Seen,
    ask,
)


async def outcome(asking: Awaitable[Seen]) -> Seen | tuple[Any, ...]:
    """What the caller sees, or the exception that it gets, without the port in its text."""
    try:
        return await asking
    except Exception as error:
        return type(error), len(error.args)


async def in_rollout(asking: Awaitable[Any]) -> Trajectory:
    """The trajectory of a rollout that does this, whatever comes of it."""

    @rollout
    async def agent() -> None:
        await outcome(asking)

    return await gather_trajectory(agent())


async def as_bare(
    configure: Configure, clients: Clients, library: Library, reply: Any, how: str, **options: Any
) -> tuple[Trajectory, Seen | tuple[Any, ...]]:
    """The trajectory of a call, which the caller has to see as without us; and what it sees."""
    bare = await outcome(ask(library, clients.serve(reply, **options), how))
    recording = configure()
    server = clients.serve(reply, **options)
    async with rollout("agent"):
        assert await outcome(ask(library, server, how)) == bare
    return recording.trajectory, bare


@EVERY
@STREAMED
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
async def test_a_call(
    configure: Configure, clients: Clients, library: Library, how: str, compress: bool
):
    """It is in the trajectory, whole."""
    trajectory, _ = await as_bare(
        configure, clients, library, "hello wörld, and more of it", how, compress=compress
    )
    assert trajectory.warnings == []
    (completion,) = trajectory.completions
    assert completion.status == "complete"
    assert (completion.message or {})["content"] == "hello wörld, and more of it"
    assert completion.request_messages == BODY["messages"]
    assert completion.stream is (how == "streamed")
    assert completion.token_ids


@EVERY
@pytest.mark.parametrize("how", ["whole", "streamed", "never"])
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_an_error(
    configure: Configure, clients: Clients, library: Library, how: str, status: int
):
    """It is a call that failed, also where nobody reads why."""
    reply = Raw(status=status, body=b'{"error": {"message": "no"}}')
    trajectory, _ = await as_bare(configure, clients, library, reply, how)
    (completion,) = trajectory.completions
    assert (completion.status, completion.message) == ("error", None)
    assert f"HTTP {status}" in (completion.error or {})["message"]
    assert ('"no"' in (completion.error or {})["message"]) is (how != "never")


@EVERY
async def test_nobody_listens(recording: Recording, library: Library):
    """The request is kept, with the error that the library raised."""
    pytest.importorskip(library.module)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1/chat/completions"
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        trajectory = await in_rollout(library.ask(url, body, "whole"))
    (completion,) = trajectory.completions
    assert completion.status == "error"
    assert completion.request_messages == [{"role": "user", "content": "hi"}]
    assert [w for w in trajectory.warnings if "captured" in w] == []


@EVERY
@STREAMED
async def test_a_reply_that_is_cut(
    configure: Configure, clients: Clients, library: Library, how: str
):
    """The reader gets the library's exception, and what had come is kept."""
    reply = Reply("Paris, the city of light", cut_after=3)
    trajectory, _ = await as_bare(configure, clients, library, reply, how)
    (completion,) = trajectory.completions
    assert completion.status == "error"
    assert not completion.trainable
    if how == "streamed":
        assert "Paris".startswith(str((completion.message or {})["content"])[:5])


@EVERY
@pytest.mark.parametrize("how", ["part", "never"])
async def test_a_reply_that_is_left(
    configure: Configure, clients: Clients, library: Library, how: str
):
    """What was read of it is kept, and does not train."""
    configure()
    server = clients.serve(Reply("Paris, the city of light", chunk_delay=0.05))
    trajectory = await in_rollout(ask(library, server, how))
    (completion,) = trajectory.completions
    assert (completion.status, completion.trainable) == ("abandoned", False)
    assert (completion.message is None) is (how == "never")


@EVERY
async def test_a_redirect(configure: Configure, clients: Clients, library: Library):
    """The request goes on to another address, and is one call."""
    if not library.redirects:
        pytest.skip("it follows none")
    target = clients.serve("there")
    moved = Raw(status=307, headers={"Location": target.base_url + "/chat/completions"})
    server = clients.serve(routes={"/v1/chat/completions": moved})
    configure()
    trajectory = await in_rollout(ask(library, server))
    (completion,) = trajectory.completions
    assert (completion.message or {})["content"] == "there"
    assert len(trajectory.exchanges) == 1
    assert trajectory.warnings == []


@EVERY
@pytest.mark.parametrize("how", ["whole", "streamed", "stream as a whole"])
async def test_token_ids_are_asked_for(
    recording: Recording, clients: Clients, library: Library, how: str
):
    """The request has the fields; the count of a stream that comes for them is not shown.

    Where it could not be kept from the reader it is not asked for.
    """
    server = clients.serve("Paris, the city", token_ids=False, logprobs=False)
    plain = clients.serve("Paris, the city", token_ids=True, logprobs=True)
    body = {} if how == "whole" else {"stream": True}
    reading = "streamed" if how == "streamed" else "whole"
    with no_capture():
        expected = await ask(library, plain, reading, body=body)
    async with rollout("agent"):
        with otel_rollout.request_token_ids():
            given = await ask(library, server, reading, body=body)
    (completion,) = recording.trajectory.completions
    assert completion.token_ids
    assert completion.logprobs
    assert (completion.usage is not None) is (how == "whole" or library.counts)
    assert (b'"usage":{' in given.body.replace(b" ", b"")) is (how == "whole")
    assert given.body.count(b"data:") == expected.body.count(b"data:")
    assert b"return_token_ids" in server.exchanges[0].request


@EVERY
@STREAMED
async def test_a_server_that_refuses_what_is_added(
    configure: Configure, clients: Clients, library: Library, how: str
):
    """The caller sees what it saw without us; the server is not asked so again."""
    configure()

    def answer(body: Any) -> Any:
        return Raw(400, b"return_token_ids?") if "return_token_ids" in body else "Paris"

    def exact(server: Any) -> list[bool]:
        return [b"return_token_ids" in each.request for each in server.exchanges]

    server = clients.serve(answer, token_ids=False, logprobs=False)
    with no_capture():
        bare = await ask(library, server, how)
    async with rollout("agent") as trajectory:
        with otel_rollout.request_token_ids():
            for _ in range(2):
                given = await ask(library, server, how)
                assert (given.status, len(given.body)) == (bare.status, len(bare.body))
    assert exact(server) == [False, True, False, False]
    first, second = trajectory.exchanges
    assert (first.attempts, second.attempts) == (2, 1)
    assert (
        first.refused
        == second.refused
        == "logprobs,return_token_ids" + ",stream_options" * (library.counts and how == "streamed")
    )
    for exchange, sent in zip((first, second), server.exchanges[2:], strict=True):
        assert exchange.request() == json.loads(sent.request)
    assert [completion.status for completion in trajectory.completions] == ["complete"] * 2


@EVERY
@pytest.mark.parametrize("how", ["whole", "streamed", "part", "never"])
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
async def test_what_the_caller_wrote_wrong(
    configure: Configure, clients: Clients, library: Library, how: str, compress: bool
):
    """It is sent once, and the caller sees the error as without us, however it reads it."""
    wrong = Raw(400, b'{"error": {"message": "a role is missing", "param": "messages"}}')
    with otel_rollout.request_token_ids():
        trajectory, _ = await as_bare(configure, clients, library, wrong, how, compress=compress)
    (exchange,) = trajectory.exchanges
    assert (exchange.status, exchange.attempts, exchange.refused) == ("error", 1, None)


@EVERY
@pytest.mark.parametrize(
    ("name", "value"),
    [("Authorization", "AWS4-HMAC-SHA256 Credential=a"), ("Content-Digest", "sha-256=:a=:")],
)
async def test_a_body_that_is_signed_is_sent_as_it_is(
    recording: Recording,
    clients: Clients,
    library: Library,
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Nothing is added to it, and the call is recorded."""
    monkeypatch.setitem(HEADERS, name, value)
    server = clients.serve("hello")
    async with rollout("agent"):
        with otel_rollout.request_token_ids():
            await ask(library, server)
    assert b"return_token_ids" not in server.exchanges[0].request
    assert len(recording.trajectory.completions) == 1


@EVERY
async def test_what_is_no_call_of_a_model(recording: Recording, clients: Clients, library: Library):
    """Other paths are passed by; a model's path that nobody here reads is counted, once."""
    server = clients.serve(
        routes={"/v1/log": Raw(body=b"{}"), "/v1/generate": Raw(body=b"{}")}, reply="hi"
    )
    async with rollout("agent"):
        await ask(library, server, path="/log?to=/chat/completions")
        await ask(library, server, path="/generate?key=x")
        with no_capture():
            await ask(library, server, path="/generate")
            await ask(library, server)
    trajectory = recording.trajectory
    assert trajectory.exchanges == []
    (warning,) = [each for each in trajectory.warnings if "captured" in each]
    assert warning == (
        f"1 request to /v1/generate went through {library.module} and was not captured"
    )


@pytest.mark.framework
@pytest.mark.parametrize("how", ["whole", "streamed", "part", "never"])
@pytest.mark.parametrize("name", COUNTED)
async def test_a_library_that_is_counted(
    recording: Recording, clients: Clients, name: str, how: str
):
    """Each call is named once, sent as it is, and its caller sees what it saw."""
    library, reply = COUNTED[name], Raw(body=b'{"choices": []}')
    bare = await ask(library, clients.serve(reply), how)
    server = clients.serve(reply)
    async with rollout("agent"):
        with otel_rollout.request_token_ids():
            for _ in range(2):
                assert await ask(library, server, how) == bare
        with no_capture():
            await ask(library, server, how)
        await ask(library, server, how, path="/log?to=/chat/completions")
    assert all(b"token_ids" not in exchange.request for exchange in server.exchanges)
    trajectory = recording.trajectory
    assert trajectory.exchanges == []
    (warning,) = trajectory.warnings
    through = "botocore" if name == "botocore" else "lm15", "dspy (lm15)"
    assert warning in {
        f"2 requests to /v1/chat/completions went through {each} and were not captured"
        for each in through
    }


@EVERY
async def test_outside_of_a_rollout(recording: Recording, clients: Clients, library: Library):
    """Nothing is recorded."""
    assert (await ask(library, clients.serve("hello"))).status == 200
    assert recording.spans == ()


@EVERY
@STREAMED
@pytest.mark.parametrize("step", ["request", "response"])
@pytest.mark.not_replayed("the recorder is broken on purpose")
async def test_what_breaks_in_the_recording_stays_there(
    recording: Recording,
    clients: Clients,
    library: Library,
    how: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The caller gets the reply all the same."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(ExchangeRecorder, step, broken)
    async with rollout("agent"):
        reply = await ask(library, clients.serve("hello"), how)
    assert reply.status == 200
    assert b"hello" in reply.body
    assert "not captured completely" in caplog.text
    caplog.clear()


@EVERY
async def test_the_hooks_go_out(recording: Recording, clients: Clients, library: Library):
    """After `shutdown` the library is as it was; hooked again, a call is recorded once."""
    server = clients.serve("hello")
    capture.instrument()
    async with rollout("agent"):
        await ask(library, server)
    assert len(recording.trajectory.completions) == 1
    hooked = [(owner, name) for owner, name, _ in process_state.hooks.installed]
    assert len(set(hooked)) == len(hooked)
    otel_rollout.shutdown()
    assert [each for each in hooked if hasattr(vars(each[0])[each[1]], "_self_wrapper")] == []
