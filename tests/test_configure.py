"""Start-up and its undoing: what `configure` wires, what it refuses, what `shutdown` restores."""

from __future__ import annotations

import gzip
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import openai
import openai._base_client
import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from openai.resources.embeddings import Embeddings
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    InMemoryTrajectoryExporter,
    TrajectorySpanProcessor,
    TruncationWarning,
    get_current_trajectory,
    reconstruct,
    rollout,
    semconv,
)
from otel_rollout.otlp import read_protobuf
from otel_rollout.providers import forget_global_metrics
from otel_rollout.record import Settings, process_state
from otel_rollout.testing import Reply
from tests.kit.recording import Clients, Recording


def ask(client: openai.OpenAI, text: Any = "hi") -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=messages)


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]


EXPECTED = ["chat m", "invoke_agent x", "recording /chat/completions", "rollout started"]


class Collector:
    """An OTLP/HTTP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.requests.append((self.path, headers, body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def processors(provider: TracerProvider) -> list[Any]:
    return list(provider._active_span_processor._span_processors)


# --- the provider


def test_it_sets_a_provider():
    """Without a provider it makes one, makes it global and returns it."""
    provider = otel_rollout.configure("math-agent")
    assert trace.get_tracer_provider() is provider
    assert isinstance(provider, TracerProvider)
    assert provider.resource.attributes["service.name"] == "math-agent"
    assert provider.resource.attributes["telemetry.sdk.language"] == "python"


def test_it_uses_the_global_provider(clients: Clients):
    """A provider that is global already is used, and keeps what it exports to."""
    mine, spans = TracerProvider(), InMemorySpanExporter()
    mine.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(mine)
    exporter = InMemoryTrajectoryExporter()
    assert otel_rollout.configure("ignored", [exporter]) is mine
    assert mine.resource.attributes["service.name"] != "ignored"
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client)
    assert exporter.get_finished_trajectories() == (trajectory,)
    assert sorted(names(spans)) == EXPECTED[:-1]  # the start goes to exporters of `configure`


def test_it_uses_the_provider_that_is_given(clients: Clients):
    """A provider that is given is used, and not made global."""
    mine = TracerProvider()
    exporter = InMemoryTrajectoryExporter()
    assert otel_rollout.configure(exporters=[exporter], tracer_provider=mine) is mine
    assert trace.get_tracer_provider() is not mine
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client)
    assert len(trajectory.completions) == 1
    assert exporter.get_finished_trajectories() == (trajectory,)


@pytest.mark.parametrize("given", [True, False])
def test_a_provider_that_is_not_the_sdks_is_refused(given: bool):
    """A provider that takes no span processors is refused, and nothing is left half done."""
    provider: Any = trace.NoOpTracerProvider()
    if not given:
        trace.set_tracer_provider(provider)
    with pytest.raises(ConfigurationError, match="expected a TracerProvider of the OpenTelemetry"):
        otel_rollout.configure(tracer_provider=provider if given else None)
    assert "wrapt" not in str(type(vars(openai._base_client.SyncAPIClient)["request"]))
    trace._TRACER_PROVIDER = None
    assert isinstance(otel_rollout.configure("x", tracer_provider=TracerProvider()), TracerProvider)


def test_the_service_name(monkeypatch: pytest.MonkeyPatch):
    """The argument wins over OTEL_SERVICE_NAME, that over OTEL_RESOURCE_ATTRIBUTES."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=resource,team=rl")
    assert otel_rollout.configure().resource.attributes["service.name"] == "resource"
    otel_rollout.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "variable")
    assert otel_rollout.configure().resource.attributes["service.name"] == "variable"
    otel_rollout.shutdown()
    attributes = otel_rollout.configure("argument").resource.attributes
    assert (attributes["service.name"], attributes["team"]) == ("argument", "rl")


# --- where spans go


