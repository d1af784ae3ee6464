"""Commands as processes: how they end, what is forwarded, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.command import process
from otel_rollout.command.process import Commands, Ended
from otel_rollout.command.run import number_in


async def ran(*command: str, **options: Any) -> Ended:
    return await Commands().run(command, dict(os.environ), **options)


def shell(text: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exit 0", Ended(0)),
        ("exit 3", Ended(3, "the command exited with status 3")),
        ("kill -KILL $$", Ended(137, "the command was ended by SIGKILL")),
        ("kill -TERM $$", Ended(143, "the command was ended by SIGTERM")),
    ],
)
async def test_an_ending_is_named(text: str, expected: Ended):
    """The exit status is a shell's, and the sentence names it or the signal."""
    assert await ran(*shell(text)) == expected


async def test_a_command_that_cannot_start(tmp_path: Path):
    """A file that is no program is an ending like another one."""
    (tmp_path / "it").write_text("no program")
    (tmp_path / "it").chmod(0o644)
    ended = await ran(str(tmp_path / "it"))
    assert ended.status == process.NOT_EXECUTABLE
    assert ended.failure == f"{tmp_path / 'it'} could not be started: Permission denied"


async def test_its_own_output_is_byte_for_byte(capfdbinary: pytest.CaptureFixture[bytes]):
    """One command writes to our streams itself, whatever it writes."""
    await ran(*shell(r"printf 'a\r\377'; printf 'no newline' >&2"))
    assert capfdbinary.readouterr() == (b"a\r\xff", b"no newline")


async def test_several_have_their_lines_marked(capfdbinary: pytest.CaptureFixture[bytes]):
    """Each line says whose it is, also a last one that does not end."""
    await ran(*shell(r"printf 'one\ntwo'; echo three >&2"), prefix="[7] ")
    assert capfdbinary.readouterr() == (b"[7] one\n[7] two\n", b"[7] three\n")


async def test_a_line_is_forwarded_as_it_comes(tmp_path: Path):
    """A command that waits for what its line has caused goes on: nothing is held to its end."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        go = tmp_path / "go"
        running = asyncio.create_task(
            ran(*shell(f"echo ready; while [ ! -e {go} ]; do sleep 0.01; done"), prefix="> ")
        )
        line = await asyncio.to_thread(os.read, read, 100)
        go.touch()
        assert (await running).status == 0
    os.close(read)
    assert line == b"> ready\n"


async def test_a_line_without_an_end_is_not_held_in_memory(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
):
    """Above a limit it is forwarded in pieces, and nothing of it is lost."""
    monkeypatch.setattr(process, "_LONGEST_LINE", 1000)
    await ran(*shell("head -c 200000 /dev/zero | tr '\\0' x"), prefix="")
    out = capfdbinary.readouterr().out
    assert out.replace(b"\n", b"") == b"x" * 200_000
    assert out.count(b"\n") > 1


@pytest.mark.parametrize("prefix", [None, "[0] "])
async def test_nothing_is_left_of_it(tmp_path: Path, prefix: str | None):
    """A child that holds its output and would live on is killed when the command has ended."""
    ended = await ran(*shell(f"sleep 1000 & echo $! > {tmp_path}/pid"), prefix=prefix)
    assert ended == Ended(0)
    await gone(int((tmp_path / "pid").read_text()))


async def gone(pid: int) -> None:
    """Return when a process has ended."""
    while is_running(pid):
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """True if there is such a process that is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_out_of_time(tmp_path: Path):
    """A command is asked to end first, and may do something about it."""
    text = f"trap 'touch {tmp_path}/told; exit 0' TERM; while :; do sleep 0.01; done"
    ended = await ran(*shell(text), timeout=1)
    assert ended == Ended(124, "the command took longer than the time limit of 1 s", True)
    assert (tmp_path / "told").exists()


async def test_out_of_time_and_deaf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One that ignores SIGTERM is killed, with its children."""
    monkeypatch.setattr(process, "GRACE", 0.05)
    text = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/pid; wait; wait"
    running = asyncio.create_task(ran(*shell(text), timeout=0.5))
    ended = await running
    assert ended.timed_out
    await gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals):
    """The command gets the signal of this process and may end as it likes."""
    commands = Commands()
    ready = tmp_path / "ready"
    name = number.name.removeprefix("SIG")
    text = f"trap 'exit 7' {name}; touch {ready}; for i in $(seq 3000); do sleep 0.01; done"
    with commands.forwarding():
        running = asyncio.create_task(commands.run(shell(text), dict(os.environ)))
        while not ready.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
        assert await running == Ended(7, "the command exited with status 7")
    assert commands.signals == [number]


async def test_a_signal_while_it_starts():
    """One that comes before the command is known reaches it all the same."""
    commands = Commands()
    running = asyncio.create_task(commands.run(shell("sleep 1000"), dict(os.environ)))
    await asyncio.sleep(0)  # it has begun to start
    commands.forward(signal.SIGTERM)
    assert (await running).failure == "the command was ended by SIGTERM"


async def test_another_size_of_the_terminal_is_no_end():
    """It is forwarded and asks for no end."""
    commands = Commands()
    commands.forward(signal.SIGWINCH)
    assert commands.signals == []


async def test_an_ignored_signal_stays_ignored():
    """Under nohup the end of the terminal ends nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        commands = Commands()
        with commands.forwarding():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert commands.signals == []
    finally:
        signal.signal(signal.SIGHUP, before)


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.sampled_from(["", " \n\n"]))
def test_the_last_line_is_the_number(number: float, before: str, after: str):
    """Whatever stands before it, and blank lines after it."""
    output = f"{before}\n {number!r} \r\n{after}"
    assert number_in(output.encode(errors="replace")) == number


@pytest.mark.parametrize("output", [b"", b"\n", b"1\nno", b"nan", b"1e999", b"1 2", b"\xff"])
def test_no_number_is_none(output: bytes):
    """Nothing is taken for a number that is not one, and none is looked for further up."""
    assert number_in(output) is None
