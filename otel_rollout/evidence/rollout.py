"""Completeness of one rollout, from the attributes of its spans alone: whole, or what is missing.

No request and no reply is read or kept. `Assembly.lost` is the judge, the same as of a trajectory's
warnings; here are the copies of spans, and what is kept of a span: some hundred bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from otel_rollout import semconv as sc
from otel_rollout.export import Groups, NotWhole, Sample
from otel_rollout.rebuild import Assembly
from otel_rollout.spans import KINDS, SUMMED, SpanKey, SpanRecord
from otel_rollout.trajectory import UNREADABLE, Trajectory, sentences
from otel_rollout.wire import loads

Came = Literal["new", "copy", "damaged", "differs"]
"""What a span is that came: the first of its key; equal to one that came; a copy that is damaged,
where a whole one is there; a copy that is not damaged, and differs."""
_READ = frozenset(
    (
        *KINDS,
        *(sc.ROLLOUT_ID, sc.ROLLOUT_PARENT_ID, sc.ROLLOUT_TASK_ID, sc.ROLLOUT_GROUP_ID),
        *(sc.ROLLOUT_GROUP_SIZE, sc.ROLLOUT_SAMPLE_INDEX, sc.ROLLOUT_EXCHANGE_COUNT),
        *(sc.ROLLOUT_OPEN_COUNT, sc.ROLLOUT_PROCESS, sc.ROLLOUT_PROPAGATED, sc.ROLLOUT_STATUS),
        *(sc.ROLLOUT_CONTENT, sc.ROLLOUT_CLAIMS, sc.GEN_AI_OPERATION_NAME),
        *(sc.REWARD_NUMBER, sc.GEN_AI_EVALUATION_NAME),
        *(sc.EXCHANGE_PROCESS, sc.EXCHANGE_STARTED, sc.EXCHANGE_LATE),
        *(sc.ROLLOUT_OUTER_GROUP_ID, sc.ROLLOUT_GROUP_RUN),
    )
)
"""Attributes that decide whether a rollout is whole, and what `Head` has."""
_OURS = len(sc.PREFIX)
_HASHED = frozenset((str, int, bool))  # a NaN is hashed by what it is, not by what it has
_EXACT = 1_000_000
"""Nanoseconds to which every store keeps times."""


def rollout_of(record: SpanRecord) -> str | None:
    """The id of the rollout that a span is evidence of; None: it is of none, or that was cut."""
    if record.kind is None and record.cut.isdisjoint(KINDS):
        return None
    return record.text(sc.ROLLOUT_ID) or record.text(sc.ROLLOUT_STARTED) or None


def unit_of(record: SpanRecord) -> str:
    """The group that a span is sent with, or else its rollout; "": it is of none."""
    group = record.text(sc.ROLLOUT_OUTER_GROUP_ID) or record.group
    return group or rollout_of(record) or ""


class Late(NamedTuple):
    """A span that came when its rollout had been handed over."""

    rollout: str
    span: str
    reward: str | None
    """JSON, if it is a reward that is not damaged."""

    @classmethod
    def of(cls, rollout_id: str, record: SpanRecord) -> Late:
        """That a span of this rollout came late."""
        reward = record.text(sc.REWARD) if record.kind == "reward" else None
        return cls(rollout_id, record.span_id, reward)


class Head(Struct, frozen=True, omit_defaults=True):
    """What is known of a rollout without its contents; it is kept when these are handed over."""

    rollout: str
    """Its id."""
    group: str | None = None
    size: int | None = None
    """Samples that the group is to have."""
    sample: int | None = None
    task: str | None = None
    parent: str | None = None
    """The rollout around it."""
    came: Literal["contents", "start", "rewards"] = "contents"
    """What came: that it started, and perhaps rewards; only rewards; or more."""
    ended: bool = False
    """True if its own span came."""
    missing: tuple[str, ...] = ()
    """What has not come of it, or came damaged; () if it is whole."""
    is_extra: bool = False
    """True if its group had been handed over without it."""
    rewards: tuple[str | None, ...] = ()
    """The rewards, JSON each, where nothing else came. None: it came damaged."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Head:
        """What is known of the rollout of a trajectory; no reply is read."""
        lost = [
            t for t in trajectory.recorded_warnings if sentences.sentence_of(t)[0] in sentences.LOST
        ]
        for exchange in trajectory.exchanges:
            lost += (sentences.DAMAGED(span=exchange.span_id, damage=d) for d in exchange.damage)
        return cls(
            rollout=trajectory.id,
            group=trajectory.group_key or None,
            size=_size(trajectory.group_size),
            sample=_bounded(trajectory.sample_index),
            task=trajectory.task_id,
            parent=trajectory.parent_id,
            ended=trajectory.status != "unknown",
            missing=tuple(lost),
        )

    @property
    def is_whole(self) -> bool:
        """True if it ended, and nothing of it is missing."""
        return self.ended and not self.missing

    def as_sample(self) -> Sample:
        """Its place in its group."""
        return Sample.placed(
            self.rollout, self.group, self.size, self.sample, self.parent, has_ended=self.ended
        )


