"""The verb `show`: trajectories as trees, coloured on a terminal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, get_args

from otel_rollout.terminal import has_colours, line_width, note
from otel_rollout.trajectory import Kind, Trajectory
from otel_rollout.view.as_text import trajectory_lines
from otel_rollout.view.sources import Sources, note_unreadable
from otel_rollout.view.verbs.choice import Choice


def show(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    choice = Choice(options)
    sources = Sources(options.sources, prints_lines=True)
    wanted = (options.id or "").lower()
    coloured = _coloured() if has_colours() else str
    width = None if options.full else line_width()
    shown = 0

    def keyed(each: Trajectory) -> tuple[Any, Trajectory] | None:
        is_wanted = each.id.startswith(wanted) or each.trace_id.startswith(wanted)
        return choice.keyed(each) if is_wanted else None

    def tree(each: Trajectory) -> list[str]:
        return list(trajectory_lines(each, width=width))

    if choice.sorts is None:
        trees = sources.trajectories(
            lambda each: tree(each) if keyed(each) else None, infer_rollouts=options.infer_rollouts
        )
    else:
        found = sources.trajectories(keyed, infer_rollouts=options.infer_rollouts)
        trees = sources.each(tree, choice.in_order_of_keys(found))
    for lines_of_tree in trees:
        if shown:
            print()
        shown += 1
        for lines in lines_of_tree:
            for line in lines.split("\n"):
                print(coloured(line))
        sys.stdout.flush()
    if not shown:
        note(f"no trajectory whose id begins with {wanted!r}" if wanted else choice.nothing())
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
