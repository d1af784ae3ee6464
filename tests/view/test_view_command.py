"""The verb `view`: an address that works until it is told to stop, or one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from otel_rollout.command import main
from otel_rollout.view.built_page import FOLDER
from tests.kit.conversations import user
from tests.view.made import Call, line, write

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the page is not built")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two trajectories, and a line that is none."""
    found = write(tmp_path / "a.jsonl", *(line(id_, Call([user("hi")])) for id_ in ("t1", "t2")))
    with found.open("a") as file:
        file.write("no JSON\n")
    return found


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The verb as a program of its own."""
    code = "import sys; from otel_rollout.command import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "view", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(path: Path, number: int, tmp_path: Path):
    """The first line is the address; the end is quiet, with status 0, and leaves no file behind."""
    with running(str(path), "--no-browser", "--no-cache") as process:
        assert process.stdout
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert requests.get(url).status_code == 200
        assert requests.get(f"{url}assets/app.js").status_code == 200
        assert requests.get(f"{url}api/state").json()["sources"] == [str(path)]
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output, errors) == (0, "", "")
    assert not (tmp_path / "cache").exists()


def test_the_address_is_on_no_command_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The browser gets a file of the user's that leads to the page."""
    told, browser = tmp_path / "told", tmp_path / "browser"
    look = 'file="${1#file://}"; { echo "$1"; stat -c %a "$file"; cat "$file"; }'
    browser.write_text(f"#!/bin/sh\n{look} > {told}.part\nmv {told}.part {told}\n")
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(browser))
    with running(str(path), "--no-cache") as process:
        assert process.stdout
        url = process.stdout.readline().strip()
        for _ in range(600):
            if told.exists():
                break
            time.sleep(0.1)
        asked, mode, page = told.read_text().splitlines()
        assert url.rpartition(":")[2] not in asked
        assert mode == "600"
        assert url in page
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert not Path(asked.removeprefix("file://")).exists()


def test_it_writes_one_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With what it was asked for; what could not be read is said, with status 1."""
    out = tmp_path / "page.html"
    assert main(["view", str(path), "--html", str(out), "--where", "id == 't1'"]) == 1
    assert f"`otel-rollout view {path}` shows all" in out.read_text()
    assert "line 3" in capsys.readouterr().err
    text = out.read_text()
    assert '"t1"' in text
    assert '"t2"' not in text


def test_what_cannot_be_read_is_printed():
    """An address that does not answer, while the page is served."""
    address = "http://127.0.0.1:9/trace/1"
    with running(address, "--no-browser", "--no-cache") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith("http://")
        assert address in process.stderr.readline()


def test_a_file_needs_no_extra(path: Path, tmp_path: Path):
    """Without Starlette and uvicorn `--html` works, and the server says what to install."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("starlette", "uvicorn"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name}', name={name!r})")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    code = "import sys; from otel_rollout.command import main; sys.exit(main(sys.argv[1:]))"
    for arguments, status, text in (
        (["--html", str(tmp_path / "x.html")], 1, "line 3"),
        (["--no-browser"], 1, "dist 'otel-rollout[view]'"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "view", str(path), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, text in done.stderr) == (status, True), done.stderr
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--where", "rewrd > 1"], "rewrd"),
        (["--host", "0.0.0.0"], "OTEL_ROLLOUT_VIEW_REACHABLE=1"),
        (["--port", "99999"], "--port 99999"),
        (["--tokenizer", "/none/x"], "token"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    """That names it; nothing is served."""
    assert main(["view", str(path), "--no-browser", *arguments]) == 1
    output, errors = capsys.readouterr()
    assert text in errors
    assert output == ""
    assert errors.count("\n") == 1


def test_the_environment_names_the_index(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A file in place of that in the cache, unless there is to be none."""
    named, page = tmp_path / "mine.sqlite", ["--html", str(tmp_path / "page.html"), "--force"]
    monkeypatch.setenv("OTEL_ROLLOUT_VIEW_INDEX", str(named))
    assert main(["view", str(path), "--no-cache", *page]) == 1
    assert not named.exists()
    assert main(["view", str(path), *page]) == 1
    assert named.exists()
    monkeypatch.setenv("OTEL_ROLLOUT_VIEW_INDEX", "/none/index")
    capsys.readouterr()
    assert main(["view", str(path), *page]) == 1
    assert "OTEL_ROLLOUT_VIEW_INDEX" in capsys.readouterr().err


def test_the_environment_allows_other_machines(path: Path, tmp_path: Path):
    """As for a page in a container, whose port is forwarded."""
    os.environ["OTEL_ROLLOUT_VIEW_REACHABLE"] = "1"
    try:
        with running(str(path), "--no-browser", "--no-cache", "--host", "0.0.0.0") as process:
            assert process.stdout
            assert process.stdout.readline().startswith("http://0.0.0.0:")
    finally:
        del os.environ["OTEL_ROLLOUT_VIEW_REACHABLE"]


def test_a_source_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    """Before anything is served."""
    assert main(["view", "/none.jsonl", "--no-browser"]) == 1
    assert capsys.readouterr().err == "otel-rollout: /none.jsonl: No such file or directory\n"
