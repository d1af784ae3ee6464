"""What a receiver answers: taken, again, never; over HTTP and gRPC alike."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from otel_rollout.command.cli import main
from otel_rollout.errors import ConfigurationError
from otel_rollout.receive import Limits, TrajectoryReceiver
from tests.kit.disks import full_disk
from tests.kit.sending import BINARY, A, B, Receive, ids, post, request, spans_of, until

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def call(receiver: TrajectoryReceiver, body: bytes, **metadata: str) -> tuple[str, str]:
    """Send a body over gRPC; the code, and what it says."""
    with grpc.insecure_channel(receiver.grpc_address) as channel:
        try:
            channel.unary_unary(METHOD)(body, timeout=20, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""


@pytest.mark.parametrize("body", [b"{}", b"\xff\xff", b"\n\x05ab", b'{"resourceSpans": []}'])
def test_no_message_is_refused_for_good(receiver_of: Receive, body: bytes):
    """Whoever sent it must not repeat it; the receiver goes on."""
    receiver = receiver_of()
    assert post(receiver.url, body)[0] == 400
    assert call(receiver, body)[0] == "INVALID_ARGUMENT"
    assert post(receiver.url, request(spans_of(A)))[0] == 200


def test_json_and_gzip(receiver_of: Receive, tmp_path: Path):
    """OTLP/JSON, and bodies with an encoding; what is too long once it is decoded is refused."""
    receiver = receiver_of(limits=Limits(body_bytes=20_000))
    packed = gzip.compress(request(spans_of(A)))
    assert post(receiver.url, packed, {"Content-Encoding": "gzip"})[0] == 200
    for body, status in (
        (gzip.compress(bytes(30_000)), 400),
        (packed[:-9], 400),
        (bytes(20_001), 413),
    ):
        assert post(receiver.url, body, {"Content-Encoding": "gzip"})[0] == status
    kind = {"Content-Type": "application/json"}
    rows = [
        {
            "traceId": "1" * 32,
            "spanId": span_id,
            "endTimeUnixNano": "5",
            "attributes": [
                {"key": name, "value": {"stringValue": value}}
                if isinstance(value, str)
                else {"key": name, "value": {"boolValue": value}}
                if isinstance(value, bool)
                else {"key": name, "value": {"intValue": str(value)}}
                for name, value in attributes.items()
            ],
        }
        for span_id, attributes in spans_of(B)
    ]
    message = {"resourceSpans": [{"scopeSpans": [{"spans": [*rows, {"traceId": "?"}]}]}]}
    status, body, _ = post(receiver.url, b"\n" + json.dumps(message).encode(), kind)
    assert (status, json.loads(body)["partialSuccess"]["rejectedSpans"]) == (200, "1")
    until(lambda: sorted(ids(tmp_path / "out.jsonl")) == [A, B])
    status, body, _ = post(receiver.url, b"[" * 100_000, kind)
    assert status == 413
    status, body, _ = post(receiver.url, b"[" * 10_000, kind)
    assert (status, json.loads(body)["code"]) == (400, 3)


def test_a_full_journal_answers_again(receiver_of: Receive, tmp_path: Path):
    """To every request that continues nothing, small and empty ones too, until there is room."""
    first = spans_of(A, ROLLOUT_GROUP_ID="g", ROLLOUT_GROUP_SIZE=2)
    large = spans_of(B, text="x" * 3000)
    most = len(request(large)) + 1000
    receiver = receiver_of(
        journal_bytes=most, limits=Limits(body_bytes=most - 100), group_seconds=1
    )
    assert post(receiver.url, request(first))[0] == 200
    assert post(receiver.url, b"")[0] == 200
    status, body, headers = post(receiver.url, request(large))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert b"the journal may have" in body
    assert post(receiver.url, b"")[0] == 503
    assert post(receiver.url, request(large[-1:]))[0] == 503
    code, details = call(receiver, b"")
    assert (code, "the journal may have" in details) == ("UNAVAILABLE", True)
    until(lambda: ids(tmp_path / "out.jsonl") == [A])  # the group is out of time
    until(lambda: post(receiver.url, b"")[0] == 200)


def test_a_full_journal_takes_what_continues_something(receiver_of: Receive, tmp_path: Path):
    """A large request waits for room; what lacks of an open rollout makes it."""
    first, large = spans_of(A), request(spans_of(B, text="x" * 3000))
    receiver = receiver_of(journal_bytes=len(large) + 100, limits=Limits(body_bytes=len(large)))
    assert post(receiver.url, request(first[1:]))[0] == 200
    assert post(receiver.url, large)[0] == 503
    assert post(receiver.url, request(first[:1]))[0] == 200
    until(lambda: post(receiver.url, large)[0] == 200)
    until(lambda: ids(tmp_path / "out.jsonl") == [A, B])


def test_parts_of_groups_do_not_fill_the_journal(receiver_of: Receive, tmp_path: Path):
    """The last quarter is for one at a time, which becomes whole there, and then for the next."""
    rollouts = [f"{number:032x}" for number in range(1, 9)]
    spans = [spans_of(each, text="x" * 2000) for each in rollouts]
    halves = [[request(every[:1]), request(every[1:])] for every in spans]
    size = sum(map(len, halves[0]))
    receiver = receiver_of(journal_bytes=4 * size, limits=Limits(body_bytes=size))
    answers = {post(receiver.url, first)[0] for first, _ in halves for _ in range(2)}
    assert answers == {200, 503}  # copies need no room, but are written first
    assert post(receiver.url, request([spans[0][1], spans[1][2]]))[0] == 503
    assert post(receiver.url, halves[0][0])[0] == 200  # it has the reserve
    assert post(receiver.url, b"")[0] == 503
    while halves:  # each in turn, as senders do
        halves = [each for each in halves if any(post(receiver.url, h)[0] != 200 for h in each)]
    until(lambda: sorted(ids(tmp_path / "out.jsonl")) == rollouts)


def test_a_full_disk_answers_again(receiver_of: Receive, tmp_path: Path):
    """Nothing of what did not fit is there; it comes again."""
    receiver = receiver_of()
    with full_disk(1 << 16):
        assert post(receiver.url, request(spans_of(A, text="x" * 70_000)))[0] == 503
    until(lambda: post(receiver.url, request(spans_of(A, text="x" * 70_000)))[0] == 200)
    until(lambda: ids(tmp_path / "out.jsonl") == [A])


def test_a_client_that_goes_away_costs_no_other(receiver_of: Receive, tmp_path: Path):
    """It closes its connection, or its time is over, before the answer."""
    receiver = receiver_of()
    body = request(spans_of(A))
    with grpc.insecure_channel(receiver.grpc_address) as channel:
        export = channel.unary_unary(METHOD)
        for _ in range(50):
            export.future(body, timeout=20).cancel()
            future = export.future(body, timeout=20)
            threading.Timer(0.002, future.cancel).start()
    assert call(receiver, request(spans_of(B)))[0] == "OK"
    until(lambda: B in ids(tmp_path / "out.jsonl"))


def test_a_message_that_is_too_long(receiver_of: Receive):
    """It is refused for good, over both protocols."""
    receiver = receiver_of(limits=Limits(body_bytes=1000))
    assert post(receiver.url, bytes(1001))[0] == 413
    assert call(receiver, bytes(1001))[0] == "INVALID_ARGUMENT"


def test_limits_that_cannot_hold():
    """A large request would have to come again for ever."""
    with pytest.raises(ConfigurationError, match="waiting_bytes"):
        Limits(body_bytes=10, waiting_bytes=9)
    with pytest.raises(ConfigurationError, match="open_rollouts"):
        Limits(open_rollouts=0)


def test_limits_of_rollouts(receiver_of: Receive):
    """Further rollouts have to wait; further spans of one are rejected, and that is answered."""
    receiver = receiver_of(limits=Limits(open_rollouts=1, rollout_spans=3))
    spans = spans_of(A, 5)
    status, body, _ = post(receiver.url, request(spans))
    partial = ExportTraceServiceResponse.FromString(body).partial_success
    assert (status, partial.rejected_spans) == (200, 3)
    assert post(receiver.url, request(spans_of(B)))[0] == 503
    assert post(receiver.url, request(spans[:1]))[0] == 200


def test_what_an_open_group_needs_is_taken(receiver_of: Receive):
    """However many are open: else each of many groups could wait for its rest."""
    receiver = receiver_of(limits=Limits(open_rollouts=1))
    group: dict[str, Any] = {"ROLLOUT_GROUP_ID": "g", "ROLLOUT_GROUP_SIZE": 2}
    other = spans_of("c" * 32, ROLLOUT_GROUP_ID="h")
    assert post(receiver.url, request(spans_of(A, **group)))[0] == 200
    assert post(receiver.url, request([*spans_of(B, **group), *other]))[0] == 503
    assert post(receiver.url, request(spans_of(B, **group)))[0] == 200
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    assert post(receiver.url, request(other))[0] == 200


def test_the_token(receiver_of: Receive):
    """Without it nothing is taken, and nothing is shown."""
    receiver = receiver_of(token="secret")
    body = request(spans_of(A))
    assert post(receiver.url, body)[0] == 401
    assert post(receiver.url, body, {"Authorization": "Bearer other"})[0] == 401
    assert post(receiver.url, body, {"Authorization": "Bearer secret"})[0] == 200
    assert call(receiver, body)[0] == "UNAUTHENTICATED"
    assert call(receiver, body, authorization="Bearer secret")[0] == "OK"
    assert receiver.counts()["received_taken"] == 2


def test_other_hosts_need_a_token(tmp_path: Path):
    """Whoever can send spans can make trajectories."""
    at: Any = {"grpc": ("0.0.0.0", 0), "http": ("127.0.0.1", 0)}
    with pytest.raises(ConfigurationError, match=r"'0\.0\.0\.0' can be reached by others"):
        TrajectoryReceiver(tmp_path / "out.jsonl", journal=tmp_path / "j", **at)


def test_web_pages_get_no_answer(receiver_of: Receive):
    """Of another site, or under a name that leads here."""
    receiver = receiver_of()
    assert post(receiver.url, b"", {"Origin": "http://evil.example"})[0] == 403
    assert post(receiver.url, b"", {"Host": "evil.example"})[0] == 403


def test_tls(receiver_of: Receive, tmp_path: Path):
    """Over both protocols; without it, nothing is taken."""
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-out", str(certificate), "-keyout", str(key))
    subprocess.run([*made.split(), *names, *files], check=True, capture_output=True)
    receiver = receiver_of(tls=(str(certificate), str(key)))
    assert receiver.url.startswith("https://")
    address, body = urlsplit(receiver.url), request(spans_of(A))
    context = ssl.create_default_context(cafile=certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", address.port, context=context)
    connection.request("POST", "/v1/traces", body, BINARY)
    assert connection.getresponse().status == 200
    connection.close()
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(receiver.grpc_address, credentials) as channel:
        channel.unary_unary(METHOD)(body, timeout=20)
    assert call(receiver, body)[0] == "UNAVAILABLE"
    assert receiver.counts()["received_taken"] == 2
    with pytest.raises(ConfigurationError, match="expected the files of a certificate and of its"):
        receiver_of(tls=(str(key), str(certificate)))


def test_metrics(receiver_of: Receive, tmp_path: Path):
    """What is open, whole, and what came."""
    receiver = receiver_of()
    post(receiver.url, request(spans_of(A)))
    post(receiver.url, request(spans_of(B)[1:]))
    until(lambda: ids(tmp_path / "out.jsonl") == [A])
    until(lambda: receiver.counts().get("handed_over_whole") == 1)
    text = receiver.metrics()
    assert "otel_rollout_receiver_open_rollouts 1\n" in text
    assert "otel_rollout_receiver_handed_over_whole 1\n" in text


def test_a_port_that_is_not_free(receiver_of: Receive, tmp_path: Path):
    """The journal is free again."""
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(OSError, match="cannot be used"):
        receiver_of(grpc=taken.getsockname())
    receiver_of()


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What is wrong is one sentence."""
    command = ["receive", "--out", str(tmp_path / "out"), "--journal", str(tmp_path / "journal")]
    (tmp_path / "token").write_text("\n")
    assert main([*command, "--token-file", str(tmp_path / "token")]) == 1
    assert "the token is empty" in capsys.readouterr().err
    assert main([*command, "--to", "none"]) == 1
    assert "there is no exporter 'none'" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_ROLLOUT_RECEIVER_BODY_BYTES", "many")
    assert main(command) == 1
    assert "RECEIVER_BODY_BYTES: expected a whole number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--tls-key", "key"])
    assert not (tmp_path / "journal").exists()
