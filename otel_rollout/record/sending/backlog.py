"""Spans that wait for an exporter: which of them the next request has, and when it is sent.

Nothing is known of a request that was not taken: the receiver may be away, be full, or refuse what
is too large. So its spans are sent again in halves, down to a single one. If that fails, the
smallest other one is tried: if it arrives, the receiver is there. A span that fails alone again,
after others have arrived, is set aside, and keeps nothing else waiting. Pauses grow with each span
in a row that fails alone.

A receiver that asks to wait is there, and has no room for what it is sent; it may have some for
what completes a group. So a span of each group is tried in turn, and where one arrives, the others
of its group are next. A lock is the caller's matter, and times are of any clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout.record.sending.requests import REQUEST_BYTES, REQUEST_SPANS

if TYPE_CHECKING:
    from otel_rollout.record.sending.spool import KeptSpan

_FIRST_PAUSE = 0.1
"""Seconds before the next try after a failure."""
_LONGEST_PAUSE = 10.0
_LONGEST_ASKED = 300.0
"""The longest pause that a receiver can ask for."""
_HURRIED_PAUSE = 1.0
"""The longest pause while somebody waits for the spans."""
_STEADY = 32
"""Requests for which the size stays below one that was refused by a receiver that is there."""
_SEARCHED = 1000
"""Spans of which the smallest is looked for."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A span that has not arrived."""

    number: int
    """Its place among the spans that have ended."""
    name: str
    size: int
    span: ReadableSpan | None
    """None: it is on the disk alone."""
    group: object = None
    """What equals that of the spans with which it becomes whole."""
    kept: KeptSpan | None = None
    """The span on the disk. None: it is in memory alone."""
    failed_after: int | None = None
    """Requests that had arrived when it failed alone. None: it has not."""
    pause: float = 0.0
    """Seconds between two tries, if it is set aside. 0: it is not."""
    due: float = 0.0
    """When it is tried again then."""


