"""The verb `export`: trajectories become a trainer's file, and the exporters are listed."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

from otel_rollout.export import (
    Group,
    LeftOut,
    PolicyLag,
    RowExporter,
    RowFile,
    Tally,
    all_options,
    row_exporter_from_texts,
    row_exporters,
    rows_of,
)
from otel_rollout.lines import SpilledLines, check_folder
from otel_rollout.terminal import for_commands, note, number_of
from otel_rollout.view import (
    ERRORS_SHOWN,
    Choice,
    ProgressBar,
    Sources,
    in_order,
    note_above,
    note_never_ended,
    note_unreadable,
)
from otel_rollout.wire import Json

_REASONS_SHOWN = 20


def export(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    if options.list:
        for entry in row_exporters():
            print(f"{entry.name:<14} {_about(entry)}")
        return 0
    _check_given(options)
    made_of = options.to, dict(options.option), options.strict
    maker = _RowMaker(*made_of)  # a wrong option is an error before anything is read
    output = _checked_output(options, getattr(maker.exporter, "writes_folder", False))
    choice = Choice(options)
    sources = Sources(options.sources)
    file = RowFile(output, _plan(options), restart=options.restart)
    try:
        _collect(file, sources, choice, options)
        lag = None if options.policy_lag is None else _lag_limit(file, options.policy_lag)
        _write(file, _RowMaker(*made_of, lag), options.jobs)
    except KeyboardInterrupt:
        note("interrupted: the same command goes on from here")
        raise
    finally:
        file.close()
    names = [option.name for option in all_options(type(maker.exporter))]
    status = _note_tally(file.tally, options.output, names)
    if not file.tally.trajectories:
        sources.note_foreign(are_read=options.infer_rollouts)
    note_never_ended(sources.started)
    return status


def _check_given(options: argparse.Namespace) -> None:
    """SystemExit where an argument is missing."""
    required = {"--to": options.to, "-o/--output": options.output, "SOURCE": options.sources}
    missing = [name for name, value in required.items() if not value]
    if missing:
        options.wrong(f"the following arguments are required: {', '.join(missing)}")


def _checked_output(options: argparse.Namespace, writes_folder: bool) -> Path:
    """What is to be written; SystemExit where it is no file, or no folder as the exporter writes.

    ConfigurationError where its folder is not there.
    """
    output = Path(os.path.realpath(options.output))
    kind, is_right = ("folder", Path.is_dir) if writes_folder else ("file", Path.is_file)
    given = Path(options.output)  # the target of /dev/stdout is no path if that is a pipe
    if options.output == "-" or (given.exists() and not is_right(given)):
        options.wrong(f"-o: expected a {kind}, or a new name, got {options.output!r}")
    check_folder(output, "-o")
    return output


def _collect(file: RowFile, sources: Sources, choice: Choice, options: argparse.Namespace) -> None:
    """Bring the trajectories together by group, unless an interrupted export has done it."""
    if file.collected is None:
        items = sources.items(
            choice.keeps,
            file.leave_out,
            file.spans,
            infer_rollouts=options.infer_rollouts,
            jobs=options.jobs,
        )
        file.collect(items, lambda: sources.errors)
    else:
        note(f"going on with {file.output.name}: {number_of(file.tally.groups, 'group')} are done")


def _lag_limit(file: RowFile, most: int) -> PolicyLag:
    """The limit of --policy-lag: counted from the newest version in the sources."""
    limit = PolicyLag.of(most, file.facts())
    if limit.newest is None:
        note("--policy-lag: no trajectory names a version that is a number: none is left out")
    return limit


class _RowMaker:
    """Makes the rows of groups; a copy in another process has an exporter of its own."""

    def __init__(
        self, to: str, options: dict[str, str], strict: bool, lag: PolicyLag | None = None
    ) -> None:
        self.exporter: RowExporter = row_exporter_from_texts(to, options)
        self._made_of = to, options, strict, lag

    def __reduce__(self) -> tuple[Any, ...]:
        return _RowMaker, self._made_of

    def __call__(self, group: Group) -> tuple[SpilledLines, Tally, list[str]]:
        """The rows of a group, what is counted of it, and what is to be printed."""
        tally, reports, lines = Tally(), list[str](), SpilledLines(group.rows)
        *_, strict, lag = self._made_of
        report = reports.append
        rows_of(group.items, self.exporter, tally, report, strict=strict, lag=lag, lines=lines)
        return lines, tally, reports


def _write(file: RowFile, maker: _RowMaker, jobs: int) -> None:
    """Write the rows of each group, and finish the file."""
    reported = itertools.count()
    begun = file.tally.trajectories
    with closing(ProgressBar(file.collected, " trajectories", initial=begun)) as bar:
        for group, (rows, tally, reports) in in_order(maker, file.groups(), jobs):
            for text in reports:
                if next(reported) < ERRORS_SHOWN:
                    note_above(text)
            file.write(group, rows, tally)
            bar.update(len(group.items))
    file.finish(maker.exporter)


def _plan(options: argparse.Namespace) -> dict[str, Json]:
    """The arguments that have to be the same for an interrupted export to go on."""
    sources: list[Json] = []
    for source in options.sources:
        if os.path.isfile(source):
            found = os.stat(source)
            sources.append([os.path.realpath(source), found.st_size, found.st_mtime_ns])
        else:
            sources.append([source])
    return {
        "exporter": options.to,
        "options": dict(sorted(options.option)),
        "sources": sources,
        "infer_rollouts": options.infer_rollouts,
        "where": options.where,
        "policy_lag": options.policy_lag,
        "version": version("otel-rollout"),
    }


def _about(entry: EntryPoint) -> str:
    """Package, the docstring of the exporter, and its options with types and defaults."""
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    options: list[str] = []
    try:
        made = entry.load()
        text = inspect.cleandoc(made.__doc__ or "")
        options = [f"--option {option.described()}" for option in all_options(made)]
    except Exception as error:  # whatever another package does when it is imported
        text = f"cannot be loaded: {type(error).__name__}: {error}"
    summary, _, more = text.partition("\n")
    below = [*more.strip().splitlines(), *options]
    first = f"{package}: {summary}" if summary else package
    return first + textwrap.indent("".join(f"\n{line}" for line in below), "    ")


def _note_tally(tally: Tally, output: str, names: Sequence[str]) -> int:
    """Print what came of the export; the exit status."""
    note(
        f"{number_of(tally.groups, 'group')}, {number_of(tally.trajectories, 'trajectory')} -> "
        + (f"{number_of(tally.rows, 'row')} in {output}" if tally.rows else "no rows, no file")
    )
    if tally.failures:
        note(f"  {tally.failures} failed without a reward")
    if tally.repeated:
        note(f"  {tally.repeated} came again; the last of each counts")
    for what, verb, reasons in (
        ("trajectory", "dropped", tally.empty),
        ("completion", "in no row", tally.dropped),
        ("group", "not whole", tally.partial),
        ("trajectory", "refused", tally.refused),
    ):
        if reasons:
            note(f"  {number_of(sum(reasons.values()), what)} {verb}:")
            _note_reasons(reasons, tally.examples, names)
    for line in LeftOut(tally.left_out).lines():
        note(f"  {line}")
    return max(note_unreadable(tally.unreadable), int(not tally.rows))


def _note_reasons(reasons: Counter[str], examples: Mapping[str, str], names: Sequence[str]) -> None:
    """Print each cause once: how many have it, one of them, and what to do about it."""
    for reason, count in reasons.most_common(_REASONS_SHOWN):
        text, *advice = for_commands(reason, names).split("\n")
        note(f"  {count:>6} x {text} (such as {examples.get(reason, 'one of an earlier run')})")
        for line in advice:
            note(f"           {line}")
    if len(reasons) > _REASONS_SHOWN:
        note(f"         and {len(reasons) - _REASONS_SHOWN} other reasons")
