"""Arguments of the verbs that record: `run`, `reward` and `gateway`."""

from __future__ import annotations

import argparse
import math
from typing import Any

RUN = """\
Run a command, of any language, as a rollout: its model calls go through a
gateway of this process to the model server, and become a trajectory. The
command finds the gateway in OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and its rollout in OTEL_ROLLOUT_ID,
OTEL_ROLLOUT_TASK and OTEL_ROLLOUT_SAMPLE. Signals go to the command. The exit
status is the command's own, of several samples the highest; without any model
call it is never 0.

  otel-rollout run --upstream http://localhost:8000/v1 --task t1 --samples 8 \\
      --out trajectories.jsonl -- claude -p "Mend the tests" """
REWARD = """\
Give a rollout that has ended a reward. It is a span on the rollout's trace: in a
file of spans, or sent over OTLP as OTEL_EXPORTER_OTLP_ENDPOINT says. `rebuild`
then gives the trajectory with the reward; of several with one name, the last."""
GATEWAY = """\
Stand between agents and their model server, and record every model call. An
agent in any language says which rollout a call belongs to: by its base URL
(/r/TOKEN/v1), its API key (or-TOKEN) or the headers traceparent and baggage.
POST /rollouts begins a rollout and gives them; /docs describes it.
The first line of output is the address. SIGTERM or SIGINT ends it. Spans also
go out over OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set."""


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Options of the gateway that a verb serves."""
    parser.add_argument(
        "--upstream",
        required=True,
        metavar="URL",
        help="base URL of the model server, such as http://localhost:8000/v1",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the model server's key, which agents do not get; default: "
        "they send their own",
    )
    parser.add_argument(
        "--request-token-ids",
        action="store_true",
        help="ask the model server for token ids and log-probabilities; agents do not see them",
    )
    parser.add_argument(
        "--renderer",
        metavar="NAME",
        help="send the token ids that a conversation has instead of its messages: `server` asks "
        "the model server for those of new messages; else a tokenizer that the package renderers "
        "knows. Needs token ids, and a server that takes them (docs/drift.md)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=_count,
        metavar="N",
        help="refuse longer requests; default: 128 MiB",
    )
    parser.add_argument(
        "--body-seconds",
        type=_seconds,
        metavar="S",
        help="how long the next piece of a request may take to come; default: 60",
    )
    parser.add_argument(
        "--policy-model",
        metavar="NAME",
        help="the model that is trained: calls of others are side calls (docs/side-calls.md)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="append finished trajectories, one JSON object a line"
    )
    parser.add_argument("--spans", metavar="FILE", help="append spans, as OTLP/JSON lines")


def gateway_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `serve` that were given, with names as it has them."""
    names = ("host", "renderer", "max_body_bytes", "body_seconds")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def add_run(run: argparse.ArgumentParser) -> None:
    """Arguments of `run`."""
    _add_server(run)
    run.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that the gateway listens on, for a command in a container; default: this "
        "machine alone",
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
        "--policy-version",
        type=_version,
        metavar="VERSION",
        help="the version of the weights that sample, a whole number or a text",
    )
    run.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=key_value,
        metavar="KEY=VALUE",
        help="metadata of the rollout, a text; may be given several times",
    )
    run.add_argument(
        "--reward-command",
        metavar="CMD",
        help="run through the shell after each sample, with the trajectory on stdin; the last "
        "line of its output is the reward",
    )
    run.add_argument("command", nargs="+", metavar="CMD", help="the command, after --")


def add_reward(reward: argparse.ArgumentParser) -> None:
    """Arguments of `reward`."""
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


def add_gateway(gateway: argparse.ArgumentParser) -> None:
    """Arguments of `gateway`."""
    _add_server(gateway)
    gateway.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this need a secret"
    )
    gateway.add_argument("--port", type=int, default=4040, help="default: 4040; 0: any free port")
    gateway.add_argument(
        "--secret-env",
        metavar="NAME",
        help="environment variable with the secret that signs tokens; default: "
        "OTEL_ROLLOUT_SECRET, if it is set",
    )


def key_value(text: str) -> tuple[str, str]:
    """An option KEY=VALUE as a pair."""
    name, is_there, value = text.partition("=")
    if not name or not is_there:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name, value


def _version(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() else text


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
