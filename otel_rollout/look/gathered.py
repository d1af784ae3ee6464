"""The chunks of a streamed chat or text completion, put together as they come.

An instrumentor that is shown each chunk pays for each of them. What it needs to know is little: the
texts, the tool calls, why the reply ended, and its usage. So a chunk costs a few look-ups here, and
the instrumentor is shown two: the first one, and one that has all the others in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_rollout.look.prefixes import members
from otel_rollout.look.shapes import plain

ROOM = 1024
"""The most choices, or tool calls of a choice, that are shown of a stream."""
_NAMED = ("id", "model", "object", "created", "system_fingerprint", "service_tier")


class _Text:
    """A text in pieces, of which those up to `taken` were shown."""

    __slots__ = ("pieces", "taken")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.taken = 0

    def add(self, piece: object) -> None:
        if piece and isinstance(piece, str):
            self.pieces.append(piece)

    def take(self) -> str:
        taken, self.taken = self.taken, len(self.pieces)
        return "".join(self.pieces[taken:])

    @property
    def whole(self) -> str:
        return "".join(self.pieces)


class _Call:
    """A tool call of a choice."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.arguments = _Text()

    def whole(self, arguments: str) -> dict[str, Any]:
        return {"id": self.id, "function": {"name": self.name, "arguments": arguments}}


class _Choice:
    """One choice of the reply."""

    def __init__(self) -> None:
        self.content, self.refusal, self.reasoning, self.text = _Text(), _Text(), _Text(), _Text()
        self.role: str | None = None
        self.reason: str | None = None
        self.further: dict[str, Any] = {}
        self.calls: dict[int, _Call] = {}
        self._known = 0
        """Number of tool calls so far, those included that are missing."""

    def add(self, own: Mapping[str, Any]) -> None:
        """Take in a choice of a chunk."""
        self.reason = own.get("finish_reason") or self.reason
        self.text.add(own.get("text"))
        for name in ("content_filter_results", "usage"):
            if name in own:
                self.further[name] = plain(own[name])
        delta = own.get("delta")
        if delta is None:
            return
        said = members(delta)
        self.role = said.get("role") or self.role
        self.content.add(said.get("content"))
        self.refusal.add(said.get("refusal"))
        self.reasoning.add(said.get("reasoning_content") or said.get("reasoning"))
        former = said.get("function_call")
        for call in said.get("tool_calls") or ([{"function": former}] if former else ()):
            self._add_call(members(call))

    def _add_call(self, own: Mapping[str, Any]) -> None:
        index = own.get("index")
        if index is None:  # some servers send none
            index = self._known if own.get("id") else max(self._known - 1, 0)
        if not 0 <= index < ROOM:
            return
        self._known = max(self._known, index + 1)
        call = self.calls.setdefault(index, _Call())
        body = members(own.get("function") or own.get("custom") or {})
        call.id = own.get("id") or call.id
        call.name = body.get("name") or call.name
        call.arguments.add(body.get("arguments", body.get("input")))

    def take(self) -> dict[str, Any]:
        """The choice of a chunk that has what came since the last time."""
        calls: list[dict[str, Any]] = []
        for index in range(self._known):
            call = self.calls.get(index)
            calls.append({"index": index} if call is None else call.whole(call.arguments.take()))
            calls[-1]["index"] = index
        reasoning = self.reasoning.take()
        delta = {
            "role": self.role,
            "content": self.content.take() + self.refusal.take(),
            "tool_calls": calls,
            **({"reasoning_content": reasoning} if reasoning else {}),
        }
        return {
            **self.further,
            "delta": delta,
            "text": self.text.take(),
            "finish_reason": self.reason,
        }

    def whole(self) -> dict[str, Any]:
        """The choice as it would be in a reply that is not streamed."""
        calls = [call.whole(call.arguments.whole) for _, call in sorted(self.calls.items())]
        message = {
            "role": "assistant",
            "content": self.content.whole,
            "refusal": self.refusal.whole,
            "tool_calls": calls,
        }
        return {"message": message, "text": self.text.whole}


class GatheredStream:
    """A streamed reply of the Chat Completions or the text completions API."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._known = 0
        """Number of choices so far, those included that are missing."""
        self.has_news = False
        """True if something came since `take`."""

    def add(self, chunk: Any) -> None:
        """Take in a chunk. Raises for one of an odd shape, of which it takes in what it can."""
        self.has_news = True
        own = members(chunk)
        for name in _NAMED:
            value = own.get(name)
            if value:
                self._head[name] = value
        if own.get("usage") is not None:
            self._head["usage"] = own["usage"]
        if "prompt_filter_results" in own:
            self._head["prompt_filter_results"] = own["prompt_filter_results"]
        for choice in own.get("choices") or ():
            self._add(members(choice))

    def _add(self, own: Mapping[str, Any]) -> None:
        index = own.get("index") or 0
        if 0 <= index < ROOM:
            self._known = max(self._known, index + 1)
            self._choices.setdefault(index, _Choice()).add(own)

    def take(self) -> dict[str, Any]:
        """One chunk with all that came since the last time; its lists are in order and whole."""
        self.has_news = False
        choices: list[dict[str, Any]] = []
        for index in range(self._known):
            choice = self._choices.get(index)
            choices.append({**({} if choice is None else choice.take()), "index": index})
        chunk = {**self._head, "choices": choices}
        return {name: value if name == "choices" else plain(value) for name, value in chunk.items()}

    def whole(self) -> dict[str, Any]:
        """The reply so far as one that is not streamed has it, as far as it is visible."""
        return {"choices": [choice.whole() for _, choice in sorted(self._choices.items())]}
