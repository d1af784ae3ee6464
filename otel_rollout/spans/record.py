"""A span as plain data, whichever source it was read from: the SDK, a file, a backend.

Limits and stores truncate attributes, and the rest may still look whole: `12` of a count of 123, an
id without its end. So each span of ours has the lengths of its attributes (`seals.py`), and a
record holds only attributes that have theirs (`as_record`); the names of the others are in `cut`.
The checksums beside the lengths show a text that became another one of the same length.
Anybody may send a span, so `as_record` is also the one place where the types of its fields are
checked: who reads a record that it gave finds values of the types below, or a name in `cut`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from types import NoneType
from typing import Any, Literal, TypeGuard

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.spans.seals import (
    as_written,
    numbers_of,
    of_other_checksums,
    of_other_lengths,
    with_lengths,
)

logger = logging.getLogger("otel_rollout")

SpanKey = tuple[str, str]
"""Trace id and span id: what names a span. Span ids alone are anybody's."""

AttributeValue = str | bool | int | float | Sequence[str | bool | int | float] | bytes | None

Kind = Literal["rollout", "exchange", "reward", "part", "start"]
"""What a span is of a rollout: its own, a call, a reward that came later, what another process has
of it, or the note that it started."""
KINDS: dict[str, Kind] = {
    sc.ROLLOUT_SCHEMA_VERSION: "rollout",
    sc.EXCHANGE_VERSION: "exchange",
    sc.REWARD: "reward",
    sc.ROLLOUT_PART: "part",
    sc.ROLLOUT_STARTED: "start",
}
"""The attribute that says so. Anybody may send a span with several: the first here decides."""


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """One event of a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(slots=True)  # a frozen one takes four times as long to make, for each call
class SpanRecord:
    """One span, whichever source it came from. Ids are lower-case hex, times ns since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_time_ns: int
    end_time_ns: int | None
    """None for a span that is still open."""
    attributes: Mapping[str, AttributeValue]
    """By name. None, of an attribute in `cut`: copies of the span differ in it."""
    scope: str = ""
    """Name of the instrumentation scope."""
    events: Sequence[SpanEvent] = ()
    status_error: str | None = None
    """Description of an ERROR status (may be empty); None for any other status."""
    cut: frozenset[str] = frozenset()
    """Names of attributes that were truncated, dropped or are of a wrong type, and of other fields
    of a wrong type or in which copies differ; `attributes` has no value for them."""
    dropped_attributes: int = 0
    """Number of attributes that the SDK dropped at its limit, if the source reports it; else 0."""
    is_checked: bool = field(default=False, compare=False)
    """True if it is known to be as it was written: nothing is looked for that was cut."""

    @property
    def key(self) -> SpanKey:
        """What names the span."""
        return self.trace_id, self.span_id

    @property
    def disputed(self) -> list[str]:
        """Names of attributes in which copies of the span differ."""
        return [name for name in self.cut if name in self.attributes]

    @property
    def kind(self) -> Kind | None:
        """What it is of a rollout; None: for people only, or that was cut."""
        for attribute, kind in KINDS.items():
            # A reward's attribute has the reward itself, which a backend may truncate.
            if attribute in self.attributes or (kind == "reward" and attribute in self.cut):
                return kind
        return None

    @property
    def group(self) -> str | None:
        """The group that the span names, see `group_key`."""
        return group_key(self.text(sc.ROLLOUT_GROUP_ID), self.text(sc.ROLLOUT_GROUP_RUN))

    def text(self, key: str) -> str | None:
        """The attribute if it is a string, else None."""
        value = self.attributes.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """The attribute if it is an integer or the text of one (some stores keep only text)."""
        value = self.attributes.get(key)
        if value is None or type(value) is int:
            return value
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                return None
        return value if _is_integer(value) else None

    def boolean(self, key: str) -> bool | None:
        """The attribute if it is a boolean or the text of one, else None."""
        value = self.attributes.get(key)
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value)
        return value if isinstance(value, bool) else None

    def label(self, key: str) -> str | int | None:
        """The attribute that `label(key, value)` wrote, of the type that the value had."""
        value = self.attributes.get(key)
        if isinstance(value, str):
            return self.integer(key) if self.attributes.get(key + _TYPE) == "int" else value
        return value if _is_integer(value) else None


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPE = "_type"


