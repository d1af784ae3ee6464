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
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter

from otel_rollout import semconv as sc
from otel_rollout.spans.exchange import LARGE, PACKED, PLACEHOLDER
from otel_rollout.spans.reply_form import packed, with_line_feeds
from otel_rollout.spans.seals import crc32, digest_of
from otel_rollout.wire import (
    Json,
    as_lines,
    conversation_members,
    dumps,
    elements,
    expect,
    is_list_of_objects,
    members,
    pack_events,
)

COPIES = 2
"""How many exchanges carry each message."""

SHARED_LENGTH = 256
"""Parameters (tools, instructions, ...) with more JSON text than this are named by digest."""

_LONGEST_TEXT = 1 << 20
"""Bytes of an array that are kept to be compared with the next one."""

_AFTER = frozenset((b",", b"]", b" ", b"\t", b"\r", b"\n"))
_ROOT = b""
_Attributes = dict[str, "str | int | float | bool"]


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix of an array in an earlier body: its end, its digests, how often it was written."""

    end: int
    """Bytes from after `[` to the end of the prefix's last element."""
    first: int
    """Bytes from after `[` to the beginning of that element."""
    before: bytes
    """What is between that element and the one before it."""
    tail: bytes
    """Its last bytes: an array without them there need not be digested to be known as another."""
    digest: bytes
    """Digest of the elements, which is written on spans."""
    count: int
    copies: int = 0
    own: bytes = b""
    """Digest of the last element alone."""
    children: list[_Prefix] = field(default_factory=list)
    """Longer prefixes, the shortest first."""


class _Arrays:
    """The arrays of one kind in earlier bodies: a tree of their prefixes, and the last one's text.

    Most arrays continue the last one, which is compared byte by byte; the others are hashed.
    """

    def __init__(self) -> None:
        self._root = _Prefix(0, 0, b"", b"", _ROOT, 0, copies=COPIES)
        self._text: bytes | memoryview = b""
        """The last array from after `[` to the end of its last element; b"" if it is too long."""
        self._chain = [self._root]

    def continues_last(self, body: bytes, start: int) -> int:
        """How many bytes from `start` on are the last array, which the text there continues."""
        end = start + len(self._text)
        # A number that goes on after the prefix would be another element.
        return len(self._text) if body.startswith(self._text, start) and _ends(body, end) else 0

    def known(self, body: bytes, start: int) -> list[_Prefix]:
        """The prefixes of the array at `start` that are in the tree, shortest first."""
        chain = self._chain.copy() if self.continues_last(body, start) else [self._root]
        view = memoryview(body)
        while True:
            position = start + chain[-1].end
            for child in chain[-1].children:
                end = start + child.end
                if end >= len(view):
                    return chain
                if (
                    body.startswith(child.tail, end - len(child.tail))
                    and _ends(body, end)
                    and body[position : start + child.first] == child.before
                    and digest_of(view[start + child.first : end]) == child.own
                ):
                    chain.append(child)
                    break
            else:
                return chain

    def add(self, chain: list[_Prefix], new: list[_Prefix], body: bytes, start: int) -> None:
        """Add an array's new prefixes, which follow the known ones in `chain`."""
        for parent, child in zip([chain[-1], *new], new, strict=False):
            insort(parent.children, child, key=attrgetter("end"))
        self._chain = [*chain, *new]
        end = self._chain[-1].end
        text = memoryview(body)[start : start + end] if end <= _LONGEST_TEXT else b""
        self._text = text if 2 * end > len(body) else bytes(text)  # a view keeps the whole body


def _ends(body: bytes, position: int) -> bool:
    """Whether an element ends before this position."""
    return body[position : position + 1] in _AFTER


@dataclass(slots=True, eq=False)
class _Messages:
    """The array of messages in one body: its known prefixes and its new messages."""

    key: str
    start: int
    end: int
    chain: list[_Prefix]
    new: list[_Prefix]


