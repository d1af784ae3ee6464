"""Histories: completions linked into conversations by what was sent.

A request continues the completion whose path (its prompt, then what it sampled) is the longest
prefix of the request's messages, normalised and with the same tools, among those that had
ended before the request began. Everything else is a fork. So completions form a forest, each leaf
is one history, and each sampled completion is trainable in exactly one of them. The result depends
on the set of completions alone, not on the order in which they are given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.history import History, HistoryItem
from otel_rollout.wire import (
    Json,
    MessagePath,
    copy_json,
    extend,
    is_reasoning,
    path_messages,
    reasoning_of,
)

Appended = Mapping[tuple[str, int], Sequence[Json]]
"""Messages that the agent appended after a completion, by its id and choice index."""


def in_order(completions: Iterable[Completion]) -> list[Completion]:
    """The completions by the start of their calls.

    The logical clock orders the calls of one process, wall clocks those of several.
    """
    completions = list(completions)
    if len({completion.exchange.process for completion in completions}) == 1:
        return sorted(completions, key=lambda c: (c.exchange.started, *_tie(c)))
    return sorted(completions, key=_tie)


def _tie(completion: Completion) -> tuple[int, int, str, int]:
    exchange = completion.exchange
    return exchange.start_time_ns, exchange.started, exchange.span_id, completion.choice_index


def link(completions: Sequence[Completion]) -> tuple[dict[Completion, Completion], list[str]]:
    """The completion that each one continues, and a warning wherever that is ambiguous."""
    by_path: dict[tuple[bytes, bytes], list[Completion]] = {}
    by_name: dict[str, list[Completion]] = {}
    for completion in completions:
        if completion.items and completion.path is not None:
            by_name.setdefault(completion.id, []).append(completion)
            previous = _names_previous(completion)
            if previous is None:
                if completion.path.key != _key(completion.prompt):
                    key = completion.context_key, completion.path.key
                    by_path.setdefault(key, []).append(completion)
            elif previous != _previous_reply(completion):
                by_name.setdefault(previous, []).append(completion)
    for named in by_name.values():
        named.sort(key=_sampled)
    # The longest sampled prefix of each node, so that a prompt is walked only once.
    nearest: dict[tuple[bytes, int], MessagePath | None] = {}

    def longest_sampled(node: MessagePath | None, context: bytes) -> MessagePath | None:
        passed: list[tuple[bytes, int]] = []
        while node is not None and (context, node.key) not in by_path:
            if (name := (context, id(node))) in nearest:
                node = nearest[name]
                break
            passed.append(name)
            node = node.parent
        nearest.update(dict.fromkeys(passed, node))
        return node

    parents: dict[Completion, Completion] = {}
    warnings: dict[str, str] = {}
    for completion in completions:
        previous = _names_previous(completion)
        if previous is not None:
            parent = _named(by_name.get(previous, ()), completion, parents)
            if parent is not None:
                parents[completion] = parent
            elif _previous_reply(completion):
                warnings[completion.id] = (
                    f"completion {completion.id!r} continues the response {previous!r}, which is "
                    f"not here: what was said before its own request is not known"
                )
            continue
        context = completion.context_key
        node = longest_sampled(completion.prompt, context)
        while node is not None:
            candidates = [
                other for other in by_path[context, node.key] if ended_before(other, completion)
            ]
            if candidates:
                parent, equal = _choose(candidates, node)
                parents[completion] = parent
                if len(equal) > 1:
                    warnings[completion.id] = (
                        f"completion {completion.id!r} continues a reply that was sampled "
                        f"identically as {_listed(equal)}; it is taken to continue {parent.id!r} "
                        f"(choice {parent.choice_index})"
                    )
                break
            node = longest_sampled(node.parent, context)
    return parents, list(warnings.values())


def _listed(completions: list[Completion]) -> str:
    names = [f"{c.id!r} (choice {c.choice_index})" for c in in_order(completions)]
    more = [f"{len(names) - 10} more"] if len(names) > 10 else []
    return ", ".join(names[:10] + more)


def _names_previous(completion: Completion) -> str | None:
    """Id of the reply or conversation that the request continues; None if it names none."""
    api, params = completion.api, completion.exchange.params
    name = api.previous_reply(params) or api.conversation_id(params)
    return name if isinstance(name, str) else None


def _previous_reply(completion: Completion) -> Json:
    """Id of the reply that the request continues; None or empty if it names none."""
    return completion.api.previous_reply(completion.exchange.params)


def _named(
    candidates: Sequence[Completion],
    completion: Completion,
    parents: Mapping[Completion, Completion],
) -> Completion | None:
    """The last of the candidates that ended before the completion began.

    The candidates are in order of their end. Of those with the same id one of the same process is
    preferred.
    """
    own = completion.exchange.process
    for position in range(bisect_left(candidates, _began(completion), key=_ended), 0, -1):
        candidate = candidates[position - 1]
        if candidate.exchange.process == own:
            return candidate
    for candidate in reversed(candidates):
        if candidate.exchange.process == own:
            continue
        # Ids that several servers gave could make a circle.
        following: Completion | None = candidate
        while following is not None and following is not completion:
            following = parents.get(following)
        if following is None:
            return candidate
    return None


def _began(completion: Completion) -> int:
    exchange = completion.exchange
    return exchange.started if exchange.process else exchange.start_time_ns


def _ended(completion: Completion) -> int:
    exchange = completion.exchange
    return exchange.ended if exchange.process else exchange.end_time_ns or 0


def _sampled(completion: Completion) -> tuple[int, int, int, str, int]:
    """Sort key by time of sampling; among choices of one response, choice 0 wins."""
    return _ended(completion), *_tie(completion)[:3], -completion.choice_index


def ended_before(first: Completion, second: Completion) -> bool:
    """True if `second` can continue `first`."""
    a, b = first.exchange, second.exchange
    if a is b:
        return False
    if a.process != b.process:
        return True  # the replayed message is evidence; the clocks of two hosts are not
    if a.process:
        return a.ended < b.started
    return a.end_time_ns is not None and a.end_time_ns <= b.start_time_ns


def _choose(candidates: list[Completion], end: MessagePath) -> tuple[Completion, list[Completion]]:
    """The candidate that was continued, and all candidates that are equal to it."""
    equal = [
        c
        for c in candidates
        if _reasoning(c.items) == _reasoning(node.message for node in _replayed(c, end))
    ]
    return max(equal or candidates, key=_sampled), equal or candidates


def _key(path: MessagePath | None) -> bytes:
    return path.key if path else b""


def _replayed(completion: Completion, end: MessagePath | None) -> list[MessagePath]:
    """The nodes that replay the completion's items, on a path that ends with `end`."""
    start = _key(completion.prompt)
    found: list[MessagePath] = []
    while end is not None and (end.key != start or is_reasoning(end.message)):
        found.append(end)
        end = end.parent
    return found[::-1]


