"""The verb `audit`: what became of all rollouts, from files, journals and backends.

Exit status: 0 if nothing is missing; 1 if something is, or no rollout is there; 2 if unreadable.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from otel_rollout.errors import RolloutError
from otel_rollout.evidence import Audit, Head
from otel_rollout.kafka import audit_topic
from otel_rollout.receive import audit_journal, is_journal
from otel_rollout.spans import as_records
from otel_rollout.terminal import escaped, note, sentence_about
from otel_rollout.view import NeverEnded, Sources, is_of_starts, note_unreadable
from otel_rollout.wire import dumps


def audit(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    found = Audit()
    try:
        unreadable = _read(options.sources, found)
    except (OSError, LookupError, RolloutError) as error:
        note(sentence_about(error))
        return 2
    report = found.report()
    if options.json:
        print(dumps(report.to_dict()))
    else:
        for line in report.lines():
            print(escaped(line))
    if unreadable:
        return 2 * note_unreadable(unreadable)
    if not (found.started.started or report.late):
        note("no rollout to audit: there is none in the sources")
        return 1
    return int(not report.is_fine)


def _read(names: Sequence[str], found: Audit) -> int:
    """Take in what all sources have; how many places of them could not be read."""
    journals = [each for each in names if is_journal(Path(each))]
    starts = [each for each in names if os.path.isfile(each) and is_of_starts(each)]
    topics = [each for each in names if each.startswith("kafka://")]
    sources = Sources([each for each in names if each not in {*journals, *starts, *topics}])
    for journal in journals:
        audit_journal(Path(journal), found, sources.report)
    found.started.join(NeverEnded(starts, sources.report).records)
    for topic in topics:
        audit_topic(topic, found, sources.report)
    of: Callable[..., Head] = Head.of
    for each in sources.found_or_records(of):
        if isinstance(each, Head):
            found.add_trajectory(each)
        else:
            for record in as_records([each]):
                found.see(record)
    return sources.errors
