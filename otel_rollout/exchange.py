"""The exchange span's format: one model call, lossless, at the cost of what is new in it.

A conversation sends its whole past with every request. The writer (`ExchangeWriter`, one per
rollout and process) therefore writes only the messages that earlier requests of the rollout did
not carry, as verbatim slices of the body, and names the rest by a content digest. The reader
(`ExchangeReader`) resolves those digests from whichever spans arrived, in any order. A prefix
that no span carries is reported as missing; nothing is ever guessed.

Digest of a list of messages, where h is blake2b with 16 bytes: `d(0) = b""`,
`d(k) = h(d(k-1) + h(bytes of message k))`.
Every message is carried by `COPIES` exchanges, so a lossy lane that loses one span loses one
exchange. The token ids of prompts work the same way, on the text of the array.

What a response holds is written as it came: parsing and merging is the reader's work, and it is
done when somebody asks.
"""

from __future__ import annotations

import re
from array import array
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Generic, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.messages import (
    Json,
    MessagePath,
    copy_json,
    dumps,
    extend,
    loads,
    path_messages,
    scan,
    visible_content,
    visible_key,
)
from otel_rollout.spans import SpanRecord, united
from otel_rollout.streams import merge, pack_events, unpack_events

EXACT_SOURCE = "exchange"
"""`Exchange.source` of what was read from our own spans."""

COPIES = 2
"""How many exchanges carry each message."""

SHARED_LENGTH = 256
"""Parameters (tools, instructions, ...) with more JSON text than this are named by digest."""

LARGE = 1024
"""A message with more bytes is written again behind another beginning only by its digest.

Such as the screenshots that an agent keeps while it shortens what is before them.
"""

_ROOT = b""
_MESSAGE_KEYS = ("messages", "input", "prompt")
_space = re.compile(r"[ \t\n\r]*").match
_Attributes = dict[str, "str | int | float | bool"]


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


# --- JSON structure. Writers scan a latin-1 view of the body: offsets are byte offsets, and no
# --- byte of a multi-byte character can be mistaken for JSON syntax.


def _skip(text: str, position: int) -> int:
    match = _space(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, wanted: str) -> int:
    position = _skip(text, position)
    if not text.startswith(wanted, position):
        raise ValueError(f"not JSON at character {position}: expected {wanted!r}")
    return position + len(wanted)


def _elements(text: str, position: int) -> Iterator[tuple[Json, int, int]]:
    """`(value, start, end)` of the array elements from `position` on; `text[end]` follows each.

    `position` is behind `[` or behind an earlier element.
    """
    position = _skip(text, position)
    while not text.startswith("]", position):
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        value, end = scan(text, position)
        yield value, position, end
        position = _skip(text, end)
        if not text.startswith((",", "]"), position):
            raise ValueError(f"not JSON at character {position}: expected ',' or ']'")


def _is_list_of_objects(text: str, start: int) -> bool:
    return text.startswith("[", start) and text.startswith("{", _skip(text, start + 1))


def _members(text: str, ends: Callable[[str, int], int | None]) -> Iterator[tuple[str, int, int]]:
    """`(key, start, end)` of the members of the JSON object that `text` is.

    `ends(key, start)` may know where a value ends; None has it scanned.
    """
    position = _skip(text, _expect(text, 0, "{"))
    while not text.startswith("}", position):
        key, position = scan(text, position)
        if not isinstance(key, str):
            raise ValueError("not JSON: an object's key is a string")
        start = _skip(text, _expect(text, position, ":"))
        end = ends(key, start)
        if end is None:
            _, end = scan(text, start)
        yield key, start, end
        position = _skip(text, end)
        if not text.startswith("}", position):
            position = _skip(text, _expect(text, position, ","))
    if _skip(text, position + 1) != len(text):
        raise ValueError("not JSON: text behind the object")


# --- Token ids


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """Token ids that share their beginning with those of earlier calls (None is the empty one)."""

    parent: TokenPath | None
    ids: array[int]
    """The ids behind those of `parent`."""
    length: int

    def to_list(self) -> list[int]:
        """All ids, first to last."""
        blocks: list[array[int]] = []
        path: TokenPath | None = self
        while path is not None:
            blocks.append(path.ids)
            path = path.parent
        ids: list[int] = []
        for block in reversed(blocks):
            ids += block.tolist()
        return ids