def label(key: str, value: str | int | None) -> dict[str, AttributeValue]:
    """Attributes for a value that is a text or an integer.

    Stores that keep only text lose which of both it was, so an integer says so beside it.
    """
    if value is None:
        return {}
    attributes: dict[str, AttributeValue] = {key: transportable(value)}
    return attributes | ({key + _TYPE: "int"} if isinstance(value, int) else {})


def transportable(value: AttributeValue) -> AttributeValue:
    """The value in a form that every transport carries; any other would cost its whole batch.

    Lone surrogates are written escaped, integers of more than 64 bits as text.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value)
    return value


_SEALED = tuple(name for name in KINDS if name != sc.ROLLOUT_STARTED)
"""One of these is on each span that has lengths."""
_is_rollout_id = re.compile(r"[0-9a-f]{32}").fullmatch
"""A rollout's id as this library makes it; needed where no length shows whether one is whole."""


def _checked(record: SpanRecord) -> SpanRecord:
    """The record without what was truncated. A span that is still open has no lengths yet."""
    before, record = record, _typed(record)
    if record is before and record.cut:
        return record  # it was checked before
    there = record.attributes
    if sc.LENGTHS not in there and not any(kind in there for kind in _SEALED):
        return record
    if record.end_time_ns is None:
        wrong = set() if _is_rollout_id(record.text(sc.ROLLOUT_ID) or "") else {sc.ROLLOUT_ID}
    elif _is_as_written(there):
        wrong = set()
    else:
        record, wrong = _of_other_lengths(record)
        there = record.attributes
        wrong |= _of_other_checksums(record, wrong)
    wrong |= _of_other_types(record)
    if there.get(sc.ROLLOUT_ID) == "":
        wrong.add(sc.ROLLOUT_ID)
    if not wrong:
        return record
    kept = {key: value for key, value in there.items() if key not in wrong}
    return replace(record, attributes=kept, cut=record.cut | wrong)


def _is_as_written(attributes: Mapping[str, AttributeValue]) -> bool:
    """Whether lengths and checksums would be written the same again: then nothing is missing.

    The span may have further attributes, which somebody else wrote, and all in another order.
    """
    own = dict(attributes)
    found = own.pop(sc.CHECKSUMS, None), own.pop(sc.LENGTHS, None)
    sealed = with_lengths(own)
    for was, now in zip(found, (sealed.get(sc.CHECKSUMS), sealed[sc.LENGTHS]), strict=True):
        if was == now:
            continue
        if not (isinstance(was, str) and isinstance(now, str) and was.endswith(";")):
            return False
        if not set(was[:-1].split(",")) <= set(now[:-1].split(",")):
            return False
    return True


def _of_other_lengths(record: SpanRecord) -> tuple[SpanRecord, set[str]]:
    """The record as it was written, and the names of attributes that are not as long as then."""
    there = record.attributes
    try:
        lengths = numbers_of(there.get(sc.LENGTHS))
    except ValueError:
        # The seal itself: nothing remains but what the span is, and an id that shows no cut.
        whole = {*_SEALED} - {sc.REWARD}
        if _is_rollout_id(record.text(sc.ROLLOUT_ID) or ""):
            whole.add(sc.ROLLOUT_ID)
        return record, (there.keys() | {sc.LENGTHS}) - whole
    wrong = of_other_lengths(there, lengths)
    if any(isinstance(there.get(name), dict | list) for name in wrong):
        record = replace(record, attributes=as_written(there, lengths))
        wrong = of_other_lengths(record.attributes, lengths)
    return record, wrong


def _of_other_checksums(record: SpanRecord, wrong: set[str]) -> set[str]:
    """Names of texts that are not those that were written; spans written before have no sums."""
    sums = record.attributes.get(sc.CHECKSUMS)
    if sums is None or sc.CHECKSUMS in wrong:
        return set()
    try:
        return of_other_checksums(record.attributes, sums) - wrong
    except ValueError:
        return {sc.CHECKSUMS}


def group_key(group_id: str | None, group_run: str | None) -> str | None:
    """The text that stands for a group: its id, and which run of it this is. None: no group."""
    return group_id if group_id is None or not group_run else f"{group_id}@{group_run}"


# --- types

