"""Named values that a user keeps with a trajectory: its metrics and its metadata."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from otel_rollout.errors import TrajectorySealedError
from otel_rollout.wire import checked_json


class Values(MutableMapping[str, Any]):
    """JSON values by name, checked when they are set; closed once the rollout has ended."""

    __slots__ = ("_closed", "_lock", "_values", "_what")

    def __init__(self, what: str, values: Mapping[str, Any] | None, closed: str | None) -> None:
        self._what = what
        self._values: dict[str, Any] = dict(values or {})
        self._closed = closed
        self._lock = threading.RLock()
        """Held while a value is set: one that was set before the closing is in it."""

    def close(self, rollout_id: str | None) -> None:
        """Take no more changes: that rollout has ended. None: take them again."""
        with self._lock:
            self._closed = rollout_id

    def join(self, values: Mapping[str, Any]) -> None:
        """Add what another process set; what is there stays, also when closed."""
        self._values = {**values, **self._values}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        what = f"trajectory.{self._what}[{name!r}]"
        if self._what == "metrics" and not (
            isinstance(value, int | float) and math.isfinite(value)
        ):
            raise ValueError(f"{what}: expected a finite number or a bool, got {value!r}")
        value = checked_json(value, what)
        with self._lock:
            self._check(name)
            self._values[name] = value

    def __delitem__(self, name: str) -> None:
        with self._lock:
            self._check(name)
            del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))  # another thread may be setting one

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def _check(self, name: str) -> None:
        if not isinstance(name, str):
            raise ValueError(f"trajectory.{self._what}: expected a name (str), got {name!r}")
        if self._closed is not None:
            raise TrajectorySealedError(
                f"trajectory.{self._what}[{name!r}]: the rollout {self._closed} has ended; set it "
                f"while the rollout runs (only rewards may come later)"
            )
