"""What is wrong with a trajectory as training data: of what kind it is, why, and what to do. Pure.

Every warning and every completion that no row trains is in one finding; advice is never empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from otel_rollout.terminal import without_ids, without_ids_and_numbers
from otel_rollout.trajectory import (
    DROPS,
    Completion,
    Dropped,
    Kind,
    TokenSequences,
    Trajectory,
    advice_about,
    sentences,
)
from otel_rollout.wire import Json, samplers_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know before training on a trajectory."""

    kind: Kind
    text: str
    """What is the matter, a sentence without a full stop; it may have ids."""
    advice: str
    """What to do about it, one or two sentences with full stops."""
    completion_id: str | None = None
    """The completion that it is about; None: the trajectory."""
    choice_index: int = 0

    @property
    def replies(self) -> int:
        """How many completions it is about; 0: it is about the trajectory."""
        counted = _REPLIES.match(self.text)
        return int(counted[1]) if counted else int(self.completion_id is not None)

    @property
    def plain(self) -> str:
        """The text for a sum, without ids and counts; what an error says keeps its numbers."""
        if self.kind == "failed":
            return without_ids(self.text)
        if self.kind == "duplicate" and " have the id " in self.text:
            return "responses of several calls have one id: get_history(id) gives the last of them"
        return without_ids_and_numbers(self.text)

    def to_dict(self) -> dict[str, Json]:
        """The finding as JSON."""
        return asdict(self)


_REPLIES = re.compile(r"(\d+) of \d+ (?:replies|calls) ")
"""How a finding about several completions begins."""


def findings_of(trajectory: Trajectory, *, rows: TokenSequences | None = None) -> list[Finding]:
    """The findings of a trajectory. `rows`: its token sequences, where they are known already.

    First what its warnings say, then the completions that no row trains, then the rest.
    """
    rows = trajectory.token_sequences() if rows is None else rows
    found = list(_of_warnings(trajectory))
    if any(drop.cause == "no_token_ids" for drop in rows.dropped):  # each says it of its reply
        found = [one for one in found if one.text != sentences.NOT_ASKED()]
    damaged = {(one.completion_id, one.choice_index) for one in found if one.kind == "damaged"}
    for drop in rows.dropped:
        if drop.completion is not None and not (drop.cause == "damaged" and _key(drop) in damaged):
            kind, advice = DROPS[drop.cause]
            found.append(Finding(kind, drop.reason, advice, *_key(drop)))
    return [
        *found,
        *_of_the_ending(trajectory),
        *_of_logprobs(rows),
        *_of_truncation(rows),
        *_of_policies(rows),
        *_of_drift(trajectory, rows),
    ]


NOTHING_TRAINS = "no token of it trains"
"""Prefix of the finding that fails `tokens`; the reason follows it."""


def nothing_trains(rows: TokenSequences) -> Finding:
    """That no token of a trajectory trains, with the reason of the first drop and its advice."""
    reasons = ((f": {drop.reason}", advice_about(drop)) for drop in rows.dropped)
    because, advice = next(reasons, ("", ""))
    advice = advice or "See its other findings (--json): they say why no row trains its replies."
    return Finding("dropped", f"{NOTHING_TRAINS}{because}", advice)


def replies_by_sentence(findings: Iterable[Finding]) -> Counter[tuple[str, str, str]]:
    """Kind, text for a sum, and advice of each one, with how many replies it is about."""
    found = Counter[tuple[str, str, str]]()
    for one in findings:
        found[one.kind, one.plain, one.advice] += one.replies
    return found


def _key(drop: Dropped) -> tuple[str, int]:
    assert drop.completion is not None
    return drop.completion.id, drop.completion.choice_index


def _of_warnings(trajectory: Trajectory) -> Iterator[Finding]:
    missing = trajectory.missing_calls
    warnings = [*trajectory.warnings]
    warnings += [warning for warning in missing if warning not in warnings]
    if not warnings:
        return
    calls = {completion.span_id: completion for completion in trajectory.completions}
    for warning in warnings:
        sentence, values = sentences.sentence_of(warning)
        kind: Kind = "incomplete" if warning in missing else sentence.kind
        about = calls.get(values["span"]) if sentence is sentences.DAMAGED else None
        id_, choice = (about.id, about.choice_index) if about else (None, 0)
        yield Finding(kind, warning, sentence.advice, id_, choice)


