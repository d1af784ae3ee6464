"""The verb `replay`: recorded calls are answered again, to a command or to whoever asks."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from otel_rollout.command.process import Commands, Ended, signalled
from otel_rollout.command.recording import secret_of
from otel_rollout.command.run import NOT_FOUND, without_secrets
from otel_rollout.export import reconstruct_by_rollout
from otel_rollout.gateway import ReplayServer
from otel_rollout.terminal import note, number_of
from otel_rollout.trajectory import Trajectory
from otel_rollout.view import ERRORS_SHOWN, Sources, note_unreadable

_TRAJECTORIES = (
    "this is a file of trajectories: it keeps streams as merged replies, not as their bytes. Give "
    "the spans (`--spans FILE` of `otel-rollout run`, or a collector's file)"
)


def replay(options: argparse.Namespace) -> int:
    """Run the verb; the exit status is the command's own, but never 0 after a difference."""
    if options.command and shutil.which(options.command[0]) is None:
        note(f"otel-rollout: {options.command[0]}: no such command")
        return NOT_FOUND
    sources = Sources(options.sources)
    host, port = options.listen or ("127.0.0.1", 0)
    with _trajectories(sources, options.id) as found:
        server = ReplayServer(
            found,
            host=host,
            port=port,
            upstream=options.upstream,
            api_key=secret_of("--api-key-env", options.api_key_env),
            pace=options.pace,
            ignore=options.ignore,
        )
    status = note_unreadable(sources.errors)
    for sentence in server.unusable[:ERRORS_SHOWN]:
        note(f"not answered: {sentence}")
    if (more := len(server.unusable) - ERRORS_SHOWN) > 0:
        note(f"not answered: {number_of(more, 'more call')}")
    status = max(status, asyncio.run(_serve(server, options)))
    return max(status, _note_end(server))


@contextmanager
def _trajectories(sources: Sources, wanted: str | None) -> Iterator[Iterator[Trajectory]]:
    """The trajectories of which the id, or the trace's, begins with this. None: all."""
    with tempfile.TemporaryDirectory(prefix="otel-rollout-") as folder:
        records = sources.records(of_trajectories=_TRAJECTORIES)
        found = reconstruct_by_rollout(records, Path(folder) / "spans")
        prefix = (wanted or "").lower()
        yield (
            each
            for each in found
            if each.id.startswith(prefix) or (each.trace_id or "").startswith(prefix)
        )


async def _serve(server: ReplayServer, options: argparse.Namespace) -> int:
    """Answer until the command has ended, or a signal ends it; the exit status."""
    commands = Commands()
    async with server:
        if options.command:
            with commands.forwarding():
                return (await _run(server, options, commands)).status
        print(server.url, flush=True)
        await signalled().wait()
    return 0


async def _run(server: ReplayServer, options: argparse.Namespace, commands: Commands) -> Ended:
    environment = without_secrets(os.environ, options.api_key_env, ())
    ended = await commands.run(options.command, environment | server.environment(), stdin=None)
    if ended.failure:
        note(ended.failure)
    return ended


def _note_end(server: ReplayServer) -> int:
    """Print what was asked, and the difference; the exit status."""
    unasked = server.unasked
    asked = server.count - len(unasked)
    note(
        f"{asked} of {number_of(server.count, 'recorded call')} asked again"
        + (f"; not asked: {unasked[0]}{', ...' if len(unasked) > 1 else ''}" if unasked else "")
    )
    if server.difference is None:
        return 0
    width = shutil.get_terminal_size((80, 24)).columns
    note("\n".join(server.difference.lines(width)))
    return 1
