"""The drift of a trajectory: where the token ids of its conversations fork.

A server renders and tokenises the whole conversation anew for each call. Where the
ids differ from those that were read and sampled before, the call is a fork by tokens: its row in
`token_sequences` begins anew, and the server reads again what it had in its cache. Histories
decide which call continues which, rows which ids are complete. Pure, and linear in the token ids.

The class of a fork: the messages decide first, the reply and its replay in the next request. Where
both are equal, the chat template changed the ids, and their place and texts show how. Texts of ids
are known where log-probabilities came with the tokens; nothing is tokenised here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import is_
from typing import Literal

from otel_rollout.spans import TokenPath
from otel_rollout.trajectory import (
    Completion,
    Conversations,
    Drift,
    ForkCause,
    NotExact,
    TokenFork,
    ended_before,
    exact_ids,
    model_of,
    path_key,
    reasoning_in,
)
from otel_rollout.wire import Json, MessagePath, token_bytes, tool_calls, written_tokens


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
        self._ids: Callable[[Completion], TokenPath | None] = cache(_ids)

    def compare(
        self, before: Completion, after: Completion
    ) -> TokenFork | Literal["merged", "unknown"]:
        """What became of the ids of `before` in the call of `after`."""
        prompt = after.prompt_token_path
        if prompt is None or (place := self._place(before, after, prompt)) is None:
            return "unknown"
        merged = before if place < 0 else self._merged_twin(before, after, prompt)
        if merged is None:
            return self._fork(before, after, prompt.to_array(), place)
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
            is_before = other is not before and ended_before(other, after)
            if is_before and self._place(other, after, prompt) == -1:
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
        return Texts((completion, found.ids) for completion, found in known if found)

    def _fork(
        self, before: Completion, after: Completion, prompt: array[int], position: int
    ) -> TokenFork:
        ids = self._ids(before)
        held = ids.to_array() if ids else array("i")
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
        self, before: Completion, held: array[int], prompt: array[int], position: int
    ) -> tuple[Completion | None, int]:
        """The completion that sampled the id at `position`, and the place of its first id.

        What a prompt has at its end to begin a reply, which any prompt ends with, is the reply's:
        a replay is not rendered with it.
        """
        owner: Completion | None = before
        while owner is not None and (ids := self._ids(owner)) is not None:
            start = ids.length - len(ids.ids)
            if position >= ids.length:
                break
            opening = held[position:start]
            if not opening or prompt[-len(opening) :] == opening:
                return owner, start
            owner = self._merged.get(_call(owner))
        return None, 0


def _ids(completion: Completion) -> TokenPath | None:
    found = exact_ids(completion)
    return None if isinstance(found, NotExact) else found


def _first_difference(ids: TokenPath, prompt: TokenPath) -> int:
    """The first place where a prompt does not have the ids, or ends; -1 where it begins with them.

    Of paths that share a prefix it is compared only what comes after.
    """
    known = {id(node) for node in _nodes(ids)}
    shared = next((node.length for node in _nodes(prompt) if id(node) in known), 0)
    held, asked = _after(ids, shared), _after(prompt, shared)
    low, high = 0, min(len(held), len(asked))
    while low < high:
        middle = (low + high) // 2 + 1
        if held[low:middle] == asked[low:middle]:
            low = middle
        else:
            high = middle - 1
    return -1 if low == len(held) else shared + low


def _nodes(path: TokenPath | None) -> Iterator[TokenPath]:
    while path is not None:
        yield path
        path = path.parent


def _after(path: TokenPath, shared: int) -> array[int]:
    """The ids of a path after those of the node on it that is so long."""
    ids = array(path.typecode)
    for node in reversed([node for node in _nodes(path) if node.length > shared]):
        ids += array(path.typecode, node.ids)
    return ids


# --- why they fork


_OPENING = 2
"""Tokens before reasoning that may stay when it is dropped: the mark that opens it, a line feed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the ids of a call stop to be those that its conversation had."""

    before: Completion
    """The call that is continued."""
    after: Completion
    """The call that continues it."""
    owner: Completion | None
    """The completion that sampled the ids which changed; None: they are of a prompt."""
    start: int
    """Place of the owner's first sampled id in `held`; 0 without an owner."""
    held: Sequence[int]
    """Ids of prompt and reply of `before`."""
    prompt: Sequence[int]
    """Ids of the prompt of `after`."""
    position: int
    """The first place where both differ, or one ends."""


class Texts:
    """The texts of the token ids that these completions sampled, where their replies have them.

    A reply is read when the text of one of its ids is asked for: to read all costs as much as all
    else that a list needs.
    """

    def __init__(self, completions: Iterable[tuple[Completion, Sequence[int]]]) -> None:
        self._unread = list(completions)
        self._read: list[tuple[Sequence[int], Sequence[Json], Sequence[Json]]] = []
        """Ids of completions, and `written_tokens` of them."""
        self._ids = set[int]().union(*(ids for _, ids in self._unread))
        self._known: dict[int, bytes | None] = {}

    def get(self, token: int) -> bytes | None:
        """The text of an id; None: it is not known."""
        if token in self._ids and token not in self._known:
            self._known[token] = next(filter(None, self._found(token)), None)
        return self._known.get(token)

    def _found(self, token: int) -> Iterator[bytes | None]:
        for ids, tokens, given in self._read:
            if token in ids:
                place = ids.index(token)
                yield token_bytes(tokens[place], given[place])
        for each in [each for each in self._unread if token in each[1]]:
            self._unread.remove(each)
            completion, ids = each
            tokens, given = written_tokens(completion.choice)
            if len(tokens) == len(ids):
                self._read.append((ids, tokens, given))
                place = ids.index(token)
                yield token_bytes(tokens[place], given[place])


