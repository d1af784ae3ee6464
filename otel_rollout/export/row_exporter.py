"""Exporters to a trainer's file: their contract, and those that are installed.

An exporter is a distribution of its own, found by the entry point group `otel_rollout_exporter`.
It imports `otel_rollout` and `otel_rollout.export`, and nothing else of this library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from otel_rollout.errors import ConfigurationError
from otel_rollout.export.options import (
    CheckedOptions,
    Option,
    check_names,
    options_of,
    read_options,
)
from otel_rollout.trajectory import Dropped, Trajectory, TrajectoryGroup
from otel_rollout.wire import Json

ENTRY_POINTS = "otel_rollout_exporter"


@runtime_checkable
class RowExporter(Protocol):
    """Turns groups of trajectories into the rows of a file that a trainer reads.

    The entry point names a class. The arguments of its constructor are the exporter's options, of
    the types that their annotations declare (`otel_rollout.export.options`); a wrong value is a
    ConfigurationError. The docstring of the class describes each of them. It is used from one
    thread.

    An exporter may have a further method, `dropped(group)`: the completions (`Dropped`) of a group
    that `rows` trains in no row, with the reasons. It is called after `rows` with the same group,
    and the command prints how often each reason was given. `dropped_completions` helps to write it.

    Every exporter that `row_exporter` makes has the option `require_all_calls` (bool, False): True
    refuses trajectories that would train beside model calls which are not in them.
    """

    def rows(self, group: TrajectoryGroup) -> Iterable[dict[str, Json]]:
        """The rows of a group, JSON each; a trajectory without a group comes as a group of one.

        Nothing is kept between calls, and nothing is written: the caller writes. Raises
        ExportError for what the format cannot carry, rather than damaging it.
        """

    def finish(self, rows: Path, output: Path) -> None:
        """Make `output` of a file with all rows as JSON lines, in constant memory.

        `rows` may be renamed: for JSON lines that is all there is to do. Called once, at the end.
        """


class JsonRows(CheckedOptions):
    """Base of exporters whose file is JSON lines: finishing is renaming."""

    def finish(self, rows: Path, output: Path) -> None:
        """Rename the rows."""
        os.replace(rows, output)


def dropped_completions(
    trajectories: Iterable[Trajectory],
    *,
    on_failure: Literal["drop", "keep"] = "drop",
    on_abort: Literal["drop", "keep"] = "drop",
    constrained_logprobs: Literal["keep", "nan"] = "keep",
    mask_truncated: bool = False,
    max_length: int | None = None,
) -> Iterator[Dropped]:
    """The completions of the trajectories that no token sequence trains, with the reasons.

    A trajectory without any is there too, if it should have some. The options are those of
    `Trajectory.token_sequences`.
    """
    for trajectory in trajectories:
        yield from trajectory.token_sequences(
            on_failure=on_failure,
            on_abort=on_abort,
            constrained_logprobs=constrained_logprobs,
            mask_truncated=mask_truncated,
            max_length=max_length,
        ).dropped


def row_exporters() -> list[EntryPoint]:
    """The installed exporters, by name."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    return [found[name] for name in sorted(found)]


def row_exporter(name: str, **options: Any) -> RowExporter:
    """The installed exporter of this name, made with these options.

    ConfigurationError for a name that is not installed, an option that it does not have, or a
    value of another type than the option declares.
    """
    made = _loaded(name)
    all_calls = _take_all_calls(name, made, options)
    check_names(name, made, options)
    try:
        exporter = made(**options)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"exporter {name!r}: {error}") from None
    if not isinstance(exporter, RowExporter):
        raise ConfigurationError(
            f"exporter {name!r}: expected a class with rows() and finish(), got {made!r}"
        )
    return _WithAllCalls(exporter) if all_calls else exporter


def row_exporter_from_texts(name: str, texts: Mapping[str, str]) -> RowExporter:
    """`row_exporter` with options from a command line: texts, which become the declared types."""
    made, texts = _loaded(name), dict(texts)
    common: dict[str, object] = {}
    if _ALL_CALLS.name in texts and _ALL_CALLS.name not in options_of(made):
        try:
            common[_ALL_CALLS.name] = _ALL_CALLS.read(texts.pop(_ALL_CALLS.name))
        except ValueError as error:
            raise ConfigurationError(
                f"exporter {name!r}, option {_ALL_CALLS.name}: {error}"
            ) from None
    return row_exporter(name, **read_options(name, made, texts), **common)


_ALL_CALLS = Option("require_all_calls", bool)
"""The option of every exporter, also of one that does not declare it."""


def _take_all_calls(name: str, made: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Take `require_all_calls` out of the options, unless the exporter declares it itself."""
    if _ALL_CALLS.name in options_of(made):
        return False
    value = options.pop(_ALL_CALLS.name, False)
    if not _ALL_CALLS.accepts(value):
        raise ConfigurationError(
            f"exporter {name!r}, option {_ALL_CALLS.name}: expected {_ALL_CALLS.expected}, "
            f"got {value!r}"
        )
    return bool(value)


class _WithAllCalls:
    """An exporter that refuses groups with a trajectory which lacks model calls."""

    def __init__(self, exporter: RowExporter) -> None:
        self._exporter = exporter
        self.finish = exporter.finish
        if callable(dropped := getattr(exporter, "dropped", None)):
            self.dropped = dropped

    def rows(self, group: TrajectoryGroup) -> Iterable[dict[str, Json]]:
        """The rows of the exporter. ExportError for a trajectory that lacks calls."""
        for trajectory in group:
            trajectory.check_calls()
        return self._exporter.rows(group)


def _loaded(name: str) -> Callable[..., Any]:
    """The class of the installed exporter of this name; ConfigurationError that lists them."""
    found = {entry.name: entry for entry in row_exporters()}
    if name not in found:
        there = f"installed are {', '.join(sorted(found))}" if found else "none is installed"
        raise ConfigurationError(
            f"there is no exporter {name!r}: {there}; install otel-rollout-exporter-{name}"
        )
    made: Callable[..., Any] = found[name].load()
    return made
