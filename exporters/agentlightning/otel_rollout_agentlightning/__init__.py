"""Trajectories for Agent Lightning: a triplet for each call, with the ids that were sampled.

Each completion that a token sequence trains is one triplet: the ids that it was asked with, those
that it said, and what it was worth. They come conversation by conversation, so that a trainer that
puts triplets together which go on from each other (`trace_aggregator.level: trajectory`) finds the
same sequences as we do. The last one has the reward of the trajectory: Agent Lightning takes a
rollout's reward from the last triplet that has one.

to_triplets         the live `agentlightning.Triplet`s of a trajectory
to_triplet_rows     the same as JSON, without Agent Lightning
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from otel_rollout import Completion, ExportError, Trajectory, TrajectoryGroup
from otel_rollout.export import Dropped, Json, JsonRows, copy_json, dropped_completions

if TYPE_CHECKING:
    from agentlightning import Triplet

__all__ = ["AgentlightningRows", "to_triplet_rows", "to_triplets"]


def to_triplets(trajectory: Trajectory) -> list[Triplet]:
    """The triplets of a trajectory; their fields are those of `to_triplet_rows`."""
    from agentlightning import Triplet

    return [Triplet(**row) for row in to_triplet_rows(trajectory)]


def to_triplet_rows(trajectory: Trajectory) -> list[dict[str, Json]]:
    """A row for each completion that trains, conversation by conversation.

    prompt: `token_ids`, `raw_content` (the messages), `image_urls` that they name. response:
    `token_ids`, `raw_content` (the message), `logprobs` (one for each id, None where unknown) if
    the server sent some. reward: the completion's own, on the last row the trajectory's; None
    where it is not known. metadata: `response_id`, `agent_name` and what else was asked and said.

    [] for a rollout that failed without a reward, was cancelled, or is not to be trained on.
    ExportError if nothing of any other trains, with the reasons.
    """
    rows: list[dict[str, Json]] = []
    sequences = trajectory.token_sequences()
    for sequence in sequences:
        spans = zip(sequence.completions, sequence.spans, sequence.trains, strict=True)
        for completion, (_, start, end), trains in spans:
            if trains:
                ids, logprobs = sequence.token_ids[start:end], sequence.logprobs[start:end]
                row = _row(trajectory, completion, sequence.token_ids[:start], ids, logprobs)
                rows.append(row)
    if rows:
        if trajectory.reward is not None:
            rows[-1]["reward"] = float(trajectory.reward)
    elif any(completion.trainable for completion in trajectory.completions) and (
        trajectory.status == "complete" or trajectory.reward is not None
    ):
        reasons = dict.fromkeys(map(str, sequences.dropped))
        raise ExportError(
            f"trajectory {trajectory.id} ({trajectory.name!r}) has nothing that trains: "
            f"{'; '.join(reasons)}"
        )
    return rows


def _row(
    trajectory: Trajectory,
    completion: Completion,
    prompt: list[int],
    ids: list[int],
    logprobs: list[float],
) -> dict[str, Json]:
    messages = completion.request_messages
    if media := [kind for kind in completion.media if kind != "image_url"]:
        raise ExportError(
            f"completion {completion.id!r}: its conversation holds {', '.join(media)}, and Agent "
            f"Lightning takes images only beside token ids; leave the trajectory out"
        )
    response: dict[str, Json] = {"token_ids": ids, "raw_content": [copy_json(completion.message)]}
    if not all(map(math.isnan, logprobs)):
        response["logprobs"] = [
            {"logprob": None if math.isnan(value) else value} for value in logprobs
        ]
    request = {"model": completion.request_model, **copy_json(completion.sampling)}
    if completion.tools is not None:
        request["tools"] = copy_json(completion.tools)
    said = {
        "id": completion.id,
        "model": completion.model,
        "finish_reason": completion.finish_reason,
        "usage": copy_json(completion.usage),
    }
    return {
        "prompt": {
            "token_ids": prompt,
            "raw_content": messages,
            "image_urls": list(_image_urls(messages)),
        },
        "response": response,
        "reward": None if completion.reward is None else float(completion.reward),
        "metadata": {
            "response_id": completion.id,
            "choice_index": completion.choice_index,
            "agent_name": trajectory.name,
            "step_reward": None if completion.reward is None else float(completion.reward),
            "policy_version": completion.policy_version,
            "truncated": completion.truncated,
            "request": request,
            "response": said,
        },
    }


def _image_urls(messages: list[Json]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            image: Any = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else image
            if isinstance(url, str):
                yield url


class AgentlightningRows(JsonRows):
    """The exporter `agentlightning`: a row for each rollout that trains, with its triplets.

    Its fields are those of `agentlightning.RolloutLegacy`, which the trainer's daemon reads. It has
    no options.
    """

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no triplet trains."""
        return dropped_completions(group)

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """`rollout_id`, `final_reward` (None: not scored), `triplets`, `logs`, `metadata`."""
        for trajectory in group:
            triplets = to_triplet_rows(trajectory)
            if triplets:
                yield {
                    "rollout_id": trajectory.id,
                    "final_reward": None if trajectory.reward is None else float(trajectory.reward),
                    "triplets": triplets,
                    "logs": trajectory.logs,
                    "metadata": {
                        **copy_json(dict(trajectory.metadata)),
                        "name": trajectory.name,
                        "task_id": trajectory.task_id,
                        "group_id": trajectory.group_id,
                        "sample_index": trajectory.sample_index,
                        "metrics": dict(trajectory.metrics),
                        "rewards": {k: float(v) for k, v in trajectory.rewards.items()},
                    },
                }
