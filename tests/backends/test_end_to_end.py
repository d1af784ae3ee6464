"""A rollout through the real collector to the real Jaeger, and back."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    gather_trajectory,
    reconstruct,
    rollout,
)
from otel_rollout.command.cli import main
from otel_rollout.otlp import find_jaeger, read, read_jaeger, read_json_lines
from otel_rollout.spans.record import SpanRecord
from otel_rollout.testing import ModelServer, Reply
from tests.backends.programs import eventually
from tests.kit.scenarios import SCENARIOS, play

if TYPE_CHECKING:
    from tests.backends.programs import Collector, Jaeger, RunCollector

pytestmark = pytest.mark.backend
ROOT = Path(__file__).parents[2]
COLLECTOR_CONFIG = ROOT / "collector-config.yaml"


def of_trace(collector: Collector, trace_id: str) -> list[SpanRecord]:
    return [s for s in read_json_lines(collector.traces_file) if s.trace_id == trace_id]


def read_back(
    jaeger: Jaeger, collector: Collector, trajectory: Trajectory
) -> dict[str, list[SpanRecord]]:
    """The spans of the trajectory's trace, by where they were read."""

    def has_root(spans: list[SpanRecord]) -> bool:
        return any(span.span_id == trajectory.span_id for span in spans)

    file = eventually(lambda: of_trace(collector, trajectory.trace_id), has_root)
    return {
        "file": file,
        "jaeger": eventually(
            lambda: read_jaeger(jaeger.api_url, trajectory.trace_id),
            lambda spans: len(spans) >= len(file),
        ),
    }


def test_the_quickstart_is_in_jaeger_and_can_be_rebuilt(
    jaeger: Jaeger, collector: Collector, tmp_path: Path
) -> None:
    """What the quickstart's process made is rebuilt from the file and from Jaeger alike."""
    lines = tmp_path / "trajectories.jsonl"
    program = (
        "import sys, otel_rollout; sys.path.insert(0, sys.argv[1]); import quickstart;"
        "plain = otel_rollout.configure;"
        "otel_rollout.configure = lambda **options: plain("
        "    exporters=[otel_rollout.JsonlTrajectoryExporter(sys.argv[2])], **options);"
        "quickstart.main()"
    )
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.otlp_http,
        "JAEGER_UI": jaeger.api_url,
        "PYTHONPATH": str(ROOT),
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(ROOT / "examples"), str(lines)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trajectories = list(JsonlTrajectoryExporter.read(lines))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert f"{jaeger.api_url}/trace/{trajectory.trace_id}" in done.stdout
        assert trajectory.warnings == []
        for spans in read_back(jaeger, collector, trajectory).values():
            random.Random(1).shuffle(spans)
            assert reconstruct(spans + spans[:3]) == [trajectory]


