"""What arrives at receivers over HTTP and gRPC that refuse, are full, are away, or hang: all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

import otel_rollout
from otel_rollout import ConfigurationError, Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.look import train_exporter
from otel_rollout.testing import ModelServer
from tests.kit.conversations import user
from tests.kit.played import ask
from tests.kit.receivers import (
    AWAY,
    BUSY,
    FULL,
    TOO_LARGE,
    UNANSWERED,
    GrpcReceiver,
    HttpReceiver,
    Receiver,
)
from tests.kit.recording import Clients

MIB = 1 << 20
Kind = type[HttpReceiver | GrpcReceiver]
BOTH = pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders send soon, and try again soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("otel_rollout.record.sending.backlog._LONGEST_PAUSE", 0.4)


def configure(
    monkeypatch: pytest.MonkeyPatch, receiver: HttpReceiver | GrpcReceiver, **options: Any
) -> TracerProvider:
    """Send to this receiver, as users do."""
    is_grpc = isinstance(receiver, GrpcReceiver)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if is_grpc else "http/protobuf")
    return otel_rollout.configure(
        "x", train_endpoint=receiver.url, **{"instrumentor": None, **options}
    )


def end_spans(provider: TracerProvider, *sizes: int) -> list[str]:
    """End a span of ours of each size; their names, sorted."""
    tracer = provider.get_tracer(sc.SCOPE)
    names = [f"{number:04}" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        tracer.start_span(name, attributes={"text": "é" * (size // 2)}).end()
    return names


def names_at(receiver: Receiver) -> list[str]:
    """The names of the spans that came, each once."""
    return sorted({span.span_id: span.name for span in receiver.spans}.values())


def eventually(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "otel_rollout"]


@BOTH
def test_requests_are_below_the_limit_of_grpc(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """Over HTTP too, since a receiver may pass them on: large spans, and very many attributes."""
    with kind() as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[300_000] * 30)
        many = {f"key of number {number}": number for number in range(120)}
        for _ in range(600):
            provider.get_tracer(sc.SCOPE).start_span("many", attributes=many).end()
        assert otel_rollout.shutdown()
    assert receiver.names() == sorted([*names, *["many"] * 600])
    assert max(receiver.sizes) < 4 * MIB
    assert receiver.refused == []


@BOTH
@pytest.mark.parametrize("answer", [AWAY, BUSY, TOO_LARGE])
def test_large_requests_that_are_refused_arrive_in_small_ones(
    kind: Kind, answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Whatever the refusal is, no span is cut, and few requests are refused."""
    with kind(64 * MIB) as receiver:
        receiver.refuse = lambda size: answer if size > 250_000 else 0
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[30_000] * 80, 200_000, 220_000)
        assert otel_rollout.shutdown()
    assert receiver.names() == names
    assert len(receiver.refused) <= 12
    assert sum(len(str(span.attributes["text"])) for span in receiver.spans) == 1_410_000
    assert said(caplog) == []


@BOTH
def test_large_calls_that_are_refused_for_a_while_are_rebuilt(
    kind: Kind, clients: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """503 for requests of some size, 200 for smaller ones: those wait, and nothing else does."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with kind(64 * MIB) as receiver:
        receiver.refuse = lambda size: AWAY if size > 100_000 else 0
        configure(monkeypatch, receiver)
        with rollout("x") as live:
            for number in range(8):
                ask(client, user(f"{number}" + "x" * 200_000))
        with rollout("y") as other:
            ask(client, user("hi"))
        assert eventually(lambda: any(span.name == "invoke_agent y" for span in receiver.spans))
        assert eventually(lambda: "takes other spans, and not" in caplog.text)
        receiver.refuse = lambda _: 0
        assert otel_rollout.shutdown()
    assert reconstruct(receiver.spans) == [live, other]


@BOTH
def test_a_try_is_one_request(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """OpenTelemetry's exporters would try for ten seconds, and nothing else be sent meanwhile."""
    with kind() as receiver:
        receiver.refuse = lambda _: AWAY
        configure(monkeypatch, receiver)  # for the protocol
        exporter = train_exporter(receiver.url)
        assert exporter is not None
        assert exporter.export([]) is SpanExportResult.FAILURE
        assert len(receiver.refused) == 1
        exporter.shutdown()


@BOTH
@pytest.mark.parametrize("answer", [AWAY, FULL])
def test_shutdown_tries_for_all_of_its_time(
    kind: Kind, answer: int, monkeypatch: pytest.MonkeyPatch
):
    """A disk that is full at the other side for a while loses nothing."""
    with kind() as receiver:
        receiver.refuse = lambda _: answer
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[10_000] * 32)
        again = threading.Timer(1.5, setattr, (receiver, "refuse", lambda _: 0))
        again.start()
        assert otel_rollout.shutdown(60_000)
        again.join()
    assert receiver.names() == names


