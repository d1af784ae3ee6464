"""Metrics of rollouts, read by the real SDK's reader: what ran, how it ended, what it cost."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider

import otel_rollout
from otel_rollout import (
    Trajectory,
    Workflow,
    get_current_trajectory,
    record_reward,
    rollout,
    semconv,
)
from otel_rollout.testing import Raw
from otel_rollout.workflows import run_workflows
from tests.kit.metering import Meter, prometheus_names
from tests.kit.recording import Clients, Recording

ASK: Any = [{"role": "user", "content": "hi"}]
NAMES = {value for name, value in vars(semconv).items() if name.startswith("METRIC_")}
LABELS = {
    semconv.GEN_AI_AGENT_NAME,
    semconv.GEN_AI_OPERATION_NAME,
    semconv.ROLLOUT_TOKEN_TYPE,
    semconv.ROLLOUT_STATUS,
    semconv.ROLLOUT_TERMINATION_REASON,
    semconv.EXCHANGE_STATUS,
    semconv.EXPORTER,
    semconv.EXPORT_SIGNAL,
}
"""Every attribute that a metric of ours may have: none of them is an id."""


@pytest.fixture
def meter() -> Iterator[Meter]:
    """A meter provider for this test alone."""
    made = Meter()
    yield made
    made.close()


def solve(client: openai.OpenAI, reward: float | None = None, **options: Any) -> Trajectory:
    """A rollout of one call."""
    with rollout("solver", **options) as trajectory:
        client.chat.completions.create(model="m", messages=ASK)
        if reward is not None:
            record_reward(reward)
    return trajectory


def test_rollouts_are_counted_by_status(
    meter: Meter, recording: Recording, clients: Clients
) -> None:
    """What ended well and what failed, and why; nothing runs any more."""
    client = clients.sync(clients.serve())
    for _ in range(3):
        solve(client)
    for error in (LookupError, TimeoutError):
        with contextlib.suppress(error), rollout("solver"):
            raise error
    assert meter.sums(semconv.METRIC_ROLLOUTS, semconv.ROLLOUT_STATUS) == {
        "complete": 3,
        "error": 2,
    }
    reasons = meter.sums(semconv.METRIC_ROLLOUTS, semconv.ROLLOUT_TERMINATION_REASON)
    assert reasons == {None: 3, "error": 1, "timeout": 1}
    assert meter.sums(semconv.METRIC_ROLLOUTS_RUNNING, semconv.GEN_AI_AGENT_NAME) == {"solver": 0}
    (_, duration), *_ = meter.points()[semconv.METRIC_ROLLOUT_DURATION]
    assert (duration.count, duration.sum > 0) == (3, True)


def test_what_runs_is_seen_while_it_runs(
    meter: Meter, recording: Recording, clients: Clients
) -> None:
    """Rollouts by their agents, and calls in flight."""
    client = clients.sync(clients.serve())
    with rollout("solver"), rollout("judge"):
        running = meter.sums(semconv.METRIC_ROLLOUTS_RUNNING, semconv.GEN_AI_AGENT_NAME)
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        next(iter(stream))
        calls = meter.sums(semconv.METRIC_CALLS_RUNNING, semconv.GEN_AI_AGENT_NAME)
        stream.close()
    assert running == {"solver": 1, "judge": 1}
    assert calls == {"judge": 1}
    assert meter.sums(semconv.METRIC_CALLS_RUNNING, semconv.GEN_AI_AGENT_NAME) == {"judge": 0}


def test_calls_and_tokens_are_counted(meter: Meter, recording: Recording, clients: Clients) -> None:
    """Calls by how they ended, tokens by the server's own count."""
    client = clients.sync(clients.serve())
    trajectories = [solve(client), solve(client)]
    with contextlib.suppress(openai.APIError):
        solve(clients.sync(clients.serve(Raw(500, b"{}"))))
    assert meter.sums(semconv.METRIC_CALLS, semconv.EXCHANGE_STATUS) == {"complete": 2, "error": 1}
    usage = [completion.usage for t in trajectories for completion in t.completions]
    assert meter.sums(semconv.METRIC_TOKENS, semconv.ROLLOUT_TOKEN_TYPE) == {
        "input": sum(each["prompt_tokens"] for each in usage if each),
        "output": sum(each["completion_tokens"] for each in usage if each),
    }


def test_a_reward_is_counted_once(meter: Meter, recording: Recording, clients: Clients) -> None:
    """The one that a rollout ends with, else the first that comes later; none is not zero."""
    client = clients.sync(clients.serve())
    solve(client, 0.5).reward = 0.75
    late = solve(client)
    late.rewards["style"] = 9.0
    late.reward = 1.0
    late.reward = 2.0
    solve(client)
    ((attributes, histogram),) = meter.points()[semconv.METRIC_REWARD]
    assert (histogram.count, histogram.sum) == (2, 1.5)
    assert attributes[semconv.GEN_AI_AGENT_NAME] == "solver"
    assert histogram.explicit_bounds[5:7] == (0, 0.1)


