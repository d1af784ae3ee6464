"""Why the token ids of a conversation changed: the class of a fork by tokens.

Pure. The messages decide first: the reply and its replay in the next request. Where both are equal,
the chat template changed the ids, and their place and texts show how.
Texts of ids are known where log-probabilities came with the tokens; nothing is tokenised here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

from otel_rollout.trajectory import Completion, ForkCause, reasoning_in
from otel_rollout.wire import Json, MessagePath, sampled_texts, tool_calls

_OPENING = 2
"""Tokens before reasoning that may stay when it is dropped: the mark that opens it, a line feed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the ids of a call stop to be those that its conversation had."""

    before: Completion
    """The call that is continued."""
    after: Completion
    """The call that continues it."""
    owner: Completion | None
    """The completion that sampled the ids which changed; None: they are of a prompt."""
    start: int
    """Place of the owner's first sampled id in `held`; 0 without an owner."""
    held: Sequence[int]
    """Ids of prompt and reply of `before`."""
    prompt: Sequence[int]
    """Ids of the prompt of `after`."""
    position: int
    """The first place where both differ, or one ends."""


Texts = Mapping[int, bytes]
"""The text of token ids, as far as it is known."""


def cause_of(difference: Difference, texts: Texts) -> ForkCause:
    """The class of the difference. `texts`: what is known of the texts of token ids."""
    owner = difference.owner
    same_text = _same_text(difference, texts)
    if owner is not None and same_text:
        return "tokens_merged"
    if (changed := _changed_message(difference.before, difference.after)) is not None:
        return changed
    if owner is None:
        return "template_changed"
    if _is_in_reasoning(difference, owner, texts):
        return "reasoning_dropped"
    if difference.position < difference.start:
        return "template_changed"  # in what begins a reply, and the reply did not think
    if _is_in_arguments(difference, owner, texts, same_text=same_text):
        return "arguments_reformatted"
    if owner.truncated or owner.aborted or isinstance(owner.stop_reason, str):
        return "truncated"
    if same_text is False:
        return "template_changed"
    return "other" if difference.position == len(difference.prompt) else "tokens_merged"


def known_texts(completions: Iterable[tuple[Completion, Sequence[int]]]) -> Texts:
    """The texts of the ids that these completions sampled, where their replies have them."""
    texts: dict[int, bytes] = {}
    for completion, ids in completions:
        found = sampled_texts(completion.choice)
        if len(found) == len(ids):
            for token, text in zip(ids, found, strict=True):
                if text is not None:
                    texts.setdefault(token, text)
    return texts


def _same_text(difference: Difference, texts: Texts) -> bool | None:
    """True if both spell the same text until their tokens meet again; None if that is not known."""
    sides = (difference.held, difference.prompt)
    at = [difference.position, difference.position]
    left = [b"", b""]
    while True:
        shorter = 0 if len(left[0]) <= len(left[1]) else 1
        if at[shorter] >= len(sides[shorter]):
            return None
        text = texts.get(sides[shorter][at[shorter]])
        if text is None:
            return None
        at[shorter] += 1
        left[shorter] += text
        common = min(map(len, left))
        if left[0][:common] != left[1][:common]:
            return False
        left = [text[common:] for text in left]
        if common and not any(left):
            return True


def _changed_message(before: Completion, after: Completion) -> ForkCause | None:
    """What the client changed in the first message that it replays otherwise than it was."""
    sent = _by_key(after.prompt)
    for key, messages in _by_key(before.path).items():
        replayed = sent.get(key)
        if replayed is None or all(map(is_, messages, replayed)):
            continue
        reasoning = reasoning_in(messages)
        if reasoning != reasoning_in(replayed):
            return "reasoning_dropped" if reasoning else "other"
        if _arguments(messages) != _arguments(replayed):
            return "arguments_reformatted"
    return None


def _by_key(path: MessagePath | None) -> dict[bytes, list[Json]]:
    """The messages by the key of the path that ends with them, first to last.

    Reasoning that is an item of its own has the key of the item before it.
    """
    found: dict[bytes, list[Json]] = {}
    for node in reversed(list(path or ())):
        found.setdefault(node.key, []).append(node.message)
    return found


def _arguments(messages: Iterable[Json]) -> list[str]:
    """The arguments of the tool calls in the messages, as texts."""
    found = (call.arguments for message in messages for call in tool_calls(message).values())
    return [text if isinstance(text, str) else json.dumps(text) for text in found]


def _may_be_written_otherwise(completion: Completion) -> bool:
    """True if the model wrote arguments in another form than templates write JSON in."""
    for text in _arguments(completion.items):
        try:
            value = json.loads(text)
            forms = [json.dumps(value, ensure_ascii=escaped) for escaped in (True, False)]
        except (ValueError, RecursionError):
            continue  # a template that cannot parse it writes it as it is
        if text not in forms:
            return True
    return False


def _is_in_arguments(
    difference: Difference, owner: Completion, texts: Texts, *, same_text: bool | None
) -> bool:
    """True if a template may have written arguments anew: those in a form of the model's own.

    Where the texts of the tokens are known, the text before the arguments must be the same.
    """
    if not _arguments(owner.items):
        return False
    same = _known_text(difference, texts)
    said = [*reasoning_in(owner.items), (owner.message or {}).get("content")]
    if same is not None and not all(_bytes(text) in same for text in said if isinstance(text, str)):
        return False
    return same_text is False or _may_be_written_otherwise(owner)


def _is_in_reasoning(difference: Difference, owner: Completion, texts: Texts) -> bool:
    """True if what changed begins where the reasoning of the reply does: all of it is dropped."""
    if difference.position - difference.start > _OPENING:
        return False
    reasoning, content = reasoning_in(owner.items), (owner.message or {}).get("content")
    if reasoning:
        ends = reasoning[0]
    elif isinstance(content, str) and "</think>" in content:
        ends = "</think>"
    else:
        return False
    same = _known_text(difference, texts)
    return same is None or not isinstance(ends, str) or _bytes(ends) not in same


def _known_text(difference: Difference, texts: Texts) -> bytes | None:
    """The text of the reply up to the difference; None where it is not known."""
    found = [texts.get(token) for token in difference.held[difference.start : difference.position]]
    return None if None in found else b"".join(filter(None, found))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
