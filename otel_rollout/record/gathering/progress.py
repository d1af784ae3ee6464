"""Progress of a run of many rollouts: one line on a terminal, a line now and then in a log file."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

_BAR_SECONDS = 1.0
"""Time between two looks of the bar on a terminal, which also show what waits."""
_LINE_SECONDS = 30.0
"""Time between two lines where stderr is no terminal."""


class RolloutProgress:
    """Rate, what runs, mean reward, endings, and what runs longest.

    text: the text before it. True: the name of the things that are counted; False: nothing at all.
    total: how many there will be. None: not known.
    counted: the name of the things that are counted, such as "rollouts".

    It goes to stderr.
    """

    def __init__(self, text: bool | str, total: int | None, counted: str) -> None:
        self._text = text if isinstance(text, str) and text else counted
        self._shown = bool(text)
        self._total = total
        self._counted = counted
        self._bar: tqdm[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self._numbers = count()
        self._running: dict[int, tuple[str, float]] = {}
        """Name and beginning of what runs, oldest first."""
        self._ended = 0
        self._endings: Counter[str] = Counter()
        self._scored = 0
        self._sum = 0.0

    def __enter__(self) -> RolloutProgress:
        if self._shown:
            if sys.stderr.isatty():
                self._bar = import_module("tqdm").tqdm(
                    total=self._total, desc=self._text, unit=f" {self._counted}", dynamic_ncols=True
                )
            self._look_later()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._shown:
            self._show()
        if self._bar is not None:
            self._bar.close()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """One of them runs inside. name: what people know it by."""
        own = next(self._numbers)
        self._running[own] = name, time.monotonic()
        try:
            yield
        finally:
            del self._running[own]

    def add(self, reward: float | None, ending: str | None) -> None:
        """Count one that ended. reward: None: it has none. ending: None: not worth a word."""
        self._ended += 1
        if ending is not None:
            self._endings[ending] += 1
        if reward is not None:
            self._scored += 1
            self._sum += reward
        if self._bar is not None:
            self._bar.set_postfix(self._figures(), refresh=False)
            self._bar.update()

    # --- what is shown

    def _look_later(self) -> None:
        seconds = _LINE_SECONDS if self._bar is None else _BAR_SECONDS
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._show()
        self._look_later()

    def _show(self) -> None:
        """Show the figures on the bar, or write one line for a log file."""
        if self._bar is not None:
            self._bar.set_postfix(self._figures(), refresh=True)
            return
        seconds = time.monotonic() - self._began
        passed = timedelta(seconds=int(seconds))
        of = "" if self._total is None else f"/{self._total}"
        rate = f"{self._ended / seconds:.3g}/s" if seconds > 0 else "?/s"
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        print(
            f"{self._text}: {self._ended}{of} {self._counted} in {passed}, {rate}"
            + (f", {figures}" if figures else ""),
            file=sys.stderr,
            flush=True,
        )

    def _figures(self) -> dict[str, Any]:
        """What is known beside count and rate, most telling first."""
        now = time.monotonic()
        shown: dict[str, Any] = {}
        if self._running:
            shown["running"] = len(self._running)
        if self._scored:
            shown["reward"] = f"{self._sum / self._scored:.3g}"
        shown |= self._endings
        if oldest := next(iter(self._running.values()), None):
            shown["longest"] = f"{oldest[0]} ({timedelta(seconds=int(now - oldest[1]))})"
        return shown
