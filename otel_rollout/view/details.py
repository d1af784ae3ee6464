"""A trajectory in all that a page shows of it, as bounded JSON. Pure.

Long texts are cut and marked; the whole text is requested by its node. The size of the JSON is
bounded however long the trajectory is, and the work is linear in its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from otel_rollout.trajectory import (
    Completion,
    TokenSequence,
    TokenSequences,
    Trajectory,
    untrained_sequences,
)
from otel_rollout.view.fields import browser_value
from otel_rollout.view.messages import MessageRow, message_row, name_of_tool
from otel_rollout.view.overview import Examined, examine, tokens_of
from otel_rollout.view.page_types import HistoryView, MessageAnswer, Node, RewardView, RowView
from otel_rollout.view.search import message_ids
from otel_rollout.view.tree import HistoryPath, Tree
from otel_rollout.wire import Json, dumps

MOST_CHARACTERS = 20_000
"""Characters of one text."""
_MOST_IN_ALL = 10_000_000
"""Characters of the texts of all messages; beyond them texts are cut to `_LEAST`."""
_LEAST = 200
_MOST_OF_IMAGES = 20_000_000
"""Characters of all images."""
_MOST_LINES = 2_000
"""Log lines, warnings, findings and rewards of a trajectory."""


class Opened:
    """A trajectory that is looked at; each derived value is computed once.

    rows: its token sequences, where others than those of `Trajectory.token_sequences()` are meant.
    """

    def __init__(self, trajectory: Trajectory, rows: TokenSequences | None = None) -> None:
        self.trajectory = trajectory
        self.rows = trajectory.token_sequences() if rows is None else rows

    @cached_property
    def shown_rows(self) -> list[TokenSequence]:
        """The rows that train, then the tokens of what does not."""
        return [*self.rows, *untrained_sequences(self.rows)]

    @cached_property
    def tree(self) -> Tree:
        """Its messages."""
        return Tree(self.trajectory)

    @cached_property
    def _examined(self) -> Examined:
        return examine(self.trajectory, self.rows)

    @cached_property
    def overview(self) -> dict[str, Json]:
        """Its overview, without an advantage."""
        found = self._examined.overview.to_dict()
        metadata = browser_value(dumps(found["metadata"]))
        return {**found, "metadata": metadata, "advantage": None}

    def detail(self) -> dict[str, Json]:
        """The trajectory as JSON, without parent, children and advantage: they need others."""
        trajectory = self.trajectory
        return {
            "overview": self.overview,
            "output": bounded(trajectory.output),
            "error": bounded(trajectory.error),
            "logs": [_cut(log) for log in trajectory.logs[:_MOST_LINES]],
            "warnings": [_cut(warning) for warning in trajectory.warnings[:_MOST_LINES]],
            "rewards": self._rewards(),
            "findings": [each.to_dict() for each in self._examined.findings[:_MOST_LINES]],
            "nodes": self._nodes(),
            "histories": [self._history(n, way) for n, way in enumerate(self.tree.histories)],
            "historiesTotal": self.overview["histories"],
            "completions": self._completions(),
            "rows": [self._row(number, row) for number, row in enumerate(self.shown_rows)],
            "parent": None,
            "children": [],
            "tokenizer": None,
            "trace": None,
        }

    def message(self, node: int) -> MessageAnswer:
        """The wire form of a node's message, in full. LookupError where there is no such node."""
        if not 0 <= node < len(self.tree.nodes):
            raise LookupError(f"node: expected 0 to {len(self.tree.nodes) - 1}, got {node}")
        return {"message": browser_value(dumps(self.tree.nodes[node].message)), "whole": True}

    def search(self, text: str) -> list[int]:
        """The nodes whose text, reasoning, tool calls or ids contain a text, in any case."""
        wanted = text.casefold()
        return [
            number
            for number, node in enumerate(self.tree.nodes)
            if wanted
            in "\n".join([*self._ids(number), searched(message_row(node.message))]).casefold()
        ]

    def _ids(self, number: int) -> str:
        """The ids of a message: of its call, and of calls of tools in it."""
        node = self.tree.nodes[number]
        own = None if node.completion is None else self.tree.completions[node.completion]
        ids = [*message_ids(node.message), *((own.id, own.span_id) if own else ())]
        return "\n".join(filter(None, [*ids, " "]))

    def node(self, number: int, room: int = MOST_CHARACTERS) -> Node:
        """A message as JSON; `room`: how many characters of each of its texts."""
        node = self.tree.nodes[number]
        message = message_row(node.message)
        size = len(searched(message))
        return {
            "id": number,
            "parent": node.parent,
            "role": _cut(message.role, _LEAST),
            "text": message.text[:room],
            "whole": size <= room,
            "size": size,
            "reasoning": None if message.reasoning is None else message.reasoning[:room],
            "toolCalls": [
                {"id": call.id, "name": call.name[:room], "arguments": call.readable[:room]}
                for call in message.calls[:_MOST_LINES]
            ],
            "toolCallId": message.call_id,
            "images": list(message.images),
            "links": list(message.links),
            "completion": node.completion,
            "parts": None if message.parts is None else list(message.parts),
        }

    def _nodes(self) -> list[Node]:
        found, left, images = list[Node](), _MOST_IN_ALL, _MOST_OF_IMAGES
        for number in range(len(self.tree.nodes)):
            node = self.node(number, MOST_CHARACTERS if left > 0 else _LEAST)
            left -= min(node["size"], MOST_CHARACTERS)
            images -= sum(map(len, node["images"]))
            if images < 0:
                node["links"] += ["an image: there are too many to show all"] * len(node["images"])
                node["images"] = []
            found.append(node)
        return found

    def _rewards(self) -> list[RewardView]:
        return [
            {
                "name": reward.name,
                "value": float(reward),
                "weight": reward.weight,
                "label": reward.label,
                "explanation": None if reward.explanation is None else _cut(reward.explanation),
                "completion_id": reward.completion_id,
                "choice_index": reward.choice_index,
            }
            for reward in list(self.trajectory.all_rewards.all())[:_MOST_LINES]
        ]

    def _history(self, number: int, way: HistoryPath) -> HistoryView:
        completions = [self.tree.completions[n] for n in way.completions]
        own = [n for n in way.completions if self._depth(n) > way.common] or way.completions
        ends = [c.end_time_ns for c in completions if c.end_time_ns is not None]
        tools = way.history.tools or ()
        return {
            "number": number,
            "leaf": way.leaf,
            "length": self.tree.nodes[way.leaf].depth if way.leaf >= 0 else 0,
            "tools": [name_of_tool(tool) for tool in tools],
            "sideCall": way.history.side_call,
            "completions": list(way.completions),
            "trains": [n for n in way.trains if self.tree.completions[n] not in self._untrained],
            "start": self.tree.completions[own[0]].start_time_ns,
            "end": max(ends, default=None),
            "relation": way.relation,
            "from": way.source,
            "common": way.common,
            "breaks": list(way.breaks),
        }

    def _depth(self, completion: int) -> int:
        end = self.tree.ends[completion]
        return 0 if end is None else self.tree.nodes[end].depth

    def _completions(self) -> list[dict[str, Json]]:
        reasons = {d.completion: d.reason for d in self.rows.dropped if d.completion is not None}
        rows: dict[Completion, tuple[int, int]] = {}
        trained: set[Completion] = set()
        for number, row in enumerate(self.shown_rows):
            spans = zip(row.completions, row.spans, row.trains, strict=True)
            for completion, (_, start, _), trains in spans:
                rows.setdefault(completion, (number, start))
                if trains:
                    trained.add(completion)
        return [
            {
                **_completion(completion),
                "trains": completion in trained,
                "dropped": reasons.get(completion),
                "node": self.tree.ends[number],
                "promptNode": self.tree.prompts[number],
                "row": rows.get(completion, (None, None))[0],
                "rowStart": rows.get(completion, (None, None))[1],
            }
            for number, completion in enumerate(self.tree.completions)
        ]

    @cached_property
    def _untrained(self) -> set[Completion]:
        """The completions that do not train, not even as messages."""
        return {d.completion for d in self.rows.dropped if d.completion and not d.lacks_only_ids}

    @cached_property
    def _history_of(self) -> dict[int, int]:
        """The first history that each completion is in."""
        found: dict[int, int] = {}
        for number, way in enumerate(self.tree.histories):
            for completion in way.completions:
                found.setdefault(completion, number)
        return found

    def _row(self, number: int, row: TokenSequence) -> RowView:
        numbers = [self.tree.number[completion] for completion in row.completions]
        return {
            "row": number,
            "length": len(row),
            "promptLength": row.prompt_length,
            "trained": row.trained_tokens,
            "sampled": sum(end - start for _, start, end in row.spans),
            "truncated": row.truncated,
            "history": self._history_of.get(numbers[-1]) if numbers else None,
            "advantage": None,
            "reward": self.overview["reward"],
            "spans": [
                {"completion": n, "start": start, "end": end}
                for n, (_, start, end) in zip(numbers, row.spans, strict=True)
            ],
        }


