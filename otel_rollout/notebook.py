"""Objects that are shown: as a page where a notebook's cell ends with one, as text when printed.

Page and text are made in the room `view`, above the classes that are shown so; the top-level
package connects the two (`otel_rollout/__init__.py`). Tested in tests/view/test_html.py and
tests/view/test_show.py.
"""

from __future__ import annotations

from collections.abc import Callable


class ShownInNotebooks:
    """A class whose objects a notebook shows as a page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _made_by["cell"](self)


class Printed:
    """A class whose objects are printed as text for people; its form may change."""

    __slots__ = ()

    def __str__(self) -> str:
        return _made_by["text"](self)


_made_by: dict[str, Callable[[object], str]] = {}


def show_with(*, cell_of: Callable[[object], str], text_of: Callable[[object], str]) -> None:
    """Set the functions that return the HTML of a cell and the text of a trajectory."""
    _made_by.update(cell=cell_of, text=text_of)
