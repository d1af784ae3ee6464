"""Start-up: the only module that connects providers, instrumentors and processors."""

from __future__ import annotations

import atexit
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.metrics._internal import _ProxyMeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.look import SpanQueue, instrumentors, otlp_exporters, otlp_metric_exporters
from otel_rollout.record import (
    ActiveRollout,
    Content,
    TrajectorySpanProcessor,
    capture,
    check_exporter,
    checked_rules,
    continue_environment,
    in_time,
    leave_environment,
    of_environment,
    process_state,
    switched_off,
)
from otel_rollout.trajectory import Rule

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

logger = logging.getLogger("otel_rollout")


_LAST_SECONDS = 5.0
"""Time that exporters have for their own shutdown, whatever the flush before it took."""
_MIN_ATTRIBUTES = 40
"""More attributes than any of our spans has."""


class TruncationWarning(UserWarning):
    """A limit is set that will truncate or drop attributes that training needs."""


class ContentWarning(UserWarning):
    """Prompts and replies are on spans though a switch of the environment says otherwise."""


@dataclass(slots=True)
class _Setup:
    """State that `configure` set up, for `shutdown` to undo."""

    provider: TracerProvider
    own_provider: bool
    """True if `configure` made the provider."""
    processor: TrajectorySpanProcessor
    max_bytes: int
    """Bound on what waits for each exporter."""
    processors: list[SpanQueue] = field(default_factory=list)
    """The queues that were added for `span_exporters` and OTLP."""
    span_exporters: list[SpanExporter] = field(default_factory=list)
    """The exporters that the user passed."""
    metrics: MeterProvider | None = None
    """The meter provider that `configure` made. None: it made none."""
    part: ActiveRollout | None = None
    """The rollout that this process continues, from its environment. None: there is none."""
    uninstrument: Callable[[], None] | None = None
    """Removes the instrumentor. None: `configure` added none."""
    threads: bool = False
    """True if `configure` instrumented threads."""


