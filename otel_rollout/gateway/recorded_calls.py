"""The calls that were recorded, found by what was asked: the answers of a replay.

A request is one of them if it asks the same at the same path: members in any order, and JSON in any
spelling, are the same; any other value is a difference. Nothing else decides, so calls of parallel
agents may come in any order. Equal requests have their replies in the order in which they began.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias
from urllib.parse import unquote

from otel_rollout.errors import ConfigurationError
from otel_rollout.gateway.http import Refusal
from otel_rollout.gateway.request_difference import Difference, difference_of
from otel_rollout.spans import EXACT_SOURCE, Exchange
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import (
    Json,
    MessagePath,
    api_of,
    cutter_of,
    endpoint_of,
    loads_bounded,
    merge,
)

_Digest: TypeAlias = bytes


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call that was recorded, and whether it was asked again."""

    rollout_id: str
    number: int
    """Its place among the calls of its rollout, from 1."""
    path: str
    """The path that names the call, as a client library names it."""
    exchange: Exchange
    was_asked: bool = False

    def __str__(self) -> str:
        return f"call {self.number} of rollout {self.rollout_id}"


class RecordedCalls:
    """All calls of some rollouts. `take` gives each once.

    ConfigurationError where there is none that can be answered.
    """

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self.calls: list[RecordedCall] = []
        """In the order in which they began."""
        self.unusable: list[str] = []
        """A sentence for each call that cannot be answered as it was."""
        self._by_request: dict[_Digest, deque[RecordedCall]] = {}
        self._models: dict[str, None] = {}
        for trajectory in trajectories:
            for number, exchange in enumerate(trajectory.exchanges, 1):
                call = RecordedCall(trajectory.id, number, _path_of(exchange.path), exchange)
                if (why := _why_not(exchange)) is None:
                    self.calls.append(call)
                else:
                    self.unusable.append(f"{call}: {why}")
        if not self.calls:
            first = f"; {self.unusable[0]}" if self.unusable else ""
            raise ConfigurationError(f"replay: there is no recorded call to answer with{first}")
        self.calls.sort(key=lambda call: (call.exchange.start_time_ns, call.exchange.started))
        digests = _Digests()
        for call in self.calls:
            name = digests.of_call(call)
            self._by_request.setdefault(name, deque()).append(call)
            api = api_of(call.path)
            model = None if api is None else api.request_model(call.path, call.exchange.params)
            if model is not None:
                self._models[model] = None

    @property
    def models(self) -> list[str]:
        """The models that were asked, each once."""
        return list(self._models)

    @property
    def unasked(self) -> list[RecordedCall]:
        """The calls that were not asked again, in order."""
        return [call for call in self.calls if not call.was_asked]

    def take(self, path: str, body: bytes) -> RecordedCall | Difference:
        """The call that a request is, which is taken; else how it differs from the closest one.

        path: as a client library names it. body: without its encoding; b"" for none.
        """
        asked, path = _request_in(body), _path_of(path)
        waiting = self._by_request.get(_Digests().of_request(path, asked))
        if waiting:
            call = waiting.popleft()
            call.was_asked = True
            return call
        return self._difference(path, asked, is_known=waiting is not None)

    def _difference(self, path: str, asked: Json, *, is_known: bool) -> Difference:
        """How a request differs. is_known: it was recorded, but fewer times."""
        if is_known:
            name, digests = _Digests().of_request(path, asked), _Digests()
            same = [call for call in self.calls if digests.of_call(call) == name]
            return Difference("repeated", path, str(same[-1]), times=len(same))
        call = self._closest(path, asked)
        if call is None:
            return Difference("path", path, None)
        return difference_of(path, str(call), call.exchange.request(), asked)

    def _closest(self, path: str, asked: Json) -> RecordedCall | None:
        """The call at this path that begins most like a request, one not asked again if any is.

        None: there is none at the path.
        """
        there = [call for call in self.calls if call.path == path]
        there = [call for call in there if not call.was_asked] or there
        members = asked if isinstance(asked, dict) else {}
        digests = _Digests()
        own = {name: [*map(_digest_of, v)] for name, v in members.items() if isinstance(v, list)}
        texts = {name: _digest_of(value) for name, value in members.items()}

        def likeness(call: RecordedCall) -> tuple[int, int]:
            exchange = call.exchange
            said = digests.messages(exchange.prompt)
            common = 0
            for one, other in zip(said, own.get(exchange.key or "", ()), strict=False):
                if one != other:
                    break
                common += 1
            params = exchange.params.items()
            same = sum(texts.get(name) == _digest_of(value) for name, value in params)
            return common, same

        return max(there, key=likeness, default=None)  # of several, the first


