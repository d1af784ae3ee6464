"""The verb `gateway`: a gateway in front of a model server, until a signal ends it.

The first line of its output is its address; where it made a secret, the second is the header that
its control routes ask for. SIGTERM and SIGINT end it: open calls are closed, every rollout ends,
and what was recorded is written.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from otel_rollout.command.recording import gateway_options, note_places, recording, secret_of
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.gateway import serve
from otel_rollout.terminal import note


def gateway(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    served = serve(
        options.upstream,
        port=options.port,
        api_key=secret_of("--api-key-env", options.api_key_env),
        secret=secret_of("--secret-env", options.secret_env),
        **gateway_options(options),
    )
    with recording(
        exporters=[JsonlTrajectoryExporter(options.out)] if options.out else [],
        spans=options.spans,
        token_ids=options.request_token_ids,
        policy_model=options.policy_model,
    ) as recorded:
        asyncio.run(_until_signal(served))
    return note_places(recorded, out=options.out, spans=options.spans)


async def _until_signal(served: serve) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with served as gateway:
        print(gateway.url, flush=True)
        if gateway.made_secret is not None:
            print(f"Authorization: Bearer {gateway.made_secret}", flush=True)
            note(
                "/rollouts asks for this header, which agents must not have. To choose the secret, "
                "set OTEL_ROLLOUT_SECRET, or name another variable with --secret-env"
            )
        await stopped.wait()
