"""The breaking server, and the check that a call leaves nothing in memory."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import otel_rollout
from otel_rollout import TrajectorySpanProcessor
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.running import ActiveRollout
from tests.kit.ending import collect_garbage
from tests.record.endings.breaking import BreakingServer, Step


@pytest.fixture(autouse=True)
async def nothing_is_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """After each test no call is open, no span is buffered, and nobody has logged an error."""
    yield
    otel_rollout.shutdown()
    await collect_garbage()
    objects = gc.get_objects()
    recorders = [o for o in objects if type(o) is ExchangeRecorder]
    assert [o for o in recorders if not o.finished or o._chunks] == []
    assert [o for o in objects if type(o) is ActiveRollout and o.streams] == []
    processors = [o for o in objects if type(o) is TrajectorySpanProcessor]
    assert [(o._buffers, o._rollouts, o._bytes) for o in processors if o._rollouts] == []
    for source in ("otel_rollout", "opentelemetry"):
        errors = [
            r for r in caplog.get_records("call") if r.name.startswith(source) and r.levelno > 30
        ]
        assert [r.getMessage() for r in errors] == []


@pytest.fixture
def breaking() -> Iterator[Callable[..., Any]]:
    """Start servers that break off; they stop with the test."""
    servers: list[BreakingServer] = []

    def start(*steps: Step, reset: bool = False) -> BreakingServer:
        servers.append(BreakingServer(steps, reset=reset))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
