"""Programs and processes that a rollout starts beside captured calls, and that nobody captures."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import no_capture, propagate, reconstruct, rollout
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

NO_CALL = "it made no model call that was captured"
STARTED = "model calls that were made there are not captured"
GIVEN = "with the address or the key of a model server: calls that were made there are not captured"
TRUE = [sys.executable, "-c", "pass"]


def test_a_program_beside_captured_calls(recording: Recording, clients: Clients) -> None:
    """One that was given a model server is named; any other, such as git, is not."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    given = {**os.environ, "OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "secret"}

    async def start() -> None:
        child = await asyncio.create_subprocess_exec(*TRUE, env=given)
        await child.wait()

    with rollout("agent") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        subprocess.run(["git", "--version"], stdout=subprocess.DEVNULL)
        subprocess.run(TRUE, env={**os.environ, "MINE": "1"})
        with no_capture():
            subprocess.run(TRUE, env=given)
    assert [text for text in trajectory.warnings if "token ids" not in text] == []
    with rollout("agent") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        subprocess.run(TRUE, env=given)
        asyncio.run(start())
        subprocess.run("true --secret=word", shell=True, env=given)
    name = os.path.basename(sys.executable)
    found = [text for text in trajectory.warnings if "token ids" not in text]
    assert found == [f"3 programs ({name}, true) were started {GIVEN}"]
    assert "secret" not in json.dumps(dict(recording.spans[-1].attributes or {}))
    assert reconstruct(recording.spans)[-1] == trajectory


def test_a_command_stays_as_it_is(recording: Recording) -> None:
    """One that can be read once is read by `Popen`; what a shell assigns before it is no name."""
    with rollout("agent") as trajectory:
        ran = subprocess.run(map(str, [*TRUE, "argument"]), check=True)  # type: ignore[call-overload]
        subprocess.run("TOKEN='secret word' true", shell=True, check=True)
        subprocess.run(b"TOKEN=secret true", shell=True, check=True)
    assert ran.returncode == 0
    (_, started) = trajectory.warnings
    assert started == f"it started 3 programs (..., sh): {STARTED}"
    assert "secret" not in json.dumps(dict(recording.spans[-1].attributes or {}))


def test_programs_of_a_rollout_without_calls(recording: Recording) -> None:
    """All are named, as far as the rollout was not handed on to them; names have a bound."""
    with rollout("agent") as trajectory:
        subprocess.run(TRUE)
        subprocess.run(Path(sys.executable).name, stdin=subprocess.DEVNULL, check=False)
    no_call, started = trajectory.warnings
    assert no_call.startswith(NO_CALL)
    assert started == f"it started 2 programs ({Path(sys.executable).name}): {STARTED}"
    with rollout("agent") as trajectory:
        for number in range(25):
            with pytest.raises(FileNotFoundError):
                subprocess.run([f"/nowhere/{number}" + "x" * 500])
    assert "it started 25 programs (0xxx" in trajectory.warnings[1]
    assert trajectory.warnings[1].count("xxx, ") == 20
    with rollout("agent") as trajectory:
        subprocess.run(TRUE, env={**os.environ, **propagate(environ=True)})
    assert STARTED not in " ".join(trajectory.warnings)


ASKING = """
import json, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout

def ask(text):
    import openai
    client = openai.OpenAI(max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

def nothing():
    import openai

if __name__ == "__main__":
    otel_rollout.configure(exporters=[InMemoryTrajectoryExporter()], instrumentor=None)
    ways = multiprocessing.get_context(sys.argv[1])
    found = []
    with rollout("process") as trajectory:
        ask("here")
        process = ways.Process(target=ask, args=("process",))
        process.start()
        process.join()
    found.append(trajectory.warnings)
    with rollout("pool") as trajectory:
        ask("here")
        with ProcessPoolExecutor(1, mp_context=ways) as pool:
            pool.submit(ask, "executor").result()
    found.append(trajectory.warnings)
    with rollout("neither") as trajectory:
        ask("here")
        process = ways.Process(target=nothing)
        process.start()
        process.join()
        with ProcessPoolExecutor(1, mp_context=ways) as pool:
            pool.submit(nothing).result()
    found.append(trajectory.warnings)
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [way for way in multiprocessing.get_all_start_methods() if way != "fork"]
)
def test_a_process_that_nobody_configured(way: str, clients: Clients, tmp_path: Path) -> None:
    """Its calls are reported to the rollout that began it; a process without calls is silent."""
    server = clients.serve("ok", token_ids=False, logprobs=False)
    script = tmp_path / "script.py"
    script.write_text(ASKING)
    environ: Any = {**os.environ, "OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "k"}
    command = [sys.executable, str(script), way]
    found = subprocess.run(command, env=environ, check=True, capture_output=True)
    process, pool, neither = (
        [text for text in each if "token ids" not in text] for each in json.loads(found.stdout)
    )
    assert [text.partition(":")[0] for text in process] == [
        "it was handed on to another process, of which no span is here"
    ]
    assert [text.partition(":")[0] for text in pool] == [
        "1 model call was made outside any rollout while it ran, in a process of a pool"
    ]
    assert neither == []
