"""Exchange spans read back: in any order, and with whatever spans are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.spans.blobs import blobs_named, whole_value
from otel_rollout.spans.exchange import LARGE, PLACEHOLDER, Exchange, RequestMembers, Supplied
from otel_rollout.spans.record import SpanKey, SpanRecord
from otel_rollout.spans.reply_form import as_it_was
from otel_rollout.spans.seals import digest_of
from otel_rollout.spans.token_paths import TokenPath, tokens_in
from otel_rollout.wire import (
    Json,
    JsonText,
    MessagePath,
    check_depth,
    context_members,
    cut_elements,
    cut_members,
    elements,
    expands_too_far,
    loads,
    loads_bounded,
    members,
    try_loads,
    unpack_events,
)

# A small span that names content again and again could become gigabytes. Beyond these bounds, which
# no call of a model comes near, it is damaged.
PROMPT_IDS = 1 << 22
"""Token ids that the prompts of one response have together, if there are several."""
SAME_VALUE = 8
"""Parameters of one request that have one and the same long value."""

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

    `add` takes in what a span, or a copy of it, carries for all of them. `read` gives the exchange
    of a span with all that has come by then. A span that cannot be read is damaged, and no other
    one for it.
    """

    def __init__(self) -> None:
        self._messages: _Chains[MessagePath, JsonText] = _Chains(MessagePath)
        self._tokens: _Chains[TokenPath, TokenPath] = _Chains(lambda path, block: block.after(path))
        self._blocks: dict[str, tuple[bytes, TokenPath]] = {}
        """Digests of token ids, and the ids, by their text, which is on several spans."""
        self._prompts: dict[str, list[str]] = {}
        """Digests of the prompts in an attribute, by its text."""
        self._supplied: dict[str, tuple[int, str]] = {}
        """Number of ids that were held, and the digest of all, in an attribute, by its text."""
        self._shared: dict[str, JsonText] = {}
        self._large: dict[str, JsonText] = {}
        self._same: dict[bytes, JsonText] = {}
        """Messages by digest: one that comes after several prefixes is read once."""
        """Large messages by digest: however often one came, it is one value."""
        self._awaited: dict[str, list[tuple[SpanRecord, set[str]]]] = {}
        """Spans that wait for messages, each with the digests of these, by each digest."""
        self._members: dict[tuple[str | None, str | None], RequestMembers] = {}
        """Members of requests by the texts of the parameters, and of the digests of long ones."""
        self._damage: dict[SpanKey, dict[str, str]] = {}
        """Why attributes of a span cannot be read, by their texts."""

    def add(self, span: SpanRecord) -> None:
        """Take in a span. Each of two copies may hold what was truncated in the other."""
        for key in _PARTS:
            if key in span.attributes:
                self._add_part(span, key)

    def _add_part(self, span: SpanRecord, key: str) -> None:
        """Take in an attribute; what cannot be read is damage."""
        text = span.text(key)
        if text is None:
            return
        try:
            _PARTS[key](self, span, text)
            return
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            why = f"its {key} cannot be read ({error})"
            why += "" if sc.BLOBS in span.attributes else ": was it cut by a length limit?"
        except RecursionError:
            why = f"its {key} cannot be read (it is nested too deep)"
        self._damage.setdefault(span.key, {})[text] = why

    def _add_messages(self, span: SpanRecord, text: str) -> None:
        if sc.REQUEST_REPEATED in span.cut:
            return
        repeated = loads(span.text(sc.REQUEST_REPEATED) or "{}")
        links: list[tuple[bytes, JsonText]] = []
        came: list[str] = []
        missing: set[str] = set()
        read = whole_value if sc.REQUEST_MESSAGES in blobs_named(span.text(sc.BLOBS)) else str
        for number, (data, value) in enumerate(_messages_in(text, read)):
            name = repeated.get(str(number)) if repeated else None
            if name is None:
                own = digest_of(data)
                value = self._same.setdefault(own, value)
                if len(data) > LARGE:
                    came.append(own.hex())
                    self._large[own.hex()] = value
            elif name in self._large:
                own, value = bytes.fromhex(name), self._large[name]
            else:
                missing.add(name)
                continue
            links.append((own, value))
        if not missing:
            self._messages.add(span.text(sc.REQUEST_BASE_DIGEST) or "", links)
        for name in missing:
            self._awaited.setdefault(name, []).append((span, missing))
        for name in came:
            for waiting, others in self._awaited.pop(name, ()):
                others.discard(name)
                if not others:
                    self._add_part(waiting, sc.REQUEST_MESSAGES)

    def _add_shared(self, _: SpanRecord, text: str) -> None:
        for digest, (data, value) in _members_in(text).items():
            if digest_of(data).hex() == digest:
                self._shared[digest] = value

    def _add_supplied(self, _: SpanRecord, text: str) -> None:
        found = loads_bounded(text)
        self._supplied[text] = found["held"], self._add_ids(found["prompt"])

    def _add_prompt_ids(self, _: SpanRecord, text: str) -> None:
        self._prompts[text] = list(map(self._add_ids, loads(text)))

    def _add_ids(self, entry: dict[str, Any]) -> str:
        """Take in the ids of a prompt; returns the digest of all of them."""
        digest = entry["digest"]
        if not isinstance(digest, str):
            raise TypeError(f"expected a digest, got {digest!r:.40}")
        links = []
        for block in entry["blocks"]:
            if block not in self._blocks:
                self._blocks[block] = digest_of(block.encode()), tokens_in(block)
            links.append(self._blocks[block])
        self._tokens.add(entry["base"], links)
        return digest

    def read(self, span: SpanRecord) -> Exchange:
        """The exchange of a span that was added; of several copies, of what they are together."""
        damage = self._damage_of(span)
        text = span.text
        asked, missing = self._read_members(span, damage)
        digest = text(sc.REQUEST_DIGEST) or ""
        # A conversation is known only if all that decides about it is.
        prompt_is_known = (
            digest in self._messages
            and span.cut <= _UNDECISIVE
            and missing.isdisjoint(context_members())
        )
        prompt = self._messages.get(digest) if prompt_is_known else None
        if digest not in self._messages:
            damage.append(
                f"the first {_count(span, sc.REQUEST_BASE_COUNT)} messages of its request "
                f"are on a span that is missing"
            )
        prompts = self._read_prompt_ids(span, damage)
        is_cut = not span.cut.isdisjoint(_RESPONSE)
        body, events = (None, None) if is_cut else _response(span, len(prompts), damage)
        has_blobs = not _RESPONSE.isdisjoint(blobs_named(text(sc.BLOBS)))
        return Exchange(
            span_id=span.span_id,
            start_time_ns=span.start_time_ns,
            end_time_ns=span.end_time_ns,
            process=text(sc.EXCHANGE_PROCESS) or "",
            started=_count(span, sc.EXCHANGE_STARTED),
            ended=_count(span, sc.EXCHANGE_ENDED),
            path=text(sc.REQUEST_PATH) or "",
            status=_status(span, damage),
            error=_error(text(sc.EXCHANGE_ERROR), damage),
            attempts=_count(span, sc.EXCHANGE_ATTEMPTS),
            status_code=span.integer(sc.RESPONSE_STATUS_CODE),
            policy_version=span.label(sc.EXCHANGE_POLICY_VERSION),
            stream=span.boolean(sc.RESPONSE_STREAM) is True,
            response_id=None if is_cut else text(sc.RESPONSE_ID),
            key=text(sc.REQUEST_KEY),
            members=asked,
            raw_request=text(sc.REQUEST_RAW),
            prompt=prompt,
            prompt_is_known=prompt_is_known,
            body=body,
            events=events,
            prompts=prompts,
            supplied=self._read_supplied(span, damage),
            damage=damage,
            session=text(sc.EXCHANGE_SESSION),
            refused=text(sc.EXCHANGE_REFUSED),
            policy_model=text(sc.EXCHANGE_POLICY_MODEL),
            logprobs_mode=text(sc.EXCHANGE_LOGPROBS_MODE),
            last_policy_version=span.label(sc.EXCHANGE_LAST_POLICY_VERSION),
            has_blobs=has_blobs,
            **as_it_was(text, damage),
        )

    def _damage_of(self, span: SpanRecord) -> list[str]:
        """Warnings for what a span lacks, and for what was not written as it is read here."""
        damage = absent(span)
        if unreadable := self._damage.get(span.key):
            there = map(span.text, _PARTS)
            damage += [unreadable[text] for text in there if text in unreadable]
        if (version := _count(span, sc.EXCHANGE_VERSION)) > sc.SCHEMA_VERSION:
            damage.append(
                f"it was written in format {version}, this version "
                f"reads up to {sc.SCHEMA_VERSION}: update otel-rollout"
            )
        if span.boolean(sc.EXCHANGE_REDACTED):
            damage.append("it was redacted: what the model saw and said is not known exactly")
        return damage

    def _read_members(self, span: SpanRecord, damage: list[str]) -> tuple[RequestMembers, set[str]]:
        """The members of the request, and the names of those whose values did not come."""
        name = span.text(sc.REQUEST_PARAMS), span.text(sc.REQUEST_SHARED)
        if name in self._members:
            return self._members[name], set()
        found, missing = _params_in(name[0], damage), set[str]()
        for key, digest in _shared_digests(name[1], damage).items():
            if digest in self._shared:
                found[key] = self._shared[digest]
            else:
                missing.add(key)
                found.pop(key, None)
                damage.append(f"the value of its parameter {key!r} is on a span that is missing")
        asked = RequestMembers(found)
        if not damage:
            self._members[name] = asked
        return asked, missing

    def _read_prompt_ids(self, span: SpanRecord, damage: list[str]) -> list[TokenPath | None]:
        text = span.text(sc.RESPONSE_PROMPT_IDS)
        digests = [] if text is None else self._prompts.get(text)
        if digests is None or sc.RESPONSE_PROMPT_IDS in span.cut:
            return [None]  # where it cannot be read, `add` reported it
        paths = [self._tokens.get(digest) for digest in digests]
        if not all(digest in self._tokens for digest in digests):
            damage.append("the beginning of its prompt token ids is on a span that is missing")
        several = paths if len(paths) > 1 else ()
        length = sum(path.length for path in several if path)
        if length > PROMPT_IDS:
            damage.append(f"its {len(paths)} prompts would have {length} token ids")
            return [None] * len(paths)
        return paths

    def _read_supplied(self, span: SpanRecord, damage: list[str]) -> Supplied | None:
        found = self._supplied.get(span.text(sc.REQUEST_SUPPLIED) or "")
        if found is None:
            return None  # where it cannot be read, `add` reported it
        held, path = found[0], self._tokens.get(found[1])
        if path is None:
            damage.append("the beginning of the token ids it was asked with is missing")
        return Supplied(held, path) if isinstance(held, int) else None


