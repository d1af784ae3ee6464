"""Rollouts of every kind in the real Phoenix and the real MLflow, and back."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    reconstruct,
    rollout,
)
from otel_rollout.command.cli import main
from otel_rollout.otlp import read, read_mlflow, read_phoenix
from otel_rollout.spans import SpanRecord
from otel_rollout.testing import ModelServer, Reply
from tests.backends.programs import eventually
from tests.kit.comparing import assert_equal_to_microseconds
from tests.kit.scenarios import SCENARIOS, play

if TYPE_CHECKING:
    from tests.backends.programs import Page

pytestmark = pytest.mark.phoenix
LOST = "its rollout.metadata was cut, or did not come"
LISTEN = "0A"


def play_to(url: str, monkeypatch: pytest.MonkeyPatch, project: str) -> list[Trajectory]:
    """The trajectories of every kind of rollout, whose spans went to this backend."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # 10 are short beside other programs
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"openinference.project.name={project}")
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(service_name=project, exporters=[memory])
    play()
    assert otel_rollout.shutdown()
    live = sorted(memory.get_finished_trajectories(), key=lambda t: (t.start_time_ns, t.id))
    assert len(live) > len(SCENARIOS)
    return live


def has_all(spans: list[SpanRecord], live: list[Trajectory]) -> bool:
    return {t.span_id for t in live} <= {span.span_id for span in spans}


def test_every_kind_of_rollout_comes_back_from_phoenix(
    phoenix: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal but for times below a microsecond; what it takes apart is said."""
    live = play_to(phoenix.url, monkeypatch, "every kind")
    spans = eventually(
        lambda: list(read_phoenix(phoenix.url, "every kind", limit=50)),
        lambda spans: has_all(spans, live),
        60,
    )
    back = {trajectory.id: trajectory for trajectory in reconstruct(spans)}
    lossy = {t.id for t in live if "nested" in t.metadata}  # with a null and a list of several
    assert {t.id for t in back.values() if LOST in t.warnings} == lossy != set()
    assert_equal_to_microseconds(
        [t for t in back.values() if t.id not in lossy], [t for t in live if t.id not in lossy]
    )
    for path in ("projects/every%20kind", f"projects/every%20kind/traces/{live[0].trace_id}"):
        assert live[0].id in {t.id for t in reconstruct(read(f"{phoenix.url}/{path}"))}
    target = tmp_path / "trajectories.jsonl"
    assert main(["rebuild", f"{phoenix.url}/projects/every%20kind", "-o", str(target)]) == 0
    assert {t.id for t in JsonlTrajectoryExporter.read(target)} == back.keys()


def test_a_long_rollout_comes_back_from_phoenix(
    phoenix: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty turns of 4 KB, whose spans are larger than all others."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", phoenix.url)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "openinference.project.name=long")
    otel_rollout.configure(service_name="long")
    with (
        ModelServer(
            [Reply(f"{turn} ok") for turn in range(50)], token_ids=True, logprobs=True
        ) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        rollout("long") as trajectory,
    ):
        messages: list[Any] = []
        for turn in range(50):
            messages.append({"role": "user", "content": f"{turn} " + "é" * 2048})
            reply = client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump())
        trajectory.reward = 1
    assert otel_rollout.shutdown()
    spans = eventually(
        lambda: list(read_phoenix(phoenix.url, "long", trajectory.trace_id)),
        lambda spans: has_all(spans, [trajectory]),
        60,
    )
    (back,) = reconstruct(spans)
    assert_equal_to_microseconds([back], [trajectory])


def test_phoenix_listens_on_this_host_alone(phoenix: Page) -> None:
    """Whatever port its process has open is open on the loopback."""
    links = (os.readlink(path) for path in Path(f"/proc/{phoenix.pid}/fd").iterdir())
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [row[1] for row in rows if row[3] == LISTEN and row[9] in own]
    assert len(listening) >= 2
    assert all(address.partition(":")[0].endswith("0100007F") for address in listening)


def experiment(url: str, name: str) -> str:
    """The id of a new experiment of MLflow."""
    request = urllib.request.Request(
        f"{url}/api/2.0/mlflow/experiments/create",
        json.dumps({"name": name}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["experiment_id"])


def test_every_kind_of_rollout_comes_back_from_mlflow(
    mlflow: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the live ones, by id and by the addresses of its page and API."""
    headers = f"x-mlflow-experiment-id={experiment(mlflow.url, 'every kind')}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    live = play_to(mlflow.url, monkeypatch, "every kind")
    traces = sorted({trajectory.trace_id for trajectory in live})
    spans = eventually(
        lambda: [span for trace_id in traces for span in read_mlflow(mlflow.url, trace_id)],
        lambda spans: has_all(spans, live),
        60,
    )
    assert reconstruct(spans) == live
    page = f"{mlflow.url}/#/experiments/1/traces?selectedEvaluationId=tr-{live[0].trace_id}"
    assert live[0] in reconstruct(read(page))
    with urllib.request.urlopen(
        f"{mlflow.url}/api/3.0/mlflow/traces/get?trace_id=tr-{live[0].trace_id}", timeout=30
    ) as answer:  # the API whose objects were texts
        saved = tmp_path / "answer.json"
        saved.write_bytes(answer.read())
    assert reconstruct(read(saved)) == [t for t in live if t.trace_id == live[0].trace_id]
    with pytest.raises(LookupError, match="no trace"):
        read_mlflow(mlflow.url, "ab" * 16)