class ExchangeWriter:
    """Writes the exchanges of one rollout in one process as span attributes.

    Not thread-safe. It keeps digests, about 200 bytes per message, and of content the last
    conversation and the last prompt's ids, up to 1 MiB each.
    """

    def __init__(self) -> None:
        self._messages = _Arrays()
        self._prompts = _Arrays()
        self._separator = _USUAL
        """What is between the ids of the last prompts."""
        self._shared: dict[str, list[tuple[int, bytes]]] = {}
        self._copied: dict[bytes, int] = {}
        self._large: dict[bytes, int] = {}
        self.checksums: dict[str, int] = {}
        """Those of texts of the last reply that are known, for `with_lengths`."""
        self._begin()

    def _begin(self) -> None:
        self.conversation = 0, 0
        """Where the messages of the last body begin and end in it; the same: it has none."""
        self.added = 0, 0
        """Where those of them that no earlier body had begin and end."""
        self.known_digest = _ROOT.hex()
        """Digest of those before, which an earlier body had."""
        self.known_count = 0
        """Their number."""

    def request(self, body: bytes) -> _Attributes:
        """Attributes of a request body as it was sent; the next bodies build upon it."""
        self._begin()
        try:
            return self._request(body)
        except (ValueError, RecursionError):
            return {sc.REQUEST_RAW: _text(body)}

    def _request(self, body: bytes) -> _Attributes:
        text, view = body.decode(), memoryview(body)  # a body that is no UTF-8 is kept raw
        if not text.isascii():
            text = body.decode("latin-1")
        messages: _Messages | None = None
        conversation = conversation_members()

        def ends(key: str, start: int) -> int | None:
            nonlocal messages
            if messages is None and key in conversation and is_list_of_objects(text, start):
                messages = self._find_messages(key, text, body, start + 1)
                return messages.end
            for length, digest in self._shared.get(key, ()):
                end = start + length
                if end < len(text) and text[end] in ",} " and digest_of(view[start:end]) == digest:
                    return end
            return None

        found = list(members(text, ends))
        # Nothing fails from here on: what this writer remembers has been written.
        if messages is None:
            return self._write_params(found, None, body)
        return self._write_messages(messages, body) | self._write_params(found, messages.end, body)

    def _write_params(
        self, found: list[tuple[str, int, int]], after: int | None, body: bytes
    ) -> _Attributes:
        """Attributes of the members of a request; `after`: the end of the one with the messages."""
        params: list[str] = []
        shared: dict[str, str] = {}
        values: list[str] = []
        for key, start, end in found:
            if end == after:
                value = "null"
            elif end - start <= SHARED_LENGTH:
                value = _text(body[start:end])
            else:
                value, digest = "null", digest_of(memoryview(body)[start:end])
                shared[key] = digest.hex()
                if self._share(key, end - start, digest):
                    values.append(f'"{digest.hex()}":{_text(body[start:end])}')
            params.append(f"{dumps(key)}:{value}")
        attributes: _Attributes = {sc.REQUEST_PARAMS: "{" + ",".join(params) + "}"}
        if shared:
            attributes[sc.REQUEST_SHARED] = dumps(shared)
        if values:
            attributes[sc.REQUEST_SHARED_VALUES] = "{" + ",".join(values) + "}"
        return attributes

    def _share(self, key: str, length: int, digest: bytes) -> bool:
        """Remember a long parameter; True if its value is still to be written."""
        known = self._shared.setdefault(key, [])
        if (length, digest) not in known:
            known.insert(0, (length, digest))
            del known[8:]
        copies = self._copied.get(digest, 0)
        self._copied[digest] = copies + 1
        return copies < COPIES

    def _find_messages(self, key: str, text: str, body: bytes, start: int) -> _Messages:
        chain = self._messages.known(body, start)
        last = chain[-1]
        position = end = start + last.end
        new: list[_Prefix] = []
        for _, first, end in elements(text, position):
            new.append(_next(last, body, start, first, end))
            last = new[-1]
        return _Messages(key, start, expect(text, end, "]"), chain, new)

    def _write_messages(self, messages: _Messages, body: bytes) -> _Attributes:
        chain, new, view = messages.chain, messages.new, memoryview(body)
        self.known_digest, self.known_count = chain[-1].digest.hex(), chain[-1].count
        self.conversation = messages.start, messages.start + (new or chain)[-1].end
        if new:
            self.added = messages.start + chain[-1].end, messages.start + new[-1].end
        base = _last_copied(chain)
        last = new[-1] if new else chain[-1]
        self._messages.add(chain, new, body, messages.start)
        written = [*chain[chain.index(base) + 1 :], *new]
        pieces: list[bytes | memoryview] = []
        repeated: list[str] = []
        in_pieces = end = messages.start + base.end
        for number, prefix in enumerate(written):
            first, end = end, messages.start + prefix.end
            prefix.copies += 1
            if end - first > LARGE:
                copies = self._large.get(prefix.own, 0)
                self._large[prefix.own] = copies + 1
                if copies >= COPIES:
                    repeated.append(f'"{number}":"{prefix.own.hex()}"')
                    pieces += (view[in_pieces:first], b",null")
                    in_pieces = end
        pieces.append(view[in_pieces:end])
        added = b"".join(pieces) if repeated else pieces[0]
        text = _text(memoryview(added)[_between(added).end() :])
        attributes: _Attributes = {
            sc.REQUEST_KEY: messages.key,
            sc.REQUEST_MESSAGES: f"[{text}]",
            sc.REQUEST_DIGEST: last.digest.hex(),
            sc.REQUEST_BASE_DIGEST: base.digest.hex(),
            sc.REQUEST_BASE_COUNT: base.count,
        }
        if repeated:
            attributes[sc.REQUEST_REPEATED] = f"{{{','.join(repeated)}}}"
        return attributes

    def supplied(self, held: int, ids: Sequence[int]) -> _Attributes:
        """Attributes of the token ids that stood for the messages; `held` of them came before.

        They are written as those of prompts in replies, of which they are one copy.
        """
        body = b"[%b]" % ",".join(map(str, ids)).encode()
        prompt = "".join(self._prompt(body, 1, len(body) - 1))
        return {sc.REQUEST_SUPPLIED: f'{{"held":{held},"prompt":{prompt}}}'}

    def response(
        self, body: bytes, *, events: bool = False, form: Mapping[str, Json] | None = None
    ) -> _Attributes:
        """Attributes of a response body, or of the events of a streamed one; any text is kept.

        form: what of it was not as usual, as the members of a `Form`; `raw` as bytes, where `body`
        was made of them.
        """
        attributes: _Attributes = {}
        self.checksums = {}
        unlike = dict(form or ())
        raw = unlike.pop("raw", None)
        pieces, prompts = self._without_prompts(body)
        if prompts:
            attributes[sc.RESPONSE_PROMPT_IDS] = prompts
            if self._separator != _USUAL:
                unlike["separator"] = self._separator.decode()
        is_exact = True
        if events:
            whole, is_exact = with_line_feeds(b"".join(pieces), unlike)
            pieces = [pack_events(whole)]
        try:
            text, checksum = _joined(pieces)
        except UnicodeDecodeError:
            text, checksum, is_exact = _text(b"".join(pieces)), 0, False
        key = sc.RESPONSE_EVENTS if events else sc.RESPONSE_BODY
        attributes[key] = text
        if checksum and text.isascii():  # then its bytes are these
            self.checksums[key] = checksum
        raw = body if raw is None and not is_exact else raw
        if raw is not None:
            unlike |= {"framing": "lines"} if as_lines(body) == raw else {"raw": packed(raw)}
        if unlike:
            attributes[sc.RESPONSE_FORM] = dumps(unlike)
        return attributes

    def _without_prompts(self, body: bytes) -> tuple[list[bytes | memoryview], str]:
        """The body, in pieces, with a placeholder for every `"prompt_token_ids": [...]`, or its
        like, and what is written of these, as a list; "" if there is none.

        A string of the body cannot be mistaken for one: it would have its quotes escaped. And if
        it were, what is cut out is put back the same.
        """
        found: list[tuple[int, int]] = []
        for name, before in _PROMPT_IDS:
            position = -1 if found else body.find(before)
            while position >= 0 and (position := body.find(name, position)) >= 0:
                after = position + len(name)
                opening = _array(body, after)
                if opening:
                    start, end = opening.end(), body.find(b"]", opening.end())
                    if end > start and self._are_numbers(body, start, end, is_first=not found):
                        found.append((start, end))
                        after = end
                position = after
        if not found or (PACKED[0].encode() in body and _PLACEHOLDER in body):
            return [body], ""
        view, position = memoryview(body), 0
        pieces: list[bytes | memoryview] = []
        prompts: list[str] = []
        for number, (start, end) in enumerate(found):
            pieces += (view[position : start - 1], b"%b%d}" % (_PLACEHOLDER, number))
            position = end + 1
            prompts += (",", *self._prompt(body, start, end))
        return [*pieces, view[position:]], "".join(("[", *prompts[1:], "]"))

    def _are_numbers(self, body: bytes, start: int, end: int, *, is_first: bool) -> bool:
        """Whether they are ids with the same between all of them: that of the first such array."""
        known = self._prompts.continues_last(body, start)
        other = body[start + known : end].translate(None, b"0123456789,")
        between = _USUAL
        if other or (known and self._separator != _USUAL):
            if other.strip(b" "):
                return False
            between = _SPACED
            count = body.count(b",", start, end)
            if not count == body.count(b" ", start, end) == body.count(_SPACED, start, end):
                return False
        if is_first:
            self._separator = between
        return between == self._separator

    def _prompt(self, body: bytes, start: int, end: int) -> list[str]:
        """What is written of the ids from `start` to `end`, in pieces: they may be long."""
        chain, view = self._prompts.known(body, start), memoryview(body)
        new: list[_Prefix] = []
        base = _last_copied(chain)
        known = chain[-1]
        if end > start + known.end:
            first = _gap(body, start + known.end, end).end()
            new.append(_next(known, body, start, first, end))
        self._prompts.add(chain, new, body, start)
        last = new[-1] if new else known
        pieces = [f'{{"base":"{base.digest.hex()}","digest":"{last.digest.hex()}","blocks":[']
        position = base.end
        for prefix in [*chain, *new][chain.index(base) + 1 :]:
            prefix.copies += 1
            first, stop = _gap(body, start + position).end(), start + prefix.end
            pieces += ('"', str(view[first:stop], "ascii"), '",')
            position = prefix.end
        pieces[-1] = pieces[-1].removesuffix(",") + "]}"
        return pieces


