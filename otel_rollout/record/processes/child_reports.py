"""Temporary file through which processes begun inside a rollout report to it, a byte a report."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Final

CONTINUED: Final = b"c"
"""A process has begun a part of the rollout."""
LOST: Final = b"l"
"""A process of a pool has made a model call that belongs to no rollout."""


def new_file() -> str:
    """Make the file of a rollout; its path."""
    file, path = tempfile.mkstemp(prefix="otel-rollout-")
    os.close(file)
    return path


def report(path: str | None, what: bytes) -> None:
    """Report to a rollout; one that has ended, or has no file, gets nothing."""
    if path is None:
        return
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)  # never made anew
        try:
            os.write(file, what)
        finally:
            os.close(file)


def read_reports(path: str) -> bytes:
    """All reports to the rollout; its file is removed."""
    try:
        with open(path, "rb") as file:
            return file.read()
    finally:
        os.unlink(path)
