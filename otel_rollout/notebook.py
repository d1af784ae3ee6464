"""How a notebook shows what users hold: the page that `otel-rollout view` has, inside a cell.

The room `view`, which makes it, stands above these classes and is loaded when one is shown.
"""

from __future__ import annotations

from importlib import import_module


class ShownInNotebooks:
    """A class whose objects a notebook shows as a page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        shown: str = import_module("otel_rollout.view").notebook_cell(self)
        return shown