def extend_tokens(path: TokenPath | None, ids: list[int]) -> TokenPath:
    """The path that continues `path` with these ids. OverflowError beyond 64 bits."""
    length = len(ids) + (path.length if path else 0)
    try:
        return TokenPath(path, array("i", ids), length)
    except OverflowError:
        return TokenPath(path, array("q", ids), length)


# --- Writing


@dataclass(slots=True, eq=False)
class _Prefix:
    """A beginning of an array that an earlier body had: its end, what it digests to, who has it."""

    end: int
    """Bytes from behind `[` to the end of the prefix's last element."""
    raw: bytes
    """Digest of those bytes: what a new body is compared with."""
    digest: bytes
    """Digest of the elements: what goes on the wire."""
    count: int
    copies: int = 0
    own: bytes = b""
    """Digest of the last element alone."""
    children: list[_Prefix] = field(default_factory=list)

    def add(self, child: _Prefix) -> None:
        insort(self.children, child, key=attrgetter("end"))


def _longest_known(root: _Prefix, view: memoryview) -> tuple[list[_Prefix], blake2b]:
    """The prefixes of `view` that are in the tree, shortest first, and the hasher of the last.

    One pass over the bytes.
    """
    chain = [root]
    hasher, position = blake2b(digest_size=16), 0
    known = hasher.copy()
    while True:
        for child in chain[-1].children:
            if child.end >= len(view):
                return chain, known
            hasher.update(view[position : child.end])
            position = child.end
            # A number that goes on behind the prefix would be another element.
            if hasher.digest() == child.raw and view[position] in b",] \t\r\n":
                chain.append(child)
                known = hasher.copy()
                break
        else:
            return chain, known


@dataclass(slots=True, eq=False)
class _Messages:
    """The array of messages in one body: what of it is known, what is new."""

    key: str
    start: int
    end: int
    chain: list[_Prefix]
    new: list[_Prefix]


