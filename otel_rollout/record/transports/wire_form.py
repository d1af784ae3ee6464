"""What of a call was not as usual on the wire: with it a replay gives its client the same again.

A call with JSON or server-sent events, to which nothing was added, has nothing of this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.spans import EVENTS, JSON
from otel_rollout.wire import Framing, Json, dumps, framing_by_type

_is_binary = re.compile(r"(?:audio|image|video)/|application/octet-stream").match
_GOES_BY = ("retry-after", "retry-after-ms", "x-should-retry", "x-amzn-errortype")
"""Headers of an error that clients go by."""


class WireForm:
    """The parts of one call that were not as usual."""

    added: Mapping[str, Json] = {}
    """What was added to its request, as `Added.before` has it."""
    body: bytes | None = None
    """The reply as it came, without its encoding; what is recorded may be made of it."""
    _head: tuple[int, str, Mapping[str, str]] | None = None
    """Status, content type and headers of the reply. None: they are not known."""
    _status: int | None = None
    """HTTP status of the last attempt, which failed. None: it had no response."""
    _failed: Json = None
    """The reply to it, as a `spans.Retried`. None: not known."""
    _retried: Sequence[Json] = ()

    def begins(self, status: int, headers: Mapping[str, str]) -> tuple[Framing | None, bool]:
        """A reply begins. The framing that it says it has; True if its bytes are not recorded."""
        framing, is_binary, kind = _kind_of(headers.get("content-type", ""))
        self._head, self.body = (status, kind, headers), None
        return framing, is_binary

    def failed(
        self, status: int | None, headers: Mapping[str, str] | None, text: str | None
    ) -> None:
        """An attempt failed. status: None: without a response.

        headers: None: the client did not get it. text: its body. None: it was not read.
        """
        self._status = status
        if status is None or headers is None:
            return
        kind = _kind_of(headers.get("content-type", ""))[2]
        form = _form(status, kind, headers, JSON)
        self._failed = {"status": status, "form": form, "body": text}

    def asks_again(self) -> dict[str, int]:
        """Another attempt is made; attributes of the event that shows it."""
        if self._failed is not None:
            self._retried = [*self._retried, self._failed]
        status, self._status, self._failed = self._status, None, None
        return {} if status is None else {"http_status": status}

    def of_reply(self, came: bytes | None, written: bytes, *, is_events: bool) -> Json:
        """What is not as usual of the reply that began last, as the members of a `spans.Form`.

        came: the reply, a stream's chunks as events. written: what is recorded: other bytes if
        something of it is kept secret.
        """
        usual = EVENTS if is_events else JSON
        form: Json = None
        if self._head is not None and (self._head[1] != usual or self._head[0] >= 400):
            form = _form(*self._head, usual)
        if came is not self.body and self.body is not None and came == written:
            return {**(form or {}), "raw": self.body}
        return form

    def write(self, attributes: dict[str, Any]) -> None:
        """Write what concerns the call, and not its last reply."""
        if self.added:
            attributes[sc.REQUEST_ADDED] = dumps(self.added)
        if self._retried:
            attributes[sc.EXCHANGE_RETRIED] = dumps(self._retried)


@lru_cache(256)
def _kind_of(content_type: str) -> tuple[Framing | None, bool, str]:
    """The framing that a content type names; True if such a reply is not recorded; and the type
    without a `charset=utf-8`, which is what JSON and events have anyway.
    """
    media, _, parameters = content_type.partition(";")
    is_usual = parameters.replace('"', "").strip().lower() in ("", "charset=utf-8")
    kind = media.strip().lower() if is_usual else content_type
    return framing_by_type(content_type), _is_binary(content_type) is not None, kind


def _form(status: int, kind: str, headers: Mapping[str, str], usual: str) -> dict[str, Json]:
    form: dict[str, Json] = {} if kind == usual else {"type": kind}
    if status >= 400:
        found = {name: headers.get(name) for name in _GOES_BY}
        if kept := {name: value for name, value in found.items() if value is not None}:
            form["headers"] = kept
    return form
