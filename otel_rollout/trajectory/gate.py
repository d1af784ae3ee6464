"""The gate before a row is made: which completions can train, and why each other one cannot. Pure.

A row has what the policy sampled, with the ids that the server sent, and nothing else. What a reply
says is held against the request and against the server's own counts; where they disagree it does
not train. Nothing is put right here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from otel_rollout.spans import TokenPath, extend_tokens
from otel_rollout.trajectory import sentences
from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import (
    LARGEST_ID,
    Json,
    allows_no_token,
    asks_for_reasoning,
    path_messages,
    reasoning_of,
    searched_by,
)

Cause = Literal[
    "no_calls",
    "rollout_failed",
    "rollout_cancelled",
    "not_trainable",
    "call_failed",
    "damaged",
    "contradicted",
    "side_call",
    "not_asked_for",
    "searched",
    "media",
    "nothing_sampled",
    "no_token_ids",
    "no_token_ids_there",
    "impossible_id",
    "uncounted",
    "choices",
    "disagreement",
    "unresolved_retry",
    "masked",
    "too_long",
    "too_many",
    "other",
]
"""Why a completion is in no row; "other" is what an exporter says."""


@dataclass(frozen=True, slots=True)
class NotExact:
    """The reason why a completion has no exact token ids, or does not train."""

    cause: Cause
    reason: str


def admit(
    completion: Completion,
    *,
    media: Sequence[str] = (),
    keep_aborted: bool = False,
    keep_side_calls: bool = False,
    max_token_id: int | None = None,
) -> TokenPath | NotExact:
    """The ids of a completion that can train, as `exact_ids`; or the reason why it cannot.

    media: types of what its token ids only have placeholders for.
    """
    flaws = completion.exchange.damage or completion.contradictions
    kept = keep_aborted and completion.aborted and not flaws
    if not completion.is_whole and not kept:
        return _not_whole(completion)
    if (why := completion.side_call) is not None and not keep_side_calls:
        return NotExact("side_call", f"it is a side call: {why}")
    if name := allows_no_token(completion.exchange.params):
        why = f"its request allows no token ({name}=0): what came was not asked for"
        return NotExact("not_asked_for", why)
    if name := searched_by(completion.exchange.params):
        why = f"its request has the server choose among samples ({name}): no policy sampled it"
        return NotExact("searched", why)
    if media:
        why = f"its conversation has {', '.join(media)}, for which its token ids are placeholders"
        return NotExact("media", why)
    found = exact_ids(completion, LARGEST_ID if max_token_id is None else max_token_id)
    logprobs = None if isinstance(found, NotExact) else completion.logprob_array
    if not isinstance(found, NotExact) and logprobs is not None and len(logprobs) != len(found.ids):
        why = f"it has {len(found.ids)} token ids and {len(logprobs)} log-probabilities"
        return NotExact("disagreement", why)
    return found


def _not_whole(completion: Completion) -> NotExact:
    damage, error = completion.exchange.damage, completion.error or {}
    because = f": {error['type']}: {error['message']}" if error else ""
    if completion.status != "complete":
        cause: Cause = "damaged" if damage else "call_failed"
        return NotExact(cause, f"its call ended as {completion.status!r}{because}")
    if damage:
        return NotExact("damaged", f"its span is damaged: {damage[0]}")
    if wrong := completion.contradictions:
        return NotExact("contradicted", f"its stream contradicts itself: {wrong[0]}")
    return NotExact("not_trainable", "its rollout is not trainable")


def exact_ids(completion: Completion, largest: int = LARGEST_ID) -> TokenPath | NotExact:
    """The ids of the prompt, then as one block the sampled ones; or why some are missing.

    largest: the last id of the vocabulary.
    """
    reply, prompt = completion.token_path, completion.prompt_token_path
    if why := _impossible_id(completion, largest):
        return NotExact("impossible_id", why)
    if reply is None:
        return _why_no_ids(completion)
    if prompt is None or not prompt.length:
        return NotExact("no_token_ids", "the server sent no token ids of the prompt")
    if why := _wrong_choices(completion):
        return NotExact("choices", why)
    sampled, counted = completion.sampled_count, completion.sampled_in_response
    if sampled is not None and counted is not None and sampled != counted:
        why = f"the server says that it sampled {sampled} tokens and sent {counted} token ids"
        return NotExact("disagreement", why)
    if sampled is None and completion.stream and _is_parsed(completion):
        return NotExact(
            "uncounted",
            "its stream has no count of its tokens, and a parser of tool calls or reasoning may "
            "have lost some (ask for it: `with otel_rollout.request_token_ids():`, or "
            "stream_options={'include_usage': True}; and read the stream to its end)",
        )
    return extend_tokens(prompt, reply.ids)


def _impossible_id(completion: Completion, largest: int) -> str | None:
    """What is wrong with the first of its ids that can be none; None: all can be."""
    for whose, path, values in _listed(completion):
        wrong: tuple[int, Json] | None = None
        if path is not None:
            wrong = path.first_wrong(largest)
        elif isinstance(values, list):
            strange = (n for n, each in enumerate(values) if type(each) is not int)
            wrong = next(((n, values[n]) for n in strange), None)
        if wrong is not None:
            place, value = wrong
            return (
                f"the token ids of its {whose} have {value!r:.40} at place {place}, which can be "
                f"none: expected a whole number from 0 to {largest}"
            )
    return None


def _listed(completion: Completion) -> Iterator[tuple[str, TokenPath | None, Json]]:
    """The lists of its ids, each as a path; None, and the values, where it is none."""
    yield "reply", completion.token_path, completion.sampled_ids
    for values in completion.prompt_lists:
        path = completion.exchange.token_path(values)
        yield "prompt", path, values
        if path is not None:
            return
    yield "prompt", completion.prompt_token_path, None


def _wrong_choices(completion: Completion) -> str | None:
    """How the choices of its response contradict its request, or each other; None: they do not."""
    indices, asked = completion.choices_in_response, completion.choices_asked
    if asked is not None and len(indices) > asked:
        return f"its request asks for {asked} of the {len(indices)} choices that came"
    return None


def _why_no_ids(completion: Completion) -> NotExact:
    if completion.ids_are_empty and not completion.sampled_count:
        why = f"nothing was sampled (finish reason {completion.finish_reason!r})"
        return NotExact("nothing_sampled", f"it has no token ids: {why}")
    if completion.ids_are_empty:
        why = "the server sent no token ids: its list of them is empty"
        return NotExact("disagreement", why)
    count, listed = completion.sampled_count, len(completion.logprobs or ())
    if count is not None and 0 < listed < count:
        why = f"the server sent no token ids of {count - listed} of the {count} tokens it sampled"
        return NotExact("disagreement", why)
    path, refused = completion.exchange.path, completion.exchange.refused
    if refused is not None:
        why = f"it refuses the fields that ask for them at {path!r}: {refused}"
        return NotExact("no_token_ids_there", f"the server sent no token ids ({why})")
    if completion.api.token_id_params(path.partition("?")[0]) is None:
        why = f"request_token_ids() cannot ask for any at {path!r}"
        return NotExact("no_token_ids_there", f"the server sent no token ids ({why})")
    if completion.ids_are_withheld:
        return NotExact("no_token_ids", sentences.NOT_ASKED())
    if completion.exchange.params.get("include_reasoning") is False:
        why = "the server sent no token ids: its request has include_reasoning=false, which keeps "
        return NotExact("disagreement", f"{why}what was sampled as reasoning out of the reply")
    why = "the server sent no token ids (ask for them: `with otel_rollout.request_token_ids():`)"
    return NotExact("no_token_ids", why)


def _is_parsed(completion: Completion) -> bool:
    """Whether the server may have parsed the reply for tool calls, or for reasoning.

    A parser that loses all reasoning leaves none to see: the request, or a former reply, has some.
    """
    message, params = completion.message or {}, completion.exchange.params
    offered = bool(params.get("tools") or params.get("functions"))
    return (
        (offered and params.get("tool_choice") != "none")
        or bool(message.get("tool_calls") or message.get("function_call"))
        or asks_for_reasoning(params)
        or any(reasoning_of(item) is not None for item in completion.items)
        or any(reasoning_of(message) is not None for message in path_messages(completion.prompt))
    )