def _last_copied(chain: list[_Prefix]) -> _Prefix:
    """The longest of these prefixes that enough exchanges carry."""
    for prefix in reversed(chain):
        if prefix.copies >= COPIES:
            return prefix
    return chain[0]


def _next(last: _Prefix, body: bytes, start: int, first: int, end: int) -> _Prefix:
    """The prefix that is one element longer, which is at `first` in the body."""
    own = blake2b(memoryview(body)[first:end], digest_size=16).digest()  # what `digest_of` gives
    digest = blake2b(last.digest + own, digest_size=16).digest()
    before, tail = body[start + last.end : first], body[max(first, end - _TAIL) : end]
    return _Prefix(end - start, first - start, before, tail, digest, last.count + 1, own=own)


_TAIL = 32
"""Bytes of an element that are compared before it is digested."""

_between: Callable[..., re.Match[bytes]] = re.compile(rb"[ ,\t\r\n]*").match  # type: ignore[assignment]

_USUAL, _SPACED = b",", b", "
_PLACEHOLDER = PLACEHOLDER.encode()

_PROMPT_IDS = ((b'"prompt_token_ids"', b""), (b'"input_ids"', b'"sglext"'))
"""The members of a reply that hold token ids of a prompt, and what must come before them."""

_array = re.compile(rb"\s*:\s*\[").match
_gap: Callable[..., re.Match[bytes]] = re.compile(rb"[ ,]*").match  # type: ignore[assignment]


def _joined(pieces: Sequence[bytes | memoryview]) -> tuple[str, int]:
    """The text of these bytes, and their CRC-32."""
    text, checksum = "", 0
    for piece in pieces:
        text += str(piece, "utf-8")  # in place: the first is nearly all of it
        checksum = crc32(piece, checksum)
    return text, checksum


def _text(body: bytes | memoryview) -> str:
    """The body as text that every exporter can carry; bytes that are no UTF-8 stay visible."""
    return str(body, "utf-8", "backslashreplace")
