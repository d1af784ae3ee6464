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
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter

from otel_rollout import semconv as sc
from otel_rollout.spans.exchange import LARGE, PLACEHOLDER, digest_of
from otel_rollout.wire import (
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

_ROOT = b""


_Attributes = dict[str, "str | int | float | bool"]


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix of an array in an earlier body: its end, its digests, how often it was written."""

    end: int
    """Bytes from after `[` to the end of the prefix's last element."""
    raw: bytes
    """Digest of those bytes, which a new body is compared with."""
    digest: bytes
    """Digest of the elements, which is written on spans."""
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
            # A number that goes on after the prefix would be another element.
            if hasher.digest() == child.raw and view[position] in b",] \t\r\n":
                chain.append(child)
                known = hasher.copy()
                break
        else:
            return chain, known


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

    Not thread-safe. It keeps digests, not content: about 200 bytes per message.
    """

    def __init__(self) -> None:
        self._messages = _Prefix(0, b"", _ROOT, 0, copies=COPIES)
        self._prompts = _Prefix(0, b"", _ROOT, 0, copies=COPIES)
        self._shared: dict[str, list[tuple[int, bytes]]] = {}
        self._carried: dict[bytes, int] = {}
        self._large: dict[bytes, int] = {}
        self.added = 0, 0
        """Where the messages that no earlier body had begin and end in the last body."""

    def request(self, body: bytes) -> _Attributes:
        """Attributes of a request body as it was sent; the next bodies build upon it."""
        self.added = 0, 0
        try:
            return self._request(body)
        except (ValueError, RecursionError):
            return {sc.REQUEST_RAW: _text(body)}

    def _request(self, body: bytes) -> _Attributes:
        body.decode()  # a body that is no UTF-8 is kept raw
        text, view = body.decode("latin-1"), memoryview(body)
        messages: _Messages | None = None
        conversation = conversation_members()

        def ends(key: str, start: int) -> int | None:
            nonlocal messages
            if messages is None and key in conversation and is_list_of_objects(text, start):
                messages = self._find_messages(key, text, view, start + 1)
                return messages.end
            for length, digest in self._shared.get(key, ()):
                end = start + length
                if end < len(text) and text[end] in ",} " and digest_of(view[start:end]) == digest:
                    return end
            return None

        found = list(members(text, ends))
        # Nothing fails from here on: what this writer remembers has been written.
        attributes = self._write_messages(messages, view) if messages else {}
        params: list[str] = []
        shared: dict[str, str] = {}
        values: list[str] = []
        for key, start, end in found:
            if messages and end == messages.end:
                params.append(f"{dumps(key)}:null")
                continue
            if end - start <= SHARED_LENGTH:
                params.append(f"{dumps(key)}:{_text(body[start:end])}")
                continue
            params.append(f"{dumps(key)}:null")
            digest = digest_of(view[start:end])
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
        for _, first, end in elements(text, position):
            hasher.update(view[position:end])
            own = digest_of(view[first:end])
            digest = digest_of(last.digest, own)
            last = _Prefix(end - start, hasher.digest(), digest, last.count + 1, own=own)
            new.append(last)
            position = end
        return _Messages(key, start, expect(text, end, "]"), chain, new)

    def _write_messages(self, messages: _Messages, view: memoryview) -> _Attributes:
        chain, new = messages.chain, messages.new
        if new:
            self.added = messages.start + chain[-1].end, messages.start + new[-1].end
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
            digest = digest_of(known.digest, digest_of(_block(ids, known.end, len(ids))))
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

_PLACEHOLDER = PLACEHOLDER.encode()

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
            after = position + len(name)
            opening = _array(body, after)
            if opening:
                end = body.find(b"]", opening.end())
                ids = body[opening.end() : end]
                if end >= 0 and ids and not ids.translate(None, b"0123456789, "):
                    yield opening.end(), end
                    after = end
            position = after


def _text(body: bytes) -> str:
    """The body as text that every exporter can carry; bytes that are no UTF-8 stay visible."""
    return body.decode("utf-8", "backslashreplace")