@BOTH
def test_a_wait_that_is_asked_for(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """The next request comes after it, also where somebody waits for the spans."""
    with kind() as receiver:
        receiver.refuse, receiver.wait = (lambda _: AWAY), 3
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, 10)
        assert eventually(lambda: bool(receiver.refused))
        again = threading.Timer(1.5, setattr, (receiver, "refuse", lambda _: 0))
        again.start()
        assert otel_rollout.shutdown(60_000)
        again.join()
        assert len(receiver.refused) == 1
    assert receiver.names() == names


@BOTH
def test_a_wait_that_takes_longer_than_shutdown(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """It is not kept: all of the time is used."""
    with kind() as receiver:
        receiver.refuse, receiver.wait = (lambda _: AWAY), 60
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, 10)
        assert eventually(lambda: bool(receiver.refused))
        again = threading.Timer(1.0, setattr, (receiver, "refuse", lambda _: 0))
        again.start()
        assert otel_rollout.shutdown(20_000)
        again.join()
    assert receiver.names() == names


@BOTH
def test_spans_that_a_receiver_rejects_are_lost(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """They are not sent again; the log and what flushing and shutdown return have it."""
    with kind() as receiver:
        provider = configure(monkeypatch, receiver)
        end_spans(provider, 10, 10, 10)
        assert provider.force_flush()
        receiver.rejected = 2
        end_spans(provider, 10, 10, 10)
        assert not provider.force_flush()
        receiver.rejected = 0
        end_spans(provider, 10)
        assert not provider.force_flush()
        assert not otel_rollout.shutdown()
    assert len(receiver.spans) == 7
    assert "rejected 2 of 3 spans: they are lost. It says: why not" in caplog.text
    assert "2 of 7 spans did not reach" in caplog.text


@BOTH
def test_shutdown_returns_what_is_true(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Where nobody is, it takes all of its time, and logs how many spans have not arrived."""
    with kind() as gone:
        pass
    provider = configure(monkeypatch, gone)
    end_spans(provider, *[100] * 12)
    assert not provider.force_flush(300)
    began = time.monotonic()
    assert not otel_rollout.shutdown(1000)
    assert 0.9 < time.monotonic() - began < 8
    assert said(caplog)[-1].startswith("12 of 12 spans did not reach OTLPSpanExporter (")


@BOTH
def test_a_receiver_that_comes_later_gets_every_span(
    kind: Kind, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts run while it is away; then what waited arrives, without further spans or a flush."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with kind() as first:
        port = int(first.url.rpartition(":")[2])
    configure(monkeypatch, first)
    live = []
    for number in range(5):
        with rollout(f"r{number}") as trajectory:
            ask(client, user("hi"))
        live.append(trajectory)
    time.sleep(1.5)  # many pauses; from now on nothing ends
    with kind(port=port) as receiver:
        assert eventually(lambda: len(names_at(receiver)) == 15)
        assert otel_rollout.shutdown()
    assert reconstruct(receiver.spans) == live


@BOTH
def test_a_receiver_that_does_not_answer_and_is_restarted_misses_nothing(
    kind: Kind, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """What it took without an answer may come again to the next one: copies, and no loss."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    live = []

    def play(count: int) -> None:
        for number in range(count):
            with rollout(f"r{number}") as trajectory:
                ask(client, user("hi"))
            live.append(trajectory)

    with kind() as before:
        configure(monkeypatch, before)
        play(2)
        assert eventually(lambda: len(names_at(before)) == 6)
        acknowledged = list(before.spans)
        before.refuse = lambda _: UNANSWERED
        play(2)
        assert eventually(lambda: len(names_at(before)) > 6)
        before.go.clear()
        play(1)
        time.sleep(0.7)
    with kind(port=int(before.url.rpartition(":")[2])) as after:
        play(2)
        assert otel_rollout.shutdown()
    assert reconstruct([*acknowledged, *after.spans]) == live


@BOTH
def test_a_receiver_that_hangs_stops_no_rollout(
    kind: Kind, clients: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Calls are done before it has answered one request, and `shutdown` ends and says so."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with kind() as receiver:
        receiver.go.clear()
        configure(monkeypatch, receiver)
        with rollout("x") as live:
            for _ in range(20):
                ask(client, user("hi"))
        assert receiver.spans == []
        assert len(live.completions) == 20
        assert not otel_rollout.shutdown(500)
        assert "of 22 spans did not reach OTLPSpanExporter" in caplog.text


@BOTH
def test_a_span_over_the_limit_of_grpc_is_said_and_sent(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It arrives whole where the receiver takes it, and else alone does not, which is said."""
    with kind(64 * MIB) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, 100, 24_000_000, 100)
        assert otel_rollout.shutdown()
    assert receiver.names() == names
    assert [line.partition(" has ")[0] for line in said(caplog)] == ["the span '0001'"]
    caplog.clear()
    with kind(4 * MIB) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, 100, 5_000_000, *[100] * 600)
        assert eventually(lambda: "takes other spans" in caplog.text)
        assert not otel_rollout.shutdown(300)
    assert receiver.names() == [name for name in names if name != "0001"]
    assert "and not '0001' of 5000" in caplog.text
    assert said(caplog)[-1].startswith("1 of 602 spans did not reach OTLPSpanExporter (")


# --- where what goes


def test_calls_go_to_the_train_endpoint_alone(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """People have the rollout with its LLM spans, from which nothing is rebuilt."""
    client = clients.sync(clients.serve("ok"))
    with HttpReceiver() as people, HttpReceiver() as train:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", people.url)
        monkeypatch.setenv("OTEL_ROLLOUT_TRAIN_ENDPOINT", train.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20p")
        monkeypatch.setenv("OTEL_ROLLOUT_TRAIN_HEADERS", "authorization=Bearer%20t")
        otel_rollout.configure("x")
        with rollout("x") as live:
            ask(client, user("hi"))
        assert otel_rollout.shutdown()
    assert people.names() == ["chat m", "invoke_agent x"]
    assert train.names() == ["invoke_agent x", "recording /chat/completions", "rollout started"]
    assert reconstruct(train.spans) == [live]
    assert (people.keys, train.keys) == ({"Bearer p"}, {"Bearer t"})


@BOTH
def test_keys_of_a_backend_are_not_sent_to_the_train_endpoint(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    """They are those of another address; the environment stays as it was."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20p")
    with kind() as receiver:
        configure(monkeypatch, receiver)
        with rollout("x"):
            pass
        assert otel_rollout.shutdown()
    assert receiver.keys == {None}
    assert os.environ["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20p"


def test_an_endpoint_for_all_gets_each_span_once(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Without a train endpoint both lanes end at the one of the environment."""
    client = clients.sync(clients.serve("ok"))
    with HttpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        otel_rollout.configure("x")
        with rollout("x"):
            ask(client, user("hi"))
        assert otel_rollout.shutdown()
    assert receiver.names() == [
        *("chat m", "invoke_agent x", "recording /chat/completions", "rollout started")
    ]


def test_the_provider_of_a_user_sends_to_the_train_endpoint(monkeypatch: pytest.MonkeyPatch):
    """What people look at is its owner's; the train lane is ours."""
    with HttpReceiver() as receiver:
        configure(monkeypatch, receiver, tracer_provider=TracerProvider())
        with rollout("x") as live:
            pass
        assert otel_rollout.shutdown()
    assert reconstruct(receiver.spans) == [live]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_endpoint": ""}, r"train_endpoint=...\): expected an address that is not empty"),
        ({"train_endpoint": "host:4318"}, "expected an address such as 'http://"),
        ({"train_folder": 7}, r"train_folder=...\): expected a folder, got 7"),
        ({"train_folder": "x"}, "expected a receiver of what waits there, got none"),
        (
            {"train_folder": __file__, "train_endpoint": "http://h"},
            "expected a folder that can be written, got '.*test_receivers.py'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], expected: str):
    """Before anything is set up."""
    with pytest.raises(ConfigurationError, match=expected):
        otel_rollout.configure("x", **options)
    assert otel_rollout.shutdown()


# --- whatever happens

ANSWERS = st.sampled_from([0, 0, AWAY, BUSY, FULL, TOO_LARGE, UNANSWERED])


@settings(max_examples=8)
@given(answers=st.lists(ANSWERS, max_size=12), sizes=st.lists(st.integers(1, 300_000), max_size=6))
def test_whatever_it_answers_what_arrived_is_what_was_sent(answers: list[int], sizes: list[int]):
    """As a set; and the rollouts that are rebuilt of it are the live ones."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        ModelServer() as server,
        openai.OpenAI(api_key="k", base_url=server.base_url) as client,
    ):
        monkeypatch.setattr("otel_rollout.record.sending.backlog._LONGEST_PAUSE", 0.02)
        monkeypatch.setattr("otel_rollout.record.sending.backlog._FIRST_PAUSE", 0.01)
        left = iter(answers)
        with HttpReceiver() as receiver:
            receiver.refuse = lambda _: next(left, 0)
            configure(monkeypatch, receiver)
            live: list[Trajectory] = []
            for size in sizes:
                with rollout("x") as trajectory:
                    ask(client, user("x" * size))
                live.append(trajectory)
            assert otel_rollout.shutdown()
        assert reconstruct(receiver.spans) == live


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """Spans go through the proxy that it names: also when it is changed while the program runs."""
    with HttpReceiver() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        provider = otel_rollout.configure(
            "x", train_endpoint="http://collector.invalid:4318", instrumentor=None
        )
        names = end_spans(provider, 10)
        assert eventually(lambda: proxy.names() == names)
        monkeypatch.delenv("http_proxy")
        end_spans(provider, 10)
        assert otel_rollout.shutdown()
    assert proxy.names() == names * 2
