"""What users hold: trajectories, their completions, histories, rewards, token sequences. Pure."""

from otel_rollout.trajectory.completion import Completion, completions_of, with_retrieved
from otel_rollout.trajectory.episode import (
    Episode,
    TerminationEvent,
    TerminationReason,
    task_of,
)
from otel_rollout.trajectory.groups import TrajectoryGroup, group_in_workflow
from otel_rollout.trajectory.histories import build_histories, in_order, link
from otel_rollout.trajectory.history import History, HistoryItem
from otel_rollout.trajectory.reward import Reward, RewardKey
from otel_rollout.trajectory.steps import Action, Step, json_of, tie
from otel_rollout.trajectory.tokens import Dropped, TokenSequence, TokenSequences, token_sequences
from otel_rollout.trajectory.trajectory import Contents, Trajectory

__all__ = [
    "Action",
    "Completion",
    "Contents",
    "Dropped",
    "Episode",
    "History",
    "HistoryItem",
    "Reward",
    "RewardKey",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "TokenSequence",
    "TokenSequences",
    "Trajectory",
    "TrajectoryGroup",
    "build_histories",
    "completions_of",
    "group_in_workflow",
    "in_order",
    "json_of",
    "link",
    "task_of",
    "tie",
    "token_sequences",
    "with_retrieved",
]