_INTEGERS = (
    *(sc.ROLLOUT_SCHEMA_VERSION, sc.ROLLOUT_SAMPLE_INDEX, sc.ROLLOUT_EXCHANGE_COUNT),
    *(sc.ROLLOUT_OPEN_COUNT, sc.ROLLOUT_NESTED_COUNT, sc.ROLLOUT_GROUP_SIZE),
    *(sc.ROLLOUT_GATEWAY_COUNT, sc.REWARD_NUMBER),
    *(sc.EXCHANGE_VERSION, sc.EXCHANGE_STARTED),
    *(sc.EXCHANGE_ENDED, sc.EXCHANGE_ATTEMPTS, sc.REQUEST_BASE_COUNT),
    sc.RESPONSE_STATUS_CODE,
)
_BOOLEANS = (
    *(sc.ROLLOUT_TRAINABLE, sc.ROLLOUT_PROPAGATED, sc.ROLLOUT_PART),
    *(sc.EXCHANGE_LATE, sc.EXCHANGE_REDACTED, sc.RESPONSE_STREAM, sc.EXCHANGE_JUDGED),
)
_LABELS = (
    *(sc.ROLLOUT_POLICY_VERSION, sc.EXCHANGE_POLICY_VERSION, sc.EXCHANGE_LAST_POLICY_VERSION),
)
_TEXTS = (
    *(sc.ROLLOUT_ID, sc.ROLLOUT_PARENT_ID, sc.ROLLOUT_TASK_ID, sc.ROLLOUT_GROUP_ID),
    *(sc.ROLLOUT_PROCESS, sc.ROLLOUT_STATUS, sc.ROLLOUT_TERMINATION_REASON, sc.ROLLOUT_REWARDS),
    *(sc.ROLLOUT_METRICS, sc.ROLLOUT_METADATA, sc.ROLLOUT_LOGS, sc.ROLLOUT_APPENDED),
    *(sc.ROLLOUT_STEPS, sc.ROLLOUT_CLAIMS, sc.ROLLOUT_EPISODE, sc.ROLLOUT_ERROR),
    *(sc.ROLLOUT_OUTPUT, sc.ROLLOUT_CONTENT, sc.GEN_AI_AGENT_NAME, sc.REWARD),
    *(sc.EXCHANGE_PROCESS, sc.EXCHANGE_STATUS, sc.EXCHANGE_ERROR, sc.REQUEST_PATH),
    *(sc.REQUEST_KEY, sc.REQUEST_MESSAGES, sc.REQUEST_REPEATED, sc.REQUEST_DIGEST),
    *(sc.REQUEST_BASE_DIGEST, sc.REQUEST_PARAMS, sc.REQUEST_SHARED, sc.REQUEST_SHARED_VALUES),
    *(sc.REQUEST_RAW, sc.RESPONSE_ID, sc.RESPONSE_BODY, sc.RESPONSE_EVENTS),
    *(sc.RESPONSE_PROMPT_IDS, sc.REQUEST_ADDED, sc.RESPONSE_FORM, sc.EXCHANGE_RETRIED),
    *(sc.ROLLOUT_OUTER_GROUP_ID, sc.ROLLOUT_GROUP_RUN, sc.ROLLOUT_MAIN, sc.ROLLOUT_STARTED),
    *(sc.ROLLOUT_SIDE_CALLS, sc.ROLLOUT_UNCAPTURED, sc.ROLLOUT_OUTSIDE, sc.ROLLOUT_PROGRAMS),
    *(sc.EXCHANGE_REFUSED, sc.EXCHANGE_SESSION, sc.EXCHANGE_POLICY_MODEL, sc.REQUEST_SUPPLIED),
    sc.EXCHANGE_LOGPROBS_MODE,
)
_READERS: dict[str, Callable[[SpanRecord, str], AttributeValue]] = {
    **dict.fromkeys(_INTEGERS, SpanRecord.integer),
    **dict.fromkeys(_BOOLEANS, SpanRecord.boolean),
    **dict.fromkeys(_LABELS, SpanRecord.label),
    **dict.fromkeys(_TEXTS, SpanRecord.text),
}
"""Reads an attribute of ours: it gives None for a value of another type."""
_WRITTEN: dict[str, type] = {
    **dict.fromkeys((*_INTEGERS, *_LABELS), int),
    **dict.fromkeys(_BOOLEANS, bool),
    **dict.fromkeys(_TEXTS, str),
}
"""Type with which each attribute of ours is written; of a label, the one that is always read."""


def _of_other_types(record: SpanRecord) -> set[str]:
    """Names of attributes of ours with values that are not of their types."""
    # A value of the very type that was written needs no reading; that of a label may.
    return {
        key
        for key, value in record.attributes.items()
        if type(value) is not _WRITTEN.get(key, type(value)) and _READERS[key](record, key) is None
    }


