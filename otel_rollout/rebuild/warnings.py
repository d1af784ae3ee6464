"""Warnings of a trajectory: short sentences about what is missing or uncertain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.rollout_span import Fields, expected
from otel_rollout.spans import Exchange
from otel_rollout.trajectory import Completion, Conversations, is_unread, sentences
from otel_rollout.wire import Json, api_of

_UNKNOWN_LOGPROBS = ("NaN", "Infinity", "-9999", "e+3", "e38", "e308", "0" * 30, "-340282")
"""Texts without which no response has a log-probability that is read as None, but for null. Every
server's name for one has "prob" in it."""


def missed_calls(fields: Fields, *, outside: bool = True) -> list[str]:
    """What the span of a rollout, or of a part of one, says of calls that were not captured.

    outside: also of those that were made outside any rollout.
    """
    return [
        *map(_uncaptured, fields.read(sc.ROLLOUT_UNCAPTURED, _counted(2)) or ()),
        *map(_outside, (fields.read(sc.ROLLOUT_OUTSIDE, _counted(1)) or ()) if outside else ()),
    ]


def _counted(names: int) -> Callable[[Json], list[Json]]:
    """Reads rows of so many texts and a count."""

    def rows(value: Json) -> list[Json]:
        for *texts, count in value:
            if len(texts) != names or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"expected {names} texts and a count")
            expected(count, int)
        return list(value)

    return rows


def _uncaptured(row: Json) -> str:
    library, path, count = row
    requests, were = ("requests", "were") if count > 1 else ("request", "was")
    return sentences.UNCAPTURED(
        count=count, requests=requests, path=path, library=library, were=were
    )


def _outside(row: Json) -> str:
    place, count = row
    calls, were = ("model calls", "were") if count > 1 else ("model call", "was")
    return sentences.OUTSIDE(count=count, calls=calls, were=were, place=place)


def _unknown_in(completion: Completion) -> list[str]:
    found: list[str] = []
    exchange = completion.exchange
    lacks_id = exchange.reply_id is None and completion.api.id_name is not None
    if completion.items and lacks_id and completion.choice_index == 0:
        found.append(sentences.NO_ID(id=repr(completion.id)))
    text = exchange.body or exchange.events or ""
    if "prob" in text and any(mark in text for mark in _UNKNOWN_LOGPROBS):
        unknown = (completion.logprobs or []).count(None)
        if unknown:
            found.append(sentences.NO_NUMBERS(id=repr(completion.id), count=unknown))
    return found


def repeated_ids(completions: Sequence[Completion]) -> list[str]:
    spans: dict[str, set[str]] = {}
    for completion in completions:
        spans.setdefault(completion.id, set()).add(completion.span_id)
    return [
        sentences.REPEATED(count=len(ids), id=repr(name), again=repr(name))
        for name, ids in spans.items()
        if len(ids) > 1
    ]


def damage_of(exchanges: Sequence[Exchange]) -> list[str]:
    """What is not read of exchanges, since their spans lack it or nothing knows it, as warnings."""
    return [
        *(
            sentences.DAMAGED(span=e.span_id, damage=damage)
            for e in exchanges
            for damage in e.damage
        ),
        *(
            sentences.UNREAD(span=e.span_id, path=repr(e.path))
            for e in exchanges
            if _has_unread_choices(e)
        ),
        *(sentences.NO_SHAPE(span=e.span_id, path=repr(e.path)) for e in exchanges if is_unread(e)),
    ]


def _has_unread_choices(exchange: Exchange) -> bool:
    if api_of(exchange.path) is not None or exchange.status != "complete":
        return False
    if '"choices"' not in (exchange.body or exchange.events or ""):
        return False
    reply = exchange.reply
    return isinstance(reply, dict) and bool(reply.get("choices"))


def uncertain(conversations: Conversations) -> list[str]:
    completions = conversations.completions
    return [
        *(sentence for completion in completions for sentence in _unknown_in(completion)),
        *repeated_ids(completions),
        *conversations.ambiguities,
        *filter(None, [conversations.rewriting]),
    ]
