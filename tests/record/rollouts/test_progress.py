"""Progress of many rollouts: what a log file has, and that nothing is written unasked."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from otel_rollout import gather_group, gather_trajectories, rollout
from otel_rollout.record import RolloutProgress
from otel_rollout.record.gathering import progress
from tests.kit.recording import Clients, Recording


class Said:
    """What was written to stderr so far; a line comes often."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    @property
    def text(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text

    async def until(self, pattern: str) -> str:
        """The first line that matches, once it is written."""

        async def found() -> str:
            while True:
                for line in self.text.splitlines():
                    if re.search(pattern, line):
                        return line
                await asyncio.sleep(0.01)

        return await asyncio.wait_for(found(), 60)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Stderr as a log file."""
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.02)
    return Said(capsys)


async def test_a_line_tells_what_runs_longest(
    recording: Recording, clients: Clients, said: Said
) -> None:
    """While some wait: how many run, which of them longest, endings and rewards so far."""
    client, go = clients.asynchronous(clients.serve("hello")), asyncio.Event()

    @rollout
    async def agent(waits: bool) -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        if waits:
            await go.wait()

    @rollout
    async def fails() -> None:
        raise TimeoutError

    runs = [agent(True), agent(False), agent(True), fails()]
    gathering = asyncio.create_task(gather_trajectories(runs, progress="solving"))
    line = await said.until(r"solving: 2/4 .*, running 2, timeout 1, longest")
    assert re.search(r"longest agent#0 \(0:00:\d\d\)$", line)
    go.set()
    await gathering
    last = said.text.splitlines()[-1]
    assert re.match(r"solving: 4/4 rollouts in 0:00:\d\d, [\d.]+/s, timeout 1", last)
    assert "longest" not in last


async def test_nothing_is_written_unasked(recording: Recording, said: Said) -> None:
    """Without `progress` neither a line nor a timer."""

    @rollout
    async def agent() -> None:
        await asyncio.sleep(0.05)

    await gather_group([agent(), agent()])
    assert said.text == ""


async def test_after_its_end_it_is_silent(said: Said) -> None:
    """The timer goes with it, also where an exception ends it."""
    with pytest.raises(LookupError), RolloutProgress(True, None, "rollouts"):
        raise LookupError
    written = said.text
    assert re.fullmatch(r"rollouts: 0 rollouts in 0:00:00, 0/s\n", written)
    await asyncio.sleep(0.1)
    assert said.text == written
