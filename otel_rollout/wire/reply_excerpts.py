"""The texts and token counts of a reply, without parsing it whole.

LLM spans and the summary of a rollout ask for them on the agent's thread. Log-probabilities and
token ids are most of a reply that is trained on, and are not read here. Pure. What is not found is
None: it never raises and never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from otel_rollout.wire.api import ModelApi
from otel_rollout.wire.apis import api_of, merge
from otel_rollout.wire.json import Json, scan, try_loads
from otel_rollout.wire.message import is_reasoning, shown_message

_WHOLE = 1 << 14
"""Bytes of a reply that is parsed whole."""
_USAGE = 1 << 10
"""Bytes in which a reply counts its tokens."""
_TRIES = 4
"""The last places in which a count is looked for: chunks may have `null` there."""
_LAST = 1 << 14
"""Bytes at the end of a stream that have its last counts."""
_value = re.compile(r"\s*:\s*(?=\{)").match
_choice = re.compile(
    rb'"choices"\s*:\s*\[\s*\{\s*(?:"index"\s*:\s*0\s*,\s*)?"message"\s*:\s*'
).search
_CALLS = (b'"tool_calls"', b'"function_call"')
_is_given = re.compile(rb"\s*:\s*[\[{](?!\s*[\]}])").match
_SHOWN = 1 << 16
"""Characters of its text after which a long stream is read no further."""
_TAIL = 1 << 12
"""Bytes of a long reply in which its message begins, and its finish reason ends it."""
_NEXT_CHOICE = (b'"index":1,', b'"index": 1,')


class TokenCounts(NamedTuple):
    """How many tokens a server counted for one call."""

    input: int
    """Tokens of the prompt, those that were read from a cache included."""
    output: int
    """Tokens that were sampled."""
    cached: int | None
    """Tokens of the prompt that were read from a cache. None: not reported."""


def token_counts(body: bytes, api: ModelApi, *, events: bool) -> TokenCounts | None:
    """The token counts in a reply, or in the events of one; None where it does not say both.

    api: that was asked. events: True if they are events, of which the last ones count.
    """
    latest: dict[str, Json] = {}
    for found in _objects(body, f'"{api.usage_name}"'.encode(), _LAST if events else len(body)):
        # A stream may count the prompt in its first event, and the reply in its last.
        latest = {**found, **{name: count for name, count in latest.items() if count is not None}}
        if (counts := counts_of(api.usage({api.usage_name: latest}) or {})) is not None:
            return counts
    tail = body[-_USAGE:].decode("utf-8", "replace")
    numbers = {name: int(n) for name in api.count_names for n in _numbers(name, tail)[-1:]}
    return counts_of(api.usage(numbers) or {}) if numbers else None


def _numbers(name: str, text: str) -> list[str]:
    return re.findall(rf'"{name}"\s*:\s*(\d{{1,15}})\b', text)


def _objects(body: bytes, name: bytes, length: int) -> Iterator[dict[str, Json]]:
    """The objects that are members of this name: the last ones, latest first, then the first.

    length: bytes at the end in which the last ones are.
    """
    position = len(body)
    least = position - length if position > length else 0
    for _ in range(_TRIES):
        position = body.rfind(name, least, position)
        if position < 0:
            return
        if (found := _object(body, position + len(name))) is not None:
            yield found
    if (first := _object(body, body.find(name) + len(name))) is not None:
        yield first


def _object(body: bytes, start: int) -> dict[str, Json] | None:
    text = body[start : start + _USAGE].decode("utf-8", "replace")
    match = _value(text)
    value = _scanned(text, match.end()) if match else None
    return value if isinstance(value, dict) else None


def _scanned(text: str, start: int) -> Json:
    try:
        return scan(text, start)[0]
    except (ValueError, RecursionError):
        return None


_APART = {"cache_read_input_tokens", "cache_creation_input_tokens"}


def counts_of(usage: dict[str, Json]) -> TokenCounts | None:
    """The counts in `usage`; None where it does not have both of prompt and reply."""
    asked = _first(usage, "prompt_tokens", "input_tokens", "inputTokens")
    sampled = _first(usage, "completion_tokens", "output_tokens", "outputTokens")
    if asked is None or sampled is None:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _first(details, "cached_tokens") if isinstance(details, dict) else None
    if not _APART & usage.keys():
        return TokenCounts(asked, sampled, cached)
    apart = _first(usage, "cache_read_input_tokens")  # Anthropic counts them apart
    created = _first(usage, "cache_creation_input_tokens") or 0
    whole = asked + (apart or 0) + created
    return TokenCounts(whole, sampled, cached if apart is None else apart)


def _first(counts: dict[str, Json], *names: str) -> int | None:
    for name in names:
        count = counts.get(name)
        if type(count) is int and count >= 0:
            return count
    return None


class ShownReply(NamedTuple):
    """One choice of a reply, for people."""

    finish_reason: str | None
    """Why sampling ended, as the server sent it. None: not sent."""
    items: tuple[Json, ...]
    """What was sampled, in wire form; of a long stream its text alone, as a message."""

    @property
    def text(self) -> str:
        """Text and tool calls."""
        return "\n".join(map(shown_message, self.items))


def shown_replies(body: bytes, path: str, *, events: bool) -> list[ShownReply]:
    """The choices of a reply, or of the events of one; [] where it has none.

    Of a long reply only the first choice is read where that can be had without the rest.
    """
    api = api_of(path)
    if api is None:
        return []
    if len(body) > _WHOLE:
        message = _streamed_message(api, body) if events else _message_in(body)
        if message is not None:
            names, tail = "|".join(api.finish_names), body[-_TAIL:].decode("utf-8", "replace")
            found = re.findall(rf'"(?:{names})"\s*:\s*"([^"]+)"', tail)
            return [ShownReply(found[-1] if found else None, (message,))]
    text = body.decode("utf-8", "replace")
    reply = merge(text, path=path).body if events else try_loads(text)
    if not isinstance(reply, dict):
        return []
    return [
        ShownReply(api.finish_reason(sampled.choice), tuple(sampled.items))
        for sampled in api.sampled({}, None, reply)
    ]


def reply_text(body: bytes, path: str, *, events: bool) -> str | None:
    """The text of the first choice of a reply, without reasoning; None where it has none."""
    items = next((reply.items for reply in shown_replies(body, path, events=events)), ())
    texts = [shown_message(item, reasoning=False) for item in items if not is_reasoning(item)]
    return "\n".join(texts) or None


def _message_in(body: bytes) -> dict[str, Json] | None:
    """The message of the first choice of a long reply, of which it is the lesser part."""
    start = match.end() if (match := _choice(body, 0, _TAIL)) else len(body)
    for end in (start + _WHOLE, len(body)):
        if isinstance(found := _scanned(body[start:end].decode("utf-8", "replace"), 0), dict):
            return found
    return None


def _streamed_message(api: ModelApi, body: bytes) -> dict[str, Json] | None:
    """The message of a long stream of one choice that is a text alone, as far as it is shown."""
    if api.delta_name is None or any(mark in body for mark in _NEXT_CHOICE) or _has_calls(body):
        return None
    text = body.decode("utf-8", "replace")
    mark = f'"{api.delta_name}":"'
    if mark not in text:
        mark = f'"{api.delta_name}": "'
    texts: list[str] = []
    length = 0
    for piece in text.split(mark)[1:]:
        value = piece[: piece.find('"')]
        if "\\" in value:
            value = str(_scanned(f'"{piece}', 0) or "")
        texts.append(value)
        length += len(value)
        if length > _SHOWN:
            break
    return {"role": "assistant", "content": "".join(texts)} if length else None


def _has_calls(body: bytes) -> bool:
    """True if a member that has calls of tools is not empty."""
    for name in _CALLS:
        position = body.find(name)
        while position >= 0:
            position += len(name)
            if _is_given(body, position):
                return True
            position = body.find(name, position)
    return False
