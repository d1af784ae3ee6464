"""The rollouts of a partition, over hours of a clock that the tests move."""

from __future__ import annotations

from otel_rollout import semconv as sc
from otel_rollout.journal import Place
from otel_rollout.kafka.open_groups import LateReward
from otel_rollout.kafka.spans import At, Partition
from otel_rollout.otlp import read_protobuf
from otel_rollout.spans import as_record, with_lengths
from tests.kit.sending import A, B, Span, request, reward_of, spans_of

HOUR = 3600.0


class Played:
    """A partition, and what is read of it."""

    def __init__(self) -> None:
        self.now, self.end = 0.0, 0
        self.partition = Partition(0, {}, HOUR, self.now)
        self.keys = list[str]()
        """Those of the rewards that are sent on."""
        self.rewards = dict[str, list[LateReward]]()
        """Those that go with trajectories, by their rollouts."""

    def sends(self, *spans: Span) -> None:
        """A record with these spans is written, and read."""
        for record in map(as_record, read_protobuf(request(spans))):
            key = self.partition.key_of_reward(record)
            if key is None:
                self.partition.add(record, At(self.end, Place(0, self.end, 1)))
            else:
                self.keys.append(key)
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
                self.rewards[found[-1]] = ready.rewards
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


def judged(rollout: str, **names: str) -> Span:
    """A reward that another process sets, which numbers none."""
    id_, attributes = reward_of(rollout)
    found = {name: attributes[name] for name in (sc.ROLLOUT_ID, sc.REWARD)}
    return id_, with_lengths(found | {getattr(sc, name): text for name, text in names.items()})


def test_a_span_that_is_a_reward_and_more_is_no_reward():
    """Anybody may write one: calls, and a rollout's own span, are read as such."""
    played = Played()
    played.sends(*spans_of(A, REWARD="{}"))
    assert played.keys == []
    assert played.passes(2.0) == [A]
    assert played.rewards[A] == []


def test_a_reward_is_with_its_trajectory_or_goes_after_it():
    """Of an open rollout it is a span as the others; of one that waits it goes along."""
    played, outer = Played(), spans_of(B, ROLLOUT_NESTED_COUNT=1, ROLLOUT_GROUP_ID="g")
    played.sends(*outer[:-1])
    inner = spans_of(A, ROLLOUT_PARENT_ID=B)
    played.sends(*inner[:-1], judged(A))
    assert len([*played.partition.rollouts.span_ids(A)]) == 3
    played.sends(inner[-1])
    assert played.passes(2.0) == []
    played.sends(judged(A))
    played.sends(outer[-1])
    assert played.passes(2.0) == [A, B]
    assert [each.rollout for each in played.rewards[A]] == [A]
    assert played.keys == [""]
    played.sends(judged(A), reward_of(B))
    assert played.keys == ["", "g", "g"]


def test_a_reward_of_an_unknown_rollout_goes_where_its_trajectory_goes():
    """By the group that it names; one with a number waits for its rollout, in the same trace."""
    played = Played()
    played.sends(judged(A))
    played.sends(judged(A, ROLLOUT_OUTER_GROUP_ID="o"))
    played.sends(judged(A, ROLLOUT_OUTER_GROUP_ID="o", ROLLOUT_GROUP_ID="g"))
    played.sends(reward_of(B))
    assert played.keys == [A, "o", "g"]
    assert played.partition.rollouts.is_open(B)


def test_a_reward_that_is_being_sent_on_is_read_again():
    """Until the brokers have it."""
    partition = Partition(0, {}, HOUR, 0.0)
    partition.next = 9
    partition.sending.update([7, 7, 8])
    assert partition.low == 7
    partition.sent(7)
    assert partition.low == 7
    partition.sent(7)
    assert partition.low == 8
    partition.sent(8)
    assert partition.low == 9


def test_a_reward_that_was_sent_is_not_sent_again():
    """The marks are read before the spans, by whoever has the partition next."""
    played = Played()
    [record] = read_protobuf(request([judged(A)]))
    played.partition.remember_sent([LateReward.of(as_record(record)).key])
    played.sends(judged(A))
    assert played.keys == [""]
    played.partition.remember_sent(map(str, range(100_000)))
    played.sends(judged(A))
    assert played.keys == ["", A]
