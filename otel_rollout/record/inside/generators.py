"""Generators that are rollouts: what their readers do between two items is not the agent's.

The code that reads a generator has its context, and with it the rollout that the generator has
entered. It is told apart by the generator's frame, which waits at a `yield` meanwhile.
"""

from __future__ import annotations

import dis
import inspect
from types import FrameType

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
