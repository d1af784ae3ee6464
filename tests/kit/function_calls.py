"""How many functions of the package a step calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import otel_rollout

PACKAGE = f"{Path(otel_rollout.__file__).parent}/"


def calls_of_ours(step: Callable[[], object]) -> int:
    """Function calls of the package that a step makes in this thread."""
    count = 0

    def event(frame: FrameType, kind: str, _: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += kind == "call" and name.startswith(PACKAGE) and "/testing/" not in name

    gc.collect()  # what an earlier stream leaves behind is not of this step
    gc.disable()
    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
