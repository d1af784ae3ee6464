"""A gateway in front of the test server, and clients of it that nothing in this process hooks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from otel_rollout.gateway import Gateway, serve
from tests.gateway.programs import SECRET, Serve
from tests.kit.calling import Configure
from tests.kit.recording import Recording


@pytest.fixture
def captured(capture_only: Configure) -> Recording:
    """The library, configured without LLM spans."""
    return capture_only()


@pytest.fixture
async def gateway_to() -> AsyncIterator[Serve]:
    """A function that serves a gateway until the test ends."""
    async with AsyncExitStack() as stack:

        async def begin(upstream: str, **options: Any) -> Gateway:
            served = serve(upstream, **{"secret": SECRET, **options})
            gateway: Gateway = await stack.enter_async_context(served)
            return gateway

        yield begin
