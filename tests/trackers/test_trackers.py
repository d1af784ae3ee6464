"""Each `examples/track_*.py` on its real package, offline: what it logged is read from there."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.kit.programs import ROOT

pytestmark = pytest.mark.tracker
COUNT = 8
FIGURES = ["reward", "turns", "sampled_tokens", "trained_tokens", "seconds", "failed"]
NAMES = {f"rollout/{name}" for name in FIGURES}


def run(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last line that the example prints; it runs, and writes, in this folder."""
    for name in ("HOME", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "did not" not in done.stderr
    return done.stdout.strip().splitlines()[-1]


def check(logged: Sequence[dict[str, Any]]) -> None:
    """Each trajectory was logged once, with all its figures."""
    assert len(logged) == COUNT
    for each in logged:
        assert set(each) >= NAMES
        assert (each["rollout/reward"], each["rollout/turns"]) == (1, 1)
        assert each["rollout/sampled_tokens"] > 0
        assert not each["rollout/failed"]
        assert math.isfinite(each["rollout/seconds"])


def wandb_records(file: bytes) -> Iterator[bytes]:
    """The records of an offline run: a LevelDB log after 7 bytes, in blocks of 32 KiB."""
    position, parts = 7, b""
    while position + 7 <= len(file):
        room = BLOCK - position % BLOCK
        if room < 7:
            position += room
            continue
        size, kind = struct.unpack_from("<HB", file, position + 4)
        parts += file[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


BLOCK = 1 << 15


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offline run, which `wandb sync` uploads, has a step for each, and the table."""
    assert run("track_wandb.py", tmp_path, monkeypatch).startswith(f"{COUNT} trajectories")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    made: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    steps: list[dict[str, Any]] = []
    for data in wandb_records(path.read_bytes()):
        record = made.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            steps.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    check([step for step in steps if "rollout/reward" in step])
    (size,) = [step["trajectories/nrows"] for step in steps if "trajectories/nrows" in step]
    assert size == COUNT


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in the SQLite store has a step for each, and the table as an artefact."""
    id_ = run("track_mlflow.py", tmp_path, monkeypatch).split()[-1]
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    steps: list[dict[str, Any]] = [{} for _ in range(COUNT)]
    for name in client.get_run(id_).data.metrics:
        for point in client.get_metric_history(id_, name):
            steps[point.step][name] = point.value
    check(steps)
    assert [artefact.path for artefact in client.list_artifacts(id_)] == ["trajectories.json"]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local database has a step for each."""
    name = run("track_trackio.py", tmp_path, monkeypatch).split()[-1]
    storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    logged = storage.get_logs("otel-rollout", name)
    check([step for step in logged if "rollout/reward" in step])
    (table,) = [step["trajectories"] for step in logged if "trajectories" in step]
    assert table["_type"] == "trackio.table"
