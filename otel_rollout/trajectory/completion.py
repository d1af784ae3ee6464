"""A completion: one sampled choice of one exchange, whichever API it went through.

`completions_of` is where the shapes of the APIs are known; everything behind it sees completions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from otel_rollout.spans import EXACT_SOURCE, Exchange, TokenPath
from otel_rollout.trajectory.reward import Reward, Rewards
from otel_rollout.wire import (
    Json,
    MessagePath,
    asked_ids,
    copy_json,
    extend,
    logprobs_mode,
    media_of,
    path_messages,
    prompt_ids,
    sampled_ids,
    sampled_logprobs,
    usage,
    weight_version,
)

_SAMPLING = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "min_tokens",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "repetition_detection",
        "repeat_penalty",
        "repeat_last_n",
        "typical_p",
        "top_n_sigma",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "samplers",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "ignore_eos",
        "stop_regex",
        "truncate_prompt_tokens",
        "best_of",
        "length_penalty",
        "thinking_token_budget",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "output_config",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "structural_tag",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "logits_processors",
        "custom_logit_processor",
        "custom_params",
        "vllm_xargs",
        "post_sampling_probs",
        "logprobs_mode",
    )
)


_CUT = ("length", "limit", "max_tokens", "max_output_tokens", "model_context_window_exceeded")

_LENGTH_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Completion:
    """One sampled choice of one exchange: what the model said, or how the call failed."""

    id: str
    """The response id. Choices of one response share it; (`id`, `choice_index`) is unique."""
    choice_index: int
    status: str
    """`complete`, `error`, `cancelled` or `abandoned`."""
    error: dict[str, str] | None
    """`type` and `message` of what went wrong, or None."""
    trainable: bool
    """Whether a trainer should learn from it: it is whole, and its rollout is trainable."""
    items: tuple[Json, ...]
    """What was sampled, in wire form: one message; the output items of the Responses API."""
    prompt: MessagePath | None
    """The conversation that it answers."""
    path: MessagePath | None
    """The conversation with its own items behind."""
    choice: Mapping[str, Json]
    """The choice as the server sent it, without a prompt that it echoes."""
    exchange: Exchange
    rewards: Rewards
    """All rewards of the trajectory."""

    @property
    def message(self) -> dict[str, Any] | None:
        """The sampled message in wire form; None where the call gave none."""
        if len(self.items) == 1 and isinstance(self.items[0], dict):
            return self.items[0]
        return {"role": "assistant", "content": list(self.items)} if self.items else None

    @property
    def request_messages(self) -> list[Json]:
        """The wire messages that the model was asked with."""
        return [copy_json(message) for message in path_messages(self.prompt)]

    @property
    def tools(self) -> list[Json] | None:
        """Tool definitions of the request; None where it had none."""
        tools = self.exchange.params.get("tools")
        return tools if isinstance(tools, list) else None

    @property
    def context_key(self) -> bytes:
        """Equal for requests that may continue one another: same tools, same instructions."""
        return self.exchange.context_key

    @property
    def model(self) -> str | None:
        """The model that the server says answered."""
        model = self._reply("model")
        return model if isinstance(model, str) else None

    @property
    def request_model(self) -> str | None:
        model = self.exchange.params.get("model")
        return model if isinstance(model, str) else None

    @property
    def sampling(self) -> dict[str, Json]:
        """The sampling parameters that the request set."""
        return {key: value for key, value in self.exchange.params.items() if key in _SAMPLING}

    @property
    def finish_reason(self) -> str | None:
        """As the server sent it (others call it `stop_reason`, `stop_type`, `status`)."""
        names = ("stop_reason",) if self._is_message else ("finish_reason", "stop_type", "status")
        reason = next(filter(None, map(self.choice.get, names)), None)
        return reason if isinstance(reason, str) else None

    @property
    def truncated(self) -> bool:
        """Whether a length limit cut it: the server says so, or it has as many tokens as it may."""
        details = self._reply("incomplete_details")
        reason = details.get("reason") if isinstance(details, Mapping) else self.finish_reason
        if reason in _CUT:
            return True
        limits = (self.exchange.params.get(name) for name in _LENGTH_LIMITS)
        limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
        ids = self._sampled_ids if limit is not None else None
        return limit is not None and ids is not None and len(ids) >= limit

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended it, where the server sends one."""
        names = ("stop_sequence",) if self._is_message else ("stop_reason", "matched_stop")
        reasons = map(self.choice.get, (*names, "stopping_word"))
        return next((r for r in reasons if isinstance(r, str | int) and r != ""), None)

    @property
    def _is_message(self) -> bool:
        """Whether it is a reply of the Messages API, whose `stop_reason` is another thing."""
        return self.choice.get("type") == "message"

    @property
    def usage(self) -> dict[str, Any] | None:
        """How many tokens the server counted, in OpenAI's words; None where it did not say."""
        return usage(self._whole)

    @property
    def token_ids(self) -> list[int] | None:
        """The sampled token ids, the end-of-turn token included; None if the server sent none."""
        return self.exchange.token_ids(self._sampled_ids)

    @property
    def sampled_in_response(self) -> int | None:
        """Token ids that the choices of its response have together, as `usage` counts them."""
        found = self._whole.get("choices")
        choices = [choice for choice in found if isinstance(choice, Mapping)] if found else []
        if len(choices) < 2:
            choices = [self.choice]
        counts = [len(sampled_ids(choice, self._whole) or ()) for choice in choices]
        return sum(counts) if all(counts) else None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The token ids that the model was asked with; None if the server sent none.

        Those of a request that has token ids for its prompt, if the server counted as many.
        """
        path = self.prompt_token_path
        return path.to_list() if path else None

    @property
    def prompt_token_path(self) -> TokenPath | None:
        """`prompt_token_ids` as a path, which shares its beginning with those of other calls."""
        for value in prompt_ids(self.choice, self._whole):
            if path := self.exchange.token_path(value):
                return path
        params = self.exchange.params
        return self.exchange.token_path(asked_ids(params.get("prompt"), params, self._whole))

    @property
    def logprobs(self) -> list[float | None] | None:
        """Log-probability of each sampled token (None: unknown); None if the server sent none."""
        ids = self._sampled_ids
        return sampled_logprobs(self.choice, len(ids) if ids else None)

    @property
    def logprobs_mode(self) -> Literal["raw", "processed"] | None:
        """Whether `logprobs` are from before or after temperature and the like; None: unknown.

        Few servers say. vLLM's are raw unless it was started otherwise (`--logprobs-mode`).
        """
        return logprobs_mode(self.exchange.params, self.choice, self._whole)

    @property
    def reward(self) -> Reward | None:
        """The step reward that was recorded last for this completion."""
        # Pickles of earlier versions have a dict.
        rewards = self.rewards if isinstance(self.rewards, Rewards) else Rewards(self.rewards)
        return rewards.of_completion(self.id, self.choice_index)

    @property
    def policy_version(self) -> str | int | None:
        """The policy version when the call was made: the rollout's, else what the server says."""
        if self.exchange.policy_version is not None:
            return self.exchange.policy_version
        return weight_version(self.choice, self._whole)

    @property
    def media(self) -> list[str]:
        """Types of the parts of its conversation that are no text (`image_url`, `input_audio`).

        Token ids have placeholders where those stand: they are not all that the model saw.
        """
        messages = path_messages(self.path)
        return list(dict.fromkeys(kind for message in messages for kind in media_of(message)))

    @property
    def stream(self) -> bool:
        return self.exchange.stream

    @property
    def span_id(self) -> str:
        """Span id of the exchange span, hex."""
        return self.exchange.span_id

    @property
    def start_time_ns(self) -> int:
        return self.exchange.start_time_ns

    @property
    def end_time_ns(self) -> int | None:
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
        """Whether it is what was on the wire: read from an exchange span that lacks nothing."""
        return self.exchange.source == EXACT_SOURCE and not self.exchange.damage

    @property
    def lost(self) -> list[str]:
        """What is not known because the instrumentation that it was read from does not keep it."""
        return list(self.exchange.lost)

    def __repr__(self) -> str:
        return f"<Completion {self.id!r} choice {self.choice_index} {self.status}>"

    def _reply(self, key: str) -> Any:
        return self._whole.get(key)

    @property
    def _whole(self) -> Mapping[str, Json]:
        """The reply that the choice is of."""
        reply = self.exchange.reply
        return reply if isinstance(reply, Mapping) else {}

    @property
    def _sampled_ids(self) -> list[Json] | None:
        return sampled_ids(self.choice, self._whole)


