"""The completions of a trajectory as linked conversations: which one continues which.

A request continues the completion whose path (its prompt, then what was sampled) is the longest
prefix of the request's messages, in normalised form and with the same tools, among the completions
that had ended before the request began. Anything else is a fork. Completions therefore form a
forest; each leaf is one history, and each sampled completion is trainable in exactly one of them.
The result depends on the set of completions alone, not on the order in which they come.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from otel_rollout.trajectory import sentences
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.histories import (
    Appended,
    choose,
    ended_before,
    goes_on_from,
    history_of,
    in_order,
    includes,
    listed,
    main_end,
    names_previous,
    path_key,
    previous_named,
    previous_reply,
    quoted,
    rewritten,
    sampled_order,
)
from otel_rollout.trajectory.history import History
from otel_rollout.trajectory.side_calls import SideCalls
from otel_rollout.trajectory.steps import CallKey
from otel_rollout.wire import Json, JsonText, MessagePath, extend_with, reference_of

CompletionKey = tuple[str, int]
"""Response id and choice index."""


class Conversations:
    """The completions of one trajectory, linked.

    Completions may be added while the rollout runs. Each is linked once, when somebody asks: calls
    arrive as they end, so what a call continues has come before it. Where that does not hold (calls
    of several processes, a span that was slow to come) all are linked anew.
    """

    def __init__(
        self, completions: Iterable[Completion] = (), side_calls: SideCalls | None = None
    ) -> None:
        self._side_calls = side_calls
        self._lock = threading.RLock()
        self._added: list[Completion] = []
        """Those that were added since somebody asked."""
        self._known = _KnownItems()
        self._sorted: list[Completion] = []
        self._by_key: dict[CompletionKey, list[Completion]] = {}
        self._links = _Links()
        self._unlinked: list[Completion] = []
        self._process: str | None = None
        self._latest_start = -1
        self._in_sequence = True
        self._histories: tuple[Json, list[History]] | None = None
        for completion in completions:
            self.add(completion)

    def add(self, completion: Completion) -> None:
        """Take in a completion whose call has ended."""
        exchange = completion.exchange
        with self._lock:
            if self._process is None:
                self._process = exchange.process
            if exchange.process != self._process or exchange.ended < self._latest_start:
                self._in_sequence = False
            self._latest_start = max(self._latest_start, exchange.started)
            self._added.append(completion)
            self._histories = None
            if self._side_calls is not None:
                self._side_calls.add(completion)

    @property
    def completions(self) -> list[Completion]:
        """All completions, in order of the start of their calls."""
        with self._lock:
            self._settle()
            return self._sorted

    def get(self, completion_id: str, choice_index: int) -> Completion | None:
        """The completion of this id; the one that started last where several have it."""
        with self._lock:
            self._settle()
            found = self._by_key.get((completion_id, choice_index), [])
        return found[0] if len(found) == 1 else in_order(found)[-1] if found else None

    @property
    def ambiguities(self) -> list[str]:
        """A warning for each completion of which it is not certain what it continues."""
        found, missing = list(self._linked().warnings.values()), self._known.missing
        for completion in self.completions if missing else ():
            if completion.id in missing and completion.items:
                id_, item = repr(completion.id), repr(missing[completion.id])
                found.append(sentences.ITEM_NOT_HERE(id=id_, item=item))
        return found

    @property
    def rewriting(self) -> str | None:
        """A warning where the client replays in other words what was sampled; None elsewhere."""
        parents = self._linked().parents
        linked = [completion for completion in self.completions if _is_linked(completion)]
        continued = {parents[completion] for completion in linked if completion in parents}
        # A single one is an edit, and so are a few among many that are replayed as they were.
        few = max(1, len(continued))
        if len(linked) - len(continued) <= few:
            return None
        found = (rewritten(linked) | quoted(linked)) - continued
        changed = [completion for completion in linked if completion in found]
        if len(changed) <= few:
            return None
        return sentences.REWRITTEN(
            replies=len(linked), histories=len(linked) - len(continued), id=repr(changed[0].id)
        )

    def continued_by(
        self, prompt: MessagePath | None, context_key: bytes
    ) -> tuple[Completion, MessagePath] | None:
        """The completion that a request which is made now continues, and where its reply ends.

        prompt: the conversation of the request. None: it continues nothing.
        """
        with self._lock:
            links = self._linked()
            for node in prompt or ():
                found = [c for c in links.ending(context_key, node.key) if goes_on_from(c, node)]
                if found:
                    return choose(found, node)[0], node
        return None

    @property
    def continuations(self) -> list[tuple[Completion, Completion]]:
        """Each reply and a completion that continues it, in order of the start of the latter."""
        parents = self._linked().parents
        return [(parents[c], c) for c in self.completions if c in parents and _is_linked(c)]

    def history(self, completion: Completion, appended: Appended) -> History:
        """The conversation that ends in the completion, and the messages appended after it.

        Costs what the conversation is long, however many calls the rollout has made.
        """
        return history_of(completion, self._linked().parents, appended)

    def main(self, appended: Appended, named: CallKey | None, said: Json) -> Completion | None:
        """The completion that the main history ends with, see `main_end`. None: there is none."""
        ends = list(self.ends(appended))
        return main_end(ends, self._linked().parents, appended, named, said)

    def start_of(self, completion: Completion) -> Completion:
        """The first completion of the conversation that ends in this one."""
        parents = self._linked().parents
        while completion in parents:
            completion = parents[completion]
        return completion

    def histories(
        self, appended: Appended, named: CallKey | None = None, said: Json = None
    ) -> list[History]:
        """One history for each leaf: the main one, the others in order of their first call.

        Those that end in a side call come after the others.
        """
        state = sum(map(len, list(appended.values()))), named, said
        with self._lock:
            if self._histories is None or self._histories[0] != state:
                self._histories = state, list(self.each_history(appended, named, said))
            return self._histories[1]

    def each_history(
        self, appended: Appended, named: CallKey | None = None, said: Json = None
    ) -> Iterator[History]:
        """The same, one at a time."""
        parents, trained = self._linked().parents, set[Completion]()
        main = self.main(appended, named, said)
        for completion in sorted(self.ends(appended), key=lambda end: end is not main):
            yield history_of(completion, parents, appended, trained)

    def ends(self, appended: Appended) -> Iterator[Completion]:
        """The completion that each history ends with, in order of the histories."""
        parents = self._linked().parents
        completions = [completion for completion in self.completions if _is_linked(completion)]
        children: dict[Completion | None, list[Completion]] = {}
        for completion in completions:
            children.setdefault(parents.get(completion), []).append(completion)
        aside: list[Completion] = []
        stack = children.get(None, [])[::-1]
        while stack:
            completion = stack.pop()
            followers = children.get(completion, [])
            stack += followers[::-1]
            if followers:
                continue
            if completion.side_call is None:
                yield completion
            else:
                aside.append(completion)
        # Messages that were appended where the conversation then went on differently.
        for completion in completions:
            followers = children.get(completion, [])
            rest = appended.get((completion.id, completion.choice_index), ())
            if (
                rest
                and followers
                and not any(includes(c, completion.path, rest) for c in followers)
            ):
                yield completion
        yield from aside

    def _settle(self) -> None:
        """Take in what was added: with what it refers to, in order; all anew if not in sequence."""
        if not self._added:
            return
        new, self._added = self._added, []
        if not self._in_sequence:
            new = [*self._sorted, *new]
            self._sorted, self._unlinked, self._by_key = [], [], {}
            self._known, self._links = _KnownItems(), _Links()
        for completion in new:
            self._known.add(completion)
        for number, completion in enumerate(new):
            new[number] = resolved = self._known.resolved(completion)
            if resolved is not completion and self._side_calls is not None:
                self._side_calls.add(resolved)
            self._by_key.setdefault((resolved.id, resolved.choice_index), []).append(resolved)
        self._sorted = in_order([*self._sorted, *new])
        self._unlinked += new

    def _linked(self) -> _Links:
        with self._lock:
            self._settle()
            if self._unlinked:
                self._links.add(in_order(self._unlinked))
                self._unlinked = []
            return self._links


def _is_linked(completion: Completion) -> bool:
    """True if it is part of a history: it sampled something, and its whole prompt is known."""
    return bool(completion.items) and completion.exchange.prompt_is_known


class _KnownItems:
    """The items of a trajectory's calls by their ids, and prompts in which they are put.

    A request may name an item by id instead of sending it again (`item_reference` of the Responses
    API). The reference stands for the item with this id in a call which had ended when the request
    began; the completion's prompt then has the item, and its exchange what was sent. A reference to
    an item of elsewhere stays what it is.
    """

    def __init__(self) -> None:
        self._sampled: dict[str, list[tuple[Completion, JsonText]]] = {}
        self._sent: dict[str, list[MessagePath]] = {}
        self._sender: dict[MessagePath, Completion] = {}
        """The call with each path in its request that ended first."""
        self._paths: dict[tuple[MessagePath | None, JsonText], MessagePath] = {}
        """Paths with items in the place of references, so that prompts share what they share."""
        self._is_any_reference = False
        self.missing: dict[str, str] = {}
        """An id that no earlier call has, by the response id of the call that refers to it."""

    def add(self, completion: Completion) -> None:
        """Take in the items of a call that has ended."""
        if not completion.api.shapes.references:
            return
        nodes = takewhile(lambda node: node is not completion.prompt, completion.path or ())
        for path in reversed([*nodes]):
            if (id_ := _id_of(path.json.seen)) is not None:
                self._sampled.setdefault(id_, []).append((completion, path.json))
        for path in completion.exchange.prompt or ():
            sender = self._sender.get(path)
            if sender is not None and sampled_order(sender) <= sampled_order(completion):
                return
            self._sender[path] = completion
            if sender is not None:
                continue
            if reference_of(path.message) is not None:
                self._is_any_reference = True
            elif (id_ := _id_of(path.message)) is not None:
                self._sent.setdefault(id_, []).append(path)

    def resolved(self, completion: Completion) -> Completion:
        """The completion with items in the place of the references in its prompt."""
        if not self._is_any_reference or not completion.api.shapes.references:
            return completion
        prompt: MessagePath | None = None
        for path in reversed(list(completion.exchange.prompt or ())):
            id_ = reference_of(path.message)
            item = None if id_ is None else self._meant(id_, completion)
            if id_ is not None and item is None:
                self.missing.setdefault(completion.id, id_)
            if item is None and prompt is path.parent:
                prompt = path
                continue
            link = prompt, path.json if item is None else item
            if link not in self._paths:
                self._paths[link] = MessagePath(*link)
            prompt = self._paths[link]
        if prompt is None or prompt is completion.prompt:
            return completion
        return replace(completion, prompt=prompt, path=extend_with(prompt, completion.items))

    def _meant(self, id_: str, completion: Completion) -> JsonText | None:
        """The item with this id: a sampled one, else one that was sent; of several the last."""
        sent = [(self._sender[path], path.json) for path in self._sent.get(id_, ())]
        for known in (self._sampled.get(id_, ()), sent):
            ended = [one for one in known if ended_before(one[0], completion)]
            if ended:
                return max(ended, key=lambda one: sampled_order(one[0]))[1]
        return None


def _id_of(item: Json) -> str | None:
    id_ = item.get("id") if isinstance(item, Mapping) else None
    return id_ if isinstance(id_, str) else None


class _Links:
    """What each completion continues, found among those that were added with it or before."""

    def __init__(self) -> None:
        self.parents: dict[Completion, Completion] = {}
        self.warnings: dict[str, str] = {}
        """Warnings by response id."""
        self._by_path: dict[tuple[bytes, bytes], list[Completion]] = {}
        """Completions by context key and path key."""
        self._by_name: dict[str, list[Completion]] = {}
        """Completions by response id, and by the conversation that they were put into."""
        self._nearest: dict[tuple[bytes, int], MessagePath | None] = {}
        """The longest sampled prefix of each path node that was passed, so that a prompt is walked
        only once."""
        self._passed: set[tuple[bytes, bytes]] = set()

    def add(self, completions: Sequence[Completion]) -> None:
        """Link these completions, given in order of their start."""
        for completion in completions:
            if _is_linked(completion):
                self._index(completion)
        for completion in completions:
            if not completion.exchange.prompt_is_known:
                continue
            if names_previous(completion) is None:
                self._link_by_path(completion)
            else:
                self._link_by_name(completion)

    def ending(self, context: bytes, key: bytes) -> Sequence[Completion]:
        """The completions with this context key whose path has this key."""
        return self._by_path.get((context, key), ())

    def _index(self, completion: Completion) -> None:
        insort(self._by_name.setdefault(completion.id, []), completion, key=sampled_order)
        previous = names_previous(completion)
        if previous is None:
            path = path_key(completion.path)
            if path == path_key(completion.prompt):
                return
            key = completion.context_key, path
            if key in self._passed:
                self._nearest.clear()
            self._by_path.setdefault(key, []).append(completion)
        elif previous != previous_reply(completion):
            insort(self._by_name.setdefault(previous, []), completion, key=sampled_order)

    def _link_by_name(self, completion: Completion) -> None:
        previous = str(names_previous(completion))
        parent = previous_named(self._by_name.get(previous, ()), completion, self.parents)
        if parent is not None:
            self.parents[completion] = parent
        elif previous_reply(completion) and completion.items:
            self.warnings[completion.id] = sentences.NOT_HERE(
                id=repr(completion.id), previous=repr(previous)
            )

    def _link_by_path(self, completion: Completion) -> None:
        context = completion.context_key
        node = self._longest_sampled(completion.prompt, context)
        while node is not None:
            candidates = [
                other
                for other in self._by_path[context, node.key]
                if ended_before(other, completion) and goes_on_from(other, node)
            ]
            if candidates:
                parent, equal = choose(candidates, node)
                self.parents[completion] = parent
                if len(equal) > 1 and completion.items:
                    self.warnings[completion.id] = sentences.AMBIGUOUS(
                        id=repr(completion.id),
                        others=listed(equal),
                        parent=repr(parent.id),
                        choice=parent.choice_index,
                    )
                return
            node = self._longest_sampled(node.parent, context)

    def _longest_sampled(self, node: MessagePath | None, context: bytes) -> MessagePath | None:
        passed: list[tuple[bytes, int]] = []
        while node is not None and (context, node.key) not in self._by_path:
            if (name := (context, id(node))) in self._nearest:
                node = self._nearest[name]
                break
            passed.append(name)
            self._passed.add((context, node.key))
            node = node.parent
        self._nearest.update(dict.fromkeys(passed, node))
        return node
