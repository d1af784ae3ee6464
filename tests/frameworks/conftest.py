"""Agents of other frameworks: no network but loopback, and nothing of theirs that calls home."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

INSTALLED = importlib.util.find_spec("litellm") is not None
"""Whether this is the environment that has the frameworks."""
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

_called: list[str] = []


def _no_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    try:
        local = host in (None, "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        _called.append(str(host))
        raise OSError(f"a test called {host!r}")


if INSTALLED:
    sys.addaudithook(_no_network)
    os.environ.update(
        LITELLM_LOCAL_MODEL_COST_MAP="True",  # else it is fetched when litellm is imported
        LITELLM_TELEMETRY="False",
        LANGSMITH_TRACING="false",
        LANGCHAIN_TRACING_V2="false",
    )


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """Whoever calls out fails, in whichever thread it was, also at import."""
    yield
    called = list(_called)
    _called.clear()
    assert called == []


@pytest.fixture(autouse=True)
def no_capture_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Capture says where it failed in the log: nowhere, but that a rollout has no call."""
    yield
    logged = [r for r in caplog.get_records("call") if r.name == "otel_rollout"]
    warnings = [r.getMessage() for r in logged if r.levelno >= logging.WARNING]
    assert [text for text in warnings if "Its trajectory is empty" not in text] == []
