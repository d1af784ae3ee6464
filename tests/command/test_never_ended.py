"""Rollouts that began and never ended: the files of them, and `check --started`.

Each process is a real one, and is killed for real.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, continue_rollout, reconstruct, rollout
from otel_rollout.command import checks
from otel_rollout.command.cli import main
from otel_rollout.otlp import JsonLinesSpanExporter, read
from otel_rollout.testing import ModelServer, Reply
from otel_rollout.workflows import Workflow
from tests.kit.conversations import user
from tests.kit.receivers import GrpcReceiver, HttpReceiver
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


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def hosts(server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of four processes that ended, a group of eight each."""
    folder = tmp_path_factory.mktemp("hosts")
    for process in [begun(server, folder / f"{name}.jsonl", name) for name in "abcd"]:
        assert process.wait(60) == 0
    return folder


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


def test_the_file_of_a_host_is_gone(hosts: Path, tmp_path: Path, capsys: Output) -> None:
    """Of four hosts; its started file, a number, or the groups of another host tell."""
    shutil.copytree(hosts, tmp_path, dirs_exist_ok=True)
    files = [tmp_path / f"{name}.jsonl" for name in "abcd"]
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


def test_a_receipt_counts(server: ModelServer, hosts: Path, tmp_path: Path) -> None:
    """What began, how it ended, what came into the file; off, there is no file."""
    silent = tmp_path / "silent.jsonl"
    *started, receipt = records(hosts / "a.jsonl")
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


def test_a_started_file_is_no_source(hosts: Path, tmp_path: Path, capsys: Output) -> None:
    """It is left out of a folder, and refused by its name; damaged lines are reported."""
    out = tmp_path / "a.jsonl"
    for name in (out.name, f"{out.name}.started"):
        shutil.copy(hosts / name, tmp_path)
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


# --- by the span `rollout started`

TRACED = """
import sys, openai, otel_rollout
from otel_rollout import continue_rollout, gather_group, propagate, rollout
from otel_rollout.otlp import JsonLinesSpanExporter
import asyncio

url, file = sys.argv[1:]
otel_rollout.configure(
    span_exporters=[JsonLinesSpanExporter(file)] if file else [],
    instrumentor="openai" if file else None,
)
client = openai.AsyncOpenAI(base_url=url, api_key="none")

@rollout(policy_version=7)
async def agent(number):
    await client.chat.completions.create(
        model="hanging" if number == 7 else "m", messages=[{"role": "user", "content": "hi"}]
    )

async def run():
    await gather_group(
        (lambda n=n: agent(n) for n in range(8)), group_id="g", group_size=8, task_id="t"
    )

asyncio.run(run())
"""


def traced(server: ModelServer, file: str, **environ: str) -> subprocess.Popen[bytes]:
    """A process with a group of eight whose spans are exported; the last one hangs."""
    command = [sys.executable, "-c", TRACED, server.base_url, file]
    return subprocess.Popen(command, env={**os.environ, **environ})


