"""From requests to open rollouts: spans are on the disk before a request is answered.

One thread takes the requests that wait, parses them, appends them to the journal with one sync,
adds their spans to the rollouts that are open, and answers. Where a request cannot be kept it is
answered "retry", and so is every other one until there is room: whoever sends holds the rest.

Parts of many groups must not fill a journal in which each waits for its rest. So a full one takes
what continues open groups, and the last quarter is for one of them at a time, the first that a
request continues alone: if its rest fits there and is sent in five minutes, it is whole, and so
makes room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.evidence import Audit, Late, OpenRollouts, rollout_of, unit_of
from otel_rollout.journal import Journal, Place, read_records
from otel_rollout.otlp import read_json, read_protobuf
from otel_rollout.receive.heads import HeadFile
from otel_rollout.record import decoded_whole
from otel_rollout.spans import AttributeValue, SpanRecord, as_record, transportable
from otel_rollout.terminal import number_of
from otel_rollout.trajectory import UNREADABLE
from otel_rollout.wire import check_depth, loads

logger = logging.getLogger("otel_rollout")

_TICK = 0.5
"""Seconds after which a full receiver tries whether there is room."""
_SHARE = 4
"""The reserve is a quarter of the journal."""
_LOG_SECONDS = 60.0
"""Seconds after which it is logged again that the journal is full, as it may be for moments."""
_TURN_SECONDS = 300.0
"""Seconds after which the reserve is for another group, if one is not whole by then."""
_COMPACTING_SECONDS = 10.0
"""Seconds between two looks for segments that are kept for little."""
_PIECE = 16
"""Records that are moved at once."""
_BATCH = 1 << 26
"""Bytes of requests, decoded, after which no further one is read before these are kept."""
_WHITE = b" \t\r\n"


class Answer(NamedTuple):
    """What a request is answered."""

    kind: Literal["taken", "retry", "refused"]
    """taken: its spans are safe. retry: nothing of it is kept, and it should come again. refused:
    it cannot be read, and should not."""
    why: str = ""
    rejected: int = 0
    """Spans of it that are not kept, for good."""


@dataclass(frozen=True)
class Limits:
    """What a receiver takes."""

    body_bytes: int = 1 << 26
    """Bytes of a request, also once it is decoded."""
    waiting_bytes: int = 1 << 28
    """Bytes of requests that wait to be answered."""
    rollout_spans: int = 100_000
    """Spans of one rollout; further ones are rejected."""
    open_rollouts: int = 50_000
    """Rollouts that are open; a request with others, not of open groups, has to come again."""

    def __post_init__(self) -> None:
        """ConfigurationError for a limit below 1, and where no large request could be taken."""
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigurationError(f"Limits, {name}: expected 1 or more, got {value!r}")
        if self.waiting_bytes < self.body_bytes:
            raise ConfigurationError(
                f"Limits, waiting_bytes: expected body_bytes ({self.body_bytes}) or more, got "
                f"{self.waiting_bytes}"
            )


@dataclass
class _Request:
    body: bytes
    encoding: str
    is_json: bool
    answer: Future[Answer] = field(default_factory=Future)
    records: list[SpanRecord] = field(default_factory=list)
    rejected: int = 0


class Intake:
    """Takes requests in a thread of its own, from `start` to `stop`.

    lock: held while the rollouts are changed. on_change: called when some may have become ready.
    """

    def __init__(
        self,
        journal: Journal,
        heads: HeadFile,
        rollouts: OpenRollouts[Place],
        limits: Limits,
        lock: threading.RLock,
        on_change: Callable[[], None],
    ) -> None:
        self._journal, self._heads, self._rollouts = journal, heads, rollouts
        self._limits, self._lock, self._on_change = limits, lock, on_change
        self.counts = Counter[str]()
        """Spans by what they were, requests by their answers, for metrics."""
        self._waiting: list[_Request] = []
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_ended = False
        self._why_full = ""
        """Why nothing is taken now; "": something is."""
        self._compacted = time.monotonic()
        self._logged = -_LOG_SECONDS
        self._needed = 0
        """Bytes for which there has to be room before requests are taken again."""
        self._continued, self._continued_until = "", 0.0
        """The group that the reserve is for, and until when. "": none yet."""
        self._thread = threading.Thread(target=self._run, name="otel-rollout-intake", daemon=True)

    def replay(self, now: float) -> None:
        """Add what a former process left in the journal."""
        damage = Counter[str]()
        for place, body in self._journal.records(lambda text: damage.update([text])):
            try:
                records = parsed(body, body[:1] == b"{")[0]
            except SpanFormatError as error:  # its checksum was right: who wrote it read it
                logger.error("journal %s: %s", self._journal.folder, error)
                records = []
            self._add(place, records, now)
        for text in damage:
            logger.error("%s: spans that were acknowledged are lost", text)
        self.counts = Counter(damaged_records=len(damage))  # what came is counted from now on

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more; what waits is answered."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        self._thread.join()

    def submit(self, body: bytes, encoding: str, *, is_json: bool) -> Future[Answer]:
        """The answer to a request, once it is known. encoding: of the body, "" for none."""
        request = _Request(body, encoding, is_json)
        request.answer.set_running_or_notify_cancel()  # a client that has gone cancels no answer
        with self._changed:
            if self._bytes + len(body) > self._limits.waiting_bytes or self._is_ended:
                why = "it is ending" if self._is_ended else "too many requests wait"
                request.answer.set_result(Answer("retry", why))
                return request.answer
            self._bytes += len(body)
            self._waiting.append(request)
            self._changed.notify_all()
        return request.answer

    def _run(self) -> None:
        try:
            self._take_all()
        finally:
            with self._changed:  # also where it fails: nobody waits for an answer in vain
                self._is_ended = True
                for request in self._waiting:
                    request.answer.set_result(Answer("retry", "it has ended"))

    @property
    def is_running(self) -> bool:
        """True while it takes requests."""
        return self._thread.is_alive()

    def _take_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ended, _TICK)
                requests, self._waiting = self._waiting, []
                if self._is_ended and not requests:
                    return
                self._bytes -= sum(len(each.body) for each in requests)
            if self._why_full:
                self._look_for_room()
            elif time.monotonic() > self._compacted + _COMPACTING_SECONDS:
                self._compact()
            while requests:
                self._take([*self._read_some(requests)])

    def _read_some(self, requests: list[_Request]) -> Iterator[_Request]:
        """Read requests, and remove them from the list, until they have some bytes together."""
        size = 0
        while requests and size < (1 if self._why_full else _BATCH):
            if self._is_read(request := requests.pop(0)):
                size += len(request.body)
                yield request

    def _answer(self, request: _Request, answer: Answer) -> None:
        self.counts[answer.kind] += 1
        request.answer.set_result(answer)

    def _is_read(self, request: _Request) -> bool:
        """Read a request; False if it was answered."""
        try:
            body = _decoded(request, self._limits.body_bytes)
            request.body = body
            request.records, request.rejected = parsed(body, request.is_json)
        except SpanFormatError as error:
            self._answer(request, Answer("refused", str(error)))
            return False
        if self._why_full and not self._goes_on(request):
            self._answer(request, Answer("retry", self._why_full))
            return False
        if nameless := sum(sc.ROLLOUT_ID in record.cut for record in request.records):
            self.counts["nameless"] += nameless
            logger.error("%d spans were not kept: the ids of their rollouts were cut", nameless)
        return True

    @property
    def _reserve(self) -> int:
        """Bytes of the reserve. Where nothing is open, a request may need all of the journal."""
        return (self._journal.max_bytes or 0) // _SHARE if self._rollouts.held else 0

    def _goes_on(self, request: _Request) -> bool:
        """True for a request that continues a group, for which a full journal has room."""
        ours = [each for each in request.records if rollout_of(each) is not None]
        now, has_room = time.monotonic(), self._journal.has_room(len(request.body) + self._reserve)
        with self._lock:
            open_one = next(filter(self._rollouts.is_waiting, map(unit_of, ours)), "")
            if has_room:
                return bool(open_one)
            is_over = now >= self._continued_until or not self._rollouts.is_waiting(self._continued)
            unit = open_one if is_over else self._continued
            if not (unit and ours and all(self._rollouts.needs(unit, each) for each in ours)):
                return False  # also for one with parts of others: they would fill the reserve
            if is_over:
                self._continued, self._continued_until = unit, now + _TURN_SECONDS
            return True

    def _take(self, requests: Sequence[_Request]) -> None:
        """Keep requests that were read, and answer them."""
        now, kept = time.monotonic(), list[_Request]()
        for request in requests:
            if not any(rollout_of(record) is not None for record in request.records):
                self.counts["other"] += len(request.records)
                self._answer(request, Answer("taken", rejected=request.rejected))
            elif why := self._why_not_open(request):
                self._answer(request, Answer("retry", why))
            else:
                kept.append(request)
        if not kept:
            return
        places: list[Place] = []
        try:
            reserve = self._reserve * (not self._why_full)
            places = self._journal.append([each.body for each in kept], reserve=reserve)
            for request in kept:
                request.rejected += self._add(places[0], request.records, now)
                del places[0]
        except OSError as error:
            largest = max(len(each.body) for each in kept)
            self._refuse(f"its spans could not be kept ({error.strerror or error})", largest, now)
            answers = [Answer("retry", self._why_full)] * len(kept)
            self._journal.release(each for each in places if each not in self._rollouts.held)
        else:
            answers = [Answer("taken", _REJECTED * bool(r.rejected), r.rejected) for r in kept]
        for request, answer in zip(kept, answers, strict=True):
            self._answer(request, answer)
        self._on_change()

    def _refuse(self, why: str, largest: int, now: float) -> None:
        """Take little from now on, until there is room for a request of so many bytes."""
        if self._why_full:
            return
        if now >= self._logged + _LOG_SECONDS:
            logger.error("%s: requests are answered 'retry' until they can", why)
            self._logged = now
        self._why_full, self._needed = why, largest
        with self._lock:
            self._rollouts.refuse(now)

    def _why_not_open(self, request: _Request) -> str:
        """Why the rollouts of a request cannot be opened; "" if they can."""
        with self._lock:
            if len(self._rollouts) < self._limits.open_rollouts:
                return ""
            rollouts, ours = self._rollouts, ((rollout_of(r), unit_of(r)) for r in request.records)
            if all(not id_ or rollouts.is_open(id_) or rollouts.is_waiting(u) for id_, u in ours):
                return ""
        return f"{self._limits.open_rollouts} rollouts are open"

    def _add(self, place: Place, records: Sequence[SpanRecord], now: float) -> int:
        """Add spans to their rollouts; how many were rejected."""
        rejected, is_held, late = 0, False, list[Late]()
        with self._lock:
            for record in records:
                rollout_id = rollout_of(record) or ""
                if self._rollouts.spans_of(rollout_id) >= self._limits.rollout_spans:
                    rejected += 1
                    continue
                try:
                    came = self._rollouts.add(record, place, now)
                except UNREADABLE as error:  # else it would come back at each start
                    logger.error("a span of %s is not kept: %r", rollout_id, error)
                    rejected += 1
                    continue
                is_held |= came in ("new", "differs")
                if came == "late":
                    late.append(Late.of(rollout_id, record))
                else:
                    self.counts[came] += 1
            if not is_held:
                self._journal.release([place])
            if late:
                self._keep_late(late)
        if rejected:
            self.counts["rejected"] += rejected
            logger.error("%d spans were rejected: of rollouts that have too many, or odd", rejected)
        return rejected

    def _keep_late(self, late: Sequence[Late]) -> None:
        """Keep and report that spans came late; copies of others are among them."""
        new = self._heads.late(late)
        self.counts["late"] += len(new)
        self.counts["copy"] += len(late) - len(new)
        for rollout_id, count in Counter(each.rollout for each in new).items():
            what = number_of(count, "span")
            logger.warning("%s came for the rollout %s, which was handed over", what, rollout_id)
        for rollout_id, _, reward in (each for each in new if each.reward is not None):
            logger.warning("rollout %s: a reward came too late: %.200s", rollout_id, reward)

    def _look_for_room(self) -> None:
        """Take requests again if there is room."""
        self._compact()
        now = time.monotonic()
        with self._lock:
            if self._journal.has_room(self._needed + self._reserve):
                self._why_full = ""
                self._rollouts.take_again(now)
            else:
                self._rollouts.refuse(now)

    def _compact(self) -> None:
        """Move what is needed out of segments in which most is not: else long rollouts keep all."""
        self._compacted = time.monotonic()
        try:
            with self._lock:
                places = self._journal.sparse(self._rollouts.movable())
                while piece := places[:_PIECE]:
                    del places[:_PIECE]
                    records = [self._journal.read(place) for place in piece]
                    moved = self._journal.append(records, reserve=None)
                    self._rollouts.move(dict(zip(piece, moved, strict=True)))
                    self._journal.release(piece)
        except (OSError, SpanFormatError) as error:
            logger.warning("the journal could not be made smaller: %s", error)


_REJECTED = "some spans are not kept: see the log of the receiver"


def _decoded(request: _Request, most: int) -> bytes:
    """The body without its encoding. SpanFormatError if it is too long, or damaged."""
    body = request.body
    if request.encoding not in ("", "identity"):
        plain = decoded_whole(body, request.encoding, most)
        if plain is None:
            raise SpanFormatError(
                f"a body with the encoding {request.encoding!r:.40}: it cannot be decoded, or has "
                f"more than {most} bytes then"
            )
        body = plain
    if len(body) > most:
        raise SpanFormatError(f"a body of {len(body)} bytes: expected {most} at most")
    return body.lstrip(_WHITE) if request.is_json else body


def parsed(body: bytes, is_json: bool) -> tuple[list[SpanRecord], int]:
    """The spans of a request, and how many cannot be read. SpanFormatError if it is no OTLP."""
    errors = list[SpanFormatError]()
    if is_json:
        try:
            text = body.decode()
            check_depth(text)
            found = [_encodable(r) for r in read_json(loads(text), on_error=errors.append)]
        except UNREADABLE as error:
            raise SpanFormatError(f"not an OTLP/JSON message ({error!r:.200})") from None
    else:
        if body[:1] == b"{":
            raise SpanFormatError("not an OTLP/protobuf message: it begins like JSON")
        found = [*read_protobuf(body)]
    records = list[SpanRecord]()
    for record in found:
        try:
            records.append(as_record(record))
        except SpanFormatError as error:
            errors.append(error)
    return records, len(errors)


def _encodable(record: SpanRecord) -> SpanRecord:
    """The record; lone surrogates, which JSON may have, are escaped."""
    attributes: dict[str, AttributeValue] = {
        str(transportable(name)): transportable(value) if isinstance(value, str) else value
        for name, value in record.attributes.items()
    }
    return replace(record, attributes=attributes)


def audit_journal(folder: Path, audit: Audit, on_error: Callable[[SpanFormatError], None]) -> None:
    """Let an audit know what is in a receiver's journal, also while the receiver runs.

    on_error: called for each place that cannot be read. OSError if the heads cannot be.
    """
    heads = HeadFile(folder, reads=True)
    try:
        late = {each[:2]: each for each in heads.late_spans()}
        for body in read_records(folder, lambda text: on_error(SpanFormatError(text))):
            try:
                records = parsed(body, body[:1] == b"{")[0]
            except SpanFormatError as error:
                on_error(error)
                continue
            for record in records:
                id_ = rollout_of(record) or ""
                if (id_, record.span_id) not in late and not heads.has_rollout(id_):
                    audit.see(record)
        for head in heads.heads():
            audit.add(head)
        for unit in heads.units():
            if unit.times > 1:
                group, rollout = (unit.name, None) if unit.is_group else (None, unit.name)
                audit.add_again(group, rollout, unit.times)
        for each in late.values():
            audit.add_late(each)
    finally:
        heads.close()