class Samples(NamedTuple):
    """The samples of a group that are counted, and those that it is to have."""

    there: int
    size: int | None
    """None: nobody knows."""
    short_by: int

    @classmethod
    def of(cls, heads: Collection[Head], size: int | None = None) -> Samples:
        """Those of the rollouts of one group. size: None: the largest that one of them names."""
        size = size or max((head.size or 0 for head in heads), default=0)
        if not size:
            return cls(len(heads), None, 0)
        every, groups = {head.rollout for head in heads}, Groups(size)
        for head in heads:
            if head.parent not in every:  # else it is a part of one of them
                groups.add(head.as_sample())
                groups.ask_for(head.group)
        found = next(groups.not_whole(), None) if heads else NotWhole("", 0, size, [])
        # There may be more than were to be.
        short_by = 0 if found is None else max(len(found.missing), size - found.samples)
        return cls(size - short_by, size, short_by)


class Evidence:
    """The spans of one rollout that came, in any order, more than once, or not at all."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.inside: frozenset[str] = frozenset()
        """The rollouts of its episode, if it is the run of a workflow: some may claim its calls."""
        self._spans: dict[SpanKey, tuple[int, SpanRecord]] = {}
        """Each with a hash of what was in it."""
        self._assembly = Assembly(rollout_id)
        self._differ: list[str] = []
        self._missing: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Number of spans."""
        return len(self._spans)

    def add(self, record: SpanRecord) -> Came:
        """Take in a span of this rollout, as `as_record` gives it."""
        key, content = record.key, _content(record)
        known = self._spans.get(key)
        if known is None:
            self._keep(content, record)
            return "new"
        if known[0] == content:
            return "copy"
        if record.cut and not known[1].cut:
            return "damaged"
        if known[1].cut and record.cut:
            return "new"  # together they may be whole: `reconstruct` finds out
        if known[1].cut:
            self._keep(content, record)
            self._assembly = Assembly(self.rollout_id)
            for _, kept in self._spans.values():
                self._assembly.add(kept)
            return "new"
        self._differ.append(f"copies of its span {record.span_id} differ")
        self._missing = None
        return "differs"

    def _keep(self, content: int, record: SpanRecord) -> None:
        there = record.attributes
        if sc.ROLLOUT_EPISODE in there:
            self.inside |= _ids_of_episode(record.text(sc.ROLLOUT_EPISODE) or "")
        slim = SpanRecord(
            *("", record.trace_id, record.span_id, record.parent_span_id),
            *(record.start_time_ns, record.end_time_ns),
            {name: value for name, value in there.items() if name in _READ},
            cut=record.cut,
            is_checked=True,
        )
        self._spans[record.key] = content, slim
        self._assembly.add(slim)
        self._missing = None

    @property
    def span_ids(self) -> Iterable[str]:
        """The ids of its spans."""
        return (span_id for _, span_id in self._spans)

    def has_span(self, record: SpanRecord) -> bool:
        """True if a copy of this span came."""
        return record.key in self._spans

    @property
    def has_ended(self) -> bool:
        """True if its own span came."""
        return self._assembly.trace_id is not None

    @property
    def came(self) -> Literal["contents", "start", "rewards"]:
        """What came of it, as `Head.came` has it."""
        kinds = {record.kind for _, record in self._spans.values()}
        if kinds - {"start", "reward"}:
            return "contents"
        return "start" if "start" in kinds else "rewards"

    @property
    def rewards(self) -> list[Late]:
        """The rewards that came after it, on spans of their own."""
        every = (record for _, record in self._spans.values())
        return [Late.of(self.rollout_id, each) for each in every if each.kind == "reward"]

    @property
    def around(self) -> str | None:
        """The rollout whose calls it claims, which is read with it; None: it claims none."""
        return self._assembly.around

    def missing(self, around: Evidence | None = None) -> tuple[str, ...]:
        """What has not come of it, or came damaged; () if it is whole.

        around: that of the rollout of `self.around`, if spans of it came.
        """
        if self._missing is None:
            self._missing = (*self._assembly.lost(), *self._differ)
        if self.around is None:
            return self._missing
        of_others = self._assembly.claimed_of(around._assembly if around else None)
        return (*self._missing, *of_others)

    def head(self, missing: tuple[str, ...]) -> Head:
        """What is known of it by now. missing: what has not come."""
        # Its own span knows best.
        spans = sorted(
            (record for _, record in self._spans.values()),
            key=lambda record: record.kind != "rollout",
        )

        def text(name: str) -> str | None:
            return next((t for record in spans if (t := record.text(name)) is not None), None)

        def number(name: str) -> int | None:
            found = (_bounded(record.integer(name)) for record in spans)
            return next((n for n in found if n is not None), None)

        rewards = () if (came := self.came) == "contents" else (r.reward for r in self.rewards)
        return Head(
            rollout=self.rollout_id,
            group=_group(spans),
            size=_size(number(sc.ROLLOUT_GROUP_SIZE)),
            sample=number(sc.ROLLOUT_SAMPLE_INDEX),
            task=text(sc.ROLLOUT_TASK_ID),
            parent=text(sc.ROLLOUT_PARENT_ID),
            came=came,
            ended=self.has_ended,
            missing=missing,
            rewards=tuple(rewards),
        )


