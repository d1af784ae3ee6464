"""A trajectory as text for people: its messages, which of them train, and how it ended."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from otel_rollout.terminal import escaped, number_of, shortened
from otel_rollout.trajectory import Completion, History, HistoryItem, TokenSequences, Trajectory
from otel_rollout.view.curves import short_id
from otel_rollout.view.findings import Finding, findings_of
from otel_rollout.view.messages import message_row, name_of_tool
from otel_rollout.view.overview import tokens_in
from otel_rollout.wire import Json, shown_message

T = TypeVar("T")
_MESSAGES = (4, 6)
"""Messages of a history that are shown from its beginning and from its end."""
_LOGS = (5, 15)
"""The same of lines that were logged."""
_ERROR = 5
"""Lines of an error."""
_SHORTEST = 20
_LONGEST_NOTE = 200
"""Characters of ids and notes at the end of a line that is truncated."""


def format_trajectory(trajectory: Trajectory, *, width: int | None = 80) -> str:
    """The trajectory as a tree of its histories; a prefix that several share is shown once.

    `●` is a completion that trains here, `○` one that does not (it trains in another history, or
    is not whole). Lines are truncated to `width` characters, and of a long history, and of many
    logs, the first and the last are shown; None: no limit, all of them, and line breaks are kept.
    Control characters are shown as escapes.
    """
    return "\n".join(trajectory_lines(trajectory, width=width))


def trajectory_lines(trajectory: Trajectory, *, width: int | None = 80) -> Iterator[str]:
    """The lines of `format_trajectory`, one at a time; without a width one may have line breaks."""
    yield _line("", f"{trajectory.name or 'rollout'}  {trajectory.id}", width)
    about = (
        ("task", short_id(trajectory.task_id)),
        ("group", short_id(trajectory.group_key)),
        ("inside", trajectory.parent_id),
        ("sample", trajectory.sample_index),
        ("of", trajectory.group_size),
        ("versions", ", ".join(map(str, trajectory.policy_versions)) or None),
    )
    ids = "".join(f"  {name} {value}" for name, value in about if value is not None)
    yield _line("├─ ", trajectory.status, width, ids)
    yield from _error_lines(trajectory, width)
    rows = trajectory.token_sequences()
    histories = _HistoryLines(width, rows)
    for history in trajectory.each_history():
        yield from histories.lines(history)
    yield from _failed_call_lines(trajectory, width)
    yield from _reward_lines(trajectory, width)
    for metric, value in trajectory.metrics.items():
        yield _line("├─ ", f"{metric}: {value}", width)
    before, fold, after = _folded(trajectory.logs, "line", width, _LOGS)
    logged = partial(_line, "├─ log: ", width=width)
    yield from chain(map(logged, before), fold, map(logged, after))
    yield from _finding_lines(trajectory, rows, width)
    yield _line("└─ ", _last_line(trajectory, rows, histories.trained), width)


def _error_lines(trajectory: Trajectory, width: int | None) -> Iterator[str]:
    """The error in as many lines as it needs, up to a few, each of the width."""
    if not trajectory.error:
        return
    text = f"{trajectory.error.get('type')}: {trajectory.error.get('message')}"
    if width is None:
        yield _line("├─ error: ", text, None)
        return
    room = max(width - len("├─ error: "), 2 * _SHORTEST)
    first, *more = textwrap.wrap(text, room, max_lines=_ERROR, placeholder="…") or [""]
    yield _line("├─ error: ", first, None)
    yield from (_line("│         ", each, None) for each in more)


def _failed_call_lines(trajectory: Trajectory, width: int | None) -> Iterator[str]:
    for completion in trajectory.completions:
        if not completion.items:
            error = completion.error or {}
            text = f"{completion.status}: {error.get('type', '')} {error.get('message', '')}"
            yield _line(f"├─ call {_short(completion.id, width)}  ", text, width)


def _reward_lines(trajectory: Trajectory, width: int | None) -> Iterator[str]:
    rewards = list(trajectory.all_rewards.values())
    for reward in rewards:
        about = f" of {_short(reward.completion_id, width)}" if reward.completion_id else ""
        why = f"  ({reward.explanation})" if reward.explanation else ""
        weight = "" if reward.weight is None or reward.name is None else f" x {reward.weight:g}"
        name = " ".join(filter(None, ("reward", reward.name)))
        yield _line("├─ ", f"{name}{about}: {float(reward):g}{weight}{why}", width)
    total, own = trajectory.reward, [each for each in rewards if not each.completion_id]
    if total is not None and own and all(each.name for each in own):
        yield _line("├─ ", f"reward in all: {float(total):g}", width)


_random = re.compile("([0-9a-f]{8})(?:[0-9a-f]{8,}|(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


def _short(id_: str, width: int | None) -> str:
    """An id of a server, which text goes before: the beginning of what was made at random."""
    return id_ if width is None else shortened(_random.sub(r"\1", id_), max(12, width // 5))


def _last_line(
    trajectory: Trajectory, rows: TokenSequences, trained: Collection[Completion]
) -> str:
    """How many completions train, and with how many tokens."""
    numbers = zip(reversed(tokens_in(trajectory)), ("sampled", "prompt"), strict=True)
    counts = (f", {count} {name} tokens" for count, name in numbers if count)
    alone = sum(drop.completion in trained for drop in rows.dropped)
    aside = sum(completion.side_call is not None for completion in trajectory.completions)
    alone_too = f" ({alone} as messages alone)" if alone else ""
    aside_too = f", {number_of(aside, 'side call')}" if aside else ""
    return (
        f"{len(trained)} of {len(trajectory.completions)} completions train"
        f"{alone_too}{aside_too}{''.join(counts)}{_seconds(trajectory)}"
    )


def _seconds(trajectory: Trajectory) -> str:
    start, end = trajectory.start_time_ns, trajectory.end_time_ns
    return f", {(end - start) / 1e9:.1f} s" if start and end is not None else ""


def _finding_lines(
    trajectory: Trajectory, rows: TokenSequences, width: int | None
) -> Iterator[str]:
    """What is wrong with it, with what to do; equal findings of several completions once."""
    found: dict[tuple[str, str], list[Finding]] = {}
    warnings = trajectory.warnings
    for one in findings_of(trajectory, rows=rows):
        # Each warning is a line of its own, with the ids that it has.
        found.setdefault((one.kind, one.text if one.text in warnings else one.plain), []).append(
            one
        )
    for (kind, _), several in found.items():
        first, many = several[0], len(several) > 1
        text = f"{len(several)} completions: {first.plain}" if many else first.text
        yield _line("├─ warning: " if first.text in warnings else f"├─ {kind}: ", text, width)
        yield from _advice_lines(first.advice, width)


def _advice_lines(advice: str, width: int | None) -> list[str]:
    if width is None:
        return [_line("│      → ", advice, width)]
    room = max(width - len("│      → "), 2 * _SHORTEST)
    first, *others = textwrap.wrap(advice, room)
    return [_line("│      → ", first, None), *(_line("│        ", each, None) for each in others)]


def _folded(
    items: Sequence[T], what: str, width: int | None, most: tuple[int, int]
) -> tuple[Sequence[T], list[str], Sequence[T]]:
    """The first and last of `most` items, and the line, if any, in place of those between them."""
    first, last = most
    left_out = len(items) - first - last
    if width is None or left_out < 2:
        return items, [], ()
    return items[:first], [f"│      … {number_of(left_out, what)} (--full)"], items[-last:]


class _HistoryLines:
    """The histories that were shown so far: what the next one has in common is folded."""

    def __init__(self, width: int | None, rows: TokenSequences) -> None:
        self._untrained = {d.completion for d in rows.dropped if not d.lacks_only_ids}
        self.trained: dict[Completion, int] = {}
        """The history that each completion trains in."""
        self._width = width
        self._count = 0
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}
        """Number of each place in the tree of messages, and of the history that it was shown in,
        by the place before it, its message and its completion."""
        self._messages: list[Json] = []
        """The messages of these places, so that no other one gets the identity of one."""

    def lines(self, history: History) -> Iterator[str]:
        """The lines of the next history."""
        self._count += 1
        tools = ", ".join(name_of_tool(tool) for tool in history.tools or ())
        side = history.side_call
        head = f"history {self._count}" + (f"  (side call: {side})" if side else "")
        head += f"  (tools: {tools})" if tools else ""
        yield _line("├─ ", head, self._width)
        folded, first = self._known(history)
        if folded:
            many = number_of(folded, "message")
            yield _line("│      ", f"… {many} as in history {first}", self._width)
        for item in history.items[folded:]:
            if self._trains(item) and item.completion is not None:
                self.trained[item.completion] = self._count
        before, fold, after = _folded(history.items[folded:], "message", self._width, _MESSAGES)
        yield from chain(map(self._item, before), fold, map(self._item, after))

    def _item(self, item: HistoryItem) -> str:
        completion, trains = item.completion, self._trains(item)
        elsewhere = self.trained.get(completion) if completion and not trains else None
        return _item(item, trains, elsewhere, self._width)

    def _trains(self, item: HistoryItem) -> bool:
        return item.trainable and item.completion not in self._untrained

    def _known(self, history: History) -> tuple[int, int]:
        """How many messages an earlier history begins with too, and which; its places are kept."""
        place, known, first = 0, 0, 0
        for number, item in enumerate(history.items):
            key = place, id(item.message), id(item.completion)
            found = self._places.get(key)
            if found is not None and known == number:
                place, first = found
                known += 1
                continue
            self._messages.append(item.message)
            place = len(self._messages)
            self._places[key] = place, self._count
        if known == len(history.items):
            known -= 1  # at least one message of each history is shown
        return (known, first) if known > 1 else (0, 0)


def _line(before: str, text: str, width: int | None, after: str = "") -> str:
    """One line, truncated to the width; without a width further lines are indented below it.

    Every line of a server's or an agent's text is made here, and here it is escaped.
    """
    before, text, after = (escaped(part) for part in (_one_line(before), text, _one_line(after)))
    if width is None:
        below = "\n│".ljust(len(before) + 1)
        return before + below.join(text.splitlines() or [""]) + after
    before, after = shortened(before, _LONGEST_NOTE), shortened(after, _LONGEST_NOTE)
    room = max(width - len(before) - len(after), _SHORTEST)
    return before + shortened(" ".join(text[: 100 * room].split()), room) + after


def _one_line(text: str) -> str:
    return " ".join(text.split()) if "\n" in text or "\t" in text else text


def _item(item: HistoryItem, trains: bool, elsewhere: int | None, width: int | None) -> str:
    """A message. elsewhere: the other history that its completion trains in; None: none so far."""
    message = item.message
    role = message.get("role", message.get("type", "")) if isinstance(message, Mapping) else "text"
    note = ""
    if item.completion is not None:
        note = f"  [{_short(item.completion.id, width)}"
        if item.completion.choice_index:
            note += f" choice {item.completion.choice_index}"
        if item.completion.is_whole and item.completion.side_call:
            note += ", side call"
        elif not item.completion.trainable:
            note += f", {item.completion.status}"
        elif not item.trainable:
            note += f", trains in history {elsewhere}" if elsewhere else ", does not train"
        note += ", replayed without its reasoning, or renamed]" if item.is_break else "]"
    mark = " " if item.completion is None else "●" if trains else "○"
    return _line(f"│    {mark} {shortened(str(role), 40):<10} ", _text(message, width), width, note)


def _text(message: Json, width: int | None) -> str:
    """What a message says and calls; of its reasoning only the length where lines are truncated."""
    if width is None:
        return shown_message(message)
    done = shown_message(message, reasoning=False)
    thought = message_row(message).reasoning
    is_all = thought is None or done == shown_message(message)
    return done if is_all else f"(think {len(thought or '')}) {done}"
