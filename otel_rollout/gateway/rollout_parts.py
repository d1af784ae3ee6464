"""The rollouts that a gateway records calls of.

A rollout that runs in this process is found, not kept. Any other one that a token or a header names
has a part here, which ends after a time without a call, or when there are too many. Rollouts that
were begun at the gateway itself are kept until they are ended, or have been idle for too long.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from otel_rollout.record import (
    ActiveRollout,
    Carried,
    Options,
    begin_here,
    begin_part_here,
    close,
    running_rollout,
)
from otel_rollout.wire import dumps, loads


class Versions:
    """The policy versions that were set over HTTP, of single rollouts and of all.

    file: has a line for each, written by the process that holds the rollouts and read by the
        others. None: there is one process.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._set: dict[str | None, str | int] = {}

    def set(self, rollout_id: str | None, version: str | int | None) -> None:
        """Set the version of a rollout, or of all (None); None: forget that of the rollout."""
        self._take(rollout_id, version)
        if self._file is not None:
            self._file.write(dumps([rollout_id, version]).encode() + b"\n")

    def of(self, rollout_id: str | None, otherwise: str | int | None) -> str | int | None:
        """The version of a rollout now; `otherwise` where none was set."""
        if self._file is not None and self._file.readable():
            while line := self._file.readline():
                if not line.endswith(b"\n"):  # it is being written
                    self._file.seek(-len(line), os.SEEK_CUR)
                    break
                self._take(*loads(line))
        return self._set.get(rollout_id, self._set.get(None, otherwise))

    def _take(self, rollout_id: str | None, version: str | int | None) -> None:
        if rollout_id is None:
            self._set.clear()
        if version is None:
            self._set.pop(rollout_id, None)
        else:
            self._set[rollout_id] = version


@dataclass(slots=True)
class HeldRollout:
    """A rollout, or a part of one, that the gateway holds."""

    active: ActiveRollout
    idle_seconds: float
    """Seconds without a call after which it ends."""
    used: float
    """When its last call began or ended, by `time.monotonic`."""
    calls: int = 0
    """Calls that are under way."""


class HeldRollouts:
    """All rollouts of one gateway.

    most: parts that are kept at a time; the one that was idle longest ends for a further one.
    idle_seconds: how long a part is kept without a call.
    """

    def __init__(self, *, most: int, idle_seconds: float, versions: BinaryIO | None = None) -> None:
        self._versions = Versions(versions)
        self._most = most
        self._idle_seconds = idle_seconds
        self._parts: OrderedDict[tuple[str, int], HeldRollout] = OrderedDict()
        """Parts by the rollout and the trace that a carrier names, the latest used last."""
        self._begun: dict[str, HeldRollout] = {}
        """Rollouts that were begun here, by id."""
        self._timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()

    @contextmanager
    def call(self, carried: Carried) -> Iterator[ActiveRollout]:
        """The rollout that a call belongs to, which is kept while the call is under way."""
        held = self._held(carried)
        held.calls += 1
        try:
            yield held.active
        finally:
            held.calls -= 1
            held.used = time.monotonic()

    def _held(self, carried: Carried) -> HeldRollout:
        if (begun := self._begun.get(carried.rollout_id)) is not None:
            return begun
        if (active := running_rollout(carried.rollout_id)) is not None:
            return HeldRollout(active, self._idle_seconds, time.monotonic())
        key = carried.rollout_id, carried.trace_id
        held = self._parts.get(key)
        if held is None:
            self._make_room()
            part = self._with_version(begin_part_here(carried), carried.policy_version)
            held = self._parts[key] = HeldRollout(part, self._idle_seconds, time.monotonic())
            self._watch()
        self._parts.move_to_end(key)
        return held

    def _make_room(self) -> None:
        while len(self._parts) >= self._most:
            idle = next((key for key, held in self._parts.items() if not held.calls), None)
            if idle is None:
                return  # each has a call under way
            close(self._parts.pop(idle).active)

    def begin(self, options: Options, idle_seconds: float) -> ActiveRollout:
        """Begin a rollout whose code runs elsewhere."""
        own: Any = options.policy_version
        given = self._versions.of(None, None) if own is None else own
        active = self._with_version(begin_here(replace(options, policy_version=given)), given)
        if own is not None:
            self._versions.set(active.id, given)
        self._begun[active.id] = HeldRollout(active, idle_seconds, time.monotonic())
        self._watch()
        return active

    def _with_version(self, active: ActiveRollout, first: str | int | None) -> ActiveRollout:
        """A rollout, or a part of one, whose version is asked for with each call."""
        now = partial(self._versions.of, active.id, first)
        active.options = replace(active.options, policy_version=now)
        return active

    def set_version(self, version: str | int, rollout_id: str | None = None) -> None:
        """Set the policy version of a rollout that was begun here. None: of all."""
        self._versions.set(rollout_id, version)
        for active in [each.active for each in self._begun.values()]:
            if active.trajectory.policy_version is None and rollout_id in (None, active.id):
                active.apply(active.options)

    @property
    def begun_count(self) -> int:
        """How many rollouts that were begun here are open."""
        return len(self._begun)

    def begun(self, rollout_id: str) -> ActiveRollout | None:
        """The rollout with this id that was begun here and has not ended. None: there is none."""
        held = self._begun.get(rollout_id)
        return None if held is None else held.active

    def end(
        self, rollout_id: str, output: object = None, error: BaseException | None = None
    ) -> None:
        """End a rollout that was begun here."""
        close(self._begun.pop(rollout_id).active, output, error)
        self._versions.set(rollout_id, None)

    def close(self) -> None:
        """End all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pid != os.getpid():
            return
        for key in list(self._parts):
            close(self._parts.pop(key).active)
        for rollout_id in list(self._begun):
            self.end(rollout_id, error=ConnectionAbortedError("the gateway was stopped"))

    def _watch(self) -> None:
        """Look for idle ones in a while."""
        if self._timer is not None:
            return
        every = (*self._parts.values(), *self._begun.values())
        if every:
            least = min(held.idle_seconds for held in every)
            later = max(0.05, least / 4)
            self._timer = asyncio.get_running_loop().call_later(later, self._end_idle)

    def _end_idle(self) -> None:
        self._timer = None
        now = time.monotonic()
        for key, held in list(self._parts.items()):
            if not held.calls and now - held.used >= held.idle_seconds:
                close(self._parts.pop(key).active)
        for rollout_id, held in list(self._begun.items()):
            if not held.calls and now - held.used >= held.idle_seconds:
                reason = f"no model call for {held.idle_seconds:g} seconds"
                self.end(rollout_id, error=TimeoutError(reason))
        self._watch()
