"""One request that passes through the gateway: asked of the model server, recorded, handed on.

The reply goes to the client as it comes, and only as fast as the client takes it. What the client
has seen the end of is recorded already: the last bytes are handed on after the recorder has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from otel_rollout.gateway.http import Receive, Refusal, Send
from otel_rollout.gateway.replies import (
    Headers,
    HiddenStream,
    KeylessStream,
    KeyRemover,
    headers_for,
    headers_for_stream,
    rewritten,
    shown_body,
    shown_headers,
)
from otel_rollout.gateway.supply import SupplyingUpstream
from otel_rollout.gateway.upstream import Upstream, text_of_refusal
from otel_rollout.record import Added, ExchangeRecorder, guarded, refusal_in
from otel_rollout.wire import Hiding

_UNWATCHED = 0.05
"""Seconds of a call after which a client that has gone is noticed."""
_NOT_RECORDED = "a call that passed through the gateway was not recorded completely"


class Cut(Exception):  # noqa: N818 - no error of ours
    """The model server ended a reply in its middle, so the client's is to end there too."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the model server gets it."""

    method: str
    target: str
    """Path and query, as they came."""
    headers: list[tuple[str, str]]
    body: bytes | None
    """None: it has none."""
    added: Added
    """The fields in the body that ask for token ids."""
    plain: bytes
    """The body as the client sent it."""


