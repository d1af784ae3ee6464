"""What users see of the objects that they hold: a page in a notebook, a text, the drift.

All three are made in the room `view`, above the classes of these objects; the top-level package
connects them (`otel_rollout/__init__.py`). Tested in tests/view/test_html.py, test_show.py and
test_drift.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ShownInNotebooks:
    """A class whose objects a notebook shows as a page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _made_by["cell"](self)  # type: ignore[no-any-return]


class Printed:
    """A class whose objects are printed as text for people; its form may change."""

    __slots__ = ()

    def __str__(self) -> str:
        return _made_by["text"](self)  # type: ignore[no-any-return]


def drift_of(conversations: object) -> Any:
    """The `Drift` of the conversations of a trajectory."""
    return _made_by["drift"](conversations)


_made_by: dict[str, Callable[[object], Any]] = {}


def show_with(
    *,
    cell_of: Callable[[object], str],
    text_of: Callable[[object], str],
    drift_of: Callable[[object], Any],
) -> None:
    """Set the functions that return the HTML of a cell, the text of a trajectory and its drift."""
    _made_by.update(cell=cell_of, text=text_of, drift=drift_of)
