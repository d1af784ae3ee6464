"""Scripts that ask OpenAI's client in one way each, and a check of the record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Coroutine
from typing import Any

from otel_rollout.spans.exchange import Exchange
from otel_rollout.testing import WireExchange
from tests.kit.calling import ask_bare, done, read
from tests.kit.comparing import without_null
from tests.kit.recording import Clients

Json = dict[str, Any]
Script = Callable[[Any], Coroutine[Any, Any, Any]]
CHAT = "chat.completions"


def wire_json(body: bytes) -> Any:
    """The JSON of a body, which the server may have compressed."""
    return json.loads(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)


def same(recorded: Any, wire: Any) -> bool:
    """Equal also in the order of members and in what is 1, 1.0 or true."""
    return json.dumps(recorded) == json.dumps(wire)


def check(exchange: Exchange, wire: WireExchange, clients: Clients, reply: Any) -> Any:
    """The exchange is what was on the wire; the reply in unstreamed form comes back."""
    request = json.loads(wire.request)
    assert same(exchange.request(), request)
    assert exchange.status == "complete"
    assert (exchange.status_code, exchange.attempts) == (200, 1)
    path = wire.path.split("?")[0]
    assert path.endswith(exchange.path.split("?")[0])
    if not request.get("stream"):
        assert not exchange.stream
        assert same(exchange.response(), wire_json(wire.response))
        return exchange.response()
    assert exchange.stream
    plain = {k: v for k, v in request.items() if k not in ("stream", "stream_options")}
    expected = ask_bare(clients.serve(reply), exchange.path.split("?")[0], plain)
    if not (request.get("stream_options") or {}).get("include_usage"):
        expected.pop("usage") if "choices" in expected else None
    assert without_null(exchange.response()) == without_null(expected)
    return expected


def call(path: str, **request: Any) -> Script:
    """A way that calls one method of the client, such as `chat.completions.create`."""

    async def script(client: Any) -> Any:
        method = client
        for name in path.split("."):
            method = getattr(method, name)
        result = await done(method(**{"model": "m", **request}))
        if "with_raw_response" in path:
            parsed = result.parse()
            return [result.status_code, await read(parsed) if request.get("stream") else parsed]
        return await read(result) if request.get("stream") else result

    return script


USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}