def test_exports_tell_their_lag(meter: Meter, recording: Recording, clients: Clients) -> None:
    """Each trajectory counts for each exporter; what is dropped is counted, and waits no more."""

    class Slow:
        blocking = True

        def export(self, trajectories: object) -> None:
            raise OSError("full")

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True

        def shutdown(self) -> None:
            pass

    otel_rollout.configure(exporters=[Slow()])
    solve(clients.sync(clients.serve()))
    assert recording.provider.force_flush()
    lags = {a[semconv.EXPORTER]: p.count for a, p in meter.points()[semconv.METRIC_EXPORT_LAG]}
    assert lags == {"InMemoryTrajectoryExporter": 1}
    assert meter.sums(semconv.METRIC_EXPORT_DROPPED, semconv.EXPORTER) == {"Slow": 1}
    assert meter.sums(semconv.METRIC_EXPORT_DROPPED, semconv.EXPORT_SIGNAL) == {"trajectory": 1}
    assert meter.sums(semconv.METRIC_EXPORT_WAITING, semconv.EXPORTER) == {"Slow": 0}


async def test_no_attribute_is_an_id(meter: Meter, recording: Recording, clients: Clients) -> None:
    """Many tasks, groups and samples give no more series than one: the attributes are known."""
    client = clients.asynchronous(clients.serve())

    class Solve(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            async with rollout("solver"):
                await client.chat.completions.create(model="m", messages=ASK)
            get_current_trajectory().reward = 1.0

    await run_workflows(Solve, [{"id": "a"}], n_samples=1)
    before = {name: len(points) for name, points in meter.points().items()}
    await run_workflows(Solve, [{"id": str(n)} for n in range(5)], n_samples=2)
    after = meter.points()
    assert {name: len(points) for name, points in after.items()} == before
    assert {key for points in after.values() for a, _ in points for key in a} <= LABELS
    assert set(after) <= NAMES


DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def everything(clients: Clients) -> None:
    """What makes every metric have a point."""

    class Full:
        blocking = True

        def export(self, trajectories: object) -> None:
            raise OSError("full")

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True

        def shutdown(self) -> None:
            pass

    otel_rollout.configure(exporters=[Full()])
    solve(clients.sync(clients.serve()), 1.0)
    with contextlib.suppress(TimeoutError), rollout("late"):
        raise TimeoutError


def test_the_dashboard_asks_for_what_is_measured(
    meter: Meter, recording: Recording, clients: Clients
) -> None:
    """Each series and each label of its queries exists, and no metric is left out."""
    everything(clients)
    assert recording.provider.force_flush()
    found = meter.metrics()
    assert {metric.name for metric in found} == NAMES
    names = {name: metric.name for metric in found for name in prometheus_names(metric)}
    labels = {label.replace(".", "_") for label in LABELS} | {"le"}
    asked = {
        name for query in QUERIES for name in re.findall(r"\b((?:rollout|gen_ai)_\w+)[{\[)]", query)
    }
    series = asked - labels
    assert series <= names.keys()
    assert {names[name] for name in series} == NAMES
    grouped = {each for query in QUERIES for each in re.findall(r"sum by \(([^)]*)\)", query)}
    assert {label.strip() for each in grouped for label in each.split(",")} <= labels
    filters = {each for query in QUERIES for each in re.findall(r"(\w+)(?:=~|!=|=)\"", query)}
    assert filters <= labels


def test_a_meter_that_fails_costs_the_user_nothing(
    meter: Meter,
    recording: Recording,
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An instrument that raises is in the debug log, and nowhere else."""
    caplog.set_level(logging.DEBUG, "otel_rollout")
    found = otel_rollout.look.rollout_metrics()

    def fails(*_: object) -> None:
        raise RuntimeError("no")

    for instrument in ("running", "_ended", "calls", "calls_running", "_tokens", "lag"):
        monkeypatch.setattr(getattr(found, instrument), "add", fails, raising=False)
        monkeypatch.setattr(getattr(found, instrument), "record", fails, raising=False)
    trajectory = solve(clients.sync(clients.serve()), 1.0)
    assert trajectory.warnings == []
    assert len(trajectory.completions) == 1
    assert any("a metric was not recorded" in r.getMessage() for r in caplog.records)


def test_without_a_meter_provider_nothing_is_set_up(recording: Recording, clients: Clients) -> None:
    """The global meter provider stays unset."""
    solve(clients.sync(clients.serve()), 1.0)
    assert not isinstance(metrics.get_meter_provider(), MeterProvider)


def test_what_begins_without_a_meter_provider_is_not_counted(
    recording: Recording, clients: Clients
) -> None:
    """A provider that is set while a rollout runs counts neither its end nor its calls."""
    client = clients.sync(clients.serve())
    with rollout("early"):
        meter = Meter()
        client.chat.completions.create(model="m", messages=ASK)
    solve(client)
    assert meter.sums(semconv.METRIC_ROLLOUTS_RUNNING, semconv.GEN_AI_AGENT_NAME) == {"solver": 0}
    assert meter.sums(semconv.METRIC_CALLS, semconv.GEN_AI_AGENT_NAME) == {"solver": 1}
    meter.close()
