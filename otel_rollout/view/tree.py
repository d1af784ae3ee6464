"""The messages of a trajectory as one tree, each once, and its histories as paths through it. Pure.

A completion's messages follow those of the completion that it continues, so a replayed message is
the node of the sampled one. Messages that nobody sampled are shared by all
conversations that have them after the same node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from otel_rollout.trajectory import Completion, History, Trajectory, names_previous
from otel_rollout.wire import Json, MessagePath, dumps, extend, is_reasoning

MOST_HISTORIES = 2000
"""Histories that are shown; the others are only counted."""
MOST_MESSAGES = 200_000
"""Messages of all these histories together: no more are shown after so many."""
Relation = Literal["main", "fork", "resample", "restart", "separate"]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One message."""

    message: Json
    parent: int | None
    """The node before it. None: it is the first of a conversation."""
    completion: int | None
    """Place in `Trajectory.completions` of the one that sampled it. None: nobody did."""
    depth: int
    """Messages up to it, itself included."""


@dataclass(frozen=True, slots=True)
class HistoryPath:
    """A history as a path through the tree, and what it has in common with one before it."""

    history: History
    leaf: int
    """The last node."""
    completions: tuple[int, ...]
    trains: tuple[int, ...]
    """The completions that train in it."""
    relation: Relation
    source: int | None
    """The history that it shares its first messages with."""
    common: int
    """How many messages it shares with that."""
    breaks: tuple[int, ...]
    """Nodes that were replayed without their reasoning."""


class Tree:
    """The messages of one trajectory; it has to have ended."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.nodes: list[TreeNode] = []
        self.completions = trajectory.completions
        self.number = {completion: n for n, completion in enumerate(self.completions)}
        """Places of the completions."""
        self.prompts: list[int | None] = []
        """Of each completion the last node of its prompt."""
        self.ends: list[int | None] = []
        """Of each completion the last node that it sampled."""
        self._links = {after: before for before, after in trajectory.conversations.continuations}
        self._known: dict[tuple[int | None, int], int | None] = {}
        """Nodes of paths, by the node that they begin after and the identity of the path."""
        self._shared: dict[tuple[int | None, bytes, str], int] = {}
        """Nodes that nobody sampled, by the node before them and their message."""
        for completion in self.completions:
            self._add(completion)
        self.histories = self._history_paths(trajectory)

    def path(self, leaf: int | None) -> list[int]:
        """The nodes from the first message to this one."""
        found: list[int] = []
        while leaf is not None:
            found.append(leaf)
            leaf = self.nodes[leaf].parent
        return found[::-1]

    def _add(self, completion: Completion) -> None:
        before = self._links.get(completion)
        base, key = None, b""
        if before is not None and self.number[before] < len(self.ends):
            base = self.ends[self.number[before]]
            key = before.path.key if before.path and not names_previous(completion) else b""
        prompt = self._prompt(completion.prompt, base, key)
        self.prompts.append(prompt)
        end = prompt
        for item in completion.items:
            end = self._put(item, end, self.number[completion])
        self.ends.append(end if completion.items else None)

    def _prompt(self, path: MessagePath | None, base: int | None, key: bytes) -> int | None:
        """The last node of a prompt; it replays `base` as its prefix with this key."""
        new: list[MessagePath] = []
        node = path
        while node is not None and not (key and node.key == key):
            if (base, id(node)) in self._known:
                break
            new.append(node)
            node = node.parent
        if node is None and key:
            return self._prompt(path, None, b"")
        is_known = node is not None and (base, id(node)) in self._known
        end = self._known[base, id(node)] if is_known else base
        for node in reversed(new):
            end = self._known[base, id(node)] = self._share(node.message, end, node.key)
        return end

    def _share(self, message: Json, parent: int | None, key: bytes) -> int:
        """The node of a message that nobody sampled here."""
        place = parent, key, dumps(message) if is_reasoning(message) else ""
        if place not in self._shared:
            self._shared[place] = self._put(message, parent, None)
        return self._shared[place]

    def _put(self, message: Json, parent: int | None, completion: int | None) -> int:
        depth = 1 if parent is None else self.nodes[parent].depth + 1
        self.nodes.append(TreeNode(message, parent, completion, depth))
        return len(self.nodes) - 1

    # --- histories

    def _history_paths(self, trajectory: Trajectory) -> list[HistoryPath]:
        found: list[HistoryPath] = []
        owners: dict[int, int] = {}
        passed = 0
        for history in islice(trajectory.each_history(), MOST_HISTORIES):
            passed += len(history.items)
            if passed > MOST_MESSAGES and found:
                break
            last = history.completions[-1]
            leaf = self._leaf(last, trajectory.appended.get((last.id, last.choice_index), ()))
            path, node = list[int](), leaf
            while node is not None and node not in owners:
                path.append(node)
                node = self.nodes[node].parent
            source = None if node is None else owners[node]
            owners.update(dict.fromkeys(path, len(found)))
            first = path[-1] if path else None
            relation = self._relation(node, first, found[source] if source is not None else None)
            found.append(
                HistoryPath(
                    history=history,
                    leaf=-1 if leaf is None else leaf,
                    completions=tuple(self.number[c] for c in history.completions),
                    trains=self._marked(history, "trainable"),
                    relation=relation if found else "main",
                    source=source,
                    common=0 if node is None else self.nodes[node].depth,
                    breaks=tuple(
                        end
                        for n in self._marked(history, "is_break")
                        if (end := self.ends[n]) is not None
                    ),
                )
            )
        return found

    def _leaf(self, completion: Completion, appended: Sequence[Json]) -> int | None:
        leaf, path = self.ends[self.number[completion]], completion.path
        for message in appended:
            path = extend(path, message)
            leaf = self._share(message, leaf, path.key)
        return leaf

    def _marked(self, history: History, mark: Literal["trainable", "is_break"]) -> tuple[int, ...]:
        found = (i.completion for i in history.items if getattr(i, mark) and i.completion)
        return tuple(self.number[completion] for completion in dict.fromkeys(found))

    def _relation(
        self, node: int | None, first: int | None, source: HistoryPath | None
    ) -> Relation:
        """How a history continues after `node`, its last shared one; `first` is the next."""
        if node is None or source is None:
            return "separate"
        if self._is_sampled(first) and self._is_sampled(self._after(node, source.leaf)):
            return "resample"
        return "fork" if any(map(self._is_sampled, self.path(node))) else "restart"

    def _after(self, node: int, leaf: int) -> int | None:
        """The node after this one on the way to a leaf; None where the way ends there."""
        found, place = None, leaf
        while place != node:
            parent = self.nodes[place].parent
            if parent is None:
                return None
            found, place = place, parent
        return found

    def _is_sampled(self, node: int | None) -> bool:
        return node is not None and self.nodes[node].completion is not None
