"""A gateway of this process: calls of the programs that a rollout starts are calls of the rollout.

It is started, in a thread of its own, when the first rollout asks for it, and serves until
`shutdown`. The programs have its address from the environment that they are started with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from otel_rollout.errors import NoActiveRolloutError
from otel_rollout.gateway.serving import Gateway, serve
from otel_rollout.record import BASE_URLS, current_rollout

_OPENAI = "https://api.openai.com/v1"
"""The server that OpenAI's client asks where nothing names another one."""
_Where = tuple[int, str, str | None]
"""Process, address of the model server, its key."""
_serving: dict[_Where, tuple[serve, Gateway]] = {}
_lock = threading.Lock()


@contextmanager
def around(upstream: str | None = None) -> Iterator[Gateway]:
    """Capture the model calls of programs that are started in the block, in the current rollout.

        with rollout("agent"), around():
            subprocess.run(["./agent", task])

    `rollout(..., gateway=True)` does so for the whole of a rollout.

    upstream: address of the model server. None (default): the one that this process would ask, by
        the first of OPENAI_BASE_URL, OPENAI_API_BASE, LLM_BASE_URL, ANTHROPIC_BASE_URL,
        ANTHROPIC_API_BASE and GOOGLE_GEMINI_BASE_URL that is set, else OpenAI's. Its key is that of
        the environment, which the programs do not get.

    Each process that `subprocess`, `asyncio` or `multiprocessing` starts, and those that it starts,
    have the variables of `Gateway.environment`. NoActiveRolloutError outside a rollout;
    ConfigurationError for a wrong address, and without the extra `gateway`.
    """
    active = current_rollout()
    if active is None:
        raise NoActiveRolloutError(
            "gateway.around(): no rollout is current: enter it inside `with rollout(...)`, or a "
            "function under @rollout"
        )
    gateway, before = gateway_here(upstream), active.gateway
    active.gateway = gateway
    try:
        yield gateway
    finally:
        active.gateway = before


def gateway_here(upstream: str | None = None) -> Gateway:
    """The gateway of this process in front of a model server; see `around`."""
    address, key = _model_server(upstream)
    where = os.getpid(), address, key
    with _lock:
        if where not in _serving:
            server = serve(address, api_key=key)
            _serving[where] = server, server.__enter__()
        return _serving[where][1]


def close_gateways() -> None:
    """Stop the gateways of this process. Those of a parent, which a fork copied, are its own."""
    with _lock:
        own = [where for where in _serving if where[0] == os.getpid()]
        closing = [_serving.pop(where)[0] for where in own]
    for server in closing:
        server.__exit__()


def _model_server(upstream: str | None) -> tuple[str, str | None]:
    """The address of the model server, and its key."""
    named = [(os.environ[url], key) for url, key in BASE_URLS.items() if os.environ.get(url)]
    address, name = (upstream, "OPENAI_API_KEY") if upstream or not named else named[0]
    return address or _OPENAI, os.environ.get(name) or None
