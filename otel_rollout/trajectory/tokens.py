"""Token sequences: the trainable rows of a trajectory, with exactly the ids of prompts and samples.

Pure; the order of the completions does not matter. A call whose prompt ids start with all the ids
of an earlier call (prompt and completion) extends the row of that call; any other call starts a row
of its own. Nothing is rendered, re-tokenised or padded: a completion without exact ids is dropped,
with the reason. Each admitted completion is trained exactly once over all rows.

The merge rule is the one that trainers agree on (tinker-cookbook `trajectory_to_data`, SkyRL
`_merge_single_trajectory`, TRL `_chain_to_sequences`), extended from one running segment to a
tree: a call extends the *longest* path that is a prefix of its prompt.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Literal, TypedDict

from otel_rollout.looking import ShownInNotebooks
from otel_rollout.spans import TokenPath, extend_tokens
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.fixed import frozen
from otel_rollout.trajectory.gate import Cause as Cause
from otel_rollout.trajectory.gate import NotExact, admit
from otel_rollout.trajectory.histories import ended_before, in_order, names_previous
from otel_rollout.wire import Json, LogprobsMode


class SequenceOptions(TypedDict, total=False):
    """The options of `Trajectory.token_sequences`, for those who check types."""

    on_failure: Literal["drop", "keep"]
    on_abort: Literal["drop", "keep"]
    on_side_call: Literal["drop", "keep"]
    on_media: Literal["drop", "keep"]
    constrained_logprobs: Literal["keep", "nan"]
    mask_truncated: bool
    max_length: int | None
    max_token_id: int | None
    require_all_calls: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """An admitted completion with its ids and log-probabilities."""

    completion: Completion
    path: TokenPath
    """The ids of its prompt, and then as one block its own."""
    logprobs: array[float] | None
    """NaN in the place of each unknown one; None: none are known."""

    @property
    def start(self) -> int:
        """Number of ids of its prompt."""
        return self.path.length - len(self.path.ids)


@frozen("take a copy of the list")
@dataclass(frozen=True, eq=False, repr=False)
class TokenSequence:
    """One trainable row. All lists of T items are aligned with `token_ids`.

    Lists are made when they are first asked for. What needs tensors takes the arrays, which are
    made anew each time: NumPy and torch read them without a step for each token.
    """

    _path: TokenPath
    """Its ids, before it is truncated."""
    _kept: int
    """T, its number of tokens: fewer than those of the path where it is truncated."""
    _calls: list[_Call]
    """The calls in it, in order."""
    trains: list[bool]
    """For each of `completions`, true if this row trains it."""

    @cached_property
    def token_ids(self) -> list[int]:
        """(T) ids of prompts and sampled tokens, in order."""
        return self.token_id_array.tolist()

    @cached_property
    def loss_mask(self) -> list[int]:
        """(T) 1 on the tokens that this row trains, else 0. A completion that several rows share is
        trained in the first of them only.
        """
        return self.loss_mask_array.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        """(T) log-probabilities of the sampled tokens, as the server sent them; 0.0 on other
        tokens, NaN if that of a sampled token is unknown.
        """
        return self.logprob_array.tolist()

    @cached_property
    def sampled(self) -> list[int]:
        """(T) 1 on the tokens that the model sampled, else 0; also if another row trains them."""
        return self.sampled_array.tolist()

    @property
    def token_id_array(self) -> array[int]:
        """`token_ids` as an array of 32-bit integers."""
        return self._path.to_array()[: self._kept]

    @property
    def loss_mask_array(self) -> array[int]:
        """`loss_mask` as an array of bytes."""
        return self._mask(self.trains)

    @property
    def logprob_array(self) -> array[float]:
        """`logprobs` as an array of doubles."""
        values = array("d", bytes(8 * self._kept))
        for call, (_, start, end) in zip(self._calls, self.spans, strict=True):
            known = call.logprobs or array("d", [math.nan]) * (end - start)
            values[start:end] = known[: end - start]
        return values

    @property
    def sampled_array(self) -> array[int]:
        """`sampled` as an array of bytes."""
        return self._mask([True] * len(self._calls))

    def _mask(self, marks: list[bool]) -> array[int]:
        """1 on the tokens of the calls that are marked, else 0."""
        mask = bytearray(self._kept)
        for (_, start, end), is_marked in zip(self.spans, marks, strict=True):
            if is_marked:
                mask[start:end] = b"\1" * (end - start)
        return array("b", bytes(mask))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return self._calls[0].start if self._calls else self._kept

    @cached_property
    def spans(self) -> list[tuple[str, int, int]]:
        """(completion id, start, end) of each completion in the row, in order; `end` is
        exclusive.
        """
        return [
            (call.completion.id, call.start, min(call.path.length, self._kept))
            for call in self._calls
        ]

    @cached_property
    def completions(self) -> list[Completion]:
        """The completions of `spans`, in the same order."""
        return [call.completion for call in self._calls]

    @property
    def truncated(self) -> bool:
        """True if a completion in it was truncated, or the row itself (`max_length`) was."""
        is_cut = self._kept < self._path.length
        return is_cut or any(each.truncated for each in self.completions)

    @property
    def completion_ids(self) -> list[str]:
        """Ids of the completions in it, in order."""
        return [completion_id for completion_id, _, _ in self.spans]

    @property
    def sampling(self) -> dict[str, Json] | list[dict[str, Json]]:
        """The sampling parameters that its requests set, by their names.

        A list with those of each of `completions` where they are not the same in all.
        """
        found = [completion.sampling for completion in self.completions]
        return found[0] if all(each == found[0] for each in found) else found

    @property
    def logprobs_mode(self) -> LogprobsMode | None:
        """`Completion.logprobs_mode` of all its completions. None: not known, or not one."""
        modes = {completion.logprobs_mode for completion in self.completions}
        return modes.pop() if len(modes) == 1 else None

    @property
    def policy_versions(self) -> list[str | int | None]:
        """The policy versions that sampled its completions, in order; None: not known."""
        return [version for each in self.completions for version in each.policy_versions]

    @property
    def policy_version_spans(self) -> list[tuple[str | int | None, int, int]] | None:
        """(version, start, end) of all sampled tokens in it, in order, as the server names them.

        `end` is exclusive. A version is None in a completion of which the server names none so;
        None: it does in no completion.
        """
        found: list[tuple[str | int | None, int, int]] = []
        for completion, (_, start, end) in zip(self.completions, self.spans, strict=True):
            for version, first, last in completion.policy_version_spans or _UNKNOWN:
                if start + first < end:
                    found.append((version, start + first, min(start + last, end)))
        return found if any(version is not None for version, _, _ in found) else None

    @property
    def trained_tokens(self) -> int:
        """The sum of its loss mask."""
        pairs = zip(self.spans, self.trains, strict=True)
        return sum(end - start for (_, start, end), trains in pairs if trains)

    def __len__(self) -> int:
        return self._kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSequence):
            return NotImplemented
        return self is other or all(getattr(self, n) == getattr(other, n) for n in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenSequence({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


_FIELDS = (
    *("token_ids", "loss_mask", "logprobs", "sampled"),
    *("prompt_length", "spans", "truncated"),
)


_UNKNOWN: list[tuple[None, int, int]] = [(None, 0, sys.maxsize)]
"""The span of a completion whose versions are not known."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A completion that no row trains, or a trajectory without any."""

    completion: Completion | None
    """The completion. None: the trajectory has none at all."""
    reason: str
    """The reason, a sentence without a full stop."""
    cause: Cause = "other"
    """The class of the reason."""

    @property
    def lacks_only_ids(self) -> bool:
        """True if only its exact token ids are missing: trainers that take messages train on it."""
        return self.cause in _ONLY_IDS

    def __str__(self) -> str:
        """The reason, after the id of the completion if there is one."""
        return f"{self.completion.id}: {self.reason}" if self.completion else self.reason


