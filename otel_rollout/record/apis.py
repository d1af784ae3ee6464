"""The model APIs that are recorded: which requests are calls, how their replies end.

Also the fields with which a request asks for token ids. All that the recording of a call knows of
an API is in this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from otel_rollout.wire import Json

_TAIL = 64
"""Bytes at the end of a stream that hold the last event of a complete reply."""
_LAST_EVENT = re.compile(rb'(?:^|\n)data: ?(?:\[DONE\]|\{\s*"type":\s*"message_stop"\s*\})').search
"""The last event of a complete reply, OpenAI's or Anthropic's."""
_is_retrieval = re.compile(r"(?:.*/)?responses/[^/?]+(?:\?|$)").match
_endpoint = re.compile(
    r"[^?#]*?(/chat/completions|/completions|/responses|/v1/messages|/embeddings)/?(?:[?#]|$)"
).match
_FIELDS_OF_ENDPOINT: tuple[tuple[str, dict[str, Json]], ...] = (
    ("/chat/completions", {"return_token_ids": True, "logprobs": True}),
    ("/completions", {"return_token_ids": True, "logprobs": 0}),
)
"""End of a path, and the fields that ask for token ids and log-probabilities there."""


def is_call(method: str, path: str) -> bool:
    """True if a client's request is recorded.

    Every POST is, and the retrieval of a background response, whose reply has to be asked for.
    """
    method = method.lower()
    return method == "post" or (method == "get" and _is_retrieval(path) is not None)


def endpoint(url: str) -> str | None:
    """The path at which this address asks a model (`/chat/completions`). None: it asks none."""
    found = _endpoint(url)
    return None if found is None else found[1]


def choices_asked(body: Json) -> int:
    """How many choices a request asks for."""
    if not isinstance(body, dict):
        return 1
    n, prompt, prompts = body.get("n"), body.get("prompt"), 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    return (n if isinstance(n, int) else 1) * prompts


def token_id_fields(path: str, fields: Mapping[str, Json]) -> dict[str, Json]:
    """The fields that ask for token ids at this path, and `fields`; {} where nothing does."""
    path = "/" + path.split("?")[0].lstrip("/")
    for end, own in _FIELDS_OF_ENDPOINT:
        if path.endswith(end):
            return {**own, **fields}
    return {}


def may_be_last(chunk: bytes) -> bool:
    """True if these bytes may end the last event of a reply; cheap, `ends_reply` makes sure."""
    end = chunk[-_TAIL:]
    return b"[DONE]" in end or b"message_stop" in end


def ends_reply(events: bytes) -> bool:
    """True if these server-sent events, from their first byte on, end with the last of a reply."""
    return _LAST_EVENT(events, max(0, len(events) - _TAIL)) is not None


def ends_reply_in(tail: bytes) -> bool:
    """True if the last event of a reply begins in these bytes, which others came before."""
    return _LAST_EVENT(tail, 1) is not None  # from 1 on, `^` does not match
