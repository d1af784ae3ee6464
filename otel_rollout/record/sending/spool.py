"""Spans in a folder: from before they are sent until they have arrived.

They outlive the process, not a failure of power: a sync may take seconds on a busy disk, for which
the spans behind it would be in memory alone. Each process has a journal of its own in a subfolder.
What a process left there that has ended, also one that was killed, another process takes over,
which is configured with the same folder.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout.errors import ConfigurationError
from otel_rollout.journal import Journal, Place
from otel_rollout.otlp import EncodedSpan, encode_spans
from otel_rollout.record.state import process_state

logger = logging.getLogger("otel_rollout")

_SEGMENT_BYTES = 1 << 23
"""A killed process leaves a segment of which most may have arrived: they are sent once more."""


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span on the disk."""

    journal: Journal
    place: Place

    def read(self) -> EncodedSpan:
        """The span. SpanFormatError if it is damaged, OSError if it cannot be read."""
        return EncodedSpan(self.journal.read(self.place))

    def release(self) -> None:
        """Hold it no longer: it has arrived."""
        with suppress(OSError):  # it stays, and is sent once more later
            self.journal.release([self.place])


class Spool:
    """The spans that this process keeps in a folder, and those that former ones left there.

    folder: is created. ConfigurationError if it cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))
        """The folder, also after the process has gone to another one."""
        self._taken_over: list[Journal] = []
        self._own: Journal | None = None
        self._creating = threading.RLock()
        try:
            self._journal()
        except OSError as error:
            raise ConfigurationError(
                f"configure(train_folder=...): expected a folder that can be written, got "
                f"{str(self.folder)!r} ({error.strerror})"
            ) from None

    def renew(self) -> None:
        """Begin anew in a forked child: what is kept is the parent's."""
        self._creating = threading.RLock()
        self._close()

    def keep(self, span: ReadableSpan) -> KeptSpan:
        """Write a span to the disk. OSError if it does not take it."""
        journal = self._journal()
        (place,) = journal.append([encode_spans([span]).SerializeToString()])
        return KeptSpan(journal, place)

    def left(self) -> Iterator[KeptSpan]:
        """The spans that processes left which have ended: they are this one's now."""
        own = self._journal()
        for folder in sorted(self.folder.iterdir()):
            if not (folder / "lock").is_file():
                continue
            journal = own
            if folder != own.folder:
                try:
                    journal = Journal(folder)
                except (ConfigurationError, OSError):  # its process runs, or it is another user's
                    continue
                self._taken_over.append(journal)
            for place, _ in journal.records(partial(logger.error, "spans are lost: %s")):
                yield KeptSpan(journal, place)

    def close(self) -> None:
        """Let others have the spans that have not arrived; journals without any are removed."""
        for journal in self._close():
            if journal.size == 0:
                with suppress(OSError):
                    (journal.folder / "lock").unlink()
                    journal.folder.rmdir()

    def _close(self) -> list[Journal]:
        journals = [*self._taken_over, *([] if self._own is None else [self._own])]
        self._taken_over, self._own = [], None
        for journal in journals:
            journal.close()
        return journals

    def _journal(self) -> Journal:
        """The journal of this process. OSError if it cannot be created."""
        with self._creating:
            number = 0
            while self._own is None:
                name = f"{process_state.name}-{number}"
                try:
                    folder = self.folder / name
                    self._own = Journal(folder, segment_bytes=_SEGMENT_BYTES, fsync=False)
                except ConfigurationError:  # another process took it for one that was left
                    number += 1
            return self._own
