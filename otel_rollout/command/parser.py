"""The command line: verbs, their options, and their help."""

from __future__ import annotations

import argparse
import math
from importlib.metadata import version

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
processors, instrumentations, environment. Then run a rollout with two calls
through it, to a server of this process, and compare its trajectory with the
one that is rebuilt from its spans. With --server, also make a streamed call
with tools to your model server, and compare the token ids that come with its
own count: some servers lose tokens of such calls."""

_RUN = """\
Run a command, of any language, as a rollout: its model calls go through a
gateway of this process to the model server, and become a trajectory. The
command finds the gateway in OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and its rollout in OTEL_ROLLOUT_ID,
OTEL_ROLLOUT_TASK and OTEL_ROLLOUT_SAMPLE. Signals go to the command. The exit
status is the command's own, of several samples the highest; without any model
call it is never 0.

  otel-rollout run --upstream http://localhost:8000/v1 --task t1 --samples 8 \\
      --out trajectories.jsonl -- claude -p "Mend the tests" """
_REWARD = """\
Give a rollout that has ended a reward. It is a span on the rollout's trace: in a
file of spans, or sent over OTLP as OTEL_EXPORTER_OTLP_ENDPOINT says. `rebuild`
then gives the trajectory with the reward; of several with one name, the last."""
_GATEWAY = """\
Stand between agents and their model server, and record every model call. An
agent in any language says which rollout a call belongs to: by its base URL
(/r/TOKEN/v1), its API key (or-TOKEN) or the headers traceparent and baggage.
POST /rollouts begins a rollout and gives them; /docs describes it.
The first line of output is the address. SIGTERM or SIGINT ends it. Spans also
go out over OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set."""


def command_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; it sets `verb` to the name of the subcommand."""
    parser = argparse.ArgumentParser(
        prog="otel-rollout",
        description="Trajectories for training from OpenTelemetry spans.",
    )
    parser.add_argument("--version", action="version", version=version("otel-rollout"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, summary: str, description: str, after: str | None
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=after,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(verb=name)
        return made

    rebuild = command("rebuild", "trajectories from recorded spans", _REBUILD, _SOURCES)
    show = command("show", "look at trajectories", _SHOW, _SOURCES)
    export = command("export", "rows that a trainer reads", _EXPORT, _SOURCES)
    run = command("run", "run a command as a rollout", _RUN, None)
    reward = command("reward", "reward a rollout that has ended", _REWARD, _SOURCES)
    gateway = command("gateway", "record agents in any language", _GATEWAY, None)
    doctor = command("doctor", "check a set-up", _DOCTOR, None)
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
    _add_gateway(gateway)
    doctor.add_argument(
        "setup",
        nargs="?",
        metavar="MODULE[:FUNCTION]|SCRIPT",
        help="what sets your program up: a module to import, a function in it to call, or a "
        "Python file to run; default: otel_rollout.configure()",
    )
    doctor.add_argument(
        "--server",
        metavar="URL",
        help="base URL of your model server, such as http://localhost:8000/v1; its key is "
        "OPENAI_API_KEY",
    )
    doctor.add_argument(
        "--model", metavar="NAME", help="the model to ask there; default: the first it lists"
    )
    _add_run(run)
    _add_reward(reward)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--upstream", required=True, metavar="URL", help="base URL of the model server"
    )
    run.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the variable with the model server's key; the command does not get it",
    )
    run.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that the gateway listens on, for a command in a container; default: this "
        "machine alone",
    )
    run.add_argument(
        "--request-token-ids",
        action="store_true",
        help="ask the model server for token ids and log-probabilities; the command sees none",
    )
    run.add_argument("--task", metavar="ID", help="the task that the command works on")
    run.add_argument(
        "--samples", type=_count, default=1, metavar="N", help="how often to run it; default: 1"
    )
    run.add_argument(
        "--parallel",
        type=_count,
        default=1,
        metavar="N",
        help="how many samples may run at once; their output is marked [0], [1], ...; default: 1",
    )
    run.add_argument(
        "--timeout", type=_seconds, metavar="S", help="seconds that each sample may take"
    )
    run.add_argument("--name", help="name of the rollout; default: that of the command")
    run.add_argument(
        "--group",
        metavar="ID",
        help="the group that a trainer compares; default: a new one if there are several samples",
    )
    run.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="metadata of the rollout, a text; may be given several times",
    )
    run.add_argument("--out", metavar="FILE", help="append trajectories, one JSON object a line")
    run.add_argument("--spans", metavar="FILE", help="append spans, as OTLP/JSON lines")
    run.add_argument(
        "--reward-command",
        metavar="CMD",
        help="run through the shell after each sample, with the trajectory on stdin; the last "
        "line of its output is the reward",
    )
    run.add_argument("command", nargs="+", metavar="CMD", help="the command, after --")


def _add_reward(reward: argparse.ArgumentParser) -> None:
    reward.add_argument("id", metavar="ID", help="the rollout's id, or how it begins")
    reward.add_argument("value", type=_number, metavar="VALUE", help="a finite number")
    reward.add_argument("--name", help="makes it one of the named rewards")
    reward.add_argument(
        "--in",
        dest="sources",
        action="append",
        metavar="SOURCE",
        help="where the rollout is, see below; default: the file of --spans",
    )
    reward.add_argument("--spans", metavar="FILE", help="append the reward to this file of spans")
    reward.set_defaults(wrong=reward.error)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = _number(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text!r}")
    return seconds


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


def _add_gateway(gateway: argparse.ArgumentParser) -> None:
    gateway.add_argument(
        "--upstream",
        required=True,
        metavar="URL",
        help="the model server, such as http://localhost:8000/v1",
    )
    gateway.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this need a secret"
    )
    gateway.add_argument("--port", type=int, default=4040, help="default: 4040; 0: any free port")
    gateway.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the model server's key; default: clients send their own",
    )
    gateway.add_argument(
        "--secret-env",
        metavar="NAME",
        help="environment variable with the secret that signs tokens; default: "
        "OTEL_ROLLOUT_SECRET, if it is set",
    )
    gateway.add_argument(
        "--out", metavar="FILE", help="append finished trajectories to this file, as JSON lines"
    )
    gateway.add_argument(
        "--spans", metavar="FILE", help="append spans to this file, as OTLP/JSON lines"
    )
    gateway.add_argument(
        "--request-token-ids",
        action="store_true",
        help="ask the model server for token ids and log-probabilities; clients do not see them",
    )


def _option(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not name or not is_there:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name, value
