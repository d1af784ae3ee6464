"""Large values beside the spans: equal trajectories, whole files, and warnings of what is gone."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import ConfigurationError, Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.otlp import BlobSpanExporter, JsonLinesSpanExporter, read
from otel_rollout.spans import (
    BLOB_PLACES,
    BlobPlace,
    as_record,
    blob_reference,
    digest_of,
    with_lengths,
)
from otel_rollout.spans.blobs import blobs_in, with_blobs
from otel_rollout.testing import Reply
from tests.kit.recording import Clients, Recording

LIMIT = 2_000
IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 20).decode()
EXPERTS = base64.b64encode(b"\1\2\3\4" * 2_000).decode()
LONG = "long result " * 500
LISTS = [[[layer % 7 for layer in range(40)] for _ in range(2)] for _ in range(20)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of blobs that is read from."""
    monkeypatch.setenv(BLOB_PLACES, str(tmp_path / "blobs"))
    return tmp_path / "blobs"


def play(clients: Clients, *, stream: bool = False, experts: Any = EXPERTS) -> Trajectory:
    """An agent that looks at an image and reads a long file, of a model with experts."""
    replies = [Reply(f"reply {n}", extra={"routed_experts": experts}) for n in range(2)]
    client = clients.sync(clients.serve(replies, token_ids=True))
    with rollout("agent") as trajectory:
        image = {"type": "image_url", "image_url": {"url": IMAGE}}
        content = [{"type": "text", "text": "é"}, image]
        messages: list[Any] = [{"role": "user", "content": content}]
        for text in (LONG, None):
            made: Any = client.chat.completions.create(model="m", messages=messages, stream=stream)
            found = "".join(c.choices[0].delta.content or "" for c in made) if stream else ""
            said = found or made.choices[0].message.content
            messages.append({"role": "assistant", "content": said})
            if text:
                messages.append({"role": "user", "content": text})
    return trajectory


def exchange_spans(spans: Any) -> list[ReadableSpan]:
    return [span for span in spans if sc.EXCHANGE_VERSION in span.attributes]


def slim(spans: Any, place: Path, **options: Any) -> list[ReadableSpan]:
    """The spans as they are exported."""
    inner = InMemorySpanExporter()
    BlobSpanExporter(inner, str(place), **{"min_bytes": LIMIT, **options}).export(spans)
    return list(inner.get_finished_spans())


def size(spans: Any) -> int:
    return sum(len(str(value)) for span in spans for value in span.attributes.values())


