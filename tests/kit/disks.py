"""A disk that is full."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond this size: a write is cut there, and the next fails."""
    limit_files(size)
    try:
        yield
    finally:
        limit_files(None)


def limit_files(size: int | None) -> None:
    """Let no file of this process grow beyond this size; None: as large as the system allows."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))
