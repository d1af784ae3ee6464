"""Agents' processes and a receiver are killed at random: what is lost is in the audit."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

from otel_rollout import JsonlTrajectoryExporter
from tests.backends.deployed import TOKEN, here, receiver
from tests.backends.hosts import Program
from tests.backends.judging import arrived, audited, judge, open_rollouts
from tests.backends.programs import REPOSITORY

SIZE = 8
"""Rollouts of a group."""
GROUPS = int(os.environ.get("SCALE_ROLLOUTS", "160")) // SIZE
PROCESSES = 2


@pytest.mark.slow
def test_what_a_kill_takes_is_named(tmp_path: Path) -> None:
    """Whole trajectories arrive once; each that does not is named, also one that just began."""
    chance, kills = random.Random(1), 0
    target = receiver(here(), tmp_path / "receiver")
    target.start()
    http = target.command[target.command.index("--http") + 1]
    environment = {
        "OTEL_ROLLOUT_TRAIN_ENDPOINT": f"http://{http}",
        "OTEL_ROLLOUT_TRAIN_HEADERS": f"authorization=Bearer%20{TOKEN.replace(' ', '%20')}",
        "PYTHONPATH": str(REPOSITORY),
    }
    folders = [tmp_path / f"agents-{number}" for number in range(PROCESSES)]
    numbers = [[str(GROUPS), str(SIZE), str(n), str(PROCESSES)] for n in range(PROCESSES)]
    commands = [
        [sys.executable, "-m", "tests.backends.scale_agents", str(folder), *given]
        for folder, given in zip(folders, numbers, strict=True)
    ]
    agents = [
        Program(here(), command, folder, "", environment).start()
        for command, folder in zip(commands, folders, strict=True)
    ]
    try:
        while running := [each for each in agents if _is_busy(each)]:
            time.sleep(chance.uniform(1, 3))
            victim = chance.choice([*running, target])
            kills += victim is not target
            victim.restart()
        for each in agents:
            assert each.wait(120) == 0, each.log.read_text()[-3000:]
        target.command[2:2] = ["--rollout-timeout", "3", "--group-timeout", "3"]
        target.restart()
        deadline = time.monotonic() + 120
        while open_rollouts(target):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        found = arrived([target])
        audit = audited([target])
    finally:
        for each in (*agents, target):
            each.kill()
    paths = [folder / "truth.jsonl" for folder in folders]
    truth = {t.id: t for path in paths for t in JsonlTrajectoryExporter.read(path)}
    assert kills > 1
    assert len(truth) >= GROUPS * SIZE * 2
    assert judge(truth, found, audit) == [], json.dumps(audit)
    assert audit["incomplete"] == []


def _is_busy(agents: Program) -> bool:
    """True while there are groups that it has not run."""
    done = agents.folder / "done"
    return not agents.has_ended() and (not done.exists() or int(done.read_text()) < GROUPS)
