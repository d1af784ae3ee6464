"""The verb `list`: a line for each trajectory, as it is read, and a footer with the sums.

The widths of columns are chosen before the first line. Memory: a line for each group and each
distinct finding, of which there is a bound.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from otel_rollout.terminal import escaped, line_width, note, number_of, shortened
from otel_rollout.view.curves import (
    Curve,
    Endings,
    Scores,
    TokenSum,
    label,
    short_id,
    token_numbers,
)
from otel_rollout.view.findings import Finding, replies_by_sentence
from otel_rollout.view.overview import Overview
from otel_rollout.view.sources import Sources, note_unreadable
from otel_rollout.view.verbs.choice import Choice
from otel_rollout.view.verbs.never_ended import note_never_ended
from otel_rollout.wire import Json, dumps

_DISTINCT = 10_000
"""Distinct findings that are counted apart; those after them are counted together."""
_SHOWN = 20
"""Findings, and errors, that are printed."""
_NAME, _LEAST_NAME = 32, 12
"""Characters of the name of a group, at most and at least."""


def list_trajectories(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    choice = Choice(options)
    totals = Totals(curve=choice.curve)
    sources = Sources(options.sources, prints_lines=True)
    hits: dict[str, list[str]] = {}
    overviews = choice.in_order(_overviews(sources, choice, totals, options, hits))
    if options.json:
        for overview in overviews:
            hit = {} if choice.search is None else {"hit": hits.pop(overview.id, [])}
            print(dumps({**overview.to_dict(), **hit}), flush=True)
        print(dumps({"summary": totals.to_dict()}))
    else:
        _print_table(overviews, totals, hits)
        if not totals.scores.count:
            note(choice.nothing())
    note_never_ended(sources.started)
    is_none = not totals.scores.count and choice.where is None
    foreign = sources.note_foreign(are_read=options.infer_rollouts) if is_none else 0
    return max(note_unreadable(sources.errors), foreign)


def _overviews(
    sources: Sources,
    choice: Choice,
    totals: Totals,
    options: argparse.Namespace,
    hits: dict[str, list[str]],
) -> Iterator[Overview]:
    """The overviews that are kept, one at a time; they are counted as they come."""
    found = sources.trajectories(
        choice.examined,
        infer_rollouts=options.infer_rollouts,
        jobs=options.jobs,
        reads_replies=choice.reads_replies,
    )
    for examined in found:
        if examined.hit:
            hits[examined.overview.id] = examined.hit
        totals.count(examined.overview, examined.findings)
        yield examined.overview


def _print_table(overviews: Iterable[Overview], totals: Totals, hits: dict[str, list[str]]) -> None:
    width = line_width()
    table = Table(width)
    for number, overview in enumerate(overviews):
        if not number:
            print(table.head())
        print(table.line(overview), flush=True)
        if hit := hits.pop(overview.id, None):
            room = max(width - 10, 40)
            before = hit[0] if len(hit[0]) <= room // 3 else "…" + hit[0][-room // 3 :]
            marked = (f"«{text}»" if place % 2 else text for place, text in enumerate(hit[1:], 1))
            print(" " * 10 + padded(before + "".join(marked), room).rstrip())
    if totals.scores.count:
        print()
        for line in totals.lines(width):
            print(line)


# --- the table


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its head, its cell of an overview, and how wide it is."""

    head: str
    cell: Callable[[Overview], object]
    least: int
    """Characters that it has at least, where it is not left out."""
    most: int = 0
    """Characters that it grows to where there is room; 0: it does not grow."""
    is_text: bool = False
    """True if it is aligned left, and truncated where it is too long."""
    rank: int = 0
    """Columns of the highest rank are left out first where the line is too short."""


