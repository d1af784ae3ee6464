"""Exchange spans read back: in any order, and with whatever spans are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.spans.exchange import (
    LARGE,
    Exchange,
    TokenPath,
    context_key,
    digest_of,
    extend_tokens,
)
from otel_rollout.spans.record import SpanRecord, united
from otel_rollout.wire import (
    Json,
    MessagePath,
    context_members,
    dumps,
    elements,
    extend,
    loads,
    members,
)

_Path = TypeVar("_Path")

_Value = TypeVar("_Value")


class _Chains(Generic[_Path, _Value]):
    """Paths by digest. A path whose prefix has not come yet waits for it.

    A link is the digest of what comes next, and its value.
    """

    def __init__(self, extend_path: Callable[[_Path | None, _Value], _Path]) -> None:
        self._extend = extend_path
        self._known: dict[str, _Path | None] = {"": None}
        self._waiting: dict[str, list[list[tuple[bytes, _Value]]]] = {}

    def add(self, base: str, links: list[tuple[bytes, _Value]]) -> None:
        ready = [(base, links)]
        while ready:
            name, links = ready.pop()
            if name not in self._known:
                self._waiting.setdefault(name, []).append(links)
                continue
            path, digest = self._known[name], bytes.fromhex(name)
            for own, value in links:
                digest = digest_of(digest, own)
                name = digest.hex()
                if name not in self._known:
                    self._known[name] = self._extend(path, value)
                    ready += [(name, rest) for rest in self._waiting.pop(name, ())]
                path = self._known[name]

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def get(self, name: str) -> _Path | None:
        return self._known.get(name)


class ExchangeReader:
    """Reads exchange spans back; they may come in any order, more than once, and with gaps.

    `add` takes a span; what it refers to may come later. `read` gives an exchange with all that
    has come by then.
    """

    def __init__(self) -> None:
        self._messages: _Chains[MessagePath, Json] = _Chains(extend)
        self._tokens: _Chains[TokenPath, list[int]] = _Chains(extend_tokens)
        self._shared: dict[str, Json] = {}
        self._large: dict[str, Json] = {}
        """Large messages by digest: however often one came, it is one value."""
        self._awaited: dict[str, list[SpanRecord]] = {}
        """Spans with messages that are on others, by the digest of the first that has not come."""
        self._context_keys: dict[tuple[str, ...], bytes] = {}
        self._spans: dict[str, tuple[SpanRecord, list[str]]] = {}

    def add(self, span: SpanRecord) -> None:
        """Take in a span. Each of two copies may hold what was truncated in the other."""
        known = self._spans.get(span.span_id)
        if known is not None:
            span = united(known[0], span)
            if span is known[0]:
                return
        damage: list[str] = []
        self._spans[span.span_id] = span, damage
        for key, part in _PARTS.items():
            text = span.text(key)
            if text is None:
                continue
            try:
                part(self, span, text)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damage.append(f"its {key} cannot be read ({error}): was it cut by a length limit?")
        if (span.integer(sc.EXCHANGE_VERSION) or 0) > sc.SCHEMA_VERSION:
            damage.append(
                f"it was written in format {span.integer(sc.EXCHANGE_VERSION)}, this version "
                f"reads up to {sc.SCHEMA_VERSION}: update otel-rollout"
            )

    def _add_messages(self, span: SpanRecord, text: str) -> None:
        if sc.REQUEST_REPEATED in span.cut:
            return
        repeated = loads(span.text(sc.REQUEST_REPEATED) or "{}")
        links: list[tuple[bytes, Json]] = []
        came: list[str] = []
        missing: str | None = None
        for number, (value, start, end) in enumerate(elements(text, 1)):
            name = repeated.get(str(number))
            if name is None:
                data = text[start:end].encode()
                own = digest_of(data)
                if len(data) > LARGE:
                    came.append(own.hex())
                    value = self._large.setdefault(own.hex(), value)
            elif name in self._large:
                own, value = bytes.fromhex(name), self._large[name]
            else:
                missing = name
                continue
            links.append((own, value))
        if missing is None:
            self._messages.add(span.text(sc.REQUEST_BASE_DIGEST) or "", links)
        else:
            self._awaited.setdefault(missing, []).append(span)
        for digest in came:
            for waiting in self._awaited.pop(digest, ()):
                self._add_messages(waiting, waiting.text(sc.REQUEST_MESSAGES) or "")

    def _add_shared(self, _: SpanRecord, text: str) -> None:
        for digest, start, end in members(text, lambda _key, _start: None):
            if digest_of(text[start:end].encode()).hex() == digest:
                self._shared[digest] = loads(text[start:end])

    def _add_prompt_ids(self, _: SpanRecord, text: str) -> None:
        for entry in loads(text):
            blocks = entry["blocks"]
            links = [(digest_of(block.encode()), loads(f"[{block}]")) for block in blocks]
            self._tokens.add(entry["base"], links)

    def read(self, span_id: str) -> Exchange:
        """The exchange of a span that was added."""
        span, damage = self._spans[span_id]
        damage = [*(f"its {key} was cut, or did not come" for key in sorted(span.cut)), *damage]
        params = _object(span.text(sc.REQUEST_PARAMS), damage)
        shared = _object(span.text(sc.REQUEST_SHARED), damage)
        missing = {key for key, digest in shared.items() if digest not in self._shared}
        for key, digest in shared.items():
            if key not in missing:
                params[key] = self._shared[digest]
            else:
                params.pop(key, None)
                damage.append(f"the value of its parameter {key!r} is on a span that is missing")
        digest = span.text(sc.REQUEST_DIGEST) or ""
        # A conversation is known only if all that decides about it is.
        prompt_is_known = (
            digest in self._messages
            and span.cut <= _UNDECISIVE
            and missing.isdisjoint(context_members())
        )
        prompt = self._messages.get(digest) if prompt_is_known else None
        if digest not in self._messages:
            damage.append(
                f"the first {span.integer(sc.REQUEST_BASE_COUNT) or 0} messages of its request "
                f"are on a span that is missing"
            )
        if span.boolean(sc.EXCHANGE_REDACTED):
            damage.append("it was redacted: what the model saw and said is not known exactly")
        cut_response = not span.cut.isdisjoint(_RESPONSE)
        body = None if cut_response else span.text(sc.RESPONSE_BODY)
        events = None if cut_response else span.text(sc.RESPONSE_EVENTS)
        error = span.text(sc.EXCHANGE_ERROR)
        return Exchange(
            span_id=span.span_id,
            start_time_ns=span.start_time_ns,
            end_time_ns=span.end_time_ns,
            process=span.text(sc.EXCHANGE_PROCESS) or "",
            started=span.integer(sc.EXCHANGE_STARTED) or 0,
            ended=span.integer(sc.EXCHANGE_ENDED) or 0,
            path=span.text(sc.REQUEST_PATH) or "",
            status=span.text(sc.EXCHANGE_STATUS) or "abandoned",
            error=_object(error, damage) if error else None,
            attempts=span.integer(sc.EXCHANGE_ATTEMPTS) or 0,
            status_code=span.integer(sc.RESPONSE_STATUS_CODE),
            policy_version=span.label(sc.EXCHANGE_POLICY_VERSION),
            stream=span.boolean(sc.RESPONSE_STREAM) is True,
            response_id=None if cut_response else span.text(sc.RESPONSE_ID),
            key=span.text(sc.REQUEST_KEY),
            params=params,
            raw_request=span.text(sc.REQUEST_RAW),
            prompt=prompt,
            prompt_is_known=prompt_is_known,
            body=body,
            events=events,
            prompts=self._read_prompt_ids(span, damage),
            damage=damage,
            context_key=self._context_key(params, shared) if prompt_is_known else b"",
        )

    def _context_key(self, params: dict[str, Json], shared: dict[str, str]) -> bytes:
        context = context_members()
        if shared.keys().isdisjoint(context):
            return context_key(params)
        name = tuple(shared.get(key) or dumps(params.get(key)) for key in context)
        if name not in self._context_keys:
            self._context_keys[name] = context_key(params)
        return self._context_keys[name]

    def _read_prompt_ids(self, span: SpanRecord, damage: list[str]) -> list[TokenPath | None]:
        if sc.RESPONSE_PROMPT_IDS in span.cut:
            return [None]
        try:
            digests = [row["digest"] for row in loads(span.text(sc.RESPONSE_PROMPT_IDS) or "[]")]
        except (ValueError, KeyError, TypeError):
            return [None]  # `add` reported it
        if not all(digest in self._tokens for digest in digests):
            damage.append("the beginning of its prompt token ids is on a span that is missing")
        return [self._tokens.get(digest) for digest in digests]


_RESPONSE = frozenset((sc.RESPONSE_ID, sc.RESPONSE_STREAM, sc.RESPONSE_BODY, sc.RESPONSE_EVENTS))

# What was asked shows without these: digests tell whether what they name has come.
_UNDECISIVE = _RESPONSE | {
    sc.RESPONSE_STATUS_CODE,
    sc.RESPONSE_PROMPT_IDS,
    sc.EXCHANGE_ERROR,
    sc.ERROR_TYPE,
    sc.REQUEST_MESSAGES,
    sc.REQUEST_REPEATED,
    sc.REQUEST_COUNT,
    sc.REQUEST_BASE_DIGEST,
    sc.REQUEST_BASE_COUNT,
    sc.REQUEST_SHARED_VALUES,
}

_PARTS = {
    sc.REQUEST_MESSAGES: ExchangeReader._add_messages,
    sc.REQUEST_SHARED_VALUES: ExchangeReader._add_shared,
    sc.RESPONSE_PROMPT_IDS: ExchangeReader._add_prompt_ids,
}


def _object(text: str | None, damage: list[str]) -> dict[str, Json]:
    if text is None:
        return {}
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        damage.append(f"{text[:40]!r} should be a JSON object: was it cut by a length limit?")
        return {}
    return value
