"""The exporter `trl`: files of rows, and the rows that are nothing but ids and labels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from otel_rollout import ConfigurationError, TokenSequence, Trajectory, TrajectoryGroup
from otel_rollout.export import Dropped, Json, JsonRows, Positive, dropped_completions
from otel_rollout_trl.grpo import Choose, OnFailure, to_trl_rollout
from otel_rollout_trl.messages import (
    Context,
    Pairs,
    Per,
    to_trl_kto,
    to_trl_preferences,
    to_trl_sft,
)

Format = Literal["sft", "sft-tokens", "dpo", "kto", "grpo"]


def to_trl_sft_tokens(
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float | None = None,
    max_length: int | None = None,
) -> list[dict[str, Json]]:
    """Rows for SFTTrainer: {"input_ids", "labels"} of each token sequence, as sampled.

    labels: the ids where they train here, else -100. min_reward: leave out what is scored lower or
    not at all. max_length: longer rows are truncated.
    """
    return [
        {"input_ids": row.token_ids, "labels": _labels(row)}
        for trajectory in trajectories
        if _is_good(trajectory, min_reward)
        for row in trajectory.token_sequences(max_length=max_length)
    ]


def _labels(row: TokenSequence) -> list[int]:
    ids = row.token_id_array
    labels = array(ids.typecode, [-100]) * len(row)
    for (_, start, end), trains in zip(row.spans, row.trains, strict=True):
        if trains:
            labels[start:end] = ids[start:end]
    return labels.tolist()


def _is_good(trajectory: Trajectory, min_reward: float | None) -> bool:
    if min_reward is None:
        return True
    return trajectory.reward is not None and trajectory.reward >= min_reward


@dataclass(frozen=True)
class TrlRows(JsonRows):
    """The exporter `trl`: JSON lines of one of the formats.

    A rollout that failed without being scored has no row. Each option belongs to some formats; one
    that the chosen format does not have is an error.

    format: "sft" (`to_trl_sft`), "sft-tokens" (`to_trl_sft_tokens`), "dpo" (`to_trl_preferences`),
    "kto" (`to_trl_kto`) or "grpo" (a row of `to_trl_rollout`).
    per: of sft, a row for each "history" (the default) or each "completion".
    min_reward: sft and sft-tokens leave out what is scored lower, or not at all; not set: nothing.
    max_length: of sft-tokens, longer rows are truncated to so many tokens; not set: no limit.
    pairs: of dpo, "extremes" (the default) or "all".
    context: of dpo and kto, "keep" lets messages in that the model did not sample, "error" (the
    default) refuses them.
    threshold: of kto, lowest reward of a good completion; has to be set.
    choose: of grpo, the row of a trajectory with several, "longest", "last" or "main"; "error"
    (the default) refuses it.
    on_failure: of grpo, "keep" takes failed, unscored rollouts without a reward, "error" (the
    default) leaves them out.
    max_completion_length: of grpo, longer completions are truncated to so many tokens; not set: no
    limit.
    """

    format: Format = "sft"
    per: Per | None = None
    min_reward: float | None = None
    max_length: Positive | None = None
    pairs: Pairs | None = None
    context: Context | None = None
    threshold: float | None = None
    choose: Choose | None = None
    on_failure: OnFailure | None = None
    max_completion_length: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = _OPTIONS[self.format]
        for name in self._options():
            if name not in known:
                raise ConfigurationError(
                    f"exporter 'trl', format {self.format!r}: expected the options "
                    f"{', '.join(known)}, got {name!r}"
                )
        if self.format == "kto" and self.threshold is None:
            raise ConfigurationError("exporter 'trl', format 'kto': threshold is missing")

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """The rows of a group. ExportError for what the format cannot carry."""
        if self.format == "grpo":
            columns = to_trl_rollout(self._members(group), **self._options())
            for number in range(len(columns["completion_ids"])):
                yield {
                    name: None if column is None else column[number]
                    for name, column in columns.items()
                }
        else:
            yield from _FUNCTIONS[self.format](group, **self._options())

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no row of token ids trains; none of the formats of messages."""
        if self.format == "grpo":
            on_failure: Literal["drop", "keep"] = "keep" if self.on_failure == "keep" else "drop"
            yield from dropped_completions(self._members(group), on_failure=on_failure)
        elif self.format == "sft-tokens":
            good = (t for t in group if _is_good(t, self.min_reward))
            yield from dropped_completions(good, max_length=self.max_length)

    def _members(self, group: TrajectoryGroup) -> list[Trajectory]:
        """The trajectories of grpo: in a file no row stands for a prompt, so failures may lack."""
        keep = self.on_failure == "keep"
        scored = (t for t in group.failures if t.status != "cancelled" or t.reward is not None)
        return [*group, *(scored if keep else ())]

    def _options(self) -> dict[str, Any]:
        """The options that were set; the others have the defaults of the format's function."""
        names = dict.fromkeys(name for names in _OPTIONS.values() for name in names)
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_FUNCTIONS: dict[str, Callable[..., list[dict[str, Json]]]] = {
    "sft": to_trl_sft,
    "sft-tokens": to_trl_sft_tokens,
    "dpo": to_trl_preferences,
    "kto": to_trl_kto,
}
_OPTIONS = {
    "sft": ("per", "min_reward"),
    "sft-tokens": ("min_reward", "max_length"),
    "dpo": ("pairs", "context"),
    "kto": ("threshold", "context"),
    "grpo": ("choose", "on_failure", "max_completion_length"),
}
