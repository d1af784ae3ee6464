"""Rollouts and groups whose spans are coming: which are whole, and which are out of time.

    rollouts = OpenRollouts(rollout_seconds=600, group_seconds=3600)
    rollouts.add(record, place, now)  # for each span; it can be read again at `place`
    for unit in (*rollouts.whole(), *rollouts.due(now)):
        ...  # read `unit.places`, hand over the trajectories of `unit.heads`
        free = rollouts.done(unit)  # places that nothing needs any more

It does no I/O and has no clock: `now` is in seconds of any clock that does not go back. Places are
the caller's: a record of a journal, an offset; they need only be hashable. One place may have spans
of several rollouts. What is in `held` is still needed: after a restart the spans there are added
again, and all times begin anew.

A rollout without a group inside a member of one is handed over with that group, and is no sample of
it; alone where that was handed over before, or nothing of it has come when the rollout is out of
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, Literal

from otel_rollout import semconv as sc
from otel_rollout.evidence.rollout import Came, Evidence, Head, Late, Samples, rollout_of, unit_of
from otel_rollout.evidence.units import Members, OpenRollout, Place, Unit
from otel_rollout.spans import SpanRecord
from otel_rollout.trajectory import sentences

Verdict = Literal["new", "copy", "damaged", "differs", "late", "other"]
"""As `Came`; or of a rollout that is handed over; or of no rollout."""


class OpenRollouts(Generic[Place]):
    """The rollouts that are not handed over yet. Memory: some hundred bytes for each span.

    rollout_seconds: how long after its last span a rollout that is not whole is handed over.
    group_seconds: how long after the last span of any of its rollouts a group is. None: groups come
        together elsewhere, and each rollout is a unit of its own.
    rollout_is_done, group_is_done: True for an id of what was handed over before; they are asked
        about ids that are not open.
    """

    def __init__(
        self,
        *,
        rollout_seconds: float,
        group_seconds: float | None,
        rollout_is_done: Callable[[str], bool] = lambda _: False,
        group_is_done: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._seconds, self._group_seconds = rollout_seconds, group_seconds
        self._rollout_is_done, self._group_is_done = rollout_is_done, group_is_done
        self._open: dict[str, OpenRollout[Place]] = {}
        self._groups: dict[str, Members] = {}
        self._claimers: dict[str, set[str]] = {}
        """The open rollouts that claim calls of one, by its id."""
        self._waiting: dict[str, set[str]] = {}
        """The open workflow runs that wait for one, by its id."""
        self._inner: dict[str, set[str]] = {}
        """The open rollouts that are sent with a group, by its id."""
        self._changed: dict[str, None] = {}
        """Those that have to be judged again."""
        self._refused: float | None = None
        """When `refuse` was called last. None: spans are taken."""
        self._has_moved = False
        """True if something was handed over since then, or came all the same."""
        self.held: dict[Place, int] = {}
        """The places that are needed, each with the number of rollouts that need it."""

    def __len__(self) -> int:
        """Number of rollouts that are open."""
        return len(self._open)

    def spans_of(self, rollout_id: str) -> int:
        """Number of spans that came of a rollout which is open."""
        found = self._open.get(rollout_id)
        return len(found.evidence) if found else 0

    def is_open(self, rollout_id: str) -> bool:
        """True if spans of this rollout came, and it is not handed over."""
        return rollout_id in self._open

    def span_ids(self, rollout_id: str) -> Iterable[str]:
        """The ids of the spans that came of a rollout which is open."""
        return self._open[rollout_id].evidence.span_ids

    def add(self, record: SpanRecord, place: Place, now: float) -> Verdict:
        """Take in a span, as `as_record` gives it, that can be read again at this place.

        Only of "new" and "differs" the place is held.
        """
        rollout_id = rollout_of(record)
        if rollout_id is None:
            return "other"
        found = self._open.get(rollout_id)
        is_start = record.kind == "start"  # nothing that others do not have
        if found is None:
            if self._rollout_is_done(rollout_id):
                return "copy" if is_start else "late"
            found = self._open[rollout_id] = OpenRollout(Evidence(rollout_id), now)
        elif found.is_handed:
            return "copy" if is_start or found.evidence.has_span(record) else "late"
        came: Came = found.evidence.add(record)
        if came in ("copy", "damaged"):
            return came
        if place not in found.places:
            found.places[place] = None
            self.held[place] = self.held.get(place, 0) + 1
        if found.is_taken and not is_start:
            found.since.append(Late.of(rollout_id, record))
        found.last, self._has_moved = now, True
        if self._group_seconds is not None:
            self._place(rollout_id, found, record)
        self._change(rollout_id, found)
        return came

    def _place(self, rollout_id: str, found: OpenRollout[Place], record: SpanRecord) -> None:
        """Add a rollout to its group, or to those inside the members of one."""
        group, outer = record.group or None, record.text(sc.ROLLOUT_OUTER_GROUP_ID) or None
        outer = None if outer == group else outer  # it is sent with its own
        if record.kind == "reward":  # it may name the group that the rollout is sent with
            group, outer = None, outer or group
        if found.outer is None and outer is not None:
            found.outer = outer
            self._inner.setdefault(outer, set()).add(rollout_id)
        found.group = group if found.group is None else found.group
        if found.group is not None:
            self._members(found.group, found.last).ids.setdefault(rollout_id)
        elif (members := self._groups.get(found.outer or "")) is not None:
            members.last = found.last

    def _members(self, group: str, now: float) -> Members:
        members = self._groups.get(group)
        if members is None:
            members = Members(now, is_handed=self._group_is_done(group))
            self._groups[group] = members
        members.last = now
        return members

    def _change(self, rollout_id: str, found: OpenRollout[Place]) -> None:
        """Have it judged again, and those whose judgement depends on it."""
        if (around := found.evidence.around) is not None:
            self._claimers.setdefault(around, set()).add(rollout_id)
        for inside in found.evidence.inside:
            self._waiting.setdefault(inside, set()).add(rollout_id)
        others = (*self._claimers.get(rollout_id, ()), *self._waiting.get(rollout_id, ()))
        for changed in (rollout_id, *others):
            if (other := self._open.get(changed)) is not None:
                other.head = None
                if other.evidence.has_ended:
                    self._changed[changed] = None

    def movable(self) -> set[Place]:
        """The places that are held, and are not read by now."""
        taken = [rollout_id for rollout_id, found in self._open.items() if found.is_taken]
        read = {other for rollout_id in taken for other in self._family(rollout_id)}
        return self.held.keys() - {place for one in read for place in self._open[one].places}

    def move(self, moved: Mapping[Place, Place]) -> None:
        """What was at some of the places of `movable` is at others now."""
        for found in self._open.values():
            if not moved.keys().isdisjoint(found.places):
                found.places = {moved.get(place, place): None for place in found.places}
        for old, new in moved.items():
            self.held[new] = self.held.pop(old)

    def is_waiting(self, unit: str) -> bool:
        """True if spans came of a group, or a rollout, that is neither handed over nor being so."""
        members, found = self._groups.get(unit), self._open.get(unit)
        if members is not None:
            return not (members.is_taken or members.is_handed)
        return unit in self._inner or (found is not None and found.is_waiting)

    def needs(self, unit: str, record: SpanRecord) -> bool:
        """True if a span is of this group or rollout, or that is not whole without it."""
        id_ = rollout_of(record) or ""
        others = (*self._claimers.get(id_, ()), *self._waiting.get(id_, ()))
        return unit in (unit_of(record), *others)

    def refuse(self, now: float) -> None:
        """Spans are refused, since there is no room; to be called again while there is none.

        Time in which something is handed over, or taken, does not count: what is missing of a
        rollout may be what is refused.
        """
        self._leave_out(now)
        self._refused, self._has_moved = now, False

    def take_again(self, now: float) -> None:
        """Spans are not refused any more."""
        self._leave_out(now)
        self._refused = None

    def _leave_out(self, now: float) -> None:
        """Do not count the time since spans were refused."""
        if self._refused is not None and self._may_make_room:
            seconds = now - self._refused
            for found in self._open.values():
                found.last += seconds
            for members in self._groups.values():
                members.last += seconds

    @property
    def _may_make_room(self) -> bool:
        return self._has_moved or any(found.is_taken for found in self._open.values())

    # --- what is ready

    @property
    def has_changed(self) -> bool:
        """True if `whole` may give something that it did not."""
        return bool(self._changed)

    def whole(self, most: int | None = None) -> list[Unit[Place]]:
        """The units that have become whole, each once; each is to be `done`, or `failed`.

        most: units at most; the others are given by the next call.
        """
        units = list[Unit[Place]]()
        while self._changed and (most is None or len(units) < most):
            rollout_id = next(iter(self._changed))
            del self._changed[rollout_id]
            found = self._open.get(rollout_id)
            if found is None or not found.is_waiting:
                continue
            if self._head(found).is_whole:
                units += self._whole_with(rollout_id, found)
        return units

    def due(self, now: float, most: int | None = None) -> list[Unit[Place]]:
        """The units that are out of time, at most so many; each is to be `done`, or `failed`.

        Looks at all that is open: to be called now and then.
        """
        found = self._due(now)
        return list(found if most is None else islice(found, most))

    def _due(self, now: float) -> Iterator[Unit[Place]]:
        if self._refused is not None and self._may_make_room:
            return
        for rollout_id, found in list(self._open.items()):
            if found.group is None and found.is_waiting and self._is_out_of_time(found, now):
                members = self._groups.get(found.outer or "")
                if members is None or members.is_handed or self._top(rollout_id) not in members.ids:
                    yield self._take([rollout_id], None)
        for group, members in list(self._groups.items()):
            if members.is_taken:
                continue
            if ready := self._due_of(group, members, now):
                yield self._take(ready, group)

    def _due_of(self, group: str, members: Members, now: float) -> list[str]:
        """The rollouts of a group that are to be handed over; [] if it is not due."""
        ids = [i for i in members.ids if self._open[i].is_waiting]
        settled = [i for i in ids if self._is_settled(self._open[i], now)]
        if members.is_handed:
            return settled
        every = [*ids, *self._inside(group, ids)]
        if self._group_seconds is not None and now - members.last >= self._group_seconds:
            return every
        if not self._are_all(settled):
            return []
        settled += self._inside(group, settled)
        is_settled = all(self._is_settled(self._open[i], now) for i in settled)
        # Were all of them whole, `whole` would have found them.
        is_short = any(not self._open[i].is_whole for i in settled)
        return every if is_settled and is_short else []

    def _is_out_of_time(self, found: OpenRollout[Place], now: float) -> bool:
        return now - found.last >= self._seconds

    def _is_settled(self, found: OpenRollout[Place], now: float) -> bool:
        return self._head(found).is_whole or self._is_out_of_time(found, now)

    def _head(self, found: OpenRollout[Place]) -> Head:
        if found.head is None:
            found.head = found.evidence.head(self._missing(found))
        return found.head

    def _missing(self, found: OpenRollout[Place]) -> tuple[str, ...]:
        evidence = found.evidence
        missing = evidence.missing(self._around(evidence))
        away = sum(not self._has_come(inside) for inside in evidence.inside)
        if away:
            missing += (sentences.EPISODE_NOT_HERE(count=away, of=len(evidence.inside)),)
        return missing

    def _around(self, evidence: Evidence) -> Evidence | None:
        around = self._open.get(evidence.around or "")
        return around.evidence if around else None

    def _has_come(self, rollout_id: str) -> bool:
        found = self._open.get(rollout_id)
        return found.evidence.has_ended if found else self._rollout_is_done(rollout_id)

    def _whole_with(self, rollout_id: str, found: OpenRollout[Place]) -> list[Unit[Place]]:
        """The unit to be handed over, now that this one is whole; [] if others are missing."""
        group = found.outer if found.group is None else found.group
        members = None if group is None else self._groups.get(group)
        if members is None and group is not None and not self._group_is_done(group):
            return []  # its members are on their way
        if group is None or members is None or members.is_handed:
            return [self._take([rollout_id], found.group)]
        whole = [i for i in members.ids if self._open[i].is_whole]
        if members.is_taken or not self._are_all(whole):
            return []
        inside = self._inside(group, whole)
        are_whole = all(self._head(self._open[i]).is_whole for i in inside)
        return [self._take([*whole, *inside], group)] if are_whole else []

    def _inside(self, group: str, ids: Collection[str]) -> list[str]:
        """The open rollouts without a group of their own inside these members of a group."""
        inner = sorted(self._inner.get(group, ()))
        return [i for i in inner if self._open[i].is_waiting and self._top(i) in ids]

    def _top(self, rollout_id: str) -> str | None:
        """The member of a group that a rollout is inside; None: it is one, or that is not known."""
        seen, top = set[str](), rollout_id
        while top not in seen and (found := self._open.get(top)) is not None:
            if found.group is not None:
                return top if seen else None
            seen.add(top)
            top = self._head(found).parent or ""
        return None

    def _are_all(self, ids: Iterable[str]) -> bool:
        """True if these are as many samples as their group is to have; False if nobody knows."""
        found = self._samples(ids)
        return found.size is not None and not found.short_by

    def _samples(self, ids: Iterable[str], size: int | None = None) -> Samples:
        return Samples.of([self._head(self._open[i]) for i in ids], size)

    # --- handing over

    def _take(self, ids: list[str], group: str | None) -> Unit[Place]:
        members = self._groups.get(group) if group is not None else None
        read = dict.fromkeys(other for one in ids for other in self._family(one))
        places: dict[Place, None] = {}
        for other in read:
            places |= self._open[other].places
        heads = tuple(self._head(self._open[i]) for i in ids)
        samples = [i for i in ids if self._open[i].group == group]
        size = self._samples(samples).size
        whole = self._samples((i for i in samples if self._open[i].is_whole), size).there
        is_extra = members is not None and members.is_handed
        for rollout_id in ids:
            self._open[rollout_id].is_taken = True
        if members is not None:
            members.is_taken = not is_extra
        return Unit(group, heads, tuple(places), frozenset(read), size, whole, is_extra)

    def _family(self, rollout_id: str) -> list[str]:
        """The open rollouts that are read together with this one, and itself."""
        found, waiting = dict[str, None](), [rollout_id]
        while waiting:
            if (one := waiting.pop()) in found or one not in self._open:
                continue
            found[one] = None
            evidence = self._open[one].evidence
            waiting += [
                *self._claimers.get(one, ()),
                *([evidence.around] if evidence.around else ()),
            ]
        return [*found]

    def rewards_of(self, rollout_id: str) -> list[Late]:
        """The rewards on spans of their own that came of a rollout which is open."""
        return self._open[rollout_id].evidence.rewards

    def came_since(self, unit: Unit[Place]) -> list[Late]:
        """What came of these rollouts while they were handed over."""
        return [late for head in unit.heads for late in self._open[head.rollout].since]

    def done(self, unit: Unit[Place]) -> list[Place]:
        """The unit is handed over; the places that nothing needs any more."""
        self._has_moved = True
        for head in unit.heads:
            found = self._open[head.rollout]
            found.is_taken, found.is_handed = False, True
        if unit.group is not None:
            members = self._groups[unit.group]
            members.is_taken, members.is_handed = False, True
            # Some may have become whole meanwhile, or are left.
            others = (*members.ids, *self._inner.get(unit.group, ()))
            self._changed |= dict.fromkeys(i for i in others if not self._open[i].is_handed)
        free = list[Place]()
        for head in unit.heads:
            family = self._family(head.rollout)
            if all(self._open[one].is_handed for one in family):
                for one in family:
                    free += self._drop(one)
        return free

    def failed(self, unit: Unit[Place]) -> None:
        """The unit could not be handed over: it comes again, by `whole` or by `due`."""
        for head in unit.heads:
            found = self._open[head.rollout]
            found.is_taken = False
            found.since.clear()
            self._changed[head.rollout] = None
        if unit.group is not None:
            self._groups[unit.group].is_taken = False

    def _drop(self, rollout_id: str) -> Iterator[Place]:
        found = self._open.pop(rollout_id)
        evidence = found.evidence
        self._forget(self._claimers, [evidence.around] if evidence.around else [], rollout_id)
        self._forget(self._waiting, evidence.inside, rollout_id)
        self._forget(self._inner, [found.outer] if found.outer else [], rollout_id)
        if found.group is not None:
            members = self._groups[found.group]
            members.ids.pop(rollout_id, None)
            if not members.ids:
                del self._groups[found.group]
        for place in found.places:
            self.held[place] -= 1
            if not self.held[place]:
                del self.held[place]
                yield place

    @staticmethod
    def _forget(index: dict[str, set[str]], keys: Iterable[str], rollout_id: str) -> None:
        for key in keys:
            others = index.get(key, set())
            others.discard(rollout_id)
            if not others:
                index.pop(key, None)