def completions_of(
    exchange: Exchange, rewards: Rewards, *, trainable: bool = True
) -> list[Completion]:
    """The completions of an exchange; [] for an endpoint that does not generate.

    A call of a generating endpoint has at least one, also when it failed. `trainable` is False
    for a rollout that is not to be learned from.
    """
    kind = next((kind for end, kind in _KINDS if exchange.path.split("?")[0].endswith(end)), None)
    if kind is None:
        return []
    reply = exchange.reply
    status, error = exchange.status, exchange.error
    if kind is _responses and status == "complete":
        status, error = _outcome(reply)
    replies: list[tuple[int, Mapping[str, Json], tuple[Json, ...], MessagePath | None]] = []
    if isinstance(reply, Mapping) and (exchange.error is None or exchange.stream):
        replies = list(kind(exchange, reply))
    if not replies:
        if status == "complete":
            status, error = "error", error or _cut(exchange) or _nothing_sampled(reply)
        replies = [(0, {}, (), _asked(exchange))]
    completions: list[Completion] = []
    for index, choice, items, prompt in replies:
        path = prompt
        for item in items:
            path = extend(path, item)
        own_status, own_error = status, error
        if status == "complete" and not items:
            own_status, own_error = "error", _nothing_sampled(reply)
        whole = own_status == "complete" and not exchange.damage
        completions.append(
            Completion(
                id=exchange.reply_id or f"span-{exchange.span_id}",
                choice_index=index,
                status=own_status,
                error=own_error,
                trainable=trainable and whole,
                items=items,
                prompt=prompt,
                path=path,
                choice=choice,
                exchange=exchange,
                rewards=rewards,
            )
        )
    return completions


