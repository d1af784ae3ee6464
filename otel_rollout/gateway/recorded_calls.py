"""The calls that were recorded, found by what was asked: the answers of a replay.

A request is one of them if it asks the same at the same path: members in any order, and JSON in any
spelling, are the same; any other value is a difference. Nothing else decides, so calls of parallel
agents may come in any order. Equal requests have their replies in the order in which they began.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote

from otel_rollout.errors import ConfigurationError
from otel_rollout.gateway.http import Refusal
from otel_rollout.gateway.replies import shown_body
from otel_rollout.gateway.request_difference import Difference, difference_of
from otel_rollout.spans import EVENTS, EXACT_SOURCE, JSON, Exchange, Form, digest_of
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import (
    Framing,
    Json,
    MessagePath,
    api_of,
    cut_value,
    cutter_of,
    endpoint_of,
    framing_by_type,
    hiding_of,
    merge,
    try_loads,
)

_Digest: TypeAlias = bytes


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call that was recorded, and how many of its replies were given again."""

    rollout_id: str
    number: int
    """Its place among the calls of its rollout, from 1."""
    path: str
    """The path that names the call, as a client library names it."""
    exchange: Exchange
    given: int = 0
    """Replies that were given: those after which the client asked again, then the last one."""

    @property
    def was_asked(self) -> bool:
        """True if its last reply was given."""
        return self.given > len(self.exchange.retried)

    def __str__(self) -> str:
        return f"call {self.number} of rollout {self.rollout_id}"


