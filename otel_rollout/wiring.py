"""Start-up: the only module that connects providers, instrumentors and processors."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from typing import Any, Literal, ParamSpec, TypeVar, cast

from opentelemetry import trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.resources import SERVICE_NAME
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout import look
from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.lanes import Lanes, otlp_lanes
from otel_rollout.look import otlp_metric_exporters
from otel_rollout.providers import (
    cutting_limits,
    forget_global,
    forget_global_metrics,
    meter_provider,
    span_provider,
)
from otel_rollout.record import (
    MAX_BYTES,
    ActiveRollout,
    Observer,
    Observers,
    Settings,
    TrajectorySpanProcessor,
    as_rules,
    capture,
    check_exporter,
    content_rule,
    continue_environment,
    leave_environment,
    process_state,
    switch_off,
)
from otel_rollout.terminal import did_you_mean
from otel_rollout.trajectory import Rule

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
logger = logging.getLogger("otel_rollout")


_INSTRUMENTORS = (
    "opentelemetry.instrumentation.openai",
    "opentelemetry.instrumentation.genai.openai",
)
"""Those that are guarded also where the user has put them in."""


class TruncationWarning(UserWarning):
    """A limit is set that will truncate or drop attributes that training needs."""


@dataclass(slots=True)
class _Setup:
    """State that `configure` set up, for `shutdown` to undo."""

    lanes: Lanes
    own_provider: bool
    """True if `configure` made the provider."""
    part: ActiveRollout | None = None
    """The rollout that this process continues, from its environment. None: there is none."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Takes out what was put into libraries."""

    @property
    def provider(self) -> TracerProvider:
        """The provider that rollouts are recorded on."""
        return self.lanes.provider

    def add(
        self, exporters: Iterable[TrajectoryExporter], span_exporters: Iterable[SpanExporter]
    ) -> None:
        """Export to these too, as far as they are new."""
        known = self.lanes.processor.exporters
        known += [exporter for exporter in exporters if exporter not in known]
        for span_exporter in span_exporters:
            self.lanes.add(span_exporter, process_state.settings.max_bytes)


def _names_checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function; a keyword that it does not have is a ConfigurationError with the closest."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"configure(): expected the options {', '.join(known)}, "
                    f"got {name}{did_you_mean(name, known)}"
                )
        return function(*arguments, **options)

    return checked


