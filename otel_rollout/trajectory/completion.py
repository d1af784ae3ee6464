"""A completion: one sampled choice of one exchange, whichever API it went through.

The shapes of requests and replies are asked of the exchange's `ModelApi`; whoever holds a
completion need not know which API that is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from otel_rollout.spans import EXACT_SOURCE, Exchange, Supplied, TokenPath
from otel_rollout.trajectory.fixed import frozen
from otel_rollout.trajectory.reward import AllRewards, Reward
from otel_rollout.wire import (
    OBJECT,
    Choice,
    Json,
    LogprobsMode,
    MessagePath,
    ModelApi,
    Reply,
    api_of,
    asked_ids,
    copy_json,
    empty_ids,
    indexed_choices,
    is_partition,
    length_limit,
    logprobs_mode,
    media_beside,
    media_of,
    none_for_nan,
    path_messages,
    prompt_ids,
    sampled_count,
    sampled_ids,
    sampled_logprobs,
    version_spans,
    withholds_ids,
)


@frozen("trajectory.add_reward(Reward(..., completion_id=...)) sets its reward")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Completion:
    """One sampled choice of one exchange: the model's message, or how the call failed."""

    id: str
    """The response id. Choices of one response share it; (`id`, `choice_index`) is unique."""
    choice_index: int
    """Index of the choice in its response, from 0."""
    status: str
    """`complete`, `error`, `cancelled` or `abandoned`."""
    error: dict[str, str] | None
    """`type` and `message` of what went wrong, or None."""
    is_whole: bool
    """True if nothing of it is missing, and its rollout is trainable."""
    items: Sequence[Json]
    """What was sampled, in wire form: one message; the output items of the Responses API."""
    prompt: MessagePath | None
    """The conversation that it answers."""
    path: MessagePath | None
    """The conversation that it answers, followed by its own items."""
    choice: Choice
    """The choice as the server sent it, without a prompt that it echoes."""
    exchange: Exchange
    """The call that it was sampled in: request, response, times, how it ended."""
    rewards: AllRewards
    """All rewards of the trajectory."""
    judge: Callable[[Completion], str | None] | None = None
    """Returns why one of the trajectory is a side call, by the calls of it that came. None:
    only those that were recorded as such are."""

    @property
    def trainable(self) -> bool:
        """True if a trainer should learn from it: it is whole, its rollout is trainable, and it is
        no side call.
        """
        return self.is_whole and self.side_call is None

    @property
    def side_call(self) -> str | None:
        """Why it is a side call, such as one that asks for a title; None if it is none.

        Rules decide (`docs/side-calls.md`); while the rollout runs, calls that come later may
        change it.
        """
        written = self.exchange.side_call
        if written is not None:
            return written or None
        return None if self.judge is None else self.judge(self)

    @property
    def contradictions(self) -> list[str]:
        """What in its stream contradicts itself, as sentences; it does not train then. [] for most.

        Such as a model or a name that changes, or tool calls whose pieces cannot be told apart.
        """
        return list(self.exchange.contradictions)

    @property
    def session(self) -> str | None:
        """The session that its client names in a header of the request; None where it names none.

        It decides nothing: histories follow from what was sent.
        """
        return self.exchange.session

    @property
    def message(self) -> dict[str, Any] | None:
        """The sampled message in wire form; None where the call gave none."""
        if len(self.items) == 1 and isinstance(self.items[0], dict):
            return self.items[0]
        return {"role": "assistant", "content": list(self.items)} if self.items else None

    @property
    def request_messages(self) -> list[Json]:
        """The wire messages that the model was asked with.

        An item that the request names by its id is there in full, if an earlier call has it.
        """
        return [copy_json(message) for message in path_messages(self.prompt)]

    @property
    def tools(self) -> list[Json] | None:
        """Tool definitions of the request; None where it had none."""
        return self.api.tools(self.exchange.params)

    @property
    def context_key(self) -> bytes:
        """Equal for requests that may continue one another: same tools, same instructions."""
        return self.exchange.context_key

    @property
    def model(self) -> str | None:
        """The model that answered, as the server reports it."""
        model = self._whole.get(self.api.model_name)
        return model if isinstance(model, str) else None

    @property
    def request_model(self) -> str | None:
        """The model that the request names; None where it names none."""
        return self.api.request_model(self.exchange.path, self.exchange.params)

    @property
    def sampling(self) -> dict[str, Json]:
        """The sampling parameters that the request set."""
        return self.api.sampling(self.exchange.params)

    @property
    def finish_reason(self) -> str | None:
        """As the server sent it (others call it `stop_reason`, `stop_type`, `status`)."""
        return self.api.finish_reason(self.choice)

    @property
    def truncated(self) -> bool:
        """True if the model did not end it: a length limit did, a filter, an abort, an error.

        The server reports so, gives no reason or an unknown one, or names only calls of tools and
        sent as many tokens as the limit.
        """
        api, whole = self.api, self._whole
        if api.is_truncated(self.choice, whole) or api.is_stopped(self.choice, whole):
            return True
        if self.exchange.source == EXACT_SOURCE and self.finish_reason is None:
            return True  # another instrumentation may only not have kept it
        reason = (self.finish_reason or "tool").lower()
        hides = "tool" in reason or "function" in reason  # servers write it in place of the limit
        limit = length_limit(self.sampling) if hides else None
        ids = self.sampled_ids if limit is not None else None
        return limit is not None and ids is not None and len(ids) >= limit

    @property
    def aborted(self) -> bool:
        """True if the server gave it up while it was sampled, such as vLLM's `/pause`.

        Its status is `cancelled`; `token_sequences(on_abort="keep")` trains what had come.
        """
        return self.exchange.status == "complete" and self.api.is_aborted(self.choice)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended it, where the server sends one."""
        return self.api.stop_reason(self.choice)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts of the server under OpenAI's names; None if it sent none."""
        return self.api.usage(self._whole)

    @property
    def token_ids(self) -> list[int] | None:
        """The sampled token ids, the end-of-turn token included; None if the server sent none."""
        path = self.token_path
        return path.to_list() if path else None

    @property
    def token_path(self) -> TokenPath | None:
        """`token_ids` as a path of its own."""
        return self.exchange.token_path(self.sampled_ids)

    @property
    def ids_are_withheld(self) -> bool:
        """True if the server sends token ids to those who ask for them, and nobody did."""
        asked = self.exchange.params.get("return_token_ids") or self.exchange.refused
        return not asked and withholds_ids(self.choice, self._whole)

    @property
    def choices_in_response(self) -> list[int]:
        """The indices of the choices of its response, in its order."""
        return [index for index, _ in indexed_choices(self._whole, self.api.choices_member)]

    @property
    def choices_asked(self) -> int | None:
        """Number of choices that its request asks for; None where not all of the request is known,
        or no number of choices.
        """
        params = self.exchange.params
        is_known = self.exact or self.api.choices_name in self.sampling
        asked = self.api.choices_asked(params) if is_known else 0
        return asked if asked > 0 else None

    @property
    def sampled_in_response(self) -> int | None:
        """Token ids that came for all choices of its response together; None if none came.

        `usage` counts them so. A choice without ids has lost them, or none was sampled for it.
        """
        whole, params = self._whole, self.exchange.params
        choices = [choice for _, choice in indexed_choices(whole, self.api.choices_member)]
        if len(choices) < 2:
            choices = [self.choice]
        elif params.get("echo"):  # without the prompts, which costs more
            sampled = self.api.sampled(params, self.exchange.prompt, whole)
            choices = [one.choice for one in sampled]
        return sum(len(sampled_ids(choice, whole) or ()) for choice in choices) or None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The token ids that the model was asked with; None if the server sent none.

        Those of a request that has token ids for its prompt, if the server counted as many.
        """
        path = self.prompt_token_path
        return path.to_list() if path else None

    @property
    def prompt_token_path(self) -> TokenPath | None:
        """`prompt_token_ids` as a path, which shares its prefix with those of other calls."""
        for value in prompt_ids(self.choice, self._whole):
            if path := self.exchange.token_path(value):
                return path
        supplied = self.supplied.prompt if self.supplied else None
        if supplied and (self.usage or {}).get("prompt_tokens") == supplied.length:
            return supplied
        return self.exchange.token_path(self._asked_ids)

    @property
    def prompt_lists(self) -> list[Json]:
        """What lists the token ids of its prompt, the best first; some are no lists."""
        return [*prompt_ids(self.choice, self._whole), self._asked_ids]

    @property
    def _asked_ids(self) -> Sequence[Json] | None:
        params = self.exchange.params
        return asked_ids(params.get("prompt"), params, self._whole)

    @property
    def supplied(self) -> Supplied | None:
        """The token ids that a gateway sent in the place of the messages; None: it sent none.

        The model then saw these, and not what the server would have made of the messages.
        """
        return self.exchange.supplied

    @property
    def logprobs(self) -> list[float | None] | None:
        """Log-probability of each sampled token (None: unknown); None if the server sent none."""
        found = self.logprob_array
        return None if found is None else none_for_nan(found)

    @property
    def logprob_array(self) -> array[float] | None:
        """`logprobs` as an array, NaN in the place of each unknown one; made anew each time."""
        ids = self.sampled_ids
        found = sampled_logprobs(self.choice, len(ids) if ids else None)
        return None if found is None else found[:]

    @property
    def logprobs_mode(self) -> LogprobsMode | None:
        """`raw` log-probabilities are from before temperature and the like; None: unknown.

        `constrained`: the request had the server take tokens away (a schema, a grammar, a forced
        tool call, a bias), so that they are not the policy's, whatever the server calls them. Else
        what the server reports, as few do, or what `configure(logprobs_mode=...)` says of it.
        """
        exchange = self.exchange
        return logprobs_mode(exchange.params, self.choice, self._whole, exchange.logprobs_mode)

    @property
    def reward(self) -> Reward | None:
        """The step reward that was recorded last for this completion."""
        return self.rewards.of_completion(self.id, self.choice_index)

    @property
    def policy_version(self) -> str | int | None:
        """The policy version when the call was made: the rollout's, else the server's."""
        return self.policy_versions[0]

    @property
    def policy_versions(self) -> tuple[str | int | None, ...]:
        """The policy versions that sampled it, in order; (None,) if none is known.

        The rollout's when the call was made and, if it changed, when the reply had come; without
        `policy_version=` at the call those that the server names.
        """
        first, last = self.exchange.policy_version, self.exchange.last_policy_version
        if first is None and (last is None or self.policy_version_spans):
            named = groupby(span.version for span in version_spans(self.choice, self._whole))
            return tuple(version for version, _ in named) or (None,)
        return (first,) if last is None else (first, last)

    @property
    def policy_version_spans(self) -> list[tuple[str | int, int, int]] | None:
        """(version, start, end) in numbers of `token_ids`, as the server names the versions.

        `end` is exclusive. They are of all tokens, in order; None where it names none of them so.
        """
        spans, ids = version_spans(self.choice, self._whole), self.sampled_ids
        if not spans or not is_partition(spans, None if ids is None else len(ids)):
            return None
        return [(each.version, each.start or 0, each.end or 0) for each in spans]

    @property
    def api(self) -> ModelApi:
        """The model API that the call went through."""
        return api_of(self.exchange.path) or ModelApi()

    @property
    def media(self) -> list[str]:
        """Types of the parts of its conversation that are not text (`image_url`, `input_audio`).

        Token ids have placeholders for these parts: they are not all that the model saw.
        """
        api, params = self.api, self.exchange.params
        around = [kind for each in api.instructions_of(params) for kind in media_of(each)]
        own = self.path.media if self.path else ()
        return list(dict.fromkeys((*media_beside(params), *around, *own)))

    @property
    def stream(self) -> bool:
        """True if the response was streamed."""
        return self.exchange.stream

    @property
    def span_id(self) -> str:
        """Span id of the exchange span, hex."""
        return self.exchange.span_id

    @property
    def start_time_ns(self) -> int:
        """When the call began, in ns since the epoch."""
        return self.exchange.start_time_ns

    @property
    def end_time_ns(self) -> int | None:
        """When the call ended, in ns since the epoch; None if unknown."""
        return self.exchange.end_time_ns

    @property
    def request(self) -> Json:
        """The whole request as it was on the wire; its text where it was no JSON object."""
        return self.exchange.request()

    @property
    def response(self) -> Json:
        """The whole response as it was on the wire, a stream in unstreamed shape."""
        return self.exchange.response()

    @property
    def exact(self) -> bool:
        """True if it is what was on the wire: read from an exchange span that lacks nothing."""
        return self.exchange.source == EXACT_SOURCE and not self.exchange.damage

    @property
    def lost(self) -> list[str]:
        """Facts that the instrumentation which it was read from does not record, in words."""
        return list(self.exchange.lost)

    def __repr__(self) -> str:
        return f"<Completion {self.id!r} choice {self.choice_index} {self.status}>"

    @property
    def ids_are_empty(self) -> bool:
        """True if the server sent a list of token ids, without one: it sampled nothing."""
        return empty_ids(self.choice)

    @property
    def sampled_count(self) -> int | None:
        """Number of sampled tokens that the server reports for its response; None if none."""
        counted = sampled_count(self._whole)
        if counted is None:
            counted = (self.usage or {}).get("completion_tokens")
        return counted if isinstance(counted, int) else None

    @property
    def _whole(self) -> Reply:
        """The reply that the choice is of."""
        reply = self.exchange.reply
        return reply if isinstance(reply, OBJECT) else {}

    @property
    def sampled_ids(self) -> Sequence[Json] | None:
        """What the server lists as its token ids, whatever that is; None where it lists none."""
        return sampled_ids(self.choice, self._whole)
