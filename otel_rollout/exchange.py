"""The exchange span's format: one model call, lossless, at the cost of what is new in it.

A conversation sends its whole past with every request. The writer (`ExchangeWriter`, one per
rollout and process) therefore writes only the messages that earlier requests of the rollout did
not carry, as verbatim slices of the body, and names the rest by a content digest. The reader
(`ExchangeReader`) resolves those digests from whichever spans arrived, in any order. A prefix
that no span carries is reported as missing; nothing is ever guessed.

Digest of a list of messages: `d(0) = b""`, `d(k) = blake2b-16(d(k-1) + bytes of message k)`.
Every message is carried by `COPIES` exchanges, so a lossy lane that loses one span loses one
exchange. Prompt token ids work the same way on blocks of ids: a prompt that starts with an
earlier prompt and its completion names that pair.
"""

from __future__ import annotations

import base64
import json
import re
import sys
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
    visible_key,
)
from otel_rollout.spans import SpanRecord

COPIES = 2
"""How many exchanges carry each message."""

SHARED_LENGTH = 256
"""Parameters (tools, instructions, ...) with more JSON text than this are named by digest."""

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


# --- Packed token ids


def pack_ids(ids: list[int] | array[int]) -> str:
    """`i32:` or `i64:` and base64 of little-endian integers: one short string, never an array."""
    for code, tag in (("i", "i32"), ("q", "i64")):
        try:
            packed = array(code, ids)
        except OverflowError:
            continue
        if sys.byteorder == "big":
            packed.byteswap()
        return f"{tag}:{base64.b64encode(packed).decode()}"
    raise ValueError("token ids do not fit 64 bits")


def unpack_ids(text: str) -> array[int]:
    """The inverse of `pack_ids`; ValueError for anything else."""
    tag, _, data = text.partition(":")
    code = {"i32": "i", "i64": "q"}.get(tag)
    if code is None:
        raise ValueError(f"packed token ids start with 'i32:' or 'i64:', got {text[:16]!r}")
    ids: array[int] = array(code)
    ids.frombytes(base64.b64decode(data, validate=True))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


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
        return [token for block in reversed(blocks) for token in block]


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
    children: list[_Prefix] = field(default_factory=list)

    def add(self, child: _Prefix) -> None:
        insort(self.children, child, key=attrgetter("end"))