class Backlog:
    """The spans that have not arrived, in the order in which they are sent."""

    def __init__(self, longest_pause: float = _LONGEST_PAUSE) -> None:
        self._longest_pause = min(longest_pause, _LONGEST_PAUSE)
        self._open: dict[int, Waiting] = {}
        """All that have not arrived, by number, also those of the request that is being sent."""
        self._waiting: deque[Waiting] = deque()
        self._waiting_bytes = 0
        self._aside: list[Waiting] = []
        self._requests = 0
        """Requests that have arrived."""
        self._largest, self._steady = REQUEST_BYTES, 0
        """Size of the next request at most, and the number of requests for which it stays so."""
        self._due = math.inf
        """When those that wait are sent."""
        self._not_before = self._asked = -math.inf
        """When the next request is, and when the receiver asked for it, at the earliest."""
        self.pause = 0.0
        """Seconds between the last request and the next. 0: the last one has arrived."""
        self.hurried = 0
        """Number of callers that wait until spans have arrived."""
        self._until = -math.inf
        """How long they wait."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._open.values())

    def __contains__(self, item: Waiting) -> bool:
        return item.number in self._open

    @property
    def is_full(self) -> bool:
        """True if the next request can have no further span."""
        return self._waiting_bytes >= self._largest or len(self._waiting) >= REQUEST_SPANS

    def has_arrived(self, until: int) -> bool:
        """True if no span up to this number waits any more."""
        return not self._open or min(self._open) > until

    def put(self, item: Waiting, due: float) -> bool:
        """Let a span wait, to be sent at this time at the latest.

        True if the next request is earlier now.
        """
        before = -math.inf if self.is_full else self._due
        self._open[item.number] = item
        self._waiting.append(item)
        self._waiting_bytes += item.size
        self._due = min(self._due, due)
        return self._due < before or (self.is_full and before > -math.inf)

    def hurry(self, until: float) -> None:
        """Somebody waits from now on, until some time: try all now, and with short pauses then.

        A wait that the receiver asks for is kept if it is over by then.
        """
        self._until = max(until, self._until) if self.hurried else until
        self.hurried += 1
        self._not_before = self._asked if self._asked < until else -math.inf
        self._try_aside()

    def _try_aside(self) -> None:
        for item in self._aside:
            item.due = -math.inf

    def time_of_next(self) -> float:
        """When the next request is to be sent. Infinite: there is nothing to send."""
        due = -math.inf if self.hurried or self.is_full else self._due
        aside = min((item.due for item in self._aside), default=math.inf)
        return max(self._not_before, min(due if self._waiting else math.inf, aside))

    def take(self, now: float) -> list[Waiting]:
        """The spans of the next request: `arrived`, `failed` or `discard` has to be called."""
        for item in self._aside:
            if item.due <= now:
                self._aside.remove(item)
                return [item]
        batch, size = list[Waiting](), 0
        while self._waiting and len(batch) < REQUEST_SPANS:
            item = self._waiting[0]
            if batch and (size + item.size > self._largest or item.failed_after is not None):
                break
            batch.append(self._waiting.popleft())
            size += item.size
            if item.failed_after is not None:
                break  # it is sent alone
        self._waiting_bytes -= size
        self._due = now if self._waiting else math.inf
        return batch

    def discard(self, item: Waiting) -> None:
        """Forget a span that was taken: it cannot be sent."""
        del self._open[item.number]

    def arrived(self, batch: list[Waiting]) -> None:
        """The spans of a request have arrived."""
        for item in batch:
            del self._open[item.number]
        self._requests += 1
        if self.pause:  # it was away, or full: those set aside may have failed for that
            self._try_aside()
            others = self._others_of(batch[-1].group)
            self._waiting = deque([*others, *self._waiting])
        self.pause, self._not_before, self._asked = 0.0, -math.inf, -math.inf
        if self._steady:
            self._steady -= 1
        else:
            self._largest = min(2 * self._largest, REQUEST_BYTES)

    def failed(self, batch: list[Waiting], now: float, asked: float = 0.0) -> Waiting | None:
        """The spans of a request have not arrived. The one that is set aside for the first time.

        asked: seconds that the receiver asked to wait. 0: it did not.
        """
        was_there, pause, item, newly_aside = self.pause == 0, _FIRST_PAUSE, batch[0], None
        size = sum(each.size for each in batch)
        if asked:
            self._largest, self._steady = size // len(batch), _STEADY
        elif len(batch) > 1:
            self._largest, self._steady = size // 2, _STEADY if was_there else 0
        if len(batch) > 1:
            self._waiting.extendleft(reversed(batch))
            self._waiting_bytes += size
            self.pause = pause
        elif asked:
            self.pause = self._longer(self.pause)
            others = self._others_of(item.group)
            self._waiting.extend([*others, item])
            self._waiting_bytes += item.size
        elif item.failed_after not in (None, self._requests):  # others have arrived since then
            newly_aside = None if item.pause else item
            item.pause = self._longer(item.pause)
            item.due = now + item.pause
            self._aside.append(item)
        else:
            self.pause = pause = self._longer(self.pause)
            item.failed_after = self._requests
            self._waiting.append(item)
            self._waiting_bytes += item.size
            smallest = min(islice(self._waiting, _SEARCHED), key=lambda each: each.size)
            self._waiting.remove(smallest)
            self._waiting.appendleft(smallest)
        self._due = now if self._waiting else math.inf
        self._asked = now + min(asked, _LONGEST_ASKED) if asked else -math.inf
        if self.hurried and self._asked >= self._until:
            self._asked = -math.inf
        self._not_before = max(now + pause, self._asked)
        return newly_aside

    def _others_of(self, group: object) -> list[Waiting]:
        """Remove the spans of a group from those that wait; they are to be put back elsewhere."""
        others = [each for each in self._waiting if each.group == group]
        self._waiting = deque(each for each in self._waiting if each.group != group)
        return others

    def _longer(self, pause: float) -> float:
        longest = _HURRIED_PAUSE if self.hurried else self._longest_pause
        return min(max(2 * pause, _FIRST_PAUSE), longest)
