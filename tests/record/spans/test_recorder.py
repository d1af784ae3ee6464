"""The exchange recorder from bytes alone: it records what the client's capture records of them."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import Trajectory, rollout, tool
from otel_rollout.record import Observer, Observers, process_state
from otel_rollout.record.current import current_rollout
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.encoding import decoded
from otel_rollout.testing import ModelServer, Raw, Reply, WireExchange
from tests.kit.comparing import attribute, exchange_spans
from tests.kit.conversations import ASK
from tests.kit.recording import Clients, Recording

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
OWN = ("rollout.id", "rollout.exchange.process")
"""Attributes that differ from rollout to rollout."""


def recorder() -> ExchangeRecorder:
    """A recorder in the current rollout."""
    active = current_rollout()
    assert active is not None
    return ExchangeRecorder(active, "/chat/completions")


def replay(wire: WireExchange, headers: Mapping[str, str], size: int = 7) -> ExchangeRecorder:
    """Record the bytes of an exchange, the response in pieces; its end is the caller's to say."""
    call = recorder()
    call.request(wire.request, wire.request_headers)
    assert call.response(wire.status, headers)
    for start in range(0, len(wire.response), size):
        call.chunk(wire.response[start : start + size])
    return call


def asked(clients: Clients, server: ModelServer, **request: Any) -> None:
    """Let the client ask in a rollout, and read what comes."""
    with rollout("agent"):
        client = clients.sync(server, max_retries=request.pop("max_retries", 0))
        try:
            reply = client.chat.completions.create(model="m", messages=ASK, **request)
            if request.get("stream"):
                list(reply)
        except openai.APIError as error:
            logging.getLogger(__name__).debug("the client raised %r", error)


def both(recording: Recording) -> tuple[Trajectory, Trajectory]:
    """The client's trajectory and the recorder's; the attributes of their spans are the same."""
    first, second = (
        {name: value for name, value in (span.attributes or {}).items() if name not in OWN}
        for span in exchange_spans(recording)
    )
    assert first == second
    captured, recorded = recording.trajectories
    return captured, recorded


