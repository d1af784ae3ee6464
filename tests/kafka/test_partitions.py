"""The rollouts of a partition, over hours of a clock that the tests move."""

from __future__ import annotations

from otel_rollout.journal import Place
from otel_rollout.kafka.spans import At, Partition
from otel_rollout.otlp import read_protobuf
from otel_rollout.spans import as_record
from tests.kit.sending import A, B, Span, request, spans_of

HOUR = 3600.0


class Played:
    """A partition, and what is read of it."""

    def __init__(self) -> None:
        self.now, self.end = 0.0, 0
        self.partition = Partition(0, {}, HOUR, self.now)

    def sends(self, *spans: Span) -> None:
        """A record with these spans is written, and read."""
        for record in read_protobuf(request(spans)):
            self.partition.add(as_record(record), At(self.end, Place(0, self.end, 1)))
        self.end += 1
        self.partition.next = self.end

    def passes(self, seconds: float, *, is_answered: bool = True) -> list[str]:
        """Time passes, in ticks; the rollouts that are written then."""
        found = list[str]()
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            is_tick = self.partition.tick(self.end if is_answered else None, self.now)
            for ready in [*self.partition.ready(is_tick=is_tick)]:
                found += [head.rollout for head in ready.unit.heads]
                self.partition.finish(ready)
        return found


def test_a_rollout_of_hours_is_whole():
    """A call comes now and then; its first span is where the next process would read from."""
    played, spans = Played(), spans_of(A, 8)
    for span in spans[:-1]:
        played.sends(span)
        other = spans_of(f"{played.end:032x}", 1)
        played.sends(*other)
        assert played.passes(0.9 * HOUR) == [f"{played.end - 1:032x}"]
        assert played.partition.low == 0
    played.sends(spans[-1])
    assert played.passes(2.0) == [A]
    assert played.partition.low == played.end


def test_hours_without_a_broker_are_no_time():
    """A rollout is out of time after an hour in which all was read, however long that takes."""
    played = Played()
    played.sends(*spans_of(A)[1:])
    assert played.passes(0.9 * HOUR) == []
    assert played.passes(5 * HOUR, is_answered=False) == []
    played.sends(*spans_of(B)[1:])
    assert played.passes(0.09 * HOUR) == []
    assert played.passes(0.05 * HOUR) == [A]
    assert played.passes(HOUR) == [B]


def test_marks_that_are_ahead_are_known():
    """However many: the spans before them are about to be read again. Others are forgotten."""
    partition = Partition(0, {A: A, **{f"{n:032x}": "g" for n in range(100_001)}}, HOUR, 0.0)
    for number in range(100_001):
        partition.remember({f"f{number:031x}": "g"})
    [span] = read_protobuf(request(spans_of(A)[-1:]))
    assert partition.add(as_record(span), At(1, Place(0, 1, 1))) == "late"
    [span] = read_protobuf(request(spans_of("f" + "0" * 31)[-1:]))
    assert partition.add(as_record(span), At(2, Place(0, 2, 1))) == "new"
