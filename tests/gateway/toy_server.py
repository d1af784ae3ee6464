"""A model server with a toy template that drifts, which takes token ids where it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.testing import Raw
from tests.kit.templates import Message, Toy

CHAT = "/v1/chat/completions"


@dataclass
class ToyServer:
    """Routes of a `ModelServer`; what it says comes in order."""

    toy: Toy
    replies: Iterator[Message]
    takes_ids: bool = True
    """Whether `input_ids` stand for the messages. False: they are ignored."""
    refuses: int | None = None
    """HTTP status of the refusal of a request with `input_ids`."""
    shows_prompts: bool = True
    """Whether replies have the ids of their prompts."""
    renders: str | None = None
    """Path at which it renders. None: it does not."""
    asked: list[Message] = field(default_factory=list)
    """The bodies of the chats that it was asked."""

    def routes(self) -> dict[str, Any]:
        """What a `ModelServer` is given."""
        routes: dict[str, Any] = {CHAT: self.chat}
        if self.renders is not None:
            routes[self.renders] = self.render
        return routes

    def chat(self, body: Message) -> Raw:
        """A chat: the next reply, with the ids that it was asked with."""
        self.asked.append(body)
        if self.refuses and "input_ids" in body:
            return _json({"error": {"message": "input_ids: extra inputs"}}, self.refuses)
        prompt = self.toy.prompt(body["messages"], len(self.asked))
        if self.takes_ids:
            prompt = body.get("input_ids", prompt)
        message = next(self.replies)
        text = self.toy.said(message)
        ids = self.toy.encode(text, sampled=True)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", **message},
            "token_ids": ids,
        }
        reply: Message = {
            "id": f"c{len(self.asked)}",
            "object": "chat.completion",
            "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }
        if self.shows_prompts:
            reply["prompt_token_ids"] = prompt
        return _events(reply) if body.get("stream") else _json(reply)

    def render(self, body: Message) -> Raw:
        """The ids of a chat's prompt."""
        ids = self.toy.prompt(body["messages"], 0)
        if not body["add_generation_prompt"]:
            del ids[-1]
        member = "tokens" if self.renders == "/tokenize" else "token_ids"
        return _json({member: ids})


def _json(body: Message, status: int = 200) -> Raw:
    return Raw(status, json.dumps(body).encode())


def _events(reply: Message) -> Raw:
    """The reply as a stream of one delta."""
    (choice,) = reply["choices"]
    delta = {**choice, "delta": choice["message"]}
    del delta["message"]
    events = [json.dumps({**reply, "choices": [delta], "object": "chat.completion.chunk"})]
    chunks = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]
    return Raw(content_type="text/event-stream", chunks=chunks)


class ToyRenderer:
    """Renders new messages as the toy template does, after the ids that are there."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy
        self.calls = 0

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Any = None,
    ) -> list[int]:
        """The ids of the next prompt."""
        self.calls += 1
        new = Toy(ids=self._toy.ids).prompt(new_messages, 0)
        return [*previous_prompt_ids, *previous_completion_ids, *new]
