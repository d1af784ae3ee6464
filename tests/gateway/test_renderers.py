"""The model server's own template as a renderer: when the ids of new messages are sure."""

from __future__ import annotations

import json
from typing import Any

from otel_rollout.gateway.renderers import ServerRenderer, Turn
from tests.kit.conversations import said, user

END, LINE, OPEN = 90, 91, 92
BEFORE = [1, 2, END, LINE, 3, 4, END, LINE]
AFTER = [*BEFORE, 5, END, LINE, OPEN]
MESSAGES = [user("hi"), said("a"), user("so?")]


def turn(completion: list[int], *, is_closed: bool = True) -> Turn:
    return Turn([1, 2, END, LINE, OPEN], completion, is_closed, {"messages": MESSAGES}, 1)


class Server:
    """Answers with these ids, for the messages up to the reply and for all."""

    def __init__(self, before: Any = BEFORE, after: Any = AFTER, *, found: str = "render") -> None:
        self._ids = {False: before, True: after}
        self._found = found
        self.asked: list[str] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append(path)
        if not path.endswith(self._found):
            return 404, b""
        ids = self._ids[json.loads(body)["add_generation_prompt"]]
        return 200, json.dumps({"token_ids": ids, "tokens": ids}).encode()


async def test_the_end_of_a_turn_that_is_not_sampled_is_added():
    """What a template writes after the token that ends a turn comes before the new messages."""
    server = Server()
    found = await ServerRenderer().next_prompt(turn([3, 7, END]), server.post)
    assert found == [1, 2, END, LINE, OPEN, 3, 7, END, LINE, 5, END, LINE, OPEN]


async def test_what_is_not_sure_is_not_rendered():
    """A truncated reply, a past that new messages change, another end of a turn, no ids."""
    cases = {
        "truncated": (turn([3, 7], is_closed=False), Server()),
        "the past changes": (turn([3, END]), Server(after=[1, 9, *AFTER[2:]])),
        "another end": (turn([3, 77]), Server()),
        "no ids": (turn([3, END]), Server(before="no")),
        "texts": (turn([3, END]), Server(after=["1"])),
    }
    for name, (case, server) in cases.items():
        assert await ServerRenderer().next_prompt(case, server.post) is None, name


async def test_an_endpoint_that_is_not_there_is_asked_once():
    """The way that a server has is found, and kept."""
    server, renderer = Server(found="/tokenize"), ServerRenderer()
    for _ in range(2):
        assert await renderer.next_prompt(turn([3, END]), server.post) is not None
    assert [path.rpartition("/")[2] for path in server.asked] == ["render", *["tokenize"] * 4]