def _of_the_ending(trajectory: Trajectory) -> Iterator[Finding]:
    """What the rollout itself lacks: a reward, and an ending where no completion says so."""
    if not trajectory.completions and trajectory.status in ("error", "cancelled"):
        error = trajectory.error or {}
        because = f": {error.get('type')}: {error.get('message')}" if error else ""
        yield Finding(
            "failed",
            f"its rollout ended as {trajectory.status!r} without a model call{because}",
            "See its error: the agent failed before it asked the model.",
        )
    if trajectory.reward is None:
        named = trajectory.rewards
        text = "it has no reward"
        if named:
            text += f", though it has {', '.join(repr(name) for name in named)}"
        yield Finding("unscored", text, _WEIGHT if named else _REWARD)


_REWARD = (
    "Set trajectory.reward, or record_reward(...) in the rollout; later with `otel-rollout reward`."
)
_WEIGHT = "Give the named rewards a weight (record_reward(..., weight=1)), or set its reward."


def _of_logprobs(rows: TokenSequences) -> Iterator[Finding]:
    completions = _trained(rows)
    unknown = sum(completion.logprob_array is None for completion in completions)
    if unknown:
        yield Finding(
            "inexact",
            f"{unknown} of {len(completions)} replies that train have no log-probabilities",
            "Ask for them (`with otel_rollout.request_token_ids():`), or have the trainer compute "
            "them.",
        )
    constrained = sum(c.logprobs_mode == "constrained" for c in completions)
    if constrained:
        yield Finding(
            "inexact",
            f"{constrained} of {len(completions)} replies that train were sampled under a "
            f"constraint: their log-probabilities are not the policy's",
            'Make them unknown (constrained_logprobs="nan"), or sample without a schema or mask.',
        )
    modes = {mode: Counter[str]() for mode in (None, "raw")}
    for each in completions:
        if each.logprobs_mode in modes and each.logprob_array is not None:
            modes[each.logprobs_mode].update([", ".join(samplers_of(each.exchange.params))])
    for mode, samplers in modes.items():
        samplers.pop("", None)
        if samplers:
            yield Finding(
                "inexact",
                f"{sum(samplers.values())} of {len(completions)} replies that train were sampled "
                f"with {samplers.most_common(1)[0][0]}, and "
                + (_RAW if mode else "whether their log-probabilities are of that is not known"),
                _MODE,
            )


_RAW = "their log-probabilities are from before that: not of what was sampled from"
_MODE = (
    "Start the server with `--logprobs-mode processed_logprobs` (vLLM), and say so: "
    'configure(logprobs_mode="processed"), or `--logprobs-mode processed` at `run` and `gateway`; '
    "`otel-rollout doctor --server URL` measures it."
)


def _of_truncation(rows: TokenSequences) -> Iterator[Finding]:
    completions = _trained(rows)
    reasons = Counter(c.finish_reason for c in completions if c.truncated)
    for reason, count in reasons.most_common():
        yield Finding(
            "truncated",
            f"{count} of {len(completions)} replies that train were truncated (finish reason "
            f"{reason!r})",
            "Allow more tokens, or leave them out of the loss (mask_truncated=True).",
        )


def _of_policies(rows: TokenSequences) -> Iterator[Finding]:
    """That several versions sampled what trains, by the rollout's word or by the server's."""
    completions = _trained(rows)
    named = {v: None for each in completions for v in each.policy_versions if v is not None}
    spans = (each.policy_version_spans or () for each in completions)
    by_server = {version: None for each in spans for version, _, _ in each}
    if len(versions := max(named, by_server, key=len)) > 1:
        yield Finding(
            "mixed_policy",
            f"{len(versions)} policy versions sampled what trains: {', '.join(map(str, versions))}",
            "Weights changed meanwhile: correct for it in the loss (docs/training.md, policy "
            "versions), or leave it out.",
        )


def _trained(rows: TokenSequences) -> list[Completion]:
    """The completions in the rows, each once."""
    return list({id(c): c for row in rows for c in row.completions}.values())


def _of_drift(trajectory: Trajectory, rows: TokenSequences) -> Iterator[Finding]:
    """One finding for each class of forks. A single row of all calls has none: it is not asked."""
    if len(rows) + len(rows.dropped) < 2:
        return
    drift = trajectory.drift()
    for cause, count in drift.causes.items():
        forks = [fork for fork in drift.forks if fork.cause == cause]
        again = sum(fork.prefilled_again for fork in forks)
        yield Finding(
            "drift",
            f"{count} of {drift.continued} calls that continue a conversation do not continue its "
            f"token ids ({cause.replace('_', ' ')}), {again} tokens were read again",
            "Each begins a row of its own: docs/drift.md says what to do about each cause.",
            forks[0].after_id,
            forks[0].after.choice_index,
        )
