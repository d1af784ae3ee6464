"""The command `otel-rollout`: rebuild trajectories, look at them, export them, check a set-up.

What it was asked for goes to stdout or the file named, all else to stderr. The exit status is 0;
1 if something could not be read, was not found or is a problem; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import re
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from otel_rollout import semconv as sc
from otel_rollout.command.doctor import Finding, check, run_setup
from otel_rollout.command.tree import format_trajectory
from otel_rollout.errors import ConfigurationError, RolloutError, SpanFormatError
from otel_rollout.export import (
    BEGINNING,
    RowFile,
    Tally,
    item_of,
    item_of_trajectory,
    parts_for,
    read_lines,
    reconstruct_apart,
    row_exporter,
    row_exporters,
    rows_of,
)
from otel_rollout.otlp import joined, read
from otel_rollout.rebuild import reconstruct
from otel_rollout.spans import SpanRecord
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps
from otel_rollout.wiring import TruncationWarning, shutdown

_SOURCES = """\
A source is a file (- for stdin) of
  OTLP/JSON lines, such as the collector's file exporter writes
  OTLP/protobuf, one message or the collector's `format: proto`
  rows of ClickHouse's otel_traces (FORMAT JSONEachRow, JSON, JSONCompact)
  an answer of Jaeger's API v3
or the address of a trace in Jaeger, such as
  http://127.0.0.1:16686/trace/6f2a...
