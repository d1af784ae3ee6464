"""Calls that end early: a slow stream, the status of the one exchange, garbage collection."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from otel_rollout import Completion, Trajectory
from otel_rollout.testing import Reply
from tests.kit.calling import done
from tests.kit.comparing import attribute, exchange_spans, replayed
from tests.kit.conversations import ASK
from tests.kit.recording import Recording

TEXT = "The capital of France is Paris."
SLOW = Reply(TEXT, chunk_delay=0.03)
"""Five events of eight characters or less, so slow that the client has them one by one."""


async def collect_garbage() -> None:
    """Collect, and let the loop close the async generators that were found."""
    for _ in range(12):  # there are generators in generators
        gc.collect()
        await asyncio.sleep(0)


def ended(recording: Recording, status: str) -> tuple[Trajectory, Completion]:
    """The one completion of the one exchange, which ended with this status."""
    (span,) = exchange_spans(recording)
    assert attribute(span, "status") == status
    assert span.status.is_ok is (status != "error")
    trajectory = replayed(recording)
    (completion,) = trajectory.completions
    assert completion.status == status
    assert completion.trainable is (status == "complete")
    return trajectory, completion


def said(completion: Completion) -> str:
    return (completion.message or {}).get("content") or ""


async def open_stream(client: Any) -> Any:
    return await done(client.chat.completions.create(model="m", messages=ASK, stream=True))
