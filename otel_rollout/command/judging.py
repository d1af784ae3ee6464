"""A reward from a command of the user's: it reads the trajectory, its last line is the number."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping

from otel_rollout.command.process import Commands, Ended
from otel_rollout.terminal import say
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps

SHELL = "/bin/sh"


async def judge(
    command: str,
    trajectory: Trajectory,
    ended: Ended,
    commands: Commands,
    *,
    variables: Mapping[str, str],
    timeout: float | None,
    prefix: str | None,
) -> float | None:
    """The reward that the command gives the trajectory; None, and a sentence, if it gives none.

    It runs through the shell when the rollout has ended, and without the gateway: its own model
    calls are none of the rollout's. From stdin it reads a line as `--out` has them, which
    `Trajectory.from_dict` takes, with one more field: `history`, the messages of the main history.

    ended: how the agent ended, for the variable OTEL_ROLLOUT_EXIT_STATUS.
    variables: what else it gets beside those of this process.
    """
    history: Json = [*trajectory.messages()]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(dumps({**trajectory.to_dict(), "history": history}).encode() + b"\n")
        stdin.seek(0)
        judged = await commands.run(
            [SHELL, "-c", command],
            {**os.environ, **variables, "OTEL_ROLLOUT_EXIT_STATUS": str(ended.status)},
            timeout=timeout,
            prefix=prefix,
            stdin=stdin,
            stdout=stdout,
        )
        stdout.seek(0)
        output = stdout.read()
    reward = None if judged.failure else number_in(output)
    if reward is None:
        expected = f"expected a finite number as its last line, got {_last_line(output)[:80]!r}"
        say(f"no reward for {trajectory.id}: --reward-command: {judged.failure or expected}")
    return reward


def number_in(output: bytes) -> float | None:
    """The number that the last line of an output is. None: it is none, or not finite."""
    try:
        number = float(_last_line(output))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
