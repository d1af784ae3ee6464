"""What waits for an exporter: whatever it takes and refuses, each span arrives once it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.record.sending.backlog import Backlog, Waiting
from otel_rollout.record.sending.requests import REQUEST_BYTES, REQUEST_SPANS


def backlog_of(*sizes: int) -> Backlog:
    backlog = Backlog()
    for number, size in enumerate(sizes, 1):
        backlog.put(Waiting(number, f"{number}", size, None), 0.0)
    return backlog


class Clock:
    """Times without waiting."""

    now = 0.0

    def next_request(self, backlog: Backlog) -> list[int]:
        """The numbers of the next request, which is left as it is taken, at its time."""
        self.batch = self.take(backlog)
        return [item.number for item in self.batch]

    def take(self, backlog: Backlog) -> list[Waiting]:
        time = backlog.time_of_next()
        assert time < math.inf
        self.now = max(self.now, time)
        return backlog.take(self.now)


def play(
    backlog: Backlog, takes: Callable[[list[int], int], bool], most: int
) -> tuple[list[int], list[int], float]:
    """Sizes of the requests that arrived, and that failed, and the time that it took.

    takes: a function of the numbers and the size of a request.
    """
    clock, arrived, failed = Clock(), list[int](), list[int]()
    while len(backlog) and len(arrived) + len(failed) < most:
        batch = clock.take(backlog)
        size = sum(item.size for item in batch)
        if takes([item.number for item in batch], size):
            backlog.arrived(batch)
            arrived.append(size)
        else:
            backlog.failed(batch, clock.now)
            failed.append(size)
    return arrived, failed, clock.now


def test_a_receiver_asks_to_wait():
    """For as long, not for ever; who waits for the spans keeps to it if that is soon enough."""
    for asked, wait in ((0.0, 0.1), (5.0, 5.0), (1e9, 300.0)):
        backlog = backlog_of(10)
        backlog.failed(backlog.take(0.0), 7.0, asked)
        assert backlog.time_of_next() == 7.0 + wait
        backlog.hurry(12.5)
        assert backlog.time_of_next() == (12.0 if asked == 5.0 else -math.inf)
        backlog.failed(backlog.take(12.0), 12.0, 1.0)  # too long for them, too
        assert backlog.time_of_next() < 13.0
        backlog.arrived(backlog.take(12.0))
        backlog.put(Waiting(9, "9", 10, None), 0.0)
        assert backlog.time_of_next() == -math.inf


def test_a_request_is_below_the_limit_of_grpc():
    """By bytes and by number; a larger span goes alone."""
    clock, backlog = Clock(), backlog_of(*[1 << 20] * 4, 5 << 20, *[1] * 600)
    assert clock.next_request(backlog) == [1, 2, 3]
    assert clock.next_request(backlog) == [4]
    assert clock.next_request(backlog) == [5]
    assert backlog.is_full
    assert clock.next_request(backlog) == list(range(6, 6 + REQUEST_SPANS))
    assert not backlog.is_full


def test_a_receiver_that_takes_less_refuses_few_requests():
    """After the first ones the size stays below what it refused, and is tried again at times."""
    backlog = backlog_of(*[30_000] * 2000)
    arrived, failed, seconds = play(backlog, lambda _, size: size <= 1_000_000, 1000)
    assert sum(arrived) == 60_000_000
    assert len(failed) <= 2 + len(arrived) // 16
    assert seconds < 1


def test_what_is_refused_keeps_nothing_else_waiting():
    """Spans that are too large do not stop the small ones behind them, and arrive later."""
    backlog = backlog_of(*[100_000] * 20, *[100] * 300)
    limit = 50_000
    small = set(range(21, 321))
    arrived = set[int]()

    def takes(numbers: list[int], size: int) -> bool:
        if size <= limit:
            arrived.update(numbers)
        return size <= limit

    clock = Clock()
    while not small <= arrived:
        batch = clock.take(backlog)
        if takes([item.number for item in batch], sum(item.size for item in batch)):
            backlog.arrived(batch)
        else:
            backlog.failed(batch, clock.now)
    assert clock.now < 10
    limit = REQUEST_BYTES
    play(backlog, takes, 200)
    assert len(backlog) == 0


def test_a_receiver_that_is_away_is_asked_with_one_span_and_longer_pauses():
    """Requests get small, and further apart, up to ten seconds; then all goes fast."""
    backlog = backlog_of(*[1000] * 5000)
    _, failed, seconds = play(backlog, lambda *_: False, 100)
    assert failed[-80:] == [1000] * 80
    assert 10 * 70 < seconds < 10 * 100
    asked = backlog.time_of_next()
    arrived, failed, end = play(backlog, lambda *_: True, 10_000)
    assert sum(arrived) == 5_000_000
    assert len(arrived) < 150
    assert end == asked


def test_who_waits_has_short_pauses():
    """`hurry` tries at once, and at least every second then."""
    backlog = backlog_of(1000, 1000)
    _, _, before = play(backlog, lambda *_: False, 50)
    backlog.hurry(math.inf)
    assert backlog.time_of_next() == -math.inf
    backlog.failed(backlog.take(before), before)
    play(backlog, lambda *_: False, 10)
    assert backlog.pause == 1.0


def test_one_that_fails_alone_is_set_aside_once():
    """It is reported when others have arrived in between; it waits longer from try to try."""
    backlog, clock = backlog_of(5000, 10, 10), Clock()
    aside = list[Waiting]()
    for _ in range(12):
        if not (batch := clock.take(backlog)):
            break
        if batch[0].size == 5000:
            found = backlog.failed(batch, clock.now)
            aside += [] if found is None else [found]
        else:
            backlog.arrived(batch)
    assert [item.number for item in aside] == [1]
    assert backlog.pause == 0
    assert aside[0].pause > 1
    assert backlog.time_of_next() == aside[0].due > clock.now
    backlog.hurry(math.inf)
    assert backlog.take(clock.now) == aside


def test_after_an_outage_what_is_set_aside_is_first():
    """It may have failed for that alone: it does not wait behind all that has ended since."""
    backlog, clock = backlog_of(5000, 10, 10), Clock()
    aside = None
    while aside is None:
        if (batch := clock.take(backlog))[0].size == 5000:
            aside = backlog.failed(batch, clock.now)
        else:
            backlog.arrived(batch)
    aside.due = 1000.0  # it has failed for long
    for number in (4, 5):
        backlog.put(Waiting(number, "", 10, None), clock.now)
    backlog.failed(backlog.take(clock.now), clock.now)
    backlog.arrived(clock.take(backlog))
    assert clock.take(backlog) == [aside]
    assert clock.now < 10


def test_a_receiver_that_asks_to_wait_gets_a_span_of_each_group_in_turn():
    """Where one arrives, the rest of its group follows at once; what waits is not set aside."""
    backlog, clock = Backlog(), Clock()
    for number in range(1, 13):
        backlog.put(Waiting(number, "", 10 * number, None, group=number % 3), 0.0)
    while len(batch := clock.take(backlog)) > 1:
        assert backlog.failed(batch, clock.now, 1.0) is None
    tried = list[int]()
    for _ in range(6):
        assert backlog.failed(batch, clock.now, 1.0) is None
        before = clock.now
        batch = clock.take(backlog)
        assert clock.now == before + 1
        tried += [item.number for item in batch]
    assert [number % 3 for number in tried] == [2, 0, 1] * 2
    assert len({*tried}) == 6
    first = batch[0].number % 3
    arrived = set[int]()
    while len(arrived) < 4:
        backlog.arrived(batch)
        arrived |= {item.number for item in batch}
        batch = clock.take(backlog)
    assert {number % 3 for number in arrived} == {first}
    assert clock.now == before + 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), min_size=1, max_size=60))
def test_where_one_group_has_room_each_becomes_whole(spans: list[tuple[int, int]]):
    """A round over the groups finds the one, whichever it is and whatever else waits."""
    backlog, clock, missing = Backlog(), Clock(), [group for group, _ in spans]
    for number, (group, size) in enumerate(spans):
        backlog.put(Waiting(number, "", size, None, group=group), 0.0)
    has_room, refused = None, 0
    while len(backlog):
        batch = clock.take(backlog)
        groups = {item.group for item in batch}
        if len(batch) == 1 and has_room is None:
            has_room = batch[0].group
        if groups == {has_room}:
            backlog.arrived(batch)
            for item in batch:
                missing.remove(spans[item.number][0])
            has_room = has_room if has_room in missing else None
        else:
            backlog.failed(batch, clock.now, 1.0)
            refused += 1
            assert refused <= 12 * 6  # halves, and a round, for each group
    assert not missing


@given(
    st.lists(st.integers(1, 4 << 20), min_size=1, max_size=40),
    st.lists(st.sampled_from([True, False, 1000, 1 << 20]), max_size=60),
)
def test_whatever_it_answers_each_span_arrives_in_the_end(
    sizes: list[int], answers: list[bool | int]
):
    """Answers are yes, no, or a limit; none is lost or taken twice, and the time always comes."""
    backlog, arrived, left = backlog_of(*sizes), list[int](), iter(answers)

    def takes(numbers: list[int], size: int) -> bool:
        answer = next(left, True)
        taken = answer if isinstance(answer, bool) else size <= answer
        if taken:
            arrived.extend(numbers)
        return taken

    play(backlog, takes, 1000)
    assert sorted(arrived) == list(range(1, len(sizes) + 1))
    assert len(backlog) == 0
    assert backlog.has_arrived(len(sizes))
    assert backlog.time_of_next() == math.inf
