"""What agents ran, what is at the receivers, and what does not hold between them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from otel_rollout import JsonlTrajectoryExporter, Trajectory
from tests.backends.deployed import TOKEN
from tests.backends.hosts import Host, Program


def arrived(receivers: list[Program]) -> list[dict[str, Trajectory]]:
    """The trajectories at each receiver."""
    found = []
    for each in receivers:
        path = each.folder / "trajectories.jsonl"
        rows = JsonlTrajectoryExporter.read(path) if path.exists() else []
        found.append({t.id: t for t in rows})
    return found


def judge(
    truth: dict[str, Trajectory], found: list[dict[str, Trajectory]], audit: dict[str, Any]
) -> list[str]:
    """What does not hold: each trajectory is whole at one receiver, each group at one, with what
    ran inside its members.

    One whose process was killed when it had ended may be missing, or not whole, if `audit` names
    it: its end did not leave the process, or came when its group had been handed over.
    """
    problems = []
    named = {row["rollout"] for row in (*audit["never_ended"], *audit["late"])}
    places: defaultdict[str, set[int]] = defaultdict(set)
    for id_, live in truth.items():
        at = [place for place, each in enumerate(found) if id_ in each]
        if len(at) != 1 and not (id_ in named and not at):
            problems.append(f"{id_} of {live.group_id} is at {at}")
        elif at and found[at[0]][id_] != live and id_ not in named:
            problems.append(f"{id_} is not as it was: {found[at[0]][id_].warnings}")
        around = live if live.parent_id is None else truth.get(live.parent_id)
        if around is not None and around.group_id is not None:
            places[around.group_id].update(at)
    problems += [f"{group} is at {at}" for group, at in places.items() if len(at) != 1]
    return problems


def audited(receivers: list[Program]) -> dict[str, Any]:
    """What `otel-rollout audit` says of all receivers' journals."""
    journals = [str(each.folder / "journal") for each in receivers]
    command = [str(Path(sys.executable).with_name("otel-rollout")), "audit", "--json", *journals]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report: dict[str, Any] = json.loads(shown.stdout)
    return report | {"status": shown.returncode}


def open_rollouts(receiver: Program) -> float:
    """Rollouts that the receiver has not handed over."""
    address = receiver.command[receiver.command.index("--http") + 1]
    return metric(receiver.host, address, "otel_rollout_receiver_open_rollouts")


def metric(host: Host, address: str, name: str) -> float:
    """A number that a program on this host has at `/metrics`."""
    script = (
        "import sys, urllib.request as u; headers = {'Authorization': f'Bearer {sys.argv[2]}'};"
        "page = u.urlopen(u.Request(f'http://{sys.argv[1]}/metrics', headers=headers));"
        "print(page.read().decode())"
    )
    command = host.command(sys.executable, "-c", script, address, TOKEN)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", shown, re.MULTILINE)
    assert found is not None, shown
    return float(found[1])