def _done_before() -> _Setup | None:
    """The set-up of an earlier `configure`. None: there was none, or `shutdown` has undone it."""
    setup = process_state.setup
    return setup if isinstance(setup, _Setup) else None


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
    side_calls: Iterable[Rule] | None = None,
    max_bytes: int = 4 << 30,
) -> TracerProvider:
    """Record rollouts from now on; call it once, at start-up.

    It uses the given tracer provider, else the global one, else it creates one and makes it the
    global one. To this provider it adds a `TrajectorySpanProcessor` with `exporters`. It
    instruments the OpenAI client (with our capture, and with an instrumentor that writes LLM
    spans), and threads, so that work in a thread pool belongs to the rollout that submitted it.

    A provider that it creates reads the `OTEL_*` variables as any OpenTelemetry program does: spans
    go out over OTLP if an endpoint is set, and nowhere otherwise. A provider of yours keeps its own
    exporters; only `span_exporters` are added. Metrics go out over OTLP if OTEL_METRICS_EXPORTER or
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT asks for them, else to the meter provider that you set
    (`docs/metrics.md`). With `OTEL_SDK_DISABLED=true` nothing is recorded.

    service_name: the `service.name` of a provider that it creates; overrides OTEL_SERVICE_NAME.
    exporters: receive finished trajectories (`InMemoryTrajectoryExporter()`, ...).
    span_exporters: receive the spans, besides OTLP.
    instrumentor: writes the LLM spans that people look at; trajectories do not depend on it.
        "openai" is `opentelemetry-instrumentation-openai`, "genai" is
        `opentelemetry-instrumentation-genai-openai` (`pip install --pre 'otel-rollout[genai]'`),
        None is no LLM spans. If one is active already, it stays, and none is added.
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
    side_calls: functions that are given a completion and what its rollout's calls have in common
        (`SideCalls`), and return why it is a side call, or None. They are asked when a rollout
        ends, and hold instead of the default one; () finds none. None (default): `known_side_call`,
        of which `docs/side-calls.md` tells.
    max_bytes: limit, in bytes, of the span text that running rollouts may hold in memory; the same
        limit holds for what waits for each exporter.

    Calling it again adds the exporters that are new and returns the same provider.
    ConfigurationError for a wrong argument or a provider that is not the SDK's;
    TruncationWarning for attribute limits that would truncate training data.
    """
    exporters, span_exporters = _checked(exporters, span_exporters)
    if service_name is not None and (not isinstance(service_name, str) or not service_name):
        raise ConfigurationError(
            f"configure(service_name=...): expected a name, got {service_name!r}"
        )
    if rollout_secret is not None and (not isinstance(rollout_secret, str) or not rollout_secret):
        raise ConfigurationError(
            f"configure(rollout_secret=...): expected a text that is not empty, got "
            f"{'an empty one' if rollout_secret == '' else type(rollout_secret)}"
        )
    if not isinstance(tool_spans, bool):
        raise ConfigurationError(
            f"configure(tool_spans=...): expected True or False, got {tool_spans!r}"
        )
    if not isinstance(reward_in_name, bool):
        raise ConfigurationError(
            f"configure(reward_in_name=...): expected True or False, got {reward_in_name!r}"
        )
    if policy_model is not None and (not isinstance(policy_model, str) or not policy_model):
        raise ConfigurationError(
            f"configure(policy_model=...): expected the name of a model, got {policy_model!r}"
        )
    rules = checked_rules(side_calls)
    if llm_spans not in ("outer", "both"):
        raise ConfigurationError(
            f"configure(llm_spans=...): expected 'outer' or 'both', got {llm_spans!r}"
        )
    instrumentors.check(instrumentor)
    rule = _content(content, redact)
    with process_state.configuring:
        before = _done_before()
        if before is not None:
            _again(before, service_name, exporters, span_exporters, tracer_provider)
            if (content is not None or redact is not None) and rule != process_state.content:
                logger.warning(
                    "configure(content=%r, redact=%r): configured already, not changed",
                    content,
                    redact,
                )
            if request_token_ids:
                process_state.request_fields = {}
            process_state.rollout_secret = rollout_secret or process_state.rollout_secret
            process_state.policy_model = policy_model or process_state.policy_model
            if rules is not None:
                process_state.side_call_rules = rules
            process_state.baggage = baggage or process_state.baggage
            process_state.reward_in_name = reward_in_name or process_state.reward_in_name
            return before.provider
        provider, own = _provider(tracer_provider, service_name)
        processor = TrajectorySpanProcessor(*exporters, max_bytes=max_bytes)
        setup = _Setup(provider, own, processor, max_bytes, span_exporters=list(span_exporters))
        look = [*span_exporters, *(otlp_exporters() if own else ())]
        _warn_of_limits(provider)
        capture.instrument(rule)
        process_state.request_fields = {} if request_token_ids else None
        process_state.rollout_secret = rollout_secret
        process_state.policy_model, process_state.side_call_rules = policy_model, rules
        process_state.tool_spans = tool_spans
        process_state.llm_spans = llm_spans
        process_state.draws_calls = instrumentor is not None
        process_state.baggage = baggage
        process_state.reward_in_name = reward_in_name
        provider.add_span_processor(processor)
        for exporter in look:
            setup.processors.append(SpanQueue(exporter, max_bytes))
            provider.add_span_processor(setup.processors[-1])
        setup.uninstrument = instrumentors.instrument(instrumentor, provider, content=rule.is_whole)
        threads = ThreadingInstrumentor()
        if not threads.is_instrumented_by_opentelemetry:
            threads.instrument()
            setup.threads = True
        process_state.provider = provider
        if own:
            trace.set_tracer_provider(provider)
            setup.metrics = _meter_provider(provider.resource)
        setup.part = continue_environment()
        if setup.part is not None:
            # The provider's own exit handler was registered before, so it runs after this one.
            atexit.register(leave_environment, setup.part)
        process_state.setup = setup
        process_state.said_unrecorded = True  # whoever shuts it down knows that nothing records
        return provider


