"""The completions of an exchange: one for each sampled choice, or for how the call failed.

A reply that is made in the background has its content in a later exchange: `with_retrieved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from otel_rollout.spans import Exchange, unread
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.reward import AllRewards
from otel_rollout.trajectory.side_calls import SideCalls
from otel_rollout.wire import (
    OBJECT,
    ModelApi,
    Sampled,
    api_of,
    error_text,
    extend_with,
    retrieval_of,
)

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What JSON of another shape than expected may raise."""


def completions_of(
    exchange: Exchange,
    rewards: AllRewards,
    *,
    trainable: bool = True,
    side_calls: SideCalls | None = None,
) -> list[Completion]:
    """The completions of an exchange; [] for an endpoint that does not generate.

    A call of a generating endpoint has at least one, also when it failed. `trainable` is False
    for a rollout that is not to be learned from. `side_calls` finds those of its trajectory.
    Of an exchange that cannot be read they are of what is left of it: see `unread`.
    """
    try:
        found = _completions_of(exchange, rewards, trainable, side_calls)
        for completion in found:  # what links them is read now, where it may fail
            _ = exchange.context_key, completion.path and completion.path.key
        return found
    except UNREADABLE as error:
        return _completions_of(unread(exchange, error), rewards, trainable, side_calls)


def _completions_of(
    exchange: Exchange, rewards: AllRewards, trainable: bool, side_calls: SideCalls | None
) -> list[Completion]:
    api = api_of(exchange.path)
    if api is None or is_unread(exchange):
        return []
    status, error = _end_of(exchange, api)
    sampled = _sampled_of(exchange, api)
    if not sampled:
        if status == "complete":
            status = "error"
            error = error or _missing_response(exchange) or _nothing_sampled(exchange)
        sampled = [Sampled(0, {}, (), api.asked(exchange.params, exchange.prompt))]
    id_ = exchange.reply_id or f"span-{exchange.span_id}"
    flaws = exchange.damage or exchange.contradictions
    found: list[Completion] = []
    for one in sampled:
        ended, wrong = status, error
        if status == "complete":
            ended, wrong = _wrong_with(one, exchange, api) or (status, error)
        found.append(
            Completion(
                id=id_,
                choice_index=one.index,
                status=ended,
                error=wrong,
                is_whole=trainable and ended == "complete" and not flaws,
                items=one.items,
                prompt=one.prompt,
                path=extend_with(one.prompt, one.items),
                choice=one.choice,
                exchange=exchange,
                rewards=rewards,
                judge=None if side_calls is None else side_calls.reason,
            )
        )
    return found


def _end_of(exchange: Exchange, api: ModelApi) -> tuple[str, dict[str, str] | None]:
    """Status and error of a call, also as its reply has them."""
    outcome = api.outcome(exchange.reply) if exchange.status == "complete" else None
    if outcome is None:
        return exchange.status, exchange.error
    return outcome, _nothing_sampled(exchange) if outcome == "error" else None


def _wrong_with(
    sampled: Sampled, exchange: Exchange, api: ModelApi
) -> tuple[str, dict[str, str]] | None:
    """Status and error of a choice of a call that is complete; None: nothing went wrong."""
    reason = api.finish_reason(sampled.choice)
    if api.is_aborted(sampled.choice):
        return "cancelled", {"type": "Aborted", "message": f"finish reason {reason!r}"}
    if api.is_failed(sampled.choice):
        error = sampled.choice.get("error")
        message = error_text(error) if error else f"finish reason {reason!r}"
        return "error", {"type": "ErrorResponse", "message": message}
    if error := exchange.reply.get("error"):
        return "error", {"type": "ErrorResponse", "message": error_text(error)}
    return None if sampled.items else ("error", _nothing_sampled(exchange))


def _sampled_of(exchange: Exchange, api: ModelApi) -> list[Sampled]:
    reply = exchange.reply
    if not isinstance(reply, OBJECT) or (exchange.error is not None and not exchange.stream):
        return []
    return list(api.sampled(exchange.params, exchange.prompt, reply))


def _missing_response(exchange: Exchange) -> dict[str, str] | None:
    """The error of a call whose response came, but is missing on its span; None if it is there."""
    if exchange.damage and exchange.is_unanswered:
        return {"type": "IncompleteSpan", "message": "; ".join(exchange.damage)}
    return None


def is_unread(exchange: Exchange) -> bool:
    """True if the reply is whole, and of a shape that is not read; it has no completions then."""
    api = api_of(exchange.path)
    if api is None or not api.shapes_vary or exchange.is_unanswered:
        return False
    return exchange.status == "complete" and api.is_unread(exchange.reply)


def _nothing_sampled(exchange: Exchange) -> dict[str, str]:
    """The error of a call whose reply has no sampled message."""
    reply, api = exchange.reply, api_of(exchange.path)
    if isinstance(reply, Mapping) and reply.get("error"):
        return {"type": "ErrorResponse", "message": error_text(reply["error"])}
    if isinstance(reply, Mapping):
        because = api.empty_because(reply) if api is not None else None
        reason = f" ({because})" if because else ""
        return {"type": "EmptyResponse", "message": f"the response has no message{reason}"}
    return {
        "type": "InvalidResponse",
        "message": f"the response is not a JSON object: {str(reply)[:200]!r}",
    }


def with_retrieved(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """The exchanges; those that began a background reply get the reply that it came to.

    The first reply to such a request has no content yet. The content comes with a later exchange
    that retrieves it (`GET /responses/{id}`, or its events); the first that has it whole counts.
    """
    found_at = {path: retrieval_of(path) for path in {exchange.path for exchange in exchanges}}
    retrieved: dict[str, Exchange] = {}
    for exchange in exchanges:
        found = found_at[exchange.path]
        reply = exchange.reply if found else None
        if found and isinstance(reply, Mapping) and not found[0].is_unfinished(reply):
            first = retrieved.setdefault(found[1], exchange)
            retrieved[found[1]] = min(first, exchange, key=lambda e: (e.start_time_ns, e.span_id))
    if not retrieved:
        return list(exchanges)
    return [
        _with_reply(exchange, retrieved[exchange.reply_id])
        if exchange.reply_id in retrieved and _is_unfinished(exchange)
        else exchange
        for exchange in exchanges
    ]


def _is_unfinished(exchange: Exchange) -> bool:
    api, reply = api_of(exchange.path), exchange.reply
    return api is not None and isinstance(reply, OBJECT) and api.is_unfinished(reply)


def any_in_background(exchanges: Sequence[Exchange]) -> bool:
    """Whether the reply to a request is in another exchange, or may be: see `with_retrieved`."""
    paths = {exchange.path for exchange in exchanges}
    return any(map(retrieval_of, paths)) or any(map(_is_unfinished, exchanges))


def _with_reply(exchange: Exchange, later: Exchange) -> Exchange:
    """The exchange, ended by the reply of a later one."""
    here = exchange.process == later.process
    return replace(
        exchange,
        status=later.status,
        error=later.error,
        ended=later.ended if here else exchange.ended,
        end_time_ns=later.end_time_ns,
        body=later.body,
        events=later.events,
        prompts=later.prompts,
        damage=[*exchange.damage, *later.damage],
    )
