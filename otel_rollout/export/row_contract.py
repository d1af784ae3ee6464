"""Exporters to a trainer's file: their contract, and those that are installed.

An exporter is a distribution of its own, found by the entry point group `otel_rollout_exporter`.
It imports `otel_rollout` and `otel_rollout.export`, and nothing else of this library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from otel_rollout.errors import ConfigurationError
from otel_rollout.export.options import (
    CheckedOptions,
    NotNegative,
    Option,
    check_names,
    options_of,
    read_options,
)
from otel_rollout.export.whole_groups import check_whole
from otel_rollout.extras import to_install
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
    but where that gave `EachRow`, which has them, and the command prints how often each reason was
    given. `dropped_completions` helps to write it. A further attribute, `writes_folder`, is True
    for one whose output is a folder, which may be there already.

    Every exporter that `row_exporter` makes has more options. `require_all_calls` refuses
    trajectories that would train beside model calls which are not in them. `include_side_calls`
    hands it trajectories in which no call is a side call, so that all train. `max_token_id` is the
    last id of the vocabulary: replies with a larger one are in no token sequence.
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
    on_media: Literal["drop", "keep"] = "drop",
    constrained_logprobs: Literal["keep", "nan"] = "keep",
    mask_truncated: bool = False,
    max_length: int | None = None,
    max_token_id: int | None = None,
) -> Iterator[Dropped]:
    """The completions of the trajectories that no token sequence trains, with the reasons.

    A trajectory without any is there too, if it should have some. The options are those of
    `Trajectory.token_sequences`.
    """
    for trajectory in trajectories:
        yield from trajectory.token_sequences(
            on_failure=on_failure,
            on_abort=on_abort,
            on_media=on_media,
            constrained_logprobs=constrained_logprobs,
            mask_truncated=mask_truncated,
            max_length=max_length,
            max_token_id=max_token_id,
        ).dropped


def portable(value: Json) -> Json:
    """A copy that every reader of JSON takes: null for NaN, U+FFFD for half a character."""
    if isinstance(value, str):
        return value if value.isascii() else _whole_characters(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {portable(name): portable(item) for name, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    kinds = set(map(type, value))  # lists of tokens are long
    if kinds == {int} or (kinds == {float} and math.isfinite(sum(value))):
        return list(value)
    return [portable(item) for item in value]


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
    common = _take_common(name, made, options)
    check_names(name, made, options, [each.name for each in _common_options(made)])
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
    is_asked = any(value is not None and value is not False for value in common.values())
    return _Prepared(exporter, **common) if is_asked else exporter


def row_exporter_from_texts(name: str, texts: Mapping[str, str]) -> RowExporter:
    """`row_exporter` with options from a command line: texts, which become the declared types."""
    made, own = _loaded(name), dict(texts)
    names = [each.name for each in _common_options(made)]
    common = {each: own.pop(each) for each in names if each in own}
    check_names(name, made, own, names)
    read = read_options(name, made, own) | read_options(name, _Prepared, common)
    return row_exporter(name, **read)


def all_options(made: Callable[..., Any]) -> list[Option]:
    """The options of an exporter: those that its constructor declares, then those of every one."""
    return [*options_of(made).values(), *_common_options(made)]


def _common_options(made: Callable[..., Any]) -> list[Option]:
    """The options of every exporter, but for those that this one declares itself."""
    declared = {*options_of(made), "exporter"}
    return [option for name, option in options_of(_Prepared).items() if name not in declared]


def _take_common(name: str, made: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Take the common options out of the others."""
    taken: dict[str, Any] = {}
    for option in _common_options(made):
        value = options.pop(option.name, option.default)
        if not option.accepts(value):
            raise ConfigurationError(
                f"exporter {name!r}, option {option.name}: expected {option.expected}, "
                f"got {value!r}"
            )
        taken[option.name] = value
    return taken


class _Prepared:
    """An exporter whose groups are checked, or changed, before it has them.

    Its options are those that every exporter has, also one that does not declare them.
    """

    def __init__(
        self,
        exporter: RowExporter,
        *,
        require_all_calls: bool = False,
        include_side_calls: bool = False,
        require_whole_groups: bool = False,
        max_token_id: NotNegative | None = None,
    ) -> None:
        self._exporter = exporter
        self._max_token_id = max_token_id
        self._all_calls, self._side_calls = require_all_calls, include_side_calls
        self._whole_groups = require_whole_groups
        self.finish = exporter.finish
        self.writes_folder = getattr(exporter, "writes_folder", False)
        if callable(dropped := getattr(exporter, "dropped", None)):
            self.dropped = lambda group: dropped(self._prepared(group))

    def rows(self, group: TrajectoryGroup) -> Iterable[dict[str, Json]]:
        """The rows of the exporter. ExportError for what lacks calls, or samples."""
        if self._whole_groups:
            check_whole("require_whole_groups=True", (*group, *group.failures))
        if self._all_calls:
            for trajectory in group:
                trajectory.check_calls()
        return self._exporter.rows(self._prepared(group))

    @property
    def of_one(self) -> _Prepared:
        """The same for a trajectory alone, without the others of its group."""
        return _Prepared(
            self._exporter,
            require_all_calls=self._all_calls,
            include_side_calls=self._side_calls,
            max_token_id=self._max_token_id,
        )

    def _prepared(self, group: TrajectoryGroup) -> TrajectoryGroup:
        if self._side_calls:
            group = without_side_calls(group)
        limit = self._max_token_id
        return group if limit is None else _changed(group, lambda t: t.with_max_token_id(limit))


def without_side_calls(group: TrajectoryGroup) -> TrajectoryGroup:
    """A copy of the group in which no call is a side call: all train that are whole."""
    return _changed(group, lambda trajectory: trajectory.with_side_calls(()))


def _changed(group: TrajectoryGroup, change: Callable[[Trajectory], Trajectory]) -> TrajectoryGroup:
    kinds = (group.trajectories, group.failures, group.children)
    members, failures, children = (list(map(change, kind)) for kind in kinds)
    return TrajectoryGroup(members, failures, group.id, children, group.run)


OURS = (
    *("art", "atif", "datasets", "nemo_gym", "openai"),
    *("rllm", "tinker", "transferqueue", "trl", "verifiers", "verl"),
)
"""The exporters that this project has as distributions of their own."""


def _way_to(name: str, found: Collection[str]) -> str:
    """What to do about an exporter that is not there: install it, or write another name."""
    if name in OURS:
        return to_install(f"otel-rollout-exporter-{name}")
    if close := get_close_matches(name, {*found, *OURS}, n=1):
        missing = close[0] not in found
        return f"is it {close[0]!r}" + (
            f" ({to_install(f'otel-rollout-exporter-{close[0]}')})?" if missing else "?"
        )
    way = to_install("otel-rollout-exporter-NAME")
    return f"others that can be installed ({way}): {', '.join(OURS)}"


def _loaded(name: str) -> Callable[..., Any]:
    """The class of the installed exporter of this name; ConfigurationError that lists them."""
    found = {entry.name: entry for entry in row_exporters()}
    if name not in found:
        there = f"installed are {', '.join(sorted(found))}" if found else "none is installed"
        raise ConfigurationError(f"there is no exporter {name!r}: {there}; {_way_to(name, found)}")
    made: Callable[..., Any] = found[name].load()
    return made
