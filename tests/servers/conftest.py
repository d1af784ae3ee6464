"""The servers, with a tiny model that is made for them, started once for the tests of this folder.

With `OTEL_ROLLOUT_SERVED=FOLDER` the model, and the trajectories of the agents, are left in that
folder, where the tests of `exporters/` read them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_rollout import JsonlTrajectoryExporter, Trajectory

if TYPE_CHECKING:
    from exporters.kit.recomputed import Model

pytest.register_assert_rewrite("tests.servers.checks")

INSTALLED = importlib.util.find_spec("xllamacpp") is not None
"""Whether this is the environment that has the servers."""
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model, the logs of the servers, and the trajectories are."""
    path = Path(os.environ.get("OTEL_ROLLOUT_SERVED") or tmp_path_factory.mktemp("servers"))
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


@pytest.fixture(scope="session")
def model_folder(folder: Path) -> Path:
    """The model, taught in a minute."""
    from tests.servers.model import make_model

    path = folder / "model"
    if not path.exists():
        make_model(path)
    return path


@pytest.fixture(scope="session")
def model(model_folder: Path) -> Model:
    """The same weights here, to compute anew what the servers say."""
    from exporters.kit.recomputed import Model

    return Model(model_folder)


@pytest.fixture(scope="session")
def vllm(model_folder: Path, folder: Path) -> Iterator[str]:
    """The address of a vLLM of this test session."""
    from tests.servers.programs import start_vllm

    options = ["--served-model-name", "tiny", "--reasoning-parser", "qwen3"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with start_vllm(model_folder, folder / "vllm.log", *options) as address:
        yield address


@pytest.fixture(scope="session")
def llama(model_folder: Path, folder: Path) -> Iterator[str]:
    """The address of a llama.cpp server of this test session."""
    from tests.servers.programs import start_llama

    with start_llama(model_folder, folder / "llama.log") as address:
        yield address


@pytest.fixture(scope="session")
def keep(folder: Path) -> Iterator[Callable[[Trajectory], None]]:
    """Writes a trajectory for the tests of the exporters."""
    path = folder / "trajectories.jsonl"
    path.unlink(missing_ok=True)
    exporter = JsonlTrajectoryExporter(path)
    yield lambda trajectory: exporter.export([trajectory])
    exporter.shutdown()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures, for docs/servers.md."""
    if not INSTALLED:
        return
    from tests.servers.checks import FIGURES

    for name, tokens, gap in FIGURES:
        terminalreporter.write_line(f"{name:32}{tokens:6} tokens, gap {gap:.1e}")
    if FIGURES:
        total, largest = sum(f[1] for f in FIGURES), max(f[2] for f in FIGURES)
        terminalreporter.write_line(f"{'all':32}{total:6} tokens, gap {largest:.1e}")
