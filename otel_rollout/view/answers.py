"""The answers that the page gets, by their names: sent by the server, or held by a page alone.

Each is a method that takes the texts of a query and gives JSON. A wrong question raises
`ConfigurationError`, one about what is not there `LookupError`; both say what was expected.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Protocol

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.details import Opened
from otel_rollout.view.differences import difference_of, first_difference
from otel_rollout.view.fields import COLUMNS
from otel_rollout.view.overview import PASS_THRESHOLD, check_threshold
from otel_rollout.view.summary import curve_of, groups_of, summary_of
from otel_rollout.view.table import Filter, Table
from otel_rollout.view.tokens import MOST_TOKENS, Tokens, Vocabulary
from otel_rollout.wire import Json

MOST_ROWS = 1000
"""Trajectories, or groups, in one answer."""
_KEPT = 4
"""Trajectories that are kept for the next question about them."""
_MOST_CHILDREN = 200
_MOST_ERRORS = 100
CURVES = ("policy_version", "task_id")
"""Names that the page shows rates by."""
Query = Mapping[str, str]


class Trajectories(Protocol):
    """Where trajectories are: an index of files, or those that somebody has in memory."""

    @property
    def sources(self) -> list[str]:
        """Where they are from, in words."""

    @property
    def complete(self) -> bool:
        """False while more are being read."""

    @property
    def errors(self) -> list[str]:
        """What could not be read."""

    def table(self) -> Table:
        """Their overviews, for this thread to read."""

    def load(self, id_: str) -> Opened:
        """One of them. LookupError where it is not there."""


class Answers:
    """Answers about some trajectories; any thread may ask.

    jaeger: address of a Jaeger that has their traces.
    vocabulary: gives the texts of tokens that did not come with the trajectories.
    where: an expression that holds for all that is listed.
    pass_threshold, scored_only: see `overviews`; where a question has none.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        *,
        jaeger: str | None = None,
        vocabulary: Vocabulary | None = None,
        where: str = "",
        pass_threshold: float = PASS_THRESHOLD,
        scored_only: bool = False,
    ) -> None:
        self._all = trajectories
        self._jaeger = None if jaeger is None else jaeger.rstrip("/")
        self._vocabulary = vocabulary
        self._only = where.strip()
        self._threshold = pass_threshold
        self._scored_only = scored_only
        Filter.of(self._only)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[object, Opened, Tokens]] = OrderedDict()

    def named(self) -> dict[str, Callable[[Query], Json]]:
        """The answers by their names."""
        return {
            "state": self.state,
            "trajectories": self.trajectories,
            "summary": self.summary,
            "curve": self.curve,
            "groups": self.groups,
            "group": self.group,
            "diff": self.diff,
            "trajectory": self.trajectory,
            "message": self.message,
            "tokens": self.tokens,
            "search": self.search,
        }

    def state(self, query: Query) -> Json:
        """What is here, how far it is read, and when the trajectory `id` was, if one is named."""
        complete, errors = self._all.complete, self._all.errors
        if len(errors) > _MOST_ERRORS:
            more = len(errors) - _MOST_ERRORS
            errors = [*errors[:_MOST_ERRORS], f"and {more} more, or more of one file"]
        table, opened = self._all.table(), query.get("id", "")
        return {
            "version": version("otel-rollout"),
            "sources": self._all.sources,
            "indexed": table.count(),
            "changes": table.changes() or 0,
            "open": opened,
            "changed": table.changes(opened) if opened else None,
            "complete": complete,
            "errors": errors,
            "where": self._only,
            "fields": list(COLUMNS),
            "rowsLimit": MOST_ROWS,
        }

    def trajectories(self, query: Query) -> Json:
        """A page of the list."""
        which, table = self._filter(query), self._all.table()
        offset, limit = _number(query, "offset", 0), _number(query, "limit", 100)
        sort = query.get("sort", "")
        rows = table.rows(which, sort=sort, offset=offset, limit=min(limit, MOST_ROWS))
        return {"total": table.count(which), "rows": rows}

    def summary(self, query: Query) -> Json:
        """Histograms, endings, groups, versions and findings of the list."""
        return summary_of(self._all.table(), self._filter(query))

    def curve(self, query: Query) -> Json:
        """Rates, failures and tokens of the list by policy version or task."""
        by, text = query.get("by", CURVES[0]), query.get("pass", "")
        if by not in CURVES:
            raise ConfigurationError(f"by: expected one of {', '.join(CURVES)}, got {by[:100]!r}")
        try:
            threshold = check_threshold("pass", float(text)) if text else self._threshold
        except ValueError:
            raise ConfigurationError(
                f"pass: expected a finite number, the least reward of a pass, got {text[:100]!r}"
            ) from None
        only = query["scored"] == "only" if "scored" in query else self._scored_only
        which = self._filter(query)
        return curve_of(self._all.table(), which, by, threshold, scored_only=only)

    def groups(self, query: Query) -> Json:
        """A page of the groups in the list."""
        offset, limit = _number(query, "offset", 0), _number(query, "limit", 100)
        table = self._all.table()
        return groups_of(table, self._filter(query), offset, min(limit, MOST_ROWS))

    def group(self, query: Query) -> Json:
        """The members of a group by their sample index, and where the first two differ first."""
        id_, table = _needed(query, "id"), self._all.table()
        members = table.rows(Filter('"group_id" = ?', (id_,)), sort="sample_index", limit=MOST_ROWS)
        if not members:
            raise LookupError(f"no group {id_[:100]!r}")
        first = None
        if len(members) > 1:
            a, b = members[0]["id"], members[1]["id"]
            place = first_difference(self._open(a)[0], self._open(b)[0])
            first = {"a": a, "b": b, "place": place}
        task, question = table.task_of(id_)
        return {"id": id_, "task": task, "question": question, "members": members, "first": first}

    def diff(self, query: Query) -> Json:
        """Two trajectories side by side from the message, and the token, on that differs."""
        a, b = (self._all.table().find(_needed(query, name)) for name in ("a", "b"))
        found = difference_of(*self._open(a), *self._open(b))
        return {"a": self._overview(a), "b": self._overview(b), **found}

    def trajectory(self, query: Query) -> Json:
        """One trajectory, whole but for long texts."""
        table = self._all.table()
        id_ = table.find(_needed(query, "id"))
        detail = self._open(id_)[0].detail()
        overview = self._overview(id_)
        parent_id, trace_id = overview["parent_id"], overview["trace_id"]
        detail["overview"] = overview
        if self._vocabulary is None:
            detail["tokenizer"] = next(iter(overview["models"]), "NAME")
        detail["changed"] = table.changes(id_)
        for row in detail["rows"]:
            row["advantage"] = overview["advantage"]
        if parent_id is not None:
            detail["parent"] = table.overview(parent_id)
        inside = Filter('"parent_id" = ?', (id_,))
        detail["children"] = table.rows(inside, sort="start_time_ns", limit=_MOST_CHILDREN)
        if self._jaeger and trace_id:
            detail["trace"] = f"{self._jaeger}/trace/{trace_id}"
        return detail

    def message(self, query: Query) -> Json:
        """One message in full."""
        opened, _ = self._asked(query)
        return opened.message(_number(query, "node", -1))

    def tokens(self, query: Query) -> Json:
        """A window of the tokens of a row."""
        _, tokens = self._asked(query)
        count = min(_number(query, "count", MOST_TOKENS), MOST_TOKENS)
        return tokens.window(_number(query, "row", 0), _number(query, "start", 0), count)

    def window(self, id_: str, row: int, start: int, count: int) -> Json:
        """A window of any size."""
        return self._open(id_)[1].window(row, start, count)

    def search(self, query: Query) -> Json:
        """The messages of one trajectory that contain a text."""
        opened, _ = self._asked(query)
        text = query.get("text", "")
        return {"nodes": opened.search(text) if text.strip() else []}

    def _filter(self, query: Query) -> Filter:
        where = query.get("where", "")
        both = [each for each in (self._only, where.strip()) if each]
        for each in both:
            Filter.of(each)  # each is one alone, before they are joined
        joined = " and ".join(f"({each})" for each in both) if len(both) > 1 else "".join(both)
        return Filter.of(joined, query.get("search", ""))

    def _overview(self, id_: str) -> dict[str, Json]:
        found = self._all.table().overview(id_)
        if found is None:
            raise LookupError(f"no trajectory {id_[:100]!r}")
        return found

    def _asked(self, query: Query) -> tuple[Opened, Tokens]:
        return self._open(self._all.table().find(_needed(query, "id")))

    def _open(self, id_: str) -> tuple[Opened, Tokens]:
        """A trajectory; those that were asked for last are at hand."""
        place = self._all.table().place(id_)
        with self._lock:
            kept = self._kept.pop(id_, None)
            if kept is None or kept[0] != place:
                opened = self._all.load(id_)
                kept = place, opened, Tokens(opened.trajectory, opened.shown_rows, self._vocabulary)
            self._kept[id_] = kept
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return kept[1], kept[2]


def _needed(query: Query, name: str) -> str:
    value = query.get(name, "")
    if not value:
        raise ConfigurationError(f"expected {name}=, an id, in the address")
    return value


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ConfigurationError(f"{name}: expected a number from 0 on, got {text[:100]!r}")
    return int(text)
