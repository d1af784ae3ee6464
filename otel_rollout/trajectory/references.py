"""Items that a request names by id instead of sending them again: `item_reference` of Responses.

A reference stands for the item that has the id in a call which had ended when the request began.
Where one has, the completion's prompt holds that item, so that it continues what it refers to; its
exchange keeps what was sent. A reference to an item of elsewhere stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.histories import ended_before, sampled_order
from otel_rollout.wire import Json, JsonText, MessagePath, extend, reference_of


class KnownItems:
    """The items of a trajectory's calls by their ids, and prompts in which they are put.

    The results depend on the calls alone, in whatever order they are added.
    """

    def __init__(self) -> None:
        self._sampled: dict[str, list[tuple[Completion, JsonText]]] = {}
        self._sent: dict[str, list[MessagePath]] = {}
        self._sender: dict[MessagePath, Completion] = {}
        """The call with each path in its request that ended first."""
        self._paths: dict[tuple[MessagePath | None, JsonText], MessagePath] = {}
        """Paths with items in the place of references, so that prompts share what they share."""
        self._is_any_reference = False
        self.missing: dict[str, str] = {}
        """An id that no earlier call has, by the response id of the call that refers to it."""

    def add(self, completion: Completion) -> None:
        """Take in the items of a call that has ended."""
        if not completion.api.shapes.references:
            return
        for item in completion.items:
            if (id_ := _id_of(item)) is not None:
                self._sampled.setdefault(id_, []).append((completion, JsonText(None, item)))
        for path in completion.exchange.prompt or ():
            sender = self._sender.get(path)
            if sender is not None and sampled_order(sender) <= sampled_order(completion):
                return
            self._sender[path] = completion
            if sender is not None:
                continue
            if reference_of(path.message) is not None:
                self._is_any_reference = True
            elif (id_ := _id_of(path.message)) is not None:
                self._sent.setdefault(id_, []).append(path)

    def resolved(self, completion: Completion) -> Completion:
        """The completion with items in the place of the references in its prompt."""
        if not self._is_any_reference or not completion.api.shapes.references:
            return completion
        prompt: MessagePath | None = None
        for path in reversed(list(completion.exchange.prompt or ())):
            id_ = reference_of(path.message)
            item = None if id_ is None else self._meant(id_, completion)
            if id_ is not None and item is None:
                self.missing.setdefault(completion.id, id_)
            if item is None and prompt is path.parent:
                prompt = path
                continue
            link = prompt, path.json if item is None else item
            if link not in self._paths:
                self._paths[link] = MessagePath(*link)
            prompt = self._paths[link]
        if prompt is None or prompt is completion.prompt:
            return completion
        path = prompt
        for item in completion.items:
            path = extend(path, item)
        return replace(completion, prompt=prompt, path=path)

    def _meant(self, id_: str, completion: Completion) -> JsonText | None:
        """The item with this id: a sampled one, else one that was sent; of several the last."""
        sent = [(self._sender[path], path.json) for path in self._sent.get(id_, ())]
        for known in (self._sampled.get(id_, ()), sent):
            ended = [one for one in known if ended_before(one[0], completion)]
            if ended:
                return max(ended, key=lambda one: sampled_order(one[0]))[1]
        return None


def _id_of(item: Json) -> str | None:
    id_ = item.get("id") if isinstance(item, Mapping) else None
    return id_ if isinstance(id_, str) else None
