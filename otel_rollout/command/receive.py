"""The verb `receive`: a receiver of spans, until a signal ends it.

The first line of its output has its addresses. SIGTERM and SIGINT end it: what waits is answered,
what is ready is handed over; the journal keeps the rest for the next start.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from otel_rollout.command.argument_types import limits_of
from otel_rollout.command.process import signalled
from otel_rollout.errors import ConfigurationError
from otel_rollout.receive import Limits, TrajectoryReceiver
from otel_rollout.terminal import escaped
from otel_rollout.worker_processes import keep_memory

_PREFIX = "OTEL_ROLLOUT_RECEIVER_"
_LOOK_SECONDS = 1.0


def receive(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    if bool(options.tls_cert) != bool(options.tls_key):
        options.wrong("--tls-cert and --tls-key: expected both, or none")
    receiver = TrajectoryReceiver(
        options.out,
        journal=options.journal,
        to=options.to,
        options=dict(options.option),
        grpc=options.grpc,
        http=options.http,
        rollout_seconds=options.rollout_timeout,
        group_seconds=options.group_timeout,
        token=_token(options),
        tls=(options.tls_cert, options.tls_key) if options.tls_cert else None,
        jobs=options.jobs,
        journal_bytes=options.journal_bytes,
        limits=Limits(**limits_of(_PREFIX, {each.name: int for each in fields(Limits)})),
    )
    keep_memory()
    logging.basicConfig(format="%(asctime)s %(message)s", handlers=[_Escaped(sys.stderr)])
    return asyncio.run(_until_signal(receiver))


class _Escaped(logging.StreamHandler[Any]):
    """Logs texts of others so that they cannot steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def _token(options: argparse.Namespace) -> str | None:
    """The token that clients have to send. ConfigurationError for an empty one."""
    if options.token_file is None:
        token: str | None = options.token
    else:
        token = Path(options.token_file).read_text().strip()
    if token == "":
        raise ConfigurationError("--token, --token-file: the token is empty: name another")
    return token


async def _until_signal(receiver: TrajectoryReceiver) -> int:
    stopped = signalled()
    async with receiver:
        print(f"grpc {receiver.grpc_address} http {receiver.url}", flush=True)
        while not stopped.is_set() and receiver.is_running:
            try:
                await asyncio.wait_for(stopped.wait(), _LOOK_SECONDS)
            except asyncio.TimeoutError:
                continue
    return 0 if stopped.is_set() else 1
