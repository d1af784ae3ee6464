"""The verb `gateway`: a gateway in front of a model server, until a signal ends it.

The first line of its output is its address; where it made a secret, the second is the header that
its control routes ask for. SIGTERM and SIGINT end it: open calls are closed, every rollout ends,
and what was recorded is written.

With `--workers` the calls are taken by further processes, which share the port. The first one holds
the rollouts that are begun over HTTP, and replaces a worker that dies: after growing pauses those
that die before they serve, and where none has ever served, it ends. The spans of a rollout come
from several processes, and `rebuild` joins them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from otel_rollout.command.process import signalled
from otel_rollout.command.recording import (
    Recorded,
    endpoint,
    gateway_options,
    note_places,
    recording,
    secret_of,
)
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.gateway import listening_socket, serve
from otel_rollout.record import rollout_secret
from otel_rollout.terminal import note

_BACKLOG = 2048
"""Connections that wait for a worker, as uvicorn has it."""
_LOOK_SECONDS = 0.2
"""Time between two looks at whether a worker died."""
_LONGEST_PAUSE = 10.0
"""Seconds until a worker is replaced that ended before it served, at most."""
_TRIES = 5
"""Workers that end before any has served; then there are no more."""
_WORKERS_IDLE_SECONDS = 60.0
"""Seconds without a call after which a worker ends its part of a rollout, which it then sends."""


def gateway(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    secret = secret_of("--secret-env", options.secret_env)
    if options.workers == 1:
        served = _served(options, secret)
        with _recording(options) as recorded:
            asyncio.run(_until_signal(served))
        return note_places(recorded, out=options.out, spans=options.spans)
    if options.out or not (options.spans or endpoint()):
        options.wrong(
            "--workers: the calls of a rollout are in several processes, so they need --spans, or "
            "OTLP, for `otel-rollout rebuild`; expected no --out"
        )
    _served(options, secret)  # what is wrong with the options is an error here
    made = None if secret or rollout_secret() else secrets.token_urlsafe(32)
    with (
        _recording(options) as recorded,
        listening_socket(options.host, options.port) as shared,
        tempfile.NamedTemporaryFile(buffering=0) as named,
        open(named.name, "ab", buffering=0) as versions,
    ):
        local = {"host": "127.0.0.1", "port": 0, "versions": versions}
        holder = _served(options, secret or made, **local)
        workers = _Workers(options, secret or made, shared, named.name)
        status = asyncio.run(_hold(holder, workers, made))
    return max(status, note_places(recorded, spans=options.spans))


def _served(options: argparse.Namespace, secret: str | None, **more: Any) -> serve:
    where = {"port": options.port, **gateway_options(options), **more}
    api_key = secret_of("--api-key-env", options.api_key_env)
    return serve(options.upstream, api_key=api_key, secret=secret, **where)


def _recording(options: argparse.Namespace) -> AbstractContextManager[Recorded]:
    return recording(
        exporters=[JsonlTrajectoryExporter(options.out)] if options.out else [],
        spans=options.spans,
        token_ids=options.request_token_ids,
        policy_model=options.policy_model,
        logprobs_mode=options.logprobs_mode,
    )


async def _until_signal(served: serve) -> None:
    stopped = signalled()
    async with served as gateway:
        _print(gateway.url, gateway.made_secret)
        await stopped.wait()


def _print(url: str, made_secret: str | None) -> None:
    print(url, flush=True)
    if made_secret is not None:
        print(f"Authorization: Bearer {made_secret}", flush=True)
        note(
            "/rollouts asks for this header, which agents must not have. To choose the secret, "
            "set OTEL_ROLLOUT_SECRET, or name another variable with --secret-env"
        )


# --- several processes


@dataclass
class _Workers:
    """The processes that take the calls."""

    options: argparse.Namespace
    secret: str | None
    shared: socket.socket
    """Where all of them listen."""
    versions: str
    """Name of the file that tells them the policy versions."""

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Any, Any] = {}
        """Each process with the event that it sets when it serves."""
        self._has_served = False
        """True if any has."""
        self._in_vain = 0
        """Workers that ended before they served, in a row."""
        self._not_before = 0.0
        self._reading, self._open = self._context.Pipe(duplex=False)
        """A pipe that closes when this process ends, or has closed it: then workers end."""
        given = {name: value for name, value in vars(self.options).items() if name != "wrong"}
        self.options = argparse.Namespace(**given)  # the parser's own cannot be sent

    def keep(self, holder: str) -> None:
        """Start those that are missing. holder: the address of what holds the rollouts."""
        now = time.monotonic()
        self._has_served |= any(serves.is_set() for serves in self._running.values())
        for process in [each for each in self._running if not each.is_alive()]:
            self._in_vain = 0 if self._running.pop(process).is_set() else self._in_vain + 1
            pause = min(_LOOK_SECONDS * 2**self._in_vain, _LONGEST_PAUSE) if self._in_vain else 0.0
            self._not_before = now + pause
            after = f" in {pause:g} seconds" if pause else ""
            then = "none serves" if self.are_hopeless else f"another one takes its place{after}"
            note(f"worker {process.pid} ended ({process.exitcode}): {then}")
        while len(self._running) < self.options.workers and now >= self._not_before:
            serves = self._context.Event()
            places = self.shared, holder, self.versions
            arguments = self.options, self.secret, *places, self._reading, serves
            process = self._context.Process(target=_work, args=arguments)
            process.start()
            self._running[process] = serves

    @property
    def are_hopeless(self) -> bool:
        """True if none has ever served, and enough have tried."""
        return not self._has_served and self._in_vain >= _TRIES

    def stop(self) -> int:
        """End them, and wait until all they recorded is written; the highest status."""
        self._open.close()
        for process in self._running:
            process.join()
        return max((abs(process.exitcode) for process in self._running), default=0)


async def _hold(holder: serve, workers: _Workers, made: str | None) -> int:
    """Hold the rollouts, and keep the workers, until a signal comes; the highest status."""
    stopped = signalled()
    host, port = workers.shared.getsockname()[:2]
    async with holder as gateway:
        workers.shared.listen(_BACKLOG)  # who connects now waits for the first worker
        workers.keep(gateway.url)
        _print(f"http://{f'[{host}]' if ':' in host else host}:{port}", made)
        while not stopped.is_set() and not workers.are_hopeless:
            await asyncio.sleep(_LOOK_SECONDS)
            workers.keep(gateway.url)
        if workers.are_hopeless:
            note("gateway: no worker could serve: see their errors above")
        return max(workers.are_hopeless, await asyncio.to_thread(workers.stop))


def _work(
    options: argparse.Namespace,
    secret: str | None,
    shared: socket.socket,
    holder: str,
    versions: str,
    open_while: Connection,
    serves: Any,
) -> None:
    """What a worker does until the first process closes a pipe, or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process gets them too
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("OTEL_ROLLOUT_GATEWAY_IDLE_SECONDS", str(_WORKERS_IDLE_SECONDS))
    with _recording(options) as recorded, open(versions, "rb") as read:
        served = _served(options, secret, listening=shared, holder=holder, versions=read)
        asyncio.run(_until_closed(served, open_while, serves))
    raise SystemExit(not recorded.is_whole)


async def _until_closed(served: serve, open_while: Connection, serves: Any) -> None:
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(open_while.fileno(), closed.set)
    async with served:
        serves.set()
        await closed.wait()
