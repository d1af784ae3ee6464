"""A POST to a model's path as an HTTP library has it: each library's module has a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.wire import asks_a_model

_BINDING = frozenset(("signature", "digest", "content-digest", "content-md5"))
"""Headers, in lower case, that bind a request to its body."""


class ModelPost:
    """By default a request, which is the first argument of the library's method that sends it."""

    library: str
    """Name of the library."""
    hides_count = True
    """True if the count of tokens that is asked for on behalf of the recording can be kept from
    who reads a stream. False: streams are not asked for it."""

    def __init__(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        """Arguments by position of the library's method."""
        self.kwargs = kwargs
        """Arguments by name of that method."""
        self.request = self.request_in(args, kwargs)
        self.url = str(self.request.url)
        """The address that it goes to."""
        self.headers: Mapping[str, Any] = self.request.headers or {}

    @staticmethod
    def request_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The request that is an argument of the library's method. None: there is none."""
        return args[0] if args else kwargs.get("request")

    @classmethod
    def path(cls, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The path, without its query, if the method is asked for a POST to a model; else None."""
        request = cls.request_in(args, kwargs)
        if getattr(request, "method", None) not in ("POST", "post"):
            return None
        return model_path(str(request.url))

    @property
    def body(self) -> bytes | None:
        """The body as it will be sent. None: not known before it is."""
        return as_bytes(self.request.body)

    def replace(self, body: bytes) -> None:
        """Have the library send another body."""
        raise NotImplementedError

    def send_instead(self, request: Any) -> None:
        """Have the library send another request."""
        self.request = request
        if self.args:
            self.args = (request, *self.args[1:])
        else:
            self.kwargs["request"] = request

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        """Show the recorder the response that the library's method returns."""
        raise NotImplementedError

    def refusal(self, response: Any) -> Any:
        """The body of a response, as `ClientCall.refusal` has it."""
        raise NotImplementedError


def as_bytes(body: object) -> bytes | None:
    """A body that is a text or bytes; None for any other."""
    if isinstance(body, str):
        return body.encode()
    return bytes(body) if isinstance(body, bytes | bytearray) else None


def model_path(url: str) -> str | None:
    """The path of an address, without its query, if a POST to it asks a model; else None."""
    address = url.partition("?")[0].partition("#")[0]
    if not asks_a_model(address):
        return None
    try:
        path = urlsplit(address).path
    except ValueError:  # the library raises it too
        return None
    return path if asks_a_model(path) else None


def is_signed(headers: Mapping[str, Any]) -> bool:
    """Whether the body is signed, so that it cannot be changed."""
    return any(
        name.lower() in _BINDING or str(value).startswith("AWS4-")
        for name, value in headers.items()
    )