_ONLY_IDS: frozenset[Cause] = frozenset(
    (*("no_token_ids", "no_token_ids_there", "impossible_id", "uncounted", "disagreement"), "media")
)


class TokenSequences(list[TokenSequence], ShownInNotebooks):
    """The rows of a trajectory, in order of their last calls.

    `dropped` has the completions that no row trains.
    """

    __slots__ = ("dropped",)

    def __init__(self, rows: Iterable[TokenSequence] = (), dropped: Iterable[Dropped] = ()) -> None:
        super().__init__(rows)
        self.dropped: list[Dropped] = list(dropped)


def token_sequences(
    completions: Iterable[Completion],
    *,
    masked: Callable[[Completion], bool] = lambda _: False,
    max_length: int | None = None,
    keep_aborted: bool = False,
    keep_side_calls: bool = False,
    keep_media: bool = False,
    constrained_logprobs: Literal["keep", "nan"] = "keep",
    max_token_id: int | None = None,
) -> TokenSequences:
    """The rows of the completions of one trajectory.

    masked: true for completions that stay in their row as context and are not trained.
    max_length: longer rows are truncated to so many tokens, and flagged as truncated.
    keep_aborted: true if replies that the server gave up are trained as far as they came.
    keep_side_calls: true if side calls are trained as any other.
    keep_media: true if conversations with images, sound or files are trained as any other.
    constrained_logprobs: "nan" makes those of constrained decoding unknown.
    max_token_id: the last id of the vocabulary. None: not known.
    """
    calls: list[_Call] = []
    dropped: list[Dropped] = []
    for completion, media in _with_media(in_order(completions)):
        found = admit(
            completion,
            media=() if keep_media else media,
            keep_aborted=keep_aborted,
            keep_side_calls=keep_side_calls,
            max_token_id=max_token_id,
        )
        if isinstance(found, NotExact):
            dropped.append(Dropped(completion, found.reason, found.cause))
        else:
            calls.append(_Call(completion, found, _logprobs_of(completion, constrained_logprobs)))
    parents = _link(calls)
    unresolved = _unresolved(calls, parents)
    dropped += [Dropped(call.completion, _RETRIED, "unresolved_retry") for call in unresolved]
    calls = [call for call in calls if call not in unresolved]
    trained: set[int] = set()
    leaves = _within(ROW_IDS, _leaves(calls, parents))
    rows = [_row(_path(leaf, parents), trained, masked, max_length) for leaf in leaves]
    for call in calls:
        if id(call) not in trained:
            why = _why_untrained(call, masked(call.completion), max_length)
            dropped.append(Dropped(call.completion, *why))
    return TokenSequences((row for row in rows if any(row.trains)), dropped)