What a file is, its content says; it may be gzipped."""
_ERRORS_SHOWN = 10
_REASONS_SHOWN = 20
_FLUSH_MILLIS = 5000
_REBUILD = """\
Rebuild trajectories from recorded spans, one JSON object a line, as
JsonlTrajectoryExporter writes them. The spans of a rollout may be spread over
sources, in any order and more than once. They are brought together in files
beside the output: memory holds those of one rollout. What cannot be read is
reported and left out; the output is written whole, or not."""
_SHOW = """\
Show trajectories as trees: who said what, what of it trains, how it went.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
_EXPORT = """\
Write trajectories as the rows that a trainer reads. Trajectories of one group
are brought together wherever they stand; memory holds one group at a time.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too.
Beside FILE stand FILE.part, FILE.journal and FILE.groups until it is finished:
the same command, given again after it was interrupted, goes on from there."""
_DOCTOR = """\
Check a set-up and say what would be lost: versions, provider, span limits,
processors, instrumentations, environment. Then run a rollout with one call
through it, to a server of this process, and compare its trajectory with the
one that is rebuilt from its spans."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. SystemExit for a wrong command line."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text of any language, whatever the locale
            stream.reconfigure(errors="backslashreplace")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads the output has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, LookupError, RolloutError) as error:
        _say(_text(error))
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="otel-rollout",
        description="Trajectories for training from OpenTelemetry spans.",
    )
    parser.add_argument("--version", action="version", version=version("otel-rollout"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Any], int], summary: str, description: str, after: str | None
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=after,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made

    rebuild = command("rebuild", _rebuild, "trajectories from recorded spans", _REBUILD, _SOURCES)
    show = command("show", _show, "look at trajectories", _SHOW, _SOURCES)
    export = command("export", _export, "rows that a trainer reads", _EXPORT, _SOURCES)
    doctor = command("doctor", _doctor, "check a set-up", _DOCTOR, None)
    for each in (rebuild, show, export):
        many = "*" if each is export else "+"
        each.add_argument("sources", nargs=many, metavar="SOURCE", help="see below")
        each.add_argument(
            "--infer-rollouts",
            action="store_true",
            help="also make a trajectory of each trace that has model calls, but no rollout",
        )
    rebuild.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="where to write; default: stdout"
    )
    export.add_argument("--to", metavar="NAME", help="the trainer's format; see --list")
    export.add_argument("-o", "--output", metavar="FILE", help="where to write")
    export.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="an option of the exporter; may be given several times",
    )
    export.add_argument("--restart", action="store_true", help="begin anew")
    export.add_argument(
        "--strict",
        action="store_true",
        help="end at the first trajectory that the format cannot carry",
    )
    export.add_argument("--list", action="store_true", help="list the exporters that are installed")
    export.set_defaults(wrong=export.error)
    show.add_argument("--id", metavar="ID", help="only those whose id or trace id begins with this")
    show.add_argument("--full", action="store_true", help="do not cut texts")
    doctor.add_argument(
        "setup",
        nargs="?",
        metavar="MODULE[:FUNCTION]|SCRIPT",
        help="what sets your program up: a module to import, a function in it to call, or a "
        "Python file to run; default: otel_rollout.configure()",
    )
    return parser


# --- reading


class _Reading:
    """The sources of one command: what has been read of them, and what could not be."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.spans = 0
        self.foreign = 0
        self.errors = 0
        self._sources = sources
        for source in sources:
            if not _is_address(source) and source != "-":
                open(source, "rb").close()  # now, not after hours of reading others
        files = [source for source in sources if os.path.isfile(source)]
        self.size = sum(map(os.path.getsize, files)) if len(files) == len(sources) else None
        """Bytes of all sources, where that is known."""
        self._bar = tqdm(
            total=self.size, unit="B", unit_scale=True, disable=None, delay=1, leave=False
        )

    def records(self) -> Iterator[SpanRecord]:
        """The spans of all sources."""
        for source in self._sources:
            if _is_address(source):
                yield from self._counted(read(source))
            else:
                with self._open(source) as file:
                    yield from self._counted(read(file, on_error=self.report))
        self._bar.close()

    def trajectories(self, *, infer_rollouts: bool) -> Iterator[Trajectory]:
        """The trajectories of all sources, those that are there before those to be rebuilt."""
        with ExitStack() as opened:
            spans: list[Iterator[SpanRecord]] = []
            for file, source in self._of_trajectories(opened, spans):
                yield from read_lines(file, source)
            records = self._counted(itertools.chain.from_iterable(spans))
            found = reconstruct(records, infer_rollouts=infer_rollouts)
            self._bar.close()
            yield from _one_by_one(found)

    def items(self, folder: Path, *, infer_rollouts: bool) -> Iterator[tuple[str, bytes]]:
        """The same by group, each as it was written; spans are brought together in the folder."""
        with ExitStack() as opened:
            spans: list[Iterator[SpanRecord]] = []
            for file, source in self._of_trajectories(opened, spans):
                yield from self._lines(file, source)
            records = self._counted(itertools.chain.from_iterable(spans))
            yield from map(
                item_of_trajectory,
                reconstruct_apart(
                    records, folder, parts_for(self.size), infer_rollouts=infer_rollouts
                ),
            )
            self._bar.close()

    def _of_trajectories(
        self, opened: ExitStack, spans: list[Iterator[SpanRecord]]
    ) -> Iterator[tuple[BinaryIO, str]]:
        """The sources that hold trajectories; those of the others are added to `spans`."""
        for source in self._sources:
            if _is_address(source):
                spans.append(read(source))
                continue
            file = opened.enter_context(self._open(source))
            head = file.read(len(BEGINNING))
            file = joined(head, file, source)
            if head == BEGINNING:
                yield file, source
            else:
                spans.append(read(file, on_error=self.report))

    def _lines(self, file: Iterable[bytes], source: str) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{source}, line {number}"
            try:
                yield item_of(line, where)
            except SpanFormatError as error:
                self.report(error)
            except (ValueError, RecursionError):
                # One that was cut while it was written is passed over.
                if not (line.startswith(BEGINNING) or BEGINNING.startswith(line.rstrip())):
                    self.report(SpanFormatError(f"{where}: not JSON: {line[:80]!r}"))

    def report(self, error: SpanFormatError) -> None:
        """Say what could not be read; reading goes on."""
        self.errors += 1
        if self.errors <= _ERRORS_SHOWN:
            _say_above(str(error))

    @contextmanager
    def _open(self, source: str) -> Iterator[BinaryIO]:
        if source == "-":
            yield joined(b"", sys.stdin.buffer, "stdin")
            return
        with open(source, "rb", buffering=0) as file:
            yield joined(b"", file, source, self._bar.update)

    def _counted(self, records: Iterable[SpanRecord]) -> Iterator[SpanRecord]:
        for record in records:
            self.spans += 1
            self.foreign += sc.ROLLOUT_ID not in record.attributes
            yield record


def _is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _one_by_one(trajectories: list[Trajectory]) -> Iterator[Trajectory]:
    """The trajectories in order; each is let go of when the next is asked for."""
    trajectories.reverse()
    while trajectories:
        yield trajectories.pop()


# --- rebuild


