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
from otel_rollout.wire.json import Json, try_loads
from otel_rollout.wire.scanning import elements, members

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
    "logprobs": ("logprobs", "prompt_logprobs"),  # those of a prompt that is echoed
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

    def may_be_in(self, body: bytes) -> bool:
        """False if nothing in a reply, or a chunk of one, is hidden."""
        names = ("usage", *self.cut, *self.null) if self.count else (*self.cut, *self.null)
        return any(f'"{name}"'.encode() in body for name in names)


def hiding_of(added: Mapping[str, Json], request: bytes) -> Hiding | None:
    """What is to be hidden where these fields were added to a request; None: nothing is."""
    cut = frozenset(name for field in added for name in _CUT.get(field, ()))
    null = frozenset(
        name
        for field in added
        for name in _NULL.get(field, ())
        if name == "logprobs" or f'"{name}"'.encode() not in request
    )
    options = added.get("stream_options")
    count = isinstance(options, Mapping) and bool(options.get("include_usage"))
    return Hiding(cut, null, count) if cut or null or count else None


def hidden_reply(body: bytes, hiding: Hiding) -> bytes:
    """A whole reply, or a chunk of one, as the client is shown it."""
    if not hiding.may_be_in(body):
        return body
    try:  # texts are latin-1 views of bytes, see `wire.json`
        return _without(body.decode("latin-1"), hiding).encode("latin-1")
    except (ValueError, RecursionError):
        return body


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
    chunk = event[start:end]
    if hiding.may_be_in(chunk) and _is_hidden(try_loads(chunk.decode("utf-8", "replace")), hiding):
        return b""
    return head + hidden_reply(chunk, hiding) + event[end:]


_HEAD = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier"))
"""Members that every chunk of a stream has."""


def _is_hidden(chunk: Json, hiding: Hiding) -> bool:
    """True for a chunk that the server would not have sent without what is hidden."""
    if not isinstance(chunk, dict):
        return False
    choices = chunk.get("choices")
    choices = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    shown = {"choices", "index", *_HEAD, *hiding.cut, *hiding.null}
    rest = [value for each in (chunk, *choices) for key, value in each.items() if key not in shown]
    is_asked = any(each.get(name) is not None for each in (chunk, *choices) for name in hiding.cut)
    return is_asked and all(value is None or value == {} for value in rest)


def _without(text: str, hiding: Hiding, *, is_choice: bool = False) -> str:
    """The object without the members that are hidden. ValueError for what is no object."""
    parts: list[str] = []
    first = position = text.index("{") + 1
    indent = text[first : len(text) - len(text[first:].lstrip(_SPACE))]
    for key, start, end in members(text, lambda *_: None):
        before, value = text[position:start], text[start:end]
        position = end
        is_empty_count = key == "usage" and value == "null" and hiding.count and not is_choice
        if key in hiding.cut or is_empty_count:
            continue
        if not parts and first != start - len(before):  # it follows what was cut
            before = indent + before.lstrip(_SPACE + ",")
        if key in hiding.null:
            value = "null"
        elif key == "choices" and value.startswith("[") and not is_choice:
            value = _choices_without(value, hiding)
        parts += (before, value)
    return text[:first] + "".join(parts) + text[position:]


def _choices_without(text: str, hiding: Hiding) -> str:
    parts: list[str] = []
    position = 0
    for value, start, end in elements(text, 1):
        choice = text[start:end]
        if isinstance(value, dict):
            choice = _without(choice, hiding, is_choice=True)
        parts += (text[position:start], choice)
        position = end
    return "".join(parts) + text[position:]
