"""A page that contains all its answers: one file to attach or keep, or a cell of a notebook.

Its size is bounded. What was left out is listed in the page and returned to the caller.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any, cast
from urllib.parse import quote

from otel_rollout.export import Rows
from otel_rollout.terminal import escaped, number_of
from otel_rollout.trajectory import (
    UNREADABLE,
    Completion,
    Contents,
    Conversations,
    Episode,
    Kind,
    Source,
    TokenSequences,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.view.answers import CURVES, MOST_ROWS, Answers
from otel_rollout.view.built_page import Page, as_json
from otel_rollout.view.details import Opened
from otel_rollout.view.findings import Finding
from otel_rollout.view.overview import Overview, Overviews, examine
from otel_rollout.view.search import searched_text
from otel_rollout.view.table import Table, WritableTable
from otel_rollout.wire import Json

MOST_LISTED = 2_000
"""Trajectories that a page lists."""
MOST_BYTES = 20_000_000
"""Bytes of the details and tokens of a page; what comes after them is listed without."""
MOST_TOKENS = 20_000
"""Tokens of one row in a page."""
DAMAGED = "the damaged"
"""Prefix of the sentence about a trajectory that could be listed and not be read."""
_MOST_GROUPS = 200
_OF_OVERVIEW = ("an overview has no cause of it", "Make the trajectory itself the value of a cell.")
"""Text and advice of a finding of which there is the kind alone."""
_HEIGHT = 640
"""Pixels of a notebook's cell."""


