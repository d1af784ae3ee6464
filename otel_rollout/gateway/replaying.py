"""A model server that answers with what was recorded, as long as it is asked the same.

The first request that was not recorded ends the replay: it, and each one after it, is answered with
422, which no client repeats. Where there is a model server to pass on to, that answers what was not
recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from otel_rollout.gateway.application import MAX_BODY_BYTES, request_to
from otel_rollout.gateway.exchange import Cut, Exchange, client_left
from otel_rollout.gateway.http import (
    ClientGone,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    is_foreign,
    plain_body,
    read_body,
    refuse,
)
from otel_rollout.gateway.paths import Asked, asked_of, is_open, name_of, raw_path
from otel_rollout.gateway.recorded_calls import RecordedCalls, RecordedReply
from otel_rollout.gateway.replies import KeyRemover
from otel_rollout.gateway.request_difference import Difference
from otel_rollout.gateway.serving import Served
from otel_rollout.gateway.tokens import address_environment
from otel_rollout.gateway.upstream import Upstream
from otel_rollout.record import KEY_PREFIX, NOTHING, guarded
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps

_BODY_SECONDS, _REQUEST_SECONDS, _HEADER_SECONDS, _CONNECT_SECONDS = 60.0, 600.0, 30.0, 30.0
_KEY = f"{KEY_PREFIX}replay"
"""Stands for an API key: it opens nothing, and is not passed on."""
_GRACE = 30.0
"""Seconds that a client may wait for more of a reply than it waited when that was recorded."""
_NO_RETRY = ((b"x-should-retry", b"false"),)


class ReplayServer(Served["ReplayServer"]):
    """A model server that answers each call with the bytes that were recorded.

        spans = otel_rollout.otlp.read("spans.jsonl")
        with ReplayServer(otel_rollout.reconstruct(spans)) as server:
            client = openai.OpenAI(base_url=server.base_url, api_key="any")
            agent(client)
        assert server.difference is None

    A call is found by what it asks: its path, and every member of its request. Equal requests have
    their replies in the order in which they were recorded. The first request that was not recorded,
    or more often than recorded, ends the replay: it is answered with 422, and so is each one after
    it; its body has the difference as JSON.

    trajectories: as `reconstruct` gives them; those of a file of trajectories have no streams.
    host: address to listen on.
    port: 0 (default) is any free port.
    upstream: address of a model server that gets what was not recorded. None: nothing goes on.
    api_key: key of that server.
    pace: True takes as long for each reply as it took when it was recorded.
    ignore: members of requests that may differ, such as `metadata.user_id`, or `messages[].id` of
        each message.

    Use it with `with`, where it serves in a thread of its own, or `async with`. ConfigurationError
    if no call can be answered, and without the extra `gateway`; OSError if the port is not free.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        upstream: str | None = None,
        api_key: str | None = None,
        pace: bool = False,
        ignore: Iterable[str] = (),
    ) -> None:
        self._replay = _Replay(RecordedCalls(trajectories, ignore), upstream, api_key, pace=pace)
        super().__init__(self._replay, host, port, _HEADER_SECONDS)

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients; Anthropic's and Google's want `url`."""
        return f"{self.url}/v1"

    @property
    def difference(self) -> Difference | None:
        """The first request that was not recorded. None: there was none."""
        return self._replay.difference

    @property
    def unasked(self) -> list[str]:
        """The recorded calls that were not asked for, in words."""
        return [str(call) for call in self._replay.calls.unasked]

    @property
    def unusable(self) -> list[str]:
        """A sentence for each recorded call that cannot be answered as it was."""
        return self._replay.calls.unusable

    @property
    def count(self) -> int:
        """Number of recorded calls that can be answered."""
        return len(self._replay.calls.calls)

    def environment(self) -> dict[str, str]:
        """Environment variables by which the clients of a program find this server."""
        return address_environment(self.url, self.url, _KEY)

    def _begun(self) -> ReplayServer:
        return self

    async def _ended(self) -> None:
        await self._replay.close()


class _Replay:
    """The replay as an ASGI application."""

    def __init__(
        self, calls: RecordedCalls, upstream: str | None, api_key: str | None, *, pace: bool
    ) -> None:
        self.calls = calls
        self.difference: Difference | None = None
        self._pace = pace
        self._remover = None if api_key is None else KeyRemover(api_key)
        self._upstream: Upstream | None = None
        if upstream is not None:
            seconds = _CONNECT_SECONDS
            self._upstream = Upstream(upstream, api_key=api_key, connect_seconds=seconds)

    async def close(self) -> None:
        """Close the connections to the model server."""
        if self._upstream is not None:
            await self._upstream.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with guarded("a request to the replay was not answered"):
            asked = asked_of(raw_path(scope), scope["headers"])
            try:
                await self._answer(asked, scope, receive, send)
            except Refusal as refusal:
                await refuse(send, refusal, asked.path)
            except (ClientGone, Cut):
                return  # uvicorn closes a connection whose reply is not complete

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        if is_foreign(scope):
            raise Refusal(403, "web pages of other sites get no answer", "permission_error")
        body = await read_body(
            *(scope, receive, lambda _: None),
            most=MAX_BODY_BYTES,
            seconds=_BODY_SECONDS,
            all_seconds=_REQUEST_SECONDS,
        )
        name = name_of(scope["method"], asked.path)
        if name is not None:
            plain, _ = plain_body(scope, body, lambda _: None, MAX_BODY_BYTES)
            found = self._found(name, body if plain is None else plain)
            if isinstance(found, RecordedReply):
                await self._reply(found, receive, send)
                return
        if self._upstream is not None:
            without = {b"accept-encoding"} if self._remover else ()
            request = request_to(self._upstream, asked, scope, body, body, NOTHING, without)
            exchange = Exchange(self._upstream, None, None, self._remover, send)
            await exchange.pass_on(request, receive)
        else:
            await answer(send, 200, self._unrecorded(asked, scope))

    def _found(self, path: str, body: bytes) -> RecordedReply | Difference:
        """The recorded reply to a request. Refusal if there is none, and nobody to pass to."""
        is_over = self.difference is not None and self._upstream is None
        found = self.difference if is_over else self.calls.take(path, body)
        assert found is not None
        if isinstance(found, Difference):
            self.difference = self.difference or found
            if self._upstream is None:
                raise _refusal(found, is_first=not is_over)
        return found

    async def _reply(self, reply: RecordedReply, receive: Receive, send: Send) -> None:
        """Answer as it was recorded, to its very end."""
        if reply.refusal is not None:
            raise reply.refusal
        wait = reply.seconds / (len(reply.pieces) + 1) if self._pace else 0.0
        if reply.status is not None:
            await asyncio.sleep(wait)
            head = {"status": reply.status, "headers": reply.headers}
            await send({"type": "http.response.start", **head})
            for piece in reply.pieces:
                await asyncio.sleep(wait)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if reply.is_whole:
                await send({"type": "http.response.body", "body": b""})
                return
        if reply.was_left:
            await self._until_left(reply, receive)
        raise Cut

    async def _until_left(self, reply: RecordedReply, receive: Receive) -> None:
        """Wait until the client goes away, as it did when this was recorded."""
        try:
            await asyncio.wait_for(client_left(receive), reply.seconds + _GRACE)
        except asyncio.TimeoutError:
            found = Difference("reply", reply.call.path, str(reply.call))
            self.difference = self.difference or found

    def _unrecorded(self, asked: Asked, scope: Scope) -> bytes:
        """The answer to a question that no recording has. Refusal for what is none."""
        if scope["method"] not in ("GET", "HEAD") or not is_open(scope["method"], asked.path):
            message = (
                f"{scope['method']} {asked.path[:200]} was not recorded: a replay has model calls"
            )
            raise Refusal(404, message, "not_found_error")
        before, found, model = asked.path.partition("/models")
        if not found:
            return b"{}"
        listed = _models(self.calls.models, before)
        if model in ("", "/"):
            return dumps(listed).encode()
        for each in listed.get("models") or listed["data"]:
            if model[1:] in (each.get("id"), each.get("name", "").partition("/")[2]):
                return dumps(each).encode()
        raise Refusal(404, f"the model {model[1:200]!r} was not recorded", "not_found_error")


def _models(names: list[str], version: str) -> dict[str, Json]:
    """The list of models as the APIs at this version's path have it: Google's, or both others'."""
    if version == "/v1beta":
        return {"models": [{"name": f"models/{name}", "displayName": name} for name in names]}
    data = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "recorded",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }
        for name in names
    ]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    return {"object": "list", "data": data, "has_more": False, **ends}


def _refusal(difference: Difference, *, is_first: bool) -> Refusal:
    """The answer to a request that was not recorded, or that came after one."""
    message = str(difference) if is_first else f"the replay ended before: {difference}"
    code = "replay_difference"
    found = difference.to_dict()
    return Refusal(422, f"replay: {message}", code, headers=_NO_RETRY, code=code, difference=found)
