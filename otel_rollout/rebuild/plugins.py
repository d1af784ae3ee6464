"""Formats that other distributions bring, by entry points.

`otel_rollout_dialect` names a `Dialect` of `rebuild.dialects`, `otel_rollout_source` a `Format` of
`rebuild.documents`.
"""

from __future__ import annotations

from typing import Any


def installed(group: str) -> tuple[Any, ...]:
    """What the entry points of a group name, in the order of their names."""
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=group)}
    return tuple(found[name].load() for name in sorted(found))