class Exchange:
    """A request whose body has come, on its way to the model server and back.

    recorder: None: it is not recorded.
    hiding: what of the reply the client is not shown. None: it is shown all.
    remover: takes the model server's key out of the reply. None: there is no key.
    """

    def __init__(
        self,
        upstream: Upstream | SupplyingUpstream,
        recorder: ExchangeRecorder | None,
        hiding: Hiding | None,
        remover: KeyRemover | None,
        send: Send,
    ) -> None:
        self._upstream = upstream
        self._recorder = recorder
        self._hiding = hiding
        self._remover = remover
        self._keyless = None if remover is None else KeylessStream(remover)
        self._send = send
        self._client_left = False
        self._is_read = False
        """True if the reply was read as a whole."""
        self._response: Any = None
        self._has_begun = False
        """True if the client has got the beginning of a reply."""
        self._held = b""
        """The last bytes of a reply, which is handed on when the recorder has all."""

    async def pass_on(self, request: Request, receive: Receive) -> None:
        """Ask the model server, and hand its reply on until it ends or the client has gone.

        Refusal if the model server gives no reply, Cut if it ends one in the middle.
        """
        asking = asyncio.current_task()
        assert asking is not None
        watch = _Watch(receive, lambda: self._leave(asking))
        try:
            self._response = await self._ask(request)
            await self._reply()
        except asyncio.CancelledError:
            self._end(asyncio.CancelledError("the client went away"))
            if not self._client_left:
                raise
        except self._upstream.errors as error:
            await self._broken(error)
        finally:
            watch.cancel()
            if self._response is not None:
                self._response.close()  # a reply that came whole has given its connection back

    async def _ask(self, request: Request) -> Any:
        """The response; where the server may refuse what was added, that to the request without."""

        async def ask(body: bytes | None) -> Any:
            return await self._upstream.ask(request.method, request.target, request.headers, body)

        response, recorder, added = await ask(request.body), self._recorder, request.added
        if recorder is None or not added.fields or refusal_in(response) is None:
            added.ended(response.status)
            return response
        self._is_read = True
        text = await text_of_refusal(response)
        if (names := added.take_back(text, response.status)) is None:
            return response
        self._is_read = False
        recorder.asks_without(names, response.status)
        recorder.request(request.plain, dict(request.headers))
        self._hiding = None
        response = await ask(request.plain)
        added.ended(response.status)
        return response

    async def _broken(self, error: Exception) -> None:
        """There is no reply, or the model server ended it in its middle: so does the gateway."""
        if self._response is None:
            self._end(error)
            raise _unreachable(error) from None
        came = b"".join(getattr(self._response.content, "_buffer", ()))  # and was not read
        if self._keyless is not None:
            came = self._keyless.shown(came) + self._keyless.shown(b"")
        if came and self._recorder is not None and self._recorder.is_streaming:
            self._recorder.chunk(came)
        self._end(error)
        if self._has_begun and self._hiding is None:
            await self._send_piece(self._held + came)
        raise Cut from None

    def _leave(self, asking: asyncio.Task[Any]) -> None:
        self._client_left = True
        asking.cancel()

    async def _reply(self) -> None:
        response, recorder = self._response, self._recorder
        is_shown = False
        if recorder is not None:
            is_shown = bool(recorder.response(response.status, response.headers))
        headers = shown_headers(response.raw_headers, self._remover)
        if self._is_rewritten():
            await self._reply_rewritten(headers, is_shown=is_shown)
            return
        stream, keyless = self._hidden_stream(), self._keyless
        await self._start(headers if stream is None else headers_for_stream(headers))
        hand_on_at_once = recorder is None or recorder.framing is not None
        more = True
        while more:
            piece = await response.content.readany()
            more = bool(piece)
            if keyless is not None:
                piece = keyless.shown(piece)
            if not piece:
                continue
            if is_shown and recorder is not None:
                recorder.chunk(piece)
            if stream is not None:
                piece = stream.shown(piece)
            if not hand_on_at_once:
                self._held, piece = piece, self._held
            if piece:
                await self._send_piece(piece)
        self._end(None)
        rest = self._held if stream is None else stream.rest()
        await self._send({"type": "http.response.body", "body": rest})

    def _is_rewritten(self) -> bool:
        """True if the reply is handed on as a whole."""
        if self._is_read:
            return True
        if self._remover is not None and self._encoding not in (None, "identity"):
            return True  # an encoding that was not asked for
        recorder = self._recorder
        return self._hiding is not None and recorder is not None and recorder.framing is None

    def _shown_body(self, body: bytes) -> bytes:
        """A whole body as the client is shown it."""
        body, hiding, recorder = self._without_key(body), self._hiding, self._recorder
        if hiding is None or recorder is None or recorder.framing not in (None, "events"):
            return body
        return shown_body(body, hiding, is_stream=recorder.framing is not None)

    def _without_key(self, body: bytes) -> bytes:
        return body if self._remover is None else self._remover.removed(body)

    @property
    def _encoding(self) -> str | None:
        found: str | None = self._response.headers.get("content-encoding")
        return found

    def _hidden_stream(self) -> HiddenStream | None:
        """What reads the stream that the reply is. None: it is handed on as it comes."""
        encoding = self._encoding
        is_events = self._recorder is not None and self._recorder.framing == "events"
        if self._hiding is None or not is_events or not HiddenStream.can_read(encoding):
            return None
        return HiddenStream(self._hiding, encoding)

    async def _reply_rewritten(self, headers: Headers, *, is_shown: bool) -> None:
        """Hand on a reply once it has come as a whole."""
        body = self._without_key(await self._response.read())
        if is_shown and self._recorder is not None:
            self._recorder.chunk(body)
        self._end(None)
        shown = rewritten(body, self._encoding, self._shown_body)
        if shown is not None:
            body, headers = shown, headers_for(headers, shown)
        await self._start(headers)
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, headers: Headers) -> None:
        status, self._has_begun = self._response.status, True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def _end(self, error: BaseException | None) -> None:
        if self._recorder is not None:
            with guarded(_NOT_RECORDED):
                self._recorder.end(error=error)


class _Watch:
    """Calls `leave` when the client has closed its connection, until it is cancelled.

    It begins after `_UNWATCHED` seconds: a task for each short call would cost more than it saves.
    """

    def __init__(self, receive: Receive, leave: Callable[[], None]) -> None:
        self._receive = receive
        self._leave = leave
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED, self._begin)

    def cancel(self) -> None:
        """Watch no longer."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(client_left(self._receive))
        self._task.add_done_callback(lambda done: None if done.cancelled() else self._leave())


async def client_left(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _unreachable(error: Exception) -> Refusal:
    message = f"the model server gave no reply: {type(error).__name__}"
    return Refusal(502, message, "api_error")
