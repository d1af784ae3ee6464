"""The command `otel-rollout`: rebuild trajectories, look at them, check a set-up.

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
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from otel_rollout import semconv as sc
from otel_rollout.configure import TruncationWarning, shutdown
from otel_rollout.doctor import Finding, check, run_setup
from otel_rollout.errors import ConfigurationError, RolloutError, SpanFormatError
from otel_rollout.export import BEGINNING, read_lines
from otel_rollout.messages import dumps
from otel_rollout.otlp import read
from otel_rollout.otlp.source import joined
from otel_rollout.reconstruct import reconstruct
from otel_rollout.spans import SpanRecord
from otel_rollout.trajectory import Trajectory
from otel_rollout.tree import format_trajectory

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
_FLUSH_MILLIS = 5000
_REBUILD = """\
Rebuild trajectories from recorded spans, one JSON object a line, as
JsonlTrajectoryExporter writes them. The spans of a rollout may be spread over
sources, in any order and more than once. All spans of rollouts are held in
memory until the last source is read; those of other libraries are not. What
cannot be read is reported and left out; the output is written whole, or not."""
_SHOW = """\
Show trajectories as trees: who said what, what of it trains, how it went.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
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
    doctor = command("doctor", _doctor, "check a set-up", _DOCTOR, None)
    for each in (rebuild, show):
        each.add_argument("sources", nargs="+", metavar="SOURCE", help="see below")
        each.add_argument(
            "--infer-rollouts",
            action="store_true",
            help="also make a trajectory of each trace that has model calls, but no rollout",
        )
    rebuild.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="where to write; default: stdout"
    )
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
        size = sum(map(os.path.getsize, files)) if len(files) == len(sources) else None
        self._bar = tqdm(total=size, unit="B", unit_scale=True, disable=None, delay=1, leave=False)

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
            for source in self._sources:
                if _is_address(source):
                    spans.append(read(source))
                    continue
                file = opened.enter_context(self._open(source))
                head = file.read(len(BEGINNING))
                file = joined(head, file, source)
                if head == BEGINNING:
                    yield from read_lines(file, source)
                else:
                    spans.append(read(file, on_error=self.report))
            records = self._counted(itertools.chain.from_iterable(spans))
            found = reconstruct(records, infer_rollouts=infer_rollouts)
            self._bar.close()
            yield from _one_by_one(found)

    def report(self, error: SpanFormatError) -> None:
        """Say what could not be read; reading goes on."""
        self.errors += 1
        if self.errors <= _ERRORS_SHOWN:
            with tqdm.external_write_mode(file=sys.stderr):
                _say(str(error))

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
    found = reconstruct(reading.records(), infer_rollouts=options.infer_rollouts)
    statuses: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    warned = 0
    with _whole_file(options.output) as file:
        for trajectory in _one_by_one(found):
            file.write(dumps(trajectory.to_dict()).encode() + b"\n")
            statuses[trajectory.status] += 1
            warned += bool(trajectory.warnings)
            sentences.update({_ids("...", warning) for warning in trajectory.warnings})
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
    return f"{number} {what}" + ("" if number == 1 else "s")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"otel-rollout: {error.filename}: {error.strerror}"
    return f"otel-rollout: {error}"
