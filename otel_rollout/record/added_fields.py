"""Fields that are added to a request so that it asks for token ids, unless the server refuses them.

Some servers refuse a request for a field that they do not know, or that does not go with another
one. A call must not fail for what we added: it is made once more without the fields, unless the
error is about what the client wrote. A refusal is about that request, until the error names one of
the fields, or several in a row were refused where none was ever taken. Then such requests are sent
without the fields, and tried with them again after a while.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context as otel_context

from otel_rollout.record.context import TOKEN_FIELDS
from otel_rollout.record.state import process_state
from otel_rollout.wire import Json, api_of

logger = logging.getLogger("otel_rollout")

_REFUSED = (400, 422)
"""HTTP statuses by which a server says that it does not take a request as it is."""
_MAY_REFUSE = (*_REFUSED, 404, 500, 501)
"""Those by which it may, where it names a field of ours, as OpenRouter and old llama.cpp do."""
_IN_A_ROW = 3
"""Refusals that name no field, after which a server that never took one is taken to refuse."""
_CALLS, _SECONDS = 32, 60.0
"""Requests without the fields, and seconds, after which they are tried again."""
_MOST = 1024
"""Kinds of requests that are told apart."""
_LONGEST = 1 << 16
"""Characters of an error that are read."""
_NO_VALUE = r"""(?!\\*["']\s*:\s*(?:[-\d\\"'\[{]|[Tt]rue|[Ff]alse|null|None))"""


@dataclass(slots=True)
class Refusals:
    """What one server has answered to requests of one kind that had something added."""

    _is_taken: bool = False
    """True if it has taken such a request."""
    _in_a_row: int = 0
    _left: int = 0
    """Requests until it is tried again. 0: it is not taken to refuse."""
    _until: float = 0.0

    def may_ask(self) -> bool:
        """Whether to add to the next request; where it refuses, one tries, and others wait."""
        if not self._left:
            return True
        self._left -= 1
        if self._left and time.monotonic() < self._until:
            return False
        self._wait()
        return True

    def taken(self) -> None:
        """It took a request with what was added."""
        self._is_taken, self._in_a_row, self._left = True, 0, 0

    def refused(self, *, is_named: bool) -> bool:
        """It refused a request and took it without; True if it is taken to refuse from now on."""
        self._in_a_row += 1
        if not is_named and (self._is_taken or self._in_a_row < _IN_A_ROW):
            return False
        is_new = not self._left
        self._wait()
        return is_new

    def _wait(self) -> None:
        self._left, self._until = _CALLS + 1, time.monotonic() + _SECONDS


@dataclass(slots=True)
class Added:
    """What is added to one request."""

    fields: dict[str, Json] = field(default_factory=dict)
    before: dict[str, list[Json]] = field(default_factory=dict)
    """For each of the fields a list of the value that the client wrote there, or an empty one."""
    refused: str | None = None
    """Names of fields, with commas, that are not added because the server refuses them."""
    refusals: Refusals | None = None
    """What the server answered to such requests. None: nothing would be added to one."""
    own: Iterable[str] = ()
    """Members of the request as the client wrote it."""
    where: str = ""
    """Where it is sent to."""
    _is_named: bool = False
    """True if the server named a field as it refused the request."""

    @property
    def asks_for_count(self) -> bool:
        """True if a stream ends with a chunk that the agent did not ask for."""
        return bool(self.fields.get("stream_options", {}).get("include_usage"))

    def take_back(self, error: str | None, status: int) -> str | None:
        """Add nothing, since the server may have refused it; the names of the fields.

        error: its text. None: it was not read. None is returned if it names what the client wrote
        and none of the fields, or is no refusal: without these it would be the same.
        """
        error = (error or "")[:_LONGEST]
        is_named = any(_names(error, name, as_word=True) for name in self.fields)
        self._is_named = is_named or "requested parameters" in error
        is_refusal = status in _REFUSED and not any(_names(error, name) for name in self.own)
        if not self._is_named and not is_refusal:
            return None
        self.refused, self.fields = ",".join(sorted(self.fields)), {}
        return self.refused

    def ended(self, status: int | None) -> None:
        """The server answered the request, as it was sent last. status: None: with a reply."""
        if self.refusals is None or (status or 200) >= 300:
            return
        if self.refused is None:
            self.refusals.taken()
        elif self.refusals.refused(is_named=self._is_named):
            logger.warning(
                "the model server refuses what is added to requests for token ids (%s) at %s: such "
                "calls are made without it, and may not train. It is tried again after %d calls, "
                "or %d seconds",
                *(self.refused, self.where, _CALLS, _SECONDS),
            )


NOTHING = Added()
"""What is added to most requests."""


def _names(error: str, name: str, *, as_word: bool = False) -> bool:
    """Whether an error names this member of a request, which it may also repeat with its value.

    One that may be a word of any sentence has to be in quotes or said to be wrong; not `as_word`.
    """
    known = re.escape(name)
    found = rf"(?i:(?<!\w){known}(?!\w)){_NO_VALUE}"
    if not (as_word or "_" in name or name in ("seed", "temperature")):
        found = (
            rf"""["'`]{known}(?:[.\[]|(?=\\*["'`]){_NO_VALUE})|(?<!\w){known} (?:must|should)\b"""
        )
    return re.search(found, error) is not None


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
    host, names = urlsplit(str(url)).netloc.rpartition("@")[2], ",".join(sorted(added))
    # A server may take them of one model or shape alone: llama.cpp not of a stream with tools.
    kind = (
        host,
        path,
        names,
        bool(body.get("stream")),
        str(body.get("model"))[:128],
        frozenset(body),
    )
    known: dict[object, Refusals] = process_state.refusals
    if len(known) >= _MOST:
        known.clear()
    refusals = known.setdefault(kind, Refusals())
    if not refusals.may_ask():
        return Added(refused=names)
    before = {name: [body[name]] if name in body else [] for name in added}
    return Added(added, before, None, refusals, tuple(body), host)


def _wanted(path: str) -> dict[str, Json] | None:
    """The fields that ask for token ids at a path. None: none do, or nobody wants them here."""
    fields = otel_context.get_value(TOKEN_FIELDS)
    if fields is None:
        fields = {} if process_state.settings.request_token_ids else None
    api = api_of(path) if isinstance(fields, Mapping) else None
    own = api.token_id_params(path) if api is not None else None
    return None if own is None or not isinstance(fields, Mapping) else {**own, **fields}


def status_of(outcome: Any) -> int | None:
    """The HTTP status of a response, or of an error that has one; else None."""
    for each in (outcome, getattr(outcome, "response", None)):
        for name in ("status_code", "status"):
            if isinstance(status := getattr(each, name, None), int):
                return int(status)
    return None


def refusal_in(outcome: Any) -> int | None:
    """The HTTP status of a response, or of an error, by which a request was refused; else None."""
    status = status_of(outcome)
    return status if status in _MAY_REFUSE else None