def _longest_known(root: _Prefix, view: memoryview) -> list[_Prefix]:
    """The prefixes of `view` that are in the tree, shortest first; one pass over the bytes."""
    chain = [root]
    hasher, position = blake2b(digest_size=16), 0
    while True:
        for child in chain[-1].children:
            if child.end >= len(view):
                return chain
            hasher.update(view[position : child.end])
            position = child.end
            # A number that goes on behind the prefix would be another element.
            if hasher.digest() == child.raw and view[position] in b",] \t\r\n":
                chain.append(child)
                break
        else:
            return chain


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
                continue
            if end - start <= SHARED_LENGTH:
                params.append(f"{dumps(key)}:{_text(body[start:end])}")
                continue
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
        chain = _longest_known(self._messages, view[start:])
        last = chain[-1]
        position = end = start + last.end
        hasher = blake2b(view[start:position], digest_size=16)
        new: list[_Prefix] = []
        for _, first, end in _elements(text, position):
            hasher.update(view[position:end])
            digest = _digest(last.digest, view[first:end])
            last = _Prefix(end - start, hasher.digest(), digest, last.count + 1)
            new.append(last)
            position = end
        return _Messages(key, start, _expect(text, end, "]"), chain, new)

    def _write_messages(self, messages: _Messages, view: memoryview) -> _Attributes:
        chain, new = messages.chain, messages.new
        base = next(prefix for prefix in reversed(chain) if prefix.copies >= COPIES)
        last = new[-1] if new else chain[-1]
        delta = bytes(view[messages.start + base.end : messages.start + last.end])
        delta = delta.lstrip(b" ,\t\r\n")
        for parent, child in zip([chain[-1], *new], new, strict=False):
            parent.add(child)
        for prefix in [*chain[chain.index(base) + 1 :], *new]:
            prefix.copies += 1
        return {
            sc.REQUEST_KEY: messages.key,
            sc.REQUEST_MESSAGES: f"[{_text(delta)}]",
            sc.REQUEST_COUNT: last.count,
            sc.REQUEST_DIGEST: last.digest.hex(),
            sc.REQUEST_BASE_DIGEST: base.digest.hex(),
            sc.REQUEST_BASE_COUNT: base.count,
        }

    def response(self, body: bytes) -> _Attributes:
        """Attributes of a response body, its arrays of token ids packed; any text is kept."""
        try:
            packed, entries = self._pack(body)
        except (ValueError, RecursionError):
            packed, entries = body, []
        text = _text(packed)
        attributes: _Attributes = {sc.RESPONSE_BODY: text, sc.RESPONSE_LENGTH: len(text)}
        if entries:
            attributes[sc.RESPONSE_TOKEN_IDS] = dumps(entries)
        return attributes

    def _pack(self, body: bytes) -> tuple[bytes, list[dict[str, Json]]]:
        if b'token_ids"' not in body or _PLACEHOLDER in body:
            return body, []
        arrays = list(_token_arrays(body))
        prompts = [body[start:end] for start, end, is_prompt in arrays if is_prompt]
        paths = [self._prompt(prompt) for prompt in prompts]
        replies = len(arrays) - len(prompts)
        if len(prompts) == 1:
            after = [0] * replies
        else:  # one prompt each, or it is not known which reply follows which prompt
            after = list(range(replies)) if replies == len(prompts) else []
        pieces: list[bytes] = []
        entries: list[dict[str, Json]] = []
        position = prompt_index = reply_index = 0
        for start, end, is_prompt in arrays:
            if is_prompt:
                entry = paths[prompt_index][1]
                prompt_index += 1
            else:
                index = after[reply_index] if after else None
                prefix = None if index is None else (paths[index][0], prompts[index])
                entry = self._reply(body[start:end], prefix)
                reply_index += 1
            pieces += [body[position : start - 1], _PLACEHOLDER, b"%d}" % len(entries)]
            position = end + 1
            entries.append(entry)
        return b"".join([*pieces, body[position:]]), entries

    def _prompt(self, ids: bytes) -> tuple[_Prefix, dict[str, Json]]:
        chain = _longest_known(self._prompts, memoryview(ids + b"]"))
        base = next(prefix for prefix in reversed(chain) if prefix.copies >= COPIES)
        block = json.loads(b"[" + ids[base.end :].lstrip(b" ,\t\r\n") + b"]")
        if len(ids) > chain[-1].end:
            known = chain[-1]
            tail = pack_ids(block[known.count - base.count :])
            digest = _digest(known.digest, tail.encode())
            chain.append(_Prefix(len(ids), _digest(ids), digest, base.count + len(block)))
            known.add(chain[-1])
        blocks: list[str] = []
        position = 0
        for prefix in chain[chain.index(base) + 1 :]:
            prefix.copies += 1
            end = prefix.count - base.count
            blocks.append(pack_ids(block[position:end]))
            position = end
        last = chain[-1]
        return last, {
            "base": base.digest.hex(),
            "blocks": blocks,
            "count": last.count,
            "digest": last.digest.hex(),
        }

    def _reply(self, ids: bytes, prompt: tuple[_Prefix, bytes] | None) -> dict[str, Json]:
        block = json.loads(b"[" + ids + b"]")
        packed = pack_ids(block)
        parent, text = prompt or (self._prompts, b"")
        digest = _digest(parent.digest, packed.encode())
        count = parent.count + len(block)
        if prompt and block:
            # The text of the next prompt, should it continue this reply.
            text += (b", " if b", " in text else b",") + ids
            reply = next((child for child in parent.children if child.digest == digest), None)
            if reply is None:
                reply = _Prefix(len(text), _digest(text), digest, count)
                parent.add(reply)
            reply.copies += 1
        return {
            "base": parent.digest.hex(),
            "blocks": [packed],
            "count": count,
            "digest": digest.hex(),
            "tail": True,
        }


_PLACEHOLDER = b'{"packed":'


