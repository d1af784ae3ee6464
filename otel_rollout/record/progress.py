"""Progress of a run of many rollouts, on one line of a terminal; silent where there is none."""

from __future__ import annotations

import sys
from collections import Counter
from types import TracebackType
from typing import Any

from tqdm import tqdm


class RolloutProgress:
    """A bar with the rate, the mean reward of what is scored, and how runs ended.

    text: the text before the bar. True: the name of the things that are counted; False: no bar.
    total: how many there will be. None: not known.
    counted: the name of the things that are counted, such as "rollouts".
    """

    def __init__(self, text: bool | str, total: int | None, counted: str) -> None:
        self._text = text
        self._total = total
        self._counted = counted
        self._bar: tqdm[Any] | None = None
        self._endings: Counter[str] = Counter()
        self._scored = 0
        self._sum = 0.0

    def __enter__(self) -> RolloutProgress:
        self._bar = tqdm(
            total=self._total,
            desc=self._text if isinstance(self._text, str) else self._counted,
            unit=f" {self._counted}",
            disable=not self._text or not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, reward: float | None, ending: str | None) -> None:
        """Count one that ended. reward: None: it has none. ending: None: not worth a word."""
        if self._bar is None:
            return
        if ending is not None:
            self._endings[ending] += 1
        if reward is not None:
            self._scored += 1
            self._sum += reward
        shown: dict[str, Any] = {}
        if self._scored:
            shown["reward"] = f"{self._sum / self._scored:.3g}"
        self._bar.set_postfix({**shown, **self._endings}, refresh=False)
        self._bar.update()
