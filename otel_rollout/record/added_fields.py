"""Fields that are added to a request so that it asks for token ids, unless the server refuses them.

Some servers refuse a request for a field that they do not know, or that does not go with another
one. A call must not fail for what we added: it is made once more without the fields, and where that
is taken, such requests are sent without them from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context as otel_context

from otel_rollout.record.context import TOKEN_FIELDS
from otel_rollout.record.state import process_state
from otel_rollout.wire import Json, api_of

_REFUSED = (400, 422)
"""HTTP statuses by which a server says that it does not take a request as it is."""


@dataclass(slots=True)
class Added:
    """What is added to one request."""

    fields: dict[str, Json] = field(default_factory=dict)
    before: dict[str, list[Json]] = field(default_factory=dict)
    """For each of the fields a list of the value that the client wrote there, or an empty one."""
    refused: str | None = None
    """Names of fields, with commas, that are not added because the server refuses them."""
    _request: tuple[object, ...] = ()
    """What the request is like, to the server."""

    @property
    def asks_for_count(self) -> bool:
        """True if a stream ends with a chunk that the agent did not ask for."""
        return bool(self.fields.get("stream_options", {}).get("include_usage"))

    def take_back(self) -> str:
        """Add nothing, since the server may have refused it; the names of the fields."""
        self.refused, self.fields = ",".join(sorted(self.fields)), {}
        return self.refused

    def accepted(self) -> None:
        """The server took the request without the fields: it was these that it refused."""
        process_state.refusing.add((*self._request, self.refused))


NOTHING = Added()
"""What is added to most requests."""


def added_fields(path: str, body: Json, url: object, *, counts: bool = True) -> Added:
    """What is added to a request with this body so that it asks for token ids.

    What the body says stays; to one that is no JSON object nothing is added. A stream is also
    asked for its count of tokens: only that shows that the server lost none of them.

    url: address of the server, or what is that as text.
    counts: False where a count could not be kept from who reads the stream.
    """
    path = ("/" + path.lstrip("/")).partition("?")[0]
    wanted = _wanted(path)
    if wanted is None or not isinstance(body, Mapping):
        return NOTHING
    options = wanted.pop("stream_options", None) or {}
    added = {name: value for name, value in wanted.items() if name not in body}
    own = body.get("stream_options") or {}
    if counts and body.get("stream") and "include_usage" not in own and isinstance(own, Mapping):
        added["stream_options"] = {"include_usage": True, **options, **own}
    # llama.cpp takes log-probabilities, but not of a stream with tools.
    request = urlsplit(str(url)).netloc, path, bool(body.get("stream")), bool(body.get("tools"))
    before = {name: [body[name]] if name in body else [] for name in added}
    found = Added(added, before, _request=request)
    if (*request, ",".join(sorted(added))) in process_state.refusing:
        found.take_back()
    return found


def _wanted(path: str) -> dict[str, Json] | None:
    """The fields that ask for token ids at a path. None: none do, or nobody wants them here."""
    fields = otel_context.get_value(TOKEN_FIELDS)
    if fields is None:
        fields = {} if process_state.settings.request_token_ids else None
    api = api_of(path) if isinstance(fields, Mapping) else None
    own = api.token_id_params(path) if api is not None else None
    return None if own is None or not isinstance(fields, Mapping) else {**own, **fields}


def refusal_in(outcome: Any) -> int | None:
    """The HTTP status of a response, or of an error, by which a request was refused; else None."""
    for each in (outcome, getattr(outcome, "response", None)):
        for name in ("status_code", "status"):
            status = getattr(each, name, None)
            if status in _REFUSED:
                return int(status)
    return None
