"""Train a language-model agent on what it really did, without rewriting it.

    import otel_rollout
    from otel_rollout import InMemoryTrajectoryExporter, gather_trajectory, rollout

    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(service_name="math-agent", exporters=[exporter])   # once, at start-up

    @rollout                                     # the agent stays as it is
    async def agent(client, task): ...

    answer = await agent(client, task)                                        # in production
    trajectory = await gather_trajectory(agent(client, task))                 # in training

The run is an OpenTelemetry trace, and a `Trajectory`: its histories, rewards and token ids.
"""

from otel_rollout.completion import Completion, Reward
from otel_rollout.configure import TruncationWarning, configure, shutdown
from otel_rollout.episodes import (
    Episode,
    TerminationEvent,
    TerminationReason,
    reconstruct_episodes,
)
from otel_rollout.errors import (
    ConfigurationError,
    ExportError,
    NoActiveRolloutError,
    NotARolloutError,
    NotRecordedError,
    RolloutError,
    SpanFormatError,
    TrajectorySealedError,
    UnknownCompletionError,
)
from otel_rollout.export import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    TrajectoryExporter,
)
from otel_rollout.gather import TooManyExceptionsError, gather_group, gather_trajectories
from otel_rollout.groups import TrajectoryGroup
from otel_rollout.histories import History, HistoryItem
from otel_rollout.processes import continue_rollout, propagate
from otel_rollout.processor import TrajectorySpanProcessor
from otel_rollout.reconstruct import reconstruct
from otel_rollout.rollout import (
    gather_trajectory,
    get_current_trajectory,
    get_history,
    no_capture,
    record_reward,
    request_token_ids,
    rollout,
)
from otel_rollout.rows import RowExporter, to_token_rows
from otel_rollout.steps import Action, Step
from otel_rollout.tokens import TokenSequence
from otel_rollout.tool import tool
from otel_rollout.trajectory import Trajectory
from otel_rollout.workflow import Workflow, run_workflows

__all__ = [
    "Action",
    "Completion",
    "ConfigurationError",
    "Episode",
    "ExportError",
    "History",
    "HistoryItem",
    "InMemoryTrajectoryExporter",
    "JsonlTrajectoryExporter",
    "NoActiveRolloutError",
    "NotARolloutError",
    "NotRecordedError",
    "Reward",
    "RolloutError",
    "RowExporter",
    "SpanFormatError",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "TokenSequence",
    "TooManyExceptionsError",
    "Trajectory",
    "TrajectoryExporter",
    "TrajectoryGroup",
    "TrajectorySealedError",
    "TrajectorySpanProcessor",
    "TruncationWarning",
    "UnknownCompletionError",
    "Workflow",
    "configure",
    "continue_rollout",
    "gather_group",
    "gather_trajectories",
    "gather_trajectory",
    "get_current_trajectory",
    "get_history",
    "no_capture",
    "propagate",
    "reconstruct",
    "reconstruct_episodes",
    "record_reward",
    "request_token_ids",
    "rollout",
    "run_workflows",
    "shutdown",
    "to_token_rows",
    "tool",
]
