"""The tracer that an instrumentor gets: its spans are named after the model that was asked.

An instrumentor names its spans itself, some of them only once the reply is here. So the guard tells
this tracer, before it calls the instrumentor, how the span of the call is named and which further
attributes it begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import wrapt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider


class Drawn(Protocol):
    """A call whose span is about to be drawn."""

    @property
    def span_name(self) -> str | None:
        """Name of its span. None: the instrumentor's own."""

    @property
    def span_attributes(self) -> Mapping[str, Any]:
        """Further attributes that its span begins with."""

    def drawn(self, span: trace.Span) -> None:
        """Its span has begun."""


_drawn: ContextVar[Drawn | None] = ContextVar("otel-rollout-drawn", default=None)


@contextmanager
def drawing(call: Drawn) -> Iterator[None]:
    """The spans that an instrumentor starts inside are of this call."""
    token = _drawn.set(call)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that the garbage collector closes
            _drawn.reset(token)


class NamingProvider(trace.TracerProvider):
    """A tracer provider for instrumentors behind a guard."""

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        """The provider whose tracers start the spans."""

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """A tracer of the provider that names the spans of calls."""
        tracer: Any = _NamingTracer(self.provider.get_tracer(*args, **kwargs))
        return tracer  # type: ignore[no-any-return]


class _NamingTracer(wrapt.ObjectProxy):  # type: ignore[type-arg]
    def start_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        name, kwargs = _named(name, kwargs)
        span = self.__wrapped__.start_span(name, *args, **kwargs)
        call = _drawn.get()
        if call is not None:
            call.drawn(span)
        return span

    def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        name, kwargs = _named(name, kwargs)
        return self.__wrapped__.start_as_current_span(name, *args, **kwargs)


def _named(name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    call = _drawn.get()
    if call is None or call.span_name is None:
        return name, kwargs
    attributes = {**(kwargs.get("attributes") or {}), **call.span_attributes}
    return call.span_name, {**kwargs, "attributes": attributes}
