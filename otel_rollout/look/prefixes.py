"""The conversations that LLM spans have shown, as hashes of their prefixes.

The one idea: a call repeats the conversation so far, so the longest prefix of its messages that an
earlier span has shown need not be shown again. A prefix is one 64-bit hash, chained from message to
message; no content is kept. Replies count as shown: they are the output of their spans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_rollout.wire import Json

SMALL = 2000
"""Characters of text up to which a conversation is shown whole."""
_START = 0
"""The hash of the prefix without a message."""
_TRIES = 16
"""The most lengths at which the beginning of a prompt is compared."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a call in its conversation."""

    before: int
    """Number of its first messages that earlier spans have shown, never of the last one."""
    known: int
    """Number of turns in these."""
    turn: int
    """Number of the call in its conversation, from 1 on."""
    end: int
    """Hash of all its messages."""


class Prefixes:
    """The prefixes of conversations that were shown, each with the number of turns in it."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {_START: 0}
        self._ends: set[int] = set()
        """Prefixes that were the whole request of a call, or end with its reply."""
        self._lock = threading.RLock()  # a stream may end while the garbage collector runs

    def place(
        self, keys: Sequence[int | None], is_said: Callable[[int], bool], start: int = _START
    ) -> Place:
        """The place of a call with these messages, which count as shown from now on.

        keys: one for each message. None: it is skipped, as reasoning is.
        is_said: asked with the index of a message; True if a model said it.
        start: hash of the conversation that the messages follow.
        """
        with self._lock:
            end, first = start, 0
            for first, key in enumerate([*keys, 0]):
                longer = end if key is None else hash((end, key))
                if first == len(keys) or longer not in self._turns:
                    break
                end = longer
            known = turns = self._turns.get(end, 0)
            # A reply that was replayed edited still is a turn; examples in a prompt are none.
            goes_on = known > 0 or end in self._ends
            was_said = False
            for index in range(first, len(keys)):
                said = is_said(index)
                turns += goes_on and said and not was_said
                was_said = said
                key = keys[index]
                end = end if key is None else hash((end, key))
                self._turns.setdefault(end, turns)
            self._ends.add(end)
            turn = self._turns.get(end, 0) + 1
        return Place(max(0, min(first, len(keys) - 1)), known, turn, end)

    def replied(self, place: Place, keys: Sequence[int | None]) -> int:
        """A reply to the call was shown; the hash of the conversation that ends with it."""
        with self._lock:
            end = place.end
            for key in keys:
                end = end if key is None else hash((end, key))
                self._turns[end] = place.turn
            self._ends.add(end)
        return end


class Texts:
    """The beginnings of prompts of text completions that were shown."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        """By length and hash: the number of texts that it was put together of, and of turns."""
        self._lengths: set[int] = set()
        self._lock = threading.RLock()

    def place(self, prompt: str) -> tuple[int, int, int]:
        """Characters of the prompt that were shown, the texts in these, and the call's turn."""
        with self._lock:
            lengths = sorted(length for length in tuple(self._lengths) if length < len(prompt))
            for length in lengths[: -_TRIES - 1 : -1]:
                found = self._known.get((length, hash(prompt[:length])))
                if found is not None:
                    break
            else:
                length, found = 0, (0, 0)
            texts, turns = found
            self._lengths.add(len(prompt))
            self._known.setdefault((len(prompt), hash(prompt)), (texts + 1, turns))
        return length, texts, turns + 1

    def replied(self, prompt: str, reply: str, texts: int, turn: int) -> None:
        """A reply to the prompt was shown."""
        with self._lock:
            whole = prompt + reply
            self._lengths.add(len(whole))
            self._known[len(whole), hash(whole)] = texts + 2, turn


# --- keys: a message by what is visible of it


def members(value: Any) -> Mapping[str, Any]:
    """The members of a JSON object, or of a client's model of one."""
    if isinstance(value, Mapping):
        return value
    extra = getattr(value, "__pydantic_extra__", None)
    own: dict[str, Any] = getattr(value, "__dict__", {})
    return {**own, **extra} if extra else own


def fingerprint(value: Json) -> int:
    """A hash of a JSON value, or of a client's model of one; what is None is left out."""
    if value is None or isinstance(value, str | int | float):
        return hash(value)
    if isinstance(value, Mapping) or hasattr(value, "__pydantic_fields_set__"):
        items = members(value).items()
        return hash(frozenset((k, fingerprint(v)) for k, v in items if v is not None))
    if isinstance(value, list | tuple):
        return hash(tuple(map(fingerprint, value)))
    return hash(repr(value))


def _content(content: Any) -> int:
    """A text and a list with that text alone are one; so are None and what is empty."""
    if isinstance(content, str) or not content:
        return hash(content or None)
    if not isinstance(content, list | tuple):
        return fingerprint(content)
    parts = tuple(map(_part, content))
    return parts[0] if len(parts) == 1 else hash(parts)


def _part(part: Any) -> int:
    text = part if isinstance(part, str) else members(part).get("text")
    return hash(text) if isinstance(text, str) else fingerprint(part)


def _call(call: Any) -> Hashable:
    own = members(call)
    body = members(own.get("function") or own.get("custom") or {})
    given = body.get("arguments", body.get("input"))
    return own.get("id"), body.get("name"), fingerprint(given)


def chat_key(message: Any, role: str | None = None) -> int:
    """The key of a chat message; `role` takes the place of its own."""
    own = members(message)
    role = role or own.get("role")
    if role != "assistant":
        result = own.get("tool_call_id")
        return hash((role, _content(own.get("content")), result, own.get("name")))
    former, audio = own.get("function_call"), own.get("audio")
    return hash(
        (
            role,
            _content(own.get("content")),
            own.get("refusal") or None,
            tuple(map(_call, own.get("tool_calls") or ())),
            _call({"function": former}) if former else None,
            members(audio).get("id") if audio else None,
        )
    )


_RESULTS = ("function_call_output", "custom_tool_call_output")


def item_key(item: Any) -> int | None:
    """The key of an item of the Responses API. None: reasoning, which agents may leave out."""
    own = members(item)
    kind = own.get("type") or "message"
    if kind == "reasoning":
        return None
    if kind == "message":
        return hash((own.get("role"), _content(own.get("content"))))
    if kind in ("function_call", "custom_tool_call"):
        given = own.get("arguments", own.get("input"))
        return hash((kind, own.get("call_id"), own.get("name"), fingerprint(given)))
    if kind in _RESULTS:
        return hash((kind, own.get("call_id"), _content(own.get("output"))))
    return fingerprint({k: v for k, v in own.items() if k not in ("id", "status")})


def is_said_item(item: Any) -> bool:
    """True if a model said this item of the Responses API."""
    own = members(item)
    if (own.get("type") or "message") == "message":
        return own.get("role") == "assistant"
    return not str(own.get("type")).endswith("_output")


def is_small(messages: Sequence[Any]) -> bool:
    """True if the texts in these messages are no longer than `SMALL` together."""
    left = SMALL
    for message in messages:
        left -= _size(message, left)
        if left < 0:
            return False
    return True


def _size(value: Any, most: int) -> int:
    """Characters of the texts in a JSON value; counting ends above `most`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping) or hasattr(value, "__pydantic_fields_set__"):
        parts: Sequence[Any] = [v for k, v in members(value).items() if k not in _NAMES]
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 0
    size = 0
    for part in parts:
        size += _size(part, most - size)
        if size > most:
            break
    return size


_NAMES = ("role", "type", "id", "call_id", "tool_call_id", "status", "name")
"""Members that are no text."""