DIFFERS = "copies of its span differ in {key}"
WAS_CUT = "its {key} was cut, or did not come"


def absent(span: SpanRecord) -> list[str]:
    """A warning for each attribute that the span should have and has not."""
    if not span.cut:
        return []
    disputed = span.disputed
    return [(DIFFERS if key in disputed else WAS_CUT).format(key=key) for key in sorted(span.cut)]


_RESPONSE = frozenset((sc.RESPONSE_ID, sc.RESPONSE_STREAM, sc.RESPONSE_BODY, sc.RESPONSE_EVENTS))

# What was asked shows without these: digests show whether what they name has come.
_UNDECISIVE = _RESPONSE | {
    *(sc.RESPONSE_STATUS_CODE, sc.RESPONSE_PROMPT_IDS, sc.RESPONSE_FORM, sc.REQUEST_ADDED),
    *(sc.EXCHANGE_RETRIED, sc.EXCHANGE_SESSION, sc.EXCHANGE_REFUSED, sc.EXCHANGE_POLICY_MODEL),
    *(sc.EXCHANGE_JUDGED, sc.EXCHANGE_ERROR, sc.ERROR_TYPE, sc.EXCHANGE_LOGPROBS_MODE),
    *(sc.REQUEST_MESSAGES, sc.REQUEST_REPEATED, sc.REQUEST_BASE_DIGEST),
    *(sc.REQUEST_BASE_COUNT, sc.REQUEST_SHARED_VALUES, sc.REQUEST_SUPPLIED),
}

