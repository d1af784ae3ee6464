"""Commands that run as processes of their own: output, signals, time limits, clean-up.

Each command leads a session of its own, so that a signal reaches what it started too, and nothing
of it is left when it has ended. A process that leaves that session is not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

TIMED_OUT = 124
"""Exit status of a command that ran out of time, as that of `timeout`."""
NOT_EXECUTABLE = 126
"""Exit status of a command that could not be started, as a shell's."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a command that ran out of time."""
_LONGEST_LINE = 1 << 20
"""Bytes of a line that are buffered until it ends."""
_TERMINAL = (signal.SIGWINCH,)
"""Signals that end nothing: the terminal has another size."""


def signalled() -> asyncio.Event:
    """Set by SIGTERM and SIGINT, from now on, in the main thread's loop."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    """Its exit status as a shell has it: 128 and the signal's number for one that was killed."""
    failure: str | None = None
    """A sentence that names the status, the signal or the time limit. None: it succeeded."""
    timed_out: bool = False
    """True if it ran out of time."""


class Commands:
    """The commands that run in this process, all of which get the signals that it gets."""

    FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    """The signals that are forwarded, each of which asks for an end."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        """The signals that were forwarded, all of which ask for an end."""
        self._groups: set[int] = set()

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Forward the signals of this process while the block runs; in the main thread's loop."""
        loop = asyncio.get_running_loop()
        taken = [
            number
            for number in (*self.FORWARDED, *_TERMINAL)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup, or a shell's background
        ]
        for number in taken:
            loop.add_signal_handler(number, self.forward, number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def forward(self, number: signal.Signals) -> None:
        """Send a signal to every command that runs, with what it started."""
        if number not in _TERMINAL:
            self.signals.append(number)
        for group in self._groups:
            _send(group, number)

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        timeout: float | None = None,
        prefix: str | None = None,
        stdin: IO[bytes] | int | None = DEVNULL,
        stdout: IO[bytes] | None = None,
    ) -> Ended:
        """Run a command to its end.

        timeout: seconds that it may take. None: no limit.
        prefix: what each line of its output begins with. None: it writes to our own streams.
        stdin: a file that it reads. None: it reads our own. Default: there is nothing to read.
        stdout: a file that it writes to. None: as `prefix` says.
        """
        before, start = len(self.signals), (prefix or "").encode()
        pipes: list[_Pipe] = []
        try:
            for stream in () if prefix is None else (sys.stdout, sys.stderr):
                pipes.append(_Pipe.open(stream, start))  # noqa: PERF401 - closed one by one
            out, err = [pipe.given for pipe in pipes] or (None, None)
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(NOT_EXECUTABLE, f"{command[0]} could not be started: {error.strerror}")
        finally:
            for pipe in pipes:
                os.close(pipe.given)
        self._groups.add(process.pid)
        for number in self.signals[before:]:  # they came while it was started
            _send(process.pid, number)
        try:
            in_time = await _wait(process, timeout)
        finally:
            self._groups.discard(process.pid)
            _send(process.pid, signal.SIGKILL)  # what is left of it, which may hold the pipes
            await process.wait()
            for pipe in pipes:
                await pipe.forwarded.wait()
        if not in_time:
            failure = f"the command took longer than the time limit of {timeout:g} s"
            return Ended(TIMED_OUT, failure, timed_out=True)
        return _ended(process.returncode or 0)


def _ended(returned: int) -> Ended:
    if returned < 0:
        number = -returned
        return Ended(128 + number, f"the command was ended by {signal.Signals(number).name}")
    return Ended(returned, f"the command exited with status {returned}" if returned else None)


async def _wait(process: Process, timeout: float | None) -> bool:
    """Wait until the command has ended; False if it ran out of time and was stopped."""
    try:
        await asyncio.wait_for(process.wait(), timeout)
    except asyncio.TimeoutError:
        _send(process.pid, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE)
        return False
    return True


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # there is nobody left in it
        os.killpg(group, number)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """A pipe for a command's output, whose lines a thread writes on as they come.

    It is not one of asyncio's own: there, a command ends when nobody holds its pipes any more.
    """

    given: int
    """The end that the command writes to."""
    forwarded: asyncio.Event
    """Set when nobody holds the other end."""

    @classmethod
    def open(cls, to: TextIO, prefix: bytes) -> _Pipe:
        """A pipe to a text stream of this process; each line begins with the prefix."""
        read, write = os.pipe()
        loop, forwarded = asyncio.get_running_loop(), asyncio.Event()

        def forward() -> None:
            with os.fdopen(read, "rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    with contextlib.suppress(OSError):  # nobody reads it: the command goes on
                        to.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                        to.buffer.flush()
            loop.call_soon_threadsafe(forwarded.set)

        threading.Thread(target=forward, name="otel-rollout-output", daemon=True).start()
        return cls(write, forwarded)
