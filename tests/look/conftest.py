"""A recording with each of the two instrumentors, and the faults that the guard swallowed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.kit.recording import Recording
from tests.look.llm_spans import CHOICES, recording_with


@pytest.fixture(params=CHOICES, ids=str)
def any_recording(request: pytest.FixtureRequest) -> Recording:
    """The library, configured with each instrumentor in turn."""
    return recording_with(request.param)


@pytest.fixture
def swallowed() -> Iterator[list[str]]:
    """What the guard kept from the user, as it is logged."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("otel_rollout"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(before)