def wait_for(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_of_spans_names_what_never_ended(
    server: ModelServer, tmp_path: Path, capsys: Output
) -> None:
    """`rebuild`, `list` and `check` name it with its place; it is no trajectory and no noise."""
    spans, out = tmp_path / "spans.jsonl", tmp_path / "t.jsonl"
    process = traced(server, str(spans), OTEL_BSP_SCHEDULE_DELAY="100")
    wait_for(lambda: spans.exists() and spans.read_text().count('"rollout.status"') == 7)
    process.kill()
    process.wait()
    (started,) = (
        span
        for span in read(spans)
        if span.name == "rollout started" and span.attributes["rollout.sample_index"] == 7
    )
    assert started.label("rollout.policy_version") == 7
    id_ = started.text("rollout.started")
    sentence = f"never ended: group g, sample 7, rollout {id_}, host {socket.gethostname()}, "
    sentence += f"pid {process.pid}; started 20"
    assert main(["rebuild", str(spans), "-o", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"1 of 8 rollouts {sentence}" in said
    assert "7 complete" in said
    assert re.search(r"7 rollouts from \d+ spans \(\d of other libraries\)", said)
    for each in reconstruct(read(spans)):
        assert each.warnings == ["its token ids were not asked for"] or not each.warnings
    assert main(["list", str(spans)]) == 0
    assert f"1 of 8 rollouts {sentence}" in capsys.readouterr().err
    asked = ["--require", "complete,undamaged"]
    for command in (["check", str(spans)], ["check", str(out), "--started", str(spans)]):
        assert main([*command, *asked]) == 1
        assert f"1 of 8 {sentence}" in capsys.readouterr().out
    assert main(["check", *asked, "--started", str(spans)]) == 1
    assert main(["show", str(spans), "--where", "sample_index == 0"]) == 0
    assert "rollout started" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
def test_a_receiver_has_it_while_the_first_call_hangs(
    server: ModelServer, kind: type[HttpReceiver | GrpcReceiver]
) -> None:
    """Long before the time of a batch is over."""
    with kind() as receiver:
        protocol = "grpc" if kind is GrpcReceiver else "http/protobuf"
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        process = traced(server, "", OTEL_EXPORTER_OTLP_PROTOCOL=protocol, **environ)
        wait_for(lambda: len({span.span_id for span in receiver.spans}) >= 8)
        process.kill()
        process.wait()
        assert {span.name for span in receiver.spans} >= {"rollout started"}
        assert len({span.attributes.get("rollout.started") for span in receiver.spans}) >= 8


def test_what_is_not_announced(tmp_path: Path) -> None:
    """Nothing with `announce=False`, or of a part; a sampler does not matter."""
    path = tmp_path / "spans.jsonl"
    for announce in (False, True):
        otel_rollout.configure(
            span_exporters=[JsonLinesSpanExporter(path)],
            tracer_provider=TracerProvider(sampler=ALWAYS_OFF),
            announce=announce,
        )
        with rollout("agent"):
            pass
        otel_rollout.shutdown()
        starts = [span.name for span in read(path) if span.name == "rollout started"]
        assert len(starts) == announce
    otel_rollout.configure(span_exporters=[JsonLinesSpanExporter(path)])
    with continue_rollout(
        {"traceparent": f"00-{5:032x}-{6:016x}-01", "baggage": f"rollout.id={7:032x}"}
    ):
        pass
    otel_rollout.shutdown()
    assert starts == [span.name for span in read(path) if span.name == "rollout started"]


def test_it_changes_no_trajectory(clients: Clients, tmp_path: Path) -> None:
    """Live and rebuilt are equal in any order, and a file that has only starts has none."""
    path, memory = tmp_path / "spans.jsonl", otel_rollout.InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory], span_exporters=[JsonLinesSpanExporter(path)])
    client = clients.sync(clients.serve())
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[user("hi")])
        with rollout("inner"):
            pass
    otel_rollout.shutdown()
    spans = [*read(path)]
    assert [span.name for span in spans[:1]] == ["rollout started"]
    live = sorted(memory.get_finished_trajectories(), key=lambda each: each.start_time_ns)
    assert reconstruct(spans) == reconstruct(spans[::-1]) == live
    starts = [span for span in spans if span.name == "rollout started"]
    assert len(starts) == 2
    assert reconstruct(starts) == reconstruct(starts, infer_rollouts=True) == []


def test_a_file_that_cannot_be_written_costs_the_agent_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start is logged once as not exported, and the rollout runs."""
    path = tmp_path / "spans.jsonl"
    path.mkdir()
    memory = otel_rollout.InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory], span_exporters=[JsonLinesSpanExporter(path)])
    with rollout("agent"):
        pass
    assert not otel_rollout.shutdown(300)
    assert len(memory.get_finished_trajectories()) == 1
    assert "the start of a rollout was not exported" in caplog.text
