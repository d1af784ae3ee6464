"""Both lanes apart in the real collector: what its file has, what Jaeger gets, and the switches."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.trace import Link

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.otlp import read_jaeger, read_json_lines
from otel_rollout.spans import SpanRecord
from otel_rollout.testing import ModelServer
from tests.backends.programs import eventually
from tests.kit.scenarios import play

if TYPE_CHECKING:
    from tests.backends.programs import Collector, Jaeger, RunCollector

pytestmark = pytest.mark.backend
CONFIG = Path(__file__).parents[2] / "collector-config.yaml"
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
TURNS = 40


def long_agent(client: openai.OpenAI) -> None:
    """Many turns of 4 KB, and beside them what only other libraries have recorded."""
    messages: list[Any] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn} " + "u" * 4096})
        reply = client.chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message.model_dump())
    framework = trace.get_tracer("framework")
    here = trace.get_current_span().get_span_context()
    with framework.start_as_current_span("chat uncaptured", attributes=CHAT, links=[Link(here)]):
        trace.get_current_span().add_event("an event")


def sent_to(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trajectories of rollouts whose spans this collector got."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(service_name="lanes", exporters=[memory], content="full")
    with (
        ModelServer(
            [f"reply {turn}" for turn in range(TURNS)], token_ids=True, logprobs=True
        ) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        rollout("long"),
    ):
        long_agent(client)
    play("tool_loop", "streamed", "nested")
    assert otel_rollout.shutdown()
    return sorted(memory.get_finished_trajectories(), key=lambda t: (t.start_time_ns, t.id))


def in_jaeger(jaeger: Jaeger, live: Iterable[Any], count: int) -> list[SpanRecord]:
    traces = {trajectory.trace_id for trajectory in live}
    return eventually(
        lambda: [span for trace_id in traces for span in read_jaeger(jaeger.api_url, trace_id)],
        lambda spans: len(spans) >= count,
    )


def is_exchange(span: SpanRecord) -> bool:
    return sc.EXCHANGE_VERSION in span.attributes


def has_exchange(span: SpanRecord) -> bool:
    return span.attributes.get(sc.HAS_EXCHANGE) is True


def size_of(spans: Iterable[SpanRecord]) -> int:
    return sum(len(json.dumps(dict(span.attributes), default=str)) for span in spans)


def keys_of(spans: Iterable[SpanRecord]) -> list[Any]:
    return sorted(span.key for span in spans)


def test_the_file_has_what_rebuilding_reads(
    run_collector: RunCollector, jaeger: Jaeger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM spans of captured calls are in Jaeger alone, all other spans in both."""
    with run_collector(tmp_path, OTEL_ROLLOUT_JAEGER=jaeger.otlp_grpc) as collector:
        live = sent_to(collector, monkeypatch)
        kept = list(read_json_lines(collector.traces_file))
        shown = in_jaeger(jaeger, live, len(kept) + 1)
        shown = in_jaeger(jaeger, live, len(kept) + sum(map(has_exchange, shown)))
    assert keys_of(kept) == keys_of(span for span in shown if not has_exchange(span))
    assert sum(map(has_exchange, shown)) == sum(map(is_exchange, shown)) > TURNS
    (uncaptured,) = (span for span in kept if span.name == "chat uncaptured")
    assert [event.name for event in uncaptured.events] == ["an event"]
    assert '"links":[{' in collector.traces_file.read_text()
    assert any(span.name.startswith("execute_tool") for span in kept)
    assert reconstruct(kept) == reconstruct(shown) == live
    assert size_of(kept) < 0.5 * size_of(shown)  # the rest is token ids of this test


def test_a_trace_that_is_not_ours_is_whole(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that only an instrumentor recorded can be rebuilt from the file."""
    with run_collector(tmp_path) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.otlp_http)
        otel_rollout.configure(service_name="foreign")
        with (
            ModelServer("hello", token_ids=True, logprobs=True) as server,
            openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        ):
            hi: Any = [{"role": "user", "content": "hi"}]
            client.chat.completions.create(model="m", messages=hi)
        assert otel_rollout.shutdown()
        (found,) = reconstruct(read_json_lines(collector.traces_file), infer_rollouts=True)
    assert [m.get("content") for m in found.messages()] == ["hi", "hello"]


def test_the_file_with_all_spans(
    run_collector: RunCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_ROLLOUT_TRACES_FILE_LLM_SPANS=true: it has the LLM spans too."""
    with run_collector(tmp_path, OTEL_ROLLOUT_TRACES_FILE_LLM_SPANS="true") as collector:
        live = sent_to(collector, monkeypatch)
        kept = list(read_json_lines(collector.traces_file))
    assert sum(map(has_exchange, kept)) == sum(map(is_exchange, kept)) > TURNS
    assert reconstruct(kept) == live


def test_jaeger_without_exchange_spans(
    run_collector: RunCollector, jaeger: Jaeger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_ROLLOUT_JAEGER_EXCHANGES=false: they are in the file alone."""
    settings = {
        "OTEL_ROLLOUT_JAEGER": jaeger.otlp_grpc,
        "OTEL_ROLLOUT_JAEGER_EXCHANGES": "false",
    }
    with run_collector(tmp_path, **settings) as collector:
        live = sent_to(collector, monkeypatch)
        kept = list(read_json_lines(collector.traces_file))
    exchanges = sum(map(is_exchange, kept))
    shown = in_jaeger(jaeger, live, len(kept))  # as many LLM spans as exchange spans
    assert sum(map(has_exchange, shown)) == exchanges > TURNS
    assert not any(map(is_exchange, shown))
    assert len(shown) == len(kept)
    assert reconstruct(kept) == live


@pytest.mark.parametrize(
    "name", ["OTEL_ROLLOUT_JAEGER_EXCHANGES", "OTEL_ROLLOUT_TRACES_FILE_LLM_SPANS"]
)
@pytest.mark.parametrize("value", ["no", "0", ""])
def test_a_switch_is_true_or_false(
    otelcol: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Anything else is refused when the collector starts, by the name of the filter."""
    monkeypatch.setenv(name, value)
    command = [str(otelcol), "validate", "--config", str(CONFIG)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode != 0
    assert "processors::filter/" in result.stderr
