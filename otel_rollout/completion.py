"""A completion: one sampled choice of one exchange, whichever API it went through.

`completions_of` is where the shapes of the APIs are known; everything behind it sees completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from otel_rollout.exchange import Exchange
from otel_rollout.messages import Json, MessagePath, copy_json, extend, path_messages

_SAMPLING = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "ignore_eos",
        "reasoning_effort",
        "reasoning",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "guided_json",
        "guided_regex",
        "logprobs_mode",
    )
)

RewardKey = tuple["str | None", "str | None", int]
"""What a reward is for: its name, and the completion (id, choice) where it is a step reward."""


class Reward(float):
    """A number that says how well something went, and what: it is a float in every other way.

    Without `completion_id` it is about the trajectory, with it about that one completion.
    """

    __slots__ = ("choice_index", "completion_id", "explanation", "name")

    name: str | None
    """None for the reward of the trajectory or completion itself."""
    completion_id: str | None
    choice_index: int
    explanation: str | None

    def __new__(
        cls,
        value: float,
        *,
        name: str | None = None,
        completion_id: str | None = None,
        choice_index: int = 0,
        explanation: str | None = None,
    ) -> Reward:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            about = "reward" if name is None else f"reward {name!r}"
            raise ValueError(
                f"{about}: expected a finite number, got {value!r}; do not set it while it is "
                f"not known"
            )
        reward = super().__new__(cls, number)
        reward.name = name
        reward.completion_id = completion_id
        reward.choice_index = choice_index
        reward.explanation = explanation
        return reward

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return (float(self),), fields

    @property
    def key(self) -> RewardKey:
        return self.name, self.completion_id, self.choice_index

    def to_dict(self) -> dict[str, Json]:
        """JSON fields; those that say nothing are left out."""
        fields: dict[str, Json] = {"value": float(self), "name": self.name}
        fields |= {"completion_id": self.completion_id, "explanation": self.explanation}
        if self.choice_index:
            fields["choice_index"] = self.choice_index
        return {key: value for key, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Reward:
        fields = dict(data)
        return cls(fields.pop("value"), **fields)


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
    """The choice as the server sent it."""
    exchange: Exchange
    rewards: Mapping[RewardKey, Reward]
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
        """As the server sent it."""
        reason = self.choice.get("finish_reason") or self.choice.get("status")
        return reason if isinstance(reason, str) else None

    @property
    def stop_reason(self) -> str | int | None:
        """VLLM's stop string or token id, where the server sends one."""
        reason = self.choice.get("stop_reason")
        return reason if isinstance(reason, str | int) else None

    @property
    def usage(self) -> dict[str, Any] | None:
        usage = self._reply("usage")
        return usage if isinstance(usage, dict) else None

    @property
    def token_ids(self) -> list[int] | None:
        """The sampled token ids, the end-of-turn token included; None if the server sent none."""
        return self.exchange.token_ids(self.choice.get("token_ids"))

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The token ids that the model was asked with; None if the server sent none."""
        own = self.exchange.token_ids(self.choice.get("prompt_token_ids"))
        return own or self.exchange.token_ids(self._reply("prompt_token_ids"))

    @property
    def logprobs(self) -> list[float | None] | None:
        """Log-probability of each sampled token (None: unknown); None if the server sent none."""
        logprobs = self.choice.get("logprobs")
        if not isinstance(logprobs, Mapping):
            return None
        if isinstance(logprobs.get("token_logprobs"), list):
            values = logprobs["token_logprobs"]
        else:
            entries = (logprobs.get("content") or []) + (logprobs.get("refusal") or [])
            values = [entry.get("logprob") for entry in entries if isinstance(entry, Mapping)]
            if not values:
                return None
        return [
            float(value) if isinstance(value, int | float) and not math.isnan(value) else None
            for value in values
        ]

    @property
    def reward(self) -> Reward | None:
        """The step reward that was recorded last for this completion."""
        found = None
        for _, completion_id, choice_index in self.rewards:
            if (completion_id, choice_index) == (self.id, self.choice_index):
                found = self.rewards[_, completion_id, choice_index]
        return found

    @property
    def policy_version(self) -> str | int | None:
        """The rollout's policy version when the call was made."""
        return self.exchange.policy_version

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

    def __repr__(self) -> str:
        return f"<Completion {self.id!r} choice {self.choice_index} {self.status}>"

    def _reply(self, key: str) -> Any:
        reply = self.exchange.reply
        return reply.get(key) if isinstance(reply, Mapping) else None


def completions_of(
    exchange: Exchange, rewards: Mapping[RewardKey, Reward], *, trainable: bool = True
) -> list[Completion]:
    """The completions of an exchange; [] for an endpoint that does not generate.

    A call of a generating endpoint has at least one, also when it failed. `trainable` is False
    for a rollout that is not to be learned from.
    """
    kind = next((kind for end, kind in _KINDS if exchange.path.split("?")[0].endswith(end)), None)
    if kind is None:
        return []
    status, error = exchange.status, exchange.error
    reply = exchange.reply
    replies: list[tuple[int, Mapping[str, Json], tuple[Json, ...], MessagePath | None]] = []
    if isinstance(reply, Mapping) and (error is None or exchange.stream):
        replies = list(kind(exchange, reply))
    if not replies:
        if status == "complete":
            status, error = "error", error or _nothing_sampled(reply)
        replies = [(0, {}, (), exchange.prompt)]
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


_Replies = Iterator["tuple[int, Mapping[str, Json], tuple[Json, ...], MessagePath | None]"]


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
    per_prompt = max(1, len(choices) // len(prompts))
    for index, choice in choices:
        own = prompts[min(index // per_prompt, len(prompts) - 1)]
        path = None if own is None else extend(None, {"role": "user", "content": own})
        message = {"role": "assistant", "content": choice.get("text")}
        yield index, choice, (message,), path


def _responses(exchange: Exchange, reply: Mapping[str, Json]) -> _Replies:
    prompt, text = exchange.prompt, exchange.params.get("input")
    if prompt is None and isinstance(text, str):
        prompt = extend(None, {"role": "user", "content": text})
    output = reply.get("output")
    if isinstance(output, list) and output:
        yield 0, reply, tuple(output), prompt


_KINDS = (("/chat/completions", _chat), ("/completions", _text), ("/responses", _responses))
