"""What is missing or uncertain in the exchanges of a trajectory, as short sentences.

All of it follows from the exchanges: a file of trajectories does not have it, its reader finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from otel_rollout.spans import EXACT_SOURCE, Exchange
from otel_rollout.trajectory import sentences
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.sampling import is_unread
from otel_rollout.wire import api_of


def uncertain(exchanges: Sequence[Exchange], conversations: Conversations) -> list[str]:
    """A sentence for each thing of these calls that is missing, cannot be read or is ambiguous."""
    completions = conversations.completions
    # What cannot be read is found where the completions are made of it.
    left = {c.span_id: c.exchange for c in completions if c.exchange.is_unanswered}
    found = list(_damage_of([left.get(e.span_id, e) for e in exchanges]))
    is_exact = all(exchange.source == EXACT_SOURCE for exchange in exchanges)
    for completion in completions if is_exact else ():
        found += _unknown_in(completion)
    if is_exact and any(completion.ids_are_withheld for completion in completions):
        found.append(sentences.NOT_ASKED())
    if refused := [each.exchange.refused for each in completions if _lacks_refused_ids(each)]:
        found.append(sentences.FIELDS_REFUSED(count=len(refused), fields=refused[0]))
    found += [*_repeated_ids(completions), *conversations.ambiguities]
    if is_exact and (rewriting := conversations.rewriting):
        found.append(rewriting)
    return found


def _unknown_in(completion: Completion) -> list[str]:
    found: list[str] = []
    exchange = completion.exchange
    lacks_id = exchange.reply_id is None and completion.api.id_name is not None
    if completion.items and lacks_id and completion.choice_index == 0:
        found.append(sentences.NO_ID(id=repr(completion.id)))
    asked = completion.choices_asked or 1
    came = completion.choices_in_response if asked > 1 and completion.status == "complete" else []
    if came[:1] == [completion.choice_index] and len(came) < asked:
        found.append(sentences.FEWER_CHOICES(id=repr(completion.id), asked=asked, came=len(came)))
    logprobs = completion.logprob_array
    if logprobs and math.isnan(sum(logprobs)) and (unknown := sum(map(math.isnan, logprobs))):
        found.append(sentences.NO_NUMBERS(id=repr(completion.id), count=unknown))
    return found


def _lacks_refused_ids(completion: Completion) -> bool:
    refused, status = completion.exchange.refused, completion.status
    return refused is not None and status == "complete" and completion.token_path is None


def _repeated_ids(completions: Sequence[Completion]) -> list[str]:
    spans: dict[str, set[str]] = {}
    for completion in completions:
        spans.setdefault(completion.id, set()).add(completion.span_id)
    return [
        sentences.REPEATED(count=len(ids), id=repr(name), again=repr(name))
        for name, ids in spans.items()
        if len(ids) > 1
    ]


def _damage_of(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for e in exchanges:
        for damage in e.damage:
            yield sentences.DAMAGED(span=e.span_id, damage=damage)
        for what in e.contradictions:
            yield sentences.CONTRADICTED(span=e.span_id, what=what)
        for blob in e.missing_blobs():
            yield sentences.NO_BLOB(span=e.span_id, blob=blob)
    for e in exchanges:
        if _has_unread_choices(e):
            yield sentences.UNREAD(span=e.span_id, path=repr(e.path))
    for e in exchanges:
        if is_unread(e):
            yield sentences.NO_SHAPE(span=e.span_id, path=repr(e.path))


def _has_unread_choices(exchange: Exchange) -> bool:
    if api_of(exchange.path) is not None or exchange.status != "complete":
        return False
    if '"choices"' not in (exchange.body_text or exchange.events or ""):
        return False
    reply = exchange.reply
    return isinstance(reply, dict) and bool(reply.get("choices"))
