"""Removes from a reply the fields that were requested only for training, not by the client.

The gateway calls it, for whole replies and for streams; a reply that is recorded keeps all. Pure.
Members are cut out of the JSON text, which is not written anew: what is left is, byte for
byte, what the server would have sent without the fields that were added to the request. A reply of
another shape than expected stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from otel_rollout.wire.framing import EventCutter, is_count
from otel_rollout.wire.json import Json, elements, members

_CUT: Mapping[str, tuple[str, ...]] = {
    "return_token_ids": ("token_ids", "prompt_token_ids", "response_token_ids"),
    "return_prompt_token_ids": ("prompt_token_ids",),
    "return_meta_info": ("meta_info",),
    "return_input_ids_in_sglext": ("sglext",),
    "return_output_ids_in_sglext": ("sglext",),
    "return_tokens": ("tokens",),
    "n_probs": ("completion_probabilities",),
}
"""Members of replies that servers send only if this field asks for them: vLLM's, SGLang's,
llama.cpp's."""
_NULL: Mapping[str, tuple[str, ...]] = {
    "logprobs": ("logprobs",),
    "top_logprobs": ("logprobs",),
    "prompt_logprobs": ("prompt_logprobs",),
}
"""Members of OpenAI's API, which servers send as null where nobody asks for them."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Hiding:
    """The members of a reply that the client does not get."""

    cut: frozenset[str]
    """Members that are cut out, of the reply and of its choices."""
    null: frozenset[str]
    """Members of which the value becomes null."""
    count: bool
    """True if the chunk that only counts tokens is left out, and the empty counts of others."""

    @property
    def _marks(self) -> tuple[bytes, ...]:
        return tuple(f'"{name}"'.encode() for name in (*self.cut, *self.null))


def hiding_of(added: Mapping[str, Json]) -> Hiding | None:
    """What is to be hidden where these fields were added to a request; None: nothing is."""
    cut = frozenset(name for field in added for name in _CUT.get(field, ()))
    null = frozenset(name for field in added for name in _NULL.get(field, ()))
    options = added.get("stream_options")
    count = isinstance(options, Mapping) and bool(options.get("include_usage"))
    return Hiding(cut, null, count) if cut or null or count else None


def hidden_reply(body: bytes, hiding: Hiding) -> bytes:
    """A whole reply, as the client is shown it."""
    return _shown(body, hiding)[0]


class HidingReader:
    """Shows a stream of server-sent events, as its chunks come, without what is hidden.

    reader = HidingReader(hiding)
    for chunk in stream:
        send(reader.shown(chunk))
    send(reader.rest())
    """

    def __init__(self, hiding: Hiding) -> None:
        self._hiding = hiding
        self._cutter = EventCutter()

    def shown(self, chunk: bytes) -> bytes:
        """What these bytes complete of the stream that the client is shown; may be nothing."""
        return b"".join([_shown_event(event, self._hiding) for event in self._cutter.cut(chunk)])

    def rest(self) -> bytes:
        """What is left of an event that has no end."""
        return _shown_event(self._cutter.rest(), self._hiding)


def _shown_event(event: bytes, hiding: Hiding) -> bytes:
    """One event as the client is shown it; nothing if all of its content is hidden."""
    if hiding.count and is_count(event):
        return b""
    start = event.find(b"{")
    head = event[:start]
    if start < 0 or not head.rstrip(b" ").endswith(b"data:") or b"\ndata:" in event[start:]:
        return event
    end = event.rfind(b"}") + 1
    shown, is_empty = _shown(event[start:end], hiding)
    return b"" if is_empty else head + shown + event[end:]


def _shown(body: bytes, hiding: Hiding) -> tuple[bytes, bool]:
    """A reply, or a chunk of one, as the client is shown it; True if it only was what is hidden."""
    if not (hiding.count and b'"usage"' in body) and not any(
        mark in body for mark in hiding._marks
    ):
        return body, False
    found = _Cutting(hiding)
    try:
        text = found.without(body.decode("latin-1"), is_choice=False)
    except (ValueError, RecursionError):
        return body, False
    return text.encode("latin-1"), found.is_empty


class _Cutting:
    """Cuts one reply. Texts are latin-1 views of bytes, see `wire.json`."""

    def __init__(self, hiding: Hiding) -> None:
        self._hiding = hiding
        self._has_cut = False
        """True if a list of token ids, or another member, was cut."""
        self._has_content = False
        """True if it has content beside what is hidden."""

    @property
    def is_empty(self) -> bool:
        """True for a chunk that the server would not have sent without what is hidden."""
        return self._has_cut and not self._has_content

    def without(self, text: str, *, is_choice: bool) -> str:
        """The object without the members that are hidden. ValueError for what is no object."""
        parts: list[str] = []
        first = position = text.index("{") + 1
        indent = text[first : len(text) - len(text[first:].lstrip(_SPACE))]
        for key, start, end in members(text, lambda *_: None):
            before, value = text[position:start], text[start:end]
            position = end
            if key in self._hiding.cut or self._is_empty_count(key, value, is_choice):
                self._has_cut = self._has_cut or (key in self._hiding.cut and value != "null")
                continue
            if not parts and first != start - len(before):  # it follows what was cut
                before = indent + before.lstrip(_SPACE + ",")
            parts += (before, self._value(key, value, is_choice))
        return text[:first] + "".join(parts) + text[position:]

    def _is_empty_count(self, key: str, value: str, is_choice: bool) -> bool:
        return self._hiding.count and key == "usage" and value == "null" and not is_choice

    def _value(self, key: str, value: str, is_choice: bool) -> str:
        if key in self._hiding.null:
            return "null"
        if is_choice:
            self._has_content = self._has_content or _is_content(key, value)
        elif key == "choices" and value.startswith("["):
            return self._choices(value)
        elif key not in _HEAD and value != "null":
            self._has_content = True
        return value

    def _choices(self, text: str) -> str:
        parts: list[str] = []
        position = 0
        for value, start, end in elements(text, 1):
            choice = text[start:end]
            if isinstance(value, dict):
                choice = self.without(choice, is_choice=True)
            parts += (text[position:start], choice)
            position = end
        return "".join(parts) + text[position:]


_HEAD = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier"))
"""Members that every chunk of a stream has."""


def _is_content(key: str, value: str) -> bool:
    """True if a member of a choice has content, and not only its place."""
    return key != "index" and value.strip(_SPACE) not in ("{}", "null")
