"""Replies that a client sends back in other words: a tool call as text, a text left out.

Each trains where it was said, and what was sent back is context, so every turn is a history of its
own. The record is right all the same; the trajectory has one warning about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.histories import ended_before, names_previous
from otel_rollout.wire import MessagePath, is_of_model


@dataclass(slots=True)
class _Samples:
    """What was sampled after one conversation."""

    replies: list[Completion] = field(default_factory=list)
    begins: set[bytes] = field(default_factory=set)
    """Keys of the conversation with the first message of each reply."""


def rewritten(completions: Sequence[Completion]) -> list[Completion]:
    """The completions in whose place a later request has another message of the model.

    completions: those with sampled items, in order. A request is later if it began after the
    reply had ended. It has to continue the same prompt, with the same tools: a fork, or a summary
    in the place of the prompt, does not count. Nor does a request that has another sample of that
    prompt in the place.
    """
    samples: dict[tuple[bytes, bytes], _Samples] = {}
    for completion in completions:
        if completion.status == "complete" and completion.prompt and _is_complete(completion):
            of_prompt = samples.setdefault(_key(completion, completion.prompt), _Samples())
            of_prompt.replies.append(completion)
            of_prompt.begins.add(_beginning(completion))
    found: set[Completion] = set()
    seen: set[tuple[bytes, int]] = set()
    for request in filter(_is_complete, completions):
        node = request.prompt
        while node is not None and (name := (request.context_key, id(node))) not in seen:
            seen.add(name)
            found.update(_replaced(samples, request, node))
            node = node.parent
    return [completion for completion in completions if completion in found]


def _replaced(
    samples: dict[tuple[bytes, bytes], _Samples], request: Completion, node: MessagePath
) -> list[Completion]:
    """The completions in whose place this message of a request is."""
    if node.parent is None or not is_of_model(node.message):
        return []
    of_prompt = samples.get(_key(request, node.parent))
    if of_prompt is None or node.key in of_prompt.begins:
        return []
    return [reply for reply in of_prompt.replies if ended_before(reply, request)]


def _is_complete(completion: Completion) -> bool:
    """True if the request has its whole conversation, not only what is new."""
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