def _token_arrays(body: bytes) -> Iterator[tuple[int, int, bool]]:
    """`(start, end, is_prompt)` of the text inside every `[...]` of token ids in the body.

    A string of the body cannot be mistaken for one: it would have its quotes escaped. And if it
    were, what is cut out is put back the same.
    """
    position = body.find(b'token_ids"')
    while position >= 0:
        behind = position + len(b'token_ids"')
        colon = _colon(body, behind)
        prompt = body[position - 8 : position] == b'"prompt_'
        if colon and (prompt or body[position - 1 : position] == b'"'):
            end = body.find(b"]", colon.end())
            ids = body[colon.end() : end]
            if end >= 0 and ids and not ids.translate(None, b"0123456789, "):
                yield colon.end(), end, prompt
                behind = end
        position = body.find(b'token_ids"', behind)


_colon = re.compile(rb"\s*:\s*\[").match


def _text(body: bytes) -> str:
    """The body as text that every exporter can carry; bytes that are no UTF-8 stay visible."""
    return body.decode("utf-8", "backslashreplace")


# --- Reading


@dataclass(slots=True, eq=False)
class Tokens:
    """One array of token ids of a response."""

    path: TokenPath | None
    """The ids with what they follow; None where the span with their beginning is missing."""
    tail: bool
    """True for a reply: the array is only the last block of `path`."""

    def ids(self) -> list[int] | None:
        """The array; None where the span with its beginning is missing."""
        if self.path is None:
            return None
        return self.path.ids.tolist() if self.tail else self.path.to_list()


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
    key: str | None
    """The member of the request that holds the conversation, such as `messages`."""
    params: dict[str, Json]
    """The request without its conversation."""
    raw_request: str | None
    """The request's text, where it is no JSON object."""
    prompt: MessagePath | None
    """The conversation of the request."""
    body: str | None
    """The response's text, its arrays of token ids replaced by `{"packed": index}`."""
    tokens: list[Tokens]
    damage: list[str]
    """What this span should hold and does not, in sentences."""
    context_key: bytes = b""
    """Equal for requests that may continue one another: same tools, same instructions."""
    _reply: Json = None

    @property
    def reply(self) -> Json:
        """The response as JSON, its token ids packed; None where it is no JSON."""
        if self._reply is None and self.body is not None:
            try:
                self._reply = loads(self.body)
            except (ValueError, RecursionError):
                return None
        return self._reply

    def token_ids(self, value: Json) -> list[int] | None:
        """The ids that a field of `reply` stands for; None where there are none."""
        if isinstance(value, dict) and isinstance(index := value.get("packed"), int):
            return self.tokens[index].ids() if index < len(self.tokens) else None
        return list(value) if isinstance(value, list) and value else None

    def request(self) -> Json:
        """The whole request as it was on the wire; its text where it was no JSON object."""
        if self.raw_request is not None:
            return self.raw_request
        if self.key is None:
            return copy_json(self.params)
        return {self.key: copy_json(path_messages(self.prompt)), **copy_json(self.params)}

    def response(self) -> Json:
        """The whole response as it was on the wire; its text where it is no JSON, or None."""
        if self.body is None:
            return None
        text = self.body
        if self.tokens:
            text = _packed(lambda match: dumps(self.tokens[int(match[1])].ids()), text)
        try:
            return loads(text)
        except (ValueError, RecursionError):
            return text


def context_key(params: Mapping[str, Json]) -> bytes:
    """Bytes that are equal for requests that may continue one another."""
    relevant = [params.get("tools") or None, params.get("instructions") or None]
    return b"" if relevant == [None, None] else visible_key(relevant)


_packed = re.compile(r'\{"packed":(\d+)\}').sub
_Path = TypeVar("_Path")
_Value = TypeVar("_Value")


class _Chains(Generic[_Path, _Value]):
    """Paths by digest. A path whose base has not come yet waits for it."""

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
            for data, value in links:
                digest = _digest(digest, data)
                name = digest.hex()
                if name not in self._known:
                    self._known[name] = self._extend(path, value)
                    ready += [(name, rest) for rest in self._waiting.pop(name, ())]
                path = self._known[name]

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> _Path | None:
        return self._known[name]


def extend_tokens(parent: TokenPath | None, ids: array[int]) -> TokenPath:
    return TokenPath(parent, ids, len(ids) + (parent.length if parent else 0))


