"""Rules by which one completion continues another, and the history that ends in a completion.

`conversations.py` applies them to all completions of a trajectory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.history import History, HistoryItem
from otel_rollout.trajectory.steps import CallKey, call_key
from otel_rollout.wire import (
    Json,
    MessagePath,
    author_of,
    copy_json,
    extend,
    is_of_model,
    is_reasoning,
    joined_pieces,
    path_messages,
    reasoning_of,
    shown_message,
    texts_of,
)

Appended = Mapping[tuple[str, int], Sequence[Json]]
"""Messages that the agent appended after a completion, by its id and choice index."""


def in_order(completions: Iterable[Completion]) -> list[Completion]:
    """The completions by the start of their calls.

    The logical clock orders the calls of one process, wall clocks those of several.
    """
    completions = list(completions)
    if len(completions) < 2:
        return completions
    if len({completion.exchange.process for completion in completions}) == 1:
        return sorted(completions, key=lambda c: (c.exchange.started, *_tie(c)))
    return sorted(completions, key=_tie)


def _tie(completion: Completion) -> tuple[int, int, str, int]:
    exchange = completion.exchange
    return exchange.start_time_ns, exchange.started, exchange.span_id, completion.choice_index


def listed(completions: list[Completion]) -> str:
    names = [f"{c.id!r} (choice {c.choice_index})" for c in in_order(completions)]
    more = [f"{len(names) - 10} more"] if len(names) > 10 else []
    return ", ".join(names[:10] + more)


def names_previous(completion: Completion) -> str | None:
    """Id of the reply or conversation that the request continues; None if it names none."""
    api, params = completion.api, completion.exchange.params
    name = api.previous_reply(params) or api.conversation_id(params)
    return name if isinstance(name, str) else None


def previous_reply(completion: Completion) -> Json:
    """Id of the reply that the request continues; None or empty if it names none."""
    return completion.api.previous_reply(completion.exchange.params)


def previous_named(
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


def sampled_order(completion: Completion) -> tuple[int, int, int, str, int]:
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


def choose(candidates: list[Completion], end: MessagePath) -> tuple[Completion, list[Completion]]:
    """The candidate that was continued, and all candidates that are equal to it.

    A request that refers to an item by its id has the very item of one of them.
    """
    if len(candidates) == 1:
        return candidates[0], candidates
    replayed = {c: [node.message for node in _replayed(c, end)] for c in candidates}
    equal = [c for c in candidates if reasoning_in(c.items) == reasoning_in(replayed[c])]
    equal = equal or candidates
    own = {c: set(map(id, c.items)) for c in equal}
    equal = [c for c in equal if not own[c].isdisjoint(map(id, replayed[c]))] or equal
    return max(equal, key=sampled_order), equal


def goes_on_from(completion: Completion, end: MessagePath) -> bool:
    """True if the path to `end` has the completion's prompt as a prefix, not only its messages.

    Contents of the model that were sent as one message have the key of both, and not of the first.
    """
    start = path_key(completion.prompt)
    return not start or any(node.key == start for node in end)


def path_key(path: MessagePath | None) -> bytes:
    return path.key if path else b""


def _replayed(completion: Completion, end: MessagePath | None) -> list[MessagePath]:
    """The nodes that replay the completion's items, on a path that ends with `end`."""
    start = path_key(completion.prompt)
    found: list[MessagePath] = []
    while end is not None and (end.key != start or is_reasoning(end.message)):
        found.append(end)
        end = end.parent
    return found[::-1]


def reasoning_in(messages: Iterable[Json]) -> list[Json]:
    found = map(reasoning_of, joined_pieces(messages))
    return [reasoning for reasoning in found if reasoning is not None]


def _is_break(completion: Completion, replayed: list[Json], follower: Completion) -> bool:
    """True if the follower did not see the tokens that were sampled, or may not have."""
    if list(completion.items) == replayed:
        return False
    recorded = reasoning_in(completion.items)
    if recorded and recorded != reasoning_in(replayed):
        return True
    if _names(completion.items) == _names(replayed):
        return False
    return not _extends(follower, completion)