class ExchangeWriter:
    """Writes the exchanges of one rollout in one process as span attributes.

    Not thread-safe. It keeps digests, not content: about 200 bytes per message.
    """

    def __init__(self) -> None:
        self._messages = _Prefix(0, b"", _ROOT, 0, copies=COPIES)
        self._prompts = _Prefix(0, b"", _ROOT, 0, copies=COPIES)
        self._shared: dict[str, list[tuple[int, bytes]]] = {}
        self._carried: dict[bytes, int] = {}
        self._large: dict[bytes, int] = {}

    def request(self, body: bytes) -> _Attributes:
        """Attributes of a request body as it was sent; the next bodies build upon it."""
        try:
            return self._request(body)
        except (ValueError, RecursionError):
            return {sc.REQUEST_RAW: _text(body)}

    def _request(self, body: bytes) -> _Attributes:
        body.decode()  # a body that is no UTF-8 is kept raw
        text, view = body.decode("latin-1"), memoryview(body)
        messages: _Messages | None = None

        def ends(key: str, start: int) -> int | None:
            nonlocal messages
            if messages is None and key in _MESSAGE_KEYS and _is_list_of_objects(text, start):
                messages = self._find_messages(key, text, view, start + 1)
                return messages.end
            for length, digest in self._shared.get(key, ()):
                end = start + length
                if end < len(text) and text[end] in ",} " and _digest(view[start:end]) == digest:
                    return end
            return None

        members = list(_members(text, ends))
        # Nothing fails from here on: what this writer remembers has been written.
        attributes = self._write_messages(messages, view) if messages else {}
        params: list[str] = []
        shared: dict[str, str] = {}
        values: list[str] = []
        for key, start, end in members:
            if messages and end == messages.end:
                params.append(f"{dumps(key)}:null")
                continue
            if end - start <= SHARED_LENGTH:
                params.append(f"{dumps(key)}:{_text(body[start:end])}")
                continue
            params.append(f"{dumps(key)}:null")
            digest = _digest(view[start:end])
            shared[key] = digest.hex()
            known = self._shared.setdefault(key, [])
            if (end - start, digest) not in known:
                known.insert(0, (end - start, digest))
                del known[8:]
            if self._carried.get(digest, 0) < COPIES:
                self._carried[digest] = self._carried.get(digest, 0) + 1
                values.append(f'"{digest.hex()}":{_text(body[start:end])}')
        attributes[sc.REQUEST_PARAMS] = "{" + ",".join(params) + "}"
        if shared:
            attributes[sc.REQUEST_SHARED] = dumps(shared)
        if values:
            attributes[sc.REQUEST_SHARED_VALUES] = "{" + ",".join(values) + "}"
        return attributes

    def _find_messages(self, key: str, text: str, view: memoryview, start: int) -> _Messages:
        chain, hasher = _longest_known(self._messages, view[start:])
        last = chain[-1]
        position = end = start + last.end
        new: list[_Prefix] = []
        for _, first, end in _elements(text, position):
            hasher.update(view[position:end])
            own = _digest(view[first:end])
            digest = _digest(last.digest, own)
            last = _Prefix(end - start, hasher.digest(), digest, last.count + 1, own=own)
            new.append(last)
            position = end
        return _Messages(key, start, _expect(text, end, "]"), chain, new)

    def _write_messages(self, messages: _Messages, view: memoryview) -> _Attributes:
        chain, new = messages.chain, messages.new
        base = next(prefix for prefix in reversed(chain) if prefix.copies >= COPIES)
        last = new[-1] if new else chain[-1]
        for parent, child in zip([chain[-1], *new], new, strict=False):
            parent.add(child)
        written = [*chain[chain.index(base) + 1 :], *new]
        pieces: list[bytes | memoryview] = []
        repeated: dict[int, str] = {}
        position = base.end
        for number, prefix in enumerate(written):
            element: bytes | memoryview = view[
                messages.start + position : messages.start + prefix.end
            ]
            position = prefix.end
            prefix.copies += 1
            if len(element) > LARGE:
                copies = self._large.get(prefix.own, 0)
                self._large[prefix.own] = copies + 1
                if copies >= COPIES:
                    repeated[number] = prefix.own.hex()
                    element = b",null"
            pieces.append(element)
        attributes: _Attributes = {
            sc.REQUEST_KEY: messages.key,
            sc.REQUEST_MESSAGES: f"[{_text(b''.join(pieces).lstrip(_BETWEEN))}]",
            sc.REQUEST_COUNT: last.count,
            sc.REQUEST_DIGEST: last.digest.hex(),
            sc.REQUEST_BASE_DIGEST: base.digest.hex(),
            sc.REQUEST_BASE_COUNT: base.count,
        }
        if repeated:
            attributes[sc.REQUEST_REPEATED] = dumps(repeated)
        return attributes

    def response(self, body: bytes, *, events: bool = False) -> _Attributes:
        """Attributes of a response body, or of the events of a streamed one; any text is kept."""
        attributes: _Attributes = {}
        try:
            body, prompts = self._cut_prompts(body)
            if prompts:
                attributes[sc.RESPONSE_PROMPT_IDS] = f"[{','.join(prompts)}]"
        except ValueError:
            pass  # token ids that are no integers stay in the body
        text = _text(body)
        if events:
            text = pack_events(text)
        attributes[sc.RESPONSE_EVENTS if events else sc.RESPONSE_BODY] = text
        return attributes

    def _cut_prompts(self, body: bytes) -> tuple[bytes, list[str]]:
        arrays = sorted(_prompt_arrays(body))
        kept = []
        position = 0
        for start, end in arrays:
            kept.append(body[position : start - 1])
            position = end + 1
        kept.append(body[position:])
        if not arrays or any(_PLACEHOLDER in piece for piece in kept):
            return body, []
        for index in range(len(arrays)):
            kept[index] += b"%b%d}" % (_PLACEHOLDER, index)
        return b"".join(kept), [self._prompt(body[start:end]) for start, end in arrays]

    def _prompt(self, ids: bytes) -> str:
        view = memoryview(ids + b"]")
        chain, hasher = _longest_known(self._prompts, view)
        base = next(prefix for prefix in reversed(chain) if prefix.copies >= COPIES)
        if len(ids) > chain[-1].end:
            known = chain[-1]
            digest = _digest(known.digest, _digest(_block(ids, known.end, len(ids))))
            hasher.update(view[known.end : len(ids)])
            chain.append(_Prefix(len(ids), hasher.digest(), digest, known.count + 1))
            known.add(chain[-1])
        blocks: list[str] = []
        position = base.end
        for prefix in chain[chain.index(base) + 1 :]:
            prefix.copies += 1
            blocks.append(f'"{_block(ids, position, prefix.end).decode()}"')
            position = prefix.end
        digests = f'"base":"{base.digest.hex()}","digest":"{chain[-1].digest.hex()}"'
        return f'{{{digests},"blocks":[{",".join(blocks)}]}}'


