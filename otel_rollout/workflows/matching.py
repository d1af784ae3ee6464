"""The captured calls of steps that an agent built by hand, found by their conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otel_rollout.trajectory import Completion, Step, json_of
from otel_rollout.wire import Json, MessagePath, extend, texts_of


def tie(steps: Sequence[Step], completions: Iterable[Completion]) -> None:
    """Give each step that was built by hand its captured call.

    They are matched by the normalised conversation; among equal ones the first that no step has
    wins. A step whose call was not captured is not changed.
    """
    taken = {id(step.completion) for step in steps if step.completion is not None}
    by_path: dict[bytes, list[Completion]] = {}
    by_prompt: dict[tuple[bytes, str], list[Completion]] = {}
    for completion in completions:
        if not completion.items or completion.path is None or id(completion) in taken:
            continue
        by_path.setdefault(completion.path.key, []).append(completion)
        prompt = completion.prompt.key if completion.prompt else b""
        by_prompt.setdefault((prompt, "".join(texts_of(completion.message))), []).append(completion)
    keys = _Keys()
    for step in steps:
        if step.completion is not None:
            continue
        messages = _until_reply(step.chat_completions)
        found = _untaken(by_path.get(keys.of(messages)), taken) if messages else None
        if found is None and step.model_response:
            prompt = keys.of(step.chat_completions)
            found = _untaken(by_prompt.get((prompt, step.model_response)), taken)
        if found is not None:
            taken.add(id(found))
            step.completion = found


class _Keys:
    """Keys of conversations; the prefix shared with the conversation before is not hashed again."""

    def __init__(self) -> None:
        self._messages: Sequence[Json] = ()
        self._paths: list[MessagePath] = []

    def of(self, messages: Sequence[Json]) -> bytes:
        same = 0
        for message, before in zip(messages, self._messages, strict=False):
            if message is not before and message != before:
                break
            same += 1
        paths = self._paths[:same]
        for message in messages[same:]:
            parent = paths[-1] if paths else None
            path = extend(parent, message)
            try:
                _ = path.key
            except TypeError:  # not JSON: objects of the client, for example
                path = extend(parent, json_of(message))
            paths.append(path)
        self._messages, self._paths = messages, paths
        return paths[-1].key if paths else b""


def _untaken(candidates: list[Completion] | None, taken: set[int]) -> Completion | None:
    return next((c for c in candidates or () if id(c) not in taken), None)


def _until_reply(messages: Sequence[Json]) -> Sequence[Json]:
    """The conversation up to the last message of the model, without what came after it."""
    for position in range(len(messages), 0, -1):
        message = messages[position - 1]
        mapped = isinstance(message, Mapping)
        role = message.get("role") if mapped else getattr(message, "role", None)
        if role in ("assistant", "model"):
            return messages[:position]
    return ()
