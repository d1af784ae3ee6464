"""The lines that install, as README and errors write them, in environments that have nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

import pytest

from otel_rollout.extras import to_install
from otel_rollout.testing import ModelServer, Reply, ToolCall

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[1]
SECTION = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
INSTALL = next(text for text in SECTION if text.startswith("Install"))
WRITTEN = re.findall(r"pip install [^`#\n]*[^`#\s]", INSTALL)
"""The lines of README's section, code blocks and table."""
EXPORTERS = sorted(path.parent.name for path in ROOT.glob("exporters/*/pyproject.toml"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *ROOT.glob("exporters/*/README.md")]
VERBS = "list|show|check|rebuild|reward|export|drift|doctor|view"
FOREIGN = re.compile(r"16686|URL|kafka|my_agent|--tokenizer|view (?!.*--html)|--port")
"""In a command that needs a backend or a file of the reader's, or that serves."""
RUNS = """
import asyncio
import otel_rollout
from otel_rollout import otlp
from otel_rollout.testing import ModelServer

@otel_rollout.rollout
async def agent(client, number):
    messages = [{"role": "user", "content": "2 + 2?"}]
    await client.chat.completions.create(model="m", messages=messages)
    otel_rollout.get_current_trajectory().reward = float(number % 2)

async def main():
    import openai
    with ModelServer(["It is 4.", "5", "four", "3"]) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            runs = [agent(client, number) for number in range(4)]
            await otel_rollout.gather_group(runs, group_id="g", task_id="t", policy_version=1)

otel_rollout.configure(
    exporters=[otel_rollout.JsonlTrajectoryExporter("trajectories.jsonl")],
    span_exporters=[otlp.JsonLinesSpanExporter("spans.jsonl")],
    request_token_ids=True,
)
asyncio.run(main())
otel_rollout.shutdown()
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; an error of its own if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def installer(tool: str, folder: Path) -> list[str | Path]:
    """An empty environment in `folder`, and the command that installs into it."""
    if tool == "uv":
        run(Path(sys.executable).with_name("uv"), "venv", "--quiet", folder)
        uv = Path(sys.executable).with_name("uv")
        return [uv, "pip", "install", "--python", folder / "bin" / "python"]
    venv.create(folder, with_pip=True)
    return [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_what_the_readme_installs(tool: str, tmp_path: Path):
    """Every line works; each part that it brings is there, and so are the commands of all pages."""
    install, programs = installer(tool, tmp_path / "env"), tmp_path / "env" / "bin"
    for line in WRITTEN:
        run(*install, *shlex.split(line.removeprefix("pip install")))
    run(programs / "otel-rollout", "--version")
    listed = run(programs / "otel-rollout", "export", "--list")
    assert [name for name in EXPORTERS if not re.search(rf"^{name}\b", listed, re.M)] == []
    parts = "otel_rollout.gateway, otel_rollout.view.server, aiohttp, pandas, pyarrow"
    run(programs / "python", "-c", f"import {parts}")
    if tool == "pip":  # once is enough
        return
    folder = runs_in(tmp_path / "runs", programs)
    done = {page.parent.name + page.stem: carried_out(page, folder, programs) for page in PAGES}
    assert done["docscommand-line"] > 10
    assert len([page for page, count in done.items() if count]) > 12


def runs_in(folder: Path, programs: Path) -> Path:
    """A folder with the sources that pages name: a group of four runs."""
    (folder / "traces").mkdir(parents=True)
    run(programs / "python", "-c", RUNS, cwd=folder)
    for name, copies in (("trajectories", ["runs"]), ("spans", ["traces", "traces/1"])):
        for copy in copies:
            (folder / f"{copy}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    return folder


def carried_out(page: Path, folder: Path, programs: Path) -> int:
    """How many commands of a page were run: those of ours that need nothing else."""
    text = page.read_text().replace("\\\n", " ")
    with (folder / "trajectories.jsonl").open() as lines:
        first = json.loads(next(lines))["id"]
    found = re.findall(rf"^ *(?:\$ )?otel-rollout ((?:{VERBS})\b[^#\n&|]*)", text, re.M)
    commands = [each.strip() for each in found if not FOREIGN.search(each)]
    with ModelServer(Reply("ok", tool_calls=[ToolCall("look")])) as server:
        for number, command in enumerate(commands):
            for old, new in (
                ("http://localhost:8000/v1", server.base_url),
                (r"\b(8bdc|5f1c)\w*", first[:12]),
                (r"-o (\S+)", rf"-o {page.parent.name}{page.stem}{number}-\1"),
            ):
                command = re.sub(old, new, command)
            run("sh", "-c", f"{programs}/otel-rollout {command}", cwd=folder)
    return len(commands)


def test_the_tour_from_its_first_line(tmp_path: Path):
    """Its install line in an empty environment, its blocks as one program, then its commands."""
    page = ROOT / "docs" / "tour.md"
    install, programs = installer("uv", tmp_path / "env"), tmp_path / "env" / "bin"
    (line,) = re.findall(r"^pip install (.*)", page.read_text(), re.M)
    run(*install, *shlex.split(line))
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    program = textwrap.indent("".join(blocks), "    ")
    run(
        programs / "python",
        "-c",
        f"async def main():\n{program}\nimport asyncio\nasyncio.run(main())",
        cwd=tmp_path,
    )
    assert carried_out(page, tmp_path, programs) == 2


@pytest.mark.slow
def test_trl_in_ten_minutes(tmp_path: Path):
    """The page's commands that need no GPU, in an empty environment, and their time."""
    install, programs = installer("uv", tmp_path / "env"), tmp_path / "env" / "bin"
    text = (ROOT / "docs" / "trl.md").read_text()
    began = time.monotonic()
    run(*install, *shlex.split(re.findall(r"^pip install (.*)", text, re.M)[0]))
    commands = re.findall(r"^python (-m examples\S* [^#\n]*)", text, re.M)
    for command in [each for each in commands if "--server" not in each]:
        python: list[str | Path] = ["env", f"PYTHONPATH={ROOT}", programs / "python"]
        run(*python, *shlex.split(command), cwd=tmp_path)
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    print(f"docs/trl.md: {time.monotonic() - began:.0f} s")


def test_what_an_error_says_to_install(tmp_path: Path):
    """The line of a missing exporter brings it; a pip of today fetches few versions in vain."""
    install, programs = installer("pip", tmp_path / "env"), tmp_path / "env" / "bin"
    run(*install, "--upgrade", "pip")
    printed = run(*install, "--find-links", "dist", "otel-rollout")
    fetched = re.findall(r"^ *(?:Downloading|Using cached) \S+\.whl", printed, re.MULTILINE)
    taken = re.search(r"^Successfully installed (.*)", printed, re.MULTILINE)
    assert taken
    assert len(fetched) < 2 * len(taken[1].split())
    export = f"{programs}/otel-rollout export --to trl {os.devnull} -o {tmp_path}/rows".split()
    refused = subprocess.run(export, capture_output=True, text=True, check=False)
    assert to_install("otel-rollout-exporter-trl") in refused.stderr
    line = refused.stderr.partition("pip install ")[2]
    run(*install, *shlex.split(line))
    assert re.search(r"^trl\b", run(programs / "otel-rollout", "export", "--list"), re.MULTILINE)
