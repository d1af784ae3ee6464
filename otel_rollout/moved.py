"""Former module paths: what was pickled, or imported, by a path that has changed is still found.

Every module once lay on one level. A pickle names the module of each class, so the former names
have to be importable for as long as such files are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED: dict[str, tuple[str, ...]] = {
    "active": (
        "record.running",
        "record.current",
        "record.options",
        "record.provider",
        "record.context",
        "record.deferred",
    ),
    "capture": ("record.capture", "record"),
    "cli": ("command",),
    "completion": ("trajectory",),
    "dialects": ("rebuild.dialects",),
    "doctor": ("command.doctor",),
    "episodes": ("trajectory.episode", "rebuild"),
    "exchange": ("spans",),
    "gather": ("record",),
    "groups": ("trajectory",),
    "histories": ("trajectory",),
    "instrumentors": ("look.instrumentors",),
    "messages": ("wire",),
    "partitions": ("export.partitions", "export"),
    "processes": ("record",),
    "processor": ("record",),
    "rowfile": ("export",),
    "rows": ("export",),
    "steps": ("trajectory",),
    "streams": ("wire",),
    "tokens": ("trajectory",),
    "tree": ("command.tree",),
    "workflow": ("workflows",),
}
"""Former name of a module, and where its names are now; the first that has one gives it."""


class _Finder:
    """Finds the former modules: each is empty and asks the rooms that its names are in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, former = name.rpartition(".")
        if package != "otel_rollout" or former not in _MOVED:
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """A plain module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        rooms = _MOVED[module.__name__.rpartition(".")[2]]

        def find(name: str) -> Any:
            for room in rooms:
                there = import_module(f"otel_rollout.{room}")
                if hasattr(there, name):
                    return getattr(there, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Have the former paths found; only the first call counts."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
