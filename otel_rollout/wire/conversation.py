"""Conversations: which messages are the same to a model, and paths that store each message once.

Pure. Two forms of a message never mix. The *wire* form is what was sent or received, verbatim: it
is what is stored and handed back. The *visible* form is normalised and serves only to decide
whether two messages are the same one. What clients change when they replay a reply (`None`, `""`
or absent; a string or one text part; the whitespace of tool arguments; dropped reasoning; the name
of an agent; what a client has parsed), and marks of where a prompt may be cached, make no
difference in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from otel_rollout.wire.json import OBJECT, Json, JsonText
from otel_rollout.wire.message import PIECES, content_parts, media_in, read_message
from otel_rollout.wire.parts import Part, Reasoning, Text, normalised_parts, present_members


class MessagePath:
    """A conversation from its first message to `message`; longer ones point to it as `parent`."""

    __slots__ = ("_key", "_media", "json", "length", "parent")

    def __init__(self, parent: MessagePath | None, json: JsonText) -> None:
        self.parent = parent
        self.json = json
        """The message in wire form; it is read when somebody asks for it."""
        self.length: int = (parent.length if parent else 0) + 1
        """Messages on the path, this one included."""
        self._key: bytes | None = None
        self._media: tuple[str, ...] = ()

    @property
    def message(self) -> Json:
        """The wire form: almost always a dict."""
        return self.json.value

    @property
    def key(self) -> bytes:
        """16-byte digest of the visible forms on the path: equal keys, equal visible conversation.

        Empty for a path with nothing visible. Reasoning that is an item of its own does not change
        it: a replay may leave it out.
        """
        unknown: list[MessagePath] = []
        node: MessagePath | None = self
        while node is not None and node._key is None:
            unknown.append(node)
            node = node.parent
        while unknown:
            node = unknown.pop()
            node._key = node._normalised()
        return self._key or b""

    @property
    def media(self) -> tuple[str, ...]:
        """Types of the parts on the path that are images, sound or files."""
        _ = self.key
        return self._media

    def _normalised(self) -> bytes:
        """The key, where that of the path before is known."""
        before, message, read = self.parent, self.json.seen, self.json.read
        if read is None:
            is_one = not is_sampled_piece(message)
            if not is_one:
                pieces = [message]
                while before is not None and is_sampled_piece(before.json.seen):
                    pieces.append(before.json.seen)
                    before = before.parent
                (message,) = joined_pieces(reversed(pieces))
            parts, others = read_message(message)
            kinds = tuple(part.kind for part in media_in(parts))
            read = key_unless_reasoning(message, parts, others), kinds
            if is_one:
                self.json.read = read
        normalised, kinds = read
        key, self._media = (before.key, before._media) if before else (b"", ())
        if kinds:
            self._media = tuple(dict.fromkeys((*self._media, *kinds)))
        if normalised is None:
            return key
        digest = blake2b(key, digest_size=16)
        digest.update(normalised)
        return digest.digest()

    def __iter__(self) -> Iterator[MessagePath]:
        """The paths from this one up to the first message (deepest first)."""
        path: MessagePath | None = self
        while path is not None:
            yield path
            path = path.parent


def extend(path: MessagePath | None, message: Json) -> MessagePath:
    """The path that continues `path` (None is the empty one) with `message`."""
    return MessagePath(path, JsonText(None, message))


class Items(Sequence[Json]):
    """What was sampled, in wire form; each is read when somebody asks for it."""

    __slots__ = ("texts",)

    def __init__(self, texts: Sequence[JsonText]) -> None:
        self.texts = texts

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place]

    def __iter__(self) -> Iterator[Json]:
        return (text.value for text in self.texts)

    def __len__(self) -> int:
        return len(self.texts)


def extend_with(path: MessagePath | None, items: Sequence[Json]) -> MessagePath | None:
    """The path that continues `path` with what was sampled."""
    texts = items.texts if isinstance(items, Items) else [JsonText(None, item) for item in items]
    for text in texts:
        path = MessagePath(path, text)
    return path


def path_messages(path: MessagePath | None) -> list[Json]:
    """The wire messages on the path, first to last; the caller owns the list, not the messages."""
    messages = [node.message for node in path] if path else []
    messages.reverse()
    return messages


# --- which messages are the same


def normalised_key(message: Json) -> bytes:
    """Bytes that are equal for messages that a model sees as the same."""
    parts, others = read_message(message)
    return key_of(message, parts, others)


def key_unless_reasoning(message: Json, parts: list[Part], others: dict[str, Json]) -> bytes | None:
    """`key_of`; None for an item that is only reasoning, which a replay may leave out."""
    if not others and parts and all(isinstance(part, Reasoning) for part in parts):
        return None
    return key_of(message, parts, others)


def key_of(message: Json, parts: list[Part], others: dict[str, Json]) -> bytes:
    """The visible key of a message that was read."""
    role = message.get("role") if isinstance(message, OBJECT) else None
    if is_piece(message):
        others = {"role": "model" if is_sampled_piece(message) else "user"}
        parts = joined(parts)
    elif role == "assistant":
        # Only members that a client must replay: clients drop the others that servers send.
        others = {"role": role}
    elif len(others) > 1:
        others = present_members(others, without=("cache_control",))
        if others.get("type") == "message":  # of the Responses API, whose messages have no more
            others = {"role": role}
    return _encoded([others, normalised_parts(parts)])


_encode_strict = msgspec.json.Encoder(order="deterministic").encode
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _encoded(normalised: Json) -> bytes:
    try:
        text = _encode_strict(normalised)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encode(normalised).encode()
    # It writes NaN and infinities as null, too.
    return _encode(normalised).encode() if b"null" in text else text


def contents_key(contents: Iterable[Json]) -> bytes:
    """Bytes that are equal for contents that a model sees as the same; b"" for nothing."""
    normalised = [
        normalised_parts(content_parts(content)) if content else [] for content in contents
    ]
    return _encoded(normalised) if any(normalised) else b""


# --- messages in pieces


def is_piece(message: Json) -> bool:
    """True if a message is a piece where it follows one of the same role."""
    if not isinstance(message, OBJECT) or PIECES.keys().isdisjoint(message):
        return False
    return any(isinstance(message.get(name), list) for name in PIECES)


def is_sampled_piece(message: Json) -> bool:
    """True if a message is a piece of what the model said."""
    if not isinstance(message, OBJECT) or message.get("role") not in ("model", "assistant"):
        return False
    return is_piece(message)


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts but reasoning, with texts that follow each other in one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text) and isinstance(last, Text) and part.others == last.others:
            found[-1] = Text(last.text + part.text, part.others)
        elif not isinstance(part, Reasoning):
            found.append(part)
    return found


def joined_pieces(messages: Iterable[Json]) -> list[Json]:
    """The messages; pieces of the model that follow each other are one."""
    found: list[Json] = []
    for message in messages:
        if found and is_sampled_piece(message) and is_sampled_piece(found[-1]):
            last = found[-1]
            parts = {name: [*last[name], *message[name]] for name in PIECES if name in message}
            found[-1] = {**last, **parts}
        else:
            found.append(message)
    return found
