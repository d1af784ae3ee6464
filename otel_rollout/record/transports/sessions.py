"""Sessions: the id that a harness sends in a header of its requests, to say which run they are of.

It is kept on the span for people, as evidence of what belongs together. Nothing is decided by it: a
header may be shared by sub-agents, renewed in the middle of a run, or made up by a proxy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import methodcaller

from otel_rollout.record.privacy.secrets import Header, text_of
from otel_rollout.wire import Json, object_in

HEADERS = (
    "x-claude-code-session-id",
    "session-id",  # codex
    "session_id",  # codex, earlier
    "x-session-id",  # opencode
    "x-session-affinity",  # opencode
)
"""Headers that hold the id of a session, the most telling first."""
TURN_METADATA = "x-codex-turn-metadata"
"""A header that holds an object with it."""
_MEMBERS = ("session_id", "thread_id", "turn_id")
_LONGEST = 4096
"""Characters of the object that is read."""
_is_id = re.compile(r"[\w.:/+=-]{1,128}").fullmatch
_is_key = re.compile(r"(?:sk|pk|rk|gsk|hf|xai|or)[-_]|eyJ").match
_words = re.compile(r"[\s=;,]+").split
_CREDENTIALS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie")
_NAMES = frozenset((*HEADERS, TURN_METADATA, *map(str.encode, (*HEADERS, TURN_METADATA))))
_lower = methodcaller("lower")


def may_name_session(names: Iterable[str | bytes]) -> bool:
    """True if one of these headers may name a session."""
    return not _NAMES.isdisjoint(map(_lower, tuple(names)))  # a copy: other threads add to them


def session_of(headers: Iterable[Header]) -> str | None:
    """The session that a request's headers name; None where they name none, or no plain id.

    A value that is, or looks like, what the request was signed with is none.
    """
    found = {text_of(name).lower(): text_of(value) for name, value in headers}
    for name in HEADERS:
        if (session := _plain(found.get(name), found)) is not None:
            return session
    metadata = found.get(TURN_METADATA, "")
    members = object_in(metadata[: _LONGEST + 1]) or {}
    for member in _MEMBERS:
        if (session := _plain(members.get(member), found)) is not None:
            return session
    return None


def _plain(value: Json, headers: Mapping[str, str]) -> str | None:
    if not isinstance(value, str) or not _is_id(value) or _is_key(value):
        return None
    signed = (str(headers.get(name, "")) for name in _CREDENTIALS)
    return None if any(value in {*text.split(), *_words(text)} for text in signed) else value
