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
    "capture": ("record.capture", "record.recorder", "record"),
    "cli": ("command",),
    "completion": ("trajectory",),
    "dialects": ("rebuild.dialects",),
    "doctor": ("command.doctor",),
    "episodes": ("trajectory.episode", "rebuild"),
    "exchange": ("spans", "spans.writer"),
    "gather": ("record", "record.gather"),
    "groups": ("trajectory",),
    "guard": ("look.guard",),
    "histories": ("trajectory", "trajectory.histories"),
    "instrumentors": ("look.instrumentors",),
    "messages": ("wire", "wire.json"),
    "partitions": ("export.partitions", "export"),
    "processes": ("record", "record.processes"),
    "processor": ("record",),
    "progress": ("record.progress",),
    "rowfile": ("export", "export.rowfile"),
    "rows": ("export",),
    "served": ("wire.servers",),
    "steps": ("trajectory", "trajectory.steps"),
    "streams": ("wire", "wire.apis"),
    "tokens": ("trajectory",),
    "tree": ("command.tree",),
    "workflow": ("workflows", "workflows.workflow"),
}
"""Former name of a module, and where its names are now; the first that has one gives it.

Not those that had the name of a public function (`configure`, `reconstruct`, `rollout`, `tool`):
such a module, once imported, would hide the function.
"""


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
