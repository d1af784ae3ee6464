"""The command `otel-rollout`: run agents, rebuild trajectories, look at them, export them.

What it was asked for goes to stdout or the file named, all else to stderr. The exit status is 0;
1 if something could not be read, was not found or is a problem; 2 for a wrong command line; of
`run` it is that of the command that it ran.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from otel_rollout.command import arguments as given
from otel_rollout.command import descriptions as text
from otel_rollout.command.argument_types import Argument, PrintVersion
from otel_rollout.command.outputs import check_outputs
from otel_rollout.errors import RolloutError
from otel_rollout.terminal import note, sentence_about
from otel_rollout.view import REQUIREMENTS

_NEEDS = "\n".join(f"  {name:<14} {what}" for name, (_, what) in REQUIREMENTS.items())
_SEE = "What a SOURCE is, and an EXPR of --where: otel-rollout --help"
_VERBS: tuple[tuple[str, str, str, tuple[Argument, ...]], ...] = (
    ("rebuild", "trajectories from recorded spans", text.REBUILD, given.REBUILD),
    ("list", "a line for each trajectory, and sums", text.LIST, given.LIST),
    ("check", "is it what a trainer needs?", text.CHECK + _NEEDS, given.CHECK),
    ("show", "look at trajectories", text.SHOW, given.SHOW),
    ("view", "a page that shows trajectories", text.VIEW, given.VIEW),
    ("drift", "which conversations forked by tokens, and why", text.DRIFT, given.DRIFT),
    ("export", "rows that a trainer reads", text.EXPORT, given.EXPORT),
    ("run", "run a command as a rollout", text.RUN, given.RUN),
    ("replay", "answer with recorded replies", text.REPLAY, given.REPLAY),
    ("reward", "reward a rollout that has ended", text.REWARD, given.REWARD),
    ("gateway", "record agents in any language", text.GATEWAY, given.GATEWAY),
    ("receive", "trajectories from spans over OTLP", text.RECEIVE, given.RECEIVE),
    ("audit", "what became of all rollouts", text.AUDIT, given.AUDIT),
    ("doctor", "check a set-up", text.DOCTOR, given.DOCTOR),
)
"""Name, summary, description and arguments of each."""
_READS_NONE = ("run", "gateway", "receive", "doctor")
"""Verbs without a SOURCE."""
_LOOKING = ("check", "drift", "list", "show", "view")
"""The verbs of the room `view`; each other one is a module of this room."""


def command_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; it sets `verb` to the name of the subcommand."""
    parser = argparse.ArgumentParser(
        prog="otel-rollout",
        description="Trajectories for training from OpenTelemetry spans.",
        epilog=f"{text.SOURCES}\n\n{text.WHERE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, help="show the version, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary, description, arguments in _VERBS:
        verb = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=None if name in _READS_NONE else _SEE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(verb=name, wrong=verb.error)
        for names, settings in arguments:
            verb.add_argument(*names, **settings)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. SystemExit for a wrong command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, command = _without_command(words)
    options = command_parser().parse_args(_with_descending_sort(words))
    if command is not None:
        options.command = command
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text of any language, whatever the locale
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has seen enough
        _flush_or_drop()
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, LookupError, RolloutError) as error:
        note(sentence_about(error))
        _flush_or_drop()
        return 1
    return status


def _without_command(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Arguments of `replay` and the command after them: argparse takes no two lists of words."""
    if arguments[:1] != ["replay"]:
        return arguments, None
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def _with_descending_sort(arguments: list[str]) -> list[str]:
    """`--sort -FIELD` as `--sort=-FIELD`: argparse takes what begins with - for an option."""
    place = arguments.index("--sort") if "--sort" in arguments else len(arguments)
    fields = arguments[place + 1 : place + 2]
    if arguments[:1] == ["run"] or not any(re.match(r"-[a-z_]{2}", field) for field in fields):
        return arguments
    return [*arguments[:place], f"--sort={fields[0]}", *arguments[place + 2 :]]


def _flush_or_drop() -> None:
    """Write what is buffered for stdout, or drop it: it must not fail again when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    check_outputs(options)
    # Each verb is a module, imported when it is used: --help and --version need no client, no SDK.
    if options.verb in _LOOKING:
        module = import_module("otel_rollout.view")
    else:
        module = import_module(f"otel_rollout.command.{options.verb}")
    verb: Callable[[argparse.Namespace], int] = getattr(module, options.verb)
    return verb(options)
