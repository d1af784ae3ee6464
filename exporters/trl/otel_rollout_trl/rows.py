"""The exporter `trl`: files of rows, and the rows that are nothing but ids and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

from otel_rollout import ConfigurationError, Trajectory, TrajectoryGroup
from otel_rollout.export.rows import JsonRows
from otel_rollout.wire.json import Json
from otel_rollout_trl.grpo import to_trl_rollout
from otel_rollout_trl.messages import to_trl_kto, to_trl_preferences, to_trl_sft
from otel_rollout_trl.options import check

Format = Literal["sft", "sft-tokens", "dpo", "kto", "grpo"]


def to_trl_sft_tokens(
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float | None = None,
    max_length: int | None = None,
) -> list[dict[str, Json]]:
    """Rows for SFTTrainer: {"input_ids", "labels"} of each token sequence, as sampled.

    labels: the ids where they train here, else -100. min_reward: leave out what is scored lower or
    not at all. max_length: longer rows are cut at their end.
    """
    return [
        {
            "input_ids": row.token_ids,
            "labels": [
                token if mask else -100
                for token, mask in zip(row.token_ids, row.loss_mask, strict=True)
            ],
        }
        for trajectory in trajectories
        if min_reward is None or (trajectory.reward is not None and trajectory.reward >= min_reward)
        for row in trajectory.token_sequences(max_length=max_length)
    ]


class TrlRows(JsonRows):
    """The exporter `trl`: JSON lines of one of the formats.

    format: sft (`to_trl_sft`), sft-tokens (`to_trl_sft_tokens`), dpo (`to_trl_preferences`), kto
    (`to_trl_kto`) or grpo (a row of `to_trl_rollout`). The other options are those of that
    function. A rollout that failed without being scored has no row.
    """

    def __init__(self, format: Format = "sft", **options: Any) -> None:  # noqa: A002
        check("format", format, get_args(Format))
        known = _OPTIONS[format]
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"exporter 'trl', format {format!r}: expected the options "
                    f"{', '.join(known)}, got {name!r}"
                )
        if format == "kto" and "threshold" not in options:
            raise ConfigurationError("exporter 'trl', format 'kto': threshold is missing")
        self._format = format
        self._options = {name: _value(name, value) for name, value in options.items()}
        list(self.rows(TrajectoryGroup([])))  # a wrong choice is said before anything is read

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """The rows of a group. ExportError for what the format cannot carry."""
        if self._format == "grpo":
            keep = self._options.get("on_failure") == "keep"
            # In a file no row stands for a prompt: a failure is left out, rather than an error.
            failures = [t for t in group.failures if keep and t.status != "cancelled"]
            columns = to_trl_rollout([*group, *failures], **self._options)
            for number in range(len(columns["completion_ids"])):
                yield {
                    name: None if column is None else column[number]
                    for name, column in columns.items()
                }
        else:
            yield from _FUNCTIONS[self._format](group, **self._options)


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


def _value(name: str, value: Any) -> Any:
    """An option as its function takes it: on a command line it is text."""
    kind = {
        "min_reward": float,
        "threshold": float,
        "max_length": int,
        "max_completion_length": int,
    }
    try:
        return kind[name](value) if name in kind and value is not None else value
    except ValueError:
        raise ConfigurationError(
            f"exporter 'trl': {name}: expected a number, got {value!r}"
        ) from None
