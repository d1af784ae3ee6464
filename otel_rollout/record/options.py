"""The options of a rollout: checked when it is written down, not when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from otel_rollout.errors import ConfigurationError
from otel_rollout.extras import module_of
from otel_rollout.spans import group_key
from otel_rollout.terminal import did_you_mean
from otel_rollout.wire import Json, checked_json

_EXPECTED: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "task_id": (str, int),
    "group_id": (str, int),
    "group_run": (str, int),
    "sample_index": (int,),
    "group_size": (int,),
    "policy_version": (str, int),
    "metadata": (Mapping,),
    "upstream": (str,),
}
"""The types that options of more than one type may have, beside None."""


class SampleOptions(TypedDict, total=False):
    """The options of `rollout` but its `group_id`, for those who check types."""

    name: str | None
    task_id: str | int | None
    group_run: str | int | None
    sample_index: int | None
    group_size: int | None
    policy_version: str | int | Callable[[], str | int | None] | None
    metadata: Mapping[str, Json] | None
    main: Callable[[Any], object] | None
    timeout: float | None
    trainable: bool
    gateway: bool
    upstream: str | None


class RolloutOptions(SampleOptions, total=False):
    """The options of `rollout`."""

    group_id: str | int | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one rollout, as `rollout` describes them.

    ConfigurationError for a value of the wrong type.
    """

    name: str | None = None
    task_id: str | int | None = None
    group_id: str | int | None = None
    group_run: str | int | None = None
    sample_index: int | None = None
    group_size: int | None = None
    policy_version: str | int | Callable[[], str | int | None] | None = None
    metadata: Mapping[str, Json] | None = None
    main: Callable[[Any], Any] | None = None
    timeout: float | None = None
    trainable: bool = True
    gateway: bool = False
    upstream: str | None = None

    def __post_init__(self) -> None:
        for option, kinds in _EXPECTED.items():
            value = getattr(self, option)
            if value is None or (option == "policy_version" and callable(value)):
                continue
            if not isinstance(value, kinds) or isinstance(value, bool):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigurationError(f"rollout({option}=...): expected {names}, got {value!r}")
        if (self.timeout, self.main, self.group_size) != (None, None, None):
            self._check_further()
        for option in ("trainable", "gateway"):
            if not isinstance(value := getattr(self, option), bool):
                raise ConfigurationError(
                    f"rollout({option}=...): expected True or False, got {value!r}"
                )
        if self.gateway:
            module_of("gateway", "uvicorn", "rollout(gateway=True)")
        elif self.upstream is not None:
            raise ConfigurationError(
                f"rollout(upstream={self.upstream!r}): it is the model server of a gateway: add "
                f"gateway=True"
            )
        if self.metadata is not None:
            checked_json(dict(self.metadata), "rollout(metadata=...)")

    def _check_further(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ConfigurationError(
                f"rollout(group_size=...): expected a number from 1 on, got {self.group_size!r}"
            )
        seconds, main = self.timeout, self.main
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds <= sys.float_info.max):
            raise ConfigurationError(
                f"rollout(timeout=...): expected seconds, a number above 0, got {seconds!r:.100}"
            )
        if main is not None and not callable(main):
            raise ConfigurationError(
                f"rollout(main=...): expected a function that is given the trajectory and returns "
                f"its main history, got {main!r:.100}"
            )

    @property
    def group_key(self) -> str | None:
        """The group as `Trajectory.group_key` has it."""
        own, run = self.group_id, self.group_run
        return group_key(None if own is None else str(own), None if run is None else str(run))

    @classmethod
    def of(
        cls, options: Mapping[str, Any], caller: str = "rollout", own: Iterable[str] = ()
    ) -> Options:
        """Options by their names. ConfigurationError, which lists the names, for another one.

        caller: the function that was given them. own: the options that it has beside these.
        """
        if unknown := sorted(options.keys() - cls.__dataclass_fields__.keys()):
            known = list(dict.fromkeys((*own, *cls.__dataclass_fields__)))
            raise ConfigurationError(
                f"{caller}(): expected the options {', '.join(known)}, "
                f"got {', '.join(unknown)}{did_you_mean(unknown[0], known)}"
            )
        try:
            return cls(**options)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace("rollout(", f"{caller}(", 1)) from None

    def overridden(self, options: Mapping[str, Any]) -> Options:
        """A copy with the given options instead; metadata is merged."""
        if self.metadata and options.get("metadata"):
            options = {**options, "metadata": {**self.metadata, **options["metadata"]}}
        return replace(self, **options)