@_names_checked
def configure(
    service_name: str | None = None,
    exporters: Iterable[TrajectoryExporter] = (),
    *,
    span_exporters: Iterable[SpanExporter] = (),
    tracer_provider: TracerProvider | None = None,
    instrumentor: Literal["openai", "genai"] | None = "openai",
    request_token_ids: bool = False,
    content: Literal["new", "full", "none"] | None = None,
    redact: Callable[[bytes], bytes] | None = None,
    rollout_secret: str | None = None,
    llm_spans: Literal["outer", "both"] = "outer",
    tool_spans: bool = True,
    baggage: bool = False,
    reward_in_name: bool = False,
    policy_model: str | None = None,
    logprobs_mode: Literal["raw", "processed"] | None = None,
    rl_conventions: bool = False,
    side_calls: Iterable[Rule] | None = None,
    announce: bool = True,
    max_bytes: int = MAX_BYTES,
    train_endpoint: str | None = None,
    train_folder: str | os.PathLike[str] | None = None,
) -> TracerProvider:
    """Record rollouts from now on; call it once, at start-up.

    It uses the given tracer provider, else the global one, else it creates one and makes it the
    global one. To this provider it adds a `TrajectorySpanProcessor` with `exporters`. It
    instruments the OpenAI client (with our capture, and with an instrumentor that writes LLM
    spans), and threads, so that work in a thread pool belongs to the rollout that submitted it.

    A provider that it creates reads the `OTEL_*` variables as any OpenTelemetry program does: spans
    go out over OTLP if an endpoint is set, and nowhere otherwise. A provider of yours keeps its own
    exporters; `span_exporters` and `train_endpoint` are added. Metrics go out over OTLP if
    OTEL_METRICS_EXPORTER or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT asks for them, else to the meter
    provider that you set (`docs/metrics.md`). With `OTEL_SDK_DISABLED=true` nothing is recorded.

    service_name: the `service.name` of a provider that it creates; overrides OTEL_SERVICE_NAME.
    exporters: receive finished trajectories (`InMemoryTrajectoryExporter()`, ...).
    span_exporters: receive the spans, besides OTLP.
    instrumentor: writes the LLM spans that people look at; trajectories do not depend on it.
        "openai" is `opentelemetry-instrumentation-openai`, "genai" is
        `opentelemetry-instrumentation-genai-openai` (`otel-rollout[genai]`, with `--pre`),
        None records for training alone: no LLM spans, no tool spans, and no sums, task and answer
        on a rollout's span. If one is active already, it stays, and none is added.
    request_token_ids: ask the server for token ids with every call of a rollout; see the function
        `request_token_ids`.
    content: "new" has prompts and replies on the spans: on LLM spans, for people, what is new in
        each call, and on exchange spans all from which trajectories can be rebuilt anywhere. With
        "full" each LLM span repeats the whole conversation. "none" keeps them, and every other
        text of the user, off each span that leaves the process: exchange spans are recorded and
        not exported. Trajectories of this process are the same with all. None (default) is "none"
        where TRACELOOP_TRACE_CONTENT or OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says
        so, else "new".
    redact: a function that is given the bytes of each request and each reply (JSON; a stream as
        the reply that it merges to), and each text of the user, and returns what may be recorded
        of them. A call that it changes has no token ids and does not train. LLM spans are
        without content then. None (default): nothing is redacted.
    rollout_secret: a text that all processes of a rollout share. `propagate` then adds a proof
        to its headers, and `continue_rollout` continues no rollout without it. None (default): the
        environment variable OTEL_ROLLOUT_SECRET, else any header may name a rollout.
    llm_spans: of a model call of a rollout that a framework draws itself (Strands, Pydantic AI,
        Google ADK, ...), "outer" (default) keeps the framework's span alone, "both" has that of
        the instrumentor inside it, too.
    tool_spans: True (default): a span `execute_tool {name}` for each tool whose result a request
        has, as long as the time between the reply that asked for it and that request, unless
        `tool`, or a framework, has drawn the call already. False: only what these draw.
    baggage: True names the rollout in the OpenTelemetry baggage while its code runs, so that
        instrumented HTTP clients and MCP's client hand it on, to every server that they call. False
        (default): only `propagate` does.
    reward_in_name: True puts the reward that a rollout has when it ends into the name of its span
        (`invoke_agent solve [1.00]`), if it is in no other rollout; backends list more operations
        then. A reward that comes later is on a span of its own. False (default): it is an
        attribute only.
    policy_model: the model that is trained, as requests name it. Calls of other models are side
        calls then: they stay in the trajectory and do not train. None (default): calls of every
        model train.
    logprobs_mode: "raw" if the server's log-probabilities are from before temperature and the like,
        "processed" if from after them (vLLM's `--logprobs-mode`); `otel-rollout doctor --server`
        measures it. It is in rows. None (default): what the server says of it, often nothing.
    rl_conventions: True puts `policy_model` on the resource of a provider that it creates, as
        `rl.model.name`, which is proposed for the conventions of training runs. The other names
        (`rl.system`, `rl.run.id`, ...) are for OTEL_RESOURCE_ATTRIBUTES, since only you know them.
    side_calls: functions that are given a completion and what its rollout's calls have in common
        (`otel_rollout.side_calls.SideCalls`), and return why it is a side call, or None. They are
        asked when a rollout ends, and hold instead of the default one; () finds none. None
        (default): `known_side_call` of the same module, see `docs/side-calls.md`.
    announce: True (default): exporters note when a rollout begins, so that one whose process is
        killed is known: `JsonlTrajectoryExporter` in `FILE.started`, `span_exporters` and OTLP by
        the span `rollout started`, which they export at once. False: they do not.
    max_bytes: limit, in bytes, of the span text that running rollouts may hold in memory; the same
        limit holds for what waits for each exporter.
    train_endpoint: address of an OTLP receiver (`http://127.0.0.1:4318`) for the spans that
        rollouts are rebuilt from, sampled or not. Those of model calls go there and to
        `span_exporters`, and no longer to OTEL_EXPORTER_OTLP_ENDPOINT. None (default): the
        environment variable OTEL_ROLLOUT_TRAIN_ENDPOINT, else OTEL_EXPORTER_OTLP_ENDPOINT.
    train_folder: folder that has these spans from soon after they end until they have arrived,
        and the start of each rollout before its code runs; those that a process leaves there are
        sent by the next one. None (default): spans wait in memory.

    Calling it again adds the exporters that are new and returns the same provider.
    ConfigurationError for a wrong argument or a provider that is not the SDK's;
    TruncationWarning for attribute limits that would truncate training data.
    """
    exporters, span_exporters = _checked(exporters, span_exporters)
    settings = Settings(
        service_name=service_name,
        instrumentor=instrumentor,
        request_token_ids=request_token_ids,
        content=content_rule(content, redact),
        rollout_secret=rollout_secret,
        llm_spans=llm_spans,
        tool_spans=tool_spans,
        baggage=baggage,
        reward_in_name=reward_in_name,
        policy_model=policy_model,
        logprobs_mode=logprobs_mode,
        rl_conventions=rl_conventions,
        side_calls=as_rules(side_calls),
        announce=announce,
        max_bytes=max_bytes,
        train_endpoint=train_endpoint,
        train_folder=train_folder,
    )
    with process_state.configuring:
        before = cast("_Setup | None", process_state.setup)
        if before is not None:
            asked = dict(settings.asked())
            if content is None and redact is None:
                asked.pop("content", None)
            _again(before, settings, asked, tracer_provider)
            before.add(exporters, span_exporters)
            return before.provider
        return _set_up(settings, exporters, span_exporters, tracer_provider).provider


