"""Text completions: a text, or token ids, is asked with, and its continuation is sampled.

OpenAI's legacy `/completions`, which may ask for several prompts at once, and llama.cpp's own
`/completion`, whose reply is one flat object. llama.cpp serves its own at either path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from otel_rollout.wire.api import Sampled
from otel_rollout.wire.choices import ChoicesApi, indexed_choices
from otel_rollout.wire.columns import ID_PREFIX, columns_of, id_array, reply_partly_read
from otel_rollout.wire.conversation import MessagePath, extend
from otel_rollout.wire.json import Choice, Chunk, Json, JsonText, Params, Reply
from otel_rollout.wire.merging import Merging, finish
from otel_rollout.wire.params import allows_no_token
from otel_rollout.wire.servers import sampled_count

_PIECEWISE = ("content", "tokens", "completion_probabilities")
"""Members that llama.cpp's own endpoint streams in pieces."""


class TextCompletions(ChoicesApi):
    """OpenAI's legacy `/completions`, and llama.cpp's own `/completion`."""

    provider = "openai"
    paths = ("/completions", "/completion")
    conversation = "prompt"
    delta_name = "text"
    count_names = ("tokens_evaluated", "tokens_predicted")  # llama.cpp's
    finish_names = ("finish_reason", "stop_type")
    stop_names = ("stop_reason", "matched_stop", "stopping_word")
    token_id_members: Mapping[str, Params] = {
        "/completions": {"return_token_ids": True, "logprobs": 0}
    }

    def choices_asked(self, params: Params) -> int:
        prompt, prompts = params.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = len(prompt)
        return super().choices_asked(params) * prompts

    def provider_of(self, path: str) -> str | None:
        return self.provider if self.path_of(path) == "/completions" else None  # else llama.cpp's

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        if found.choices is not UNSET:
            return super().reply_of(found, whole)
        columns: dict[str, Any] = {}
        if found.tokens:  # as the next, it may be UNSET
            columns["tokens"] = id_array(found.tokens)
        if found.completion_probabilities:
            columns["completion_probabilities"] = columns_of(found.completion_probabilities)
        return reply_partly_read(found, whole, columns)

    def is_own(self, chunk: Chunk) -> bool:
        return super().is_own(chunk) or _is_piece(chunk)

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        if not any(map(_is_piece, chunks)):
            return super().merge(chunks, merging)
        body: dict[str, Any] = {}
        for chunk in chunks:
            merging.same("model", chunk.get("model"))
            merging.members(body, chunk, _PIECEWISE)
        return finish(body)

    def ends(self, chunk: Chunk) -> bool:
        return _is_piece(chunk) and chunk["stop"]

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
                counted = sampled_count(reply) if len(choices) == 1 else None
                choice = _without_echo(choice, own, counted)
            if allows_no_token(params):
                choice = {**choice, "logprobs": None}  # they are the prompt's
            message = {"role": "assistant", "content": choice.get("text")}
            yield Sampled(index, choice, (message,), path)


def _prompts(prompt: Json) -> list[Json]:
    """The prompts of a request, one or several: each a text or a list of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def _without_echo(choice: Choice, prompt: Json, counted: int | None) -> Choice:
    """The choice without the prompt, which `echo` has the server repeat before what it sampled.

    It repeats text and log-probabilities; a list of token ids has those that were sampled. vLLM
    leaves the prompt out of the text where it sends such a list. `counted`: the number of tokens
    that the server says it sampled.
    """
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, Mapping) else {}
    lists = {name: value for name, value in logprobs.items() if isinstance(value, list)}
    if set(map(type, lists.get("text_offset", ()))) != {int}:
        lists.pop("text_offset", None)
    text = str(choice.get("text"))
    start = _prompt_tokens(choice, lists, prompt, text, counted)
    end = _prompt_end(text, lists, prompt, start)
    if not lists:
        return {**choice, "text": text[end:], "logprobs": logprobs or None}
    if start is None:
        return {**choice, "text": text[end:], "logprobs": None}
    rest = {name: value[start:] for name, value in lists.items()}
    return {**choice, "text": text[end:], "logprobs": {**logprobs, **rest}}


def _prompt_tokens(
    choice: Choice, lists: Mapping[str, list[Any]], prompt: Json, text: str, counted: int | None
) -> int | None:
    """Number of the prompt's tokens at the start of the log-probabilities; None: not known."""
    values = lists.get("token_logprobs") or lists.get("tokens") or []
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return max(0, len(values) - len(ids))
    if counted is not None and counted <= len(values):
        return len(values) - counted
    if not isinstance(prompt, str):
        return len(prompt) if isinstance(prompt, list) else 0
    if _are_written_as_ids(lists):
        return None  # texts and offsets are those of `token_id:1`, not of the reply
    if not text.startswith(prompt):  # not every server knows `echo`, but none knows the first token
        return None if values[:1] == [None] else 0
    offsets = lists.get("text_offset")
    if offsets is None:
        return None
    return sum(1 for offset in offsets if offset < len(prompt))


def _prompt_end(text: str, lists: Mapping[str, list[Any]], prompt: Json, start: int | None) -> int:
    """Where the prompt ends in the text; 0 where the server left it out."""
    tokens, offsets = lists.get("tokens") or [], lists.get("text_offset") or []
    written = not _are_written_as_ids(lists) and set(map(type, tokens[start:])) == {str}
    if start and written and "".join(tokens[start:]) == text:
        return 0
    if isinstance(prompt, str):
        return len(prompt) if text.startswith(prompt) else 0
    # Without log-probabilities only the server knows where the text of these ids ends.
    if start is None or not offsets:
        return 0
    end = offsets[start] if start < len(offsets) else len(text)
    return end if end <= len(text) else 0


def _are_written_as_ids(lists: Mapping[str, list[Any]]) -> bool:
    tokens = lists.get("tokens")
    return tokens is not None and tokens != [] and str(tokens[0]).startswith(ID_PREFIX)


def _is_piece(chunk: Chunk) -> bool:
    """True for a piece of llama.cpp's own reply."""
    return isinstance(chunk.get("content"), str) and isinstance(chunk.get("stop"), bool)