def with_retrieved(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """The exchanges; those that began a background response with what it came to.

    The reply to such a request has no content yet. Its content came with a later exchange, that
    retrieved it (`GET /responses/{id}`, or its events); of several the first that had it whole.
    """
    retrieved: dict[str, Exchange] = {}
    for exchange in exchanges:
        found = _retrieval(exchange.path)
        reply = exchange.reply if found else None
        if found and isinstance(reply, Mapping) and reply.get("status") in _FINAL:
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


_retrieval = re.compile(r"(?:.*/)?responses/([^/?]+)(?:/cancel)?(?:\?.*)?$").match

_FINAL = ("completed", "incomplete", "failed", "cancelled")

_STATUSES = {
    "queued": "abandoned",
    "in_progress": "abandoned",
    "cancelled": "cancelled",
    "failed": "error",
}
"""How a call ended whose response has this `status`; `complete` for any other."""


def _is_unfinished(exchange: Exchange) -> bool:
    return (
        exchange.path.split("?")[0].endswith("/responses")
        and isinstance(exchange.reply, Mapping)
        and exchange.reply.get("status") not in _FINAL
    )


def is_in_background(exchange: Exchange) -> bool:
    """Whether the reply to a request is in another exchange, or may be: see `with_retrieved`."""
    return bool(_retrieval(exchange.path)) or _is_unfinished(exchange)


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
        _reply=later.reply,
        _is_read=True,
    )


def _outcome(reply: Json) -> tuple[str, dict[str, str] | None]:
    """Status and error of a call that ended well, whose response may tell of something else."""
    said = reply.get("status") if isinstance(reply, Mapping) else None
    status = _STATUSES.get(str(said), "complete")
    return status, _nothing_sampled(reply) if status == "error" else None


def _asked(exchange: Exchange) -> MessagePath | None:
    """The conversation of the request; a text stands for the message of a user."""
    if exchange.prompt is not None:
        return exchange.prompt
    # The `prompt` of the Responses API is the name of a template.
    template = exchange.path.split("?")[0].endswith("/responses")
    text = exchange.params.get("input" if template else "prompt")
    return extend(None, {"role": "user", "content": text}) if text else None


_Replies = Iterator["tuple[int, Mapping[str, Json], tuple[Json, ...], MessagePath | None]"]


