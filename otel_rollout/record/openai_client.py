"""Hooks for the OpenAI client, and for those that one generator makes alike.

They are on the base class of the clients (`openai._base_client`, and the same module of the other
libraries), so every client has them, also those made before and those of user subclasses.
`request` is the life of a call, `_build_request` shows the body of each attempt exactly as it is
sent, `_process_response` the HTTP response: read, or about to be streamed. Outside a rollout
nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from otel_rollout.record.added_fields import NOTHING, added_fields
from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.calls import (
    UNRECORDED,
    ClientCall,
    Unrecorded,
    current_recorder,
    make,
    make_async,
    received,
    recording_rollout,
    text_of,
)
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.hooks import Hook
from otel_rollout.record.transports.to_gateway import is_gateways_client, note_for_gateway
from otel_rollout.wire import retrieval_of

MODULE = "openai._base_client"
ALIKE = (
    "anthropic._base_client",
    "cerebras.cloud.sdk._base_client",
    "groq._base_client",
    "together._base_client",
)
"""The same classes and methods in libraries that are not needed; calls of one that is imported
are captured."""


@guarded("a model call is not captured")
def _begin(
    client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ClientCall | Unrecorded | None:
    """The call that `request` makes. None: nobody records it; `UNRECORDED`: a gateway does."""
    address = str(getattr(client, "base_url", ""))
    if is_gateways_client(client, address):
        note_for_gateway()
        return UNRECORDED
    active = recording_rollout()
    if active is None:
        return None
    options: Any = kwargs["options"] if "options" in kwargs else args[1]
    path = str(options.url)
    method = str(options.method).lower()
    # The reply to a request in the background has to be asked for.
    if method != "post" and not (method == "get" and retrieval_of(path)):
        return None
    body, given = options.json_data, getattr(options, "extra_json", None)
    added = NOTHING
    if isinstance(body, dict):
        added = added_fields(path, {**body, **(given or {})}, address)
    if added.fields:
        options.extra_json = {**(given or {}), **added.fields}

    def plain() -> tuple[Any, Any]:
        options.extra_json = given
        return args, kwargs

    recorder = ExchangeRecorder(active, path)
    if added is not NOTHING:
        recorder.asks_for(added)
    return ClientCall(recorder, partial(_asked, options), added, plain)


def _asked(options: Any) -> object:
    body, extra = options.json_data, getattr(options, "extra_json", None)
    return {**body, **extra} if isinstance(body, dict) and isinstance(extra, dict) else body


def _request(wrapped: Callable[..., Any], client: Any, args: Any, kwargs: Any) -> Any:
    return make(_begin(client, args, kwargs), wrapped, args, kwargs)


async def _async_request(wrapped: Callable[..., Any], client: Any, args: Any, kwargs: Any) -> Any:
    return await make_async(_begin(client, args, kwargs), wrapped, args, kwargs)


def _build_request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    request = wrapped(*args, **kwargs)
    recorder = current_recorder()
    if recorder is not None:
        _attempt(recorder, args[0] if args else kwargs.get("options"), request)
    return request


@guarded(INCOMPLETE)
def _attempt(recorder: ExchangeRecorder, options: Any, request: Any) -> None:
    is_json = options.json_data is not None or "json" in request.headers.get("content-type", "")
    # A file that is uploaded has no JSON, and its bytes are no conversation.
    body = request.content if is_json and not options.files else None
    recorder.request(body, request.headers, str(request.url))


def _process_response(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    recorder = current_recorder()
    response = kwargs.get("response")
    if recorder is not None and response.is_success:  # else another attempt follows, or it raises
        received(recorder, response)
    return wrapped(*args, **kwargs)


def _should_retry(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    recorder = current_recorder()
    if recorder is not None and args:
        _failed(recorder, args[0])
    return wrapped(*args, **kwargs)


@guarded(INCOMPLETE)
def _failed(recorder: ExchangeRecorder, response: Any) -> None:
    headers = getattr(response, "headers", None)
    recorder.attempt_failed(getattr(response, "status_code", None), headers, text_of(response))


HOOKS = (
    Hook("SyncAPIClient", "request", _request),
    Hook("AsyncAPIClient", "request", _async_request),
    Hook("BaseClient", "_build_request", _build_request),
    Hook("BaseClient", "_should_retry", _should_retry, required=False),
    Hook("SyncAPIClient", "_process_response", _process_response),
    Hook("AsyncAPIClient", "_process_response", _process_response),
)