ROW_IDS = 1 << 24
"""Token ids that the rows of one trajectory have together, at most: a small file can name one long
prompt again and again."""
_RETRIED = (
    "the same prompt was sampled again, nothing went on from this reply, and it is not known which "
    "one the agent got (unresolved retry)"
)


def _logprobs_of(completion: Completion, constrained: str) -> array[float] | None:
    is_nan = constrained == "nan" and completion.logprobs_mode == "constrained"
    return None if is_nan else completion.logprob_array


def _leaves(calls: Sequence[_Call], parents: Mapping[int, _Call]) -> list[_Call]:
    """The calls that no other one extends."""
    ends = {id(parents[id(call)]) for call in calls if id(call) in parents}
    return [call for call in calls if id(call) not in ends]


def _within(most: int, leaves: Sequence[_Call]) -> list[_Call]:
    """The first leaves, whose rows have no more ids than that together."""
    lengths = accumulate(leaf.path.length for leaf in leaves)
    return [leaf for leaf, length in zip(leaves, lengths, strict=True) if length <= most]


def _why_untrained(call: _Call, is_masked: bool, max_length: int | None) -> tuple[str, Cause]:
    if is_masked:
        return "masked", "masked"
    if max_length is not None and call.start >= max_length:
        return f"beyond {max_length} tokens of its row", "too_long"
    return f"the rows of its trajectory would have more than {ROW_IDS} token ids", "too_many"


def _with_media(completions: Iterable[Completion]) -> Iterator[tuple[Completion, Sequence[str]]]:
    """The completions in order, each with the types of what in its conversation is no text.

    A request that names an earlier reply or a conversation has what is there.
    """
    named: dict[str, Sequence[str]] = {}
    for completion in completions:
        previous = names_previous(completion)
        media = completion.media or (named.get(previous, ()) if previous else ())
        if media:
            of = completion.api.conversation_id(completion.exchange.params)
            named |= dict.fromkeys((completion.id, *([of] if isinstance(of, str) else [])), media)
        yield completion, media


def untrained_sequences(rows: TokenSequences) -> list[TokenSequence]:
    """The tokens of what `rows.dropped` lists, to look at: rows in which nothing trains.

    Ids are as they came: there may be fewer than were sampled, and none of the prompt. What has an
    id that can be none is not here.
    """
    context = {completion for row in rows for completion in row.completions}
    calls = [
        _as_it_came(drop.completion, path)
        for drop in rows.dropped
        if drop.completion is not None
        and drop.completion not in context
        and (path := drop.completion.token_path)
    ]
    calls = [call for call in calls if call.path.first_wrong() is None]
    parents = _link(calls)
    paths = (_path(leaf, parents) for leaf in _leaves(calls, parents))
    return [_row(path, set(), lambda _: True, None) for path in paths]


def _as_it_came(completion: Completion, sampled: TokenPath) -> _Call:
    path = extend_tokens(completion.prompt_token_path, sampled.ids)
    logprobs = completion.logprob_array
    is_whole = logprobs is not None and len(logprobs) == len(path.ids)
    return _Call(completion, path, logprobs if is_whole else None)


