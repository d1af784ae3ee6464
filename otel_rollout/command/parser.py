"""The command line: verbs, their options, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from otel_rollout.command.recording_options import (
    GATEWAY,
    REWARD,
    RUN,
    add_gateway,
    add_reward,
    add_run,
    key_value,
)
from otel_rollout.view import DEFAULT, REQUIREMENTS

_SOURCES = """\
A source is a file (- for stdin) of
  OTLP/JSON lines, such as the collector's file exporter writes
  OTLP/protobuf, one message or the collector's `format: proto`
  rows of ClickHouse's otel_traces (FORMAT JSONEachRow, JSON, JSONCompact)
  an answer of Jaeger's API v3, of Phoenix or of MLflow
or the address of a trace in Jaeger, Phoenix or MLflow, such as
  http://127.0.0.1:16686/trace/6f2a...
or of a project in Phoenix.
What a file is, its content says; it may be gzipped."""
_REBUILD = """\
Rebuild trajectories from recorded spans, one JSON object a line, as
JsonlTrajectoryExporter writes them. The spans of a rollout may be spread over
sources, in any order and more than once. They are brought together in files
beside the output: memory holds those of one rollout. What cannot be read is
reported and left out; the output is written whole, or not."""
_LIST = """\
List trajectories: a line for each as it is read, and a footer with their number,
endings, rewards, and what does not train and why. Of files of trajectories the
first line comes at once; spans are read to their end before, since a reward may
come late. With --sort the lines come at the end; memory holds a line for each.
--json prints one JSON object a line, the last one is {"summary": ...}.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
_CHECK = """\
Check that trajectories are what a trainer needs; for a pipeline, before it.
Exit status: 0 they are; 1 a trajectory lacks something that is required, or there
is no trajectory; 2 a source could not be read, in whole or in part, or the command
line is wrong. --json prints one JSON object a line with all findings of a
trajectory, the last one is {"summary": ...}.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too.

--require takes some of these, with commas between them:
"""
_WHERE = """\
EXPR of --where is a comparison of fields, or several with and, or, not:
  reward < 0.5 and status == "error"
  "drift" in findings or metrics["tests_passed"] >= 3
  reward is None and versions is not None
A comparison with a field that is None is not known, and not kept."""
_SHOW = """\
Show trajectories as trees: who said what, what of it trains, how it went.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
_VIEW = """\
Show trajectories on a page of this machine, in the browser: a list to filter,
groups side by side, messages, tokens, what does not train and why. The page is
for you alone: its address, which is printed first, has a secret in it. Sources
are read once and kept in an index in your cache; files that grow are followed.
Ctrl-C ends it. Needs the extra: pip install 'otel-rollout[view]'.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
_EXPORT = """\
Write trajectories as the rows that a trainer reads. Trajectories of one group
are brought together wherever they stand; memory holds one group at a time.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too.
Beside FILE stand FILE.part and FILE.groups until it is finished:
the same command, given again after it was interrupted, goes on from there."""
_STATS = """\
Show which calls continue the messages of an earlier call and not its token
ids, and why: reasoning dropped, arguments reformatted, tokens merged, template
changed, truncated, other. Each of them begins a training row of its own, and
the server reads again what it had in its cache. The ratio is that of merged
calls to all of which it is known. docs/drift.md says what to do about them.
A file of trajectories (rebuild, JsonlTrajectoryExporter) is a source too."""
_DOCTOR = """\
Check a set-up and say what would be lost: versions, provider, span limits,
processors, instrumentations, environment. Then run a rollout with two calls
through it, to a server of this process, and compare its trajectory with the
one that is rebuilt from its spans. With --server, also make a streamed call
with tools to your model server, and compare the token ids that come with its
own count: some servers lose tokens of such calls."""

_NEEDS = "\n".join(f"  {name:<14} {what}" for name, (_, what) in REQUIREMENTS.items())
_FILTERED = f"{_WHERE}\n\n{_SOURCES}"
_Add = Callable[[argparse.ArgumentParser], None]