def searched(message: MessageRow) -> str:
    """All texts of a message."""
    calls = (f"{call.name} {call.readable}" for call in message.calls)
    return "\n".join(filter(None, (message.text, message.reasoning, *calls)))


def bounded(value: Json) -> Json:
    """A JSON value, or the beginning of its text where that is long."""
    if isinstance(value, str):
        return _cut(value)
    text = dumps(value)
    return browser_value(text) if len(text) <= MOST_CHARACTERS else _cut(text)


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _completion(completion: Completion) -> dict[str, Json]:
    ids, reward = completion.token_ids, completion.reward
    prompt_tokens, sampled_tokens = tokens_of([completion])
    return {
        "id": completion.id,
        "choice": completion.choice_index,
        "span": completion.span_id,
        "status": completion.status,
        "error": _error(completion.error),
        "model": completion.model,
        "requestModel": completion.request_model,
        "policyVersion": completion.policy_version,
        "finishReason": bounded(completion.finish_reason),
        "truncated": bool(completion.items) and completion.truncated,
        "sideCall": completion.side_call,
        "reward": None if reward is None else float(reward),
        "promptTokens": prompt_tokens,
        "sampledTokens": sampled_tokens if ids is None else len(ids),
        "start": completion.start_time_ns,
        "end": completion.end_time_ns,
        "attempts": completion.exchange.attempts,
        "sampling": bounded(completion.sampling),
        "path": completion.exchange.path,
        "statusCode": completion.exchange.status_code,
    }


def _error(error: Mapping[str, str] | None) -> Json:
    return None if error is None else {name: _cut(str(text)) for name, text in error.items()}