class _Beginnings:
    """Digests of prefixes of token paths, which were admitted; a shared one is hashed once."""

    def __init__(self) -> None:
        self._hashers: dict[int, blake2b] = {}

    def through(self, path: TokenPath | None) -> blake2b:
        """The hasher of the whole path; copy it before you update it."""
        missing: list[TokenPath] = []
        while path is not None and id(path) not in self._hashers:
            missing.append(path)
            path = path.parent
        hasher = blake2b(digest_size=16) if path is None else self._hashers[id(path)]
        for node in reversed(missing):
            hasher = hasher.copy()
            hasher.update(node.ids)  # type: ignore[arg-type]
            self._hashers[id(node)] = hasher
        return hasher

    def digest(self, path: TokenPath, length: int) -> bytes:
        """The digest of the first `length` ids of the path."""
        node: TokenPath | None = path
        while node is not None and node.length - len(node.ids) >= length:
            node = node.parent
        if node is None:
            return blake2b(digest_size=16).digest()
        hasher = self.through(node.parent).copy()
        hasher.update(memoryview(node.ids)[: length - (node.length - len(node.ids))])  # type: ignore[arg-type]
        return hasher.digest()


def _link(calls: Sequence[_Call]) -> dict[int, _Call]:
    """The call that each call extends, by `id`: the longest path that is a prefix of its prompt."""
    if len(calls) < 2:
        return {}
    beginnings = _Beginnings()
    by_model: dict[str | None, dict[int, dict[bytes, list[_Call]]]] = {}
    for call in calls:
        lengths = by_model.setdefault(model_of(call.completion), {})
        same = lengths.setdefault(call.path.length, {})
        same.setdefault(beginnings.through(call.path).digest(), []).append(call)
    ordered = {model: sorted(lengths) for model, lengths in by_model.items()}
    parents: dict[int, _Call] = {}
    for call in calls:
        lengths, known = by_model[model_of(call.completion)], ordered[model_of(call.completion)]
        for position in range(bisect_right(known, call.start) - 1, -1, -1):
            length = known[position]
            found = [
                other
                for other in lengths[length].get(beginnings.digest(call.path, length), ())
                if ended_before(other.completion, call.completion)
            ]
            if found:
                parents[id(call)] = max(found, key=lambda c: _recency(c.completion))
                break
    return parents


def _path(leaf: _Call, parents: Mapping[int, _Call]) -> list[_Call]:
    """The calls that a call extends, the first one first, and the call."""
    path = [leaf]
    while (parent := parents.get(id(path[-1]))) is not None:
        path.append(parent)
    return path[::-1]


def model_of(completion: Completion) -> str | None:
    """The model whose tokens the ids are: no row has those of two."""
    return completion.model or completion.request_model


def _recency(completion: Completion) -> tuple[int, int, str, int]:
    """Sort key: among paths with the same ids the last sampled wins, among choices choice 0."""
    exchange = completion.exchange
    return exchange.ended, exchange.start_time_ns, exchange.span_id, -completion.choice_index


def _unresolved(calls: Sequence[_Call], parents: dict[int, _Call]) -> list[_Call]:
    """Repeated samples of one prompt that the agent may never have received.

    A completion that our capture recorded was delivered; one that a later call extends was used.
    """
    continued = {id(parent) for parent in parents.values()}
    doubtful = [c for c in calls if not c.completion.exact and id(c) not in continued]
    if not doubtful:
        return []
    beginnings = _Beginnings()

    def prompt(call: _Call) -> tuple[str | None, bytes]:
        return model_of(call.completion), beginnings.digest(call.path, call.start)

    spans: dict[tuple[str | None, bytes], set[str]] = {}
    for call in calls:
        spans.setdefault(prompt(call), set()).add(call.completion.span_id)
    return [call for call in doubtful if len(spans[prompt(call)]) > 1]


def _row(
    path: Sequence[_Call],
    trained: set[int],
    masked: Callable[[Completion], bool],
    max_length: int | None,
) -> TokenSequence:
    """The row of these calls, each of which continues the one before it."""
    ids = path[-1].path
    kept = ids.length if max_length is None else min(ids.length, max_length)
    calls = [call for call in path if call.start < min(call.path.length, kept)]
    trains = [id(call) not in trained and not masked(call.completion) for call in calls]
    trained.update(id(call) for call, trains_it in zip(calls, trains, strict=True) if trains_it)
    return TokenSequence(ids, kept, calls, trains)