def test_spans_go_to_the_otlp_endpoint(
    collector: Collector, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """With an endpoint set the spans arrive there, with its headers, and rebuild the rollout."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret,x-team=rl")
    otel_rollout.configure("math-agent")
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client)
    trajectory.reward = 0.5
    assert otel_rollout.shutdown()
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    for _, headers, body in collector.requests:
        assert (headers["x-api-key"], headers["x-team"]) == ("secret", "rl")
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        attributes = {row.key: row.value.string_value for row in resource.resource.attributes}
        assert attributes["service.name"] == "math-agent"
    spans = [span for _, _, body in collector.requests for span in read_protobuf(body)]
    assert sorted(span.name for span in spans) == sorted([*EXPECTED, "evaluate rollout: reward"])
    assert reconstruct(spans) == [trajectory]


def test_the_traces_endpoint_alone_is_enough(collector: Collector, monkeypatch: pytest.MonkeyPatch):
    """OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is taken as it is."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/here")
    otel_rollout.configure("x")
    with rollout("x"):
        pass
    assert otel_rollout.shutdown()
    assert {path for path, _, _ in collector.requests} == {"/here"}


def sent_metrics(collector: Collector) -> dict[str, str]:
    """The names of our metrics that came, each with the service that sent it."""
    found: dict[str, str] = {}
    for path, _, body in collector.requests:
        if not path.endswith("/v1/metrics"):
            continue
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_metrics:
                if scope.scope.name == semconv.SCOPE:
                    found |= {metric.name: named["service.name"] for metric in scope.metrics}
    return found


