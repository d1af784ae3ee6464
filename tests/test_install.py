"""The lines that install, as README and errors write them, in environments that have nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from otel_rollout.extras import to_install

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[1]
SECTION = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
INSTALL = next(text for text in SECTION if text.startswith("Install"))
WRITTEN = re.findall(r"pip install [^`#\n]*[^`#\s]", INSTALL)
"""The lines of README's section, code blocks and table."""
EXPORTERS = sorted(path.parent.name for path in ROOT.glob("exporters/*/pyproject.toml"))


def run(*command: str | Path) -> str:
    """What a command prints; an error of its own if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
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
    """Every line works; then each part that it brings is there."""
    install, programs = installer(tool, tmp_path / "env"), tmp_path / "env" / "bin"
    for line in WRITTEN:
        run(*install, *shlex.split(line.removeprefix("pip install")))
    run(programs / "otel-rollout", "--version")
    listed = run(programs / "otel-rollout", "export", "--list")
    assert [name for name in EXPORTERS if not re.search(rf"^{name}\b", listed, re.M)] == []
    parts = "otel_rollout.gateway, otel_rollout.view.server, aiohttp, pandas, pyarrow"
    run(programs / "python", "-c", f"import {parts}")


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
