"""Nothing may be logged; clients for tests that are not coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.recording import Clients, Recording


@pytest.fixture(autouse=True)
def nobody_complains(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No way of running things makes the library, or OpenTelemetry on its behalf, log a warning.

    But for the one about a rollout without a call.
    """
    yield
    for source in ("otel_rollout", "opentelemetry"):
        logged = [r for r in caplog.get_records("call") if r.name.startswith(source)]
        warnings = [r.getMessage() for r in logged if r.levelno >= 30]
        assert [text for text in warnings if "Its trajectory is empty" not in text] == []


@pytest.fixture
def clients_now(recording: Recording) -> Iterator[Clients]:
    """Servers and clients for a test that is no coroutine."""
    made = Clients()
    yield made
    for client in made.closing:
        client.close()
    for server in made.servers:
        server.stop()