def shutdown(timeout_millis: int = 30_000) -> bool:
    """Flush trajectories and spans, and undo `configure`.

    The hooks are removed from the clients. A provider that `configure` created is shut down; one
    of yours is flushed and keeps running without our processors. False if something was not
    flushed and ended within `timeout_millis`, or if trajectories or spans have not reached their
    exporters since `configure`; the log says how many. An exporter of spans that an earlier
    `shutdown` has ended may refuse all: then only the log says so. One that hangs is left behind.
    Without `configure` it does nothing and returns True.
    """
    with process_state.configuring:
        setup, process_state.setup = _done_before(), None
        if setup is None:
            return True
        if setup.part is not None:
            leave_environment(setup.part)
        capture.uninstrument()
        process_state.request_fields = process_state.rollout_secret = None
        process_state.policy_model = process_state.side_call_rules = None
        process_state.baggage = process_state.reward_in_name = False
        process_state.draws_calls = False
        if setup.uninstrument is not None:
            setup.uninstrument()
        if setup.threads:
            ThreadingInstrumentor().uninstrument()
        flushed = _flush_and_end(setup, time.monotonic() + timeout_millis / 1000)
        if not any(getattr(active, "running", False) for active in process_state.rollouts.values()):
            process_state.content = Content()  # else what still runs might be exported whole
        process_state.provider = None
        process_state.said_without_calls = False
        process_state.tool_spans = True
        process_state.llm_spans = "outer"
        if setup.own_provider:
            _forget_global(setup.provider)
        if setup.metrics is not None:
            _forget_global_metrics(setup.metrics)
        return flushed and not _say_lost(setup)


def _flush_and_end(setup: _Setup, deadline: float) -> bool:
    """Flush the provider, and end our processors; False if that was not done by the deadline."""

    def left() -> int:
        return max(0, int((deadline - time.monotonic()) * 1000))

    provider = setup.provider
    # All at once: a trajectory exporter that hangs must not take the time of the spans.
    flushed: tuple[TracerProvider | SpanQueue, ...] = (provider, *setup.processors)
    late = in_time([(each, partial(each.force_flush, left())) for each in flushed], left() / 1000)
    in_its_time = setup.processor.end(left())
    ends: list[tuple[object, Callable[[], object]]] = [
        (queue, partial(queue.end, left())) for queue in setup.processors
    ]
    if setup.metrics is not None:
        ends.append((setup.metrics, partial(setup.metrics.shutdown, left())))
    # Each queue keeps to its own time, and says what is lost when that is over.
    late += in_time(ends, left() / 1000 + 2 * _LAST_SECONDS)
    if setup.own_provider:
        late += in_time([(provider, provider.shutdown)], left() / 1000 + _LAST_SECONDS)
    else:
        for processor in (setup.processor, *setup.processors):
            remove_processor(provider, processor)
    return in_its_time and not late


def _say_lost(setup: _Setup) -> bool:
    """True if trajectories or spans did not arrive; the queues of spans have said how many."""
    ended = process_state.ended_exporters
    lost = [
        queue
        for queue in setup.processors
        if queue.lost and not (queue.exporter in ended and queue.has_exported_none)
    ]
    ended.update(queue.exporter for queue in setup.processors)
    if setup.processor.dropped:
        logger.error("%d trajectories did not reach their exporters", setup.processor.dropped)
    return setup.processor.dropped > 0 or bool(lost)


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


def _content(
    content: Literal["new", "full", "none"] | None, redact: Callable[[bytes], bytes] | None
) -> Content:
    """The rule for content that these arguments of `configure` and the environment give."""
    if content not in ("new", "full", "none", None):
        raise ConfigurationError(
            f"configure(content=...): expected 'new', 'full' or 'none', got {content!r}"
        )
    if redact is not None and not callable(redact):
        raise ConfigurationError(
            f"configure(redact=...): expected a function of bytes to bytes, got {redact!r}"
        )
    off = switched_off()
    if off and content in ("new", "full"):
        warnings.warn(
            f"{off} says that spans have no prompts and replies, but configure(content="
            f"{content!r}) exports them on exchange spans. Leave content out, or the variable "
            "unset",
            ContentWarning,
            stacklevel=3,
        )
    elif content is None:
        return replace(of_environment(), redact=redact)
    shows: Literal["new", "full"] = "full" if content == "full" else "new"
    return Content(exported=content != "none", shows=shows, redact=redact)


def _again(
    setup: _Setup,
    service_name: str | None,
    exporters: Sequence[TrajectoryExporter],
    span_exporters: Sequence[SpanExporter],
    tracer_provider: TracerProvider | None,
) -> None:
    if tracer_provider is not None and tracer_provider is not setup.provider:
        raise ConfigurationError(
            "configure(tracer_provider=...): configured already with another provider; call "
            "otel_rollout.shutdown() first"
        )
    if (
        service_name is not None
        and setup.provider.resource.attributes.get(SERVICE_NAME) != service_name
    ):
        logger.warning("configure(service_name=%r): configured already, not changed", service_name)
    for exporter in exporters:
        if exporter not in setup.processor.exporters:
            setup.processor.exporters.append(exporter)
    for span_exporter in span_exporters:
        if span_exporter in setup.span_exporters:
            continue
        setup.span_exporters.append(span_exporter)
        processor = SpanQueue(span_exporter, setup.max_bytes)
        setup.processors.append(processor)
        setup.provider.add_span_processor(processor)


