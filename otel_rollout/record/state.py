"""The state of recording in this process, in one object.

`configure` fills it and `shutdown` empties it; what needs no `configure` (hooks that were put in
by hand, rollouts on a provider of the user's) is in it too. Everything else that is recorded
travels in the OpenTelemetry context.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from opentelemetry import trace

from otel_rollout.record.observer import Observers
from otel_rollout.record.settings import Settings
from otel_rollout.record.transports.hooks import Hooks


class ProcessState:
    """All that recording keeps of the process that it runs in.

    This module is imported by those of the classes whose objects it keeps. Such an object is an
    `object` here; its reader checks the class.
    """

    def __init__(self) -> None:
        self.name = _new_name()
        """A name of this process that no other one has, also not after a fork."""
        self.configuring = threading.RLock()
        """Held while `configure` or `shutdown` is at work."""
        self.setup: object | None = None
        """The work of `configure`, for `shutdown` to undo. None: not configured."""
        self.provider: trace.TracerProvider | None = None
        """The provider of rollout spans. None: OpenTelemetry's global one."""
        self.settings = Settings()
        """The options of `configure`; set them by `use`."""
        self.content = self.settings.content
        """What of prompts and replies is recorded, and may be on spans that are exported."""
        self.observers = Observers()
        """Those that look at what is recorded."""
        self.tasks_in_names: set[str] = set()
        """Tasks that are in names of spans: they are few, since backends list the names."""
        self.hooks = Hooks()
        self.tracers: weakref.WeakKeyDictionary[trace.TracerProvider, trace.Tracer] = (
            weakref.WeakKeyDictionary()
        )
        """Our tracer of each provider."""
        self.metrics: object | None = None
        """The instruments (`Metrics`) of the meter provider that was the global one last."""
        self.rollouts: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        """Each `ActiveRollout` that began in this process, by its id, while anybody holds it."""
        self.default: object | None = None
        """The `ActiveRollout` of calls whose context has none. None: they belong to no rollout."""
        self.parts: dict[str, object | None] = {}
        """The part (`ActiveRollout`) that this process has of a rollout that it was begun in, by
        the rollout's id. None: it has no part."""
        self.lost_to: str | None = None
        """In a process of a pool, the file of the rollout that it was begun in. None: no pool's, or
        it was begun in none."""
        self.warned_lost = False
        """True if the log has said that calls of this process are in no rollout."""
        self.forking = threading.RLock()
        """Held while a part is opened."""
        self.ended_exporters: weakref.WeakSet[object] = weakref.WeakSet()
        """Exporters of spans that `shutdown` has shut down, while anybody holds them."""
        self.warned_without_calls = False
        """True if the log has said that a rollout ended and none of its calls was captured."""
        self.warned_unrecorded = False
        """True if `configure` was called, or the log has said that nothing records rollouts."""
        self.gateways: set[str] = set()
        """Addresses of the gateways that this process serves."""
        self.gateway_here: Callable[[str | None], Any] | None = None
        """Starts the gateway of this process in front of a model server, or returns it. None:
        `configure` was not called."""
        self.refusals: dict[object, Any] = {}
        """What servers answered (`Refusals`) to requests that ask for token ids, by their kind."""
        self.programs: dict[tuple[str, str], int] = {}
        """Programs that rollouts started and whose calls nobody captures, since `configure`; as
        those of one rollout, in `ActiveRollout.programs`."""
        self.waiting: deque[Callable[[], None]] = deque()
        """Work that the garbage collector asks for, which runs anywhere, also where a lock is held
        that ending a span takes. It is done at the next model call or look at a rollout."""

    def use(self, settings: Settings) -> None:
        """Record with these options from now on."""
        self.settings, self.content = settings, settings.content
        self.refusals, self.programs = {}, {}

    def do_waiting(self) -> None:
        """Do everything that waits."""
        while self.waiting:
            try:
                step = self.waiting.popleft()
            except IndexError:
                return  # another thread was faster
            step()

    def renew_after_fork(self) -> None:
        """Forget, in a forked child, what was the parent's."""
        self.name = _new_name()
        self.forking = threading.RLock()  # another thread of the parent may have held it
        self.parts, self.programs = {}, {}
        self.lost_to, self.warned_lost = None, False
        self.waiting.clear()


def _new_name() -> str:
    return f"{os.getpid():x}-{os.urandom(4).hex()}"


process_state = ProcessState()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process_state.renew_after_fork)
