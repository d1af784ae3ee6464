"""Functions for inside a rollout: its trajectory, its rewards, and how its calls are made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import Token
from typing import Literal

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.errors import NoActiveRolloutError
from otel_rollout.record.attributes import place
from otel_rollout.record.context import CAPTURE_OFF, TOKEN_FIELDS, attached, detach
from otel_rollout.record.current import rollout_of
from otel_rollout.record.late_rewards import record_late_reward
from otel_rollout.record.other_spans import is_model_call
from otel_rollout.record.processes.carrier import without_rollout
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.trajectory import History, Reward, Trajectory
from otel_rollout.wire import Json


def get_current_trajectory() -> Trajectory:
    """The live trajectory of the innermost rollout that is running here.

    NoActiveRolloutError outside of one.
    """
    active = rollout_of(None)
    if active is None:
        raise NoActiveRolloutError(
            "there is no rollout here: decorate the function that runs the agent with @rollout, or "
            'open one with `with rollout("name") as trajectory:`. A thread that was not started '
            "through threading or a pool needs the context of the rollout "
            "(opentelemetry.context.attach)"
        )
    return active.trajectory


def get_history(completion_id: str, choice: int = 0) -> History:
    """The conversation of the current trajectory that ends in this completion.

    completion_id: the completion's `id`. choice: its `choice_index`.

    NoActiveRolloutError outside a rollout, UnknownCompletionError for an id that it does not have.
    """
    return get_current_trajectory().get_history(completion_id, choice)


def record_reward(
    value: float,
    *,
    name: str | None = None,
    completion_id: str | None = None,
    choice: int = 0,
    explanation: str | None = None,
    weight: float | None = None,
    label: str | None = None,
    trajectory: Trajectory | str | None = None,
    group_id: str | None = None,
) -> Reward:
    """Record a reward of a trajectory, or of one completion of it.

    value: the reward, a finite number.
    name: makes it one of the trajectory's named `rewards`. None (default): it is the reward itself.
    completion_id: the completion that it is for (a step reward). None (default): the trajectory.
    choice: which of several choices with this id, by its `choice_index`.
    explanation: text for people who look at it. None (default): none.
    weight: of a named reward, its weight in `Trajectory.reward` while no explicit reward is set.
        None (default): not counted.
    label: the score in a word, such as "pass"; backends group by it. None (default): none.
    trajectory: a trajectory, or its id: a judge's process need not have the trajectory. Its
        rollout may have ended, here or in another process: then the reward is a span of its own,
        from which `reconstruct` knows it. None (default): the current trajectory.
    group_id: the group of a trajectory that is given, or of the one that it ran inside: a load
        balancer that gives each receiver whole groups needs it. None (default): not known.

    ValueError if `value` is not a finite number, NoActiveRolloutError if there is no trajectory,
    UnknownCompletionError for a completion that it does not have.
    """
    reward = Reward(
        value,
        name=name,
        completion_id=completion_id,
        choice_index=choice,
        explanation=explanation,
        weight=weight,
        label=label,
    )
    if isinstance(trajectory, str):
        about = {} if group_id is None else {sc.ROLLOUT_GROUP_ID: group_id}
        record_late_reward(rollout_tracer(), trajectory, None, reward.key, reward, about=about)
        return reward
    trajectory = get_current_trajectory() if trajectory is None else trajectory
    trajectory.add_reward(reward)
    if trajectory.is_copy:
        record_late_reward(
            rollout_tracer(),
            trajectory.id,
            _span_context(trajectory),
            reward.key,
            reward,
            about=place(trajectory, group_id if trajectory.group_id is None else None),
        )
    return reward


def _span_context(trajectory: Trajectory) -> trace.SpanContext | None:
    """Its rollout span, so that a late reward is on the same trace. None: not known."""
    try:
        trace_id, span_id = int(trajectory.trace_id, 16), int(trajectory.span_id, 16)
    except ValueError:
        return None
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


@contextmanager
def no_capture() -> Iterator[None]:
    """Leave the model calls inside out of the trajectory, such as those of a judge.

    They are on the trace like any other call. A rollout opened inside records its own calls.
    """
    context = without_rollout(otel_context.get_current())
    with attached(otel_context.set_value(CAPTURE_OFF, True, context)):
        yield


def request_token_ids(enabled: bool = True, **fields: Json) -> AbstractContextManager[None]:
    """Ask the server for token ids and log-probabilities with the calls of rollouts made inside.

    It adds fields that vLLM and servers like it take (`return_token_ids`, `logprobs`) to requests
    of `/chat/completions` and `/completions`, and asks streams for their count of tokens
    (`stream_options.include_usage`), without which a loss of the server is not seen. A
    field that the call itself sets stays. Calls outside rollouts and under `no_capture()` stay as
    they are. The agent sees whatever the server sends, but for the chunk with the count, if it did
    not ask for that itself. Servers that do not know the fields may refuse the request.
    `configure(request_token_ids=True)` does it everywhere.

    enabled: bool. True (default): the fields are added; False: the calls inside stay as they are,
        also where `configure` or an outer block asks for token ids.
    fields: further request fields, JSON values, such as `return_meta_info=True`.
    """
    return _Asking(dict(fields) if enabled else False)


class _Asking(ContextDecorator):
    """What `request_token_ids` returns; a warning where it is dropped and no call was in it."""

    def __init__(self, fields: dict[str, Json] | Literal[False]) -> None:
        self._fields = fields
        self._is_used = False
        self._tokens = list[Token[otel_context.Context]]()

    def _recreate_cm(self) -> _Asking:
        self._is_used = True
        return _Asking(self._fields)

    def __enter__(self) -> None:
        self._is_used = True
        context = otel_context.set_value(TOKEN_FIELDS, self._fields)
        self._tokens.append(otel_context.attach(context))

    def __exit__(self, *error: object) -> None:
        detach(self._tokens.pop())

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "request_token_ids() was called without `with`, and asks for nothing: write `with "
                "otel_rollout.request_token_ids():` around the calls, or "
                "configure(request_token_ids=True)",
                RuntimeWarning,
                stacklevel=2,
            )


def is_inside_llm_span() -> bool:
    """True in a rollout, inside the span of a model call that another library makes."""
    span = trace.get_current_span()
    scope = getattr(span, "instrumentation_scope", None)
    if scope is None or scope.name == sc.SCOPE or not span.is_recording():
        return False
    attributes = getattr(span, "attributes", None) or {}
    return is_model_call(attributes) and rollout_of(None) is not None
