"""Collectors that are killed, late, full, rotated or small: what arrives, and how losses are said.

Rollouts run meanwhile as ever; nothing here depends on how long something takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import otel_rollout
from otel_rollout import SpanFormatError, Trajectory, reconstruct, rollout
from otel_rollout.otlp import read, read_jaeger
from otel_rollout.spans import SpanRecord
from otel_rollout.testing import ModelServer, Reply
from tests.backends.programs import COLLECTOR_CONFIG, JAEGER_CONFIG, free_addresses, start_jaeger

if TYPE_CHECKING:
    from tests.backends.programs import Jaeger, RunCollector

pytestmark = pytest.mark.backend
TEXT = "é" * 4000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go out, and are sent again, soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    monkeypatch.setattr("otel_rollout.record.sending.backlog._LONGEST_PAUSE", 0.5)


@contextmanager
def a_client() -> Iterator[openai.OpenAI]:
    with (
        ModelServer([Reply("a" * 2000)] * 10_000, token_ids=True, logprobs=True) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
    ):
        yield client


def play(client: openai.OpenAI, count: int, turns: int = 4, text: str = TEXT) -> list[Trajectory]:
    """Run some rollouts; each is whole in this process, whatever becomes of its spans."""
    live = []
    for number in range(count):
        with rollout(f"r{number}") as trajectory:
            messages: list[Any] = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn} {text}"})
                reply = client.chat.completions.create(model="m", messages=messages)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        assert trajectory.warnings == []
        assert len(trajectory.completions) == turns
        live.append(trajectory)
    return live


def eventually(holds: Callable[[], bool], seconds: float = 90) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def in_file(path: Path) -> list[SpanRecord]:
    """The spans of a file that may not be there yet, and may be rotated or damaged."""
    return list(read(path, on_error=lambda _: None)) if path.exists() else []


def same(found: list[Trajectory], live: list[Trajectory]) -> bool:
    return sorted(found, key=by_time) == sorted(live, key=by_time)


def by_time(trajectory: Trajectory) -> Any:
    return trajectory.start_time_ns, trajectory.id


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_is_killed_and_restarted(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Every trajectory is in the file: what it had acknowledged, and what waited for the next."""
    http, grpc = free_addresses(2)
    ports = {"OTEL_ROLLOUT_OTLP_HTTP": http, "OTEL_ROLLOUT_OTLP_GRPC": grpc}
    address = grpc if protocol == "grpc" else http
    if protocol == "grpc":
        pytest.importorskip("grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with a_client() as client:
        with run_collector(tmp_path, **ports) as first:
            otel_rollout.configure("killed")
            live = play(client, 10)
            assert eventually(lambda: len(in_file(first.traces_file)) > 20)
            live += play(client, 2)
            os.kill(first.pid, signal.SIGKILL)
            live += play(client, 10)
        live += play(client, 5)
        with run_collector(tmp_path, **ports):
            live += play(client, 10)
            assert otel_rollout.shutdown(60_000)
    assert same(reconstruct(in_file(first.traces_file)), live)


def test_a_collector_that_comes_later(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost of the rollouts that ran before it was there."""
    (http,) = free_addresses(1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{http}")
    otel_rollout.configure("late")
    with a_client() as client:
        live = play(client, 10)
        with run_collector(tmp_path, OTEL_ROLLOUT_OTLP_HTTP=http) as collector:
            spans = 10 * (1 + 4)  # the file has no LLM spans
            assert eventually(lambda: len(in_file(collector.traces_file)) >= spans)
            live += play(client, 3)
            assert otel_rollout.shutdown(60_000)
    assert same(reconstruct(in_file(collector.traces_file)), live)


@pytest.mark.not_replayed("the collector is away")
def test_no_collector_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rollouts run as ever, and the end says how many spans of rollouts are lost."""
    (nobody,) = free_addresses(1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{nobody}")
    otel_rollout.configure("nobody")
    with a_client() as client:
        play(client, 10)
    assert not otel_rollout.shutdown(2000)
    assert "60 of 60 spans did not reach OTLPSpanExporter" in caplog.text


def test_the_file_is_rotated_while_it_is_read(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that reads all the time never sees less than before, and in the end all."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    settings = {"OTEL_ROLLOUT_TRACES_FILE_MIB": "1"}
    with a_client() as client, run_collector(tmp_path, **settings) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
        otel_rollout.configure("rotated")
        live, seen = list[Trajectory](), 0
        for _ in range(6):
            live += play(client, 3, turns=5)
            spans = in_file(collector.traces_file)
            assert len(spans) >= seen
            seen = len(spans)
        assert otel_rollout.shutdown()
    assert len(list(collector.traces_file.parent.glob("traces-*.jsonl"))) > 2
    spans = list(read(collector.traces_file))
    assert len({span.span_id for span in spans}) == len(spans)
    assert same(reconstruct(spans), live)
    assert same(reconstruct(read(collector.traces_file.parent)), live)


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """The shipped config with the receivers' own limits: 4 MiB over gRPC, 20 MiB over HTTP."""
    return without_limits(COLLECTOR_CONFIG, tmp_path / "small-collector.yaml")


def without_limits(config: Path, target: Path) -> Path:
    lines = config.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "max_recv_msg" not in line and "max_request_body" not in line]
    assert len(kept) == len(lines) - 2
    target.write_text("".join(kept))
    return target


@pytest.fixture
def small_jaeger(tmp_path: Path) -> Iterator[Jaeger]:
    """A Jaeger with the limits that it has by default."""
    config = without_limits(JAEGER_CONFIG, tmp_path / "small-jaeger.yaml")
    with start_jaeger(tmp_path / "jaeger", config) as started:
        yield started


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_requests_pass_every_hop_with_its_default_limit(
    run_collector: RunCollector,
    small_config: Path,
    small_jaeger: Jaeger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
) -> None:
    """Over 20 MiB through receivers of 4 MiB, to the file and on to Jaeger: nothing is missing."""
    if protocol == "grpc":
        pytest.importorskip("grpc")
    settings = {"OTEL_ROLLOUT_JAEGER": small_jaeger.otlp_grpc}
    with a_client() as client, run_collector(tmp_path / "run", small_config, **settings) as started:
        address = f"http://{started.otlp_grpc}" if protocol == "grpc" else started.otlp_http
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        otel_rollout.configure("hops")
        (live,) = play(client, 1, turns=7, text="x" * 250_000)
        assert otel_rollout.shutdown()
        assert reconstruct(in_file(started.traces_file)) == [live]

        def back() -> list[SpanRecord]:
            try:
                return read_jaeger(small_jaeger.api_url, live.trace_id)
            except LookupError:
                return []

        expected = len(in_file(started.traces_file))
        assert eventually(lambda: len(back()) >= expected)
        assert reconstruct(back()) == [live]


@pytest.mark.not_replayed("a span does not arrive")
def test_a_span_over_the_collectors_limit_keeps_nothing_else_waiting(
    run_collector: RunCollector,
    small_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over gRPC, with small ones around it: these arrive, and the call is missing and counted."""
    pytest.importorskip("grpc")
    with a_client() as client, run_collector(tmp_path / "run", small_config) as started:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{started.otlp_grpc}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        otel_rollout.configure("large", instrumentor=None)
        before = play(client, 5)
        (large,) = play(client, 1, turns=1, text="x" * 5_000_000)
        after = play(client, 5)
        assert not otel_rollout.shutdown(3000)
    spans = in_file(started.traces_file)
    assert len({span.span_id for span in spans}) == 10 * 6 + 2  # each rollout has one of its start
    rebuilt = {trajectory.id: trajectory for trajectory in reconstruct(spans)}
    for trajectory in before + after:
        assert rebuilt[trajectory.id] == trajectory
    assert any("did not come" in warning for warning in rebuilt[large.id].warnings)


def test_a_full_disk_of_the_collector(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not write is sent again when there is room; half a line swallows nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        settings = {"OTEL_ROLLOUT_TRACES_FILE": str(disk / "traces.jsonl")}
        with a_client() as client, run_collector(tmp_path, **settings) as collector:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
            otel_rollout.configure("full", instrumentor=None)
            live = play(client, 20)
            time.sleep(2)
            subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
            live += play(client, 5)
            assert otel_rollout.shutdown(60_000)
        errors: list[SpanFormatError] = []
        spans = list(read(disk / "traces.jsonl", on_error=errors.append))
        assert errors
        assert same(reconstruct(spans), live)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
