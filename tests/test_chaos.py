"""Exporters that fail in every way, full disks, forks and kills: nothing is lost without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.programs import ROOT

RUNS = int(os.environ.get("CHAOS_RUNS", "24"))
SEED = int(os.environ.get("CHAOS_SEED", "1000"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_trajectory_arrives_or_is_counted(tmp_path: Path):
    """Once, readable, and the program ends with its own output and exit code."""
    chaos = [sys.executable, "-W", "ignore", str(ROOT / "tests/kit/chaos.py")]
    done = subprocess.run(
        [*chaos, str(tmp_path), str(SEED), str(RUNS)],
        env={k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60 + 10 * RUNS,
        check=False,
    )
    assert done.stdout == ""
    assert done.stderr.startswith(f"{RUNS} runs: "), done.stderr
    assert done.returncode == 0
