"""Receivers on free ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from otel_rollout.receive import TrajectoryReceiver
from tests.kit.sending import Receive


@pytest.fixture
def receiver_of(tmp_path: Path) -> Iterator[Receive]:
    """Begins a receiver into `out.jsonl`, with its journal beside it."""
    with ExitStack() as stack:

        def begin(**options: Any) -> TrajectoryReceiver:
            given: dict[str, Any] = {
                "out": tmp_path / "out.jsonl",
                "journal": tmp_path / "journal",
                "grpc": ("127.0.0.1", 0),
                "http": ("127.0.0.1", 0),
                **options,
            }
            return stack.enter_context(TrajectoryReceiver(given.pop("out"), **given))

        yield begin