@dataclass(slots=True)
class _Digests:
    """Digests of requests: equal for requests that ask the same at the same path."""

    _messages: dict[int, _Digest] = field(default_factory=dict)
    """Those of messages of recorded calls, by the identity of the path that ends with each."""
    _lists: dict[int, _Digest] = field(default_factory=dict)
    """Those of the lists of messages up to there."""

    def of_call(self, call: RecordedCall) -> _Digest:
        """The digest of a call's request."""
        exchange = call.exchange
        if exchange.raw_request is not None or exchange.key is None:
            return self.of_request(call.path, exchange.request() or _NO_BODY)
        members = {name: _digest_of(value) for name, value in exchange.params.items()}
        members[exchange.key] = self._list(exchange.prompt)
        return _joined(call.path, members)

    def of_request(self, path: str, asked: Json) -> _Digest:
        """The digest of a request that is there as JSON, or as text."""
        if not isinstance(asked, dict):
            return _joined(path, {"": _digest_of(asked)})
        return _joined(path, {name: _digest_of(value) for name, value in asked.items()})

    def messages(self, path: MessagePath | None) -> list[_Digest]:
        """The digest of each message of a recorded conversation."""
        self._list(path)
        return [self._messages[id(node)] for node in path][::-1] if path else []

    def _list(self, path: MessagePath | None) -> _Digest:
        """The digest of a recorded conversation: that of the list of its messages."""
        unknown: list[MessagePath] = []
        node = path
        while node is not None and id(node) not in self._lists:
            unknown.append(node)
            node = node.parent
        before = _EMPTY if node is None else self._lists[id(node)]
        for node in reversed(unknown):
            own = self._messages[id(node)] = _digest_of(node.message)
            before = self._lists[id(node)] = _hashed(before, own)
        return before


def _hashed(*parts: bytes) -> _Digest:
    return blake2b(b"".join(parts), digest_size=16).digest()


_EMPTY = _hashed(b"[")
_NO_BODY = ""
"""The body of a request that has none, such as one that retrieves a reply."""
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _digest_of(value: Json) -> _Digest:
    """The digest of a member; of a list, that of its elements, one after the other."""
    if not isinstance(value, list):
        return _hashed(_text(value).encode())
    digest = _EMPTY
    for element in value:
        digest = _hashed(digest, _digest_of(element))
    return digest


def _joined(path: str, members: Mapping[str, _Digest]) -> _Digest:
    """The digest of members, in whatever order they are, at a path."""

    def parts() -> Iterator[bytes]:
        yield path.encode()
        for name in sorted(members):
            yield b"\0%b\0%b" % (name.encode("utf-8", "surrogatepass"), members[name])

    return _hashed(*parts())


def _request_in(body: bytes) -> Json:
    """The JSON of a request; its text where it is no JSON object."""
    try:
        found = loads_bounded(body.decode())
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else body.decode("utf-8", "backslashreplace")


def _path_of(path: str) -> str:
    """The path that names a call, however its recorder has named it."""
    path = unquote(path.partition("?")[0])
    return endpoint_of(path) or path.removeprefix("/v1")


def _why_not(exchange: Exchange) -> str | None:
    """Why a call cannot be answered as it was. None: it can."""
    if exchange.source != EXACT_SOURCE:
        return f"the spans of {exchange.source} do not keep what was on the wire"
    if exchange.stream and exchange.events is None and exchange.body is not None:
        return "its stream was kept as one reply, as files of trajectories do: give its spans"
    if exchange.damage:
        return exchange.damage[0]
    return None


# --- replies

_ENDED = ("ErrorResponse", "InvalidResponse", "EOFError")
"""Errors of replies that came to their end all the same."""


class RecordedReply:
    """How a recorded call is answered."""

    refusal: Refusal | None = None
    """The gateway's own answer to a call that had no reply. None: it had one, or nobody waited."""

    def __init__(self, exchange: Exchange) -> None:
        body = exchange.reply_bytes() or b""
        self.status = exchange.status_code
        """None: the client went before anything came."""
        self.was_left = exchange.status in ("cancelled", "abandoned")
        """True if the client read it no further."""
        self.is_whole = _is_whole(exchange)
        """False: it broke off, or the client left it."""
        self.seconds = ((exchange.end_time_ns or 0) - exchange.start_time_ns) / 1e9
        """Seconds that the call took."""
        self.pieces = [body] if body else []
        """Its bytes: a stream's chunks, or the body."""
        if exchange.events is not None:
            cutter = cutter_of("events")
            self.pieces = [piece for piece in (*cutter.cut(body), cutter.rest()) if piece]
        if self.status is None and not self.was_left:
            kind = (exchange.error or {}).get("type", "unknown")
            said = f"the model server gave no reply: {kind}"
            self.refusal = Refusal(502, said, "api_error")
        kind = "application/json" if exchange.events is None else "text/event-stream"
        self.headers = [(b"content-type", kind.encode())]
        if exchange.events is None and self.is_whole:
            self.headers.append((b"content-length", str(len(body)).encode()))


def _is_whole(exchange: Exchange) -> bool:
    """True if the reply came to its end, whatever it says."""
    kind = (exchange.error or {}).get("type")
    if exchange.status == "complete" or (exchange.status_code or 0) >= 400 or kind in _ENDED:
        return True
    if exchange.events is None:
        return False
    found = merge((exchange.reply_bytes() or b"").decode(), path=exchange.path)
    return found.complete is True or found.error is not None
