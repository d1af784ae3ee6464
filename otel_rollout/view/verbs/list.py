"""The verb `list`: a line for each trajectory, as it is read, and a footer with the sums."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator

from otel_rollout.terminal import say
from otel_rollout.view.overview import Overview, examine
from otel_rollout.view.sources import Sources, say_unreadable
from otel_rollout.view.verbs.choice import Choice
from otel_rollout.view.verbs.columns import Table
from otel_rollout.view.verbs.totals import Totals
from otel_rollout.wire import dumps

_WIDTH = 160
"""Characters of a line where no terminal says how wide it is."""


def list(options: argparse.Namespace) -> int:  # noqa: A001 - the verb's name
    """Run the verb; the exit status."""
    choice = Choice(options)
    totals = Totals(group_by=choice.group_by)
    sources = Sources(options.sources, prints_lines=True)
    overviews = choice.in_order(_overviews(sources, choice, totals, options))
    if options.json:
        for overview in overviews:
            print(dumps(overview.to_dict()), flush=True)
        print(dumps({"summary": totals.to_dict()}))
    else:
        _print_table(overviews, totals)
    return say_unreadable(sources.errors)


def _overviews(
    sources: Sources, choice: Choice, totals: Totals, options: argparse.Namespace
) -> Iterator[Overview]:
    """The overviews that are kept, one at a time; they are counted as they come."""
    for trajectory in sources.trajectories(infer_rollouts=options.infer_rollouts):
        overview, findings, _ = examine(trajectory)
        if choice.keeps(overview):
            totals.add(overview, findings)
            yield overview


def _print_table(overviews: Iterable[Overview], totals: Totals) -> None:
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    table = Table(width)
    for number, overview in enumerate(overviews):
        if not number:
            print(table.head())
        print(table.line(overview), flush=True)
    if not totals.rewards.count:
        say("no trajectories")
        return
    print()
    for line in totals.lines(width):
        print(line)
