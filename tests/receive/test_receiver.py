"""A receiver: what is acknowledged is handed over, whole, once, in groups; the rest is reported."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    configure,
    rollout,
    shutdown,
)
from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import Tally, TokenRows, rows_of
from otel_rollout.journal import Journal
from otel_rollout.receive import HeadFile, Limits, TrajectoryReceiver
from otel_rollout.receive.outputs import RowFormat, rebuilt
from tests.kit.conversations import ask, user
from tests.kit.recording import Clients
from tests.kit.sending import (
    A,
    B,
    C,
    Receive,
    ids,
    lines,
    post,
    request,
    reward_of,
    spans_of,
    start_of,
    until,
)

GROUP: dict[str, Any] = {"ROLLOUT_GROUP_ID": "g", "ROLLOUT_GROUP_SIZE": 2}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_agents_of_another_process(
    receiver_of: Receive,
    clients: Clients,
    tmp_path: Path,
    protocol: str,
):
    """Real spans, over both protocols: the trajectories are the live ones, a group at a time."""
    receiver = receiver_of(jobs=0)
    exporter: SpanExporter
    if protocol == "grpc":
        exporter = GrpcExporter(endpoint=receiver.grpc_address, insecure=True)
    else:
        exporter = HttpExporter(endpoint=f"{receiver.url}/v1/traces")
    live = InMemoryTrajectoryExporter()
    configure(exporters=[live], span_exporters=[exporter], instrumentor=None)
    with clients.serve() as server:
        client = clients.asynchronous(server)
        for number in range(4):
            with rollout("agent", group_id=f"g{number % 2}", group_size=2):
                await ask(client, user("hello"))
                await ask(client, user("and now"))
    assert shutdown()
    until(lambda: len(ids(tmp_path / "out.jsonl")) == 4)
    found = {t.id: t for t in JsonlTrajectoryExporter.read(tmp_path / "out.jsonl")}
    assert found == {t.id: t for t in live.get_finished_trajectories()}
    groups = [line["group_id"] for line in lines(tmp_path / "out.jsonl")]
    assert groups in (["g0", "g0", "g1", "g1"], ["g1", "g1", "g0", "g0"])


def test_a_group_goes_on_after_a_restart(receiver_of: Receive, tmp_path: Path):
    """What came before it is in the journal; what was handed over is not handed over again."""
    first, second = spans_of(A, **GROUP), spans_of(B, **GROUP)
    with TrajectoryReceiver(
        tmp_path / "out.jsonl", journal=tmp_path / "journal", grpc=FREE, http=FREE
    ) as receiver:
        assert post(receiver.url, request(first))[0] == 200
        assert post(receiver.url, request(second[:2]))[0] == 200
        assert post(receiver.url, request(spans_of(C)))[0] == 200
        until(lambda: ids(tmp_path / "out.jsonl") == [C])
    receiver = receiver_of()
    assert len(receiver._rollouts) == 2
    assert post(receiver.url, request(first))[0] == 200  # a copy
    assert post(receiver.url, request(second))[0] == 200
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    assert ids(tmp_path / "out.jsonl") == [C, A, B]
    assert receiver.counts()["received_copy"] == 5
    assert receiver.counts()["handed_over_whole"] == 2


FREE = ("127.0.0.1", 0)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_kill_after_the_file_and_before_the_mark(
    receiver_of: Receive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: int,
):
    """The end of the file is read: what is there is not written again, what is not is."""
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:

        def killed(*_: object) -> None:
            every = out.read_bytes().splitlines(keepends=True)
            out.write_bytes(b"".join(every[:written]) + b'{"schema_version":1,"id"')
            raise OSError("killed")

        patched.setattr(HeadFile, "done", killed)
        with TrajectoryReceiver(
            out, journal=tmp_path / "journal", grpc=FREE, http=FREE
        ) as receiver:
            both = [*spans_of(A, **GROUP), *spans_of(B, **GROUP)]
            assert post(receiver.url, request(both))[0] == 200
            until(lambda: receiver.counts().get("handed_over_failed") == 1)
            patched.setattr(receiver._handover, "_pause", 1000)
    receiver = receiver_of()
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    found = [line for line in out.read_bytes().splitlines() if line.endswith(b"}")]
    assert [json.loads(line)["id"] for line in found] == [A, B]
    [unit] = HeadFile(tmp_path / "journal", reads=True).units()
    assert (unit.name, unit.times, unit.is_done) == ("g", 1, True)


class Picky:
    """An exporter that fails as often as it is said, and keeps what it took."""

    blocking = True

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.taken: list[list[str]] = []

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("not now")
        self.taken.append([each.id for each in trajectories])

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass


def test_an_exporter_that_fails_is_asked_again(
    receiver_of: Receive, caplog: pytest.LogCaptureFixture
):
    """Until it takes the group; a reward that comes meanwhile counts."""
    exporter = Picky(1)
    receiver = receiver_of(out=exporter)
    assert post(receiver.url, request(spans_of(A)))[0] == 200
    until(lambda: bool(exporter.taken))
    assert exporter.taken == [[A]]
    assert "could not be handed over (RuntimeError('not now'))" in caplog.text
    assert "rollout " + A + " is handed over a second time" in caplog.text


def test_out_of_time(receiver_of: Receive, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What is not whole is handed over with what is missing; what only began is not."""
    receiver = receiver_of(rollout_seconds=0.2, group_seconds=0.4)
    spans = [*spans_of(A, **GROUP)[1:], start_of(B, **GROUP)]
    assert post(receiver.url, request(spans))[0] == 200
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    [line] = lines(tmp_path / "out.jsonl")
    assert (line["id"], line["missing_calls"]) == (
        A,
        ["1 of 2 model calls are missing: their spans did not come"],
    )
    until(lambda: "group 'g' was handed over with 0 of 2 samples" in caplog.text)
    heads = {head.rollout: head for head in HeadFile(tmp_path / "journal", reads=True).heads()}
    assert (heads[A].ended, len(heads[A].missing)) == (True, 1)
    assert (heads[B].ended, heads[B].came) == (False, "start")