def test_spans_are_nested_and_named_as_jaeger_wants_them(
    jaeger: Jaeger, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout, LLM, tool and exchange spans nest rightly and have the names of the conventions."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    otel_rollout.configure(service_name="nesting")

    @otel_rollout.tool
    def look_up(key: str) -> str:
        return f"{key}!"

    @rollout
    def agent(client: openai.OpenAI) -> None:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        look_up("a", tool_call_id="call_1")  # type: ignore[call-arg]
        otel_rollout.record_reward(0.5)

    with (
        ModelServer(token_ids=True, logprobs=True) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        rollout("outer") as outer,
    ):
        agent(client)
    otel_rollout.shutdown()
    spans = {span.name: span for span in read_back(jaeger, collector, outer)["jaeger"]}
    assert set(spans) == {
        "invoke_agent outer",
        "invoke_agent agent",
        "chat m",
        "recording /chat/completions",
        "execute_tool look_up",
        "rollout started",
    }
    parents = {
        "invoke_agent agent": "invoke_agent outer",
        "chat m": "invoke_agent agent",
        "recording /chat/completions": "chat m",
        "execute_tool look_up": "invoke_agent agent",
    }
    for child, parent in parents.items():
        assert spans[child].parent_span_id == spans[parent].span_id
    attributes: dict[str, Any] = dict(spans["chat m"].attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert '"hi"' in attributes["gen_ai.input.messages"]
    assert '"You said: hi"' in attributes["gen_ai.output.messages"]
    assert attributes["gen_ai.usage.input_tokens"] > 0
    assert spans["invoke_agent agent"].attributes["gen_ai.operation.name"] == "invoke_agent"
    assert spans["invoke_agent agent"].attributes["gen_ai.agent.name"] == "agent"
    called = spans["execute_tool look_up"].attributes
    assert called["gen_ai.operation.name"] == "execute_tool"
    assert called["gen_ai.tool.name"] == "look_up"
    assert called["gen_ai.tool.call.id"] == "call_1"
    assert called["gen_ai.tool.call.arguments"] == '{"key":"a"}'
    assert called["gen_ai.tool.call.result"] == "a!"


async def test_a_long_rollout_arrives_whole(
    jaeger: Jaeger, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred turns of 4 KB are equal to the live trajectory in the file and in Jaeger."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    otel_rollout.configure(service_name="long")

    @rollout
    async def agent(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = []
        for turn in range(100):
            messages.append({"role": "user", "content": f"{turn} " + "é" * 2048})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump())

    replies = [Reply(f"{turn} " + "a" * 4096) for turn in range(100)]
    with ModelServer(replies, token_ids=True, logprobs=True) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            trajectory = await gather_trajectory(agent(client))
    assert otel_rollout.shutdown()
    assert trajectory.warnings == []
    assert len(trajectory.completions) == 100
    for spans in read_back(jaeger, collector, trajectory).values():
        assert reconstruct(spans) == [trajectory]


def test_every_kind_of_rollout_comes_back(
    jaeger: Jaeger, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and Jaeger, by trace and by service, give each trajectory as it was live."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(service_name="every-kind", exporters=[memory])
    begin = time.time_ns()
    play()
    assert otel_rollout.shutdown()
    live = sorted(memory.get_finished_trajectories(), key=lambda t: (t.start_time_ns, t.id))
    assert len(live) > len(SCENARIOS)
    traces = {trajectory.trace_id for trajectory in live}

    def in_file() -> list[SpanRecord]:
        return [span for span in read(collector.traces_file) if span.trace_id in traces]

    def in_jaeger() -> list[SpanRecord]:
        return [span for id_ in traces for span in read(f"{jaeger.api_url}/trace/{id_}")]

    ends = {trajectory.span_id for trajectory in live}
    file = eventually(in_file, lambda spans: ends <= {span.span_id for span in spans})
    assert reconstruct(file) == live
    back = eventually(in_jaeger, lambda spans: len(spans) >= len(file))
    assert reconstruct(back) == live
    random.Random(1).shuffle(back)
    assert reconstruct(file[::-1] + back) == live
    end = time.time_ns()
    for limit in (4, 20):
        found = find_jaeger(jaeger.api_url, "every-kind", begin, end, limit=limit)
        assert reconstruct(found) == live


def test_the_command_rebuilds_from_both(
    jaeger: Jaeger, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`otel-rollout rebuild` of the collector's file and of a trace's address."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    otel_rollout.configure(service_name="command")
    with rollout("outer") as outer:
        play("tool_loop")
    assert otel_rollout.shutdown()
    spans = read_back(jaeger, collector, outer)
    expected = reconstruct(spans["file"])
    assert [t.name for t in expected] == ["outer", "tools"]
    target = tmp_path / "trajectories.jsonl"
    for source in (str(collector.traces_file), f"{jaeger.api_url}/trace/{outer.trace_id}"):
        assert main(["rebuild", source, "-o", str(target), "--force"]) == 0
        read_again = JsonlTrajectoryExporter.read(target)
        assert [t for t in read_again if t.trace_id == outer.trace_id] == expected


@pytest.mark.parametrize("compression", ["", "zstd"])
@pytest.mark.parametrize("format_", ["proto", "json"])
def test_every_format_of_the_collectors_file(
    run_collector: RunCollector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format_: str,
    compression: str,
) -> None:
    """Files of `format: proto` are read, compressed ones refused with what to do."""
    config = tmp_path / "config.yaml"
    text = COLLECTOR_CONFIG.read_text()
    assert text.count("format: json #") == 1
    more = f"\n    compression: {compression}" if compression else ""
    config.write_text(text.replace("format: json #", f"format: {format_}{more} #"))
    folder = tmp_path / "run"
    with run_collector(folder, config) as started:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.otlp_http)
        memory = InMemoryTrajectoryExporter()
        otel_rollout.configure(exporters=[memory])
        play("plain", "annotated")
        assert otel_rollout.shutdown()
    live = list(memory.get_finished_trajectories())
    if compression:
        with pytest.raises(SpanFormatError, match="zstd -d"):
            list(read(started.traces_file))
    else:
        assert reconstruct(read(started.traces_file)) == live


def test_a_late_reward_is_on_the_trace(
    jaeger: Jaeger, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward set after the rollout ended is read back from both."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    otel_rollout.configure(service_name="late")
    with rollout("judged") as trajectory:
        pass
    trajectory.reward = 0.7
    otel_rollout.shutdown()

    def rebuilt(spans: list[SpanRecord]) -> bool:
        return len(spans) == 2

    file = eventually(lambda: of_trace(collector, trajectory.trace_id), rebuilt)
    back = eventually(lambda: read_jaeger(jaeger.api_url, trajectory.trace_id), rebuilt)
    assert reconstruct(file) == reconstruct(back) == [trajectory]
    assert reconstruct(file)[0].reward == 0.7