def _reasoning(messages: Iterable[Json]) -> list[Json]:
    return [found for message in messages if (found := reasoning_of(message)) is not None]


def history_of(
    completion: Completion,
    parents: Mapping[Completion, Completion],
    appended: Appended,
    owned: set[Completion] | None = None,
) -> History:
    """The conversation that ends in `completion`, and the messages appended after it.

    `owned`: completions that train in another history; those of this history are added to it.
    """
    # A request that names the response it continues carries only what is new: a new segment.
    segments = [[completion]]
    while (ancestor := parents.get(segments[-1][-1])) is not None:
        if _names_previous(segments[-1][-1]):
            segments.append([ancestor])
        else:
            segments[-1].append(ancestor)
    messages: list[Json] = []
    sampled: dict[int, Completion] = {}
    breaks: set[Completion | None] = set()
    for segment in reversed(segments):
        start, last = len(messages), segment[0]
        messages += [*path_messages(last.prompt), *last.items]
        sampled |= dict.fromkeys(range(len(messages) - len(last.items), len(messages)), last)
        # Reasoning items have the key of the node before them, which replaces them here.
        ends = {node.key: node for node in last.prompt or ()}
        for member in segment[1:]:
            replayed = _replayed(member, ends[_key(member.path)])
            sampled |= {start + node.length - 1: member for node in replayed}
            said = _reasoning(member.items)
            if said and said != _reasoning(node.message for node in replayed):
                breaks.add(member)
    owned = set() if owned is None else owned
    items = []
    for position, message in enumerate(messages):
        found = sampled.get(position)
        items.append(
            HistoryItem(
                message,
                found,
                trainable=found is not None and found.trainable and found not in owned,
                is_break=found in breaks,
            )
        )
    owned.update(sampled.values())
    items += [
        HistoryItem(message, None, trainable=False)
        for message in appended.get((completion.id, completion.choice_index), ())
    ]
    asked = completion
    while asked.tools is None and asked.api.keeps_tools and asked in parents:
        if not _previous_reply(asked):
            break
        asked = parents[asked]
    return History(items, copy_json(asked.tools))


def build_histories(
    completions: Sequence[Completion], appended: Appended
) -> tuple[list[History], list[str]]:
    """All histories, by the start of their first completion, and warnings."""
    # A completion whose conversation is not known continues nothing, so it is in no history.
    completions = [c for c in in_order(completions) if c.items and c.exchange.prompt_is_known]
    parents, warnings = link(completions)
    children: dict[Completion | None, list[Completion]] = {}
    for completion in completions:
        children.setdefault(parents.get(completion), []).append(completion)
    owned: set[Completion] = set()
    histories: list[History] = []
    stack = children.get(None, [])[::-1]
    while stack:
        completion = stack.pop()
        followers = children.get(completion, [])
        stack += followers[::-1]
        if not followers:
            histories.append(history_of(completion, parents, appended, owned))
    # Messages that were appended where the conversation then went on differently.
    for completion in completions:
        followers = children.get(completion, [])
        rest = appended.get((completion.id, completion.choice_index), ())
        if rest and followers and not any(_includes(c, completion.path, rest) for c in followers):
            histories.append(history_of(completion, parents, appended, owned))
    return histories, warnings


def _includes(follower: Completion, path: MessagePath | None, rest: Sequence[Json]) -> bool:
    for message in rest:
        path = extend(path, message)
    return path is not None and any(node.key == path.key for node in follower.prompt or ())
