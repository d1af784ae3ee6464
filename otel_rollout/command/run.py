"""The verb `run`: a command of any language is run as a rollout, with a gateway for its calls."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import secrets
import shutil
import tempfile
import uuid
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from otel_rollout.command.process import Commands, Ended
from otel_rollout.command.recording import gateway_options, note_places, recording, secret_of
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.gateway import Gateway, serve
from otel_rollout.record import current_rollout, rollout
from otel_rollout.terminal import line_width, note
from otel_rollout.trajectory import Trajectory
from otel_rollout.view import trajectory_lines
from otel_rollout.wire import Json, dumps

NOT_FOUND = 127
"""Exit status of a command that does not exist, as a shell's."""
NO_CALL = "no model call came through the gateway"


_is_header = re.compile(r"OTEL_(EXPORTER_OTLP(_\w+)?|ROLLOUT_TRAIN)_HEADERS").fullmatch


class CommandError(Exception):
    """The command failed; the message names its exit status, or the signal that ended it."""


class CommandTimeoutError(TimeoutError):
    """The command took longer than `--timeout`."""


class NoModelCallError(Exception):
    """The gateway saw no model call of the command: there is nothing to train on."""


class CommandStopped(BaseException):
    """The command failed after a signal that asked this process to end: a cancelled rollout."""


def run(options: argparse.Namespace) -> int:
    """Run the verb; the exit status is the command's own, of several the worst."""
    if shutil.which(options.command[0]) is None:
        note(f"otel-rollout: {options.command[0]}: no such command")
        return NOT_FOUND
    key = secret_of("--api-key-env", options.api_key_env)
    out = JsonlTrajectoryExporter(options.out) if options.out else None
    # Nobody but our tokens is let in: the agent begins no rollouts of its own.
    secret = os.environ.get("OTEL_ROLLOUT_SECRET") or secrets.token_urlsafe(32)
    served = serve(options.upstream, api_key=key, secret=secret, **gateway_options(options))
    with recording(
        spans=options.spans,
        token_ids=options.request_token_ids,
        policy_model=options.policy_model,
        logprobs_mode=options.logprobs_mode,
    ) as recorded:
        status = asyncio.run(_run(options, served, out))
    return max(status, note_places(recorded, out=options.out, spans=options.spans))


async def _run(
    options: argparse.Namespace, served: serve, out: JsonlTrajectoryExporter | None
) -> int:
    several = options.samples > 1
    run = uuid.uuid4().hex[:12] if several else None
    group = options.group or (uuid.uuid4().hex if several else None), run
    room, commands = asyncio.Semaphore(options.parallel), Commands()
    with commands.forwarding():
        async with served as gateway:
            samples = _Samples(options, out, group, gateway, commands)

            async def one(index: int) -> int | None:
                async with room:
                    return None if commands.signals else await samples.run(index)

            statuses = await asyncio.gather(*map(one, range(options.samples)))
    if None in statuses:
        note(f"{commands.signals[0].name}: {statuses.count(None)} of {len(statuses)} were not run")
    return max((status for status in statuses if status is not None), default=1)


