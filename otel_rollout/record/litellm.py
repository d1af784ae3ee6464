"""A POST of LiteLLM's own HTTP client, described as the other clients describe a request.

LiteLLM asks many providers not through a client library but with `HTTPHandler.post`, which it also
uses for whatever else it sends. Only what goes to a path at which models are asked is a call; it
is named by that path, as a client library would, whatever stands before it in the address.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from otel_rollout.wire import api_of, loads

_POSITIONS = ("url", "data", "json", "params", "headers")
"""The arguments of `post` that the sync and the async client have at the same place."""
_BODIES = ("json", "content", "data")
_EMBEDDINGS = "/embeddings"
"""Asks a model that does not generate."""
_before_query = re.compile(r"[^?#]*").match


class Post:
    """What is posted; the attributes are those of the OpenAI client's request options."""

    method = "post"
    files = None
    extra_json: Mapping[str, Any] | None = None

    def __init__(self, url: str, arguments: dict[str, Any]) -> None:
        self.url = url
        """The path at which the model is asked, such as `/chat/completions`."""
        self._arguments = arguments

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Post | None:
        """What a call of `post` with these arguments asks a model; None if it asks none."""
        arguments = {**dict(zip(_POSITIONS, args, strict=False)), **kwargs}
        path = _endpoint(str(arguments.get("url")))
        return None if path is None else cls(path, arguments)

    @functools.cached_property
    def json_data(self) -> Any:
        """The body as JSON; None if it is none."""
        _, body = self._body()
        if not isinstance(body, (str, bytes)):
            return body
        try:
            return loads(body)
        except (ValueError, RecursionError):
            return None

    def _body(self) -> tuple[str, Any]:
        given = [(name, self._arguments.get(name)) for name in _BODIES]
        return next((body for body in given if body[1] is not None), ("json", None))

    def extend(self, kwargs: dict[str, Any]) -> None:
        """Write `extra_json` into the body among the keyword arguments of `post`.

        A body that stands elsewhere, or that is signed, is left as it is.
        """
        name, body = self._body()
        headers = self._arguments.get("headers") or {}
        signed = any(str(value).startswith("AWS4-") for value in headers.values())
        if not self.extra_json or name not in kwargs or signed:
            return
        extended = {**self.json_data, **self.extra_json}
        if isinstance(body, (str, bytes)):
            text = json.dumps(extended)
            kwargs[name] = text if isinstance(body, str) else text.encode()
        else:
            kwargs[name] = extended
        self._arguments = {**self._arguments, name: kwargs[name]}

    def request(self, client: Any) -> Any:
        """The request that the handler's `client` (httpx) makes of it, and will send."""
        arguments = self._arguments
        options = {name: arguments.get(name) for name in (*_BODIES, "params", "headers")}
        if isinstance(options["data"], (str, bytes)):
            data = options.pop("data")
            options["content"] = data if options["content"] is None else options["content"]
        return client.build_request("POST", arguments["url"], **options)


def _endpoint(url: str) -> str | None:
    """The path at which a model is asked, at the end of an address; None if it asks none."""
    found = _before_query(url)
    path = found[0].removesuffix("/") if found else ""
    api = api_of(path)
    if api is not None:
        return api.path_of(path)
    return _EMBEDDINGS if path.endswith(_EMBEDDINGS) else None
