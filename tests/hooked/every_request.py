"""A plugin of pytest: each test is a rollout, and every POST in it is recorded as a model call.

`make test-hooked` gives it to the own tests of HTTP libraries. It prints how many it recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import otel_rollout
from otel_rollout.record.transports import httpx, model_post, post
from otel_rollout.wire import endpoint_of, object_in

recorded = 0


def count(trajectory: otel_rollout.Trajectory) -> None:
    global recorded
    recorded += len(trajectory.completions)


def pytest_configure(config: pytest.Config) -> None:
    def is_asked(*_: object) -> bool:
        return True

    replaced: dict[str, Any] = {
        "_is_asked": is_asked,
        "endpoint_of": lambda path: endpoint_of(path) or "/chat/completions",
        "object_in": lambda body: object_in(body) or {},
    }
    for name, function in replaced.items():
        setattr(post, name, function)
    for module in (httpx, model_post):
        setattr(module, "asks_a_model", is_asked)  # noqa: B010
    otel_rollout.configure(instrumentor=None)


@pytest.fixture(autouse=True)
def each_test_is_a_rollout(request: pytest.FixtureRequest) -> Iterator[None]:
    with otel_rollout.rollout(request.node.name) as trajectory:
        yield
    count(trajectory)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"recorded: {recorded}")