def _provider(
    given: TracerProvider | None, service_name: str | None
) -> tuple[TracerProvider, bool]:
    """The provider to use, and True if it was created here."""
    found = trace.get_tracer_provider() if given is None else given
    if isinstance(found, TracerProvider):
        return found, False
    if given is not None or not isinstance(found, trace.ProxyTracerProvider):
        where = "configure(tracer_provider=...)" if given is not None else "configure()"
        raise ConfigurationError(
            f"{where}: expected a TracerProvider of the OpenTelemetry SDK "
            f"(opentelemetry.sdk.trace.TracerProvider), got {found!r}, which takes no span "
            f"processors; set an SDK provider first, or none"
        )
    resource = Resource.create({SERVICE_NAME: service_name} if service_name else {})
    return TracerProvider(resource=resource), True


def _meter_provider(resource: Resource) -> MeterProvider | None:
    """The global meter provider that the environment asks for. None: none, or there is one."""
    exporters = otlp_metric_exporters()
    if not exporters or not isinstance(metrics.get_meter_provider(), _ProxyMeterProvider):
        return None
    # Imported when it is needed: few programs ask for it.
    reader = import_module("opentelemetry.sdk.metrics.export").PeriodicExportingMetricReader
    made: MeterProvider = import_module("opentelemetry.sdk.metrics").MeterProvider(
        metric_readers=[reader(exporter) for exporter in exporters], resource=resource
    )
    metrics.set_meter_provider(made)
    return made


def _warn_of_limits(provider: TracerProvider) -> None:
    for sentence in cutting_limits(provider):
        warnings.warn(sentence, TruncationWarning, stacklevel=3)


def cutting_limits(provider: TracerProvider) -> Iterator[str]:
    """A sentence for each limit of the provider that will truncate or drop training data."""
    limits: SpanLimits | None = getattr(provider, "_span_limits", None)
    if limits is None:
        return
    for name in ("max_span_attribute_length", "max_attribute_length"):
        length = getattr(limits, name, None)
        if length is not None:
            yield (
                f"span attributes are cut at {length} characters (SpanLimits({name}={length}), or "
                f"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT / OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT in "
                f"the environment): conversations will be incomplete and not trainable. Remove "
                f"the limit from this provider; limit what is stored in the collector instead"
            )
            break
    for name in ("max_span_attributes", "max_attributes"):
        count = getattr(limits, name, None)
        if count is not None and count < _MIN_ATTRIBUTES:
            yield (
                f"spans keep only {count} attributes (SpanLimits({name}={count}), or "
                f"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT / OTEL_ATTRIBUTE_COUNT_LIMIT in the "
                f"environment): exchange spans need up to {_MIN_ATTRIBUTES}, the first ones would "
                f"be lost. Raise the limit"
            )
            break


def remove_processor(provider: TracerProvider, processor: SpanProcessor) -> None:
    """Undo `add_span_processor`."""
    active = provider._active_span_processor
    with active._lock:
        active._span_processors = tuple(
            kept for kept in active._span_processors if kept is not processor
        )


def _forget_global(provider: TracerProvider) -> None:
    """Make the global provider unset again, so that a later `configure` can set one."""
    if trace.get_tracer_provider() is provider:
        trace._TRACER_PROVIDER = None
        trace._TRACER_PROVIDER_SET_ONCE = type(trace._TRACER_PROVIDER_SET_ONCE)()


def _forget_global_metrics(provider: MeterProvider) -> None:
    """Make the global meter provider unset again, and with it the proxy that stands for it."""
    if metrics.get_meter_provider() is provider:
        own = metrics._internal
        own._METER_PROVIDER, own._PROXY_METER_PROVIDER = None, _ProxyMeterProvider()
        own._METER_PROVIDER_SET_ONCE = type(own._METER_PROVIDER_SET_ONCE)()
