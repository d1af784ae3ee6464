"""Which model calls of a rollout are not here, as warnings: lost, late, open, or never captured.

The span of a rollout, and of each part that another process has of it, counts the calls that began
there. What it counts and what came are compared; nothing else shows a call that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from otel_rollout import semconv as sc
from otel_rollout.rebuild.rollout_span import Fields, missed_calls, programs_of
from otel_rollout.spans import SpanRecord
from otel_rollout.trajectory import sentences

_COUNTS = frozenset((sc.ROLLOUT_EXCHANGE_COUNT, sc.ROLLOUT_OPEN_COUNT, sc.ROLLOUT_PROCESS))
_MISSED = frozenset((sc.ROLLOUT_UNCAPTURED, sc.ROLLOUT_OUTSIDE))


def is_late(record: SpanRecord) -> bool:
    """Whether a call is no part of its rollout; where that was cut, it is none."""
    return bool(record.boolean(sc.EXCHANGE_LATE)) or sc.EXCHANGE_LATE in record.cut


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a rollout that came, and the spans that say how many there were."""

    rollout: SpanRecord | None
    """The rollout's own span. None: it did not come."""
    parts: Sequence[SpanRecord]
    """Spans of other processes that continued it, in its trace."""
    records: Sequence[SpanRecord]
    """The spans of its calls that came, those that are too late included."""
    present: Mapping[str, int]
    """Calls that came and are not late, by process."""
    was_continued: bool = False
    """True if a span of another process that continued it came, in whatever trace."""
    refused: int = 0
    """Calls of its own process that whoever collected the spans did not keep."""

    @property
    def counting(self) -> list[SpanRecord]:
        """The spans that say how many calls there were."""
        return [record for record in (self.rollout, *self.parts) if record is not None]

    @property
    def are_none(self) -> bool:
        """True if the rollout ended without a call, and it is none that only encloses others."""
        if self.rollout is None or self._is_elsewhere:
            return False
        counts = (sc.ROLLOUT_EXCHANGE_COUNT, sc.ROLLOUT_NESTED_COUNT)
        if any(record.integer(count) != 0 for record in self.counting for count in counts):
            return False
        return not any(not is_late(record) for record in self.records)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether it was handed on to another process, of which no span came."""
        if self.rollout is None or self.was_continued:
            return False
        own = self.rollout.text(sc.ROLLOUT_PROCESS)
        handed_on = self.rollout.attributes.get(sc.ROLLOUT_PROPAGATED) in (True, "true")
        return handed_on and not self.present.keys() - {own}

    def none(self) -> list[str]:
        """A warning where a rollout ended without a call; [] where one is known to be missing."""
        if not self.are_none or self.not_captured(outside=False):
            return []
        assert self.rollout is not None
        if count := self.rollout.integer(sc.ROLLOUT_GATEWAY_COUNT):
            calls = "model calls" if count > 1 else "model call"
            return [sentences.TO_GATEWAY(count=count, calls=calls)]
        status = self.rollout.text(sc.ROLLOUT_STATUS)
        if status != "complete":
            return [sentences.NO_CALL_ENDED(status=repr(status))]
        return [sentences.NO_CALL()]

    def programs(self) -> list[str]:
        """A warning for programs that were given a model server, without any call for all others.

        Whether they made calls is not known: most programs make none.
        """
        found = [
            sentences.PROGRAMS_GIVEN(**about)
            for record in self.counting
            if (about := programs_of(Fields(record, []), is_given=True))
        ]
        if not self.are_none or not self.rollout or self.rollout.integer(sc.ROLLOUT_GATEWAY_COUNT):
            return found
        about = programs_of(Fields(self.rollout, []), is_given=False)
        return [*found, sentences.PROGRAMS(**about)] if about else found

    def not_captured(self, *, outside: bool = True) -> list[str]:
        """A warning for the calls that were seen and not captured.

        outside: also for those that were made outside any rollout, and need not be its own.
        """
        found: list[str] = []
        for record in self.counting:
            unreadable: list[str] = []
            fields = Fields(record, unreadable)
            if not record.cut.isdisjoint(_MISSED):
                found.append(sentences.UNCAPTURED_UNKNOWN())
            found += missed_calls(fields, outside=outside) + unreadable
        return found

    def incomplete(self, *, late: bool = True) -> list[str]:
        """Warnings about calls that began, and are not here.

        late: also about those that were still open when the rollout ended.
        """
        found: list[str] = []
        began = still_open = missing = 0
        counted: set[str | None] = {""}
        for record in self.counting:
            if not record.cut.isdisjoint(_COUNTS):
                found.append(sentences.COUNT_UNKNOWN())
                continue
            counted.add(record.text(sc.ROLLOUT_PROCESS))
            count = record.integer(sc.ROLLOUT_EXCHANGE_COUNT) or 0
            unended = record.integer(sc.ROLLOUT_OPEN_COUNT) or 0
            came = self.present.get(record.text(sc.ROLLOUT_PROCESS) or "", 0)
            refused = self.refused if record is self.rollout else 0
            missing += max(0, count - unended - came - refused)
            began, still_open = began + count, still_open + unended
        if missing:
            found.append(self._missing(missing=missing, began=began))
        if gaps := sum(map(self._gaps, self.present.keys() - counted)):
            found.append(sentences.GAPS(gaps=gaps))
        if still_open and late:
            found.append(sentences.LATE(count=still_open))
        if self._is_elsewhere:
            found.append(sentences.ELSEWHERE())
        return found

    def after(self) -> list[str]:
        """A warning about calls that began when the rollout had ended; the last one, as it came."""
        unended = (record.integer(sc.ROLLOUT_OPEN_COUNT) or 0 for record in self._counting)
        began_late = sum(map(is_late, self.records)) - sum(unended)
        return [sentences.AFTER(count=began_late)] if began_late > 0 else []

    @property
    def _counting(self) -> list[SpanRecord]:
        """The spans that say how many calls there were, and are whole."""
        return [record for record in self.counting if record.cut.isdisjoint(_COUNTS)]

    @property
    def _missing(self) -> sentences.Sentence:
        if self.rollout and self.rollout.text(sc.ROLLOUT_CONTENT) == "none":
            return sentences.MISSING_CONTENT
        return sentences.MISSING

    def _gaps(self, process: str) -> int:
        """Calls of a process that must have been: it numbers them."""
        records = [r for r in self.records if r.text(sc.EXCHANGE_PROCESS) == process]
        numbers = {record.integer(sc.EXCHANGE_STARTED) or 0 for record in records}
        return max(0, max(numbers) - len(records))