def command_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; it sets `verb` to the name of the subcommand."""
    parser = argparse.ArgumentParser(
        prog="otel-rollout",
        description="Trajectories for training from OpenTelemetry spans.",
    )
    parser.add_argument("--version", action=_Version, help="show the version, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary, description, after, add in _VERBS:
        verb = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=after,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(verb=name, wrong=verb.error)
        add(verb)
    return parser


class _Version(argparse.Action):
    """Prints the version; what reads it takes longer to import than all else, so it is late."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, argparse.SUPPRESS, 0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(import_module("importlib.metadata").version("otel-rollout"))
        parser.exit()


def _add_sources(parser: argparse.ArgumentParser, number: str = "+") -> None:
    parser.add_argument("sources", nargs=number, metavar="SOURCE", help="see below")
    parser.add_argument(
        "--infer-rollouts",
        action="store_true",
        help="also make a trajectory of each trace that has model calls, but no rollout",
    )


def _add_where(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--where", metavar="EXPR", help=f"only those of which this is true{more}")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Sources, which of their trajectories, and in which order."""
    _add_sources(parser)
    _add_where(parser)
    parser.add_argument(
        "--sort",
        metavar="FIELD",
        help="in order of a field, --sort=-FIELD from the greatest on; unknown ones are last",
    )


def _add_rebuild(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="where to write; default: stdout"
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.add_argument(
        "--group-by",
        metavar="FIELD",
        help="count and reward for each value of a field, such as group_id, task_id, versions",
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    _add_where(parser)
    parser.add_argument(
        "--require",
        default=",".join(DEFAULT),
        metavar="LIST",
        help="what is required; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.add_argument(
        "--id", metavar="ID", help="only those whose id or trace id begins with this"
    )
    parser.add_argument("--full", action="store_true", help="do not cut texts")


def _add_view(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument(
        "--where", metavar="EXPR", help="only those that this expression is true of"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one page that needs no server, and end"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1"
    )
    parser.add_argument(
        "--reachable", action="store_true", help="allow a --host that other machines reach"
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--jaeger", metavar="URL", help="link traces to this Jaeger")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer.json, a folder with one, or a name on the model hub: gives the texts of "
        "tokens whose texts the server did not send",
    )
    parser.add_argument("--index", metavar="FILE", help="keep the index in this file")
    parser.add_argument("--no-cache", action="store_true", help="keep no index")


def _add_stats(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all forks")
    parser.add_argument("--full", action="store_true", help="list all forks of each trajectory")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser, "*")
    _add_where(
        parser,
        "; before they are grouped: leaving members out of a group changes the advantages of the "
        "others",
    )
    parser.add_argument("--to", metavar="NAME", help="the trainer's format; see --list")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=key_value,
        metavar="KEY=VALUE",
        help="an option of the exporter; may be given several times",
    )
    parser.add_argument("--restart", action="store_true", help="begin anew")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end at the first trajectory that the format cannot carry",
    )
    parser.add_argument("--list", action="store_true", help="list the exporters that are installed")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "setup",
        nargs="?",
        metavar="MODULE[:FUNCTION]|SCRIPT",
        help="what sets your program up: a module to import, a function in it to call, or a "
        "Python file to run; default: otel_rollout.configure()",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="base URL of your model server, such as http://localhost:8000/v1; its key is "
        "OPENAI_API_KEY",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model to ask there; default: the first it lists"
    )


_VERBS: tuple[tuple[str, str, str, str | None, _Add], ...] = (
    ("rebuild", "trajectories from recorded spans", _REBUILD, _FILTERED, _add_rebuild),
    ("list", "a line for each trajectory, and sums", _LIST, _FILTERED, _add_list),
    ("check", "is it what a trainer needs?", _CHECK + _NEEDS, _FILTERED, _add_check),
    ("show", "look at trajectories", _SHOW, _FILTERED, _add_show),
    ("view", "a page that shows trajectories", _VIEW, _SOURCES, _add_view),
    ("stats", "which conversations forked by tokens, and why", _STATS, _SOURCES, _add_stats),
    ("export", "rows that a trainer reads", _EXPORT, _FILTERED, _add_export),
    ("run", "run a command as a rollout", RUN, None, add_run),
    ("reward", "reward a rollout that has ended", REWARD, _SOURCES, add_reward),
    ("gateway", "record agents in any language", GATEWAY, None, add_gateway),
    ("doctor", "check a set-up", _DOCTOR, None, _add_doctor),
)
"""Name, summary, description, text after the options, and the function that adds them."""
