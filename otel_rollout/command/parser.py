"""The command line: verbs, and their help. It imports no verb."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from otel_rollout.command.argument_types import Argument, PrintVersion
from otel_rollout.command.arguments import (
    AUDIT_ARGUMENTS,
    CHECK_ARGUMENTS,
    DOCTOR_ARGUMENTS,
    DRIFT_ARGUMENTS,
    EXPORT_ARGUMENTS,
    GATEWAY_ARGUMENTS,
    LIST_ARGUMENTS,
    REBUILD_ARGUMENTS,
    RECEIVE_ARGUMENTS,
    REPLAY_ARGUMENTS,
    REWARD_ARGUMENTS,
    RUN_ARGUMENTS,
    SHOW_ARGUMENTS,
    VIEW_ARGUMENTS,
)
from otel_rollout.command.descriptions import (
    AUDIT,
    CHECK,
    DOCTOR,
    DRIFT,
    EXPORT,
    GATEWAY,
    LIST,
    REBUILD,
    RECEIVE,
    REPLAY,
    REWARD,
    RUN,
    SHOW,
    SOURCES,
    VIEW,
    WHERE,
)
from otel_rollout.view import REQUIREMENTS

_NEEDS = "\n".join(f"  {name:<14} {what}" for name, (_, what) in REQUIREMENTS.items())
_SEE = "What a SOURCE is, and an EXPR of --where: otel-rollout --help"


class _Verb(NamedTuple):
    name: str
    summary: str
    description: str
    after: str | None
    """Text after the arguments."""
    arguments: tuple[Argument, ...]


_VERBS = (
    _Verb(
        "rebuild",
        "trajectories from recorded spans",
        REBUILD,
        _SEE,
        REBUILD_ARGUMENTS,
    ),
    _Verb(
        "list",
        "a line for each trajectory, and sums",
        LIST,
        _SEE,
        LIST_ARGUMENTS,
    ),
    _Verb(
        "check",
        "is it what a trainer needs?",
        CHECK + _NEEDS,
        _SEE,
        CHECK_ARGUMENTS,
    ),
    _Verb("show", "look at trajectories", SHOW, _SEE, SHOW_ARGUMENTS),
    _Verb(
        "view",
        "a page that shows trajectories",
        VIEW,
        _SEE,
        VIEW_ARGUMENTS,
    ),
    _Verb(
        "drift",
        "which conversations forked by tokens, and why",
        DRIFT,
        _SEE,
        DRIFT_ARGUMENTS,
    ),
    _Verb("export", "rows that a trainer reads", EXPORT, _SEE, EXPORT_ARGUMENTS),
    _Verb("run", "run a command as a rollout", RUN, None, RUN_ARGUMENTS),
    _Verb("replay", "answer with recorded replies", REPLAY, _SEE, REPLAY_ARGUMENTS),
    _Verb(
        "reward",
        "reward a rollout that has ended",
        REWARD,
        _SEE,
        REWARD_ARGUMENTS,
    ),
    _Verb("gateway", "record agents in any language", GATEWAY, None, GATEWAY_ARGUMENTS),
    _Verb("receive", "trajectories from spans over OTLP", RECEIVE, None, RECEIVE_ARGUMENTS),
    _Verb("audit", "what became of all rollouts", AUDIT, _SEE, AUDIT_ARGUMENTS),
    _Verb("doctor", "check a set-up", DOCTOR, None, DOCTOR_ARGUMENTS),
)


def command_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; it sets `verb` to the name of the subcommand."""
    parser = argparse.ArgumentParser(
        prog="otel-rollout",
        description="Trajectories for training from OpenTelemetry spans.",
        epilog=f"{SOURCES}\n\n{WHERE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, help="show the version, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary, description, after, arguments in _VERBS:
        verb = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=after,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(verb=name, wrong=verb.error)
        for names, settings in arguments:
            verb.add_argument(*names, **settings)
    return parser
