"""What users hold: trajectories, their completions, histories, rewards, token sequences. Pure."""

from otel_rollout.trajectory import sentences
from otel_rollout.trajectory.completion import (
    Completion,
    completions_of,
    is_in_background,
    is_unread,
    with_retrieved,
)
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.drift import Drift, TokenFork
from otel_rollout.trajectory.episode import (
    Episode,
    TerminationEvent,
    TerminationReason,
    task_of,
)
from otel_rollout.trajectory.findings import Finding, findings_of
from otel_rollout.trajectory.groups import TrajectoryGroup, advantages_of, group_in_workflow
from otel_rollout.trajectory.histories import in_order, names_previous
from otel_rollout.trajectory.history import History, HistoryItem
from otel_rollout.trajectory.overview import Overview
from otel_rollout.trajectory.reward import AllRewards, Reward, RewardKey, Rewards
from otel_rollout.trajectory.sentences import Kind
from otel_rollout.trajectory.side_calls import (
    Rule,
    SideCalls,
    known_side_call,
    reasons_by,
    without_tools,
)
from otel_rollout.trajectory.source import Contents, Recorded, Source
from otel_rollout.trajectory.steps import Action, Step, call_key, json_of, tie
from otel_rollout.trajectory.tokens import (
    Dropped,
    NotExact,
    TokenSequence,
    TokenSequences,
    exact_ids,
    token_sequences,
    untrained_sequences,
)
from otel_rollout.trajectory.trajectory import Trajectory

__all__ = [
    "Action",
    "AllRewards",
    "Completion",
    "Contents",
    "Conversations",
    "Drift",
    "Dropped",
    "Episode",
    "Finding",
    "History",
    "HistoryItem",
    "Kind",
    "NotExact",
    "Overview",
    "Recorded",
    "Reward",
    "RewardKey",
    "Rewards",
    "Rule",
    "SideCalls",
    "Source",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "TokenFork",
    "TokenSequence",
    "TokenSequences",
    "Trajectory",
    "TrajectoryGroup",
    "advantages_of",
    "call_key",
    "completions_of",
    "exact_ids",
    "findings_of",
    "group_in_workflow",
    "in_order",
    "is_in_background",
    "is_unread",
    "json_of",
    "known_side_call",
    "names_previous",
    "reasons_by",
    "sentences",
    "task_of",
    "tie",
    "token_sequences",
    "untrained_sequences",
    "with_retrieved",
    "without_tools",
]
