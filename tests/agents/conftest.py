"""Command-line agents, each in a home of its own, run as a user runs them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from otel_rollout import JsonlTrajectoryExporter, reconstruct
from otel_rollout.command.cli import main
from otel_rollout.otlp import read_json_lines
from otel_rollout.testing import ModelServer
from tests.agents.ran import FILE, WRONG, Again, Agent, Ran

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / ".agents"
MODULES = AGENTS / "node_modules"
PROGRAMS = (MODULES / ".bin", AGENTS, ROOT / ".venv-agents" / "bin", Path(sys.executable).parent)
VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    # Whatever is not on this machine is not there.
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a home of its own, the agents on the PATH, and no network."""
    assert MODULES.is_dir(), "the agents are not installed: make test-agents"
    home, folder = tmp_path / "home", tmp_path / "work"
    for each in (home, folder, tmp_path / "tmp"):
        each.mkdir()
    for name in list(os.environ):
        if name.startswith(("XDG_", "ANTHROPIC_", "CLAUDE", "CODEX_", "OPENCODE_")):
            monkeypatch.delenv(name)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", ":".join([*map(str, PROGRAMS), os.environ["PATH"]]))
    monkeypatch.setenv("NODE_PATH", str(MODULES))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


@pytest.fixture
def agent(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Agent:
    """Run an agent by `otel-rollout run`, in a folder with the file that is to be mended.

    The trajectory of the process is equal to the one that its file of spans gives, and each reply
    on these spans has the bytes that the server sent. `again` runs the agent once more, where it
    began, by `otel-rollout replay`.
    """
    (folder / FILE).write_text(WRONG)
    home, kept = Path.home(), tmp_path / "kept"

    def again(command: Sequence[str], ignore: Sequence[str]) -> Again:
        for each in (home, folder):
            shutil.rmtree(each)
            shutil.copytree(kept / each.name, each, symlinks=True)
        os.chdir(folder)
        options = [part for name in ignore for part in ("--ignore", name)]
        status = main(["replay", str(tmp_path / "spans.jsonl"), *options, "--", *command])
        return Again(status, *capfd.readouterr())

    def run(server: ModelServer, command: Sequence[str]) -> Ran:
        out, spans = tmp_path / "out.jsonl", tmp_path / "spans.jsonl"
        for each in (home, folder):
            shutil.copytree(each, kept / each.name, symlinks=True)
        files = ("--out", str(out), "--spans", str(spans))
        where = ("--upstream", server.base_url, "--timeout", "300", "--request-token-ids")
        status = main(["run", *where, *files, "--", *command])
        printed, err = capfd.readouterr()
        assert status == 0, err
        (live,) = JsonlTrajectoryExporter.read(out)
        (rebuilt,) = reconstruct(read_json_lines(spans))
        assert rebuilt == live
        assert live.status == "complete"
        assert live.warnings == []
        recorded = [exchange.reply_bytes() for exchange in rebuilt.exchanges]
        assert sorted(filter(None, recorded)) == sorted(e.response for e in server.exchanges)
        return Ran(status, printed, live, server.exchanges, again)

    return run