def _group(spans: Sequence[SpanRecord]) -> str | None:
    """The group that these spans name; a reward may name the one that its rollout is sent with."""
    of_rollout = [each for each in spans if each.kind != "reward"] or spans
    return next(filter(None, (each.group for each in of_rollout)), None)


def _size(number: int | None) -> int | None:
    """The size of a group; None for a number that is none."""
    return None if number is None or number < 1 else _bounded(number)


def _bounded(number: int | None) -> int | None:
    """The number; None for one of more than 64 bits, which nobody counted."""
    return number if number is None or -(1 << 63) <= number < 1 << 63 else None


def _content(record: SpanRecord) -> int:
    """A hash of what we wrote on a span, in whatever order; each process has hashes of its own."""
    times = record.start_time_ns // _EXACT, (record.end_time_ns or 0) // _EXACT
    # Of the large texts the span has checksums, which `as_record` has checked.
    known = SUMMED if sc.CHECKSUMS in record.attributes and not record.cut else frozenset()
    written = [
        row
        for row in record.attributes.items()
        if row[0] not in known and row[0][:_OURS] == sc.PREFIX
    ]
    if not {type(value) for _, value in written} <= _HASHED:
        written = [(n, v if isinstance(v, str | int) else repr(v)) for n, v in written]
    return hash((*times, record.cut, frozenset(written)))


def _ids_of_episode(text: str) -> frozenset[str]:
    try:
        rows: Any = loads(text)["trajectories"]
        return frozenset(str(row["id"]) for row in rows)
    except UNREADABLE:
        return frozenset()  # what was cut is in `missing`