def number(value: float | None) -> str:
    """A number that a person reads; `-` for one that is not known."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def task_of(overview: Overview) -> str | None:
    """The task as people know it: its id, else its text."""
    return short_id(overview.task_id) or overview.question


def end_of(overview: Overview) -> str:
    """The error, with its type, or else the answer."""
    if overview.error_type is None and overview.error is None:
        return overview.answer or "-"
    return ": ".join(filter(None, (overview.error_type, overview.error)))


COLUMNS = (
    Column("id", lambda o: o.id[:8], 8, is_text=True),
    Column("task", lambda o: task_of(o) or o.name, 8, 24, is_text=True, rank=1),
    Column("#", lambda o: number(o.sample_index), 3, rank=2),
    Column("status", lambda o: o.status, 9, is_text=True),
    Column("reward", lambda o: number(o.reward), 7),
    Column("error or answer", end_of, 15, 60, is_text=True, rank=3),
    Column("turns", lambda o: o.turns, 5),
    Column("prompt", lambda o: number(o.prompt_tokens), 7, rank=6),
    Column("sampled", lambda o: number(o.sampled_tokens), 7, rank=5),
    Column("trained", lambda o: o.trained_tokens, 7),
    Column("seconds", lambda o: "-" if o.seconds is None else f"{o.seconds:.1f}", 7, rank=6),
    Column("findings", lambda o: ",".join(o.findings) or "-", 8, 24, is_text=True, rank=4),
    Column("name", lambda o: o.name, 8, 24, is_text=True, rank=7),
    Column("versions", lambda o: ",".join(map(str, o.versions)), 8, 16, is_text=True, rank=8),
    Column("group", lambda o: short_id(o.group_id), 6, 20, is_text=True, rank=9),
)
_GAP = "  "
_RARE = 7
_TEXT = 40
"""Columns of this rank or a higher one are shown if task and answer keep so much room to grow."""


class Table:
    """A table of overviews, in lines of one width."""

    def __init__(self, width: int) -> None:
        columns = list(COLUMNS)
        while (last := max(columns, key=lambda column: column.rank)).rank:
            if _width(columns) + (_TEXT if last.rank >= _RARE else 0) <= width:
                break
            columns.remove(last)
        spare = width - _width(columns)
        self._columns: list[tuple[Column, int]] = []
        for column in columns:
            more = min(max(spare, 0), max(column.most - column.least, 0))
            spare -= more
            self._columns.append((column, column.least + more))

    def head(self) -> str:
        """The first line."""
        return _line([(column, size, column.head) for column, size in self._columns])

    def line(self, overview: Overview) -> str:
        """The line of a trajectory; what could steer a terminal is escaped."""
        cells = [(column, size, column.cell(overview)) for column, size in self._columns]
        return _line([(c, size, "-" if cell is None else str(cell)) for c, size, cell in cells])


def _width(columns: Sequence[Column]) -> int:
    return sum(column.least for column in columns) + len(_GAP) * (len(columns) - 1)


def _line(cells: Sequence[tuple[Column, int, str]]) -> str:
    return _GAP.join(
        padded(text, size) if column.is_text else f"{escaped(text):>{size}}"
        for column, size, text in cells
    ).rstrip()


def padded(text: str, size: int) -> str:
    """The text on one line, cut or filled up to so many characters."""
    return f"{shortened(escaped(' '.join(text[: 10 * size].split())), size):<{size}}"


# --- the footer


@dataclass(slots=True)
class Totals(Endings):
    """The sums over trajectories, which are not kept."""

    curve: Curve | None = None
    """The sums by the values of a field. None: groups are only counted."""
    trained_tokens: int = 0
    dropped: int = 0
    """Completions that no row trains."""
    with_findings: int = 0
    """Trajectories that have findings."""
    _tasks: dict[str, str] = field(default_factory=dict)
    """The task of each group, where groups are counted apart."""
    _group_ids: set[int] = field(default_factory=set)
    """Hashes of group ids."""
    _findings: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Trajectories, by kind, text for a sum, and advice."""
    _replies: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def count(self, overview: Overview, findings: Iterable[Finding]) -> None:
        """Count a trajectory and its findings."""
        self.add(overview, overview.termination_reason)
        self.add_error(overview.error_type, overview.error)
        self.trained_tokens += overview.trained_tokens
        self.dropped += overview.dropped
        if overview.group_id is not None:
            self._group_ids.add(hash(overview.group_id))
        if self.curve is not None:
            self.curve.add(overview)
            if self.curve.by.text == "group_id" and (task := task_of(overview)):
                self._tasks.setdefault(label(overview.group_id), task)
        found = replies_by_sentence(findings)
        self.with_findings += bool(found)
        for name, replies in found.items():
            if name not in self._findings and len(self._findings) >= _DISTINCT:
                name = ("uncertain", "others", "See the findings of each trajectory.")
            self._findings[name] += 1
            self._replies[name] += replies

    def to_dict(self) -> dict[str, Json]:
        """The sums as JSON."""
        return {
            "trajectories": self.scores.count,
            "statuses": dict(self.statuses.most_common()),
            "termination_reasons": dict(self.reasons.most_common()),
            "errors": [
                {"error_type": name, "error": text, "count": count}
                for name, text, count in self.errors()
            ],
            "reward": {
                name: each
                for name, each in self.scores.to_dict().items()
                if name in ("count", "scored", "mean")
            },
            "failed": self.scores.failed,
            **token_numbers(prompt_tokens=self.scores.prompt, sampled_tokens=self.scores.sampled),
            "group_ids": len(self._group_ids),
            "group_by": None if self.curve is None else self.curve.by.text,
            "pass_threshold": None if self.curve is None else self.curve.threshold,
            "failures": None if self.curve is None else self.curve.failures,
            "groups": [] if self.curve is None else self.curve.to_list(),
            "trained_tokens": self.trained_tokens,
            "dropped": self.dropped,
            "with_findings": self.with_findings,
            "findings": [
                {
                    **dict(zip(("kind", "text", "advice"), name, strict=True)),
                    "count": count,
                    "replies": self._replies[name],
                }
                for name, count in self._findings.most_common()
            ],
        }

    def lines(self, width: int) -> Iterator[str]:
        """The footer for people."""
        scores, count = self.scores, self.scores.count
        endings = ", ".join(f"{n} {status}" for status, n in self.statuses.most_common())
        reasons = ", ".join(
            f"{n} {reason}"
            for reason, n in self.reasons.most_common()
            if reason not in self.statuses
        )
        grouped = f", {number_of(len(self._group_ids), 'group')}" if self._group_ids else ""
        yield escaped(
            f"{number_of(count, 'trajectory')}{grouped}: {endings}"
            + (f" ({reasons})" if reasons else "")
        )
        mean = f"mean {number(scores.mean)}; {scores.scored} of {count} have one"
        yield f"reward: {mean if scores.scored else 'none'}"
        yield (
            f"tokens: prompt {scores.prompt.text(count)}, sampled {scores.sampled.text(count)}, "
            f"{self.trained_tokens} train; {number_of(self.dropped, 'reply')} in no row"
        )
        yield from self._error_lines(width)
        if self.curve is not None:
            yield from self._group_lines(self.curve, width)
        yield from self._finding_lines(width)

    def _error_lines(self, width: int) -> Iterator[str]:
        errors = self.errors()
        if errors:
            yield f"errors, in {number_of(sum(n for _, _, n in errors), 'trajectory')}:"
        for name, text, n in errors[:_SHOWN]:
            yield f"{n:>6} x " + padded(f"{name}: {text}", max(width - 9, 40)).rstrip()
        if len(errors) > _SHOWN:
            yield f"       and {len(errors) - _SHOWN} more (--json has all)"

    def _group_lines(self, curve: Curve, width: int) -> Iterator[str]:
        ks = curve.ks() if len(curve) else []
        heads = ["count", "failed", "scored", "mean", "passed", *(f"pass@{k}" for k in ks)]
        heads += ["prompt", "sampled"]
        rows = [_cells(scores, ks) for _, scores in curve.points()]
        sizes = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        if sum(sizes) + len(_GAP) * len(sizes) + _LEAST_NAME > width:  # --json has the tokens
            heads, rows, sizes = heads[:-2], [cells[:-2] for cells in rows], sizes[:-2]
        room = max(_LEAST_NAME, min(_NAME, width - sum(sizes) - len(_GAP) * len(sizes)))
        yield _aligned(padded(f"by {curve.by.text}", room), heads, sizes)
        for (value, _), cells in zip(curve.points(), rows, strict=True):
            text = label(value)
            task, name = self._tasks.get(text, ""), short_id(text) or ""
            name = padded(f"{name}  {task}" if task and task != name else name, room)
            yield _aligned(name, cells, sizes)
        yield from textwrap.wrap(_about(curve, ks), max(width, 40))

    def _finding_lines(self, width: int) -> Iterator[str]:
        if not self._findings:
            return
        yield f"findings, in {number_of(self.with_findings, 'trajectory')}:"
        for name, count in self._findings.most_common(_SHOWN):
            (kind, text, advice), replies = name, self._replies[name]
            room = max(width - 9, 40)
            of = f" ({number_of(replies, 'reply')})" if replies else ""
            yield f"{count:>6} x " + padded(f"{kind}{of}: {text}", room).rstrip()
            yield from textwrap.wrap(
                advice, room + 9, initial_indent=" " * 9, subsequent_indent=" " * 9
            )
        if len(self._findings) > _SHOWN:
            yield f"       and {len(self._findings) - _SHOWN} more (--json has all)"


