"""Rollouts that began and never ended: the files of them, and `check --started`.

Each process is a real one, and is killed for real.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, rollout
from otel_rollout.command import checks
from otel_rollout.command.cli import main
from otel_rollout.testing import ModelServer, Reply
from otel_rollout.workflows import Workflow
from tests.kit.conversations import user
from tests.kit.recording import Clients

Output = pytest.CaptureFixture[str]
AGENTS = """
import asyncio, sys
import openai, otel_rollout
from otel_rollout import JsonlTrajectoryExporter, gather_group, rollout

url, file, groups, hangs, announce = sys.argv[1:]
otel_rollout.configure(
    exporters=[JsonlTrajectoryExporter(file)], instrumentor=None, announce=announce == "yes"
)
client = openai.AsyncOpenAI(base_url=url, api_key="none")

@rollout
async def agent(number):
    model = "hanging" if number == int(hangs) else "m"
    await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": str(number)}]
    )
    otel_rollout.record_reward(1.0)

async def run():
    for number, group in enumerate(groups.split(",")):
        size = range(number * 8, number * 8 + 8)
        await gather_group((lambda n=n: agent(n) for n in size), group_id=group, group_size=8)

asyncio.run(run())
otel_rollout.shutdown()
"""


@pytest.fixture
def server() -> Any:
    """A model server whose model "hanging" does not answer."""

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("ok", delay=60.0 if request["model"] == "hanging" else 0.0)

    with ModelServer(answer, token_ids=True, logprobs=True) as made:
        yield made


def begun(
    server: ModelServer, out: Path, groups: str, *, hangs: int = -1, announce: str = "yes"
) -> subprocess.Popen[bytes]:
    """A process that runs groups of eight."""
    arguments = [server.base_url, str(out), groups, str(hangs), announce]
    return subprocess.Popen([sys.executable, "-c", AGENTS, *arguments])


def killed(process: subprocess.Popen[bytes], out: Path, lines: int) -> None:
    """Kill the process once its file has so many trajectories."""
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of the file beside it."""
    return [json.loads(line) for line in Path(f"{out}.started").read_text().splitlines()]


