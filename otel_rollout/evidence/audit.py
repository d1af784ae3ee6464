"""What became of all rollouts, by any number of sources: who is missing, short, late, there twice.

Nothing of a request or a reply is read. Of several sources that know of one rollout, the one counts
in which most of it came. Memory: some hundred bytes for each rollout, and for each span.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from otel_rollout.evidence.rollout import Evidence, Head, Late, Samples, rollout_of
from otel_rollout.export import Started, StartedRecords
from otel_rollout.spans import SpanRecord
from otel_rollout.terminal import number_of
from otel_rollout.wire import Json

_SHOWN = 20
"""Entries of a kind that are printed; the others are counted."""


@dataclass
class Audit:
    """Collects what sources know of rollouts; `report` sums it up."""

    started: StartedRecords = field(default_factory=StartedRecords)
    """What files of started rollouts say."""
    _heads: dict[str, Head] = field(default_factory=dict)
    _evidence: dict[str, Evidence] = field(default_factory=dict)
    _lines: Counter[str] = field(default_factory=Counter)
    """Trajectories by their ids."""
    _again: list[dict[str, Json]] = field(default_factory=list)
    _late: list[Late] = field(default_factory=list)

    def see(self, record: SpanRecord) -> None:
        """Take in a span, as `as_record` gives it."""
        if (rollout_id := rollout_of(record)) is not None:
            if rollout_id not in self._evidence:
                self._evidence[rollout_id] = Evidence(rollout_id)
            self._evidence[rollout_id].add(record)

    def add(self, head: Head) -> None:
        """Take in what a source knows of a rollout."""
        known = self._heads.get(head.rollout)
        if known is None or _knowledge(head) > _knowledge(known):
            self._heads[head.rollout] = head

    def add_trajectory(self, head: Head) -> None:
        """Take in that a trajectory is in a file; one that is there again is duplicated."""
        self._lines[head.rollout] += 1
        self.add(head)

    def add_again(self, group: str | None, rollout: str | None, times: int) -> None:
        """Take in that a group, or a rollout without one, was handed over so often."""
        self._again.append({"rollout": rollout, "group": group, "times": times})

    def add_late(self, late: Late) -> None:
        """Take in that a span came when its rollout had been handed over."""
        self._late.append(late)

    def report(self) -> Report:
        """The sums of all that was taken in."""
        for evidence in self._evidence.values():
            missing = evidence.missing(self._evidence.get(evidence.around or ""))
            self.add(evidence.head(missing))
        for head in self._heads.values():
            if head.came == "rewards":
                continue
            if head.rollout not in self.started.started:
                place = head.rollout, head.group, head.sample, head.size, head.task
                self.started.add(Started(*place))
            if head.ended:
                self.started.ended.add(head.rollout)
        return Report(
            announced=len(self.started.started.keys() - self.started.left_out),
            ended=len(self.started.ended),
            whole=sum(head.is_whole for head in self._heads.values()),
            never_ended=[*self.started.never_ended(lambda _: False)],
            incomplete=[h for h in self._heads.values() if h.ended and h.missing],
            short=[*self._short()],
            duplicated=[*self._duplicated()],
            late=[*self._late_ones()],
        )

    def _short(self) -> Iterator[tuple[str, Samples]]:
        groups = defaultdict[str, list[Head]](list)
        sizes = defaultdict[str, int](int)
        for started in self.started.started.values():
            if group := started.group:
                sizes[group] = max(sizes[group], started.group_size or 0)
        for head in self._heads.values():
            if head.group is not None:
                sizes[head.group] = max(sizes[head.group], head.size or 0)
                groups[head.group] += [head] if head.is_whole else []
        for group, size in sizes.items():
            found = Samples.of(groups[group], size)
            if found.short_by:
                yield group, found

    def _duplicated(self) -> Iterator[dict[str, Json]]:
        yield from self._again
        for rollout, times in self._lines.items():
            if times > 1:
                group = self._heads[rollout].group
                yield {"rollout": rollout, "group": group, "times": times}

    def _late_ones(self) -> Iterator[dict[str, Json]]:
        for late in self._late:
            head = self._heads.get(late.rollout)
            group = head.group if head else None
            yield {"rollout": late.rollout, "group": group, "reward": late.reward}
        for head in self._heads.values():
            if head.is_extra:  # all of it
                yield {"rollout": head.rollout, "group": head.group, "reward": None}
            for reward in head.rewards:
                yield {"rollout": head.rollout, "group": head.group, "reward": reward}


def _knowledge(head: Head) -> tuple[bool, bool, bool, int]:
    return head.is_whole, head.ended, head.came == "contents", -len(head.missing)


@dataclass(frozen=True)
class Report:
    """The sums of an audit."""

    announced: int
    """Rollouts of which anything came."""
    ended: int
    """Those that ended."""
    whole: int
    """Those of which all came."""
    never_ended: list[Started]
    incomplete: list[Head]
    """Those that ended, and of which something is missing."""
    short: list[tuple[str, Samples]]
    """Groups that have not the samples that they were to have."""
    duplicated: list[dict[str, Json]]
    """What was handed over, or is there, more than once."""
    late: list[dict[str, Json]]
    """Spans that came too late to be handed over; rewards with their content."""

    @property
    def is_fine(self) -> bool:
        """True if nothing is missing."""
        return not (self.never_ended or self.incomplete or self.short)

    def to_dict(self) -> dict[str, Json]:
        """The same as JSON."""
        return {
            "announced": self.announced,
            "ended": self.ended,
            "whole": self.whole,
            "never_ended": [
                {"rollout": each.started, "group": each.group, "sample": each.sample_index}
                for each in self.never_ended
            ],
            "incomplete": [
                {"rollout": each.rollout, "group": each.group, "reason": "; ".join(each.missing)}
                for each in self.incomplete
            ],
            "short": [
                {
                    "group": group,
                    "size": found.size,
                    "whole": found.there,
                    "short_by": found.short_by,
                }
                for group, found in self.short
            ],
            "duplicated": [*self.duplicated],
            "late": [*self.late],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{number_of(self.announced, 'rollout')}: {self.ended} ended, {self.whole} whole"
        yield from _shown("never ended", map(str, self.never_ended))
        missing = (f"rollout {e.rollout}: {'; '.join(e.missing)}" for e in self.incomplete)
        yield from _shown("not whole", missing)
        short = (f"group {g!r}: {found.there} of {found.size} samples" for g, found in self.short)
        yield from _shown("short", short)
        again = (f"{_named(each)}: {each['times']} times" for each in self.duplicated)
        yield from _shown("there more than once", again)
        late = (f"{_named(e)}: {e['reward'] or 'a span'}" for e in self.late)
        yield from _shown("late", late)


def _named(entry: dict[str, Json]) -> str:
    group, rollout = entry["group"], entry["rollout"]
    return f"rollout {rollout}" if rollout is not None else f"group {group!r}"


def _shown(what: str, entries: Iterator[str]) -> Iterator[str]:
    every = [*entries]
    if every:
        yield f"{len(every)} {what}:"
        yield from (f"    {each}" for each in every[:_SHOWN])
    if len(every) > _SHOWN:
        yield f"    and {len(every) - _SHOWN} more (--json has all)"
