"""What to do about completions that no row trains. Pure."""

from __future__ import annotations

from otel_rollout.trajectory.gate import Cause
from otel_rollout.trajectory.sentences import (
    CONTRADICTED,
    DAMAGED,
    NOT_ASKED,
    UNKNOWN,
    Kind,
    sentence_of,
)
from otel_rollout.trajectory.tokens import Dropped


def advice_about(drop: Dropped) -> str:
    """What to do about it, one or two sentences with full stops; "" if that is not known."""
    if drop.completion is not None:
        return DROPS[drop.cause][1]
    sentence, _ = sentence_of(drop.reason)
    return "" if sentence is UNKNOWN else sentence.advice


DROPS: dict[Cause, tuple[Kind, str]] = {
    "no_calls": ("incomplete", "See the warnings: they say which calls are missing."),
    "rollout_failed": (
        "failed",
        'Give it a reward (0, say) to train on what failed, or on_failure="keep".',
    ),
    "rollout_cancelled": (
        "failed",
        'Nothing has to be done: what was cancelled does not train, but with on_failure="keep" '
        "where it has a reward.",
    ),
    "not_trainable": (
        "dropped",
        "Nothing has to be done if that was asked for (@rollout(trainable=False)); else see the "
        "warnings.",
    ),
    "call_failed": (
        "failed",
        "Nothing has to be done for single ones; if they are many, see the server's errors and the "
        "client's timeouts. Read streams to their ends.",
    ),
    "damaged": ("damaged", DAMAGED.advice),
    "contradicted": ("inexact", CONTRADICTED.advice),
    "side_call": (
        "side_call",
        'Nothing has to be done: it is not the agent\'s task. on_side_call="keep" trains it.',
    ),
    "not_asked_for": (
        "dropped",
        "Nothing has to be done: such requests only fill a cache or count tokens.",
    ),
    "searched": (
        "dropped",
        "Sample without beams and best_of: what a search finds is no sample of the policy.",
    ),
    "media": (
        "dropped",
        'Train it where the trainer takes messages with images, or on_media="keep" keeps the '
        "placeholders.",
    ),
    "nothing_sampled": ("dropped", "Nothing has to be done: there is no token to train on."),
    "no_token_ids": ("inexact", NOT_ASKED.advice),
    "no_token_ids_there": (
        "inexact",
        "Ask the model through an API that gives token ids, such as /v1/chat/completions of vLLM "
        "(docs/model-apis.md).",
    ),
    "impossible_id": (
        "inexact",
        "The server put a placeholder or another number there: see the reply, and update the "
        "server. max_token_id is the last id of the vocabulary.",
    ),
    "uncounted": ("inexact", NOT_ASKED.advice),
    "choices": (
        "inexact",
        "The server, or a proxy before it, numbers choices wrongly: ask for one choice a call.",
    ),
    "disagreement": (
        "inexact",
        "Check the server with `otel-rollout doctor --server URL`: some lose tokens that a parser "
        "keeps back.",
    ),
    "unresolved_retry": (
        "uncertain",
        "Record with otel-rollout itself, which sees which reply was delivered; other "
        "instrumentations do not say.",
    ),
    "masked": ("dropped", "Nothing has to be done if that was asked for (mask_truncated)."),
    "too_long": ("dropped", "Raise max_length, or shorten what the agent sends."),
    "too_many": (
        "dropped",
        "Look at its calls: rows of one trajectory share prompts that no agent has.",
    ),
    "other": ("dropped", "See the options of the exporter: `otel-rollout export --list`."),
}
"""The kind of finding that a dropped completion is, and what to do, by the cause."""
