"""Rollouts in a forked process: the child records a part of its own.

A child inherits the context of its parent, and with it the parent's rollout, which it must not
end and whose clock it must not use.
"""

from __future__ import annotations

import logging
import os
import sys

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.record.context import ROLLOUT
from otel_rollout.record.options import Options
from otel_rollout.record.provider import rollout_provider
from otel_rollout.record.running import ActiveRollout, close, start_span
from otel_rollout.record.state import process_state

logger = logging.getLogger("otel_rollout")


_POOLS = ("concurrent.futures.process", "multiprocessing.pool")
"""Modules that the work of a pool's processes comes from."""


def here(active: ActiveRollout) -> ActiveRollout | None:
    """The rollout in this process: in a forked child its own part; None in a pool's process."""
    if active.pid == os.getpid():
        return active
    with process_state.forking:
        if id(active) not in process_state.parts:
            process_state.parts[id(active)] = None if _is_pool_worker() else _fork(active)
        part = process_state.parts[id(active)]
    return part if isinstance(part, ActiveRollout) else None


def _fork(active: ActiveRollout) -> ActiveRollout:
    """Open this process's part of the rollout that it was forked in."""
    context = otel_context.set_value(ROLLOUT, None)
    options = Options(
        policy_version=active.options.policy_version, trainable=active.trajectory.trainable
    )
    part = ActiveRollout(options, active.tracer, None, part_of=active.id)
    start_span(part, trace.set_span_in_context(active.span, context))
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes.Finalize(None, _end_fork, args=(part,), exitpriority=100)
    return part


def _end_fork(part: ActiveRollout) -> None:
    """End a part and export it: a child of multiprocessing ends without running `atexit`."""
    close(part)
    flush = getattr(rollout_provider(), "force_flush", None)
    if flush is not None:
        flush()


def _is_pool_worker() -> bool:
    """True if this process works for a pool, whose tasks may come from any rollout."""
    process = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    target = getattr(process() if process else None, "_target", None)
    if getattr(target, "__module__", None) not in _POOLS:
        return False
    logger.warning(
        "a model call in a process pool was made without a rollout: a worker serves many. Hand "
        "the rollout on with each task: otel_rollout.propagate() where it is submitted, "
        "`with otel_rollout.continue_rollout(carrier):` in the task"
    )
    return True
