"""Trajectories as rows: what trainers read, one pure step from groups of trajectories to JSON.

`to_token_rows` is the row that most trainers take under other names. Formats that need more are
exporters of their own, separately installed and found by the entry point group
`otel_rollout_exporter`; each is a `RowExporter`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import (
    Episode,
    TerminationReason,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    group_in_workflow,
)
from otel_rollout.wire import Json

ENTRY_POINTS = "otel_rollout_exporter"
Credit = Literal["broadcast", "split", "last"]


@runtime_checkable
class RowExporter(Protocol):
    """Turns groups of trajectories into the rows of a file that a trainer reads.

    The entry point names a class; its keyword arguments are the exporter's options (strings where
    they come from a command line), a wrong one is a ConfigurationError. It is used from one thread.
    """

    def rows(self, group: TrajectoryGroup) -> Iterable[dict[str, Json]]:
        """The rows of a group, JSON each; a trajectory without a group comes as a group of one.

        Nothing is kept between calls, and nothing is written: that is the caller's. Raises
        ExportError for what the format cannot carry, rather than damaging it.
        """

    def finish(self, rows: Path, output: Path) -> None:
        """Make `output` of a file with all rows as JSON lines, in constant memory.

        `rows` may be renamed: for JSON lines that is all there is to do. Called once, at the end.
        """


def row_exporters() -> list[EntryPoint]:
    """The installed exporters, by name."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    return [found[name] for name in sorted(found)]


def row_exporter(name: str, **options: Any) -> RowExporter:
    """The installed exporter of this name. ConfigurationError that lists those there are."""
    found = {entry.name: entry for entry in row_exporters()}
    if name not in found:
        there = f"installed are {', '.join(sorted(found))}" if found else "none is installed"
        raise ConfigurationError(
            f"there is no exporter {name!r}: {there}; install otel-rollout-exporter-{name}"
        )
    made = found[name].load()
    try:
        exporter = made(**options)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"exporter {name!r}: {error}") from None
    if not isinstance(exporter, RowExporter):
        raise ConfigurationError(
            f"exporter {name!r}: expected a class with rows() and finish(), got {made!r}"
        )
    return exporter


