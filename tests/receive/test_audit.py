"""The verb `audit`: who is missing, by journals, files of spans, of trajectories, of starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout import configure, reconstruct, rollout, shutdown
from otel_rollout import semconv as sc
from otel_rollout.command.cli import main
from otel_rollout.otlp import read_protobuf
from otel_rollout.receive import Limits
from otel_rollout.testing import Reply
from tests.kit.conversations import ask, user
from tests.kit.recording import Clients
from tests.kit.sending import (
    A,
    B,
    C,
    Receive,
    Span,
    ids,
    post,
    request,
    reward_of,
    spans_of,
    start_of,
    until,
)

GROUP: dict[str, Any] = {"ROLLOUT_GROUP_ID": "g", "ROLLOUT_GROUP_SIZE": 2}


def audit(capsys: pytest.CaptureFixture[str], *sources: object) -> tuple[int, dict[str, Any]]:
    """The exit status and the report."""
    capsys.readouterr()
    status = main(["audit", *map(str, sources), "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else {}


def of_spans(path: Path, spans: list[Span]) -> Path:
    """A file of spans."""
    path.write_bytes(request(spans))
    return path


def of_trajectories(path: Path, spans: list[Span]) -> Path:
    """A file of the trajectories of these spans."""
    found = reconstruct(read_protobuf(request(spans)))
    path.write_text("".join(each.to_json() + "\n" for each in found))
    return path


FINE = {"announced": 2, "ended": 2, "whole": 2}
NOTHING: dict[str, Any] = {
    "never_ended": [],
    "incomplete": [],
    "short": [],
    "duplicated": [],
    "late": [],
}


def test_what_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By spans, by trajectories, by both."""
    spans = [*spans_of(A, **GROUP), *spans_of(B, **GROUP), start_of(A, **GROUP)]
    one = of_spans(tmp_path / "spans", spans)
    two = of_trajectories(tmp_path / "out.jsonl", spans)
    for sources in ([one], [two], [one, two]):
        assert audit(capsys, *sources) == (0, FINE | NOTHING)


def test_sources_without_a_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing is no good end, and it is named."""
    (tmp_path / "empty").touch()
    assert main(["audit", str(tmp_path / "empty")]) == 1
    assert "no rollout to audit" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Likewise, and with the same words."""
    spans = [*spans_of(A, **GROUP)[1:], start_of(B, **GROUP, ROLLOUT_SAMPLE_INDEX=1)]
    reason = "1 of 2 model calls are missing: their spans did not come"
    expected = NOTHING | {
        "announced": 2,
        "ended": 1,
        "whole": 0,
        "never_ended": [{"rollout": B, "group": "g", "sample": 1}],
        "incomplete": [{"rollout": A, "group": "g", "reason": reason}],
        "short": [{"group": "g", "size": 2, "whole": 0, "short_by": 2}],
    }
    assert audit(capsys, one := of_spans(tmp_path / "spans", spans)) == (1, expected)
    assert main(["audit", str(one)]) == 1
    assert f"    group g, sample 1, rollout {B}\n" in capsys.readouterr().out
    two = of_trajectories(tmp_path / "out.jsonl", spans)
    started = tmp_path / "out.jsonl.started"
    started.write_text(
        json.dumps({"started": B, "group_id": "g", "sample_index": 1, "group_size": 2}) + "\n"
    )
    assert audit(capsys, two, started) == (1, expected)
    # Another source has the rest.
    rest = of_spans(tmp_path / "rest", [spans_of(A, **GROUP)[0], *spans_of(B, **GROUP)])
    assert audit(capsys, tmp_path / "spans", rest) == (0, FINE | NOTHING)


def test_a_journal(receiver_of: Receive, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """While its receiver runs: what was handed over, what is open, what came late."""
    receiver = receiver_of()
    late = spans_of(A, 3)[2]
    post(receiver.url, request([*spans_of(A), *spans_of(B, **GROUP)[:2]]))
    until(lambda: ids(tmp_path / "out.jsonl") == [A])
    until(lambda: receiver.counts()["open_rollouts"] == 1)
    post(receiver.url, request([late, reward_of(A), start_of(C)]))
    status, report = audit(capsys, tmp_path / "journal")
    assert status == 1
    assert (report["announced"], report["ended"], report["whole"]) == (3, 1, 1)
    assert [each["rollout"] for each in report["never_ended"]] == [B, C]
    assert report["late"] == [
        {"rollout": A, "group": None, "reward": None},
        {"rollout": A, "group": None, "reward": reward_of(A)[1][sc.REWARD]},
    ]
    assert audit(capsys, tmp_path / "journal", tmp_path / "out.jsonl")[1] == report


def test_a_reward_does_not_end_a_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its process was killed, and a trainer set its reward: it never ended all the same."""
    killed = of_spans(tmp_path / "spans", [start_of(A, **GROUP), reward_of(A, 0.0)])
    status, report = audit(capsys, killed)
    assert (status, report["announced"], report["ended"]) == (1, 1, 0)
    assert [each["rollout"] for each in report["never_ended"]] == [A]
    assert [each["rollout"] for each in report["late"]] == [A]


def test_a_damaged_reward_alone_is_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It tells of no rollout that began here, and is not passed over."""
    id_, attributes = reward_of(A)
    damaged = id_, {**attributes, sc.REWARD: attributes[sc.REWARD][:-1]}
    status, report = audit(capsys, of_spans(tmp_path / "spans", [damaged]))
    assert (status, report["announced"]) == (0, 0)
    assert report["late"] == [{"rollout": A, "group": None, "reward": None}]


def test_what_is_there_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A trajectory of a file."""
    out = of_trajectories(tmp_path / "out.jsonl", spans_of(A))
    out.write_text(out.read_text() * 2)
    status, report = audit(capsys, out)
    assert (status, report["duplicated"]) == (0, [{"rollout": A, "group": None, "times": 2}])
    main(["audit", str(out)])
    assert capsys.readouterr().out == (
        "1 rollout: 1 ended, 1 whole\n1 there more than once:\n    rollout " + A + ": 2 times\n"
    )


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file that is not there, one that is something else."""
    (tmp_path / "other").write_text("hello")
    assert audit(capsys, tmp_path / "other")[0] == 2
    assert audit(capsys, tmp_path / "none")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [4000, 8000])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_span_that_is_too_long_is_missed(
    receiver_of: Receive,
    clients: Clients,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    size: int,
):
    """It is logged where it is sent; twice the limit is refused by gRPC itself."""
    receiver = receiver_of(limits=Limits(body_bytes=200_000), rollout_seconds=8)
    exporter: SpanExporter
    if protocol == "grpc":
        exporter = GrpcExporter(endpoint=receiver.grpc_address, insecure=True, timeout=1)
    else:
        exporter = HttpExporter(endpoint=f"{receiver.url}/v1/traces")
    configure(span_exporters=[exporter], instrumentor=None)
    with clients.serve([Reply("x" * size)]) as server, rollout("agent") as live:
        await ask(clients.asynchronous(server), user("hello"))
    assert not shutdown(6000)
    assert "takes other spans, and not 'recording /chat/completions'" in caplog.text
    until(lambda: ids(tmp_path / "out.jsonl") == [live.id])
    status, report = audit(capsys, tmp_path / "journal")
    assert (status, report["ended"], report["whole"]) == (1, 1, 0)
    [missing] = report["incomplete"]
    assert (missing["rollout"], "1 of 1 model call" in missing["reason"]) == (live.id, True)