@dataclass(frozen=True, slots=True)
class _Samples:
    """The runs of one command, each of which is a rollout."""

    options: argparse.Namespace
    out: JsonlTrajectoryExporter | None
    group: tuple[str | None, str | None]
    """The id of their group, and which run of it they are."""
    gateway: Gateway
    commands: Commands

    async def run(self, index: int) -> int:
        """Run the command once, judge it, keep it and show it; the exit status."""
        trajectory, ended = await self._rollout(index)
        if trajectory.completions and not self.commands.signals:
            await self._judge(trajectory, ended, index)
        await asyncio.to_thread(self._keep, trajectory)  # while other samples go on
        return ended.status if trajectory.completions else ended.status or 1

    def _keep(self, trajectory: Trajectory) -> None:
        if self.out is not None:
            self.out.export([trajectory])
        width = line_width()
        note("\n".join(trajectory_lines(trajectory, width=width)))

    async def _rollout(self, index: int) -> tuple[Trajectory, Ended]:
        """Run the command as a rollout; its trajectory, sealed, and how the command ended."""
        options, ended = self.options, Ended(1)
        scope = rollout(
            options.name or os.path.basename(options.command[0]),
            task_id=options.task,
            group_id=self.group[0],
            group_run=self.group[1],
            sample_index=index,
            group_size=options.samples if options.samples > 1 else None,
            policy_version=options.policy_version,
            metadata=dict(options.metadata),
        )
        try:
            with scope as trajectory:
                variables = self.gateway.environment() | self._variables(trajectory, index)
                ended = await self._command(variables, index)
                if not trajectory.completions:
                    active = current_rollout()
                    note(no_call_hint(variables, active.uncaptured if active else {}))
                self._check(trajectory, ended)
        except (CommandError, CommandTimeoutError, CommandStopped, NoModelCallError):
            pass  # the trajectory has the error
        return trajectory, ended

    def _variables(self, trajectory: Trajectory, index: int) -> dict[str, str]:
        """The variables that name the rollout."""
        own = {"OTEL_ROLLOUT_ID": trajectory.id, "OTEL_ROLLOUT_SAMPLE": str(index)}
        if self.options.task is not None:
            own["OTEL_ROLLOUT_TASK"] = self.options.task
        return own

    async def _command(self, variables: dict[str, str], index: int) -> Ended:
        environment = without_secrets(os.environ, self.options.api_key_env, self.options.pass_env)
        return await self.commands.run(
            self.options.command,
            environment | variables,
            timeout=self.options.timeout,
            prefix=self._prefix(index),
            stdin=None if self.options.samples == 1 else DEVNULL,
        )

    def _prefix(self, index: int) -> str | None:
        several = min(self.options.parallel, self.options.samples) > 1
        return f"[{index}] " if several else None

    async def _judge(self, trajectory: Trajectory, ended: Ended, index: int) -> None:
        """Set the reward that `--reward-command` gives."""
        command = self.options.reward_command
        if command is None:
            return
        reward = await judge(
            command,
            trajectory,
            ended,
            self.commands,
            variables=self._variables(trajectory, index),
            timeout=self.options.timeout,
            prefix=self._prefix(index),
        )
        if reward is not None:
            trajectory.reward = reward

    def _check(self, trajectory: Trajectory, ended: Ended) -> None:
        """Raise what ends the rollout, unless all went well."""
        if ended.timed_out:
            raise CommandTimeoutError(ended.failure)
        if ended.failure is not None and self.commands.signals:
            raise CommandStopped(f"{self.commands.signals[0].name}: {ended.failure}")
        if ended.failure is not None:
            raise CommandError(ended.failure)
        if not trajectory.completions:
            raise NoModelCallError(NO_CALL)


def without_secrets(
    environment: Mapping[str, str], key_name: str | None, passed: Sequence[str]
) -> dict[str, str]:
    """An environment without what is the gateway's and the harness's alone.

    That is the model server's key, the secret that rewards rollouts, and the headers by which spans
    are sent. passed: variables that are kept all the same.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in passed or not (name in (key_name, "OTEL_ROLLOUT_SECRET") or _is_header(name))
    }


def no_call_hint(variables: Mapping[str, str], uncaptured: Mapping[tuple[str, str], int]) -> str:
    """Sentences for a command that made no call: what it was given, and what to check.

    uncaptured: how many requests came to which paths all the same.
    """
    others_came = (
        f"  {count} {'requests' if count > 1 else 'request'} to {path} went through {by} instead"
        for (by, path), count in uncaptured.items()
    )
    urls = (f"  {name}={_hidden(variables[name])}" for name in sorted(variables) if "URL" in name)
    others = ", ".join(name for name in sorted(variables) if "URL" not in name)
    return "\n".join(
        (
            f"{NO_CALL}: there is nothing to train on. The command was given",
            *urls,
            f"  {others}",
            *others_came,
            "Does it read them? Some agents have their address only from their own configuration,",
            "are logged in to another service, or send all calls through a proxy. In a container",
            "127.0.0.1 is another machine: see docs/gateway.md.",
        )
    )


def _hidden(url: str) -> str:
    """A base URL without its token, which is a password."""
    return re.sub(r"/r/[^/]+", "/r/...", url)


# --- a reward from a command


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
    `Trajectory.from_json` takes, with one more field: `history`, the messages of the main history.

    ended: how the agent ended, for the variable OTEL_ROLLOUT_EXIT_STATUS.
    variables: what else it gets beside those of this process.
    """
    history: Json = [*trajectory.messages()]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(f'{trajectory.to_json()[:-1]},"history":{dumps(history)}}}\n'.encode())
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
        note(f"no reward for {trajectory.id}: --reward-command: {judged.failure or expected}")
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