class Rows(list[dict[str, Any]]):
    """Rows, in order, and what gave none on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.masked: list[Trajectory] = []
        """Trajectories that are left out for how they ended (`mask_reasons`)."""


def to_token_rows(
    trajectories: Iterable[Trajectory | Episode] | TrajectoryGroup | Episode,
    *,
    credit: Credit = "broadcast",
    scale_advantages: bool = False,
    mask_reasons: Collection[TerminationReason | str] = (),
    **options: Any,
) -> Rows:
    """One plain row for each token sequence, in order; what trainers read under other names.

    input_ids, loss_mask, logprobs, sampled: (T), as in `TokenSequence` (NaN: unknown).
    prompt_length, truncated, completion_ids, spans, policy_versions (of its completions).
    reward: the trajectory's, None if it is not scored. A trajectory with several rows gives each
    of them its reward ("broadcast"), its share ("split"), or only the last row ("last"; the
    others have 0.0).
    advantage: for a group, relative to the group (`TrajectoryGroup.advantages`), shared likewise;
    for episodes, relative to the trajectories of the same `group_id`, which inside a workflow are
    those of the same group and name; else None.
    mask_reasons: trajectories that ended so, or whose episode did, give no rows. Their rewards
    count in the mean of their group all the same. They are in `masked` of what is returned.
    trajectory_id, name, task_id, group_id, sample_index; row and rows: which of how many of its
    trajectory. `options` are those of `Trajectory.token_sequences`.
    """
    if credit not in ("broadcast", "split", "last"):
        raise ConfigurationError(
            f"to_token_rows(credit=...): expected 'broadcast', 'split' or 'last', got {credit!r}"
        )
    masked = _reasons(mask_reasons)
    rows = Rows()
    for sample in _samples(trajectories, scale_advantages):
        trajectory, advantage = sample.trajectory, sample.advantage
        if sample.reason in masked:
            rows.masked.append(trajectory)
            continue
        sequences = trajectory.token_sequences(**options)
        for position, sequence in enumerate(sequences):
            share = _share(credit, position, len(sequences))
            rows.append(
                {
                    "input_ids": sequence.token_ids,
                    "loss_mask": sequence.loss_mask,
                    "logprobs": sequence.logprobs,
                    "sampled": sequence.sampled,
                    "prompt_length": sequence.prompt_length,
                    "truncated": sequence.truncated,
                    "completion_ids": sequence.completion_ids,
                    "spans": [list(span) for span in sequence.spans],
                    "policy_versions": _versions(sequence),
                    "reward": None if trajectory.reward is None else trajectory.reward * share,
                    "advantage": None if advantage is None else advantage * share,
                    "trajectory_id": trajectory.id,
                    "name": trajectory.name,
                    "task_id": trajectory.task_id,
                    "group_id": sample.group_id,
                    "sample_index": trajectory.sample_index,
                    "row": position,
                    "rows": len(sequences),
                }
            )
    return rows


@dataclass(slots=True)
class _Sample:
    trajectory: Trajectory
    reason: str | None
    """Why it ended, or its episode did."""
    group_id: str | None
    advantage: float | None = None


def _samples(
    source: Iterable[Trajectory | Episode] | TrajectoryGroup | Episode, scale: bool
) -> list[_Sample]:
    """The trajectories in order, each with its advantage where it has others to compare with."""
    samples: list[_Sample] = []
    groups: dict[str, list[_Sample]] = {}
    for item in [source] if isinstance(source, Episode) else source:
        if not isinstance(item, Episode):
            samples.append(_Sample(item, item.termination_reason, item.group_id))
            continue
        for trajectory in item.trajectories:
            group_id = trajectory.group_id
            if group_id is None:  # recorded before workflow runs had a group of their own
                group_id = group_in_workflow(item.task_id, trajectory.name)
            reason = item.termination_reason
            samples.append(_Sample(trajectory, getattr(reason, "value", reason), group_id))
            groups.setdefault(group_id, []).append(samples[-1])
    compared = [samples] if isinstance(source, TrajectoryGroup) else groups.values()
    for members in compared:
        group = TrajectoryGroup([member.trajectory for member in members])
        for member, advantage in zip(members, group.advantages(scale=scale), strict=True):
            member.advantage = advantage
    return samples


def _reasons(reasons: Collection[TerminationReason | str]) -> set[str]:
    known = [reason.value for reason in TerminationReason]
    values = [getattr(reason, "value", reason) for reason in reasons]
    for value in values:
        if value not in known:
            raise ConfigurationError(
                f"to_token_rows(mask_reasons=...): expected some of {', '.join(known)}, "
                f"got {value!r}"
            )
    return set(values)


def _share(credit: Credit, position: int, count: int) -> float:
    if credit == "split":
        return 1.0 / count
    return 1.0 if credit == "broadcast" or position == count - 1 else 0.0


def _versions(sequence: TokenSequence) -> list[str | int | None]:
    return [completion.policy_version for completion in sequence.completions]


class JsonRows:
    """What exporters whose file is JSON lines inherit: finishing is renaming."""

    def finish(self, rows: Path, output: Path) -> None:
        """Rename the rows."""
        os.replace(rows, output)


class TokenRows(JsonRows):
    """The exporter `tokens`, which is always there: the rows of `to_token_rows`."""

    def __init__(
        self,
        credit: Credit = "broadcast",
        on_failure: Literal["drop", "keep"] = "drop",
        max_length: int | str | None = None,
        mask_truncated: bool | str = False,
    ) -> None:
        if on_failure not in ("drop", "keep"):
            raise ConfigurationError(f"on_failure: expected 'drop' or 'keep', got {on_failure!r}")
        if str(mask_truncated).lower() not in ("true", "false"):
            raise ConfigurationError(
                f"mask_truncated: expected 'true' or 'false', got {mask_truncated!r}"
            )
        self._options: dict[str, Any] = {
            "credit": credit,
            "on_failure": on_failure,
            "max_length": None if max_length is None else int(max_length),
            "mask_truncated": str(mask_truncated).lower() == "true",
        }
        to_token_rows((), credit=credit)

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """A row for each token sequence; failures with `on_failure="keep"` only."""
        keep = self._options["on_failure"] == "keep"
        yield from to_token_rows(group, **self._options)
        if keep:
            yield from to_token_rows(group.failures, **self._options)
