"""Processes that begin inside a rollout: each records a part of its own.

A forked child has its parent's memory, and with it the parent's rollout, which it must not end and
whose clock it must not use. Any other process of `multiprocessing` gets the rollout on its process
object. A process of a pool records no part: its tasks may come from any rollout. The rollout has a
file in which they report their calls (`child_reports`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context

from otel_rollout.first_use import call_once_imported
from otel_rollout.record.boundary import guarded
from otel_rollout.record.options import Options
from otel_rollout.record.processes import programs
from otel_rollout.record.processes.carrier import Carried, group_of, part_of
from otel_rollout.record.processes.child_reports import CONTINUED, LOST, new_file, report
from otel_rollout.record.processes.programs import Made, beginning, starting
from otel_rollout.record.provider import rollout_provider
from otel_rollout.record.rollout_span import close, start_span
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.hooks import Hook

logger = logging.getLogger("otel_rollout")

_ORIGIN = "_otel_rollout"
"""Attribute of the process objects of `multiprocessing`."""
_CLIENTS = ("openai", "anthropic", "httpx", "aiohttp.client", "requests.sessions", "urllib3")
"""Modules one of which a program imports before it asks a model."""
_WATCH = ("otel_rollout.record.transports.capture", "watch")
"""What a process that is begun anew calls then: its calls are reported, configured or not."""
_POOLS = ("concurrent.futures.process", "multiprocessing.pool")
"""Modules that the work of a pool's processes comes from."""


# --- in the process that begins others


def _beginning() -> ActiveRollout | None:
    """The rollout that a process begins in here, with its file."""
    active = beginning()
    if active is None or active.pid != os.getpid():
        return None
    with active.lock:
        if active.reports is None:
            active.reports = new_file()
    return active


def _start(wrapped: Callable[..., Any], process: Any, args: Any, kwargs: Any) -> Any:
    active = None
    with guarded("a process was not given its rollout; its calls are not recorded"):
        active = _beginning()
        if active is not None:
            # Plain values and a light module: a process that never records imports no more.
            hooks = Made(call_once_imported, _CLIENTS, *_WATCH)
            setattr(process, _ORIGIN, (astuple(Carried.of(active)), active.reports, hooks))
    with starting(process, active):
        return wrapped(*args, **kwargs)


HOOKS = {"multiprocessing.process": (Hook("BaseProcess", "start", _start),), **programs.HOOKS}
"""The hooks on what starts processes, by the module that has it."""


@guarded("a fork could not be prepared; its calls are not in the rollout")
def _before_fork() -> None:
    _beginning()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


# --- in the process that was begun


def here(active: ActiveRollout) -> ActiveRollout | None:
    """The rollout in this process: in a forked child its own part; None in a pool's process."""
    if active.pid == os.getpid():
        return active
    group_id, size, run, outer, task_id = group_of(active)
    options = Options(
        group_id=group_id,
        group_size=size,
        group_run=run,
        task_id=task_id,
        policy_version=active.versioned.options.policy_version,
        trainable=active.trajectory.trainable,
    )
    context = trace.set_span_in_context(active.span)
    part = _part(active.reports, context, active.id, options, outer)
    if part is not None and part.gateway is None:
        part.gateway = active.gateway
    return part


def inherited() -> ActiveRollout | None:
    """The part of this process in the rollout that `multiprocessing` began it in. None: none.

    A forked child has it in its context; this is for those that are begun anew.
    """
    origin = getattr(_process(), _ORIGIN, None)
    if not isinstance(origin, tuple):
        return None
    carried, reports = Carried(*origin[0]), origin[1]
    part = carried.rollout_id, carried.options, carried.outer_group_id
    return _part(reports, carried.context, *part)


def report_lost() -> None:
    """Report that a model call is made here, in a process of a pool, in no rollout."""
    if process_state.lost_to is None:
        return
    report(process_state.lost_to, LOST)
    if not process_state.warned_lost:
        process_state.warned_lost = True
        logger.warning(
            "a model call in a process pool was made without a rollout: a worker serves many. Hand "
            "the rollout on with each task: otel_rollout.propagate() where it is submitted, "
            "`with otel_rollout.continue_rollout(carrier):` in the task"
        )


def _process() -> Any:
    """The process object of this process. None: `multiprocessing` is not imported."""
    current = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    return None if current is None else current()


def _part(
    reports: str | None, context: Context, rollout_id: str, options: Options, outer: str | None
) -> ActiveRollout | None:
    """The part that this process has of a rollout: opened when it is first needed."""
    with process_state.forking:
        if rollout_id not in process_state.parts:
            process_state.parts[rollout_id] = None  # whoever asks while it is opened
            target = getattr(_process(), "_target", None)
            if getattr(target, "__module__", None) in _POOLS:
                process_state.lost_to = reports
            else:
                with guarded("a process could not continue its rollout; its calls are not in it"):
                    opened = _opened(part_of(rollout_id, options, outer), context)
                    process_state.parts[rollout_id] = opened
                    report(reports, CONTINUED)
        part = process_state.parts[rollout_id]
    return part if isinstance(part, ActiveRollout) else None


def _opened(part: ActiveRollout, context: Context) -> ActiveRollout:
    start_span(part, context)
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes.Finalize(None, _end, args=(part,), exitpriority=100)
    return part


def _end(part: ActiveRollout) -> None:
    """End a part and export it: a child of multiprocessing ends without running `atexit`."""
    close(part)
    flush = getattr(rollout_provider(), "force_flush", None)
    if flush is not None:
        flush()