def _typed(record: SpanRecord) -> SpanRecord:
    """The record with fields of the types that they should have; `cut` names those that had not.

    SpanFormatError for a span that no ids name.
    """
    ids = record.trace_id, record.span_id
    if not (type(ids[0]) is type(ids[1]) is str and all(ids)):
        raise SpanFormatError(f"a span: expected a trace id and a span id in hex, got {ids!r:.120}")
    wrong = {
        name: other for name, kind, other in _FIELDS if not isinstance(getattr(record, name), kind)
    }
    for name in ("start_time_ns", "end_time_ns", "dropped_attributes"):
        value = getattr(record, name)
        if value is not None and not (type(value) is int and 0 <= value < 1 << 64):
            wrong[name] = 0
    if "attributes" not in wrong and not {*map(type, record.attributes)} <= {str}:
        wrong["attributes"] = {}
    if record.events and "events" not in wrong and not all(map(_is_event, record.events)):
        wrong["events"] = ()
    if not wrong:
        return record
    return replace(record, **wrong, cut=record.cut | wrong.keys())


def _is_event(event: object) -> bool:
    return (
        isinstance(event, SpanEvent)
        and isinstance(event.name, str)
        and isinstance(event.attributes, _ATTRIBUTES)
        and {*map(type, event.attributes)} <= {str}
    )


_ATTRIBUTES = (dict, Mapping)
_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("name", str, ""),
    ("parent_span_id", (str, NoneType), None),
    ("start_time_ns", int, 0),
    ("end_time_ns", (int, NoneType), 0),
    ("attributes", _ATTRIBUTES, {}),
    ("scope", str, ""),
    ("events", (list, tuple), ()),
    ("status_error", (str, NoneType), ""),
    ("dropped_attributes", int, 0),
)
"""Fields of a record: their types, and what stands for a value of another one."""


# --- from any source


def as_record(span: Any) -> SpanRecord:
    """The record of an SDK `ReadableSpan`, or of a `SpanRecord`, without what was cut.

    SpanFormatError for anything else.
    """
    record = span if isinstance(span, SpanRecord) else unchecked_record(span)
    return record if record.is_checked else _checked(record)


def as_records(spans: Iterable[Any]) -> Iterator[SpanRecord]:
    """The records of spans. A record that no ids name is logged, and passed over.

    SpanFormatError for what is no span.
    """
    for span in spans:
        try:
            yield as_record(span)
        except SpanFormatError as error:
            if not isinstance(span, SpanRecord):
                raise
            logger.warning("%s; it is passed over", error)


def unchecked_record(span: Any) -> SpanRecord:
    """The record of an SDK `ReadableSpan` as it is; `as_record` of it finds what was cut."""
    try:
        context = span.context
        return SpanRecord(
            name=span.name,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_span_id=f"{span.parent.span_id:016x}" if span.parent else None,
            start_time_ns=span.start_time or 0,
            end_time_ns=span.end_time,
            attributes=_plain(span.attributes),
            scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
            events=[
                SpanEvent(event.name, event.timestamp, _plain(event.attributes))
                for event in span.events
            ]
            if span.events
            else [],
            status_error=(span.status.description or "")
            if not span.status.is_ok and not span.status.is_unset
            else None,
            dropped_attributes=span.dropped_attributes,
        )
    except AttributeError as error:
        raise SpanFormatError(
            f"reconstruct takes SDK ReadableSpans or the SpanRecords that otel_rollout.otlp reads, "
            f"got {type(span).__name__!r} ({error})"
        ) from None


def _plain(attributes: Any) -> dict[str, AttributeValue]:
    """A plain dict: the SDK's mapping takes a lock at every access."""
    return dict(attributes.copy()) if hasattr(attributes, "copy") else dict(attributes or {})


# --- times


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_time = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?)?\s?(?:(Z|UTC)|([+-]\d\d):?(\d\d)?)?"
).fullmatch


def nanoseconds_of(text: str) -> int:
    """The time of an ISO 8601 text, exactly; in UTC if it names no zone. ValueError otherwise."""
    match = _time(text)
    if match is None:
        raise ValueError(f"expected a time such as 2026-11-26T07:00:00.123456Z, got {text!r:.80}")
    day, clock, fraction, _, hours, minutes = match.groups()
    clock = clock or "00:00:00"
    whole = datetime.fromisoformat(f"{day}T{clock}{hours or '+00'}:{minutes or '00'}")
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
