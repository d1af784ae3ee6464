"""Rows of verl's trainer V1 and of NeMo RL, as plain JSON: a key, a tag, and fields by name.

A row of verl is what its agent loop worker puts, one of NeMo RL what its rollouts put. The tensors
that they become have the types of `otel_rollout_transferqueue.queue`.
"""

from __future__ import annotations

import math
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from otel_rollout_verl import output_fields

from otel_rollout import (
    ConfigurationError,
    ExportError,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import Dropped, Json, JsonRows, dropped_completions

Row = dict[str, Any]
"""`key`, `tag`, and `fields` by name, None for a row that is a tag alone; plain JSON."""


def to_verl_rows(
    group: TrajectoryGroup,
    *,
    uid: str | None = None,
    global_steps: int | None = None,
    columns: Mapping[str, Json] | None = None,
    **options: Any,
) -> list[Row]:
    """The rows of each trajectory, then that of the prompt, with which verl may sample them.

    Keys are `{uid}_{sample_index}_{row}`, and `{uid}` for the prompt.
    Fields: prompts, responses, response_mask, loss_mask, input_ids, position_ids,
    rollout_log_probs, rm_scores (the reward at the last token of each row; absent without a reward:
    verl scores the row), num_turns, metrics, extra_fields, multi_modal_inputs ({}), uid,
    session_id, global_steps, and `columns`.
    Tags: status, prompt_len, response_len, seq_len, global_steps, min_global_steps and
    max_global_steps (None: a policy version that is no whole number).
    The status of the prompt is "finished"; "failure" if a sample of it failed without a reward, has
    no row, or is not there: verl then samples those that are there, or refills.

    uid: id of the prompt; default is the group's, or one that is derived from it where verl would
    cut it (at a `_`). global_steps: the training step that the prompt is of; default is the oldest
    policy version. columns: fields that all rows have, those of the dataset (`data_source`,
    `reward_model`, `raw_prompt`).
    options: those of `to_verl_outputs` (`logprobs`, `response_length`, ...).
    ExportError as there, for a step that is not known, and for one sample index twice.
    """
    uid, steps = _uid(group, uid), _version(group, global_steps, "global_steps")
    rows: list[Row] = []
    has_all = not group.failures
    for number, trajectory in _numbered(group):
        more = {**(columns or {}), "uid": uid, "session_id": number, "global_steps": steps}
        made = [fields | more for fields in _verl_fields(trajectory, options)]
        has_all = has_all and bool(made)
        rows += [
            {"key": f"{uid}_{number}_{place}", "tag": _verl_tag(fields), "fields": fields}
            for place, fields in enumerate(made)
        ]
    size = max((member.group_size or 1 for member in _members(group)), default=1)
    status = "finished" if has_all and len(group) >= size else "failure"
    tag = {"is_prompt": True, "status": status, "global_steps": steps}
    return [*rows, {"key": uid, "tag": tag, "fields": None}]


def _verl_fields(trajectory: Trajectory, options: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """The fields of each row; all rows of a trajectory have its reward."""
    outputs = output_fields(trajectory, **options)
    for output in outputs:
        prompts, responses = output["prompt_ids"], output["response_ids"]
        fields = {
            **{name: output[name] for name in ("num_turns", "metrics", "extra_fields")},
            "prompts": prompts,
            "responses": responses,
            "response_mask": output["response_mask"],
            "loss_mask": output["response_mask"],
            "input_ids": [*prompts, *responses],
            "position_ids": list(range(len(prompts) + len(responses))),
            "multi_modal_inputs": {},
        }
        if output["response_logprobs"] is not None:
            fields["rollout_log_probs"] = output["response_logprobs"]
        if (reward := outputs[-1].get("reward_score")) is not None:
            fields["rm_scores"] = [0.0] * (len(responses) - 1) + [reward]
        yield fields


def _verl_tag(fields: Mapping[str, Any]) -> dict[str, Json]:
    lengths = len(fields["prompts"]), len(fields["responses"])
    return {
        "status": "success",
        "prompt_len": lengths[0],
        "response_len": lengths[1],
        "seq_len": sum(lengths),
        "global_steps": fields["global_steps"],
        "min_global_steps": fields["extra_fields"].get("min_global_steps"),
        "max_global_steps": fields["extra_fields"].get("max_global_steps"),
    }


def to_nemo_rl_rows(
    group: TrajectoryGroup,
    *,
    uid: str | None = None,
    weight_version: int | None = None,
    **options: Any,
) -> list[Row]:
    """A row for each trajectory of the group; failures have none.

    Keys are `{uid}_g{row}`, tags the weight_version (default is the oldest policy version).
    Fields: input_ids, token_mask, generation_logprobs (T): the mask is 1 on what trains, all else
    has log-probability 0.0; input_lengths, sample_mask (1.0), total_reward; prompt_ids_for_adv.
    uid: as for `to_verl_rows`. options: those of `Trajectory.token_sequences`.

    NeMo RL compares rows, so a trajectory is one: ExportError for one that has none, or several,
    for one that is not scored, and for a log-probability that is not known.
    """
    uid, version = _uid(group, uid), _version(group, weight_version, "weight_version")
    rows: list[Row] = []
    for place, trajectory in enumerate(group):
        row = _only_sequence(trajectory, options)
        fields = {
            "input_ids": row.token_ids,
            "input_lengths": len(row),
            "generation_logprobs": _logprobs(trajectory, row),
            "token_mask": row.loss_mask,
            "sample_mask": 1.0,
            "prompt_ids_for_adv": row.token_ids[: row.prompt_length],
            "total_reward": _reward(trajectory),
        }
        tag = {"weight_version": version}
        rows.append({"key": f"{uid}_g{place}", "tag": tag, "fields": fields})
    return rows


def _only_sequence(trajectory: Trajectory, options: Mapping[str, Any]) -> TokenSequence:
    sequences = trajectory.token_sequences(**options)
    if len(sequences) != 1:
        dropped = "; ".join(dict.fromkeys(drop.reason for drop in sequences.dropped))
        raise ExportError(
            f"trajectory {trajectory.id!r}: expected one token sequence, got {len(sequences)}"
            + (f" ({dropped})" if dropped else "")
            + ": leave the trajectory out; verl takes several"
        )
    return sequences[0]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ExportError(
            f"trajectory {trajectory.id!r} is not scored, and NeMo RL has no row without a reward: "
            f"score it, or leave it out"
        )
    return float(trajectory.reward)


def _logprobs(trajectory: Trajectory, row: TokenSequence) -> list[float]:
    values = row.logprob_array
    for (_, start, end), trains in zip(row.spans, row.trains, strict=True):
        if not trains:
            values[start:end] = array("d", bytes(8 * (end - start)))
    if not math.isfinite(math.hypot(*values)):
        raise ExportError(
            f"trajectory {trajectory.id!r}: the server did not send the log-probability of each "
            f"token; ask for them (`with otel_rollout.request_token_ids():`)"
        )
    return values.tolist()


# --- of both


def _members(group: TrajectoryGroup) -> Iterable[Trajectory]:
    return (*group, *group.failures)


def _uid(group: TrajectoryGroup, uid: str | None) -> str:
    """The id of the prompt, without `_`, after which keys have the sample."""
    if uid is not None:
        if not uid or "_" in uid:
            raise ConfigurationError(
                f"uid: expected a text without '_', after which keys have the sample, got {uid!r}"
            )
        return uid
    known = group.key or next((member.id for member in _members(group)), "")
    return known if known and "_" not in known else str(uuid.uuid5(uuid.NAMESPACE_OID, known))


def _version(group: TrajectoryGroup, version: int | None, option: str) -> int:
    """The oldest policy version of the group, unless one is given."""
    if version is not None:
        return version
    versions = [member.policy_version for member in _members(group)]
    known = [each for each in versions if isinstance(each, int)]
    if not known or len(known) < len(versions):
        raise ExportError(
            f"group {group.id!r}: expected a whole number as the policy_version of each "
            f"trajectory, got {', '.join(dict.fromkeys(map(repr, versions)))}: pass {option}=, or "
            f"record them with policy_version="
        )
    return min(known)


def _numbered(group: TrajectoryGroup) -> list[tuple[int, Trajectory]]:
    """Each member with its number among the samples: its sample index, else its place."""
    numbered = [
        (place if member.sample_index is None else member.sample_index, member)
        for place, member in enumerate(group)
    ]
    numbers = [number for number, _ in numbered]
    if len(set(numbers)) < len(numbers):
        raise ExportError(
            f"group {group.id!r}: expected another sample_index for each trajectory, got "
            f"{numbers}: two rows would have one key"
        )
    return numbered


@dataclass(frozen=True)
class TransferQueueRows(JsonRows):
    """The exporter `transferqueue`: rows as JSON lines, which `put` puts into the queue.

    format: "verl" is the rows of its trainer V1 (`to_verl_rows`), "nemo_rl" those of NeMo RL.
    step: the global_steps of verl, the weight_version of NeMo RL; not set: the oldest policy
    version of the group.
    logprobs: of verl, false leaves log-probabilities out, and verl computes them itself.
    """

    format: Literal["verl", "nemo_rl"] = "verl"
    step: int | None = None
    logprobs: bool = True

    def rows(self, group: TrajectoryGroup) -> Iterable[Row]:
        """The rows of a group, that of verl's prompt last."""
        if self.format == "nemo_rl":
            return to_nemo_rl_rows(group, weight_version=self.step)
        return to_verl_rows(group, global_steps=self.step, logprobs=self.logprobs)

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no row trains."""
        return dropped_completions(_members(group))
