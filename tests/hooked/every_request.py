"""A plugin of pytest: each test is a rollout, and every POST in it is recorded as a model call.

`make test-hooked` gives it to the own tests of HTTP libraries. It prints how many it recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import otel_rollout
from otel_rollout.record.transports import httpx, model_post, post
from otel_rollout.wire import endpoint_of

recorded = 0


def count(trajectory: otel_rollout.Trajectory) -> None:
    global recorded
    recorded += len(trajectory.completions)


def pytest_configure(config: pytest.Config) -> None:
    everything: Any = lambda *_: True  # noqa: E731
    for module in (httpx, model_post):
        module.asks_a_model = everything
    post.endpoint_of = lambda path: endpoint_of(path) or "/chat/completions"
    post._is_asked = everything
    otel_rollout.configure(instrumentor=None)


@pytest.fixture(autouse=True)
def each_test_is_a_rollout(request: pytest.FixtureRequest) -> Iterator[None]:
    with otel_rollout.rollout(request.node.name) as trajectory:
        yield
    count(trajectory)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"recorded: {recorded}")
    print(file=sys.stderr)