def blobs(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("experts", [EXPERTS, LISTS], ids=["base64", "lists"])
def test_equal_trajectories(
    recording: Recording, clients: Clients, place: Path, stream: bool, experts: Any
):
    """With and without; each value is in one file, and no span has it."""
    live = play(clients, stream=stream, experts=experts)
    spans = slim(recording.spans, place)
    on_spans = str(
        [value for span in exchange_spans(spans) for value in dict(span.attributes or {}).values()]
    )
    assert not any(text in on_spans for text in (IMAGE, EXPERTS, str(LISTS), LONG))
    assert reconstruct(spans) == reconstruct(recording.spans) == [live]
    texts = [path.read_text() for path in blobs(place)]
    assert len(texts) == 3 == len(set(texts))
    assert any(IMAGE in text for text in texts)
    for text in texts:
        assert json.loads(text) in (experts, *live.completions[-1].request_messages)
    (again,) = reconstruct(spans)
    assert again.warnings == live.warnings
    assert again.to_json() == live.to_json()


def test_a_file_of_spans(recording: Recording, clients: Clients, place: Path, tmp_path: Path):
    """The exporter is around any other; what is read from its file is equal."""
    live = play(clients)
    exporter = BlobSpanExporter(JsonLinesSpanExporter(tmp_path / "s"), str(place), min_bytes=LIMIT)
    exporter.export(recording.spans)
    exporter.force_flush()
    exporter.shutdown()
    assert (tmp_path / "s").stat().st_size < size(recording.spans)
    assert reconstruct(read(tmp_path / "s")) == [live]


def test_experts_are_not_read_for_tokens(recording: Recording, clients: Clients, place: Path):
    """Rows need none of them; the whole response does, and is read then."""
    live = play(clients)
    spans = slim(recording.spans, place)
    expected = list(live.token_sequences())
    (again,) = reconstruct(spans)
    opened: list[str] = []
    for path in blobs(place):
        if path.read_text() == json.dumps(EXPERTS):
            path.write_bytes(b"x" * path.stat().st_size)
            opened.append(path.name)
    assert list(again.token_sequences()) == expected
    assert again.warnings == []
    assert again.completions[0].response["routed_experts"] == {
        sc.BLOB: {
            "digest": opened[0],
            "bytes": len(EXPERTS) + 2,
            "type": "application/json",
            "uri": f"file://{place}/{opened[0][:2]}/{opened[0]}",
        }
    }


def test_experts_that_are_not_there(recording: Recording, clients: Clients, place: Path):
    """The warning names the blob; the rows are as before, since they need none."""
    live = play(clients)
    spans = slim(recording.spans, place)
    for path in blobs(place):
        if path.read_text() == json.dumps(EXPERTS):
            path.unlink()
    (again,) = reconstruct(spans)
    assert len(again.warnings) == 2
    assert all(
        "of 10670 bytes is not there, so the response of exchange" in each
        for each in again.warnings
    )
    assert list(again.token_sequences()) == list(live.token_sequences())
    assert again != live


@pytest.mark.parametrize("damage", ["gone", "other", "nowhere"])
def test_messages_that_are_not_there(
    recording: Recording,
    clients: Clients,
    place: Path,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """What was asked is not known, and a warning says why; nothing else is put in its place."""
    play(clients)
    spans = slim(recording.spans, place)
    for path in blobs(place):
        if IMAGE in path.read_text():
            path.unlink() if damage == "gone" else path.write_text("[" * path.stat().st_size)
    if damage == "nowhere":
        monkeypatch.delenv(BLOB_PLACES)
    (again,) = reconstruct(spans)
    assert any("its blob file://" in each for each in again.warnings)
    if damage == "nowhere":
        assert any(f"{BLOB_PLACES} names none" in each for each in again.warnings)
    assert again.completions[0].request_messages == []


def test_what_looks_like_a_reference_is_left_alone(
    recording: Recording, clients: Clients, place: Path
):
    """An agent that writes one into its messages has it back as it wrote it, and reads no file."""
    play(clients)
    slim(recording.spans, place)
    digest = blobs(place)[0].name
    count = len(recording.spans)
    client = clients.sync(clients.serve("no"))
    blob = {
        "digest": digest,
        "bytes": 8002,
        "type": "application/json",
        "uri": "file:///etc/passwd",
    }
    parts = [{sc.BLOB: blob}, {"type": "text", "text": "x" * LIMIT}]
    forged: Any = {"role": "user", "content": parts}
    with rollout("forger") as live:
        client.chat.completions.create(model="m", messages=[forged])
    spans = slim(recording.spans[count:], place)
    assert all(sc.BLOBS not in span.attributes for span in spans if span.attributes)
    assert reconstruct(spans) == [live]


def test_no_address_of_a_span_is_opened(
    recording: Recording, clients: Clients, place: Path, tmp_path: Path
):
    """Whoever writes spans names digests; files elsewhere stay unread, whatever is in them."""
    play(clients)
    secret = tmp_path / "secret"
    secret.write_text('"a key"')
    digest = digest_of(secret.read_bytes()).hex()
    forged = []
    for record in map(as_record, recording.spans):
        attributes = dict(record.attributes)
        if sc.RESPONSE_BODY in attributes:
            made = blob_reference(digest, 7, secret.as_uri())
            body = str(attributes[sc.RESPONSE_BODY]).replace(json.dumps(EXPERTS), made)
            attributes |= {sc.RESPONSE_BODY: body, sc.BLOBS: sc.RESPONSE_BODY}
        forged.append(replace(record, attributes=with_lengths(attributes)))
    (read_back,) = reconstruct(forged)
    found = [completion.response for completion in read_back.completions]
    assert all(each["routed_experts"][sc.BLOB]["uri"] == secret.as_uri() for each in found)
    assert "a key" not in read_back.to_json()


def test_a_place_that_takes_nothing(
    recording: Recording, clients: Clients, place: Path, caplog: pytest.LogCaptureFixture
):
    """The values stay on their spans, and the log says so once."""
    live = play(clients)
    place.write_text("this is a file")
    spans = slim(recording.spans, place)
    assert reconstruct(spans) == [live]
    assert size(spans) == size(recording.spans)
    assert len([r for r in caplog.records if "blobs cannot be written" in r.message]) == 1


def test_a_blob_is_written_whole(
    recording: Recording, clients: Clients, place: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a full disk leaves of one has no name, and the next export writes it."""
    live = play(clients)
    with monkeypatch.context() as full:
        full.setattr(os, "replace", fail)
        slim(recording.spans, place)
    assert blobs(place) == []
    assert reconstruct(slim(recording.spans, place)) == [live]


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@given(st.binary(min_size=1, max_size=40), st.text(max_size=30))
def test_any_value_is_read_back(tmp_path_factory: Any, data: bytes, text: str):
    """In any file system of fsspec, by its digest."""
    value = json.dumps([text, data.hex()])
    place = BlobPlace("memory://here")
    digest = digest_of(value.encode()).hex()
    uri = place.put(digest, value.encode())
    assert place.put(digest, value.encode()) == uri
    written = blob_reference(digest, len(value), uri)
    assert [blob.uri for blob in blobs_in(written)] == [uri]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(BLOB_PLACES, "memory://elsewhere memory://here")
        assert with_blobs(f'{{"a":{written}}}') == f'{{"a":{value}}}'


def test_options_are_checked(place: Path):
    """When the exporter is made."""
    inner = InMemorySpanExporter()
    with pytest.raises(ConfigurationError, match="number from 1 on, got 0"):
        BlobSpanExporter(inner, str(place), min_bytes=0)
    with pytest.raises(ConfigurationError, match="got 'nothing://x'"):
        BlobSpanExporter(inner, "nothing://x")


@pytest.mark.blobs
def test_s3(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A bucket of moto's server: equal trajectories, an object for each value, and what is gone."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        monkeypatch.setenv(BLOB_PLACES, "s3://bucket/runs/blobs")
        bucket = boto3.resource("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        live = play(clients)
        inner = InMemorySpanExporter()
        BlobSpanExporter(inner, "s3://bucket/runs/blobs", min_bytes=LIMIT).export(recording.spans)
        spans = inner.get_finished_spans()
        assert reconstruct(spans) == [live]
        keys = [each.key for each in bucket.objects.all()]
        assert len(keys) == 3
        assert all(re.fullmatch(r"runs/blobs/(..)/\1.{30}", key) for key in keys)
        bucket.objects.all().delete()
        (again,) = reconstruct(spans)
        assert any("its blob s3://bucket/runs/blobs/" in each for each in again.warnings)
    finally:
        server.stop()