def facts(trajectory: Trajectory) -> list[Any]:
    """The completions, without where and when they were recorded."""
    return [
        (c.id, c.message, c.request, c.response, c.status, c.error, c.finish_reason, c.stream)
        for c in trajectory.completions
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("compressed", [False, True], ids=["identity", "gzip"])
def test_the_same_trajectory_as_from_the_client(
    recording: Recording, clients: Clients, stream: bool, n: int, compressed: bool
) -> None:
    """Plain, streamed and compressed replies: spans and completions equal the client's."""
    server = clients.serve(Reply("Paris"))
    asked(clients, server, stream=stream, n=n)
    wire, headers = server.exchanges[0], dict(EVENTS if stream else JSON)
    if compressed:
        headers["content-encoding"] = "gzip"
        wire = WireExchange(
            wire.path,
            wire.request,
            wire.request_headers,
            wire.status,
            gzip.compress(wire.response),
        )
    with rollout("agent"):
        replay(wire, headers).end()
    captured, recorded = both(recording)
    assert facts(captured) == facts(recorded)
    assert [c.status for c in recorded.completions] == ["complete"] * n


def test_a_body_that_was_read(recording: Recording, clients: Clients) -> None:
    """The decoded body may be given at once, whatever its encoding was."""
    server = clients.serve(Reply("Paris"))
    asked(clients, server)
    (wire,) = server.exchanges
    with rollout("agent"):
        call = recorder()
        call.request(wire.request, wire.request_headers)
        assert not call.response(200, {**JSON, "content-encoding": "gzip"}, wire.response)
        call.end()
    captured, recorded = both(recording)
    assert facts(captured) == facts(recorded)


def test_a_stream_that_is_cut(recording: Recording, clients: Clients) -> None:
    """Events that end before the reply is complete are an error, here and there."""
    part = b"".join(
        b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"
        for choice in ({"index": 0, "delta": {"content": "Par"}},)
    )
    server = clients.serve(Raw(200, part, content_type="text/event-stream"))
    asked(clients, server, stream=True)
    with rollout("agent"):
        replay(server.exchanges[0], EVENTS).end()
    captured, recorded = both(recording)
    assert facts(captured) == facts(recorded)
    (completion,) = recorded.completions
    assert (completion.status, (completion.error or {})["type"]) == ("error", "EOFError")


def test_a_stream_that_is_left(recording: Recording, clients: Clients) -> None:
    """A reply that is read no further is abandoned, and kept as far as it came."""
    server = clients.serve(Reply("Paris"))
    asked(clients, server, stream=True)
    (wire,) = server.exchanges
    half = wire.response[: wire.response.index(b"\n\n", len(wire.response) // 2) + 2]
    with rollout("left"):
        call = recorder()
        call.request(wire.request, wire.request_headers)
        call.response(200, EVENTS)
        call.chunk(half)
        call.leave()
        call.chunk(wire.response[len(half) :])
        call.end()
    (completion,) = recording.trajectories[-1].completions
    assert completion.status == "abandoned"
    assert not completion.trainable


def test_a_rollout_that_ends_first(recording: Recording, clients: Clients) -> None:
    """A reply that is being read when its rollout ends is kept as far as it came."""
    server = clients.serve(Reply("Paris"))
    asked(clients, server, stream=True)
    with rollout("ends"):
        call = replay(server.exchanges[0], EVENTS, size=1 << 20)
        assert call.finished  # nothing comes after the last event
        open_call = recorder()
        open_call.response(200, EVENTS)
    assert open_call.finished
    assert [attribute(s, "status") for s in exchange_spans(recording)][-2:] == [
        "complete",
        "abandoned",
    ]


@pytest.mark.parametrize("read", [False, True], ids=["in pieces", "read"])
def test_an_error(recording: Recording, clients: Clients, read: bool) -> None:
    """A reply with an error status is an error with its body, without the request's key."""
    secret = "sk-not-a-real-key"
    body = {"detail": f"no such key: {secret}"}
    server = clients.serve(Raw(401, json.dumps(body).encode()))
    asked(clients, server)
    (wire,) = server.exchanges
    with rollout("agent"):
        if read:
            call = recorder()
            call.request(wire.request, wire.request_headers)
            call.response(401, JSON, wire.response)
        else:
            call = replay(wire, JSON)
        call.end()
    captured, recorded = recording.trajectories
    (seen,), (found,) = captured.completions, recorded.completions
    assert (found.status, found.response) == (seen.status, seen.response)
    assert found.response == {"detail": "no such key: [redacted]"}
    assert found.error is not None
    assert found.error["type"] == "ErrorResponse"
    assert "HTTP 401" in found.error["message"]
    assert secret not in json.dumps(recorded.to_dict())
    assert [attribute(s, "attempts") for s in exchange_spans(recording)] == [1, 1]


def test_an_exception_of_the_reader(recording: Recording) -> None:
    """A connection that breaks is an error of the type of the exception."""
    with rollout("agent"):
        call = recorder()
        call.request(b'{"messages": []}', {})
        call.response(200, EVENTS)
        call.end(error=ConnectionResetError("gone"))
        call.end()
    (completion,) = recording.trajectory.completions
    assert completion.error == {"type": "ConnectionResetError", "message": "gone"}


def test_a_retry(recording: Recording, clients: Clients) -> None:
    """A retry is an attempt of the same exchange, with the status that it follows."""
    failure = Raw(503, b"busy", headers={"retry-after-ms": "1"})
    server = clients.serve([failure, Reply("Paris")])
    asked(clients, server, max_retries=1)
    first, second = server.exchanges
    with rollout("agent"):
        call = recorder()
        call.request(first.request, first.request_headers)
        call.attempt_failed(first.status, {**JSON, **failure.headers}, "busy")
        call.request(second.request, second.request_headers)
        call.response(second.status, JSON)
        call.chunk(second.response)
        call.end()
    captured, recorded = both(recording)
    assert facts(captured) == facts(recorded)
    for span in exchange_spans(recording):
        assert attribute(span, "attempts") == 2
        assert [dict(event.attributes or {}) for event in span.events] == [{"http_status": 503}]


def test_what_is_no_conversation(recording: Recording) -> None:
    """Speech is not recorded, nor the file that was uploaded; that there was a call is."""
    with rollout("agent"):
        call = recorder()
        call.request(None, {"content-type": "multipart/form-data"})
        assert not call.response(200, {"content-type": "audio/mpeg"})
        call.chunk(b"\x00" * 100)
        call.end()
    (span,) = exchange_spans(recording)
    assert attribute(span, "status") == "complete"
    assert not [name for name in span.attributes or {} if "body" in name]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        (None, bytes),
        ("identity", bytes),
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda body: zlib.compress(body)[2:-4]),
        ("gzip, deflate", lambda body: zlib.compress(gzip.compress(body))),
        ("unheard-of", bytes),
    ],
)
def test_encodings(encoding: str | None, encode: Any) -> None:
    """Each encoding is taken off, the last one first; nothing is done to one that is not known."""
    assert decoded(encode(b"Paris " * 20), encoding) == b"Paris " * 20


def test_a_cut_encoding() -> None:
    """Of compressed bytes that were cut, the beginning is there; what is none is an exception."""
    body = bytes(range(256)) * 8
    found = decoded(gzip.compress(body)[:-30], "gzip")
    assert body.startswith(found)
    assert len(found) > 0
    with pytest.raises(zlib.error):
        decoded(b"no gzip", "gzip")


class Failing(Observer):
    """Fails at each step, and keeps which steps there were."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def _fail(self, step: str) -> None:
        self.steps.append(step)
        raise RuntimeError(step)


def _failing_at(step: str) -> Any:
    return lambda self, *_, **__: self._fail(step)


STEPS = [name for name in vars(Observer) if not name.startswith("_")]
for _step in STEPS:
    setattr(Failing, _step, _failing_at(_step))


class Full:
    """An exporter with a thread of its own, which takes nothing."""

    blocking = True

    def export(self, trajectories: object) -> None:
        raise OSError("full")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None: ...


def test_an_observer_that_fails_changes_nothing(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """Each step is reported, and what is recorded is what it was; the other observers go on."""
    first, last = Failing(), Failing()
    otel_rollout.configure(exporters=[Full()])
    monkeypatch.setattr(process_state, "observers", Observers([first, last]))
    client = clients.sync(clients.serve("fine"))

    @tool
    def add() -> int:
        return 1

    with rollout("agent") as trajectory:
        reply = client.chat.completions.create(model="m", messages=ASK)
        add()
        trajectory.reward = 1.0
    assert reply.choices[0].message.content == "fine"
    assert [completion.status for completion in trajectory.completions] == ["complete"]
    assert (trajectory.status, trajectory.reward, trajectory.warnings) == ("complete", 1.0, [])
    assert recording.provider.force_flush()
    assert first.steps == last.steps
    assert set(first.steps) == set(STEPS)