class InMemory:
    """Trajectories in memory, for the thread that made the object.

    rows: the token sequences of the first one, where others than its own are meant.
    overviews: of further trajectories, which are only listed.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        rows: TokenSequences | None = None,
        *,
        overviews: Iterable[Overview] = (),
    ) -> None:
        self.sources = ["this process"]
        self.complete = True
        self.errors: list[str] = []
        self._held: dict[str, Opened] = {}
        self._table = WritableTable.create(sqlite3.connect(":memory:"))
        for trajectory in trajectories:
            opened = Opened(_ended(trajectory), None if self._held else rows)
            self._held[trajectory.id] = opened
            overview, findings, *_ = examine(opened.trajectory, opened.rows)
            self._table.add(overview, findings, searched_text(opened.trajectory))
        for each in overviews:
            self._table.add(
                each, [Finding(cast("Kind", k), *_OF_OVERVIEW) for k in each.findings], ""
            )

    def __enter__(self) -> InMemory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._table.connection.close()

    def table(self) -> Table:
        """Their overviews."""
        return self._table

    def load(self, id_: str) -> Opened:
        """One of them. LookupError where there is only its overview."""
        return self._held[id_]


def whole_page(
    answers: Answers,
    page: Page,
    *,
    title: str,
    most_bytes: int = MOST_BYTES,
    framed: bool = False,
    start: str = "",
    missing: str = "",
) -> tuple[str, list[str]]:
    """One HTML file with the trajectories, and sentences about what is not in it.

    most_bytes: of details and tokens; 0: the page is a list, without any.
    framed: see `Page.whole`. start, missing: see `page_types.Embedded`.
    """
    total, rows = _listed(answers)
    details, tokens, left_out = dict[str, Json](), dict[str, Json](), list[str]()
    size = 0
    wanted = rows if most_bytes else []
    for row in wanted:
        try:
            detail = answers.trajectory({"id": row["id"]})
            size += len(as_json(detail))
            if size > most_bytes and details:
                break
            details[row["id"]] = detail
            for number, length in ((each["row"], each["length"]) for each in detail["rows"]):
                if size > most_bytes:
                    left_out.append(f"the tokens of trajectory {row['id']} from row {number} on")
                    break
                window = answers.window(row["id"], number, 0, MOST_TOKENS)
                size += len(as_json(window))
                tokens[f"{row['id']} {number}"] = window
                if length > MOST_TOKENS:
                    left_out.append(
                        f"tokens from {MOST_TOKENS} on of row {number} of trajectory {row['id']}"
                    )
        except UNREADABLE as error:
            left_out.append(f"{DAMAGED} trajectory {row['id']} ({error!r:.200})")
    if len(details) < len(wanted):
        left_out.append(f"the details of {len(wanted) - len(details)} of {total} trajectories")
    if len(rows) < total:
        left_out.append(f"{total - len(rows)} of {total} trajectories")
    state = answers.state({})
    state["errors"] += [f"This page does not hold {each}" for each in left_out[:_MOST_GROUPS]]
    held = {
        "state": state,
        "summary": answers.summary({}),
        "trajectories": {"total": len(rows), "rows": rows},
        "details": details,
        "tokens": tokens,
        "groups": _groups(answers, details),
        "curves": {by: answers.curve({"by": by}) for by in CURVES},
        "start": start,
        "missing": missing,
    }
    return page.whole(held, title=title, framed=framed), left_out


def notebook_cell(shown: object, page: Page | None = None) -> str:
    """What a notebook shows: of rows a table, of all else the page in a frame.

    A group begins with its samples side by side, token sequences with their tokens, overviews with
    their curves. The frame may run its script and nothing else: it has no access to the notebook.
    """
    if isinstance(shown, Rows):
        return _table_of_rows(shown)
    name = type(shown).__name__
    given = shown if isinstance(shown, Overviews) else None
    trajectories, rows, start = ((), None, "") if given is not None else _trajectories(shown)
    with InMemory(trajectories, rows, overviews=given or ()) as held:
        answers = Answers(held)
        if given is not None:
            answers = Answers(
                held, pass_threshold=given.pass_threshold, scored_only=given.scored_only
            )
            several = (by for by in CURVES if len(answers.curve({"by": by})["points"]) > 1)
            start = "".join(f"#curve={by}" for by in islice(several, 1))
        text, _ = whole_page(
            answers,
            page or Page.read(),
            title=name,
            most_bytes=0 if given is not None else MOST_BYTES,
            framed=True,
            start=start,
            missing="Make the trajectory itself the value of a cell.",
        )
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(text)}" width="100%" height="{_HEIGHT}" '
        f'style="border: 0" title="{escape(name)}"></iframe>'
    )


_ROWS_SHOWN = 20


def _table_of_rows(rows: Rows) -> str:
    """The first rows as a plain table, which the notebook styles, and what is in none."""
    shown = [
        {
            "trajectory": row["trajectory_id"][:8],
            "task": row["task_id"],
            "sample": row["sample_index"],
            "row": f"{row['row'] + 1} of {row['rows']}",
            "tokens": len(row["input_ids"]),
            "prompt": row["prompt_length"],
            "trained": sum(row["loss_mask"]),
            "reward": row["reward"],
            "advantage": row["advantage"],
            "versions": ", ".join(map(str, dict.fromkeys(row["policy_versions"]))) or None,
            "truncated": "yes" if row["truncated"] else "",
        }
        for row in rows[:_ROWS_SHOWN]
    ]
    heads = "".join(f"<th>{name}</th>" for name in (shown[0] if shown else ()))
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(value))}</td>' for value in row.values())}</tr>"
        for row in shown
    )
    more = f"; the first {_ROWS_SHOWN} are shown, to_pandas() has all" * (len(rows) > _ROWS_SHOWN)
    tokens = number_of(sum(sum(row["loss_mask"]) for row in rows), "token")
    dropped = number_of(len(rows.dropped), "reply") + " in no row (.dropped)"
    return (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
        f"<p>{number_of(len(rows), 'row')}{more}; {tokens} train; {dropped}</p>"
    )


def _cell(value: Json) -> str:
    if value is None:
        return "–"
    return escaped(f"{value:.4g}" if isinstance(value, float) else str(value))


def _trajectories(shown: object) -> tuple[Sequence[Trajectory], TokenSequences | None, str]:
    """The trajectories, the rows of the first one if others than its own, and where to begin."""
    if isinstance(shown, TrajectoryGroup):
        members = [*shown.trajectories, *shown.failures]
        ids = {member.group_key for member in members}
        start = f"#group={quote(members[0].group_key or '')}" if len(ids - {None}) == 1 else ""
        return [*members, *shown.children], None, start
    if isinstance(shown, Episode):
        return shown.trajectories, None, ""
    if isinstance(shown, TokenSequences):
        dropped = [drop.completion for drop in shown.dropped if drop.completion is not None]
        found = dict.fromkeys([*(c for row in shown for c in row.completions), *dropped])
        rewards = next((completion.rewards for completion in found), None)
        named = Trajectory(name="rows", source=_Snapshot(found), rewards=rewards, sealed=True)
        return [named], shown, f"#trajectory={named.id}&view=tokens"
    if isinstance(shown, Trajectory):
        return [shown], None, ""
    raise TypeError(
        f"expected a trajectory, a group, an episode, rows or overviews, got {shown!r:.100}"
    )


class _Snapshot(Source):
    """A source of the completions that exist now."""

    def __init__(self, completions: Iterable[Completion]) -> None:
        self._completions = list(completions)

    def read(self) -> Contents:
        """The contents."""
        exchanges = dict.fromkeys(completion.exchange for completion in self._completions)
        return Contents(lambda: Conversations(self._completions), list(exchanges))


def _ended(trajectory: Trajectory) -> Trajectory:
    """The trajectory; of a running one what is there now."""
    if trajectory.sealed:
        return trajectory
    fields: dict[str, Any] = {name: getattr(trajectory, name) for name in _FIELDS}
    source, rewards = _Snapshot(trajectory.completions), trajectory.all_rewards
    return Trajectory(**fields, source=source, rewards=rewards, sealed=True)


_FIELDS = (
    *("id", "name", "trace_id", "span_id", "parent_id", "task_id", "group_id", "sample_index"),
    *(
        "group_run",
        "group_size",
        "policy_version",
        "trainable",
        "status",
        "termination_reason",
        "error",
    ),
    *("output", "logs", "start_time_ns", "end_time_ns", "appended", "metrics", "metadata"),
)


def _listed(answers: Answers) -> tuple[int, list[Json]]:
    """How many trajectories there are, and the first of them."""
    total, rows = 0, list[Json]()
    for offset in range(0, MOST_LISTED, MOST_ROWS):
        found = answers.trajectories({"offset": str(offset), "limit": str(MOST_ROWS)})
        total = found["total"]
        rows += found["rows"]
    return total, rows


def _groups(answers: Answers, details: dict[str, Json]) -> list[Json]:
    """The groups whose members are all in the page."""
    found = []
    for group in answers.summary({})["groups"][:_MOST_GROUPS] if details else ():
        members = answers.group({"id": str(group["value"])})
        if all(member["id"] in details for member in members["members"]):
            found.append(members)
    return found
