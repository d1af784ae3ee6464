"""New locks for an exporter in a forked child: one that was held would never be released."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

Exporter = TypeVar("Exporter")


def renew_after_fork(exporter: Exporter, renew: Callable[[Exporter], None]) -> None:
    """Call `renew` with the exporter in every child that is forked while it exists."""
    if hasattr(os, "register_at_fork"):
        itself = weakref.ref(exporter)

        def renew_copy() -> None:
            copy = itself()
            if copy is not None:
                renew(copy)

        os.register_at_fork(after_in_child=renew_copy)