def _names(messages: Iterable[Json]) -> list[Json]:
    return list(filter(None, map(author_of, messages)))


def _extends(follower: Completion, completion: Completion) -> bool:
    """True if a call was asked with all the token ids of an earlier one; not where ids lack."""
    prompt, ids = completion.prompt_token_ids, completion.token_ids
    asked = follower.prompt_token_ids
    if prompt is None or ids is None or asked is None:
        return False
    return asked[: len(prompt) + len(ids)] == [*prompt, *ids]


def history_of(
    completion: Completion,
    parents: Mapping[Completion, Completion],
    appended: Appended,
    owned: set[Completion] | None = None,
) -> History:
    """The conversation that ends in `completion`, and the messages appended after it.

    `owned`: completions that train in another history; those of this history are added to it.
    """
    messages: list[Json] = []
    sampled: dict[int, Completion] = {}
    breaks: set[Completion | None] = set()
    for segment in _segments(completion, parents):
        start, last = len(messages), segment[0]
        messages += [*path_messages(last.prompt), *last.items]
        sampled |= dict.fromkeys(range(len(messages) - len(last.items), len(messages)), last)
        # Reasoning items have the key of the node before them, which replaces them here.
        ends = {node.key: node for node in last.prompt or ()}
        for follower, member in pairwise(segment):
            replayed = _replayed(member, ends.get(path_key(member.path)))
            sampled |= {start + node.length - 1: member for node in replayed}
            if _is_break(member, [node.message for node in replayed], follower):
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
    return History(items, copy_json(_tools(completion, parents)))


def _segments(
    completion: Completion, parents: Mapping[Completion, Completion]
) -> list[list[Completion]]:
    """The completions that one continues, in segments, the first last; each is from its end on.

    A request that names the response it continues carries only what is new: a new segment.
    """
    segments = [[completion]]
    while (ancestor := parents.get(segments[-1][-1])) is not None:
        if names_previous(segments[-1][-1]):
            segments.append([ancestor])
        else:
            segments[-1].append(ancestor)
    return segments[::-1]


def _tools(completion: Completion, parents: Mapping[Completion, Completion]) -> list[Json] | None:
    """The tools of a call, or of the replies that it names, where the server keeps them."""
    while completion.tools is None and completion.api.keeps_tools and completion in parents:
        if not previous_reply(completion):
            break
        completion = parents[completion]
    return completion.tools


def main_end(
    ends: Sequence[Completion],
    parents: Mapping[Completion, Completion],
    appended: Appended,
    named: CallKey | None,
    said: Json,
) -> Completion | None:
    """The end of the main conversation, that of the agent itself. None: there is no conversation.

    It is the one with the call that was named; else the only one whose last reply is `said`, the
    text that the rollout returned; else the one with the last call that trains, side calls aside:
    of several such calls that overlap in time the longest conversation, then the latest.

    ends: the completion that each conversation ends with.
    """
    own = _chosen(ends, parents, named, said)
    if len(own) < 2:
        return own[0] if own else None
    last = {end: next((c for c in _back(end, parents) if c.trainable), None) for end in own}
    calls = {end: call for end, call in last.items() if call is not None} or {
        end: end for end in own
    }
    latest = in_order(calls.values())[-1]
    alike = [e for e, c in calls.items() if c is latest or not ended_before(c, latest)]
    return max(alike, key=lambda end: (_size(end, parents, appended), sampled_order(calls[end])))


def _chosen(
    ends: Sequence[Completion],
    parents: Mapping[Completion, Completion],
    named: CallKey | None,
    said: Json,
) -> Sequence[Completion]:
    """Those that were named, or end with what was returned; else all, without side calls."""
    if named is not None:
        own = [end for end in ends if any(call_key(c) == named for c in _back(end, parents))]
        return own or ends
    own = [end for end in ends if end.side_call is None]
    text = said.strip() if isinstance(said, str) else ""
    same = [end for end in own if text and _text(end) == text]
    return (same if len(same) == 1 else own) or ends