class RecordedCalls:
    """All calls of some rollouts. `take` gives each once.

    ignore: members of requests that are not compared, such as `metadata.user_id`, or
        `messages[].id` in each of a list.
    ConfigurationError where there is none that can be answered.
    """

    def __init__(self, trajectories: Iterable[Trajectory], ignore: Iterable[str] = ()) -> None:
        self._ignored = [each.replace("[]", ".[]").split(".") for each in ignore]
        self.calls: list[RecordedCall] = []
        """In the order in which they began."""
        self.unusable: list[str] = []
        """A sentence for each call that cannot be answered as it was."""
        self._by_request: dict[_Digest, deque[tuple[RecordedCall, int, bool]]] = {}
        """The calls that ask so, with the number of each reply; True if the client wrote the
        request so, False if it was sent so."""
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
        digests = _Digests(self._ignored)
        for call in self.calls:
            for place, name in enumerate(digests.of_call(call)):
                waiting = self._by_request.setdefault(name, deque())
                count = len(call.exchange.retried) + 1
                waiting += ((call, number, place > 0) for number in range(count))
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

    def take(self, path: str, body: bytes) -> RecordedReply | Difference:
        """The reply to a request, which is taken; else how that differs from the closest one.

        path: as a client library names it. body: without its encoding; b"" for none.
        """
        asked, path = _request_in(body), _path_of(path)
        name = _Digests(self._ignored).of_request(path, asked)
        waiting = self._by_request.get(name)
        while waiting:
            call, number, as_written = waiting.popleft()
            if number >= call.given:  # else a request in its other spelling took it
                call.given = number + 1
                return RecordedReply(call, number, body if as_written else None)
        return self._difference(path, asked, None if waiting is None else name)

    def _difference(self, path: str, asked: Json, known: _Digest | None) -> Difference:
        """How a request differs. known: its digest, if it was recorded, but fewer times."""
        if known is not None:
            digests = _Digests(self._ignored)
            same = [call for call in self.calls if known in digests.of_call(call)]
            return Difference("repeated", path, str(same[-1]), times=len(same))
        call = self._closest(path, asked)
        if call is None:
            return Difference("path", path, None)
        sides = (_without(side, self._ignored) for side in (call.exchange.asked(), asked))
        return difference_of(path, str(call), *sides)

    def _closest(self, path: str, asked: Json) -> RecordedCall | None:
        """The call at this path that begins most like a request, one not asked again if any is.

        None: there is none at the path.
        """
        there = [call for call in self.calls if call.path == path]
        there = [call for call in there if not call.was_asked] or there
        members = _without(asked, self._ignored) if isinstance(asked, dict) else {}
        digests = _Digests(self._ignored)
        own = {name: [*map(_digest_of, v)] for name, v in members.items() if isinstance(v, list)}
        texts = {name: _digest_of(value) for name, value in members.items()}

        def likeness(call: RecordedCall) -> tuple[int, int]:
            exchange = call.exchange
            recorded = digests.messages(exchange)
            common = 0
            for one, other in zip(recorded, own.get(exchange.key or "", ()), strict=False):
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

    ignored: Sequence[Sequence[str]]
    """Paths to what is not compared; `[]` is each element of a list."""
    _messages: dict[int, _Digest] = field(default_factory=dict)
    """Those of messages of recorded calls, by the identity of the path that ends with each."""
    _lists: dict[int, _Digest] = field(default_factory=dict)
    """Those of the lists of messages up to there."""

    def of_call(self, call: RecordedCall) -> tuple[_Digest, ...]:
        """The digest of a call's request; where something was added to it, also of that without."""
        exchange = call.exchange
        if exchange.raw_request is not None or exchange.key is None:
            own = [exchange.request() or _NO_BODY]
            if exchange.added is not None:
                own.append(exchange.asked())
            return tuple(self.of_request(call.path, each) for each in own)
        params = _without(dict(exchange.params), self.ignored)
        members = {name: _digest_of(value) for name, value in params.items()}
        if exchange.key in members:
            members[exchange.key] = self._list(exchange)
        before = exchange.before()
        if not before:
            return (_joined(call.path, members),)
        values = _without({name: each[0] for name, each in before.items() if each}, self.ignored)
        written = {name: _digest_of(value) for name, value in values.items()}
        rest = {name: digest for name, digest in members.items() if name not in before}
        return _joined(call.path, members), _joined(call.path, rest | written)

    def of_request(self, path: str, asked: Json) -> _Digest:
        """The digest of a request that is there as JSON, or as text."""
        if not isinstance(asked, dict):
            return _joined(path, {"": _digest_of(asked)})
        members = _without(asked, self.ignored)
        return _joined(path, {name: _digest_of(value) for name, value in members.items()})

    def messages(self, exchange: Exchange) -> list[_Digest]:
        """The digest of each message of a recorded conversation."""
        self._list(exchange)
        path = exchange.prompt
        return [self._messages[id(node)] for node in path][::-1] if path else []

    def _list(self, exchange: Exchange) -> _Digest:
        """The digest of a recorded conversation: that of the list of its messages."""
        inside = [path[2:] for path in self.ignored if path[:2] == [exchange.key, "[]"]]
        unknown: list[MessagePath] = []
        node = exchange.prompt
        while node is not None and id(node) not in self._lists:
            unknown.append(node)
            node = node.parent
        before = _EMPTY if node is None else self._lists[id(node)]
        for node in reversed(unknown):
            own = self._messages[id(node)] = _digest_of(_without(node.message, inside))
            before = self._lists[id(node)] = digest_of(before, own)
        return before


def _without(value: Json, paths: Iterable[Sequence[str]]) -> Json:
    """The value without what these paths lead to; what they do not lead to stays."""
    for path in paths:
        value = _without_one(value, path)
    return value


def _without_one(value: Json, path: Sequence[str]) -> Json:
    if path and path[0] == "[]" and isinstance(value, list):
        return [_without_one(element, path[1:]) for element in value]
    if not path or not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) > 1:
        return {**value, path[0]: _without_one(value[path[0]], path[1:])}
    return {name: member for name, member in value.items() if name != path[0]}


_EMPTY = digest_of(b"[")
_NO_BODY = ""
"""The body of a request that has none, such as one that retrieves a reply."""
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _digest_of(value: Json) -> _Digest:
    """The digest of a member; of a list, that of its elements, one after the other."""
    if not isinstance(value, list):
        return digest_of(_text(value).encode())
    digest = _EMPTY
    for element in value:
        digest = digest_of(digest, _digest_of(element))
    return digest


def _joined(path: str, members: Mapping[str, _Digest]) -> _Digest:
    """The digest of members, in whatever order they are, at a path."""

    def parts() -> Iterator[bytes]:
        yield path.encode()
        for name in sorted(members):
            yield b"\0%b\0%b" % (name.encode("utf-8", "surrogatepass"), members[name])

    return digest_of(*parts())


