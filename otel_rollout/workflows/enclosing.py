"""A workflow's run on the trace: the rollouts inside it, and trajectories built by hand."""

from __future__ import annotations

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.look import Score, rollout_metrics
from otel_rollout.record import (
    ActiveRollout,
    end_attributes,
    identity,
    late_reward,
    present,
    process_state,
    reward_numbers,
)
from otel_rollout.spans import with_lengths
from otel_rollout.trajectory import Trajectory, group_in_workflow
from otel_rollout.wire import Json, dumps


class WorkflowRun:
    """One run of a workflow; rollouts inside it report to it when they begin.

    The run is itself a rollout: it has the calls that are in no rollout inside it, unless a
    trajectory that an agent built by hand claims them.
    """

    def __init__(self) -> None:
        self.active: ActiveRollout | None = None
        """The rollout of the run itself. None: it is not recorded, or has not begun."""
        self.trajectories: list[Trajectory] = []
        """Trajectories of the rollouts inside it, in order of their start."""
        self.built: dict[str, Trajectory] = {}
        """Trajectories that agents built by hand, by id."""

    def began(self, trajectory: Trajectory) -> None:
        """Add the trajectory of a rollout that has begun inside the run."""
        self.trajectories.append(trajectory)

    def place(self, trajectory: Trajectory) -> None:
        """Give a trajectory the task of the run, and the group of its name."""
        if self.active is None:
            return
        own = self.active.trajectory
        if trajectory.task_id is None:
            trajectory.task_id = own.task_id
        if trajectory.group_id is None and own.group_id is not None:
            trajectory.group_id = group_in_workflow(own.group_id, trajectory.name)
            trajectory.group_run = own.group_run
            if own.sample_index is not None:
                trajectory.sample_index = own.sample_index

    def adopt(self, trajectory: Trajectory) -> None:
        """Add a trajectory that was built by hand to the run."""
        if self.active is None or trajectory.id in self.built:
            return
        own = self.active.trajectory
        trajectory.reopen()
        trajectory.parent_id, trajectory.trace_id = own.id, own.trace_id
        trajectory.policy_version = own.policy_version
        self.place(trajectory)
        trajectory.trainable = trajectory.trainable and own.trainable
        self.built[trajectory.id] = trajectory

    def record(self, episode: Json) -> None:
        """Record the episode and the trajectories built by hand; call it before the run ends."""
        if self.active is None:
            return
        if episode is not None:
            self.active.further[sc.ROLLOUT_EPISODE] = dumps(process_state.content.value(episode))
        for trajectory in self.built.values():
            self.active.claims.append((trajectory, _record_built(self.active, trajectory)))


def _record_built(active: ActiveRollout, trajectory: Trajectory) -> frozenset[str]:
    """Record a trajectory as a span with its steps; returns the span ids of its calls."""
    calls = [step.completion for step in trajectory.steps if step.completion is not None]
    claims = frozenset(call.span_id for call in calls)
    content = process_state.content
    if content.redact is not None:
        trajectory.rewrite(content.value)
    outer = active.group_of_inner
    attributes = {
        **identity(trajectory, sc.OPERATION_INVOKE_AGENT, outer),
        sc.ROLLOUT_STEPS: dumps(content.value([step.to_dict() for step in trajectory.steps])),
        sc.ROLLOUT_CLAIMS: dumps(sorted(claims)),
        **end_attributes(trajectory),
    }
    span = active.tracer.start_span(
        active.inner.nested(f"{sc.OPERATION_INVOKE_AGENT} {trajectory.name}", trajectory.task_id),
        context=trace.set_span_in_context(active.span, otel_context.Context()),
        attributes={
            **reward_numbers(trajectory.all_rewards.all()),
            **with_lengths(content.shown(present(attributes))),
        },
        start_time=min((call.start_time_ns for call in calls), default=None),
    )
    span_context = span.get_span_context()
    trajectory.span_id = f"{span_context.span_id:016x}"
    trajectory.start_time_ns = getattr(span, "start_time", None) or 0
    span.end()
    trajectory.end_time_ns = getattr(span, "end_time", None)
    score = _count(trajectory)
    trajectory.seal(late_reward(active.tracer, trajectory, span_context, score, outer))
    return claims


def _count(trajectory: Trajectory) -> Score:
    """Count a trajectory that was built by hand in the metrics; what counts its later reward."""
    labels = {
        sc.GEN_AI_AGENT_NAME: trajectory.name,
        sc.GEN_AI_OPERATION_NAME: sc.OPERATION_INVOKE_AGENT,
    }
    seconds = max(0.0, ((trajectory.end_time_ns or 0) - trajectory.start_time_ns) / 1e9)
    if (found := rollout_metrics()) is not None:
        found.running.add(1, labels)
        found.rollout_ended(labels, trajectory.status, trajectory.termination_reason, seconds)
    score = Score(found, labels)
    if trajectory.reward is not None:
        score(trajectory.reward)
    return score