def test_what_comes_late_is_reported(
    receiver_of: Receive, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A span, a reward; a copy of what was handed over is none."""
    caplog.set_level(logging.WARNING)
    receiver = receiver_of()
    spans = spans_of(A)
    assert post(receiver.url, request(spans))[0] == 200
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    late = spans_of(A, 3)[2]
    reward = reward_of(A)
    for _ in range(2):
        assert post(receiver.url, request([*spans, late, reward]))[0] == 200
    found = [*HeadFile(tmp_path / "journal", reads=True).late_spans()]
    assert Counter(each.rollout for each in found) == {A: 2}
    assert {each.reward for each in found} == {None, reward[1][sc.REWARD]}
    assert caplog.text.count(f"2 spans came for the rollout {A}, which was handed over") == 1
    assert caplog.text.count("a reward came too late") == 1
    assert ids(tmp_path / "out.jsonl") == [A]


def test_a_reward_that_comes_before_the_hand_over(receiver_of: Receive, tmp_path: Path):
    """It counts, also from another process, which does not know the group."""
    receiver = receiver_of()
    assert post(receiver.url, request(spans_of(A, **GROUP)))[0] == 200
    assert post(receiver.url, request([reward_of(A, 0.5)]))[0] == 200
    assert post(receiver.url, request(spans_of(B, **GROUP)))[0] == 200
    until(lambda: ids(tmp_path / "out.jsonl") == [A, B])
    found = JsonlTrajectoryExporter.read(tmp_path / "out.jsonl")
    assert [each.reward for each in found] == [0.5, None]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_reward_for_a_rollout_that_nobody_knows(
    receiver_of: Receive, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_damaged: bool
):
    """It is kept, and no trajectory; its rollout may still come, and is handed over then."""
    receiver = receiver_of(rollout_seconds=0.1)
    reward = reward_of(A)
    if is_damaged:
        reward = reward[0], {**reward[1], sc.REWARD: reward[1][sc.REWARD][:-1]}
    assert post(receiver.url, request([reward]))[0] == 200
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    heads = HeadFile(tmp_path / "journal", reads=True)
    [late] = heads.late_spans()
    row = None if is_damaged else reward[1][sc.REWARD]
    assert (late.rollout, late.span, late.reward) == (A, reward[0], row)
    assert ([*heads.heads()], [*heads.units()]) == ([], [])
    said = f"rollout {A}: a reward came, and nothing else of it: {row or 'damaged'}"
    until(lambda: said in caplog.text)
    assert receiver.counts()["handed_over_rewards_alone"] == 1
    if is_damaged:
        assert post(receiver.url, request([reward_of(A)]))[0] == 200
        until(lambda: [*heads.late_spans()] == [late._replace(reward=reward_of(A)[1][sc.REWARD])])
    assert ids(tmp_path / "out.jsonl") == []
    assert post(receiver.url, request([*spans_of(A), reward]))[0] == 200
    until(lambda: ids(tmp_path / "out.jsonl") == [A])


def test_a_long_rollout_does_not_fill_the_journal(receiver_of: Receive, tmp_path: Path):
    """What it needs is moved, so that what came beside it can go."""
    spans, most = spans_of(A, 20), 80_000
    receiver = receiver_of(journal_bytes=most, limits=Limits(body_bytes=10_000))
    sent = [request([span]) for span in spans[:-1]]
    for number in range(120):
        sent.insert(number // 6 * 7, request(spans_of(f"{number:08x}" * 4, 1)))
    assert sum(map(len, sent)) > 2 * most
    for body in sent:
        until(lambda body=body: post(receiver.url, body)[0] == 200)  # type: ignore[misc]
    assert receiver._journal.size < most
    until(lambda: post(receiver.url, request(spans[-1:]))[0] == 200)
    until(lambda: len(ids(tmp_path / "out.jsonl")) == 121)
    [line] = [line for line in lines(tmp_path / "out.jsonl") if line["id"] == A]
    assert "missing_calls" not in line


@pytest.mark.parametrize("written", [0, 1, 2])
def test_rows_of_a_trainer(
    receiver_of: Receive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
):
    """A group at a time, and what ran inside; after a kill what is there is not written again."""
    out = tmp_path / "out.jsonl"
    inside = spans_of(C, ROLLOUT_PARENT_ID=A, ROLLOUT_OUTER_GROUP_ID="g")
    body = request([*spans_of(A, **GROUP), *inside, *spans_of(B, **GROUP)])
    with monkeypatch.context() as patched:

        def killed(*_: object) -> None:
            out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:written]))
            raise OSError("killed")

        patched.setattr(HeadFile, "done", killed)
        given: dict[str, Any] = {"journal": tmp_path / "journal", "to": "tokens"}
        with TrajectoryReceiver(out, grpc=FREE, http=FREE, **given) as receiver:
            assert post(receiver.url, body)[0] == 200
            until(lambda: receiver.counts().get("handed_over_failed") == 1)
            patched.setattr(receiver._handover, "_pause", 1000)
    receiver = receiver_of(to="tokens", options={"credit": "split"}, jobs=1)
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    assert [row["trajectory_id"] for row in lines(out)] == [A, B, C]


def test_rows_are_those_of_the_trajectories(tmp_path: Path):
    """The receiver makes them of what it rebuilt; `export` reads the lines of the trajectories."""
    with Journal(tmp_path) as journal:
        places = journal.append([request(spans_of(A, 3, **GROUP)), request(spans_of(B, **GROUP))])
    given = str(tmp_path), places, frozenset((A, B)), frozenset((A, B))
    items = [line for _, line in rebuilt(*given, None).lines]
    exported = rows_of(items, TokenRows(), Tally(), pytest.fail, strict=True)
    assert [row for _, row in rebuilt(*given, RowFormat("tokens")).lines] == [
        row.strip() for row in exported
    ]
    assert len(items) == len(exported) == 2


def test_a_format_that_is_no_lines(tmp_path: Path):
    """And one that is not installed, and no file."""
    for options, why in (
        ({"to": "none"}, "no exporter 'none'"),
        ({"to": "tokens", "options": {"nonsense": "1"}}, "nonsense"),
        ({"to": "tokens", "out": InMemoryTrajectoryExporter()}, "expected a file"),
    ):
        given: dict[str, Any] = {"out": tmp_path / "out.jsonl", "journal": tmp_path, **options}
        with pytest.raises(ConfigurationError, match=why):
            TrajectoryReceiver(given.pop("out"), **given)


def test_workers_in_processes(receiver_of: Receive, tmp_path: Path):
    """They rebuild; what they read is in the journal."""
    receiver = receiver_of(jobs=1)
    assert post(receiver.url, request(spans_of(A)))[0] == 200
    until(lambda: ids(tmp_path / "out.jsonl") == [A])
