"""Every rollout of a test is rebuilt from its spans, and has to be equal to the live one."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import Trajectory, TrajectorySpanProcessor, reconstruct
from otel_rollout.otlp import JsonLinesSpanExporter, read_json_lines, read_protobuf


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Check what the test recorded once it has passed, unless its mark `not_replayed` says why."""
    if item.get_closest_marker("not_replayed"):
        yield
        return
    spans: list[ReadableSpan] = []
    ended: dict[str, Trajectory] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        _observe(monkeypatch, spans, ended)
        yield
    live = {id_: t for id_, t in ended.items() if t.status in ("complete", "error", "cancelled")}
    if live:
        _check(spans, live)


def _observe(
    monkeypatch: pytest.MonkeyPatch, spans: list[ReadableSpan], ended: dict[str, Trajectory]
) -> None:
    """Collect the spans that a processor gets, and the trajectories that it hands over."""
    on_end, hand_over = TrajectorySpanProcessor.on_end, TrajectorySpanProcessor._hand_over

    def seen(processor: TrajectorySpanProcessor, span: ReadableSpan) -> None:
        spans.append(span)
        on_end(processor, span)

    def handed_over(processor: TrajectorySpanProcessor, trajectory: Trajectory) -> None:
        ended[trajectory.id] = trajectory
        hand_over(processor, trajectory)

    monkeypatch.setattr(TrajectorySpanProcessor, "on_end", seen)
    monkeypatch.setattr(TrajectorySpanProcessor, "_hand_over", handed_over)


def _check(spans: Sequence[ReadableSpan], live: dict[str, Trajectory]) -> None:
    shuffled = [*spans, *spans[::3]]  # some come twice
    random.Random(len(shuffled)).shuffle(shuffled)
    for records in (shuffled, _as_protobuf(shuffled), _as_json_lines(shuffled)):
        rebuilt = {trajectory.id: trajectory for trajectory in reconstruct(records)}
        for id_, trajectory in live.items():
            assert rebuilt[id_].to_dict() == trajectory.to_dict()
            assert rebuilt[id_] == trajectory


def _as_protobuf(spans: Sequence[ReadableSpan]) -> Any:
    return read_protobuf(encode_spans(spans).SerializeToString())


def _as_json_lines(spans: Sequence[ReadableSpan]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.jsonl"
        exporter = JsonLinesSpanExporter(path)
        exporter.export(spans)
        exporter.shutdown()
        return list(read_json_lines(path))
