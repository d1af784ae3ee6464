"""The model calls of a trace, each once, even if several instrumentations recorded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.rebuild.dialects import anthropic, genai, logfire, openinference, openllmetry_flat
from otel_rollout.rebuild.dialects.call import (
    Dialect,
    Dump,
    ForeignCall,
    Trace,
    check_flags,
    check_roles,
)
from otel_rollout.rebuild.plugins import installed
from otel_rollout.spans import Exchange, SpanRecord, absent, members_of
from otel_rollout.wire import Json, MessagePath, dumps, extend


@cache
def dialects() -> tuple[Dialect, ...]:
    """All dialects. Where several would read a span, the first of them does."""
    return (
        *installed("otel_rollout_dialect"),
        openinference.DIALECT,
        logfire.DIALECT_V1,
        openllmetry_flat.DIALECT,
        genai.OPENLLMETRY,
        logfire.DIALECT,
        anthropic.DIALECT,
        genai.DIALECT_V2,
        genai.DIALECT,
    )


def spans_of_record(row: Json) -> Iterator[SpanRecord] | None:
    """The spans of a record that a product exported; None if it is no such record.

    SpanFormatError for one that is not as the product writes it.
    """
    for dialect in dialects():
        if dialect.dump is not None and isinstance(row, dict) and dialect.dump.holds(row):
            return _spans_of(row, dialect.name, dialect.dump)
    return None


def _spans_of(row: Mapping[str, Json], product: str, dump: Dump) -> Iterator[SpanRecord]:
    try:
        yield from dump.spans(row)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise SpanFormatError(f"not a record as {product} exports it: {error!r:.200}") from error


def dialect_of(span: SpanRecord) -> Dialect | None:
    """The dialect in which this span is a model call. None: it is no model call."""
    return next((dialect for dialect in dialects() if dialect.recognises(span)), None)


def read_trace(trace: Sequence[SpanRecord]) -> list[Exchange]:
    """The model calls of one trace, each once, in order of their start.

    `trace`: all its spans, each once. If several spans record the same call, the one that keeps
    most is read.
    """
    trace = Trace(_as_json(span) for span in trace)
    paths = _Paths()
    exchanges: list[Exchange] = []
    for span in trace:
        dialect = dialect_of(span)
        if dialect is not None and span.end_time_ns is not None:
            call = _read(span, dialect, trace)
            exchanges.append(
                exchange_of(span, call, dialect.name, dialect.losses(call), paths.path)
            )
    exchanges = _each_once(exchanges, trace)
    return sorted(exchanges, key=lambda e: (e.start_time_ns, e.span_id))


def _as_json(span: SpanRecord) -> SpanRecord:
    """The span with values of JSON's types alone; others, such as bytes, are in `cut`."""
    if all(isinstance(value, str | int | float | None) for value in span.attributes.values()):
        return span
    kept: dict[str, Json] = {}
    for key, value in span.attributes.items():
        with suppress(TypeError, RecursionError):
            kept[key] = _plain(value)
    return replace(span, attributes=kept, cut=span.cut | (span.attributes.keys() - kept.keys()))


def _plain(value: Json) -> Json:
    """The value with lists and dicts for the sequences and mappings in it; TypeError for bytes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | int | float | None):
        raise TypeError(f"expected a JSON value, got {value!r:.80}")
    return value


_READ = (
    sc.GEN_AI,
    "llm.",
    "input.",
    "output.",
    "request_data",
    "response_data",
    "events",
    "langfuse.",
)
"""What the names of attributes that hold a call begin with."""
_TIMES = ("start_time_ns", "end_time_ns")


def _read(span: SpanRecord, dialect: Dialect, trace: Sequence[SpanRecord]) -> ForeignCall:
    """The call of a span, whose attributes may hold anything."""
    try:
        call = dialect.read(span, trace)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        call = ForeignCall("/chat/completions", {})
        call.miss(f"it is not as {dialect.name} writes it ({error!r})", prompt=True)
    check_flags(span, call)
    _check_elided(span, call)
    unknown = frozenset(key for key in span.cut if key.startswith(_READ) or key in _TIMES)
    for sentence in absent(replace(span, cut=unknown)):
        call.miss(sentence, prompt=True)
    if not isinstance(call.reply, Mapping):
        call.reply = None
    elif not _has_shape(call.reply):
        call.miss("its response has not the shape of a response")
        call.reply = None
    check_roles(call)
    return call


def _check_elided(span: SpanRecord, call: ForeignCall) -> None:
    """Note what we left out of the span because earlier ones show it; the rest is no request."""
    for name, what in ((sc.ELIDED_MESSAGES, "messages"), (sc.ELIDED_TOOLS, "tool definitions")):
        count = span.integer(name)
        if count:
            call.miss(
                f"its span leaves out {count} {what} that earlier LLM spans show "
                f"({name}): only an exchange span has its whole request",
                prompt=True,
            )
            for key in ("messages", "prompt", "input"):
                call.request.pop(key, None)


_REPLY_MEMBERS = ("choices", "output", "content")
"""Members of a response that may hold what was sampled, by API."""


def _has_shape(reply: Mapping[str, Json]) -> bool:
    """True if the parts of a response that other code relies on have their types."""
    for key in _REPLY_MEMBERS:
        items = reply.get(key)
        if items is not None and (
            not isinstance(items, list) or not all(isinstance(item, dict) for item in items)
        ):
            return False
    return all(
        isinstance(choice.get("message"), dict) or isinstance(choice.get("text"), str)
        for choice in reply.get("choices") or ()
    )


class _Paths:
    """Builds conversations that share their prefixes, as those of one exchange writer do."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], MessagePath] = {}

    def path(self, messages: Iterable[Json]) -> MessagePath | None:
        path: MessagePath | None = None
        for message in messages:
            key = id(path), dumps(message)
            if key not in self._known:
                self._known[key] = extend(path, message)
            path = self._known[key]
        return path


