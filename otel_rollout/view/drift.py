"""The drift of a trajectory: where the token ids of its conversations fork.

A server renders and tokenises the whole conversation anew for each call. Where the
ids differ from those that were read and sampled before, the call is a fork by tokens: its row in
`token_sequences` begins anew, and the server reads again what it had in its cache. Histories
decide which call continues which, rows which ids are complete. Pure, and linear in the token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Literal

from otel_rollout.spans import TokenPath
from otel_rollout.trajectory import (
    Completion,
    Conversations,
    Drift,
    ExactIds,
    NotExact,
    TokenFork,
    ended_before,
    exact_ids,
    model_of,
    path_key,
)
from otel_rollout.view.drift_causes import Difference, Texts, cause_of, known_texts


def drift_of(conversations: Conversations) -> Drift:
    """The drift of one trajectory. Choices of one response are one call."""
    calls = _Calls(conversations.completions)
    pairs: dict[tuple[int, int], tuple[Completion, Completion]] = {}
    for before, after in conversations.continuations:
        pairs.setdefault(_call(after), (before, after))
    found = [calls.compare(*pair) for pair in pairs.values()]
    return Drift(
        continued=len(found),
        merged=found.count("merged"),
        unknown=found.count("unknown"),
        forks=tuple(one for one in found if isinstance(one, TokenFork)),
    )


def _call(completion: Completion) -> tuple[int, int]:
    """The call of a completion: choices share it, several prompts of one request do not."""
    return id(completion.exchange), id(completion.prompt)


class _Calls:
    """The calls of a trajectory; those that were compared and merged are kept."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self._merged: dict[tuple[int, int], Completion] = {}
        """The completion whose ids each merged call begins with."""
        self._ids: Callable[[Completion], ExactIds | None] = cache(_ids)

    def compare(
        self, before: Completion, after: Completion
    ) -> TokenFork | Literal["merged", "unknown"]:
        """What became of the ids of `before` in the call of `after`."""
        prompt = after.prompt_token_path
        if prompt is None or (place := self._place(before, after, prompt)) is None:
            return "unknown"
        merged = before if place < 0 else self._merged_twin(before, after, prompt)
        if merged is None:
            return self._fork(before, after, prompt.to_list(), place)
        self._merged[_call(after)] = merged
        return "merged"

    def _place(self, before: Completion, after: Completion, prompt: TokenPath) -> int | None:
        """The first place where the ids differ, -1 where they do not, None where it is unknown."""
        ids = self._ids(before)
        if ids is None or model_of(before) != model_of(after):
            return None
        return _first_difference(ids, prompt)

    def _merged_twin(
        self, before: Completion, after: Completion, prompt: TokenPath
    ) -> Completion | None:
        """A completion with the text of `before` in other tokens, with which the call merges."""
        name = before.context_key, path_key(before.path)
        for other in self._twins.get(name, ()):
            if ended_before(other, after) and self._place(other, after, prompt) == -1:
                return other
        return None

    @cached_property
    def _twins(self) -> dict[tuple[bytes, bytes], list[Completion]]:
        found: dict[tuple[bytes, bytes], list[Completion]] = {}
        for completion in self._completions:
            name = completion.context_key, path_key(completion.path)
            found.setdefault(name, []).append(completion)
        return found

    @cached_property
    def _texts(self) -> Texts:
        known = ((completion, self._ids(completion)) for completion in self._completions)
        return known_texts((completion, found.ids) for completion, found in known if found)

    def _fork(
        self, before: Completion, after: Completion, prompt: list[int], position: int
    ) -> TokenFork:
        ids = self._ids(before)
        held = [*ids.prompt.to_list(), *ids.ids] if ids else []
        owner, start = self._owner(before, held, prompt, position)
        difference = Difference(before, after, owner, start, held, prompt, position)
        return TokenFork(
            before_id=before.id,
            after_id=after.id,
            cause=cause_of(difference, self._texts),
            position=position,
            held=len(held),
            prompt=len(prompt),
            held_id=held[position],
            prompt_id=prompt[position] if position < len(prompt) else None,
            before=before,
            after=after,
        )

    def _owner(
        self, before: Completion, held: list[int], prompt: list[int], position: int
    ) -> tuple[Completion | None, int]:
        """The completion that sampled the id at `position`, and the place of its first id.

        What a prompt has at its end to begin a reply, which any prompt ends with, is the reply's:
        a replay is not rendered with it.
        """
        owner: Completion | None = before
        while owner is not None and (ids := self._ids(owner)) is not None:
            start = ids.prompt.length
            if position >= start + len(ids.ids):
                break
            opening = held[position:start]
            if not opening or prompt[-len(opening) :] == opening:
                return owner, start
            owner = self._merged.get(_call(owner))
        return None, 0


def _ids(completion: Completion) -> ExactIds | None:
    found = exact_ids(completion)
    return None if isinstance(found, NotExact) else found


def _first_difference(ids: ExactIds, prompt: TokenPath) -> int:
    """The first place where a prompt does not have the ids, or ends; -1 where it begins with them.

    Of paths that share a prefix it is compared only what comes after.
    """
    known = {id(node) for node in _nodes(ids.prompt)}
    shared = next((node.length for node in _nodes(prompt) if id(node) in known), 0)
    held, asked = [*_after(ids.prompt, shared), *ids.ids], _after(prompt, shared)
    if asked[: len(held)] == held:
        return -1
    pairs = enumerate(zip(held, asked, strict=False))
    return shared + next((n for n, (a, b) in pairs if a != b), len(asked))


def _nodes(path: TokenPath | None) -> Iterator[TokenPath]:
    while path is not None:
        yield path
        path = path.parent


def _after(path: TokenPath, shared: int) -> list[int]:
    """The ids of a path after those of the node on it that is so long."""
    blocks = [node.ids for node in _nodes(path) if node.length > shared]
    return [token for block in reversed(blocks) for token in block]
