"""Text completions: a text, or token ids, is asked with, and its continuation is sampled.

OpenAI's legacy `/completions`, which may ask for several prompts at once, and llama.cpp's own
`/completion`, whose reply is one flat object. llama.cpp serves its own at either path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.choices import (
    finished_choices,
    has_choices,
    indexed_choices,
    merge_choices,
    samples_per_prompt,
)
from otel_rollout.wire.json import Choice, Chunk, Json, Params, Reply
from otel_rollout.wire.merging import finish, merge_field
from otel_rollout.wire.messages import MessagePath, extend

_PIECEWISE = ("content", "tokens", "completion_probabilities")
"""Members that llama.cpp's own endpoint streams in pieces."""


class TextCompletions(ModelApi):
    """OpenAI's legacy `/completions`, and llama.cpp's own `/completion`."""

    provider = "openai"
    paths = ("/completions", "/completion")
    conversation = "prompt"
    finish_names = ("finish_reason", "stop_type")
    stop_names = ("stop_reason", "matched_stop", "stopping_word")

    def choices_asked(self, params: Params) -> int:
        prompt, prompts = params.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = len(prompt)
        return samples_per_prompt(params) * prompts

    def provider_of(self, path: str) -> str | None:
        return self.provider if self.path_of(path) == "/completions" else None  # else llama.cpp's

    def token_id_params(self, path: str) -> Params | None:
        if self.path_of(path) != "/completions":
            return None
        return {"return_token_ids": True, "logprobs": 0}

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return has_choices(chunks) or _has_pieces(chunks)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        return _merge_pieces(chunks) if _has_pieces(chunks) else merge_choices(chunks)

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        if _has_pieces(events.chunks):
            return body is not None and body.get("stop") is True and events.error is None
        finished = body is not None and finished_choices(body) >= choices
        return (events.done or finished) and events.error is None

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        choices = list(indexed_choices(reply))
        if not choices and isinstance(reply.get("content"), str):  # llama.cpp's own
            message = {"role": "assistant", "content": reply["content"]}
            yield Sampled(0, reply, (message,), self.asked(params, prompt))
            return
        asked = _prompts(params.get("prompt"))
        n = params.get("n")
        per_prompt = max(1, n if isinstance(n, int) else len(choices) // len(asked))
        for index, choice in choices:
            own = asked[min(index // per_prompt, len(asked) - 1)]
            path = None if own is None else extend(None, {"role": "user", "content": own})
            if params.get("echo"):
                choice = _without_echo(choice, own)
            message = {"role": "assistant", "content": choice.get("text")}
            yield Sampled(index, choice, (message,), path)


def _prompts(prompt: Json) -> list[Json]:
    """The prompts of a request, one or several: each a text or a list of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def _without_echo(choice: Choice, prompt: Json) -> Choice:
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
    rest = {key: value[count:] for key, value in logprobs.items() if isinstance(value, list)}
    return {**choice, "text": str(text)[end:], "logprobs": {**logprobs, **rest} or None}


def _has_pieces(chunks: Sequence[Chunk]) -> bool:
    """True if any chunk is a piece of llama.cpp's own reply."""
    return any(
        isinstance(chunk.get("content"), str) and isinstance(chunk.get("stop"), bool)
        for chunk in chunks
    )


def _merge_pieces(chunks: Sequence[Chunk]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key in _PIECEWISE:
                merge_field(body, key, value)
            elif value is not None or key not in body:
                body[key] = value
    return {key: finish(value) for key, value in body.items()}