def exchange_of(
    span: SpanRecord,
    call: ForeignCall,
    source: str,
    lost: list[str],
    path: Callable[[Sequence[Json]], MessagePath | None],
) -> Exchange:
    """The call of a span as an exchange; `source` and `lost` as there, `path` of messages."""
    key = next(
        (
            key
            for key in ("messages", "input")
            if isinstance(value := call.request.get(key), list)
            and all(isinstance(message, Mapping) for message in value)
        ),
        None,
    )
    params = {name: None if name == key else value for name, value in call.request.items()}
    status, error = _status(span, call)
    reply = call.reply
    response_id = reply.get("id") if reply else None
    return Exchange(
        span_id=span.span_id,
        start_time_ns=span.start_time_ns,
        end_time_ns=max(span.end_time_ns or 0, call.ended_ns or 0),
        process="",
        started=0,
        ended=0,
        path=call.path,
        status=status,
        error=error,
        attempts=0,
        status_code=None,
        policy_version=None,
        stream=call.stream,
        response_id=response_id if isinstance(response_id, str) else None,
        key=key,
        members=members_of(params),
        raw_request=None,
        prompt=path(call.request[key]) if key else None,
        prompt_is_known=call.prompt_is_known,
        body=None if reply is None else dumps(reply),
        events=None,
        prompts=call.prompts,
        damage=call.damage,
        source=source,
        lost=lost,
    )


def _status(span: SpanRecord, call: ForeignCall) -> tuple[str, dict[str, str] | None]:
    """Status and error of the call; an unknown ending is noted as damage."""
    if span.status_error is not None:
        error = error_of(span)
        kind = error["type"].rpartition(".")[2]
        return _STATUS_OF.get(kind, "error"), error
    if call.path == "/embeddings":
        return "complete", None
    reply = call.reply or {}
    if not any(map(reply.get, _REPLY_MEMBERS)):
        if not call.damage:
            call.miss("its span has no reply: it was not recorded, or not kept")
        status = "abandoned" if call.stream else "error"
        return status, {"type": "NotRecorded", "message": "the span has no reply"}
    if call.stream and not _came_to_its_end(reply):
        call.miss("nothing says that its reply came to its end")
        return "abandoned", None
    return "complete", None


def _came_to_its_end(reply: Mapping[str, Json]) -> bool:
    """True if the reply to a streamed call has what only the end of a stream brings."""
    if "content" in reply:
        return reply.get("stop_reason") is not None
    if reply.get("usage") or reply.get("output"):
        return True
    return all(choice.get("finish_reason") for choice in reply["choices"])


_STATUS_OF = {"CancelledError": "cancelled", "GeneratorExit": "abandoned"}


def error_of(span: SpanRecord) -> dict[str, str]:
    """Type and message of the error of a span, as far as they are known."""
    kind, message = span.text(sc.ERROR_TYPE), span.status_error
    for event in span.events:
        found = event.attributes.get(sc.EXCEPTION_TYPE)
        if isinstance(found, str):
            kind = found
            text = event.attributes.get(sc.EXCEPTION_MESSAGE)
            message = text if isinstance(text, str) and text else message
    return {"type": kind or "Error", "message": message or ""}


# --- one call, several spans


def _richness(exchange: Exchange) -> tuple[bool, int, str]:
    """Sort key: undamaged calls first, then those that lose fewest facts."""
    return bool(exchange.damage), len(exchange.lost), exchange.source


def _most_and_richest(calls: Sequence[Exchange]) -> tuple[int, tuple[bool, int, str]]:
    """Sort key: the instrumentation with most calls first, then the richest."""
    return -len(calls), _richness(calls[0])