def _set_up(
    settings: Settings,
    exporters: Sequence[TrajectoryExporter],
    span_exporters: Sequence[SpanExporter],
    tracer_provider: TracerProvider | None,
) -> _Setup:
    provider, own = span_provider(tracer_provider, dict(_of_resource(settings)))
    if settings.instrumentor is not None:
        look.check_installed(settings.instrumentor)
    over_otlp = otlp_lanes(settings, has_look=own)
    for sentence in cutting_limits(provider):
        warnings.warn(sentence, TruncationWarning, stacklevel=4)
    lanes = Lanes(provider, TrajectorySpanProcessor(max_bytes=settings.max_bytes))
    setup = _Setup(lanes, own)
    capture.instrument(settings.content)
    setup.undo.callback(capture.uninstrument)
    process_state.use(settings)
    process_state.observers = Observers([look.Measurements(), *_for_people(settings)])
    process_state.gateway_here = _gateway_here
    setup.undo.callback(_close_gateways)
    provider.add_span_processor(lanes.processor)
    setup.add(exporters, span_exporters)
    lanes.use(over_otlp)
    _instrument(setup, settings)
    process_state.provider = provider
    if own:
        trace.set_tracer_provider(provider)
        lanes.metrics = meter_provider(otlp_metric_exporters(), provider.resource)
    setup.part = continue_environment()
    if setup.part is not None:
        # The provider's own exit handler was registered before, so it runs after this one.
        atexit.register(leave_environment, setup.part)
    process_state.setup = setup
    process_state.warned_unrecorded = True  # whoever shuts it down knows that nothing records
    return setup


def _of_resource(settings: Settings) -> Iterator[tuple[str, str]]:
    """The attributes of the resource of a provider that is created."""
    if settings.service_name is not None:
        yield SERVICE_NAME, settings.service_name
    if settings.rl_conventions and settings.policy_model is not None:
        yield sc.RL_MODEL_NAME, settings.policy_model


def _gateway_here(upstream: str | None) -> Any:
    """The gateway of this process; its room, with a server, is imported for those who ask."""
    return import_module("otel_rollout.gateway").gateway_here(upstream)


def _close_gateways() -> None:
    """Stop the gateways that rollouts asked for; where none did, the room is not imported."""
    process_state.gateway_here = None
    if (gateway := sys.modules.get("otel_rollout.gateway")) is not None:
        gateway.close_gateways()


def _for_people(settings: Settings) -> list[Observer]:
    """The observers that write what people look at; without an instrumentor none is loaded."""
    if not _has_instrumentor(settings):
        return []
    return [look.Sums(), *([look.ToolSpans()] if settings.tool_spans else ()), look.LlmSpans()]


