"""Fixtures of the exporters' tests: the library configured, a model server, and its clients."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, Trajectory
from otel_rollout.testing import ModelServer


@dataclass
class Recording:
    """A configured provider: its spans and its trajectories."""

    provider: TracerProvider
    exporter: InMemoryTrajectoryExporter
    span_exporter: InMemorySpanExporter

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """Every span that has ended."""
        return self.span_exporter.get_finished_spans()

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Every trajectory that has ended."""
        return self.exporter.get_finished_trajectories()

    @property
    def trajectory(self) -> Trajectory:
        """The only trajectory there is."""
        (trajectory,) = self.trajectories
        return trajectory


@dataclass
class Clients:
    """Model servers, and clients of them; all are closed at the end of the test."""

    servers: list[ModelServer] = field(default_factory=list)
    closing: list[Any] = field(default_factory=list)

    def serve(self, reply: Any = None, **options: Any) -> ModelServer:
        """A started server."""
        server = ModelServer(reply, **{"token_ids": True, "logprobs": True, **options})
        server.start()
        self.servers.append(server)
        return server

    def sync(self, server: ModelServer, **options: Any) -> openai.OpenAI:
        """A sync client of the server."""
        options = {"api_key": "sk-not-a-real-key", "max_retries": 0, **options}
        client = openai.OpenAI(base_url=server.base_url, **options)
        self.closing.append(client)
        return client

    def asynchronous(self, server: ModelServer, **options: Any) -> openai.AsyncOpenAI:
        """An async client of the server."""
        options = {"api_key": "sk-not-a-real-key", "max_retries": 0, **options}
        client = openai.AsyncOpenAI(base_url=server.base_url, **options)
        self.closing.append(client)
        return client


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> None:
    """Keep the imports, which are many, out of every later garbage collection."""
    openai.OpenAI(api_key="k").chat.completions.create
    otel_rollout.configure()
    otel_rollout.shutdown()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No OTEL_* or OPENAI_* variable of the machine, no global provider of another test."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "OPENAI_")):
            monkeypatch.delenv(name)
    yield
    otel_rollout.shutdown()
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()


@pytest.fixture
def recording() -> Recording:
    """The library, configured as a user would, with a span exporter to look at."""
    exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure(service_name="tests", exporters=[exporter])
    provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    return Recording(provider, exporter, span_exporter)


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    """Servers and clients."""
    made = Clients()
    yield made
    for client in made.closing:
        if isinstance(client, openai.AsyncOpenAI):
            await client.close()
        else:
            client.close()
    for server in made.servers:
        server.stop()
