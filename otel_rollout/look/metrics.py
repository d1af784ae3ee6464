"""Metrics of all rollouts of a process, through OpenTelemetry's metrics API.

They go to the global meter provider; what begins while there is none is not counted. Names and
attributes are in `semconv`. No attribute is an id: there are as many series as there are
agents, statuses and exporters. `gen_ai.client.*` of each model is left to the instrumentors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from opentelemetry import metrics

from otel_rollout import semconv as sc
from otel_rollout.providers import has_meter_provider
from otel_rollout.record import ActiveRollout, ExchangeRecorder, Observer, guarded, process_state
from otel_rollout.trajectory import Trajectory

Labels = Mapping[str, str]
"""The attributes of a measurement."""

_NOT_COUNTED = "a metric was not recorded"
_REWARDS = (-10, -5, -2, -1, -0.5, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10)
_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 7200)
_LAGS = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """The instruments of one meter provider. No method raises."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        self.provider = provider
        meter = provider.get_meter(sc.SCOPE, schema_url=sc.SCHEMA_URL)
        self._ended = meter.create_counter(
            sc.METRIC_ROLLOUTS, "{rollout}", "Rollouts that ended, by status."
        )
        self.running = meter.create_up_down_counter(
            sc.METRIC_ROLLOUTS_RUNNING, "{rollout}", "Rollouts that run now."
        )
        self._seconds = meter.create_histogram(
            sc.METRIC_ROLLOUT_DURATION,
            "s",
            "Seconds from the start of a rollout to its end.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._reward = meter.create_histogram(
            sc.METRIC_REWARD,
            "{reward}",
            "Reward that a rollout ended with, or the first that it got afterwards.",
            explicit_bucket_boundaries_advisory=_REWARDS,
        )
        self.calls = meter.create_counter(
            sc.METRIC_CALLS, "{call}", "Model calls that ended, by status."
        )
        self.calls_running = meter.create_up_down_counter(
            sc.METRIC_CALLS_RUNNING, "{call}", "Model calls in flight."
        )
        self._tokens = meter.create_counter(
            sc.METRIC_TOKENS, "{token}", "Tokens by the servers' own counts: prompts and replies."
        )
        self.lag = meter.create_histogram(
            sc.METRIC_EXPORT_LAG,
            "s",
            "Seconds from the end of a rollout until an exporter had taken its trajectory.",
            explicit_bucket_boundaries_advisory=_LAGS,
        )
        self.waiting = meter.create_up_down_counter(
            sc.METRIC_EXPORT_WAITING, "{trajectory}", "Trajectories that wait for an exporter."
        )
        self._dropped = meter.create_counter(
            sc.METRIC_EXPORT_DROPPED, "{item}", "Trajectories and spans that reached no exporter."
        )

    @guarded(_NOT_COUNTED, level=logging.DEBUG)
    def rollout_ended(
        self, labels: Labels, status: str, reason: str | None, seconds: float
    ) -> None:
        """Count a rollout that has ended. reason: why it did not end by returning."""
        self.running.add(-1, labels)
        ended = {**labels, sc.ROLLOUT_STATUS: status}
        self._seconds.record(seconds, ended)
        if reason is not None:
            ended[sc.ROLLOUT_TERMINATION_REASON] = reason
        self._ended.add(1, ended)

    @guarded(_NOT_COUNTED, level=logging.DEBUG)
    def scored(self, labels: Labels, reward: float) -> None:
        """Count the reward of a rollout."""
        self._reward.record(float(reward), labels)

    @guarded(_NOT_COUNTED, level=logging.DEBUG)
    def tokens(self, labels: Labels, prompt: int, reply: int) -> None:
        """Count the tokens of a call."""
        self._tokens.add(prompt, {**labels, sc.ROLLOUT_TOKEN_TYPE: "input"})
        self._tokens.add(reply, {**labels, sc.ROLLOUT_TOKEN_TYPE: "output"})

    @guarded(_NOT_COUNTED, level=logging.DEBUG)
    def dropped(self, exporter: object, count: int, signal: str = "trajectory") -> None:
        """Count what an exporter did not get. signal: "trajectory" or "span"."""
        if count:
            self._dropped.add(count, {**_of(exporter), sc.EXPORT_SIGNAL: signal})


class Measurements(Observer):
    """Counts rollouts, their calls, and what exporters get of them."""

    def __init__(self) -> None:
        metrics.get_meter_provider()  # makes the one that the environment names the global one

    def rollout_began(self, rollout: ActiveRollout) -> None:
        if rollout.is_part or (found := rollout_metrics()) is None:
            return
        labels = labels_of(rollout)
        rollout.observed[self] = found, labels, Score(found, labels)
        found.running.add(1, labels)

    def rollout_ended(self, rollout: ActiveRollout) -> None:
        if self not in rollout.observed:
            return
        trajectory, (found, labels, _) = rollout.trajectory, rollout.observed[self]
        reason = trajectory.termination_reason or rollout.ended_early
        began = trajectory.start_time_ns
        seconds = (time.time_ns() - began) / 1e9 if began else 0
        found.rollout_ended(labels, trajectory.status, reason, seconds)

    def scored(self, rollout: ActiveRollout, reward: float) -> None:
        if self in rollout.observed:
            rollout.observed[self][2](reward)

    def call_began(self, call: ExchangeRecorder) -> None:
        if (found := call.rollout.observed.get(self)) is not None:
            found[0].calls_running.add(1, found[1])

    def call_ended(self, call: ExchangeRecorder, status: str) -> None:
        if (found := call.rollout.observed.get(self)) is not None:
            metrics, labels, _ = found
            metrics.calls_running.add(-1, labels)
            metrics.calls.add(1, {**labels, sc.EXCHANGE_STATUS: status})

    def waits(self, exporter: object, count: int) -> None:
        if (found := rollout_metrics()) is not None:
            found.waiting.add(count, _of(exporter))

    def exported(self, exporter: object, trajectory: Trajectory) -> None:
        if trajectory.end_time_ns is not None and (found := rollout_metrics()) is not None:
            lag = max(0, time.time_ns() - trajectory.end_time_ns) / 1e9
            found.lag.record(lag, _of(exporter))

    def dropped(self, exporter: object, count: int, signal: str = "trajectory") -> None:
        if (found := rollout_metrics()) is not None:
            found.dropped(exporter, count, signal)


class Score:
    """Counts the reward of one rollout: the first that it gets."""

    def __init__(self, metrics: Metrics | None, labels: Labels) -> None:
        self._metrics = metrics
        self._labels = labels

    def __call__(self, reward: float) -> None:
        """Take a reward of the rollout as a whole."""
        found, self._metrics = self._metrics, None
        if found is not None:
            found.scored(self._labels, reward)


def labels_of(rollout: ActiveRollout) -> Labels:
    """What its measurements are told apart by."""
    return {
        sc.GEN_AI_AGENT_NAME: rollout.options.name or "",
        sc.GEN_AI_OPERATION_NAME: rollout.operation,
    }


def rollout_metrics() -> Metrics | None:
    """The instruments of the global meter provider, as it is now. None: there is none."""
    if not has_meter_provider():
        return None
    provider = metrics.get_meter_provider()
    found = process_state.metrics
    if not isinstance(found, Metrics) or found.provider is not provider:
        found = process_state.metrics = Metrics(provider)
    return found


def _of(exporter: object) -> dict[str, str]:
    return {sc.EXPORTER: type(exporter).__name__}
