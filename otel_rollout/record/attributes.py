"""Attributes of the spans of rollouts and rewards, from the trajectory."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state
from otel_rollout.spans import label, transportable
from otel_rollout.trajectory import Reward, Trajectory
from otel_rollout.wire import Json, dumps, error_text


def identity(
    trajectory: Trajectory, operation: str, outer_group_id: str | None = None
) -> dict[str, Any]:
    """Attributes that name the trajectory of a span.

    The conventions' conversation is what a backend groups messages by: here, the rollout.
    outer_group_id: as `ActiveRollout` has it.
    """
    found: dict[str, Any] = {sc.GEN_AI_OPERATION_NAME: operation}
    found[sc.GEN_AI_AGENT_NAME] = transportable(trajectory.name)
    if operation != sc.OPERATION_INVOKE_WORKFLOW:
        found[sc.GEN_AI_CONVERSATION_ID] = trajectory.id
    found[sc.ROLLOUT_SCHEMA_VERSION] = sc.SCHEMA_VERSION
    found[sc.ROLLOUT_ID] = trajectory.id
    if trajectory.parent_id is not None:
        found[sc.ROLLOUT_PARENT_ID] = trajectory.parent_id
    found |= place(trajectory, outer_group_id)
    found[sc.ROLLOUT_TRAINABLE] = trajectory.trainable
    return found


def place(trajectory: Trajectory, outer_group_id: str | None = None) -> dict[str, Any]:
    """Attributes of the task, the groups and the policy of a trajectory."""
    found: dict[str, Any] = {}
    if trajectory.task_id is not None:
        found[sc.ROLLOUT_TASK_ID] = transportable(trajectory.task_id)
    if trajectory.group_id is not None:
        found[sc.ROLLOUT_GROUP_ID] = transportable(trajectory.group_id)
    if trajectory.group_run is not None:
        found[sc.ROLLOUT_GROUP_RUN] = transportable(trajectory.group_run)
    if outer_group_id is not None:
        found[sc.ROLLOUT_OUTER_GROUP_ID] = transportable(outer_group_id)
    if trajectory.sample_index is not None:
        found[sc.ROLLOUT_SAMPLE_INDEX] = transportable(trajectory.sample_index)
    if trajectory.group_size is not None:
        found[sc.ROLLOUT_GROUP_SIZE] = transportable(trajectory.group_size)
    if trajectory.policy_version is not None:
        found |= label(sc.ROLLOUT_POLICY_VERSION, trajectory.policy_version)
    return found


def end_attributes(trajectory: Trajectory) -> dict[str, Any]:
    """Attributes of how a trajectory went: its ending, rewards, metrics, logs."""
    found: dict[str, Any] = {sc.ROLLOUT_STATUS: trajectory.status}
    if trajectory.termination_reason is not None:
        found[sc.ROLLOUT_TERMINATION_REASON] = trajectory.termination_reason
    if rewards := trajectory.all_rewards.all():
        if (reward := trajectory.reward) is not None:
            found[sc.ROLLOUT_REWARD] = float(reward)
        found[sc.ROLLOUT_REWARDS] = dumps([reward.to_dict() for reward in rewards])
    if trajectory.error is not None:
        found[sc.ROLLOUT_ERROR] = dumps(trajectory.error)
    if trajectory.output is not None:
        found[sc.ROLLOUT_OUTPUT] = dumps(trajectory.output)
    if trajectory.metrics:
        found[sc.ROLLOUT_METRICS] = dumps(dict(trajectory.metrics))
    if trajectory.metadata:
        found[sc.ROLLOUT_METADATA] = dumps(dict(trajectory.metadata))
    if logs := trajectory.logs:
        found[sc.ROLLOUT_LOGS] = dumps(logs)
    if trajectory.main_call is not None:
        found[sc.ROLLOUT_MAIN] = dumps(list(trajectory.main_call))
    if trajectory.appended:
        rows = [[*key, rows] for key, rows in list(trajectory.appended.items())]
        found[sc.ROLLOUT_APPENDED] = dumps(rows)
    return found


def reward_numbers(rewards: Iterable[Reward]) -> dict[str, float]:
    """Attributes that are a named reward of the trajectory each, to search by.

    Names are made safe for backends; of more than `_NUMBERS` the first ones are there.
    """
    found: dict[str, float] = {}
    for reward in rewards:
        if reward.name is None or reward.completion_id is not None or len(found) >= _NUMBERS:
            continue
        key = f"{sc.ROLLOUT_REWARDS}.{_unsafe('_', reward.name)[:_LONGEST]}"
        while key in found:
            key += "_"
        found[key] = float(reward)
    return found


_NUMBERS = 32
_LONGEST = 64
"""Characters of a reward's name in that of its attribute."""
_unsafe = re.compile(r"[^0-9A-Za-z_.-]").sub


