"""A configured library with its spans and trajectories, and a server with its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

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
        """Every span that has ended, sampled ones only."""
        return self.span_exporter.get_finished_spans()

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return self.exporter.get_finished_trajectories()

    @property
    def trajectory(self) -> Trajectory:
        """The only trajectory there is."""
        (trajectory,) = self.trajectories
        return trajectory

    def spans_named(self, prefix: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name.startswith(prefix)]


@dataclass
class Clients:
    """A server and the clients that talk to it."""

    servers: list[ModelServer] = field(default_factory=list)
    closing: list[Any] = field(default_factory=list)

    def serve(self, reply: Any = None, **options: Any) -> ModelServer:
        """A started server; it stops with the test."""
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