_PARTS = {
    sc.REQUEST_MESSAGES: ExchangeReader._add_messages,
    sc.REQUEST_SHARED_VALUES: ExchangeReader._add_shared,
    sc.RESPONSE_PROMPT_IDS: ExchangeReader._add_prompt_ids,
    sc.REQUEST_SUPPLIED: ExchangeReader._add_supplied,
}


def _count(span: SpanRecord, key: str) -> int:
    return span.integer(key) or 0


def _object(text: str | None, damage: list[str]) -> dict[str, Json]:
    if text is None:
        return {}
    value = try_loads(text)
    if not isinstance(value, dict):
        damage.append(f"{text[:40]!r} should be a JSON object: was it cut by a length limit?")
        return {}
    return value


def _params_in(text: str | None, damage: list[str]) -> dict[str, JsonText]:
    """The members of the object that a text is; damage, and none, where it is no object."""
    cuts = None if text is None else cut_members(text)
    if cuts is None:
        return {name: JsonText(None, value) for name, value in _object(text, damage).items()}
    return {name: JsonText(bytes(cut).decode()) for name, cut in cuts.items()}


def _messages_in(text: str, read: Callable[[str], str] = str) -> Iterator[tuple[bytes, JsonText]]:
    """The bytes of each element of the list that a text is, and its JSON.

    read: gives what stands for the text of an element.
    ValueError for what is no list, while they are read.
    """
    cuts = cut_elements(text)
    for cut in cuts or ():
        whole = read(bytes(cut).decode())
        yield whole.encode(), JsonText(whole)
    if cuts is None:
        check_depth(text)
        for value, start, end in elements(text, 1):
            yield text[start:end].encode(), JsonText(None, value)