def cause_of(difference: Difference, texts: Texts) -> ForkCause:
    """The class of the difference. `texts`: what is known of the texts of token ids."""
    owner = difference.owner
    same_text = _same_text(difference, texts)
    if owner is not None and same_text:
        return "tokens_merged"
    if (changed := _changed_message(difference.before, difference.after)) is not None:
        return changed
    if owner is None:
        return "template_changed"
    if _is_in_reasoning(difference, owner, texts):
        return "reasoning_dropped"
    if difference.position < difference.start:
        return "template_changed"  # in what begins a reply, and the reply did not think
    if _is_in_arguments(difference, owner, texts, same_text=same_text):
        return "arguments_reformatted"
    if owner.truncated or owner.aborted or isinstance(owner.stop_reason, str):
        return "truncated"
    if same_text is False:
        return "template_changed"
    return "other" if difference.position == len(difference.prompt) else "tokens_merged"


def _same_text(difference: Difference, texts: Texts) -> bool | None:
    """True if both spell the same text until their tokens meet again; None if that is not known."""
    sides = (difference.held, difference.prompt)
    if texts.get(next(iter(sides[1][difference.position :]), -1)) is None:
        return None
    at = [difference.position, difference.position]
    left = [b"", b""]
    while True:
        shorter = 0 if len(left[0]) <= len(left[1]) else 1
        if at[shorter] >= len(sides[shorter]):
            return None
        text = texts.get(sides[shorter][at[shorter]])
        if text is None:
            return None
        at[shorter] += 1
        left[shorter] += text
        common = min(map(len, left))
        if left[0][:common] != left[1][:common]:
            return False
        left = [text[common:] for text in left]
        if common and not any(left):
            return True


def _changed_message(before: Completion, after: Completion) -> ForkCause | None:
    """What the client changed in the first message that it replays otherwise than it was."""
    sent = _by_key(after.prompt)
    for key, messages in _by_key(before.path).items():
        replayed = sent.get(key)
        if replayed is None or all(map(is_, messages, replayed)):
            continue
        reasoning = reasoning_in(messages)
        if reasoning != reasoning_in(replayed):
            return "reasoning_dropped" if reasoning else "other"
        if _arguments(messages) != _arguments(replayed):
            return "arguments_reformatted"
    return None


def _by_key(path: MessagePath | None) -> dict[bytes, list[Json]]:
    """The messages by the key of the path that ends with them, first to last.

    Reasoning that is an item of its own has the key of the item before it.
    """
    found: dict[bytes, list[Json]] = {}
    for node in reversed(list(path or ())):
        found.setdefault(node.key, []).append(node.message)
    return found


def _arguments(messages: Iterable[Json]) -> list[str]:
    """The arguments of the tool calls in the messages, as texts."""
    found = (call.arguments for message in messages for call in tool_calls(message))
    return [text if isinstance(text, str) else json.dumps(text) for text in found]


def _may_be_written_otherwise(completion: Completion) -> bool:
    """True if the model wrote arguments in another form than templates write JSON in."""
    for text in _arguments(completion.items):
        try:
            value = json.loads(text)
            forms = [json.dumps(value, ensure_ascii=escaped) for escaped in (True, False)]
        except (ValueError, RecursionError):
            continue  # a template that cannot parse it writes it as it is
        if text not in forms:
            return True
    return False


def _is_in_arguments(
    difference: Difference, owner: Completion, texts: Texts, *, same_text: bool | None
) -> bool:
    """True if a template may have written arguments anew: those in a form of the model's own.

    Where the texts of the tokens are known, the text before the arguments must be the same.
    """
    if not _arguments(owner.items):
        return False
    same = _known_text(difference, texts)
    parts = [*reasoning_in(owner.items), (owner.message or {}).get("content")]
    if same is not None and not all(_bytes(one) in same for one in parts if isinstance(one, str)):
        return False
    return same_text is False or _may_be_written_otherwise(owner)


def _is_in_reasoning(difference: Difference, owner: Completion, texts: Texts) -> bool:
    """True if what changed begins where the reasoning of the reply does: all of it is dropped."""
    if difference.position - difference.start > _OPENING:
        return False
    reasoning, content = reasoning_in(owner.items), (owner.message or {}).get("content")
    if reasoning:
        ends = reasoning[0]
    elif isinstance(content, str) and "</think>" in content:
        ends = "</think>"
    else:
        return False
    same = _known_text(difference, texts)
    return same is None or not isinstance(ends, str) or _bytes(ends) not in same


def _known_text(difference: Difference, texts: Texts) -> bytes | None:
    """The text of the reply up to the difference; None where it is not known."""
    found = [texts.get(token) for token in difference.held[difference.start : difference.position]]
    return None if None in found else b"".join(filter(None, found))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