def _rebuild(options: argparse.Namespace) -> int:
    reading = _Reading(options.sources)
    statuses: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    warned = 0
    # By their start, id, and where their lines are.
    places: list[tuple[int, str, int, int]] = []
    with _whole_file(options.output) as file, _folder_beside(options.output) as folder:
        found = reconstruct_apart(
            reading.records(),
            folder / "spans",
            parts_for(reading.size),
            infer_rollouts=options.infer_rollouts,
        )
        with open(folder / "trajectories", "w+b") as lines:
            for trajectory in found:
                line = dumps(trajectory.to_dict()).encode() + b"\n"
                places.append((trajectory.start_time_ns, trajectory.id, lines.tell(), len(line)))
                lines.write(line)
                statuses[trajectory.status] += 1
                warned += bool(trajectory.warnings)
                sentences.update({_ids("...", warning) for warning in trajectory.warnings})
            for _, _, place, size in sorted(places):
                lines.seek(place)
                file.write(lines.read(size))
    total = sum(statuses.values())
    _say(
        f"{_count(total, 'rollout')} from {_count(reading.spans, 'span')}"
        + (f" ({reading.foreign} of other libraries)" if reading.foreign else "")
        + ("" if options.output == "-" else f" -> {options.output}")
    )
    if total:
        _say("  " + ", ".join(f"{count} {status}" for status, count in statuses.most_common()))
    elif reading.foreign and not options.infer_rollouts:
        _say("  spans of other instrumentations alone: try --infer-rollouts")
    if warned:
        _say(f"  {warned} with warnings:")
    for warning, count in sentences.most_common():
        _say(f"  {count:>6} x {warning}")
    return _status(reading)


def _status(reading: _Reading) -> int:
    if reading.errors:
        _say(f"{_count(reading.errors, 'place')} could not be read and was left out")
    return 1 if reading.errors else 0


@contextmanager
def _whole_file(name: str) -> Iterator[BinaryIO]:
    """A file that is there when all of it is; until then, and after a failure, what was there."""
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(os.path.realpath(name))
    if path.exists() and not path.is_file():  # a device, a named pipe
        with open(path, "wb") as file:
            yield file
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _folder_beside(name: str) -> Iterator[Path]:
    """A folder for what memory may not hold: where the output goes, which has room for it."""
    path = Path(os.path.realpath(name))
    beside = path.parent if name != "-" and path.parent.is_dir() else None
    if path.exists() and not path.is_file():
        beside = None
    with tempfile.TemporaryDirectory(prefix=".otel-rollout-", dir=beside) as folder:
        yield Path(folder)


# --- export


def _option(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not name or not is_there:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name, value


def _export(options: argparse.Namespace) -> int:
    if options.list:
        for entry in row_exporters():
            print(f"{entry.name:<14} {_about(entry)}")
        return 0
    missing = [
        name
        for name, value in (
            ("--to", options.to),
            ("-o/--output", options.output),
            ("SOURCE", options.sources),
        )
        if not value
    ]
    if missing:
        options.wrong(f"the following arguments are required: {', '.join(missing)}")
    output = Path(os.path.realpath(options.output))
    if options.output == "-" or (output.exists() and not output.is_file()):
        options.wrong(f"-o: expected a file, got {options.output!r}")
    exporter = row_exporter(options.to, **dict(options.option))
    reading = _Reading(options.sources)
    made = RowFile(output, _plan(options), restart=options.restart)
    try:
        if made.collected is None:
            folder = made.folder / "spans"
            items = reading.items(folder, infer_rollouts=options.infer_rollouts)
            made.collect(items, parts_for(reading.size), lambda: reading.errors)
        elif not made.is_complete:
            _say(f"going on with {output.name}: {_count(made.tally.groups, 'group')} are done")
        reported = itertools.count()

        def report(text: str) -> None:
            if next(reported) < _ERRORS_SHOWN:
                _say_above(text)

        with tqdm(
            total=made.collected,
            initial=made.tally.trajectories,
            unit=" trajectories",
            disable=None,
            leave=False,
        ) as bar:
            for group in made.groups():
                tally = Tally()
                rows = rows_of(group, exporter, tally, report, strict=options.strict)
                made.write(rows, tally)
                bar.update(len(group))
        made.finish(exporter)
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on from here")
        raise
    finally:
        made.close()
    status = _say_tally(made.tally, options.output)
    if not made.tally.trajectories and reading.foreign and not options.infer_rollouts:
        _say("  spans of other instrumentations alone: try --infer-rollouts")
    return status


def _plan(options: argparse.Namespace) -> dict[str, Json]:
    """What has to be the same for an export to go on."""
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
        "version": version("otel-rollout"),
    }