@pytest.mark.parametrize(
    "variable", ["OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"]
)
def test_metrics_go_where_the_environment_says(
    collector: Collector, clients: Clients, monkeypatch: pytest.MonkeyPatch, variable: str
):
    """They are asked for by name, or by an endpoint of theirs; the last ones at shutdown."""
    if variable == "OTEL_METRICS_EXPORTER":
        monkeypatch.setenv(variable, "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    else:
        monkeypatch.setenv(variable, f"{collector.url}/v1/metrics")
    otel_rollout.configure("math-agent")
    with rollout("x") as trajectory:
        ask(clients.sync(clients.serve()))
        trajectory.reward = 1.0
    assert otel_rollout.shutdown()
    found = sent_metrics(collector)
    assert set(found.values()) == {"math-agent"}
    assert {semconv.METRIC_ROLLOUTS, semconv.METRIC_REWARD, semconv.METRIC_TOKENS} <= set(found)
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"


def test_an_endpoint_for_all_signals_gets_no_metrics_unasked(
    collector: Collector, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """It may be a backend of traces, such as Jaeger, which would refuse them again and again."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    otel_rollout.configure("x")
    with rollout("x"):
        ask(clients.sync(clients.serve()))
    assert otel_rollout.shutdown()
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}


def test_a_meter_provider_of_the_users_stays(collector: Collector, monkeypatch: pytest.MonkeyPatch):
    """What they set up gets the metrics; nothing is added, and it is not shut down."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", collector.url)
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(mine := MeterProvider([reader]))
    try:
        otel_rollout.configure("x")
        with rollout("x"):
            pass
        assert otel_rollout.shutdown()
        assert metrics.get_meter_provider() is mine
        assert reader.get_metrics_data() is not None
        assert collector.requests == []
    finally:
        mine.shutdown()
        forget_global_metrics(mine)


@pytest.mark.parametrize("variable", [None, "OTEL_TRACES_EXPORTER"])
def test_without_an_endpoint_nothing_is_sent(
    collector: Collector,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
):
    """No endpoint, or OTEL_TRACES_EXPORTER=none: nothing is sent, and nobody complains."""
    if variable:
        monkeypatch.setenv(variable, "none")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    caplog.set_level(logging.WARNING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        provider = otel_rollout.configure("x")
        client = clients.sync(clients.serve())
        with rollout("x"):
            ask(client)
        assert [type(processor) for processor in processors(provider)] == [TrajectorySpanProcessor]
        assert otel_rollout.shutdown()
    assert collector.requests == []
    assert caplog.records == []
    assert [str(w.message) for w in caught if "otel_rollout" in w.filename] == []


def test_a_users_provider_gets_no_otlp_exporter(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    """What a provider of the user's exports to is the user's choice."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    otel_rollout.configure(tracer_provider=TracerProvider())
    with rollout("x"):
        pass
    assert otel_rollout.shutdown()
    assert collector.requests == []


def test_span_exporters_get_the_spans(clients: Clients):
    """`span_exporters` get every span, once."""
    spans = InMemorySpanExporter()
    otel_rollout.configure("x", span_exporters=[spans])
    client = clients.sync(clients.serve())
    with rollout("x"):
        ask(client)
    assert otel_rollout.shutdown()
    assert sorted(names(spans)) == EXPECTED


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
)
def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str):
    """A protocol that Python has no exporter for is refused by name, before anything is wired."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, "http/json")
    with pytest.raises(ConfigurationError, match="expected 'http/protobuf' or 'grpc', got 'http/j"):
        otel_rollout.configure("x")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    monkeypatch.delenv(variable)
    otel_rollout.configure("x")


def test_a_protocol_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    """GRPC without its package says which one to install."""
    if find_spec("opentelemetry.exporter.otlp.proto.grpc"):
        pytest.skip("it is installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigurationError, match="opentelemetry-exporter-otlp-proto-grpc"):
        otel_rollout.configure("x")


# --- twice


def test_twice_is_safe(clients: Clients):
    """A second `configure` adds what is new and changes nothing else: each call is one span."""
    first, second = InMemoryTrajectoryExporter(), InMemoryTrajectoryExporter()
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure("x", [first], span_exporters=[spans])
    assert otel_rollout.configure("x", [first, second], span_exporters=[spans]) is provider
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client)
    provider.force_flush()
    assert sorted(names(spans)) == EXPECTED
    assert first.get_finished_trajectories() == (trajectory,)
    assert second.get_finished_trajectories() == (trajectory,)
    with pytest.raises(ConfigurationError, match="configured already with another provider"):
        otel_rollout.configure(tracer_provider=TracerProvider())


def test_another_service_name_is_logged(caplog: pytest.LogCaptureFixture):
    """A second name comes too late, and that is said."""
    provider = otel_rollout.configure("first")
    otel_rollout.configure("second")
    assert provider.resource.attributes["service.name"] == "first"
    assert "configure(service_name='second'): configured already" in caplog.text


# --- wrong arguments


class NotAnExporter:
    pass


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"exporters": [InMemorySpanExporter()]},
            r"pass it as configure\(span_exporters=\[...\]\)",
        ),
        ({"exporters": [InMemoryTrajectoryExporter]}, "make an instance of it"),
        ({"exporters": "memory"}, r"configure\(exporters=...\): expected a list, got 'memory'"),
        (
            {"exporters": InMemoryTrajectoryExporter()},
            r"a list, got .*; write \[exporter\]",
        ),
        (
            {"span_exporters": InMemorySpanExporter()},
            r"a list, got .*; write \[exporter\]",
        ),
        ({"exporters": 3}, r"configure\(exporters=...\): expected a list, got 3"),
        ({"exporters": [NotAnExporter()]}, "which has no export, force_flush, shutdown"),
        ({"exporters": [None]}, "expected a TrajectoryExporter, got None"),
        ({"span_exporters": [InMemoryTrajectoryExporter()]}, "expected SpanExporters, got"),
        ({"span_exporters": "x"}, r"configure\(span_exporters=...\): expected a list"),
        ({"service_name": ""}, r"configure\(service_name=...\): expected a name, got ''"),
        ({"service_name": 3}, r"configure\(service_name=...\): expected a name, got 3"),
        ({"instrumentor": "gen"}, "expected 'openai', 'genai' or None, got 'gen'"),
        ({"tracer_provider": 3}, r"configure\(tracer_provider=...\): expected a TracerProvider"),
        ({"max_bytes": 0}, r"max_bytes=...\): expected a number from 1 on, got 0"),
        ({"max_bytes": True}, r"max_bytes=...\): expected a number from 1 on, got True"),
        ({"baggage": "yes"}, r"baggage=...\): expected True or False, got 'yes'"),
        ({"request_token_ids": 1}, r"request_token_ids=...\): expected True or False, got 1"),
        ({"tool_spans": None}, r"tool_spans=...\): expected True or False, got None"),
        ({"reward_in_name": 0}, r"reward_in_name=...\): expected True or False, got 0"),
        ({"rl_conventions": "m"}, r"rl_conventions=...\): expected True or False, got 'm'"),
        ({"policy_model": ""}, r"policy_model=...\): expected the name of a model, got ''"),
        ({"side_calls": "x"}, r"side_calls=...\): expected a list of functions, got 'x'"),
        ({"side_calls": [1]}, r"side_calls=...\): expected functions of a completion"),
        ({"llm_spans": "inner"}, r"llm_spans=...\): expected 'outer' or 'both', got 'inner'"),
        ({"content": "all"}, r"content=...\): expected 'new', 'full' or 'none', got 'all'"),
        ({"redact": "x"}, r"redact=...\): expected a function of bytes to bytes, got 'x'"),
        ({"service": "x"}, r"configure\(\): .*, got service; did you mean 'service_name'\?"),
        ({"zzz": 1}, r"configure\(\): expected the options service_name, .*, got zzz$"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str):
    """A wrong argument is an error that says what to pass; nothing is configured by it."""
    before = vars(openai._base_client.SyncAPIClient)["request"]
    with pytest.raises(ConfigurationError, match=text):
        otel_rollout.configure(**arguments)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert vars(openai._base_client.SyncAPIClient)["request"] is before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"policy_model": "m", "rl_conventions": True}, "m"),
        ({"policy_model": "m"}, None),
        ({"rl_conventions": True}, None),
    ],
)
def test_the_name_of_the_policy_is_on_the_resource(options: dict[str, Any], name: str | None):
    """Where it is asked for; the environment gives what else is proposed of a training run."""
    resource = otel_rollout.configure("agent", **options).resource
    assert resource.attributes.get("rl.model.name") == name
    assert resource.attributes["service.name"] == "agent"


