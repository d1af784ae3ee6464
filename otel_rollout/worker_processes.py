"""Worker processes, which end with the process that began them, also if that is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 26


def pool_of(jobs: int) -> ProcessPoolExecutor:
    """So many worker processes. Ctrl-C ends the process that began them, and so them."""
    return ProcessPoolExecutor(jobs, mp_context=_Context(), initializer=_begin)


class _Worker(SpawnProcess):
    """One that Ctrl-C does not reach: it blocks the signal from its first instruction on."""

    def start(self) -> None:
        change = getattr(signal, "pthread_sigmask", None)
        if change is None:  # Windows has none
            return super().start()
        before = change(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            try:
                super().start()
            finally:
                change(signal.SIG_SETMASK, before)
        except BaseException:  # such as a Ctrl-C that came meanwhile
            if self.pid is not None:  # the pool does not know it yet, and would wait for it
                self.kill()
            raise


class _Context(SpawnContext):
    Process = _Worker


def keep_memory() -> None:
    """Let glibc keep what is freed, for what comes next: its pages cost a seventh of all."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES >> 1)


def _begin() -> None:
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # a worker waits for work from a pipe that it holds open itself
        parent.join()
        os._exit(1)