def _request_in(body: bytes) -> Json:
    """The JSON of a request; its text where it is no JSON object."""
    text = body.decode("utf-8", "backslashreplace")
    found = try_loads(text)
    return found if isinstance(found, dict) else text


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
    try:
        exchange.before()
        if exchange.form.raw is not None:
            exchange.reply_bytes()
    except ValueError as error:
        return str(error)
    return None


# --- replies

_ENDED = ("ErrorResponse", "InvalidResponse", "EOFError")
"""Errors of replies that came to their end all the same."""


class RecordedReply:
    """A reply to a recorded call as it is given again: its status, headers, and bytes in pieces.

    number: 0 is the first; the last one is the call's, those before were asked again after.
    body: the request, if it is what the client wrote before the recording added to it, so that it
    is not shown what that asked for. None: it asks for all that came.
    """

    refusal: Refusal | None = None
    """The gateway's own answer to a call that had no reply. None: it had one, or nobody waited."""
    was_left = False
    """True if the client read it no further."""
    is_whole = True
    """False: it broke off, or the client left it."""
    seconds = 0.0
    """Seconds that the call took."""

    def __init__(self, call: RecordedCall, number: int, body: bytes | None) -> None:
        self.call = call
        exchange = call.exchange
        if number < len(exchange.retried):
            retried = exchange.retried[number]
            self.status: int | None = retried.status
            """None: the client went before anything came."""
            self.pieces = [(retried.body or "").encode()]
            """Its bytes: a stream's chunks, or the body."""
            self._set_headers(retried.form, JSON)
            if retried.body is None:
                message = "the client did not read this error when it was recorded"
                headers = tuple(
                    each for each in self.headers if not each[0].startswith(b"content-")
                )
                self.refusal = Refusal(retried.status, message, "api_error", headers=headers)
            return
        self.status = exchange.status_code
        self.was_left = exchange.status in ("cancelled", "abandoned")
        self.is_whole = _is_whole(exchange)
        self.seconds = ((exchange.end_time_ns or 0) - exchange.start_time_ns) / 1e9
        self.pieces = _pieces(exchange, body)
        self._set_headers(exchange.form, JSON if exchange.events is None else EVENTS)
        if self.status is None and not self.was_left:
            kind = (exchange.error or {}).get("type", "unknown")
            message = f"the model server gave no reply: {kind}"
            self.refusal = Refusal(502, message, "api_error")

    def _set_headers(self, form: Form, usual: str) -> None:
        kind = usual if form.type is None else form.type
        found = {"content-type": kind, **(form.headers or {})}
        self.headers = [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in found.items()
            if value
        ]
        """Names and values as ASGI has them."""
        if usual == JSON and self.is_whole:
            length = sum(map(len, self.pieces))
            self.headers.append((b"content-length", str(length).encode()))


def _pieces(exchange: Exchange, request: bytes | None) -> list[bytes]:
    """The bytes of a reply, a stream's cut at the ends of its chunks; without what is hidden."""
    body, framing = exchange.reply_bytes() or b"", _framing_of(exchange)
    if request is not None and framing in (None, "events"):
        params = exchange.params
        added = {name: params[name] for name in exchange.before() if name in params}
        if (hiding := hiding_of(added, request)) is not None:
            body = shown_body(body, hiding, is_stream=framing is not None)
    if framing is None:
        return [body] if body else []
    cutter = cutter_of(framing)
    return [piece for piece in (*cutter.cut(body), cutter.rest()) if piece]


def _framing_of(exchange: Exchange) -> Framing | None:
    """How the chunks of a reply are told apart. None: it is no stream."""
    if exchange.events is None:
        return None
    api = api_of(exchange.path)
    by_path = None if api is None else api.framing(exchange.path)
    return framing_by_type(exchange.form.type or EVENTS) or by_path or "events"


def _is_whole(exchange: Exchange) -> bool:
    """True if the reply came to its end, whatever it says."""
    kind = (exchange.error or {}).get("type")
    if exchange.status == "complete" or (exchange.status_code or 0) >= 400 or kind in _ENDED:
        return True
    if exchange.events is None:
        return cut_value(exchange.body_text or "") is not None
    found = merge((exchange.reply_bytes() or b"").decode("utf-8", "replace"), path=exchange.path)
    return found.complete is True or found.error is not None
