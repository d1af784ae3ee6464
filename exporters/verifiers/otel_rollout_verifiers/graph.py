"""The message graph: a node for each distinct message, with the tokens that it adds.

Invariant: the tokens of the nodes from a root to a reply are the ids that the model was asked with
and those that it said. A call shares the nodes of earlier ones as far as both messages and tokens
agree, so branches fork where token sequences do. No server tells where in a prompt a message
starts: what a prompt adds stands on the reply that answers it, masked, as verifiers does it
for such servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from otel_rollout import Completion, ExportError, TokenSequence
from otel_rollout.export import Json, MessagePath
from otel_rollout_verifiers.messages import message_of, tools_of

Key = tuple[str, int]


@dataclass(slots=True)
class _Tokens:
    """The token ids of a completion that trains, and of its prompt."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    before: list[Completion]
    """The completions of its row that it goes on from."""


@dataclass(slots=True)
class Graph:
    """Nodes in the order of the calls that made them; a parent comes before its children."""

    nodes: list[dict[str, Json]] = field(default_factory=list)
    node_of: dict[Key, int] = field(default_factory=dict)
    """The node of each reply, by `key`."""
    _by_path: dict[tuple[Json, ...], list[int]] = field(default_factory=dict)

    def add(self, completion: Completion, tokens: _Tokens | None) -> None:
        """Add a reply and what is new of its prompt, after those that it goes on from."""
        messages = list(completion.prompt or ())[::-1]
        before = {self.node_of[key(c)] for c in (tokens.before if tokens else ())}
        parent, length = None, 0
        for position, path in enumerate(messages):
            found = [
                number
                for number in self._by_path.get(_path_key(completion, path), ())
                if self.nodes[number]["parent"] == parent
                and (tokens is None or self._fits(number, tokens.prompt, length))
            ]
            if not found:
                for new in messages[position:]:
                    parent = self._append(
                        parent, completion, new, timestamp=completion.start_time_ns
                    )
                break
            # Of equal ones that which the call is known to go on from, else the latest.
            parent = max(found, key=lambda number: (number in before, number))
            length += len(self.nodes[parent]["token_ids"])
        assert completion.path is not None
        end = completion.end_time_ns or completion.start_time_ns
        node = self._append(parent, completion, completion.path, timestamp=end)
        self.node_of[key(completion)] = node
        self.nodes[node]["sampled"] = True
        if tokens is not None:
            added = tokens.prompt[length:]
            self.nodes[node] |= {
                "token_ids": added + tokens.ids,
                "mask": [False] * len(added) + [True] * len(tokens.ids),
                "logprobs": tokens.logprobs,
            }

    def _fits(self, number: int, prompt: list[int], start: int) -> bool:
        """True if the prompt has the tokens of this node at `start`."""
        ids = self.nodes[number]["token_ids"]
        return bool(prompt[start : start + len(ids)] == ids)

    def _append(
        self, parent: int | None, completion: Completion, path: MessagePath, *, timestamp: int
    ) -> int:
        number = len(self.nodes)
        node: dict[str, Json] = {
            "parent": parent,
            "message": message_of(path.message, completion),
            "sampled": False,
            "timestamp": timestamp / 1e9,
            "token_ids": [],
            "mask": [],
            "logprobs": [],
        }
        if parent is None and (tools := tools_of(completion)):
            node["tools"] = tools
        self.nodes.append(node)
        self._by_path.setdefault(_path_key(completion, path), []).append(number)
        return number


def build(completions: list[Completion], rows: list[TokenSequence]) -> Graph:
    """The graph of all replies that are whole; those that a row trains have their tokens."""
    tokens: dict[Key, _Tokens] = {}
    for row in rows:
        spans = zip(row.completions, row.spans, row.trains, strict=True)
        for number, (completion, (_, start, end), trains) in enumerate(spans):
            if trains:
                tokens[key(completion)] = _Tokens(
                    row.token_ids[:start],
                    row.token_ids[start:end],
                    _known(completion, row.logprobs[start:end]),
                    row.completions[:number],
                )
    graph = Graph()
    for completion in completions:
        own = tokens.get(key(completion))
        # What a call goes on from may have come later, by the clock of another process.
        for member in (*(own.before if own else ()), completion):
            if member.status == "complete" and member.items and key(member) not in graph.node_of:
                graph.add(member, tokens.get(key(member)))
    return graph


def key(completion: Completion) -> Key:
    return completion.span_id, completion.choice_index  # not every server's ids are unique


def _path_key(completion: Completion, path: MessagePath) -> tuple[Json, ...]:
    """Equal for conversations that are one: the same messages, tools and model."""
    return completion.context_key, path.key, completion.model or completion.request_model


def _known(completion: Completion, logprobs: list[float]) -> list[float]:
    unknown = sum(map(math.isnan, logprobs))
    if unknown:
        raise ExportError(
            f"completion {completion.id!r}: verifiers reads a log-probability that is not known as "
            f"0, got {unknown} of {len(logprobs)} unknown; ask the server for them "
            f"(`with otel_rollout.request_token_ids():`)"
        )
    return logprobs
