"""`otel-rollout replay`: a command gets recorded replies, and its first other call is an error."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_rollout.command.cli import main
from otel_rollout.testing import ModelServer
from tests.command.agents import agent
from tests.kit.outside import send

pytestmark = pytest.mark.slow
Ran = tuple[int, str, str]
CODE = "print(ask(sys.argv[1]), ask('b')); sys.exit(int(sys.argv[2]))"


@pytest.fixture
def spans(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """The spans of two runs of an agent that asks a question of its own, then the same one."""
    file = tmp_path / "spans.jsonl"
    files = ("--spans", str(file), "--out", str(tmp_path / "out.jsonl"))
    with ModelServer(["one", "two", "three", "four"]) as server:
        for text in ("a", "x"):
            where = ("--upstream", server.base_url, "--name", text)
            assert main(["run", *where, *files, "--", *agent(CODE, text, "0")]) == 0
    capfd.readouterr()
    return file


@pytest.fixture
def replay(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the verb; its status, and what it prints."""

    def run(*arguments: str) -> Ran:
        return (main(["replay", *arguments]), *capfd.readouterr())

    return run


def test_a_command_gets_what_was_recorded(spans: Path, replay: Callable[..., Ran]):
    """Of the rollout that it asks as; its output is its own, without a model server."""
    for text, said in (("a", "one two"), ("x", "three two")):
        status, out, err = replay(str(spans), "--", *agent(CODE, text, "0"))
        assert (status, out) == (0, f"{said}\n")
        assert "2 of 4 recorded calls asked again; not asked: call " in err


def test_one_rollout(spans: Path, replay: Callable[..., Ran]):
    """`--id` leaves the others out, wherever it stands."""
    line = (spans.parent / "out.jsonl").read_text().splitlines()[1]
    id_ = json.loads(line)["id"]
    status, out, err = replay(str(spans), "--id", id_[:12], "--", *agent(CODE, "x", "0"))
    assert (status, out) == (0, "three four\n")
    assert err == "2 of 2 recorded calls asked again\n"
    assert replay("--id", "no", str(spans), "--", "true")[0] == 1


def test_the_exit_status(spans: Path, replay: Callable[..., Ran]):
    """It is the command's own, but never 0 after a difference."""
    assert replay(str(spans), "--", *agent(CODE, "a", "3"))[0] == 3
    catching = (
        "try: ask('other')\nexcept Exception as error: print(error.code, error.read().decode())"
    )
    status, out, err = replay(str(spans), "--", *agent(catching))
    assert status == 1
    assert out.startswith('422 {"error":')
    assert "differs from call 1" in err
    assert '"a"' in err
    assert '| "other"' in err
    assert replay(str(spans), "--", "/no/such/command")[0] == 127


def test_a_file_of_trajectories(spans: Path, replay: Callable[..., Ran]):
    """It keeps no bytes of streams, and a sentence says so."""
    status, _, err = replay(str(spans.parent / "out.jsonl"), "--", "true")
    assert status == 1
    assert "this is a file of trajectories: it keeps streams as merged replies" in err
    assert "Give the spans" in err


def test_passing_on(spans: Path, replay: Callable[..., Ran]):
    """A call that was not recorded asks a model server; that it came is the exit status."""
    with ModelServer("new") as server:
        where = ("--upstream", server.base_url)
        status, out, _ = replay(str(spans), *where, "--", *agent(CODE, "other", "0"))
        (exchange,) = server.exchanges
    assert (status, out) == (1, "new two\n")
    assert "authorization" not in exchange.request_headers


async def test_without_a_command(spans: Path):
    """It serves at the address of its first line until a signal, and ends well."""
    program = "import sys; from otel_rollout.command import main; sys.exit(main(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "replay", str(spans), "--listen", "127.0.0.1:0"),
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    body = {"model": "m", "messages": [{"role": "user", "content": "b"}]}
    answer = await send(f"{url}/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == "two"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 0
    assert b"1 of 4 recorded calls asked again" in err


def test_a_wrong_address(replay: Callable[..., Ran], capfd: pytest.CaptureFixture[str]):
    """It is an error of the command line."""
    for address in ("here", "h:x", ":1"):
        with pytest.raises(SystemExit, match="2"):
            replay("spans.jsonl", "--listen", address)
        assert "expected HOST:PORT" in capfd.readouterr().err
