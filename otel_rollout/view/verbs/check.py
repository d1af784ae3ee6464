"""The verb `check`: are these trajectories what a trainer needs? Its exit status says so.

0: they are. 1: a trajectory lacks something that is required, is missing, or there is none. 2: a
source could not be read, in whole or in part, or the command line is wrong. Memory: 16 bytes for
each id, and the ids of groups.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from otel_rollout.errors import SpanFormatError
from otel_rollout.export import PARTIAL_GROUPS, Groups, NotWhole, Sample
from otel_rollout.terminal import escaped, note, number_of, sentence_about
from otel_rollout.trajectory import Trajectory
from otel_rollout.view.findings import Finding
from otel_rollout.view.overview import Examined, Overview
from otel_rollout.view.sources import Sources, note_unreadable
from otel_rollout.view.verbs.causes import Causes
from otel_rollout.view.verbs.choice import Choice
from otel_rollout.view.verbs.never_ended import NeverEnded, sources_of
from otel_rollout.view.verbs.requirements import REQUIREMENTS, TO_TRAIN_ON, WHOLE
from otel_rollout.wire import Json, dumps

_GROUPS_SHOWN = 20
"""Groups that are printed; the others are counted."""


def check(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    choice, required = Choice(options), _required(options)
    if not options.sources and not options.started:
        options.wrong("expected a SOURCE, or files of --started")
    try:
        given = options.sources
        if options.started:
            given = _with_content(given) or sources_of(options.started)
        sources = Sources(given, prints_lines=True)
        report = _Report(required, Groups(options.expect_groups), options.expect)
        report.started = NeverEnded(options.started, sources.report)
        found = sources.trajectories(
            partial(_examined, choice),
            infer_rollouts=options.infer_rollouts,
            jobs=options.jobs,
            reads_replies=choice.reads_replies,
        )
        for sample, examined in found:
            checked = report.check(sample, examined)
            if checked is not None and options.json:
                print(dumps(checked.to_dict()), flush=True)
        report.started.settle(sources.started, report.has_ended)
    except (OSError, SpanFormatError) as error:
        note(sentence_about(error))
        return 2
    unreadable = 2 * note_unreadable(sources.errors)
    if options.json:
        print(dumps({"summary": report.to_dict(unreadable=sources.errors)}))
    else:
        for line in report.lines():
            print(escaped(line))
    if not report.trajectories:
        kept = "none in the sources"
        if choice.where:
            kept = f"none that --where keeps (0 of {report.read})"
        note(f"no trajectory to train on: there is {kept}")
    return unreadable or int(not report.is_fine)


def _examined(choice: Choice, trajectory: Trajectory) -> tuple[Sample, Examined | None]:
    """What is computed of a trajectory, None for one that the filter does not keep."""
    return Sample.of(trajectory), choice.examined(trajectory)


def _with_content(sources: Sequence[str]) -> list[str]:
    """The sources without empty files: a rollout that never ended left nothing there."""
    return [each for each in sources if not os.path.isfile(each) or os.path.getsize(each)]


def _required(options: argparse.Namespace) -> tuple[str, ...]:
    names = [name.strip() for name in options.require.split(",") if name.strip()]
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown or not names:
        options.wrong(
            f"--require: expected some of {', '.join(REQUIREMENTS)}, with commas between them, "
            f"got {options.require!r}"
        )
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Checked:
    """A trajectory and what was found in it."""

    overview: Overview
    findings: list[tuple[Finding, str | None]]
    """Each with the requirement that it fails; None: with none of those that were asked for."""

    @property
    def fails(self) -> list[str]:
        """The requirements that it fails, each once."""
        return list(dict.fromkeys(name for _, name in self.findings if name is not None))

    def to_dict(self) -> dict[str, Json]:
        """The same as JSON."""
        names = ("id", "name", "task_id", "group_id", "sample_index", "trace_id")
        return {
            **{name: getattr(self.overview, name) for name in names},
            "ok": not self.fails,
            "fails": self.fails,
            "findings": [{**one.to_dict(), "fails": name} for one, name in self.findings],
        }


@dataclass(slots=True)
class _Report:
    """The sums over trajectories, and the ids that came."""

    required: tuple[str, ...]
    groups: Groups
    expected: int | None
    """Trajectories that there are to be. None: any number."""
    trajectories: int = 0
    failing: Counter[str] = field(default_factory=Counter)
    """Trajectories by the requirement that they fail."""
    failed: int = 0
    """Trajectories that fail any."""
    read: int = 0
    """Trajectories in the sources, also those that --where does not keep."""
    started: NeverEnded = field(default_factory=lambda: NeverEnded((), lambda _: None))
    _unknown: set[bytes] = field(default_factory=set)
    """Those of which nobody knows how they ended."""
    _causes: Causes = field(default_factory=Causes)
    _ids: dict[bytes, bool] = field(default_factory=dict)
    """True for one that --where keeps."""

    @property
    def is_fine(self) -> bool:
        """True if there are trajectories, none fails and none is missing."""
        return self.trajectories > 0 and not self.failed and not any(self._missing())

    def not_whole(self) -> list[NotWhole]:
        """The groups that fail."""
        judges = WHOLE in self.required or self.groups.expected is not None
        return [*self.groups.not_whole()] if judges else []

    def _missing(self) -> Iterator[str]:
        """What is missing from the sources as a whole, in sentences."""
        kept = sum(self._ids.values())
        if self.expected is not None and kept != self.expected:
            yield f"{number_of(self.expected, 'trajectory')} expected, {kept} there"
        if not_whole := len(self.not_whole()):
            are = "is" if not_whole == 1 else "are"
            yield f"{not_whole} of {number_of(len(self.groups), 'group')} {are} not whole"
        if self.started.rollouts:
            yield f"{len(self.started.rollouts)} of {len(self.started.records.started)} never ended"
        if self.groups.expected is not None and not len(self.groups):
            yield f"groups of {self.groups.expected} expected, no trajectory has a group"

    def has_ended(self, trajectory_id: str) -> bool:
        """True if the end of this rollout is in the sources."""
        digest = _digest(trajectory_id)
        return digest in self._ids and digest not in self._unknown

    def check(self, sample: Sample, examined: Examined | None) -> Checked | None:
        """What is found in a trajectory; None for one that is not asked about."""
        self.read += 1
        digest = _digest(sample.id)
        if sample.has_ended:
            self._unknown.discard(digest)
        elif digest not in self._ids:
            self._unknown.add(digest)
        if digest not in self._ids:
            self._ids[digest] = False
            self.groups.add(sample)
        if examined is None:
            return None
        self.groups.ask_for(sample.group_id)
        overview, findings, trainable, untrained, _ = examined
        if self._ids[digest]:
            findings.append(_CAME_BEFORE)
        self._ids[digest] = True
        fails = {
            REQUIREMENTS[name][0]: name
            for name in self.required
            if name != WHOLE and (trainable or name not in TO_TRAIN_ON)
        }
        found = [(one, fails.get(one.kind)) for one in findings]
        if not overview.trained_tokens:
            found.append((untrained, fails.get(None)))
        checked = Checked(overview, found)
        self.trajectories += 1
        self.failed += bool(checked.fails)
        self.failing.update(checked.fails)
        self._causes.add(overview.id, [(one, name) for one, name in found if name is not None])
        return checked

    def lines(self) -> Iterator[str]:
        """The end of what is printed for people."""
        yield from self._causes.lines(self.required)
        not_whole = self.not_whole()
        for each in not_whole[:_GROUPS_SHOWN]:
            yield f"         whole: {each}"
        if len(not_whole) > _GROUPS_SHOWN:
            yield f"and {len(not_whole) - _GROUPS_SHOWN} more groups (--json has all)"
        if not_whole:
            yield f"         {PARTIAL_GROUPS}"
        yield from self.started.lines()
        missing = [*self._missing()]
        if self.failed or missing:
            yield ""
        count = number_of(self.trajectories, "trajectory")
        if self.is_fine:
            yield f"{count}: {', '.join(self.required)}"
        elif self.failed or missing:
            failing = [name for name in self.required if self.failing[name]]
            by = ", ".join(f"{name} {self.failing[name]}" for name in failing)
            fail = f", {self.failed} fail: {by}" if self.failed else ""
            yield "; ".join([f"{count}{fail}", *missing])

    def to_dict(self, *, unreadable: int) -> dict[str, Json]:
        """The sums as JSON."""
        not_whole: list[Json] = [each.to_dict() for each in self.not_whole()]
        return {
            "ok": self.is_fine and not unreadable,
            "required": list(self.required),
            "trajectories": self.trajectories,
            "failed": self.failed,
            "fails": dict(self.failing.most_common()),
            "unreadable": unreadable,
            **({"expected": self.expected} if self.expected is not None else {}),
            **({"started": self.started.to_dict()} if self.started.records.started else {}),
            **({"groups": not_whole} if not_whole else {}),
        }


def _digest(trajectory_id: str) -> bytes:
    return blake2b(trajectory_id.encode(errors="replace"), digest_size=16).digest()


_CAME_BEFORE = Finding(
    "duplicate",
    "its id came before in the sources",
    "Give each source once; of two that are equal `export` takes the last.",
)
