"""Documents in, trajectories out: each trajectory once, also where another document has it too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from otel_rollout.errors import SpanFormatError
from otel_rollout.rebuild.documents import atif, mini_swe
from otel_rollout.spans import digest_of
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.wire import Json

FORMATS = (atif.FORMAT, mini_swe.FORMAT)
"""All formats. Where several would read a document, the first of them does."""
_KEYS = "|".join(sorted({key for format_ in FORMATS for key in format_.keys}))
# Our own lines have a number for `schema_version`.
may_be_document = re.compile(
    rf'\s*(?:\[\s*)?\{{\s*"(?:(?!schema_version)(?:{_KEYS})"|schema_version"\s*:\s*")'.encode()
).match
"""True of the first bytes of a file that may be a document, or a list or lines of them."""


class Documents:
    """Reads documents, and remembers which trajectories came."""

    def __init__(self) -> None:
        self._seen: dict[str, bytes] = {}
        """A digest of the trajectory of each id."""

    def read(self, data: Json) -> Iterator[Trajectory]:
        """The trajectories of a document that did not come before.

        SpanFormatError for what is no document, or is not as its format says.
        """
        members = data if isinstance(data, dict) else {}
        found = next((each for each in FORMATS if each.recognises(members)), None)
        if found is None:
            got = ", ".join(map(repr, list(members)[:5])) if members else type(data).__name__
            raise SpanFormatError(f"{_NO_DOCUMENT}; got {got}")
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
    "expected a trajectory of ATIF, which has schema_version 'ATIF-v1.8' and the like, or of "
    "mini-swe-agent, which has trajectory_format"
)
