"""What a span keeps of a call only where it was not as usual, so that a replay has every byte."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import ConfigurationError, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.gateway import Difference, ReplayServer
from otel_rollout.gateway.recorded_calls import RecordedCalls, RecordedReply
from otel_rollout.spans import EVENTS, unchecked_record
from otel_rollout.testing import Raw, Reply
from tests.gateway.programs import Serve
from tests.gateway.replays import CHAT, STREAMED, Asked, agent, answers, difference, recorded, same
from tests.kit.comparing import exchange_spans
from tests.kit.conversations import ASK, user
from tests.kit.outside import send
from tests.kit.recording import Clients, Recording

UNUSUAL = (sc.REQUEST_ADDED, sc.RESPONSE_FORM, sc.EXCHANGE_RETRIED)


def unusual(recording: Recording) -> list[dict[str, Any]]:
    """Those attributes of each exchange span, by the ends of their names."""
    spans = [dict(span.attributes or {}) for span in exchange_spans(recording)]
    return [
        {n.rpartition(".")[2]: json.loads(str(span[n])) for n in UNUSUAL if n in span}
        for span in spans
    ]


@STREAMED
def test_an_ordinary_call_has_none_of_it(captured: Recording, clients: Clients, stream: bool):
    """In the process, whatever the API."""
    client = clients.sync(clients.serve("Hello"))
    with rollout("agent"):
        agent(client, stream=stream)
    assert unusual(captured) == [{}] * 4


SPACED = '{"id": "c", "choices": [], "prompt_token_ids": [%s]}'
REPLIES: dict[str, tuple[Raw, dict[str, Any]]] = {
    "spaces between ids": (Raw(body=(SPACED % "1, 22, 333").encode()), {"separator": ", "}),
    "other spaces": (Raw(body=(SPACED % "1,22, 333").encode()), {}),
    "a type": (
        Raw(body=b"{}", content_type="application/vnd.a+json"),
        {"type": "application/vnd.a+json"},
    ),
    "a charset": (Raw(body=b"{}", content_type='Application/JSON; Charset="UTF-8"'), {}),
    "other bytes": (Raw(body=b'{"choices": ["\xff"]}'), {"raw": ...}),
    "a mark": (Raw(body=b'\xef\xbb\xbf{"choices": []}'), {"raw": ...}),
    "line ends": (
        Raw(chunks=[b"data: {}\r\n\r\n", b"data: [DONE]\r\n\r\n"], content_type=EVENTS),
        {"line_end": "\r\n"},
    ),
    "mixed line ends": (
        Raw(chunks=[b"data: {}\r\n\r\n", b"data: [DONE]\n\n"], content_type=EVENTS),
        {"raw": ...},
    ),
    "a late reply": (
        Raw(503, b"{}", headers={"retry-after": "0.1", "x-other": "1"}),
        {"headers": {"retry-after": "0.1"}},
    ),
    "a page": (
        Raw(502, b"<html>", content_type="text/html; charset=latin-1"),
        {"type": "text/html; charset=latin-1"},
    ),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_an_unusual_reply(
    captured: Recording, clients: Clients, gateway_to: Serve, name: str
):
    """It comes again as it was, with the type and the headers that clients go by."""
    raw, form = REPLIES[name]
    asked = [("/v1/chat/completions", CHAT)]
    before, trajectories = await recorded(captured, gateway_to, clients.serve(raw), asked)
    (found,) = (each.get("form", {}) for each in unusual(captured))
    if "raw" in found:
        found["raw"] = ...
    assert found == form
    async with ReplayServer(trajectories) as replay:
        again = await answers(replay.url, asked)
    same(again, before)
    kind = again[0].headers["content-type"].lower().partition(";")[0]
    assert kind == raw.content_type.lower().partition(";")[0]
    assert again[0].headers.get("retry-after") == raw.headers.get("retry-after")


@STREAMED
@pytest.mark.parametrize("asks", [False, True], ids=["hidden", "asked for"])
async def test_what_the_gateway_added(
    clients: Clients, gateway_to: Serve, stream: bool, asks: bool
):
    """Its client, which did not write it, gets what it got; one that asks for all gets all."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(instrumentor=None, request_token_ids=True)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server = clients.serve(Reply("Hello"), token_ids=False, logprobs=False)
    gateway = await gateway_to(server.base_url)
    body = {**CHAT, "stream": stream, "stream_options": None}
    asked: list[Asked] = [("/v1/chat/completions", body)]
    with rollout("agent"):
        before = await answers(gateway.base_url().removesuffix("/v1"), asked)
    trajectories = reconstruct(spans.get_finished_spans())
    (exchange,) = trajectories[0].exchanges
    assert exchange.asked() == body
    assert exchange.request() == json.loads(server.exchanges[0].request) != body
    calls, spellings = RecordedCalls(trajectories), [exchange.request(), body]
    first, second = (
        calls.take("/chat/completions", json.dumps(spellings[place]).encode())
        for place in (asks, not asks)
    )
    assert isinstance(first, RecordedReply)
    assert isinstance(second, Difference)
    assert second.kind == "repeated"
    if asks:
        asked, before = [("/v1/chat/completions", exchange.request())], []
    async with ReplayServer(trajectories) as replay:
        again = await answers(replay.url, asked)
        other = await send(replay.base_url + "/chat/completions", {**body, "logprobs": True})
    assert again[0].body == (server.exchanges[0].response if asks else before[0].body)
    assert (b"prompt_token_ids" in again[0].body) == asks
    assert [row["at"] for row in difference(other)["rows"]] == ["logprobs"]


