"""Trajectories as plain rows: one pure step from trajectories to what most trainers read.

Formats that need more are exporters of their own, separately installed (`row_exporter.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from otel_rollout.errors import ConfigurationError
from otel_rollout.export.options import NotNegative, Positive, check_choice
from otel_rollout.export.row_contract import JsonRows, dropped_completions
from otel_rollout.export.tables import RowTable, checked_items
from otel_rollout.export.whole_groups import PARTIAL_GROUPS, check_whole, groups_not_whole
from otel_rollout.looking import ShownInNotebooks
from otel_rollout.terminal import did_you_mean, without_ids_and_numbers
from otel_rollout.trajectory import (
    Completion,
    Drift,
    Dropped,
    Episode,
    SequenceOptions,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
    advice_about,
    failed,
    group_in_workflow,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Credit = Literal["broadcast", "split", "last"]


class EmptyRowsWarning(UserWarning):
    """No trajectory produced a training row."""


class NoAdvantageWarning(UserWarning):
    """Several trajectories have rewards, and none has an advantage."""


class PartialGroupWarning(UserWarning):
    """Samples of a group are missing, so its advantages are relative to the others alone."""


class Rows(RowTable, ShownInNotebooks):
    """Rows, in order, and all that is in none of them; a table, too (`to_pandas`, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[Dropped] = []
        """Completions that no row trains, and trajectories without any, with the reasons."""
        self.children: list[Trajectory] = []
        """Trajectories of rollouts inside those of the group, which gave no rows. They do with
        `include_children=True`, unless the one that they ran inside gave none since it failed."""
        self.masked: list[Trajectory] = []
        """Trajectories that gave no rows because of how they ended (`mask_reasons`)."""
        self.trajectories: list[Trajectory] = []
        """Those whose token sequences the rows are, also where they have none."""

    @property
    def drift(self) -> Drift:
        """The calls of `trajectories` that begin a row although their messages continue another.

        In sum, see `Trajectory.drift`. Worked out anew each time.
        """
        return sum((trajectory.drift() for trajectory in self.trajectories), Drift())


RowSource = (
    Iterable[Trajectory | Episode | TrajectoryGroup] | TrajectoryGroup | Episode | Trajectory
)
"""What rows are made of."""


def to_token_rows(
    trajectories: RowSource,
    *,
    credit: Credit = "broadcast",
    scale_advantages: bool = False,
    epsilon: float = 1e-6,
    ddof: Literal[0, 1] = 0,
    include_children: bool = False,
    mask_reasons: Collection[TerminationReason | str] = (),
    require_whole_groups: bool = False,
    **options: Unpack[SequenceOptions],
) -> Rows:
    """One plain row for each token sequence, in order.

    trajectories: one or several trajectories, groups or episodes; not an exporter.
    input_ids, loss_mask, logprobs, sampled: (T), as in `TokenSequence` (NaN: unknown).
    prompt_length, truncated, completion_ids, spans, policy_versions, policy_version_spans,
    sampling, logprobs_mode, and logprobs_modes (of each of its completions).
    reward: the trajectory's, None if it is not scored. A trajectory with several rows gives each
    of them its reward ("broadcast"), its share ("split"), or only the last row ("last"; the
    others have 0.0).
    advantage: relative to the group (`TrajectoryGroup.advantages`, with `scale_advantages`,
    `epsilon` and `ddof`), shared likewise. Trajectories that come without a `TrajectoryGroup` are
    compared with those of the same `group_key`, which inside a workflow are those of the same group
    and name. None: it has no reward, no `group_id`, or is compared with none; where none of
    several scored trajectories has an advantage, a `NoAdvantageWarning` gives the reasons.
    include_children: also rows of a group's `children`, after those of the member that they ran
    inside, whose reward and advantage they have: they are further rows of it, among which "split"
    shares; "last" leaves theirs at zero. ValueError where there is no group.
    mask_reasons: trajectories that ended so, or whose episode did, give no rows. Their rewards
    count in the mean of their group all the same. They are in `masked` of what is returned.
    require_whole_groups: ExportError if samples of a group are missing: its `sample_index` has
    gaps, or it has fewer members than its `group_size`. Else such a group gives a
    `PartialGroupWarning`.
    trajectory_id, name, task_id, sample_index; group_id: its `group_key`. row and rows: which of
    how many of its trajectory. parent_id: the trajectory that it ran inside, or None. history: the
    place in `trajectory.histories` of the conversation that the row ends with; None: it is in none.
    `options` are those of `Trajectory.token_sequences`; with `on_failure="keep"` the failures of a
    group have rows after the others; those with a reward are compared with the others.

    What is in no row is in `dropped`, `masked` and `children` of what is returned; which calls
    begin a row because their token ids did not go on, in its `drift`. An `EmptyRowsWarning` has the
    reasons, and what to do, if there are trajectories to train on and no row.
    """
    each = _token_rows(
        trajectories,
        credit,
        {"scale": scale_advantages, "epsilon": epsilon, "ddof": ddof},
        include_children=include_children,
        mask_reasons=mask_reasons,
        options=options,
    )
    rows = each.left
    rows += each
    _check(rows, require_whole_groups)
    return rows


def _check(rows: Rows, require_whole_groups: bool) -> None:
    """Warn the caller of the function that calls this of what trains less than it may seem."""
    there = [*rows.trajectories, *rows.masked]
    if require_whole_groups:
        check_whole("to_token_rows(require_whole_groups=True)", there)
    elif partial := [each for each in groups_not_whole(there) if each.samples > 1]:
        listed = "; ".join(map(str, partial))
        warnings.warn(f"{listed}. {PARTIAL_GROUPS}", PartialGroupWarning, stacklevel=3)
    if not rows and any(trajectory.trainable for trajectory in rows.trajectories):
        warnings.warn(_why_empty(rows), EmptyRowsWarning, stacklevel=3)
    scored = [trajectory for trajectory in rows.trajectories if trajectory.reward is not None]
    if rows and len(scored) > 1 and all(row["advantage"] is None for row in rows):
        warnings.warn(_why_no_advantage(scored), NoAdvantageWarning, stacklevel=3)


class EachRow(Iterator[dict[str, Any]]):
    """Rows, one at a time; once all came, `left` lists what is in none of them."""

    def __init__(self, left: Rows, rows: Iterator[dict[str, Any]]) -> None:
        self.left = left
        self._rows = rows

    def __next__(self) -> dict[str, Any]:
        return next(self._rows)


def _token_rows(
    trajectories: RowSource,
    credit: Credit,
    scaling: Mapping[str, Any],
    *,
    include_children: bool,
    mask_reasons: Collection[TerminationReason | str],
    options: Mapping[str, Any],
) -> EachRow:
    check_choice("to_token_rows(credit=...)", credit, Credit)
    _check_names(options)
    items = checked_items(trajectories, "to_token_rows")
    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
    if include_children and not groups:
        raise ValueError(
            f"to_token_rows(include_children=True): expected a TrajectoryGroup, which knows its "
            f"children, got {type(trajectories).__name__}"
        )
    masked = _reasons(mask_reasons)
    rows = Rows()

    def each() -> Iterator[dict[str, Any]]:
        children = _children(groups)
        keep = options.get("on_failure") == "keep"
        for sample in _samples(items, scaling, keep=keep):
            own = children.pop(sample.trajectory.id, [])
            if sample.reason in masked:
                rows.masked += [sample.trajectory, *own]
                continue
            without = sample.is_failure and not keep
            if without or not include_children:
                rows.children += own
                own = []
            yield from _rows_of_sample(rows, sample, own, credit, options)
        rows.children += [child for left in children.values() for child in left]

    return EachRow(rows, each())


def _check_names(options: Mapping[str, Any]) -> None:
    known = {*(to_token_rows.__kwdefaults__ or ()), *SequenceOptions.__annotations__}
    for name in options.keys() - known:
        raise ConfigurationError(f"to_token_rows: no option {name!r}{did_you_mean(name, known)}")


def _why_empty(rows: Rows) -> str:
    """Why there are no rows, most frequent first, with what to do about it."""
    reasons, advice = Counter[str](), dict[str, str]()
    for drop in rows.dropped:
        reason = without_ids_and_numbers(drop.reason)
        reasons[reason] += 1
        advice[reason] = advice_about(drop)
    lines = [
        f"{count} x {reason}" + (f" ({advice[reason]})" if advice[reason] else "")
        for reason, count in reasons.most_common(_REASONS_NAMED)
    ]
    count = len(rows.trajectories)
    whose = "the trajectory gave" if count == 1 else f"the {count} trajectories gave"
    return (
        f"to_token_rows: {whose} no row, so there is nothing to train on: "
        + ("; ".join(lines) or "none of them has a model call")
        + ". `dropped` of what is returned lists all of it"
    )


_REASONS_NAMED = 5


def _why_no_advantage(scored: Sequence[Trajectory]) -> str:
    """Why trajectories with rewards are compared with none, and what to do about it."""
    alone = sum(trajectory.group_id is None for trajectory in scored)
    why = (
        f"{alone} have no group_id" if alone else "each is the only one of its group with a reward"
    )
    return (
        f"to_token_rows: {len(scored)} trajectories have a reward, and none has an advantage: "
        f"{why}. Record the samples of a task with gather_group(...), or pass a TrajectoryGroup, "
        f"whose members are compared with each other"
    )


def _children(groups: Iterable[TrajectoryGroup]) -> dict[str, list[Trajectory]]:
    """The children of groups by the id of the member that they ran inside."""
    found: dict[str, list[Trajectory]] = {}
    for group in groups:
        for child in group.children:
            member = group.member_of(child)
            found.setdefault(member.id if member else "", []).append(child)
    return found


def _rows_of_sample(
    rows: Rows,
    sample: _Sample,
    children: Sequence[Trajectory],
    credit: Credit,
    options: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The rows of one sample: those of its trajectory, then those of its children.

    rows: gets what is in none of them.
    """
    reward, advantage = sample.trajectory.reward, sample.advantage
    made = [(t, t.token_sequences(**options)) for t in (sample.trajectory, *children)]
    count = len(made[0][1]) if credit == "last" else sum(len(sequences) for _, sequences in made)
    position = 0
    for trajectory, sequences in made:
        rows.trajectories.append(trajectory)
        rows.dropped += sequences.dropped
        histories = _histories(trajectory) if sequences else {}
        for number, sequence in enumerate(sequences):
            share = _share(credit, position, count)
            position += 1
            # Of the arrays: a sequence keeps the lists that it is asked for.
            yield {
                "input_ids": sequence.token_id_array.tolist(),
                "loss_mask": sequence.loss_mask_array.tolist(),
                "logprobs": sequence.logprob_array.tolist(),
                "sampled": sequence.sampled_array.tolist(),
                "prompt_length": sequence.prompt_length,
                "truncated": sequence.truncated,
                "completion_ids": sequence.completion_ids,
                "spans": _lists(sequence.spans),
                "policy_versions": sequence.policy_versions,
                "policy_version_spans": _lists(sequence.policy_version_spans),
                "sampling": sequence.sampling,
                "logprobs_mode": sequence.logprobs_mode,
                "logprobs_modes": [c.logprobs_mode for c in sequence.completions],
                "reward": None if reward is None else reward * share,
                "advantage": None if advantage is None else advantage * share,
                "trajectory_id": trajectory.id,
                "parent_id": trajectory.parent_id,
                "name": trajectory.name,
                "task_id": trajectory.task_id,
                "group_id": sample.group_id,
                "sample_index": sample.trajectory.sample_index,
                "history": histories.get(_call(sequence.completions[-1])),
                "row": number,
                "rows": len(sequences),
            }


def _lists(spans: Sequence[tuple[Any, int, int]] | None) -> list[list[Any]] | None:
    return None if spans is None else list(map(list, spans))


def _histories(trajectory: Trajectory) -> dict[tuple[str, int], int]:
    """The first history that each completion is in, by its place."""
    places: dict[tuple[str, int], int] = {}
    for place, history in enumerate(trajectory.each_history()):
        for completion in history.completions:
            places.setdefault(_call(completion), place)
    return places


def _call(completion: Completion) -> tuple[str, int]:
    return completion.span_id, completion.choice_index


@dataclass(slots=True)
class _Sample:
    trajectory: Trajectory
    reason: str | None
    """Termination reason of its episode, of the trajectory itself outside of an episode."""
    group_id: str | None
    """The group that it is compared in; None for a trajectory without a group."""
    is_failure: bool = False
    """True for a failure of a `TrajectoryGroup`."""
    advantage: float | None = None
    """Reward relative to the group; None where it is not scored, or not compared."""


def _samples(
    items: Iterable[Trajectory | Episode | TrajectoryGroup],
    scaling: Mapping[str, Any],
    *,
    keep: bool,
) -> list[_Sample]:
    """The trajectories in order, failures of a group after its members, with their advantages.

    scaling: options of `TrajectoryGroup.advantages`. keep: failures have rows too, so those with a
    reward are compared with the others; else none is.
    """
    samples: list[_Sample] = []
    compared: dict[object, list[_Sample]] = {}
    for place, item in enumerate(items):
        if isinstance(item, TrajectoryGroup):
            # Its members are compared whatever their group_id is, and with no others.
            own = [_Sample(t, t.termination_reason, t.group_key) for t in item]
            apart = [_Sample(t, t.termination_reason, t.group_key, True) for t in item.failures]
            samples += [*own, *apart]
            compared[place] = [*own, *(apart if keep else ())]
            continue
        for sample in _samples_of(item):
            samples.append(sample)
            if sample.group_id is not None and (keep or not failed(sample.trajectory)):
                compared.setdefault(sample.group_id, []).append(sample)
    for members in compared.values():
        group = TrajectoryGroup([member.trajectory for member in members])
        for member, advantage in zip(members, group.advantages(**scaling), strict=True):
            member.advantage = advantage
    return samples


def _samples_of(item: Trajectory | Episode) -> Iterator[_Sample]:
    """A trajectory, or those of an episode, which end as the episode does."""
    if isinstance(item, Trajectory):
        yield _Sample(item, item.termination_reason, item.group_key)
        return
    for trajectory in item.trajectories:
        group_id = trajectory.group_key
        if group_id is None:  # recorded before workflow runs had a group of their own
            group_id = group_in_workflow(item.task_id, trajectory.name)
        reason = item.termination_reason
        yield _Sample(trajectory, getattr(reason, "value", reason), group_id)


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


@dataclass(frozen=True)
class TokenRows(JsonRows):
    """The rows of `to_token_rows`; this exporter is always installed.

    credit: the share of its reward and advantage that each row of a trajectory gets, "broadcast"
    (all of it), "split" (equal parts) or "last" (the last row has all of it).
    on_failure: "keep" gives the rows of rollouts that failed without a reward, "drop" leaves them
    out.
    on_media: "keep" trains replies in conversations with images, sound or files, for which token
    ids have placeholders; "drop" does not.
    max_length: longer rows are truncated to so many tokens; not set: no limit.
    max_token_id: the last id of the vocabulary, replies with a larger one do not train; not set:
    not known.
    mask_truncated: replies that the model did not end itself stay as context and are not trained.
    on_abort: "keep" trains replies that the server gave up, as far as they came; "drop" does not.
    constrained_logprobs: "nan" makes log-probabilities of constrained decoding unknown, "keep"
    hands them on.
    require_all_calls: refuses a trajectory that would train beside model calls which are not in it.
    """

    credit: Credit = "broadcast"
    on_failure: Literal["drop", "keep"] = "drop"
    max_length: Positive | None = None
    mask_truncated: bool = False
    on_abort: Literal["drop", "keep"] = "drop"
    on_media: Literal["drop", "keep"] = "drop"
    max_token_id: NotNegative | None = None
    constrained_logprobs: Literal["keep", "nan"] = "keep"
    require_all_calls: bool = False

    def rows(self, group: TrajectoryGroup) -> EachRow:
        """A row for each token sequence; failures with `on_failure="keep"` only."""
        options = {**self._options(), "require_all_calls": self.require_all_calls}
        return _token_rows(
            group, self.credit, {}, include_children=False, mask_reasons=(), options=options
        )

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no row trains."""
        return dropped_completions([*group, *group.failures], **self._options())

    def _options(self) -> dict[str, Any]:
        of_rows = ("credit", "require_all_calls")
        return {name: value for name, value in vars(self).items() if name not in of_rows}
