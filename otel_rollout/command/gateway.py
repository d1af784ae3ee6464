"""The verb `gateway`: a gateway in front of a model server, until a signal ends it.

The first line of its output is its address. SIGTERM and SIGINT end it: open calls are
closed, every rollout ends, and what was recorded is written.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal

from otel_rollout.command.recording import recording, say_where
from otel_rollout.command.recording_options import gateway_options
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.gateway import serve


def gateway(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    served = serve(
        options.upstream,
        port=options.port,
        api_key=_variable(options.api_key_env, "--api-key-env"),
        secret=_variable(options.secret_env, "--secret-env"),
        **gateway_options(options),
    )
    with recording(
        exporters=[JsonlTrajectoryExporter(options.out)] if options.out else [],
        spans=options.spans,
        token_ids=options.request_token_ids,
        policy_model=options.policy_model,
    ) as recorded:
        gc.collect()
        gc.freeze()  # collections skip what is imported: they would delay every stream
        asyncio.run(_until_signal(served))
    return say_where(recorded, out=options.out, spans=options.spans)


async def _until_signal(served: serve) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with served as gateway:
        print(gateway.url, flush=True)
        await stopped.wait()


def _variable(name: str | None, option: str) -> str | None:
    """The value of an environment variable: a key on the command line would be in `ps`."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"{option} {name}: this environment variable is not set")
    return value