def _block(ids: bytes, start: int, end: int) -> bytes:
    """The ids between two ends of known prefixes, without the comma before them."""
    return ids[start:end].lstrip(b" ,")


_BETWEEN = b" ,\t\r\n"
_PLACEHOLDER = b'{"packed":'
_PROMPT_IDS = ((b'"prompt_token_ids"', b""), (b'"input_ids"', b'"sglext"'))
"""The members of a reply that hold token ids of a prompt, and what must come before them."""
_array = re.compile(rb"\s*:\s*\[").match


def _prompt_arrays(body: bytes) -> Iterator[tuple[int, int]]:
    """`(start, end)` of the text inside every `"prompt_token_ids": [...]`, and its like.

    A string of the body cannot be mistaken for one: it would have its quotes escaped. And if it
    were, what is cut out is put back the same.
    """
    for name, before in _PROMPT_IDS:
        position = body.find(before)
        while position >= 0 and (position := body.find(name, position)) >= 0:
            behind = position + len(name)
            opening = _array(body, behind)
            if opening:
                end = body.find(b"]", opening.end())
                ids = body[opening.end() : end]
                if end >= 0 and ids and not ids.translate(None, b"0123456789, "):
                    yield opening.end(), end
                    behind = end
            position = behind


def _text(body: bytes) -> str:
    """The body as text that every exporter can carry; bytes that are no UTF-8 stay visible."""
    return body.decode("utf-8", "backslashreplace")


# --- Reading


