"""Rewards that are set after the rollout has ended: each becomes a span of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.attributes import evaluation, late_numbers, place, present
from otel_rollout.record.span_names import evaluation_name
from otel_rollout.record.state import process_state
from otel_rollout.spans import with_lengths
from otel_rollout.trajectory import Reward, RewardKey, Trajectory
from otel_rollout.wire import Json, dumps


def late_reward(
    tracer: trace.Tracer,
    trajectory: Trajectory,
    parent: trace.SpanContext,
    score: Callable[[float], None],
    outer_group_id: str | None,
) -> Callable[[RewardKey, Reward | None], None]:
    """A function that records rewards set after this rollout's end, numbered as they come.

    score: called with each reward of the rollout as a whole.
    outer_group_id: as `ActiveRollout` has it.
    """
    number = itertools.count()
    rollout_id, about = trajectory.id, place(trajectory, outer_group_id)

    def record(key: RewardKey, reward: Reward | None) -> None:
        record_late_reward(tracer, rollout_id, parent, key, reward, next(number), about)
        if reward is not None and key[:2] == (None, None):
            score(reward)

    return record


def record_late_reward(
    tracer: trace.Tracer,
    rollout_id: str,
    parent: trace.SpanContext | None,
    key: RewardKey,
    reward: Reward | None,
    number: int | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Record a reward that is set after its rollout's end as a span in the same trace.

    parent: the rollout's span. None: not known; the span gets a trace of its own.
    reward: None: the one with this key was taken back.
    number: its place among those that the rollout's own process recorded. None: another process.
    about: attributes of the rollout to find the span by. None: not known.
    """
    name, completion_id, choice_index = key
    data: dict[str, Json] = {"name": name, "completion_id": completion_id, "value": None}
    data |= {"choice_index": choice_index} if choice_index else {}
    content = process_state.content
    if reward is not None and reward.explanation is not None:
        reward.explanation = content.recorded(reward.explanation)
    if reward is not None and reward.label is not None:
        reward.label = content.recorded(reward.label)
    attributes = {
        **(about or {}),
        sc.ROLLOUT_ID: rollout_id,
        sc.GEN_AI_OPERATION_NAME: sc.OPERATION_EVALUATE,
        sc.REWARD: dumps(data if reward is None else reward.to_dict()),
        sc.REWARD_NUMBER: number,
        sc.GEN_AI_EVALUATION_NAME: name or sc.UNNAMED_REWARD,
        **({} if reward is None else late_numbers(reward)),
    }
    span = tracer.start_span(
        evaluation_name(name),
        context=trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent else None,
        attributes=with_lengths(content.shown(present(attributes))),
    )
    if reward is not None:
        span.add_event(sc.GEN_AI_EVALUATION_RESULT, content.shown(evaluation(reward)))
    span.end()
