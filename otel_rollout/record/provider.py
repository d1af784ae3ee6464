"""The tracer of rollout spans: on the configured provider, and recording what sampling drops."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state


class _RecordAnyway(Sampler):
    """The user's sampler, but a span that it drops is recorded all the same (RECORD_ONLY).

    Training does not sample. Span exporters do not get such a span; our processor does. So is an
    exchange span where no content may leave the process (`configure(content="none")`).
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        result = self._sampler.should_sample(*args, **kwargs)
        attributes = kwargs.get("attributes", args[4] if len(args) > 4 else None)
        is_content = not process_state.content.exported and sc.EXCHANGE_VERSION in (
            attributes or ()
        )
        if result.decision is not Decision.DROP and not is_content:
            return result
        return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)

    def get_description(self) -> str:
        return f"RecordAnyway({self._sampler.get_description()})"


def rollout_provider() -> trace.TracerProvider:
    """The provider that rollouts are recorded on: the configured one, else the global one."""
    return process_state.provider or trace.get_tracer_provider()


def rollout_tracer() -> trace.Tracer:
    """The tracer of every span that this library opens."""
    provider = rollout_provider()
    tracer = process_state.tracers.get(provider)
    if tracer is None:
        tracer = provider.get_tracer(sc.SCOPE, schema_url=sc.SCHEMA_URL)
        sampler = getattr(tracer, "sampler", None)
        if isinstance(sampler, Sampler) and not isinstance(sampler, _RecordAnyway):
            tracer.sampler = _RecordAnyway(sampler)  # type: ignore[attr-defined]
        if not isinstance(provider, trace.ProxyTracerProvider):
            process_state.tracers[provider] = tracer
    return tracer