@dataclass(slots=True, eq=False)
class Exchange:
    """One exchange span, read: what was asked, what came back, how it ended."""

    span_id: str
    start_time_ns: int
    end_time_ns: int | None
    process: str
    """The process that made the call; `started` and `ended` compare only within one."""
    started: int
    """The rollout's logical clock when the call began."""
    ended: int
    """The rollout's logical clock when the last byte of the reply had come."""
    path: str
    status: str
    error: dict[str, str] | None
    attempts: int
    status_code: int | None
    policy_version: str | int | None
    stream: bool
    response_id: str | None
    """As capture found it without reading the response; see `reply_id`."""
    key: str | None
    """The member of the request that holds the conversation, such as `messages`."""
    params: dict[str, Json]
    """The request as it was ordered; None in the place of its conversation."""
    raw_request: str | None
    """The request's text, where it is no JSON object."""
    prompt: MessagePath | None
    """The conversation of the request; None where it has none, or where that is not known."""
    prompt_is_known: bool
    """False where the span with its beginning is missing."""
    body: str | None
    """The response's text; prompt token ids are replaced by `{"packed": index}`. None where it
    is known only as `reply`."""
    events: str | None
    """The packed events of a streamed response, instead of `body`."""
    prompts: list[TokenPath | None]
    """The prompt token ids; None where the span with their beginning is missing."""
    damage: list[str]
    """What this span should hold and does not, in sentences."""
    context_key: bytes = b""
    """Equal for requests that may continue one another: same tools, same instructions."""
    source: str = EXACT_SOURCE
    """Where it was read: `exchange`, our own span, or the name of a dialect."""
    lost: list[str] = field(default_factory=list)
    """What its dialect does not keep of this call, in words; [] for our own span."""
    _reply: Json = ...  # not read yet

    @property
    def reply(self) -> Json:
        """The response as JSON, a stream in unstreamed shape; None where it is no JSON.

        Prompt token ids are still replaced: see `token_ids`.
        """
        if self._reply is ...:
            try:
                self._reply = self._parse(lambda text: text)
            except (ValueError, RecursionError):
                self._reply = None
        return self._reply

    @property
    def reply_id(self) -> str | None:
        """The response id; None where the server gave none."""
        found = self.reply.get("id") if isinstance(self.reply, dict) else None
        return found if isinstance(found, str) and found else self.response_id

    def token_ids(self, value: Json) -> list[int] | None:
        """The ids that a field of `reply` stands for; None where there are none."""
        path = self.token_path(value)
        return path.to_list() if path else None

    def token_path(self, value: Json) -> TokenPath | None:
        """The same as a path, which shares its beginning with those of other calls."""
        if isinstance(value, dict) and isinstance(index := value.get("packed"), int):
            return self.prompts[index] if index < len(self.prompts) else None
        if not isinstance(value, list) or not value:
            return None
        try:
            return extend_tokens(None, value)
        except (TypeError, OverflowError):  # no token ids, whatever it is called
            return None

    def request(self) -> Json:
        """The whole request as it was on the wire; its text where it was no JSON object."""
        if self.raw_request is not None:
            return self.raw_request
        if self.key is None:
            return copy_json(self.params)
        return {**copy_json(self.params), self.key: copy_json(path_messages(self.prompt))}

    def response(self) -> Json:
        """The whole response as it was on the wire, a stream in unstreamed shape.

        Its text where it is no JSON; None where nothing came.
        """

        def ids(match: re.Match[str]) -> str:
            path = self.prompts[int(match[1])] if int(match[1]) < len(self.prompts) else None
            return "null" if path is None else dumps(path.to_list())

        def whole(text: str) -> str:
            return _packed(ids, text) if self.prompts else text

        try:
            return self._parse(whole)
        except (ValueError, RecursionError):
            return whole(self._text())

    @property
    def is_unanswered(self) -> bool:
        """Whether nothing of a response came, or came down to here."""
        return self.body is None and self.events is None and self._reply in (..., None)

    def _text(self) -> str:
        if self.events is not None:
            return unpack_events(self.events)
        return dumps(self._reply) if self.body is None else self.body

    def _parse(self, whole: Callable[[str], str]) -> Json:
        """The response as JSON, None where nothing came. ValueError where it is no JSON."""
        if self.is_unanswered:
            return None
        text = whole(self._text())
        if self.events is None:
            return loads(text)
        merged = merge(text)
        if merged.body is None:
            raise ValueError("events of an unknown shape")
        return merged.body


_CONTEXT = ("tools", "instructions", "system")
"""Parameters that the model sees in front of the conversation."""


def context_key(params: Mapping[str, Json]) -> bytes:
    """Bytes that are equal for requests that may continue one another."""
    relevant = [visible_content(params.get(key)) for key in _CONTEXT]
    return visible_key(relevant) if any(relevant) else b""


_packed = re.compile(r'\{"packed":(\d+)\}').sub
_Path = TypeVar("_Path")
_Value = TypeVar("_Value")


class _Chains(Generic[_Path, _Value]):
    """Paths by digest. A path whose base has not come yet waits for it.

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
                digest = _digest(digest, own)
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
        """Take in what a span carries. Of two copies each may hold what was cut in the other."""
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
        for number, (value, start, end) in enumerate(_elements(text, 1)):
            name = repeated.get(str(number))
            if name is None:
                data = text[start:end].encode()
                own = _digest(data)
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
        for digest, start, end in _members(text, lambda _key, _start: None):
            if _digest(text[start:end].encode()).hex() == digest:
                self._shared[digest] = loads(text[start:end])

    def _add_prompt_ids(self, _: SpanRecord, text: str) -> None:
        for entry in loads(text):
            blocks = entry["blocks"]
            links = [(_digest(block.encode()), loads(f"[{block}]")) for block in blocks]
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
            digest in self._messages and span.cut <= _UNDECISIVE and missing.isdisjoint(_CONTEXT)
        )
        prompt = self._messages.get(digest) if prompt_is_known else None
        if digest not in self._messages:
            damage.append(
                f"the first {span.integer(sc.REQUEST_BASE_COUNT) or 0} messages of its request "
                f"are on a span that is missing"
            )
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
        if shared.keys().isdisjoint(_CONTEXT):
            return context_key(params)
        name = tuple(shared.get(key) or dumps(params.get(key)) for key in _CONTEXT)
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