def _members_in(text: str) -> dict[str, tuple[bytes, JsonText]]:
    """The bytes of each member of the object that a text is, and its JSON. ValueError for none."""
    cuts = cut_members(text)
    if cuts is not None:
        texts = {name: bytes(cut) for name, cut in cuts.items()}
        return {name: (data, JsonText(data.decode())) for name, data in texts.items()}
    check_depth(text)
    return {
        name: (text[start:end].encode(), JsonText(None, loads(text[start:end])))
        for name, start, end in members(text, lambda _key, _start: None)
    }


def _shared_digests(text: str | None, damage: list[str]) -> dict[str, str]:
    """The digests of long parameters, by the names of the parameters."""
    found = {k: v for k, v in _object(text, damage).items() if isinstance(v, str)}
    if len(found) > SAME_VALUE * len(set(found.values())):
        damage.append(f"{len(found)} of its parameters would have the same long value")
        return {}
    return found


def _error(text: str | None, damage: list[str]) -> dict[str, str] | None:
    """Type and message of what went wrong. None: nothing did."""
    value = _object(text or None, damage)
    if not value:
        return None
    error = {key: str(value.get(key, "")) for key in ("type", "message")}
    if error != value:
        damage.append(
            f"its {sc.EXCHANGE_ERROR} should have a type and a message, both texts; "
            f"got {value!r:.80}"
        )
    return error


_STATUSES = ("complete", "error", "cancelled", "abandoned")


def _status(span: SpanRecord, damage: list[str]) -> str:
    """How the call ended; `abandoned` where it is not known."""
    status = span.text(sc.EXCHANGE_STATUS) or "abandoned"
    if status in _STATUSES:
        return status
    damage.append(f"its status is {status[:40]!r}, expected one of {', '.join(_STATUSES)}")
    return "abandoned"


def _response(span: SpanRecord, prompts: int, damage: list[str]) -> tuple[str | None, str | None]:
    """The response's body or packed events, unless they are not what the writer writes."""
    body, events = span.text(sc.RESPONSE_BODY), span.text(sc.RESPONSE_EVENTS)
    text = body or ""
    try:
        if events is not None:
            if expands_too_far(events):
                raise ValueError(f"{len(events)} characters would become far more events")
            is_common = any(PLACEHOLDER in part for part in events.split("\n\n", 2)[:2])
            text = "\n\n".join(unpack_events(events)) if is_common else events
        is_named = sc.RESPONSE_PROMPT_IDS in span.attributes and not span.is_checked
        if is_named and text.count(PLACEHOLDER) > prompts:
            raise ValueError(f"it names {prompts} prompts {text.count(PLACEHOLDER)} times")
    except ValueError as error:
        damage.append(f"its response cannot be read ({error})")
        return None, None
    return body, events