class ExchangeReader:
    """Reads exchange spans back; they may come in any order, more than once, and with gaps.

    `add` takes a span; what it refers to may come later. `read` gives an exchange with all that
    has come by then.
    """

    def __init__(self) -> None:
        self._messages: _Chains[MessagePath, Json] = _Chains(extend)
        self._tokens: _Chains[TokenPath, array[int]] = _Chains(extend_tokens)
        self._shared: dict[str, Json] = {}
        self._context_keys: dict[tuple[Json, Json], bytes] = {}
        self._spans: dict[str, tuple[SpanRecord, list[str]]] = {}

    def add(self, span: SpanRecord) -> None:
        """Take in what a span carries; a span that came before is passed over."""
        if span.span_id in self._spans:
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
        links = [(text[start:end].encode(), value) for value, start, end in _elements(text, 1)]
        self._messages.add(span.text(sc.REQUEST_BASE_DIGEST) or "", links)

    def _add_shared(self, _: SpanRecord, text: str) -> None:
        for digest, start, end in _members(text, lambda _key, _start: None):
            if _digest(text[start:end].encode()).hex() == digest:
                self._shared[digest] = loads(text[start:end])

    def _add_tokens(self, _: SpanRecord, text: str) -> None:
        for entry in loads(text):
            links = [(block.encode(), unpack_ids(block)) for block in entry["blocks"]]
            self._tokens.add(entry["base"], links)

    def read(self, span_id: str) -> Exchange:
        """The exchange of a span that was added."""
        span, damage = self._spans[span_id]
        damage = list(damage)
        params = _object(span.text(sc.REQUEST_PARAMS), damage)
        shared = _object(span.text(sc.REQUEST_SHARED), damage)
        for key, digest in shared.items():
            if digest in self._shared:
                params[key] = self._shared[digest]
            else:
                damage.append(f"the value of its parameter {key!r} is on a span that is missing")
        digest = span.text(sc.REQUEST_DIGEST) or ""
        prompt = None
        if digest in self._messages:
            prompt = self._messages[digest]
        else:
            damage.append(
                f"the first {span.integer(sc.REQUEST_BASE_COUNT) or 0} messages of its request "
                f"are on a span that is missing"
            )
        body = span.text(sc.RESPONSE_BODY)
        length = span.integer(sc.RESPONSE_LENGTH)
        if body is not None and length is not None and len(body) != length:
            damage.append(f"its response was cut: {len(body)} of {length} characters are left")
        error = span.text(sc.EXCHANGE_ERROR)
        policy_version = span.attributes.get(sc.EXCHANGE_POLICY_VERSION)
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
            policy_version=policy_version if isinstance(policy_version, str | int) else None,
            stream=span.attributes.get(sc.RESPONSE_STREAM) in (True, "true"),
            response_id=span.text(sc.RESPONSE_ID),
            key=span.text(sc.REQUEST_KEY),
            params=params,
            raw_request=span.text(sc.REQUEST_RAW),
            prompt=prompt,
            body=body,
            tokens=self._read_tokens(span, damage),
            damage=damage,
            context_key=self._context_key(params, shared),
        )

    def _context_key(self, params: dict[str, Json], shared: dict[str, str]) -> bytes:
        name = shared.get("tools"), shared.get("instructions")
        if name == (None, None):
            return context_key(params)
        if name not in self._context_keys:
            self._context_keys[name] = context_key(params)
        return self._context_keys[name]

    def _read_tokens(self, span: SpanRecord, damage: list[str]) -> list[Tokens]:
        tokens: list[Tokens] = []
        try:
            entries = loads(span.text(sc.RESPONSE_TOKEN_IDS) or "[]")
            for entry in entries:
                path = None
                tail = entry.get("tail") is True
                if entry["digest"] in self._tokens:
                    path = self._tokens[entry["digest"]]
                elif tail:
                    path = extend_tokens(None, unpack_ids(entry["blocks"][-1]))
                else:
                    damage.append("the beginning of its token ids is on a span that is missing")
                tokens.append(Tokens(path, tail))
        except (ValueError, KeyError, TypeError):
            pass  # `add` reported it
        return tokens


_PARTS = {
    sc.REQUEST_MESSAGES: ExchangeReader._add_messages,
    sc.REQUEST_SHARED_VALUES: ExchangeReader._add_shared,
    sc.RESPONSE_TOKEN_IDS: ExchangeReader._add_tokens,
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