def _cut(exchange: Exchange) -> dict[str, str] | None:
    """What to say of a response that came, but did not come down to here."""
    if exchange.damage and exchange.is_unanswered:
        return {"type": "IncompleteSpan", "message": "; ".join(exchange.damage)}
    return None


def _nothing_sampled(reply: Json) -> dict[str, str]:
    if isinstance(reply, Mapping) and reply.get("error"):
        error = reply["error"]
        message = error.get("message") if isinstance(error, Mapping) else error
        return {"type": "ErrorResponse", "message": str(message)}
    if isinstance(reply, Mapping):
        return {"type": "EmptyResponse", "message": "the response has no message"}
    return {
        "type": "InvalidResponse",
        "message": f"the response is not a JSON object: {str(reply)[:200]!r}",
    }


def _choices(reply: Mapping[str, Json]) -> Iterator[tuple[int, Mapping[str, Json]]]:
    choices = reply.get("choices")
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if isinstance(choice, Mapping):
            index = choice.get("index")
            yield index if isinstance(index, int) else position, choice


def _chat(exchange: Exchange, reply: Mapping[str, Json]) -> _Replies:
    for index, choice in _choices(reply):
        message = choice.get("message")
        yield index, choice, (message,) if isinstance(message, dict) else (), exchange.prompt


def _text(exchange: Exchange, reply: Mapping[str, Json]) -> _Replies:
    prompt = exchange.params.get("prompt")
    batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if batch and isinstance(prompt, list) else [prompt]
    choices = list(_choices(reply))
    if not choices and isinstance(reply.get("content"), str):  # llama.cpp's own endpoint
        message = {"role": "assistant", "content": reply["content"]}
        yield 0, reply, (message,), _asked(exchange)
        return
    n = exchange.params.get("n")
    per_prompt = max(1, n if isinstance(n, int) else len(choices) // len(prompts))
    for index, choice in choices:
        own = prompts[min(index // per_prompt, len(prompts) - 1)]
        path = None if own is None else extend(None, {"role": "user", "content": own})
        if exchange.params.get("echo"):
            choice = _without_echo(choice, own)
        message = {"role": "assistant", "content": choice.get("text")}
        yield index, choice, (message,), path


def _without_echo(choice: Mapping[str, Json], prompt: Json) -> Mapping[str, Json]:
    """The choice without the prompt, which `echo` has the server repeat before what it sampled.

    It repeats text and log-probabilities; token ids are those that were sampled.
    """
    text, logprobs = choice.get("text"), choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, Mapping) else {}
    offsets, ids = logprobs.get("text_offset"), choice.get("token_ids")
    offsets = offsets if isinstance(offsets, list) else []
    if isinstance(prompt, str):
        if not str(text).startswith(prompt):
            return choice  # not every server knows `echo`
        end = len(prompt)
        count = sum(offset < end for offset in offsets)
    else:
        count = len(prompt) if isinstance(prompt, list) else 0
        # Without log-probabilities only the server knows where the text of these ids ends.
        end = offsets[count] if count < len(offsets) else len(str(text)) if offsets else 0
    values = logprobs.get("token_logprobs")
    if isinstance(ids, list) and isinstance(values, list):
        count = len(values) - len(ids)
    cut = {key: value[count:] for key, value in logprobs.items() if isinstance(value, list)}
    return {**choice, "text": str(text)[end:], "logprobs": {**logprobs, **cut} or None}


def _responses(exchange: Exchange, reply: Mapping[str, Json]) -> _Replies:
    output = reply.get("output")
    if isinstance(output, list):
        yield 0, reply, tuple(output), _asked(exchange)


def _messages(exchange: Exchange, reply: Mapping[str, Json]) -> _Replies:
    content = reply.get("content")
    if isinstance(content, list):
        message = {"role": reply.get("role") or "assistant", "content": content}
        yield 0, reply, (message,), exchange.prompt


_KINDS = (
    ("/chat/completions", _chat),
    ("/completions", _text),
    ("/completion", _text),  # llama.cpp's own
    ("/responses", _responses),
    ("/v1/messages", _messages),  # with the version: OpenAI's `/threads/{id}/messages` is no call
)
