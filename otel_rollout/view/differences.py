"""Where two trajectories begin to differ: messages of their main histories, and tokens. Pure."""

from __future__ import annotations

from itertools import takewhile

from otel_rollout.view.details import Opened
from otel_rollout.view.page_types import Difference, Node
from otel_rollout.view.tokens import Tokens
from otel_rollout.wire import Json, normalised_key

_MOST_MESSAGES = 200
"""Messages of each side after those that both have."""
_MOST_CHARACTERS = 2_000


def first_difference(a: Opened, b: Opened) -> Difference:
    """The place of the first message that differs; where none does, of the first token."""
    common, one, other = _messages(a, b)
    if common < len(one) or common < len(other):
        return {"kind": "message", "position": common}
    position = _token(a, b)
    if position is None:
        return {"kind": "none", "position": common}
    return {"kind": "token", "position": position}


def difference_of(a: Opened, a_tokens: Tokens, b: Opened, b_tokens: Tokens) -> dict[str, Json]:
    """The messages of both main histories from the first that differs on, and the first token."""
    common, one, other = _messages(a, b)
    return {
        "messages": {
            "common": common,
            "a": _shown(a, one[common:]),
            "b": _shown(b, other[common:]),
        },
        "tokens": _tokens(a, a_tokens, b, b_tokens),
    }


def _messages(a: Opened, b: Opened) -> tuple[int, list[int], list[int]]:
    """How many messages both begin with, and the nodes of both main histories."""
    one, other = _main(a), _main(b)
    pairs = zip(one, other, strict=False)
    same = takewhile(lambda pair: _is_same(a, pair[0], b, pair[1]), pairs)
    return sum(1 for _ in same), one, other


def _main(opened: Opened) -> list[int]:
    return opened.tree.path(opened.tree.histories[0].leaf) if opened.tree.histories else []


def _is_same(a: Opened, one: int, b: Opened, other: int) -> bool:
    first, second = a.tree.nodes[one].message, b.tree.nodes[other].message
    return first == second or normalised_key(first) == normalised_key(second)


def _shown(opened: Opened, nodes: list[int]) -> list[Node]:
    return [opened.node(node, _MOST_CHARACTERS) for node in nodes[:_MOST_MESSAGES]]


def _token(a: Opened, b: Opened) -> int | None:
    """The first place at which the first rows differ; None where they do not, or one has none."""
    if not a.shown_rows or not b.shown_rows:
        return None
    one, other = a.shown_rows[0].token_ids, b.shown_rows[0].token_ids
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(one), len(other)))


def _tokens(a: Opened, a_tokens: Tokens, b: Opened, b_tokens: Tokens) -> dict[str, Json] | None:
    position = _token(a, b)
    if position is None:
        return None
    found: dict[str, Json] = {"row_a": 0, "row_b": 0, "position": position}
    for side, tokens in (("a", a_tokens), ("b", b_tokens)):
        window = tokens.window(0, position, 1)
        found[f"{side}_id"] = next(iter(window["ids"]), None)
        found[f"{side}_text"] = next(iter(window["texts"]), None)
    return found
