"""What is new in a call of the OpenAI client, told before the instrumentor sees the call.

`News` finds the place of a call in its conversation (`prefixes.py`), gives the arguments that are
to be shown, and takes note of the reply. Each API that has conversations has a subclass.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from otel_rollout import semconv as sc
from otel_rollout.look.prefixes import (
    SMALL,
    Place,
    Prefixes,
    Texts,
    chat_key,
    fingerprint,
    is_said_item,
    is_small,
    item_key,
    members,
)
from otel_rollout.record import ActiveRollout, stand_before


class Shown:
    """What the LLM spans of one rollout have shown."""

    def __init__(self) -> None:
        self.chats = Prefixes()
        self.items = Prefixes()
        self.responses: dict[str, tuple[int, int, int | None]] = {}
        """By the id of a response: hash and number of the messages up to it, and the key of its
        instructions."""
        self.texts = Texts()
        self.tools: set[int] = set()


_shown: weakref.WeakKeyDictionary[ActiveRollout, Shown] = weakref.WeakKeyDictionary()


class News:
    """What is new in a call: the messages that no LLM span of its rollout has shown."""

    _TOOLS: ClassVar = ("tools", "functions")

    def __init__(self, shown: Shown, arguments: Mapping[str, Any]) -> None:
        self._shown = shown
        self._arguments = arguments
        self.turn = 1
        """Number of the call in its conversation, from 1 on."""
        self.elided = 0
        """Number of its messages that earlier spans show, and its own does not."""
        self.elided_tools = 0
        """Number of its tool definitions that an earlier span shows."""
        tools = next((arguments[name] for name in self._TOOLS if arguments.get(name)), None)
        if isinstance(tools, list | tuple):
            key = _tools_key(tools)
            self.elided_tools = len(tools) if key in shown.tools else 0
            shown.tools.add(key)
        self._find()

    def _find(self) -> None:
        """Set `turn` and `elided`."""

    def arguments(self) -> dict[str, Any]:
        """The arguments of the call, with the messages that are to be shown."""
        kept = dict(self._arguments)
        if self.elided_tools:
            for name in self._TOOLS:
                kept.pop(name, None)
        return {**kept, **self._cut()} if self.elided else kept

    def _cut(self) -> dict[str, Any]:
        return {}

    def replied(self, reply: Any) -> None:
        """The reply is here: a response of the client, or one of the same shape."""

    def attributes(self, *, is_cut: bool) -> dict[str, Any]:
        """Attributes of the LLM span. is_cut: it shows what `arguments` gives."""
        found: dict[str, Any] = {sc.TURN: self.turn}
        if is_cut and self.elided:
            found[sc.ELIDED_MESSAGES] = self.elided
        if is_cut and self.elided_tools:
            found[sc.ELIDED_TOOLS] = self.elided_tools
        return found


class ChatNews(News):
    """A call of the Chat Completions API."""

    def _find(self) -> None:
        messages = self._messages = self._arguments["messages"]
        self._place: Place | None = None
        if not isinstance(messages, list | tuple):
            return
        self._place = self._shown.chats.place(
            [chat_key(message) for message in messages],
            lambda index: members(messages[index]).get("role") == "assistant",
        )
        self.turn = self._place.turn
        self.elided = 0 if is_small(messages) else self._place.before

    def _cut(self) -> dict[str, Any]:
        assert self._place is not None
        before = {"role": "system", "content": stand_before(self.elided, self._place.known)}
        return {"messages": [before, *self._messages[self.elided :]]}

    def replied(self, reply: Any) -> None:
        place = self._place
        for choice in members(reply).get("choices") or () if place else ():
            message = members(choice).get("message")
            if message is not None and place is not None:
                self._shown.chats.replied(place, [chat_key(message, "assistant")])


class ResponsesNews(News):
    """A call of the Responses API: `instructions`, `input`, and what `previous_response_id` has."""

    def _find(self) -> None:
        own, shown = self._arguments, self._shown
        given = own.get("input")
        self._items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        self._place: Place | None = None
        if not isinstance(self._items, list | tuple):
            return
        previous = str(own.get("previous_response_id"))
        start, self._base, told = shown.responses.get(previous, (0, 0, None))
        instructions = own.get("instructions")
        self._told = chat_key({"role": "system", "content": instructions}) if instructions else None
        self._has_told = bool(instructions)
        self._repeats_told = self._has_told and self._base > 0 and told == self._told
        leading = [self._told] if self._has_told and not self._repeats_told else []
        self._leading = len(leading)
        keys = [*leading, *map(item_key, self._items)]
        self._place = shown.items.place(
            keys,
            lambda i: i >= self._leading and is_said_item(self._sequence[i - self._leading]),
            start,
        )
        self.turn = self._place.turn
        self._count = self._base + len(keys)
        is_whole = self._base == 0 and is_small([instructions or "", *self._items])
        self.elided = 0 if is_whole else self._base + self._place.before

    @property
    def _sequence(self) -> Sequence[Any]:
        return self._items or ()

    def _cut(self) -> dict[str, Any]:
        assert self._place is not None
        before = {
            "type": "message",
            "role": "system",
            "content": stand_before(self.elided, self._place.known),
        }
        first = self.elided - self._base
        cut: dict[str, Any] = {"input": [before, *self._sequence[max(0, first - self._leading) :]]}
        if self._repeats_told or (self._leading and first > 0):
            cut["instructions"] = None
        return cut

    def replied(self, reply: Any) -> None:
        own = members(reply)
        items = own.get("output")
        if self._place is None or not isinstance(items, list | tuple):
            return
        end = self._shown.items.replied(self._place, [item_key(item) for item in items])
        response_id = own.get("id")
        if isinstance(response_id, str):
            self._shown.responses[response_id] = end, self._count + len(items), self._told


class TextNews(News):
    """A call of the text completions API, with one prompt that is a text."""

    def _find(self) -> None:
        prompt = self._arguments.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        self._prompt = prompt if isinstance(prompt, str) else None
        if self._prompt is not None:
            self._before, self._texts, self.turn = self._shown.texts.place(self._prompt)
            self.elided = 0 if len(self._prompt) <= SMALL else self._texts

    def _cut(self) -> dict[str, Any]:
        prompt = self._prompt or ""
        return {"prompt": [stand_before(self.elided, self.turn - 1), prompt[self._before :]]}

    def replied(self, reply: Any) -> None:
        for choice in members(reply).get("choices") or () if self._prompt is not None else ():
            text = members(choice).get("text")
            if isinstance(text, str) and self._prompt is not None:
                self._shown.texts.replied(self._prompt, text, self._texts, self.turn)


_KINDS: Mapping[str, type[News]] = {
    "messages": ChatNews,
    "input": ResponsesNews,
    "prompt": TextNews,
}


def news_of(rollout: ActiveRollout, key: str, arguments: Mapping[str, Any]) -> News:
    """What is new in a call of this rollout, whose messages are in the argument `key`."""
    shown = _shown.get(rollout)
    if shown is None:
        shown = _shown.setdefault(rollout, Shown())
    return _KINDS[key](shown, arguments)


def _tools_key(tools: Sequence[Any]) -> int:
    try:
        return hash(json.dumps(tools))
    except (TypeError, ValueError):
        return fingerprint(tools)