def _about(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        text = (entry.load().__doc__ or "").strip()
    except Exception as error:  # whatever another package does when it is imported
        text = f"cannot be loaded: {type(error).__name__}: {error}"
    return f"{package}: {text.splitlines()[0]}" if text else package


def _say_tally(tally: Tally, output: str) -> int:
    _say(
        f"{_count(tally.groups, 'group')}, {_count(tally.trajectories, 'trajectory')} -> "
        + (f"{_count(tally.rows, 'row')} in {output}" if tally.rows else "no rows, no file")
    )
    if tally.failures:
        _say(f"  {tally.failures} failed without a reward")
    if tally.repeated:
        _say(f"  {tally.repeated} came again; the last of each counts")
    for what, counted in (
        ("completion", tally.dropped),
        ("trajectory", tally.refused),
    ):
        if counted:
            verb = "in no row" if what == "completion" else "refused"
            _say(f"  {_count(sum(counted.values()), what)} {verb}:")
        for reason, count in counted.most_common(_REASONS_SHOWN):
            _say(f"  {count:>6} x {reason}")
        if len(counted) > _REASONS_SHOWN:
            _say(f"         and {len(counted) - _REASONS_SHOWN} other reasons")
    if tally.unreadable:
        _say(f"{_count(tally.unreadable, 'place')} could not be read and was left out")
    return int(tally.unreadable > 0 or not tally.rows)


# --- show


def _show(options: argparse.Namespace) -> int:
    reading = _Reading(options.sources)
    wanted = (options.id or "").lower()
    coloured = _coloured() if _has_colours() else str
    width = None if options.full else shutil.get_terminal_size((80, 24)).columns
    shown = 0
    for trajectory in reading.trajectories(infer_rollouts=options.infer_rollouts):
        if not (trajectory.id.startswith(wanted) or trajectory.trace_id.startswith(wanted)):
            continue
        if shown:
            print()
        shown += 1
        for line in format_trajectory(trajectory, width=width).splitlines():
            print(coloured(line))
    if not shown:
        _say(f"no trajectory whose id begins with {wanted!r}" if wanted else "no trajectories")
    return max(_status(reading), int(bool(wanted) and not shown))


def _has_colours() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


_STYLES = (
    (re.compile(r"^(?![│├└ ])(.*)$"), "1"),
    (re.compile(r"^([├└]─ (?:error|cancelled|call ).*)$"), "31"),
    (re.compile(r"^(├─ warning: .*)$"), "33"),
    (re.compile(r"^(│ +●.*)$"), "32"),
    (re.compile(r"^(│ +○.*)$"), "2"),
)


def _coloured() -> Callable[[str], str]:
    def colour(line: str) -> str:
        for pattern, code in _STYLES:
            if pattern.match(line):
                return f"\x1b[{code}m{line}\x1b[0m"
        return line

    return colour


# --- doctor


def _doctor(options: argparse.Namespace) -> int:
    findings: list[Finding] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)  # it is a finding
        try:
            run_setup(options.setup)
        except ConfigurationError as error:
            findings.append(Finding("problem", "set-up", str(error)))
        except (Exception, SystemExit) as error:
            name = options.setup or "configure()"
            text = f"{name} raised {type(error).__name__}: {error}"
            findings.append(Finding("problem", "set-up", text))
    findings += check()
    styles = {"ok": "32", "warning": "33", "problem": "1;31"} if _has_colours() else {}
    width = shutil.get_terminal_size((80, 24)).columns
    for finding in findings:
        text = textwrap.fill(str(finding), width, subsequent_indent=" " * 9, break_on_hyphens=False)
        if finding.level in styles:
            head = finding.level
            text = f"\x1b[{styles[head]}m{head}\x1b[0m{text[len(head) :]}"
        print(text)
    levels = Counter(finding.level for finding in findings)
    print(f"\n{_count(levels['problem'], 'problem')}, {_count(levels['warning'], 'warning')}")
    shutdown(_FLUSH_MILLIS)
    return int(levels["problem"] > 0)


# --- text

_id = re.compile(r"\b(?:span-)?[0-9a-f]{16,32}\b")


def _ids(replacement: str, text: str) -> str:
    return _id.sub(replacement, text)


def _count(number: int, what: str) -> str:
    many = what.removesuffix("y") + "ies" if what.endswith("y") else what + "s"
    return f"{number} {what if number == 1 else many}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _say_above(text: str) -> None:
    """Say it above the progress bar."""
    with tqdm.external_write_mode(file=sys.stderr):
        _say(text)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"otel-rollout: {error.filename}: {error.strerror}"
    return f"otel-rollout: {error}"