def _cells(scores: Scores, ks: Sequence[int]) -> list[str]:
    """The numbers of a line of a group; `-` where nothing is known."""
    at = [scores.pass_at(k) for k in ks]
    return [
        *map(str, (scores.count, scores.failed, scores.scored)),
        number(scores.mean if scores.scored else None),
        _percent(scores.pass_rate),
        *(_percent(rate) + f" of {tasks}" * (rate is not None) for rate, tasks in at),
        *(_part(tokens, scores.count) for tokens in (scores.prompt, scores.sampled)),
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}%"


def _part(tokens: TokenSum, count: int) -> str:
    """A sum; it has a mark where it is not of all trajectories."""
    return (f"{tokens.total}" + "+" * (tokens.known < count)) if tokens.known else "-"


def _aligned(name: str, cells: Sequence[str], sizes: Sequence[int]) -> str:
    return _GAP.join([name, *(f"{c:>{size}}" for c, size in zip(cells, sizes, strict=True))])


def _about(curve: Curve, ks: Sequence[int]) -> str:
    """What the columns are, and which trajectories are not in them."""
    rule = "a failure has not passed (--scored-only)"
    if curve.scored_only:
        rule = "rates are of those with a reward alone (--scored-only)"
    found = [f"passed: reward >= {number(curve.threshold)} (--pass-threshold); {rule}"]
    if ks:
        found.append("pass@k: mean over the tasks with k rated trajectories, of so many tasks")
    if unrated := curve.all.count - curve.all.rated:
        found.append(f"{number_of(unrated, 'trajectory')} without a reward, in no rate")
    if min(curve.all.prompt.known, curve.all.sampled.known) < curve.all.count:
        found.append("+: tokens of some trajectories are not known")
    if curve.several:
        found.append(f"{number_of(curve.several, 'trajectory')} of several versions, in each")
    return "; ".join(found)
