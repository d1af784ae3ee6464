"""Gateways in this process, and the command `otel-rollout gateway` in one of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any

from otel_rollout.testing import ModelServer

SECRET = "s3cret-of-the-harness"
"""The secret of each gateway here that is given no other."""
HARNESS = {"authorization": f"Bearer {SECRET}"}
"""The header that the control routes ask for."""
Serve = Callable[..., Any]
"""Serves a gateway until the test ends: `await serve(upstream, **options)`."""
_PROGRAM = "import sys; from otel_rollout.command import main; sys.exit(main(sys.argv[1:]))"


async def command(server: ModelServer, *options: str, **environment: str) -> tuple[Process, str]:
    """The command in front of this server, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", _PROGRAM, "gateway"),
        *("--upstream", server.base_url, "--port", "0", *options),
        stdout=PIPE,
        stderr=PIPE,
        env={
            **os.environ,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_ROLLOUT_SECRET": SECRET,
            **environment,
        },
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()
