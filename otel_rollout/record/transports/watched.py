"""Hooks that count, for libraries below those that are captured: urllib3 and http.client.

Whatever sends with Python's own `http.client` is seen: urllib too, and libraries on any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_rollout.record.calls import make
from otel_rollout.record.hooks import Hook
from otel_rollout.record.transports.post import model_path, watch


def _counting(library: str) -> Callable[..., Any]:
    """A wrapper for a method whose first arguments are an HTTP method and an address or path."""

    def count(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        method = args[0] if args else kwargs.get("method")
        if method != "POST":
            return wrapped(*args, **kwargs)
        path = model_path(str(args[1] if len(args) > 1 else kwargs.get("url")))
        call = None if path is None else watch(library, path)
        return wrapped(*args, **kwargs) if call is None else make(call, wrapped, args, kwargs)

    return count


URLLIB3_POOL = (Hook("HTTPConnectionPool", "urlopen", _counting("urllib3")),)
URLLIB3_MANAGER = (Hook("PoolManager", "urlopen", _counting("urllib3")),)
HTTP_CLIENT = (Hook("HTTPConnection", "putrequest", _counting("http.client")),)
