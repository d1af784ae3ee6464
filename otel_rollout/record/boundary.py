"""The boundary between recording and the user's code: no exception of ours passes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

logger = logging.getLogger("otel_rollout")

P = ParamSpec("P")
R = TypeVar("R")

INCOMPLETE = "a model call was not captured completely"
NOT_SHOWN = "the rollout's span does not show something of its calls"


class guarded:  # noqa: N801 - used as `with guarded(...)` and `@guarded(...)`
    """Log an exception that is raised inside, with this message, and go on after the block.

    A decorated function gives None then. What ends a program or a task (CancelledError,
    KeyboardInterrupt) passes.
    """

    def __init__(self, message: str, *arguments: object, level: int = logging.ERROR) -> None:
        self._message = message
        self._arguments = arguments
        self._level = level

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, guarded."""

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            try:
                return function(*arguments, **named)
            except BaseException as error:
                if not self.__exit__(type(error), error, error.__traceback__):
                    raise
                return None  # type: ignore[return-value]

        return call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        logger.log(self._level, self._message, *self._arguments, exc_info=error)
        return True


class contained(guarded):  # noqa: N801 - used as `with contained(...)`
    """`guarded` for calls of an exporter: also what ends a program or a task stays inside.

    Only a KeyboardInterrupt on the main thread passes: there it is the user's.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or (
            isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
        ):
            return False
        logger.log(self._level, self._message, *self._arguments, exc_info=error)
        return True