def _size(end: Completion, parents: Mapping[Completion, Completion], appended: Appended) -> int:
    """Messages of the conversation that ends there."""
    paths = [segment[0].path for segment in _segments(end, parents)]
    more = appended.get((end.id, end.choice_index), ())
    return sum(path.length for path in paths if path) + len(more)


def _back(
    completion: Completion | None, parents: Mapping[Completion, Completion]
) -> Iterator[Completion]:
    """The completion, and those that it continues, the last one first."""
    while completion is not None:
        yield completion
        completion = parents.get(completion)


def _text(completion: Completion) -> str:
    return "".join(text for item in completion.items for text in texts_of(item)).strip()


def includes(follower: Completion, path: MessagePath | None, rest: Sequence[Json]) -> bool:
    for message in rest:
        path = extend(path, message)
    return path is not None and any(node.key == path.key for node in follower.prompt or ())


# --- replies that a client sends back in other words: a tool call as text, a text left out


def rewritten(completions: Sequence[Completion]) -> set[Completion]:
    """The completions in whose place a later request has another message of the model.

    Each trains where it was said, and what was sent back is context, so every turn is a history of
    its own: the record is right all the same, the trajectory has one warning about it.

    completions: those with sampled items, in order. A request is later if it began after the
    reply had ended. It has to continue the same prompt, with the same tools: a fork, or a summary
    in the place of the prompt, does not count. Nor does a request that has another sample of that
    prompt in the place, or only what is new of its conversation.
    """
    whole = [completion for completion in completions if names_previous(completion) is None]
    replies: dict[tuple[bytes, bytes], list[Completion]] = defaultdict(list)
    for completion in whole:
        if completion.status == "complete" and (key := path_key(completion.prompt)):
            replies[completion.context_key, key].append(completion)
    found: set[Completion] = set()
    seen: set[tuple[bytes, int]] = set()
    for request in whole:
        context = request.context_key
        for node in request.prompt or ():
            if (context, id(node)) in seen:
                break
            seen.add((context, id(node)))
            before = replies.get((context, path_key(node.parent)), ())
            if before and is_of_model(node.message) and node.key not in map(_beginning, before):
                found.update(reply for reply in before if ended_before(reply, request))
    return found


def quoted(completions: Sequence[Completion]) -> set[Completion]:
    """The completions whose longest line is in a message of the next request of their agent.

    ReAct agents write their past into the prompt so. An agent is known by its first message and its
    tools; its next request is the one that began after this one. A line that the completion's own
    prompt has, as a marker of a template, is no quotation.
    """
    agents: dict[tuple[bytes, bytes], list[Completion]] = defaultdict(list)
    for completion in in_order(completions):
        if completion.prompt is not None:
            *_, first = completion.prompt
            agents[completion.context_key, first.key].append(completion)
    found: set[Completion] = set()
    for calls in agents.values():
        for reply, request in pairwise(calls):
            line = _own_line(reply)
            if len(line) >= _LINE and ended_before(reply, request):
                known = {node.key for node in reply.prompt or ()}
                new = (node.message for node in request.prompt or () if node.key not in known)
                if any(line in shown_message(message) for message in new):
                    found.add(reply)
    return found


def _own_line(reply: Completion) -> str:
    """The longest line of a reply that its prompt does not have; "" if there is none."""
    prompt = [shown_message(node.message) for node in reply.prompt or ()]
    lines = map(str.strip, "\n".join(map(shown_message, reply.items)).splitlines())
    own = (line for line in lines if not any(line in message for message in prompt))
    return max(own, key=len, default="")


_LINE = 12
"""Characters of a line that is not found in other messages by chance."""


def _beginning(completion: Completion) -> bytes:
    """Key of the conversation with the first message that was sampled, reasoning aside."""
    node, key = completion.path, b""
    prompt = completion.prompt.length if completion.prompt else 0
    while node is not None and node.length > prompt:
        key = node.key if is_of_model(node.message) else key
        node = node.parent
    return key
