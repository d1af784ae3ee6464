"""LLM spans as they are exported: what is new in a call, cut out of spans that show all of it.

Other libraries write whole conversations on their spans, and so does our instrumentor where a span
processor of the user's is to see them. Of a span around a call that was captured in a rollout, the
exporter gets a copy without the messages that earlier spans have shown. The span itself stays as
it was written. All this is done by the thread that exports.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import semconv as sc
from otel_rollout.look.prefixes import SMALL, Prefixes, Texts, fingerprint, is_small
from otel_rollout.record import Recent, drawn_calls, guarded, process_state, stand_before
from otel_rollout.wire import Json, dumps, loads

cut_at_source = Recent()
"""The last spans of which the instrumentor was shown only what is new, by span id."""
_ROLLOUTS = 1024
"""The last rollouts and libraries of which is known what was exported."""
_TEXT = sc.OPERATION_TEXT_COMPLETION
_of_tool = re.compile(r"llm\.(?:tools|request\.functions)\.(\d+)\.").match
_PARAMETERS = "llm.invocation_parameters"
_INPUT = "input.value"


class _Shown:
    """What the spans of one library have shown in one rollout."""

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self.texts = Texts()
        self.tools: set[int] = set()


class Elided:
    """Makes the copies for one exporter."""

    def __init__(self) -> None:
        self._shown: OrderedDict[tuple[str, str], _Shown] = OrderedDict()

    def __call__(self, span: ReadableSpan) -> ReadableSpan:
        """The span as it is to be exported: itself, or a copy that shows what is new."""
        span_id = span.context.span_id if span.context else 0
        rollout_id = drawn_calls.get(span_id)
        content = process_state.content
        if rollout_id is None or span_id in cut_at_source:
            return span
        if content.shows == "full" or not content.is_whole:
            return span
        with guarded("an LLM span is exported whole", level=logging.DEBUG):
            scope = span.instrumentation_scope
            library = scope.name if scope else ""
            # A span of our own shows only what is new already.
            return span if library == sc.SCOPE else _elided(span, self._of(rollout_id, library))
        return span

    def _of(self, rollout_id: str, library: str) -> _Shown:
        shown = self._shown.setdefault((rollout_id, library), _Shown())
        self._shown.move_to_end((rollout_id, library))
        if len(self._shown) > _ROLLOUTS:
            self._shown.popitem(last=False)
        return shown


def _elided(span: ReadableSpan, shown: _Shown) -> ReadableSpan:
    before = span.attributes or {}
    attributes = dict(before)
    has_tools = _elide_tools(attributes, shown)
    for form in (_Messages, _Prompts, _Inference):
        written = form(attributes)
        if written.rows and attributes.get(sc.GEN_AI_OPERATION_NAME) == _TEXT:
            _elide_text(written, shown.texts)
            break
        if written.rows:
            _elide_messages(written, shown.prefixes)
            break
    if has_tools or written.elided:
        _elide_repeated(attributes, written, has_tools=has_tools)
    if attributes == before:
        return span
    changed = copy.copy(span)
    bounded = BoundedAttributes(attributes=attributes, immutable=False)
    bounded.dropped = getattr(span, "dropped_attributes", 0)
    changed._attributes = bounded
    return changed


def _elide_messages(written: _Written, prefixes: Prefixes) -> None:
    rows, attributes = written.rows, written.attributes
    place = prefixes.place(
        [written.key(row) for row in rows], lambda i: written.role(rows[i]) == "assistant"
    )
    for reply in written.replies():
        prefixes.replied(place, [written.key(reply)])
    attributes.setdefault(sc.TURN, place.turn)
    if place.before and not is_small(rows):
        written.elided = attributes[sc.ELIDED_MESSAGES] = place.before
        written.before = stand_before(place.before, place.known)
        written.cut()


def _elide_text(written: _Written, texts: Texts) -> None:
    """Cut the prompt of a text completion, which holds the conversation as one text."""
    prompt = _only_text(written.rows[0])
    if len(written.rows) > 1 or prompt is None:
        return
    length, before, turn = texts.place(prompt)
    for reply in written.replies():
        texts.replied(prompt, _only_text(reply) or "", before, turn)
    written.attributes.setdefault(sc.TURN, turn)
    if before and len(prompt) > SMALL:
        written.before = stand_before(before, turn - 1)
        written.attributes[sc.ELIDED_MESSAGES] = before
        shown = [_as_row("user", written.before), _as_row("user", prompt[length:])]
        written.attributes[sc.GEN_AI_INPUT_MESSAGES] = dumps(shown)


def _only_text(row: Mapping[str, Json]) -> str | None:
    """The text that a message of the conventions is. None: it has something else."""
    parts = row.get("parts")
    part = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
    text = part.get("content") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None


def _as_row(role: str, text: str) -> dict[str, Json]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


class _Written:
    """The messages of an LLM span, in one of the usual forms."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        self.elided = 0
        """Number of messages to be cut from the beginning."""
        self.before = ""
        """The text in their place."""
        self.rows: list[dict[str, Json]] = self.read()

    def read(self) -> list[dict[str, Json]]:
        """The messages of the request; [] if the span has none in this form."""
        raise NotImplementedError

    def replies(self) -> list[dict[str, Json]]:
        """The messages that the model said, one for each choice."""
        raise NotImplementedError

    def role(self, row: Mapping[str, Json]) -> Json:
        """The role of a message."""
        return row.get("role")

    def key(self, row: Mapping[str, Json]) -> int:
        """The key of a message by what is visible of it."""
        raise NotImplementedError

    def cut(self) -> None:
        """Cut the first messages from the attributes."""
        raise NotImplementedError


