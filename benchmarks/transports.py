"""The cost of the watch: what a request that asks no model pays in a rollout, for each library.

    python benchmarks/transports.py [--requests 5000]

Each method that is hooked is called with a request as its library makes it; the method itself is
replaced by one that does nothing, so what is timed is the wrapper alone: the time of a call with
the hook less that of one without. The best of 15 rounds counts. Libraries that are not installed
are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import otel_rollout
from otel_rollout import rollout
from otel_rollout.record.transports.capture import TRANSPORTS

URL = "https://api.example.com/v1/projects/a-project/items/0123456789abcdef?page=2&size=100"


def _of_httpx(module: Any, method: str) -> tuple[Any, ...]:
    return (module.Request(method, URL),)


def _prepared(_: Any, method: str) -> tuple[Any, ...]:
    return (SimpleNamespace(method=method, url=URL),)


def _named(_: Any, method: str) -> tuple[Any, ...]:
    return (method, URL)


ARGUMENTS: dict[str, Callable[[Any, str], tuple[Any, ...]]] = {
    "httpx": _of_httpx,
    "httpx2": _of_httpx,
    "aiohttp.client": _named,
    "requests.sessions": _prepared,
    "botocore.httpsession": _prepared,
    "urllib3.poolmanager": _named,
    "urllib3.connectionpool": _named,
    "http.client": _named,
}
"""What a method is called with: (the module, the HTTP method) to its arguments."""


logging.getLogger("otel_rollout").setLevel("ERROR")  # no rollout here has a model call


def nothing(*args: object) -> None:
    """A method that sends nothing."""


async def nothing_async(*args: object) -> None:
    """A method that sends nothing, as a coroutine."""


def timed(call: Callable[..., Any], args: tuple[Any, ...], count: int, *, is_async: bool) -> float:
    """CPU seconds per call: the best of 15 rounds."""

    async def loop() -> float:
        start = time.process_time()
        for _ in range(count):
            await call(*args)
        return time.process_time() - start

    def rounds() -> float:
        if is_async:
            return asyncio.run(loop())
        start = time.process_time()
        for _ in range(count):
            call(*args)
        return time.process_time() - start

    return min(rounds() for _ in range(15)) / count


def cost(name: str, method: str, hook: Any, count: int) -> float:
    """Seconds that the wrapper of one method adds to a request."""
    module = importlib.import_module(name)
    owner = getattr(module, hook.owner)
    is_async = "Async" in hook.owner or name.startswith("aiohttp")
    own = type("Own", (), {hook.method: nothing_async if is_async else nothing})()
    args = ARGUMENTS[name](module, method)
    original = vars(owner)[hook.method]
    setattr(owner, hook.method, vars(type(own))[hook.method])
    try:
        otel_rollout.configure(exporters=[], instrumentor=None)
        wrapped = vars(owner)[hook.method].__get__(own, type(own))
        with rollout("bench"):
            with_hook = timed(wrapped, args, count, is_async=is_async)
            without = timed(getattr(own, hook.method), args, count, is_async=is_async)
        otel_rollout.shutdown()
    finally:
        setattr(owner, hook.method, original)
    return with_hook - without


def main() -> None:
    """Print a row for each method that is hooked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=5_000)
    count = parser.parse_args().requests
    print(f"{count} requests; microseconds that the wrapper adds to each, in a rollout")
    print(f"{'':<45} {'GET':>6} {'POST':>6}")
    for name, hooks in TRANSPORTS.items():
        for hook in hooks if name in ARGUMENTS else ():
            try:
                costs = [cost(name, method, hook, count) for method in ("GET", "POST")]
            except ImportError:
                continue
            row = f"{name}.{hook.owner}.{hook.method}"
            print(f"{row:<45}", *(f"{each * 1e6:>6.2f}" for each in costs), flush=True)


if __name__ == "__main__":
    main()
