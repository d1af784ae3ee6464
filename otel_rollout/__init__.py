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

from typing import TYPE_CHECKING

from otel_rollout import moved
from otel_rollout.first_use import load_on_first_use

if TYPE_CHECKING:
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
        EmptyRowsWarning,
        InMemoryTrajectoryExporter,
        JsonlTrajectoryExporter,
        RowExporter,
        TrajectoryExporter,
        overviews,
        to_token_rows,
    )
    from otel_rollout.rebuild import reconstruct, reconstruct_episodes
    from otel_rollout.record import (
        TooManyExceptionsError,
        TrajectorySpanProcessor,
        continue_rollout,
        gather_group,
        gather_trajectories,
        gather_trajectory,
        get_current_trajectory,
        get_history,
        no_capture,
        propagate,
        record_reward,
        request_token_ids,
        rollout,
        tool,
    )
    from otel_rollout.trajectory import (
        Action,
        Completion,
        Episode,
        History,
        HistoryItem,
        Reward,
        SideCalls,
        Step,
        TerminationEvent,
        TerminationReason,
        TokenSequence,
        Trajectory,
        TrajectoryGroup,
        known_side_call,
        without_tools,
    )
    from otel_rollout.wiring import TruncationWarning, configure, shutdown
    from otel_rollout.workflows import Workflow, run_workflows

__all__ = [
    "Action",
    "Completion",
    "ConfigurationError",
    "EmptyRowsWarning",
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
    "SideCalls",
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
    "known_side_call",
    "no_capture",
    "overviews",
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
    "without_tools",
]

_ROOMS = {
    "errors": (
        "ConfigurationError",
        "ExportError",
        "NoActiveRolloutError",
        "NotARolloutError",
        "NotRecordedError",
        "RolloutError",
        "SpanFormatError",
        "TrajectorySealedError",
        "UnknownCompletionError",
    ),
    "trajectory": (
        "Action",
        "Completion",
        "Episode",
        "History",
        "HistoryItem",
        "Reward",
        "SideCalls",
        "Step",
        "TerminationEvent",
        "TerminationReason",
        "TokenSequence",
        "Trajectory",
        "TrajectoryGroup",
        "known_side_call",
        "without_tools",
    ),
    "rebuild": ("reconstruct", "reconstruct_episodes"),
    "export": (
        "EmptyRowsWarning",
        "InMemoryTrajectoryExporter",
        "JsonlTrajectoryExporter",
        "RowExporter",
        "TrajectoryExporter",
        "overviews",
        "to_token_rows",
    ),
    "record": (
        "TooManyExceptionsError",
        "TrajectorySpanProcessor",
        "continue_rollout",
        "gather_group",
        "gather_trajectories",
        "gather_trajectory",
        "get_current_trajectory",
        "get_history",
        "no_capture",
        "propagate",
        "record_reward",
        "request_token_ids",
        "rollout",
        "tool",
    ),
    "workflows": ("Workflow", "run_workflows"),
    "wiring": ("TruncationWarning", "configure", "shutdown"),
}
"""Where each public name is: its room is imported when the name is first used."""

moved.install()

if not TYPE_CHECKING:  # a type checker would take every name for Any
    __getattr__ = load_on_first_use(__name__, _ROOMS)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