def test_a_killed_sample_is_named(server: ModelServer, tmp_path: Path, capsys: Output) -> None:
    """Two groups of eight, killed while one sample hangs in its first call."""
    out = tmp_path / "t.jsonl"
    process = begun(server, out, "g,h", hangs=11)
    killed(process, out, 15)
    assert len(records(out)) == 16
    assert main(["check", str(out)]) == 1
    assert "group 'h' has 7 of 8 samples: sample 3 missing" in capsys.readouterr().out
    for command in (["check", str(out)], ["check"]):
        asked = ["--require", "complete,undamaged", "--started", f"{out}.started"]
        assert main([*command, *asked]) == 1
        said = capsys.readouterr().out
        host = records(out)[0]["host"]
        lost = next(
            each for each in records(out) if (each["group_id"], each["sample_index"]) == ("h", 3)
        )
        assert (
            f"1 of 16 never ended: group h, sample 3, rollout {lost['started']}, host {host}, "
            f"pid {process.pid}; started {lost['time']}\n"
        ) in said
        assert f"host {host}, pid {process.pid}: no receipt." in said
    assert main(["check", "--json", "--started", str(tmp_path)]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
    assert [each["started"] for each in summary["started"]["never_ended"]] == [lost["started"]]


def test_a_process_that_lost_all(server: ModelServer, tmp_path: Path, capsys: Output) -> None:
    """Its file of trajectories is empty; all of its rollouts are named."""
    out = tmp_path / "t.jsonl"
    process = begun(server, out, "g", hangs=0)
    killed(process, Path(f"{out}.started"), 8)
    out.write_bytes(b"")
    assert main(["check", str(out), "--started", f"{out}.started"]) == 1
    assert "8 of 8 never ended:\n" in capsys.readouterr().out


def test_the_file_of_a_host_is_gone(server: ModelServer, tmp_path: Path, capsys: Output) -> None:
    """Of four hosts; its started file, a number, or the groups of another host tell."""
    files = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    for process in [begun(server, out, out.stem) for out in files]:
        assert process.wait(60) == 0
    started = [f"{out}.started" for out in files]
    sources = [str(out) for out in files]
    assert main(["check", *sources, "--started", *started, "--expect", "32"]) == 0
    assert "never ended" not in capsys.readouterr().out
    files[3].unlink()
    assert main(["check", *sources[:3]]) == 0
    assert main(["check", *sources[:3], "--expect", "32"]) == 1
    capsys.readouterr()
    assert main(["check", *sources[:3], "--started", *started]) == 1
    said = capsys.readouterr().out
    assert "8 of 32 never ended:\n" in said
    assert said.count("    group d, sample ") == 8
    assert "no receipt" not in said


def test_a_receipt_counts(server: ModelServer, tmp_path: Path) -> None:
    """What began, how it ended, what came into the file; off, there is no file."""
    out, silent = tmp_path / "t.jsonl", tmp_path / "silent.jsonl"
    assert begun(server, out, "g").wait(60) == 0
    *started, receipt = records(out)
    assert [each["sample_index"] for each in started] == [*range(8)]
    assert {(each["group_size"], each["name"]) for each in started} == {(8, "agent")}
    assert all(len(json.dumps(each)) < 400 for each in started)
    assert receipt["receipt"] == started[0]["writer"]
    numbers = {name: receipt[name] for name in ("started", "ended", "exported", "dropped")}
    assert numbers == {"started": 8, "ended": {"complete": 8}, "exported": 8, "dropped": 0}
    assert begun(server, silent, "g", announce="no").wait(60) == 0
    assert len(silent.read_text().splitlines()) == 8
    assert not Path(f"{silent}.started").exists()


def test_a_file_that_cannot_be_written_costs_nothing(
    clients: Clients, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a sentence in the log; the trajectories are there. A device has no file beside it."""
    out = tmp_path / "t.jsonl"
    Path(f"{out}.started").mkdir()
    exporters = [JsonlTrajectoryExporter(out), JsonlTrajectoryExporter("/dev/null")]
    otel_rollout.configure(exporters=exporters, instrumentor=None)
    client = clients.sync(clients.serve())
    for _ in range(3):
        with rollout("agent"):
            client.chat.completions.create(model="m", messages=[user("hi")])
    assert otel_rollout.shutdown()
    assert len(out.read_text().splitlines()) == 3
    assert caplog.text.count("not all that begins is noted") == 1
    assert not Path("/dev/null.started").exists()


def test_what_is_not_exported_is_left_out(tmp_path: Path, capsys: Output) -> None:
    """A workflow without calls of its own has no trajectory, and none is missing."""
    out = tmp_path / "t.jsonl"
    otel_rollout.configure(exporters=[JsonlTrajectoryExporter(out)], instrumentor=None)

    class Empty(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            with rollout("inner"):
                pass

    asyncio.run(Empty().run_with_termination_handling({}, "u"))
    otel_rollout.shutdown()
    assert main(["check", str(out), "--require", "unique", "--started", f"{out}.started"]) == 0
    assert records(out)[-1]["left_out"] == 1


def test_a_trial_of_doctor_is_left_out(tmp_path: Path) -> None:
    """The rollout that it runs in the set-up never ends in the file, and none is missing."""
    out = tmp_path / "t.jsonl"
    otel_rollout.configure(exporters=[JsonlTrajectoryExporter(out)], instrumentor=None)
    checks.check()
    otel_rollout.shutdown()
    began, left_out, receipt = records(out)
    assert left_out == {"left_out": began["started"]}
    assert (receipt["started"], receipt["left_out"], receipt["dropped"]) == (1, 1, 0)


def test_a_started_file_is_no_source(server: ModelServer, tmp_path: Path, capsys: Output) -> None:
    """It is left out of a folder, and refused by its name; damaged lines are reported."""
    out = tmp_path / "t.jsonl"
    assert begun(server, out, "g").wait(60) == 0
    assert main(["list", str(tmp_path)]) == 0
    assert main(["list", f"{out}.started"]) != 0
    assert "give it to `otel-rollout check --started`" in capsys.readouterr().err
    started = tmp_path / "copy.started"
    shutil.copy(f"{out}.started", started)
    with started.open("a") as file:
        file.write('{"started": 7}\n{"started": "x"')
    assert main(["check", str(out), "--started", str(started)]) == 2
    error = capsys.readouterr().err
    assert f"{started}, line 10: no record of a started rollout" in error
    assert main(["check", str(out), "--started", str(tmp_path / "none")]) == 2
