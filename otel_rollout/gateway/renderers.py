"""Renderers: the token ids of new messages, after the ids that a conversation has already.

What was read and sampled before stays as it is: nothing of it is rendered again. A renderer that
has no certain answer returns None, and the request is sent with its messages alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from otel_rollout.errors import ConfigurationError
from otel_rollout.extras import module_of
from otel_rollout.wire import Json, dumps, loads, without_reasoning

SERVER = "server"
"""Name of the renderer that asks the model server itself."""
_CLOSE = 4
"""Tokens that a template has at most from the end of a turn on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that continues a conversation whose token ids are known."""

    prompt_ids: list[int]
    """Ids of the prompt of the call that it continues."""
    completion_ids: list[int]
    """Ids of that call's reply."""
    is_closed: bool
    """True if the model ended that reply itself, with the token that ends a turn."""
    request: Mapping[str, Json]
    """The body of the request."""
    new: int
    """How many of its messages are new: those after the reply."""

    @property
    def held(self) -> list[int]:
        """The ids that the conversation has: prompt and reply."""
        return self.prompt_ids + self.completion_ids

    @property
    def messages(self) -> list[Json]:
        """All messages of the request."""
        return list(self.request["messages"])


AskServer: TypeAlias = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a body to a path of the model server; the status of the reply, and its body."""
NextPrompt: TypeAlias = Callable[[Turn, AskServer], Awaitable[Sequence[int] | None]]
"""The ids of the next prompt, which begin with those that are held. None: not known."""


@runtime_checkable
class Renderer(Protocol):
    """Template knowledge about one model, such as the package `renderers` has it.

    It is called in a thread, by one request at a time. What it raises is logged, and the request
    goes on with its messages alone.
    """

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """The ids of the next prompt, which begin with both lists of ids.

        A list of ids, or an object with `token_ids`. None: not known.
        """


def next_prompt_by(renderer: str | Renderer) -> NextPrompt:
    """How the next prompt is rendered.

    renderer: "server", the name or path of a tokenizer that the package `renderers` has a renderer
    for, or an object with its method. ConfigurationError for anything else, or without the package.
    """
    if renderer == SERVER:
        return ServerRenderer().next_prompt
    if isinstance(renderer, str):
        renderer = _of_package(renderer)
    if not isinstance(renderer, Renderer):
        raise ConfigurationError(
            f"gateway renderer: expected 'server', the name of a tokenizer, or an object with "
            f"bridge_to_next_turn(), got {renderer!r}"
        )
    return _bridge(renderer)


def _of_package(name: str) -> Renderer:
    renderers, base = (
        module_of("renderers", module, f"gateway renderer {name!r}")
        for module in ("renderers", "renderers.base")
    )
    try:
        made: Renderer = renderers.create_renderer(base.load_tokenizer(name))
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise ConfigurationError(
            f"gateway renderer {name!r}: expected 'server', or the name or path of a tokenizer "
            f"that the package renderers knows, got {type(error).__name__}: {error}"
        ) from error
    return made


def _bridge(renderer: Renderer) -> NextPrompt:
    """The next prompt by an object that has the method of the package `renderers`."""
    one_at_a_time = asyncio.Lock()

    async def next_prompt(turn: Turn, _: AskServer) -> Sequence[int] | None:
        async with one_at_a_time:
            found = await asyncio.to_thread(
                renderer.bridge_to_next_turn,
                turn.prompt_ids,
                turn.completion_ids,
                turn.messages[-turn.new :],
                tools=turn.request.get("tools"),
            )
        ids = getattr(found, "token_ids", found)
        return None if ids is None else list(ids)

    return next_prompt


class ServerRenderer:
    """The next prompt by the model server's own template, where it can be asked for ids alone.

    The conversation is rendered twice: up to the reply, and with the new messages. What the second
    has more are the ids of the new messages, provided that it begins with the first. Reasoning is
    left out of both, since templates drop that of earlier turns.
    """

    def __init__(self) -> None:
        self._ways = {"/v1/chat/completions/render": "token_ids", "/tokenize": "tokens"}
        """Endpoints that return the ids of a request, and the member that has them."""

    async def next_prompt(self, turn: Turn, post: AskServer) -> Sequence[int] | None:
        """The ids of the next prompt; None where the two renderings do not show them."""
        if not turn.is_closed:
            return None
        messages = [without_reasoning(message) for message in turn.messages]
        before = await self._rendered(turn, messages[: -turn.new], post, opens=False)
        after = await self._rendered(turn, messages, post, opens=True)
        if before is None or after is None or after[: len(before)] != before:
            return None
        close = before[-_CLOSE:][::-1]
        if turn.completion_ids[-1] not in close:
            return None  # the template ends a turn in another way
        missing = close.index(turn.completion_ids[-1])
        return turn.held + after[len(before) - missing :]

    async def _rendered(
        self, turn: Turn, messages: list[Json], post: AskServer, *, opens: bool
    ) -> list[int] | None:
        """The ids of these messages; `opens` adds what a prompt ends with."""
        asked = {**turn.request, "messages": messages, "add_generation_prompt": opens}
        while self._ways:
            path, member = next(iter(self._ways.items()))
            status, body = await post(path, dumps(asked).encode())
            if status == 200:
                return _ids_in(body, member)
            if status not in (404, 405, 501):
                return None
            self._ways.pop(path, None)  # there is no such endpoint
        return None


def _ids_in(body: bytes, member: str) -> list[int] | None:
    try:
        found = loads(body)
    except ValueError:
        return None
    found = found[0] if isinstance(found, list) and found else found
    ids = found.get(member) if isinstance(found, Mapping) else None
    return ids if isinstance(ids, list) and set(map(type, ids)) == {int} else None
