"""Rollouts in a process that began inside one: it records a part of its own.

A forked child inherits the context of its parent, and with it the parent's rollout, which it must
not end and whose clock it must not use. Another child of `multiprocessing` knows it by its origin.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.record.boundary import guarded
from otel_rollout.record.child_reports import CONTINUED, LOST, tell
from otel_rollout.record.children import is_pool_worker, origin, parent_span
from otel_rollout.record.context import ROLLOUT
from otel_rollout.record.options import Options
from otel_rollout.record.provider import rollout_provider, rollout_tracer
from otel_rollout.record.rollout_span import close, start_span
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state

logger = logging.getLogger("otel_rollout")


def here(active: ActiveRollout) -> ActiveRollout | None:
    """The rollout in this process: in a forked child its own part; None in a pool's process."""
    if active.pid == os.getpid():
        return active
    return _part(active.id, active.told, lambda: _fork(active))


def inherited() -> ActiveRollout | None:
    """The part of this process in the rollout that `multiprocessing` began it in. None: none.

    A forked child has it in its context; this is for those that are begun anew.
    """
    found = origin()
    if found is None:
        return None
    return _part(
        found["id"],
        found["told"],
        lambda: _open(
            found["id"],
            Options(policy_version=found["policy_version"], trainable=found["trainable"]),
            rollout_tracer(),
            parent_span(found),
        ),
    )


def say_lost() -> None:
    """Say that a model call is made here, in a process of a pool, in no rollout."""
    if process_state.lost_to is None:
        return
    tell(process_state.lost_to, LOST)
    if not process_state.has_said_lost:
        process_state.has_said_lost = True
        logger.warning(
            "a model call in a process pool was made without a rollout: a worker serves many. Hand "
            "the rollout on with each task: otel_rollout.propagate() where it is submitted, "
            "`with otel_rollout.continue_rollout(carrier):` in the task"
        )


def _part(
    rollout_id: str, told: str | None, opened: Callable[[], ActiveRollout]
) -> ActiveRollout | None:
    """The part that this process has of a rollout: opened when it is first needed."""
    with process_state.forking:
        if rollout_id not in process_state.parts:
            process_state.parts[rollout_id] = None  # whoever asks while it is opened
            if is_pool_worker():
                process_state.lost_to = told
            else:
                with guarded("a process could not continue its rollout; its calls are not in it"):
                    process_state.parts[rollout_id] = opened()
                    tell(told, CONTINUED)
        part = process_state.parts[rollout_id]
    return part if isinstance(part, ActiveRollout) else None


def _fork(active: ActiveRollout) -> ActiveRollout:
    options = Options(
        policy_version=active.options.policy_version, trainable=active.trajectory.trainable
    )
    return _open(active.id, options, active.tracer, active.span)


def _open(
    rollout_id: str, options: Options, tracer: trace.Tracer, parent: trace.Span
) -> ActiveRollout:
    """Open this process's part of the rollout that it began in."""
    context = otel_context.set_value(ROLLOUT, None)
    part = ActiveRollout(options, tracer, None, part_of=rollout_id)
    start_span(part, trace.set_span_in_context(parent, context))
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes.Finalize(None, _end, args=(part,), exitpriority=100)
    return part


def _end(part: ActiveRollout) -> None:
    """End a part and export it: a child of multiprocessing ends without running `atexit`."""
    close(part)
    flush = getattr(rollout_provider(), "force_flush", None)
    if flush is not None:
        flush()
