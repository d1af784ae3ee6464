"""No variable of the machine decides, and no client stays open."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.calling import done
from tests.record.anthropic.claude import _open


@pytest.fixture(autouse=True)
async def closed_clients(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """No variable of the machine decides, and no client stays open."""
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    while _open:
        await done(_open.pop().close())
