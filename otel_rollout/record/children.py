"""Processes that begin inside a rollout, and what they know of it.

A forked child has its parent's memory; any other one that `multiprocessing` begins gets the
rollout on its process object. The rollout gets a file in which they tell it of their calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.record.boundary import guarded
from otel_rollout.record.child_reports import new_file
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT
from otel_rollout.record.hooks import Hook
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state

_ORIGIN = "_otel_rollout"
"""Attribute of the process objects of `multiprocessing`."""
_POOLS = ("concurrent.futures.process", "multiprocessing.pool")
"""Modules that the work of a pool's processes comes from."""


def origin() -> dict[str, Any] | None:
    """The rollout that `multiprocessing` began this process in. None: there is none."""
    processes = sys.modules.get("multiprocessing.process")
    found = getattr(processes.current_process(), _ORIGIN, None) if processes else None
    return found if isinstance(found, dict) else None


def is_pool_worker() -> bool:
    """True if this process works for a pool, whose tasks may come from any rollout."""
    process = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    target = getattr(process() if process else None, "_target", None)
    return getattr(target, "__module__", None) in _POOLS


def _beginning() -> ActiveRollout | None:
    """The rollout that a process begins in here, with its file."""
    context = otel_context.get_current()
    active = context.get(ROLLOUT, process_state.default)
    if context.get(CAPTURE_OFF) or not isinstance(active, ActiveRollout):
        return None
    if not active.running or active.pid != os.getpid():
        return None
    with active.lock:
        if active.told is None:
            active.told = new_file()
    return active


def _start(wrapped: Callable[..., Any], process: Any, args: Any, kwargs: Any) -> Any:
    with guarded("a process could not be told of its rollout; its calls are not recorded"):
        active = _beginning()
        if active is not None:
            span, version = active.span.get_span_context(), active.policy_version
            setattr(
                process,
                _ORIGIN,
                {
                    "id": active.id,
                    "trace_id": span.trace_id,
                    "span_id": span.span_id,
                    "trace_flags": int(span.trace_flags),
                    "policy_version": version,
                    "trainable": active.trajectory.trainable,
                    "told": active.told,
                },
            )
    return wrapped(*args, **kwargs)


HOOKS = {"multiprocessing.process": (Hook("BaseProcess", "start", _start),)}
"""The hook that tells processes of their rollout, by its module."""


def parent_span(found: dict[str, Any]) -> trace.Span:
    """The span that the processes of this origin work for."""
    flags = trace.TraceFlags(found["trace_flags"])
    context = trace.SpanContext(found["trace_id"], found["span_id"], True, flags)
    return trace.NonRecordingSpan(context)


@guarded("a fork could not be prepared; its calls are not in the rollout")
def _before_fork() -> None:
    _beginning()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
