"""Keys of what recording keeps in the OpenTelemetry context, which follows tasks by itself.

Threads get it from `opentelemetry-instrumentation-threading`. The code that reads a generator has
the generator's context, and with it the rollout that this has entered: what a reader does between
two items is told apart by the generator's frame, which waits at a `yield` meanwhile.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from types import FrameType

from opentelemetry import context as otel_context

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


GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""Flags of a generator's code."""
ENTERING = frozenset(("contextlib", "otel_rollout.record.rollouts"))
"""Modules between a `with` and the rollout that it enters."""
_FIXTURES = frozenset(("_pytest", "pytest_asyncio", "anyio"))
"""Packages that read a generator for code that is to be inside of it, as contextlib does."""


def entering_generator(frame: FrameType | None) -> FrameType | None:
    """The frame of the generator whose `with` enters a rollout here. None: no generator's does.

    A `@contextmanager` is part of the code that enters it.
    """
    while frame is not None:
        above, flags = frame.f_back, frame.f_code.co_flags
        if frame.f_globals.get("__name__") not in ENTERING:
            if not flags & GENERATOR or flags & inspect.CO_ITERABLE_COROUTINE:
                return None
            reader = "" if above is None else str(above.f_globals.get("__name__"))
            if reader != "contextlib":
                return None if reader.partition(".")[0] in _FIXTURES else frame
        frame = above
    return None


def is_outside(generator: FrameType) -> bool:
    """True while a generator waits at a `yield`, so that what runs is not its own code."""
    code, last = generator.f_code, generator.f_lasti
    now, after, *_ = *map(dis.opname.__getitem__, code.co_code[last : last + 3 : 2]), "", ""
    if now == "YIELD_VALUE":  # after an `await` comes RESUME 3; Python 3.10 has none
        return after != "RESUME" or code.co_code[last + 3] & 3 != 3
    return after == "YIELD_FROM" and not code.co_flags & inspect.CO_ASYNC_GENERATOR
