"""Documents in, trajectories out: each trajectory once, also where another document has it too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from otel_rollout.errors import SpanFormatError
from otel_rollout.rebuild.documents.calls import Format, Members
from otel_rollout.rebuild.plugins import installed
from otel_rollout.spans import digest_of
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.wire import Json

_OF_OTHERS = (
    *("trajectory_format", "info", "messages", "instance_id", "chat_messages", "role", "content"),
    *("parts", "conversation_id", "session_id", "trajectory_id", "agent", "steps", "notes"),
    *("extra", "final_metrics", "continued_trajectory_ref", "subagent_trajectories"),
    *("rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids", "model"),
    *("generation_log_probs", "routed_experts", "output_items", "token_item_index", "created_at"),
    *("entry_digests", "frozen", "incomplete"),
)
"""Members with one of which a document, or the state of a rollout, begins: formats are loaded for
one alone."""


@cache
def formats() -> tuple[Format, ...]:
    """All formats. Where several would read a document, the first of them does."""
    return installed("otel_rollout_source")


_KEYS = "|".join(_OF_OTHERS)
# Our own lines begin with a number for `schema_version`, too.
_VERSION = r'schema_version"\s*:\s*(?:"|\d+\s*,\s*"rollout_id")'
may_be_document = re.compile(
    rf'\s*(?:\[\s*)?\{{\s*"(?:(?!schema_version)(?:{_KEYS})"|{_VERSION})'.encode()
).match
"""True of the first bytes of a file that may be a document, or a list or lines of them."""


def documents_in(data: Json) -> list[Json]:
    """The documents of a JSON value: a list of them, or one, which may be a list of messages."""
    named = (each.list_member for each in formats() if each.is_list and each.is_list(data))
    if (name := next(named, None)) is not None:
        return [{name: data}]
    return data if isinstance(data, list) else [data]


class CaptureState(NamedTuple):
    """What NeMo Gym keeps of a rollout beside its entries."""

    rollout_id: str
    is_incomplete: bool
    """True if it is marked so."""
    call_ids: frozenset[str]
    """The calls that were begun, as far as that was noted: each has an entry, or was lost."""


class Documents:
    """Reads documents, and remembers which trajectories came."""

    def __init__(self) -> None:
        self._seen: dict[str, bytes] = {}
        """A digest of the trajectory of each id."""
        self._entries: dict[str, tuple[Format, list[Members]]] = {}
        """Token entries by rollout, until `rollouts`."""

    def read(self, data: Json) -> Iterator[Trajectory]:
        """The trajectories of a document that did not come before.

        Token entries are held: `rollouts` gives their trajectories.
        SpanFormatError for what is no document, or is not as its format says.
        """
        members = data if isinstance(data, dict) else {}
        found = next((each for each in formats() if each.recognises(members)), None)
        if found is None:
            got = ", ".join(map(repr, list(members)[:5])) if members else type(data).__name__
            raise SpanFormatError(f"{_NO_DOCUMENT}; got {got}")
        if found.rollout_of is not None:
            self._entries.setdefault(found.rollout_of(members), (found, []))[1].append(members)
        else:
            yield from self._new(found, members)

    def rollouts(
        self, fail: Callable[[SpanFormatError], None], state: CaptureState | None = None
    ) -> Iterator[Trajectory]:
        """The trajectories of the token entries that were read since the last time.

        fail: called for a rollout whose entries cannot be read.
        state: of the rollout that the entries are of, which may have none.
        """
        held, self._entries = self._entries, {}
        if state is not None and state.is_incomplete:
            for each in formats():
                if each.rollout_of is not None:
                    held.setdefault(state.rollout_id, (each, []))
        for id_, (format_, entries) in held.items():
            is_incomplete = False
            if state is not None and state.rollout_id == id_:
                ids = {entry["model_call_id"] for entry in entries}
                is_incomplete = state.is_incomplete or not state.call_ids <= ids
            found = {"rollout_id": id_, "entries": entries, "is_incomplete": is_incomplete}
            try:
                yield from self._new(format_, found)
            except SpanFormatError as error:
                fail(SpanFormatError(f"rollout {id_!r}: {error}"))

    def _new(self, found: Format, members: Members) -> Iterator[Trajectory]:
        """Those that did not come before. SpanFormatError for what is not as its format says."""
        try:
            for trajectory in found.read(members):
                content = digest_of(trajectory.to_json().encode())
                if self._seen.get(trajectory.id) != content:
                    self._seen[trajectory.id] = content
                    yield trajectory
        except SpanFormatError:
            raise
        except KeyError as error:
            raise SpanFormatError(f"not as {found.name} has it: {error} is missing") from None
        except UNREADABLE as error:
            raise SpanFormatError(f"not as {found.name} has it ({error!r:.200})") from None


_NO_DOCUMENT = (
    "expected a trajectory of ATIF, which has schema_version 'ATIF-v1.8' and the like (install "
    "otel-rollout-exporter-atif), a token entry of NeMo Gym (otel-rollout-exporter-nemo-gym), or a "
    "trajectory of mini-swe-agent, a list of chat messages or a history of Pydantic AI "
    "(otel-rollout-formats)"
)