def late_numbers(reward: Reward) -> dict[str, float]:
    """Attributes that are a reward as a number, for the span of one that came late."""
    if reward.name is None and reward.completion_id is None:
        own = {sc.ROLLOUT_REWARD: float(reward)}
    else:
        own = reward_numbers([reward])
    return {sc.GEN_AI_EVALUATION_SCORE_VALUE: float(reward), **own}


def message_of(error: BaseException, status: int | None = None) -> str:
    """The text of an exception, with what a client leaves out of a server's error: its codes.

    status: the HTTP status of the reply, if that is one of an error. None: not known.
    """
    body = getattr(error, "body", None)
    reported = body if isinstance(body, Mapping) else None
    return error_text(reported, message=str(error), status=status)


def sentence(error: BaseException, message: str) -> str:
    """How a span says in its status that an exception ended it. message: its text."""
    kind = type(error).__name__
    return f"{kind}: {message}" if message else kind


def missed(
    uncaptured: Mapping[tuple[str, str], int],
    outside: Mapping[str, int],
    programs: Mapping[tuple[str, str], int] | None,
) -> dict[str, str]:
    """Attributes that count the model calls that are in no trajectory; {} if there are none.

    programs: those that were started, which may have made some.
    """
    if not uncaptured and not outside and not programs:
        return {}
    rows: dict[str, list[Json]] = {
        sc.ROLLOUT_UNCAPTURED: [[*which, count] for which, count in uncaptured.items()],
        sc.ROLLOUT_PROGRAMS: [[*which, count] for which, count in (programs or {}).items()],
        sc.ROLLOUT_OUTSIDE: [[place, count] for place, count in outside.items()],
    }
    return {key: dumps(value) for key, value in rows.items() if value}


def evaluation(reward: Reward) -> dict[str, Any]:
    """Attributes of the event that the GenAI conventions have for a reward."""
    attributes = {
        sc.GEN_AI_EVALUATION_NAME: reward.name or sc.UNNAMED_REWARD,
        sc.GEN_AI_EVALUATION_SCORE_VALUE: float(reward),
        sc.GEN_AI_EVALUATION_SCORE_LABEL: reward.label,
        sc.GEN_AI_EVALUATION_EXPLANATION: reward.explanation,
        sc.GEN_AI_RESPONSE_ID: reward.completion_id,
    }
    return present(attributes)


def exception_event(error: BaseException, scrub: Callable[[str], str]) -> dict[str, Any]:
    """Attributes of the event that the conventions have for an exception, scrubbed."""
    show = process_state.content.text
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        sc.EXCEPTION_TYPE: module + kind.__qualname__,
        sc.EXCEPTION_MESSAGE: show(scrub(message_of(error))),
        sc.EXCEPTION_STACKTRACE: show(scrub("".join(traceback.format_exception(error)))),
    }


def present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that are set, as values that a span can have."""
    return {
        # Most values are carried as they are, without asking.
        key: value if type(value) is str and value.isascii() else transportable(value)
        for key, value in attributes.items()
        if value is not None
    }


def text_of(value: object) -> str:
    """Text as it is, JSON as JSON, anything else as Python shows it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    try:
        return dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
