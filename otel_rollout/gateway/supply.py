"""Token in, token out: a request that continues a conversation is sent with the ids it has.

The ids that a conversation has are those of the prompt and the reply of its last call; which call
that is, the histories show (`Conversations.continued_by`), so there is one for each history, and
nothing is kept here. The ids of the new messages are a renderer's. Any edit, other tools, another
model or missing ids: nothing is supplied, and the request passes as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_rollout.gateway.renderers import AskServer, NextPrompt, Turn
from otel_rollout.gateway.upstream import Upstream, text_of_refusal
from otel_rollout.record import (
    ActiveRollout,
    Added,
    ExchangeRecorder,
    Refusals,
    guarded,
    refusal_in,
)
from otel_rollout.trajectory import Completion, NotExact, exact_ids
from otel_rollout.wire import (
    Json,
    MessagePath,
    context_key,
    extend,
    is_of_model,
    media_of,
    object_in,
)

logger = logging.getLogger("otel_rollout")
FIELD = "input_ids"
"""The member of a chat's request that has token ids in the place of its messages (SGLang's)."""
_ENDPOINT = "/chat/completions"
_RENDERED = (
    *("model", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents"),
    *("tool_choice", "response_format", "add_generation_prompt", "continue_final_message"),
)
"""Members of a request that change what a template makes of the same messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids that a request is sent with."""

    held: int
    """How many of them the conversation had."""
    ids: Sequence[int]
    """All of them."""


class Supply:
    """Finds the token ids of requests, for all rollouts of one gateway.

    A model server that goes by the messages all the same is sent none any more, and one that
    refuses them none for a while.
    """

    def __init__(self, next_prompt: NextPrompt) -> None:
        self._next_prompt = next_prompt
        self._stopped = False
        self.refusals = Refusals()

    def stop(self, because: str) -> None:
        """Supply nothing from now on."""
        if not self._stopped:
            self._stopped = True
            logger.warning("the gateway supplies no token ids any more: %s", because)

    async def prompt(
        self, active: ActiveRollout, path: str, body: bytes, post: AskServer
    ) -> Prompt | None:
        """The ids to send with a request. None: none, it passes as it is."""
        if self._stopped or path != _ENDPOINT or not self.refusals.may_ask():
            return None
        with guarded("a request passes without token ids"):
            turn = self._turn(active, body)
            if turn is None:
                return None
            ids = await self._next_prompt(turn, post)
            held = turn.held
            if ids is not None and len(ids) > len(held) and list(ids[: len(held)]) == held:
                return Prompt(len(held), ids)
        return None

    def _turn(self, active: ActiveRollout, body: bytes) -> Turn | None:
        """The request as the continuation of a call; None where it is none, or ids are missing."""
        request = _request(body)
        if request is None:
            return None
        params = {**request, "messages": None}
        path: MessagePath | None = None
        for message in request["messages"]:
            path = extend(path, message)
        found = active.read().conversations.continued_by(path, context_key(params))
        if found is None or path is None:
            return None
        before, end = found
        new = request["messages"][end.length :]
        if not _may_continue(before, params, new):
            return None
        ids = exact_ids(before)
        if isinstance(ids, NotExact):
            return None
        prompt = ids.to_list()[: -len(ids.ids)]
        if _was_ignored(before, prompt):
            self.stop("the model server renders the messages although it gets token ids")
            return None
        is_closed = not before.truncated and not isinstance(before.stop_reason, str)
        return Turn(prompt, [*ids.ids], is_closed, request, len(new))


def _request(body: bytes) -> dict[str, Any] | None:
    """The body of a chat's request; None for any other, and one that has token ids already."""
    request = object_in(body)
    if request is None or FIELD in request:
        return None
    messages = request.get("messages")
    is_chat = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
    return request if is_chat else None


def _may_continue(before: Completion, params: Mapping[str, Json], new: Sequence[Json]) -> bool:
    """True if a request continues the ids of a call, and not its messages alone."""
    if not new or any(is_of_model(message) or media_of(message) for message in new) or before.media:
        return False
    asked = before.exchange.params
    return all(asked.get(name) == params.get(name) for name in _RENDERED)


def _was_ignored(before: Completion, prompt: Sequence[int]) -> bool:
    """True if the model server was sent token ids, and reports that it read others."""
    sent = before.supplied.prompt if before.supplied else None
    return sent is not None and sent.to_list() != prompt


class SupplyingUpstream:
    """The model server as one request asks it: with token ids, where they are known."""

    def __init__(
        self,
        upstream: Upstream,
        supply: Supply,
        active: ActiveRollout,
        recorder: ExchangeRecorder,
        path: str,
    ) -> None:
        self.errors = upstream.errors
        self._upstream = upstream
        self._supply = supply
        self._active = active
        self._recorder = recorder
        self._path = path

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> Any:
        """The response, as `Upstream.ask` gives it; without the ids if they are refused."""

        async def post(path: str, asked: bytes) -> tuple[int, bytes]:
            kept = [one for one in headers if one[0].lower() != "accept-encoding"]
            response = await self._upstream.ask("POST", path, kept, asked)
            return response.status, await response.read()

        prompt = await self._supply.prompt(self._active, self._path, body or b"", post)
        if prompt is None or body is None:
            return await self._upstream.ask(method, target, headers, body)
        response = await self._upstream.ask(method, target, headers, with_ids(body, prompt.ids))
        own, refusals = object_in(body) or (), self._supply.refusals
        added = Added({FIELD: prompt.ids}, refusals=refusals, own=own, where=self._path)
        status = refusal_in(response)
        if status is None or added.take_back(await text_of_refusal(response), status) is None:
            added.ended(response.status)
            self._recorder.supplied(prompt.held, prompt.ids)
            return response
        self._recorder.attempt_failed(response.status)
        self._recorder.request(body, dict(headers))
        plain = await self._upstream.ask(method, target, headers, body)
        added.ended(plain.status)
        return plain


def with_ids(body: bytes, ids: Sequence[int]) -> bytes:
    """The body of a request with token ids, its other bytes as they are."""
    end = body.rindex(b"}")
    return b'%b,"%b":[%b]%b' % (
        body[:end],
        FIELD.encode(),
        ",".join(map(str, ids)).encode(),
        body[end:],
    )
