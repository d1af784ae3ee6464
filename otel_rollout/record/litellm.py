"""Hooks for LiteLLM, which asks many providers with an HTTP client of its own.

It also posts whatever else it sends with that client. Only what goes to a path at which models
are asked is a call; it is named by that path, as a client library would, whatever stands before
it in the address. `post` is the whole life of a call: its arguments are the request, its result
the HTTP response.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.calls import (
    Call,
    added_fields,
    asks_for_count,
    current_recorder,
    make,
    make_async,
    recording_rollout,
)
from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.wire import Json, api_of, loads

MODULE = "litellm.llms.custom_httpx.http_handler"
_POSITIONS = ("url", "data", "json", "params", "headers")
"""The arguments of `post` that the sync and the async client have at the same place."""
_BODIES = ("json", "content", "data")


_EMBEDDINGS = "/embeddings"
"""Path of an API that asks a model, but not to generate."""
_before_query = re.compile(r"[^?#]*").match


def _endpoint(url: str) -> str | None:
    """The path at which this address asks a model, such as `/chat/completions`; None: at none."""
    found = _before_query(url)
    path = found[0].removesuffix("/") if found else ""
    api = api_of(path)
    if api is not None:
        return api.path_of(path)
    return _EMBEDDINGS if path.endswith(_EMBEDDINGS) else None


class Post:
    """The arguments of a `post` that asks a model."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        self.path = path
        """The path at which the model is asked, such as `/chat/completions`."""
        self._arguments = arguments

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Post | None:
        """The post that a call with these arguments makes. None: it asks no model."""
        arguments = {**dict(zip(_POSITIONS, args, strict=False)), **kwargs}
        path = _endpoint(str(arguments.get("url")))
        return None if path is None else cls(path, arguments)

    @functools.cached_property
    def json_data(self) -> Any:
        """The body as JSON. None: it is none."""
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

    def extend(self, kwargs: dict[str, Any], fields: Mapping[str, Json]) -> bool:
        """Write the fields into the body among `post`'s keyword arguments; True if they are there.

        A body that stands elsewhere, that is no JSON object, or that is signed stays as it is.
        """
        name, body = self._body()
        headers = self._arguments.get("headers") or {}
        signed = any(str(value).startswith("AWS4-") for value in headers.values())
        if not fields or name not in kwargs or signed or not isinstance(self.json_data, dict):
            return False
        extended = self.json_data = {**self.json_data, **fields}
        if isinstance(body, (str, bytes)):
            text = json.dumps(extended)
            kwargs[name] = text if isinstance(body, str) else text.encode()
        else:
            kwargs[name] = extended
        self._arguments = {**self._arguments, name: kwargs[name]}
        return True

    def request(self, client: Any) -> Any:
        """The request that the handler's `client` (httpx) builds from it, and will send."""
        arguments = self._arguments
        options = {name: arguments.get(name) for name in (*_BODIES, "params", "headers")}
        if isinstance(options["data"], (str, bytes)):
            data = options.pop("data")
            options["content"] = data if options["content"] is None else options["content"]
        return client.build_request("POST", arguments["url"], **options)


@guarded(INCOMPLETE)
def _begin(handler: Any, args: Any, kwargs: Any) -> Call | None:
    """The call that a POST is, unless it belongs to a call that is being made already."""
    post = Post.of(args, kwargs)
    current = current_recorder()
    if post is None or (current is not None and not current.finished):
        return None
    active = recording_rollout()
    if active is None:
        return None
    call = Call(ExchangeRecorder(active, post.path), lambda: post.json_data, gives_response=True)
    # A request that cannot be built will not be sent by LiteLLM either.
    with guarded("LiteLLM's request cannot be built", level=logging.DEBUG):
        added = added_fields(post.path, post.json_data)
        call.recorder.hides_count = post.extend(kwargs, added) and asks_for_count(added)
        request = post.request(handler.client)
        is_json = post.json_data is not None or "json" in request.headers.get("content-type", "")
        body = request.content if is_json else None
        call.recorder.request(body, request.headers, str(request.url))
    return call


def _post(wrapped: Callable[..., Any], handler: Any, args: Any, kwargs: Any) -> Any:
    return make(_begin(handler, args, kwargs), wrapped, args, kwargs)


async def _async_post(wrapped: Callable[..., Any], handler: Any, args: Any, kwargs: Any) -> Any:
    return await make_async(_begin(handler, args, kwargs), wrapped, args, kwargs)


def _post_again(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """The attempt after one that could not connect."""
    recorder = current_recorder()
    if recorder is not None:
        recorder.request(None, {})
    return wrapped(*args, **kwargs)


HOOKS = (
    Hook("HTTPHandler", "post", _post),
    Hook("AsyncHTTPHandler", "post", _async_post),
    Hook("AsyncHTTPHandler", "single_connection_request", _post_again, required=False),
)
