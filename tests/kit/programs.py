"""Python programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from otel_rollout.testing import ModelServer

ROOT = Path(__file__).parents[2]


def python(
    *arguments: str, server: ModelServer | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """What a Python program prints; it must succeed."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
    variables |= {"PYTHONPATH": str(ROOT), **(environment or {})}
    if server is not None:
        variables |= {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none-needed"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
