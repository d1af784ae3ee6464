"""The verb `gateway`: a gateway in front of a model server, until it is told to stop.

The first line of its output is its address. SIGTERM and SIGINT end it: what passes through is
given up, every rollout ends, and what was recorded is written.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal

from otel_rollout.command.text import say
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.gateway import serve
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.wiring import configure, shutdown

_EXPORTED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def gateway(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    served = serve(
        options.upstream,
        host=options.host,
        port=options.port,
        api_key=_variable(options.api_key_env, "--api-key-env"),
        secret=_variable(options.secret_env, "--secret-env"),
        renderer=options.renderer,
    )
    if not (options.out or options.spans or any(map(os.environ.get, _EXPORTED))):
        say("nothing is written: give --out or --spans, or set OTEL_EXPORTER_OTLP_ENDPOINT")
    configure(
        exporters=[JsonlTrajectoryExporter(options.out)] if options.out else [],
        span_exporters=[JsonLinesSpanExporter(options.spans)] if options.spans else [],
        service_name=None if "OTEL_SERVICE_NAME" in os.environ else "otel-rollout-gateway",
        instrumentor=None,
        request_token_ids=options.request_token_ids,
    )
    gc.collect()
    gc.freeze()  # what is imported is not looked at again: that would hold up every stream
    try:
        asyncio.run(_until_told(served))
    finally:
        flushed = shutdown()
    return 0 if flushed else 1


async def _until_told(served: serve) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with served as gateway:
        print(gateway.url, flush=True)
        await told.wait()


def _variable(name: str | None, option: str) -> str | None:
    """The value of an environment variable: a key on the command line would be in `ps`."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"{option} {name}: this environment variable is not set")
    return value