def _each_once(exchanges: list[Exchange], trace: Sequence[SpanRecord]) -> list[Exchange]:
    """Each call once: among spans of several instrumentations, those of the richest.

    Two spans of one instrumentation are two calls. Two spans of different instrumentations are the
    same call if they have the same response id, or if one runs inside the other (or beside it, at
    the same time and with the same conversation) and their ids do not differ.
    """
    scopes = {span.span_id: span.scope for span in trace}
    writers = {e.span_id: (e.source, scopes[e.span_id]) for e in exchanges}
    by_span = {exchange.span_id: exchange for exchange in exchanges}
    same = _Same()
    for exchange in exchanges:
        if exchange.response_id is not None:
            same.join(f"id {exchange.response_id}", exchange.span_id, exchange.response_id)
    dropped: set[str] = set()
    for outer, inner in _inside(exchanges, trace, writers).items():
        for span_ids in _of_others(by_span[outer], [by_span[each] for each in inner], writers):
            if len(span_ids) == 1:
                same.join(outer, span_ids[0])
            elif by_span[outer].response_id is None:
                dropped.add(outer)  # it covers several calls, each of which has its own span
    groups: dict[str, dict[tuple[str, str], list[Exchange]]] = {}
    for exchange in exchanges:
        if exchange.span_id not in dropped:
            written = groups.setdefault(same.root(exchange.span_id), {})
            written.setdefault(writers[exchange.span_id], []).append(exchange)
    # A server may give several answers one id: the instrumentation with most of them wins.
    believed = (min(written.values(), key=_most_and_richest) for written in groups.values())
    return [exchange for calls in believed for exchange in calls]


def _of_others(
    outer: Exchange, inner: Iterable[Exchange], writers: Mapping[str, tuple[str, str]]
) -> Iterable[list[str]]:
    """The span ids of each other instrumentation among the calls inside one."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in inner:
        # A call of one API may be written as one of another: as chat, by most of them.
        is_one = each.path == outer.path or "/embeddings" not in (each.path, outer.path)
        if is_one and writers[each.span_id] != writers[outer.span_id]:
            found.setdefault(writers[each.span_id], []).append(each.span_id)
    return found.values()


class _Same:
    """Sets of spans of the same call (union-find); different response ids are never joined."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (parent := self._parents.get(name, name)) != name:
            name = parent
        return name

    def join(self, one: str, two: str, response_id: str | None = None) -> None:
        one, two = self.root(one), self.root(two)
        ids = {self._ids.get(one), self._ids.get(two), response_id} - {None}
        if one == two or len(ids) > 1:
            return
        self._parents[two] = one
        if ids:
            self._ids[one] = str(ids.pop())


def _inside(
    exchanges: list[Exchange], trace: Sequence[SpanRecord], writers: Mapping[str, tuple[str, str]]
) -> dict[str, list[str]]:
    """For each model call, by span id, those directly inside it, or beside it at the same time."""
    calls = {exchange.span_id for exchange in exchanges}
    parents = {span.span_id: span.parent_span_id for span in trace}
    inner: dict[str, list[str]] = {}
    beside: list[Exchange] = []
    for exchange in sorted(exchanges, key=lambda e: (e.start_time_ns, e.span_id)):
        seen = {exchange.span_id}
        parent = parents.get(exchange.span_id)
        while parent is not None and parent not in calls and parent not in seen:
            seen.add(parent)
            parent = parents.get(parent)
        if parent in calls and parent not in seen:
            inner.setdefault(str(parent), []).append(exchange.span_id)
        else:
            beside.append(exchange)
    if len(set(writers.values())) > 1:
        _add_beside(inner, beside, writers, parents)
    return inner


def _add_beside(
    inner: dict[str, list[str]],
    beside: list[Exchange],
    writers: Mapping[str, tuple[str, str]],
    parents: Mapping[str, str | None],
) -> None:
    """Some instrumentations do not make their span current: then inner spans are beside it."""
    for one in beside:
        matched = {writers[one.span_id]}
        for other in beside:
            writer, within = writers[other.span_id], inner.get(other.span_id, [])
            if (
                writer not in matched
                and writers[one.span_id] not in {writers[span_id] for span_id in within}
                and parents.get(one.span_id) == parents.get(other.span_id) is not None
                and _ask_together(one, other)
            ):
                inner.setdefault(other.span_id, []).append(one.span_id)
                matched.add(writer)


def _ask_together(one: Exchange, two: Exchange) -> bool:
    """True if both have the same conversation and overlap in time."""
    if one.start_time_ns > two.start_time_ns:
        one, two = two, one
    if one.prompt is None or two.prompt is None or (one.end_time_ns or 0) <= two.start_time_ns:
        return False
    return one.prompt.key == two.prompt.key