@pytest.mark.parametrize(
    "options",
    [
        {"service_name": "other"},
        {"instrumentor": None},
        {"content": "full"},
        {"redact": bytes},
        {"llm_spans": "both"},
        {"tool_spans": False},
        {"rl_conventions": True},
        {"max_bytes": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_second_configure_cannot_change_is_logged(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """By name; the same again, and what the user has not asked for, is not."""
    otel_rollout.configure("agent")
    settings = process_state.settings
    otel_rollout.configure()
    otel_rollout.configure("agent", tool_spans=True, max_bytes=4 << 30)
    assert caplog.text == ""
    otel_rollout.configure(**options)
    (record,) = caplog.records
    name = "content" if "redact" in options else next(iter(options))
    assert record.getMessage().startswith(f"configure({name}=")
    assert record.getMessage().endswith("configured already, not changed")
    assert process_state.settings == settings


@pytest.mark.parametrize(
    "options",
    [
        {"request_token_ids": True},
        {"rollout_secret": "s3cret"},
        {"baggage": True},
        {"reward_in_name": True},
        {"policy_model": "m"},
        {"side_calls": ()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_second_configure_changes_what_it_may(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """A third one that has nothing to say of it leaves it, and `shutdown` puts the default back."""
    otel_rollout.configure()
    before = process_state.settings
    otel_rollout.configure(**options)
    otel_rollout.configure()
    assert process_state.settings == replace(before, **options)
    assert caplog.text == ""
    otel_rollout.shutdown()
    assert process_state.settings == Settings()


# --- limits


@pytest.mark.parametrize(
    "variable", ["OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"]
)
def test_a_length_limit_in_the_environment_warns(monkeypatch: pytest.MonkeyPatch, variable: str):
    """A limit on the length of attributes is said, with the variable and what to do."""
    monkeypatch.setenv(variable, "100")
    with pytest.warns(TruncationWarning, match="cut at 100 characters") as caught:
        otel_rollout.configure("x")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert variable in text
    assert "Remove the limit" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "variable", ["OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"]
)
def test_a_count_limit_in_the_environment_warns(monkeypatch: pytest.MonkeyPatch, variable: str):
    """A limit on the number of attributes that ours exceed is said."""
    monkeypatch.setenv(variable, "10")
    with pytest.warns(TruncationWarning, match="keep only 10 attributes") as caught:
        otel_rollout.configure("x")
    assert variable in str(caught[0].message)
    assert "Raise the limit" in str(caught[0].message)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (SpanLimits(max_attribute_length=50), r"SpanLimits\(max_\w*attribute_length=50\)"),
        (SpanLimits(max_span_attribute_length=60), r"SpanLimits\(max_span_attribute_length=60\)"),
        (SpanLimits(max_span_attributes=5), r"SpanLimits\(max_span_attributes=5\)"),
        (SpanLimits(max_attributes=5), r"SpanLimits\(max_\w*attributes=5\)"),
    ],
)
def test_the_limits_of_a_users_provider_warn(limits: SpanLimits, text: str):
    """The limits of a provider of the user's are looked at too."""
    with pytest.warns(TruncationWarning, match=text):
        otel_rollout.configure(tracer_provider=TracerProvider(span_limits=limits))


def test_limits_that_do_no_harm_do_not_warn(monkeypatch: pytest.MonkeyPatch):
    """The defaults, and limits that leave enough room, are not worth a word."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "128")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "3")
    otel_rollout.configure("x")  # warnings are errors


@pytest.mark.parametrize(
    "limits",
    [
        SpanLimits(max_attribute_length=60),
        SpanLimits(max_attribute_length=300),
        SpanLimits(max_span_attributes=5),
        SpanLimits(max_span_attributes=10),
    ],
)
@pytest.mark.not_replayed("a limit takes attributes that say what was kept")
def test_a_truncated_rollout_says_so(clients: Clients, limits: SpanLimits):
    """Whoever ignores the warning gets a trajectory that says what is missing, and trains not."""
    provider, spans = TracerProvider(span_limits=limits), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    exporter = InMemoryTrajectoryExporter()
    with pytest.warns(TruncationWarning):
        otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve("a reply of some length " * 50))
    with rollout("x") as trajectory:
        for number in range(3):
            ask(client, f"{number} " + "a question of some length " * 50)
    assert exporter.get_finished_trajectories() == (trajectory,)
    for found in (trajectory, *reconstruct(spans.get_finished_spans())):
        assert found.warnings
        assert not any(completion.trainable for completion in found.completions)


# --- shutdown


HOOKED: list[tuple[type, str]] = [
    (openai._base_client.SyncAPIClient, "request"),
    (openai._base_client.AsyncAPIClient, "request"),
    (openai._base_client.BaseClient, "_build_request"),
    (openai._base_client.BaseClient, "_should_retry"),
    (openai._base_client.SyncAPIClient, "_process_response"),
    (openai._base_client.AsyncAPIClient, "_process_response"),
    (Completions, "create"),
    (AsyncCompletions, "create"),
    (Embeddings, "create"),
    (threading.Thread, "start"),
    (threading.Thread, "run"),
]


def test_shutdown_restores_the_clients(clients: Clients):
    """After shutdown every class that was hooked has its own methods again."""
    before = [vars(owner)[name] for owner, name in HOOKED]
    for _ in range(3):
        otel_rollout.configure("x")
        during = [vars(owner)[name] for owner, name in HOOKED]
        assert all(a is not b for a, b in zip(before, during, strict=True))
        assert otel_rollout.shutdown()
        after = [vars(owner)[name] for owner, name in HOOKED]
        assert all(a is b for a, b in zip(before, after, strict=True))
    client = clients.sync(clients.serve())
    assert ask(client).choices[0].message.content == "You said: hi"


def test_configure_after_shutdown(clients: Clients):
    """Configuring anew works, with a provider of its own and one span for each call."""
    client = clients.sync(clients.serve())
    for _ in range(3):
        exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
        provider = otel_rollout.configure("x", [exporter], span_exporters=[spans])
        with rollout("x") as trajectory:
            ask(client)
        assert otel_rollout.shutdown()
        assert trace.get_tracer_provider() is not provider
        assert sorted(names(spans)) == EXPECTED
        assert exporter.get_finished_trajectories() == (trajectory,)
        with rollout("unrecorded"):
            ask(client)
        assert sorted(names(spans)) == EXPECTED


def test_shutdown_leaves_a_users_provider(clients: Clients):
    """A provider of the user's goes on exporting, without our processors and our spans."""
    spans, more = InMemorySpanExporter(), InMemorySpanExporter()
    mine = TracerProvider()
    mine.add_span_processor(SimpleSpanProcessor(spans))
    client = clients.sync(clients.serve())
    for count in (1, 2):
        exporter = InMemoryTrajectoryExporter()
        otel_rollout.configure(exporters=[exporter], tracer_provider=mine, span_exporters=[more])
        with rollout("x"):
            ask(client)
        assert otel_rollout.shutdown()
        assert len(exporter.get_finished_trajectories()) == 1
        assert len(processors(mine)) == 1
        assert names(spans).count("chat m") == count
        ask(client)
        assert names(spans).count("chat m") == count
    with mine.get_tracer("mine").start_as_current_span("of the user"):
        pass
    assert names(spans)[-1] == "of the user"
    assert "of the user" not in names(more)


def test_shutdown_without_configure():
    """Shutting down what was never set up, or twice, is fine."""
    assert otel_rollout.shutdown()
    otel_rollout.configure("x")
    assert otel_rollout.shutdown()
    assert otel_rollout.shutdown()


class Failing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def test_a_failing_span_exporter_harms_nobody(clients: Clients):
    """The train lane does not depend on the look lane."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure("x", [exporter], span_exporters=[Failing()])
    client = clients.sync(clients.serve())
    with rollout("x"):
        ask(client)
    assert not otel_rollout.shutdown(300)
    (trajectory,) = exporter.get_finished_trajectories()
    assert trajectory.warnings == []


# --- what else it wires


def test_instrumentor_none_is_capture_only(clients: Clients):
    """Without an instrumentor there is no LLM span, and the trajectory is as whole."""
    spans, exporter = InMemorySpanExporter(), InMemoryTrajectoryExporter()
    otel_rollout.configure("x", [exporter], span_exporters=[spans], instrumentor=None)
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client)
    otel_rollout.shutdown()
    assert names(spans) == ["rollout started", "recording /chat/completions", "invoke_agent x"]
    assert len(trajectory.messages()) == 2
    assert trajectory.warnings == []


def test_an_image_does_not_cost_the_conversation(recording: Recording, clients: Clients):
    """A message with an image in base64 is on the LLM span like any other, and in the exchange."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    client = clients.sync(clients.serve("A dot."))
    with rollout("x") as trajectory:
        ask(client, [{"type": "text", "text": "What is it?"}, image])
    (span,) = recording.spans_named("chat ")
    attributes = dict(span.attributes or {})
    assert "What is it?" in str(attributes["gen_ai.input.messages"])
    assert "iVBORw0KGgo=" in str(attributes["gen_ai.input.messages"])
    assert "A dot." in str(attributes["gen_ai.output.messages"])
    assert trajectory.messages()[0]["content"][1] == image


async def test_an_async_client_too(recording: Recording, clients: Clients):
    """Async calls, streamed or not, have their one exchange span and one LLM span."""
    client = clients.asynchronous(clients.serve(Reply("x" * 100)))
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with rollout("x"):
        await client.chat.completions.create(model="m", messages=messages)
        stream: Any = await client.chat.completions.create(
            model="m", messages=messages, stream=True
        )
        async for _ in stream:
            pass
        assert len(get_current_trajectory().completions) == 2
    assert len(recording.spans_named("recording")) == 2
    assert len(recording.spans_named("chat ")) == 2


@pytest.mark.slow
def test_a_large_trace_arrives_in_parts(
    collector: Collector, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """Spans that are too large for one request reach the collector in several."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    otel_rollout.configure("x", instrumentor=None)
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with rollout("x") as trajectory:
        for number in range(6):
            ask(client, f"{number}" + "x" * 1_000_000)
    assert otel_rollout.shutdown()
    bodies = [body for _, _, body in collector.requests]
    assert len(bodies) > 1
    assert max(map(len, bodies)) < 4 << 20
    spans = [span for body in bodies for span in read_protobuf(body)]
    assert reconstruct(spans) == [trajectory]
