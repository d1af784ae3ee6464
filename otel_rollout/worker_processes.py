"""Worker processes, which end with the process that began them, also if that is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def pool_of(jobs: int) -> ProcessPoolExecutor:
    """So many worker processes. Ctrl-C ends the process that began them, and so them."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # a worker waits for work from a pipe that it holds open itself
        parent.join()
        os._exit(1)
