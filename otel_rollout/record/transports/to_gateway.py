"""Requests that are sent to a gateway of ours: it records them, so a client's hook does not.

They are known by the token of a rollout, in their path or in place of an API key, or by their
address if this process serves the gateway. A token is as good as a key, so what is recorded of an
address is recorded without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.record.current import current_rollout
from otel_rollout.record.other_spans import here_and_now
from otel_rollout.record.privacy.secrets import TOKEN, token_in_path
from otel_rollout.record.state import process_state

KEY_PREFIX = "or-"
"""Prefix of a token that stands for an API key."""
_is_key = re.compile(f"(?:bearer +)?{KEY_PREFIX}{TOKEN}", re.I).fullmatch
_KEYS = frozenset(("authorization", "x-api-key", "api-key", "x-goog-api-key"))
"""Headers that an API key is sent in."""


def is_for_gateway(address: str, headers: Mapping[str, Any] | None = None) -> bool:
    """True if a request to this path or address, with these headers, is for a gateway."""
    if "/r/" in address and token_in_path.search(address) is not None:
        return True
    if process_state.gateways and address.startswith(
        tuple(f"{url}/" for url in process_state.gateways)
    ):
        return True
    for name, value in (headers or {}).items():
        if isinstance(value, str) and KEY_PREFIX in value and name.lower() in _KEYS:
            return _is_key(value.strip()) is not None
    return False


def note_for_gateway() -> None:
    """Count a call that a gateway records, in the rollout that is named to it, on the one here."""
    active = current_rollout()
    if active is not None:
        with active.lock:
            count = active.further.get(sc.ROLLOUT_GATEWAY_COUNT, 0)
            active.further[sc.ROLLOUT_GATEWAY_COUNT] = count + 1
        active.others.called(*here_and_now())


def is_gateways_client(client: Any, address: str) -> bool:
    """True if an OpenAI client, or one that is made alike, sends its requests to a gateway."""
    key = getattr(client, "api_key", None) or getattr(client, "auth_token", None)
    return is_for_gateway(address, {"authorization": key})