def _instrument(setup: _Setup, settings: Settings) -> None:
    """Let the instrumentor begin LLM spans; one that nobody asked for is not even imported."""
    if not settings.content.is_whole:
        setup.undo.enter_context(switch_off())
    if _has_instrumentor(settings):
        setup.undo.callback(look.instrument(settings.instrumentor, setup.provider))
    threads = ThreadingInstrumentor()
    if not threads.is_instrumented_by_opentelemetry:
        threads.instrument()
        setup.undo.callback(threads.uninstrument)


def _has_instrumentor(settings: Settings) -> bool:
    """True if an instrumentor is asked for, or was imported by somebody else."""
    return settings.instrumentor is not None or not sys.modules.keys().isdisjoint(_INSTRUMENTORS)


def shutdown(timeout_millis: int = 30_000) -> bool:
    """Flush trajectories and spans, and undo `configure`.

    The hooks are removed from the clients. A provider that `configure` created is shut down; one
    of yours is flushed and keeps running without our processors. False if something was not
    flushed and ended within `timeout_millis`, all of which is used where that helps, or if
    trajectories, or spans that rollouts are rebuilt from, have not reached their exporters since
    `configure`; the log says how many. An exporter of spans that an earlier
    `shutdown` has ended may refuse all: then only the log says so. One that hangs is left behind.
    Without `configure` it does nothing and returns True.
    """
    with process_state.configuring:
        setup, process_state.setup = cast("_Setup | None", process_state.setup), None
        if setup is None:
            return True
        if setup.part is not None:
            leave_environment(setup.part)
        setup.undo.close()
        deadline = time.monotonic() + timeout_millis / 1000
        flushed = setup.lanes.flush_and_end(deadline, own_provider=setup.own_provider)
        kept = process_state.content  # else what still runs might be exported whole
        runs = any(getattr(each, "running", False) for each in process_state.rollouts.values())
        process_state.use(Settings(content=kept) if runs else Settings())
        process_state.provider, process_state.observers = None, Observers()
        process_state.warned_without_calls = False
        if setup.own_provider:
            forget_global(setup.provider)
        if setup.lanes.metrics is not None:
            forget_global_metrics(setup.lanes.metrics)
        return flushed and not setup.lanes.log_lost()


def _checked(
    exporters: Iterable[TrajectoryExporter], span_exporters: Iterable[SpanExporter]
) -> tuple[list[TrajectoryExporter], list[SpanExporter]]:
    for argument, value in (("exporters", exporters), ("span_exporters", span_exporters)):
        if isinstance(value, str | TrajectoryExporter) or not isinstance(value, Iterable):
            # An in-memory exporter is iterable too, and list() of it would block.
            raise ConfigurationError(
                f"configure({argument}=...): expected a list, got {value!r}; write [exporter]"
            )
    exporters, span_exporters = list(exporters), list(span_exporters)
    for exporter in exporters:
        if isinstance(exporter, SpanExporter):
            raise ConfigurationError(
                f"configure(exporters=...): {exporter!r} exports spans, not trajectories; pass it "
                f"as configure(span_exporters=[...])"
            )
        check_exporter(exporter)
    for item in span_exporters:
        if not isinstance(item, SpanExporter):
            raise ConfigurationError(
                f"configure(span_exporters=...): expected SpanExporters, got {item!r}"
            )
    return exporters, span_exporters


def _again(
    setup: _Setup,
    settings: Settings,
    asked: Mapping[str, bool],
    tracer_provider: TracerProvider | None,
) -> None:
    """Take what a further `configure` may change, and log what it may not.

    asked: the options that it gives, and whether each may change.
    """
    if tracer_provider is not None and tracer_provider is not setup.provider:
        raise ConfigurationError(
            "configure(tracer_provider=...): configured already with another provider; call "
            "otel_rollout.shutdown() first"
        )
    service_name = str(setup.provider.resource.attributes.get(SERVICE_NAME))
    now = replace(process_state.settings, service_name=service_name)
    for name, may_change in asked.items():
        if not may_change and getattr(settings, name) != getattr(now, name):
            value = getattr(settings, name)
            logger.warning("configure(%s=%r): configured already, not changed", name, value)
    changes = {name: getattr(settings, name) for name, may_change in asked.items() if may_change}
    process_state.use(replace(process_state.settings, **changes))
