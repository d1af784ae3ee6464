"""Commands on the pages are real; docs/gateway.md: its Python runs, its tables are whole."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, rollout
from otel_rollout.command.cli import command_parser, main
from otel_rollout.command.process import Commands
from otel_rollout.gateway import serve
from otel_rollout.testing import ModelServer
from tests.kit.programs import ROOT, python
from tests.kit.recording import Recording

PAGES = (
    *("gateway.md", "command-line.md", "tour.md", "servers.md", "trainers.md", "remote.md"),
    *("cookbook/empty-batch.md", "cookbook/existing-traces.md", "../README.md"),
)
ASK = f"""#!{sys.executable}
import json, os, sys, urllib.request
body = {{"model": "m", "messages": [{{"role": "user", "content": " ".join(sys.argv[1:])}}]}}
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
headers["Content-Type"] = "application/json"
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def lines(name: str) -> list[str]:
    """The lines of a page's blocks that are in no language, as a shell joins them."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)
    text = "".join(text for language, text in blocks if not language)
    return text.replace("\\\n", "").split("\n")


def commands(name: str) -> list[list[str]]:
    """The commands of a page that begin with `otel-rollout`, as a shell splits them."""
    found = []
    for line in lines(name):
        if line.startswith("otel-rollout "):
            words = shlex.split(line, comments=True)
            end = next((n for n, word in enumerate(words) if word in ("&", "&&", "|")), None)
            found.append(words[1:end])
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_one(name: str):
    """The parser takes each command of the page; `--list` and the like included."""
    found = commands(name)
    assert found
    for words in found:
        assert isinstance(command_parser().parse_args(words), argparse.Namespace)


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_the_python_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It runs as it stands, with an agent that is a program of its own."""
    code, program = re.findall(r"```python\n(.*?)```", page("gateway.md"), re.DOTALL)
    executable(tmp_path / "agent", ASK)
    monkeypatch.chdir(tmp_path)
    with ModelServer("It is 4.") as server:
        printed = python("-c", code, environment={"MODEL_SERVER": server.base_url})
        assert len(server.exchanges) == 4
        python(
            "-c", f"{program}\nagent('a task')", environment={"OPENAI_BASE_URL": server.base_url}
        )
    assert printed == "[1.0, 1.0, 1.0, 1.0]\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_without_python(recording: Recording):
    """The page's requests begin a rollout, reward it and end it."""
    begin, reward, end = (line for line in lines("gateway.md") if line.startswith("curl "))
    with ModelServer("It is 4.") as server, serve(server.base_url) as gateway:

        def answer(line: str, rollout_id: str = "") -> dict[str, Any]:
            line = line.replace("http://127.0.0.1:4040", gateway.url).replace("/ID", rollout_id)
            line = line.replace("$OTEL_ROLLOUT_SECRET", str(gateway.made_secret))
            done = subprocess.run(shlex.split(line), capture_output=True, check=True)
            answered: dict[str, Any] = json.loads(done.stdout)
            return answered

        begun = answer(begin)
        with openai.OpenAI(base_url=begun["openai_base_url"], api_key="x") as client:
            message: Any = {"role": "user", "content": "2 + 2?"}
            client.chat.completions.create(model="m", messages=[message])
        answer(reward, f"/{begun['id']}")
        answer(end, f"/{begun['id']}")
    otel_rollout.shutdown()
    found = recording.trajectory
    assert (found.id, found.task_id, found.group_id) == (begun["id"], "t1", "g1")
    assert (found.reward, found.status, len(found.completions)) == (1.0, "complete", 1)


@pytest.mark.slow
def test_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a command to rows, with the options that the page has."""
    run, export, *_ = commands("gateway.md")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "claude", ASK)
    (tmp_path / "grade.py").write_text("print(1.0)")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}", prepend=":")
    monkeypatch.chdir(tmp_path)
    with ModelServer("It is 4.") as server:
        run[run.index("--upstream") + 1] = server.base_url
        assert main(run) == 0
    assert main(export) == 0
    samples = list(JsonlTrajectoryExporter.read(tmp_path / "trajectories.jsonl"))
    assert sorted(each.sample_index or 0 for each in samples) == list(range(8))
    assert {each.reward for each in samples} == {1.0}
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8


async def test_every_variable_is_in_the_table(recording: Recording):
    """What the command gets is what the page says."""
    document = page("gateway.md")
    table = document[document.index("| variable |") :].partition("\n\n")[0]
    with ModelServer() as server:
        async with serve(server.base_url) as gateway:
            with rollout("x"):
                names = set(gateway.environment())
    assert "TRACEPARENT" in names
    missing = {name for name in names if f"`{name}`" not in table}
    assert missing <= {"no_proxy"}
    assert {number.name for number in Commands.FORWARDED} == set(
        re.findall(r"SIG[A-Z]+", re.search(r"\*\*Signals\*\* \((.*?)\)", document)[1])  # type: ignore[index]
    )