@STREAMED
def test_what_the_process_added(clients: Clients, stream: bool):
    """A client that asks for token ids again gets them again; the count is of the recording."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(instrumentor=None, request_token_ids=True)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server = clients.serve(Reply("Hello"), token_ids=False, logprobs=False)

    def asked(url: str) -> list[Any]:
        with openai.OpenAI(base_url=url, api_key="k") as client, rollout("agent"):
            options: Any = {"stream": stream}
            reply: Any = client.chat.completions.create(model="m", messages=ASK, **options)
            return [each.to_dict() for each in reply] if stream else [reply.to_dict()]

    before = asked(server.base_url)
    assert "prompt_token_ids" in json.dumps(before)
    with ReplayServer(reconstruct(spans.get_finished_spans())) as replay:
        assert asked(replay.base_url) == before
    assert replay.difference is None


def test_attempts_that_the_client_repeated(captured: Recording, clients: Clients):
    """It gets the error again, with what it said about trying again, then the reply."""
    error = json.dumps({"error": {"message": "slow down"}}).encode()
    late = Raw(429, error, headers={"retry-after-ms": "1"})
    server = clients.serve([late, late, "Hello"])
    client = clients.sync(server, max_retries=2)
    with rollout("agent"):
        before = client.chat.completions.create(model="m", messages=ASK).to_dict()
    row = {
        "status": 429,
        "form": {"headers": {"retry-after-ms": "1"}},
        "body": '{"error": {"message": "slow down"}}',
    }
    assert unusual(captured) == [{"retried": [row, row]}]
    with ReplayServer(reconstruct(captured.spans)) as replay:
        statuses: list[int] = []
        hooks = {"response": [lambda response: statuses.append(response.status_code)]}
        http = openai.DefaultHttpxClient(event_hooks=hooks)
        with openai.OpenAI(base_url=replay.base_url, api_key="k", http_client=http) as again:
            assert again.chat.completions.create(model="m", messages=ASK).to_dict() == before
    assert statuses == [429, 429, 200]
    assert replay.unasked == []


def test_an_attempt_that_was_not_read(captured: Recording, clients: Clients):
    """Its status and headers come again."""
    late = Raw(429, b'{"error": {}}', headers={"retry-after-ms": "1"})
    client = clients.sync(clients.serve([late, "Hello"]), max_retries=1)
    with rollout("agent"):
        list(client.chat.completions.create(model="m", messages=ASK, stream=True))
    (found,) = unusual(captured)
    assert found["retried"][0]["body"] is None
    with (
        ReplayServer(reconstruct(captured.spans)) as replay,
        openai.OpenAI(base_url=replay.base_url, api_key="k", max_retries=0) as again,
    ):
        with pytest.raises(openai.RateLimitError, match="did not read this error"):
            again.chat.completions.create(model="m", messages=ASK, stream=True)
        assert list(again.chat.completions.create(model="m", messages=ASK, stream=True))


def test_what_is_redacted_is_nowhere(clients: Clients):
    """Neither in the bytes of a reply that were not as usual, nor in those of a failed attempt."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(
        instrumentor=None, redact=lambda data: data.replace(b"secret", b"***")
    )
    provider.add_span_processor(SimpleSpanProcessor(spans))
    late = Raw(429, b'{"error": "a secret"}', headers={"retry-after-ms": "1"})
    said = b'\xef\xbb\xbf{"choices": [{"message": {"content": "a secret"}}]}'
    client = clients.sync(clients.serve([late, Raw(body=said)]), max_retries=1)
    with rollout("agent"):
        client.post("/chat/completions", cast_to=object, body={"model": "m", "messages": ASK})
    (span,) = [
        each
        for each in spans.get_finished_spans()
        if sc.EXCHANGE_VERSION in (each.attributes or {})
    ]
    attributes = dict(span.attributes or {})
    assert '"***"' not in str(attributes)
    assert "secret" not in str(attributes)
    assert "raw" not in str(attributes.get(sc.RESPONSE_FORM))
    assert "a ***" in str(attributes[sc.EXCHANGE_RETRIED])
    with pytest.raises(ConfigurationError, match="it was redacted"):
        ReplayServer(reconstruct(spans.get_finished_spans()))


@pytest.mark.not_replayed("its spans are changed")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (sc.RESPONSE_FORM, "{"),
        (sc.RESPONSE_FORM, '{"raw": "AAAA"}'),
        (sc.RESPONSE_FORM, '{"raw": "no base 64"}'),
        (sc.RESPONSE_FORM, '{"headers": 1}'),
        (sc.REQUEST_ADDED, "[]"),
        (sc.REQUEST_ADDED, '{"a": 1}'),
        (sc.EXCHANGE_RETRIED, '[{"body": "no status"}]'),
    ],
)
def test_what_nobody_wrote(captured: Recording, clients: Clients, name: str, text: str):
    """Such a call is not answered, and a sentence says why; no other one for it."""
    client = clients.sync(clients.serve(Raw(body=b'\xef\xbb\xbf{"choices": []}')))
    with rollout("agent"):
        for content in ("a", "b"):
            client.post("/chat/completions", cast_to=object, body={"messages": [user(content)]})
    records = [unchecked_record(span) for span in captured.spans]
    changed = next(each for each in records if sc.EXCHANGE_VERSION in each.attributes)
    changed.attributes = {**changed.attributes, name: text}
    del changed.attributes[sc.LENGTHS], changed.attributes[sc.CHECKSUMS]
    changed.is_checked = True
    replay = ReplayServer(reconstruct(records))
    assert replay.count == 1
    assert len(replay.unusable) == 1
