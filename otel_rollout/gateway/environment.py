"""Environment variables that point a program to a gateway."""

from __future__ import annotations

import os

from otel_rollout.gateway.tokens import Tokens
from otel_rollout.record import KEY_PREFIX, ActiveRollout, Carried, headers_of

_NEAR = ("127.0.0.1", "localhost")


def token_of(tokens: Tokens, active: ActiveRollout) -> str:
    """The token of a rollout that runs in this process."""
    return tokens.token_of(Carried.of(active), is_own=True)


def environment_of(tokens: Tokens, active: ActiveRollout, url: str) -> dict[str, str]:
    """The variables for a program whose model calls belong to this rollout.

    url: the address at which the program reaches the gateway.
    """
    token = token_of(tokens, active)
    root, key = f"{url}/r/{token}", KEY_PREFIX + token
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "OTEL_ROLLOUT_ID": active.id,
        **headers_of(active, environ=True),
        **_no_proxy(),
    }


def _no_proxy() -> dict[str, str]:
    """`NO_PROXY` with this machine: a proxy of the network cannot reach the gateway."""
    existing = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    hosts = [host.strip() for host in existing.split(",") if host.strip()]
    every = ",".join(dict.fromkeys((*hosts, *_NEAR)))
    return {"NO_PROXY": every, "no_proxy": every}
