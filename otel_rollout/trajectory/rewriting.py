"""Replies that a client sends back in other words: a tool call as text, a text left out.

Each trains where it was said, and what was sent back is context, so every turn is a history of its
own. That is what happened, and no fault of the record; a trajectory says it in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.histories import ended_before, names_previous
from otel_rollout.wire import MessagePath, is_of_model


@dataclass(slots=True)
class _Place:
    """What was sampled after one conversation."""

    replies: list[Completion] = field(default_factory=list)
    begins: set[bytes] = field(default_factory=set)
    """Keys of the conversation with the first message of each reply."""


def rewritten(completions: Sequence[Completion]) -> list[Completion]:
    """The completions in whose place a later request has another message of the model.

    completions: those that said something, in order. A request is later if it began after the
    reply had ended. It has to go on from the same prompt, with the same tools: what forks, or puts
    a summary in the place of the prompt, says nothing. Nor does one that has another sample of that
    prompt in the place.
    """
    places: dict[tuple[bytes, bytes], _Place] = {}
    for completion in completions:
        if completion.status == "complete" and completion.prompt and _is_told(completion):
            place = places.setdefault(_key(completion, completion.prompt), _Place())
            place.replies.append(completion)
            place.begins.add(_beginning(completion))
    found: set[Completion] = set()
    seen: set[tuple[bytes, int]] = set()
    for request in filter(_is_told, completions):
        node = request.prompt
        while node is not None and (name := (request.context_key, id(node))) not in seen:
            seen.add(name)
            found.update(_replaced(places, request, node))
            node = node.parent
    return [completion for completion in completions if completion in found]


def _replaced(
    places: dict[tuple[bytes, bytes], _Place], request: Completion, node: MessagePath
) -> list[Completion]:
    """The completions in whose place this message of a request is."""
    if node.parent is None or not is_of_model(node.message):
        return []
    place = places.get(_key(request, node.parent))
    if place is None or node.key in place.begins:
        return []
    return [reply for reply in place.replies if ended_before(reply, request)]


def _is_told(completion: Completion) -> bool:
    """Whether the request has its whole conversation, not only what is new."""
    return names_previous(completion) is None


def _key(completion: Completion, path: MessagePath) -> tuple[bytes, bytes]:
    return completion.context_key, path.key


def _beginning(completion: Completion) -> bytes:
    """Key of the conversation with the first message that was sampled, reasoning aside."""
    node, key = completion.path, b""
    prompt = completion.prompt.length if completion.prompt else 0
    while node is not None and node.length > prompt:
        key = node.key if is_of_model(node.message) else key
        node = node.parent
    return key
