"""Keys of what recording keeps in the OpenTelemetry context, which follows tasks by itself.

Threads continue the one that they are started in, work of a pool that of who submits it. A subclass
of `Thread` whose own `run` does not call that of `Thread` begins in an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Token
from functools import partial
from typing import Any

from opentelemetry import context as otel_context

from otel_rollout.record.transports.hooks import Hook

ROLLOUT = otel_context.create_key("otel-rollout-current")
"""The `ActiveRollout` that calls belong to. Not set: the process's default. None: no rollout."""
CAPTURE_OFF = otel_context.create_key("otel-rollout-no-capture")
"""True under `no_capture()`."""
GATHERING = otel_context.create_key("otel-rollout-gathering")
"""The `Gathering` of a `gather_trajectory` whose rollout is about to begin."""
TOKEN_FIELDS = otel_context.create_key("otel-rollout-token-fields")
"""Request fields added beside those that ask for token ids. False: they are not asked for.
None or not set: as `configure` said."""


def detach(token: Token[otel_context.Context]) -> None:
    """Leave a context that was attached.

    A coroutine that is closed from outside, or a scope that a framework leaves in another task,
    ends in a context that is not its own: that one stays as it is.
    """
    try:
        token.var.reset(token)  # OpenTelemetry's own logs an error where there is none
    except ValueError:
        pass


@contextmanager
def attached(context: otel_context.Context) -> Iterator[None]:
    """The block runs in this context."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        detach(token)


# --- threads

_CONTEXT = "_otel_rollout_context"
"""Attribute of a thread that has not run yet: the context that it was started in."""


def _start(wrapped: Callable[..., Any], thread: Any, args: Any, kwargs: Any) -> Any:
    setattr(thread, _CONTEXT, otel_context.get_current())
    return wrapped(*args, **kwargs)


def _run(wrapped: Callable[..., Any], thread: Any, args: Any, kwargs: Any) -> Any:
    context = vars(thread).pop(_CONTEXT, None)
    if context is None:  # `run` of a superclass, or called without `start`
        return wrapped(*args, **kwargs)
    return _within(context, wrapped, *args, **kwargs)


def _submit(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    if not args:
        return wrapped(*args, **kwargs)  # it raises
    work = partial(_within, otel_context.get_current(), args[0])
    return wrapped(work, *args[1:], **kwargs)


def _within(context: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with attached(context):
        return function(*args, **kwargs)


THREAD_HOOKS = {
    "threading": (
        Hook("Thread", "start", _start),
        *(Hook(owner, "run", _run) for owner in ("Thread", "Timer")),
    ),
    "concurrent.futures.thread": (Hook("ThreadPoolExecutor", "submit", _submit),),
}
"""The hooks on threads and their pools, by the module that has them."""
