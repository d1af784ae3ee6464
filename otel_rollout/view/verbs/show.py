"""The verb `show`: trajectories as trees, coloured on a terminal."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from typing import get_args

from otel_rollout.terminal import has_colours, note
from otel_rollout.trajectory import Kind
from otel_rollout.view.as_text import trajectory_lines
from otel_rollout.view.sources import Sources, note_unreadable
from otel_rollout.view.verbs.choice import Choice


def show(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    choice = Choice(options)
    sources = Sources(options.sources, prints_lines=True)
    wanted = (options.id or "").lower()
    coloured = _coloured() if has_colours() else str
    width = None if options.full else shutil.get_terminal_size((80, 24)).columns
    shown = 0
    found = (
        each
        for each in sources.trajectories(infer_rollouts=options.infer_rollouts)
        if each.id.startswith(wanted) or each.trace_id.startswith(wanted)
    )
    kept = choice.in_order_of_keys(sources.each(choice.keyed, found))
    for tree in sources.each(lambda each: list(trajectory_lines(each, width=width)), kept):
        if shown:
            print()
        shown += 1
        for lines in tree:
            for line in lines.split("\n"):
                print(coloured(line))
        sys.stdout.flush()
    if not shown:
        note(f"no trajectory whose id begins with {wanted!r}" if wanted else "no trajectories")
    return max(note_unreadable(sources.errors), int(bool(wanted) and not shown))


_STYLES = (
    (re.compile(r"^(?![│├└ ])(.*)$"), "1"),
    (re.compile(r"^([├└]─ (?:error|cancelled|call ).*)$"), "31"),
    (re.compile(r"^(├─ (?:warning|" + "|".join(get_args(Kind)) + "): .*)$"), "33"),
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