class _Messages(_Written):
    """The conventions' own: JSON in one attribute, the instructions perhaps in another."""

    def read(self) -> list[dict[str, Json]]:
        told = _rows(self.attributes.get(sc.GEN_AI_SYSTEM_INSTRUCTIONS))
        self._told = [{"role": "system", "parts": told}] if told else []
        return [*self._told, *_rows(self.attributes.get(sc.GEN_AI_INPUT_MESSAGES))]

    def replies(self) -> list[dict[str, Json]]:
        return _rows(self.attributes.get(sc.GEN_AI_OUTPUT_MESSAGES))

    def key(self, row: Mapping[str, Json]) -> int:
        parts = row.get("parts")
        keys = tuple(map(_part, parts)) if isinstance(parts, list) else (fingerprint(parts),)
        return hash((row.get("role"), tuple(key for key in keys if key is not None)))

    def cut(self) -> None:
        shown = [_as_row("system", self.before), *self.rows[self.elided :]]
        self.attributes[sc.GEN_AI_INPUT_MESSAGES] = dumps(shown)
        if self._told:
            del self.attributes[sc.GEN_AI_SYSTEM_INSTRUCTIONS]


def _rows(value: object) -> list[dict[str, Json]]:
    rows = loads(value) if isinstance(value, str) else value
    is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return rows if is_list else []  # type: ignore[return-value]


def _part(part: Json) -> int | None:
    """The key of a part. None: it is left out, as reasoning and empty texts are."""
    if not isinstance(part, dict):
        return fingerprint(part)
    kind, text = part.get("type"), part.get("content")
    if kind in ("reasoning", "thinking"):
        return None
    if kind == "text":
        return fingerprint(text) if text else None
    return fingerprint(part)


class _Numbered(_Written):
    """Attributes for each field of each message, which is numbered."""

    asked: str
    said: str
    fields: str
    """Prefixes of the names: of the request, of the reply, and of a field of a message."""

    def read(self) -> list[dict[str, Json]]:
        return _numbered(self.attributes, self.asked)

    def replies(self) -> list[dict[str, Json]]:
        return _numbered(self.attributes, self.said)

    def role(self, row: Mapping[str, Json]) -> Json:
        return row.get(f"{self.fields}role")

    def key(self, row: Mapping[str, Json]) -> int:
        unseen = ("finish_reason", "reasoning")
        return fingerprint({k: v for k, v in row.items() if v and not k.endswith(unseen)})

    def cut(self) -> None:
        for name in [name for name in self.attributes if name.startswith(self.asked)]:
            del self.attributes[name]
        before = {f"{self.fields}role": "system", f"{self.fields}content": self.before}
        for number, row in enumerate([before, *self.rows[self.elided :]]):
            self.attributes |= {f"{self.asked}{number}.{k}": v for k, v in row.items()}


class _Prompts(_Numbered):
    asked, said, fields = sc.GEN_AI_PROMPT, sc.GEN_AI_COMPLETION, ""


class _Inference(_Numbered):
    asked, said, fields = "llm.input_messages.", "llm.output_messages.", "message."


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Json]]:
    rows: dict[int, dict[str, Json]] = {}
    for name, value in attributes.items():
        number, _, field = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal():
            rows.setdefault(int(number), {})[field] = value
    return [rows[number] for number in sorted(rows)]


def _elide_tools(attributes: dict[str, Any], shown: _Shown) -> bool:
    """Take tool definitions off that an earlier span has shown; True if there were some."""
    names = [n for n in attributes if n == sc.GEN_AI_TOOL_DEFINITIONS or _of_tool(n)]
    key = hash(tuple((name, attributes[name]) for name in sorted(names)))
    if not names or key not in shown.tools:
        shown.tools.add(key)
        return False
    whole = attributes.get(sc.GEN_AI_TOOL_DEFINITIONS)
    numbers = {tool[1] for name in names if (tool := _of_tool(name))}
    attributes[sc.ELIDED_TOOLS] = len(numbers) if whole is None else len(_rows(whole))
    for name in names:
        del attributes[name]
    return True


def _elide_repeated(attributes: dict[str, Any], written: _Written, *, has_tools: bool) -> None:
    """Take off what repeats the request as a whole beside its messages and tools."""
    for name in (_PARAMETERS, _INPUT):
        text = attributes.get(name)
        if not isinstance(text, str):
            continue
        try:
            value = loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            if has_tools:
                value.pop("tools", None)
            for key in ("messages", "input"):
                if isinstance(value.get(key), list) and written.elided:
                    before = {"role": "system", "content": written.before}
                    value[key] = [before, *value[key][written.elided :]]
            attributes[name] = dumps(value)
        elif name == _INPUT and written.elided:
            attributes[name] = written.before
