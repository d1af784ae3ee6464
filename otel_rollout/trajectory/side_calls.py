"""Side calls: calls that a harness makes beside its agent, such as for the title of a session.

They stay in the trajectory and train nothing. Rules find them, plain functions of one completion
and of what the rollout's calls have in common. A rule has to be sure: a call of the policy that is
taken for a side call is lost to training, and nobody would miss it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import MessagePath, length_limit, path_messages, texts_of

_LONGEST = 8
"""Messages that the request of a side call has at most."""
_PROMPTS = {
    "a title": (
        r"You are a title generator\b",  # opencode
        r"You will generate a short title based on the first message",  # crush
        r"Analyze if this message indicates a new conversation topic",  # claude-code
        r"Please write a 5-10 word title for the following conversation",
        r"Generate a concise, sentence-case title",
        r"You are a helpful assistant\. You will be presented with a user prompt, and your job is "
        r"to provide a short title",  # codex
        r"Generate a concise, single-line task title",
    ),
    "a summary for a list of sessions": (
        r"Summarize this coding conversation in under 50 characters",  # claude-code
        r"Summarize what was done in this conversation\. Write like a pull request",  # opencode
    ),
    "a check of a command": (
        r"Your task is to process Bash commands that an AI coding agent wants to run",
        r"Extract any file paths that this command reads or modifies",
        r"You are a security monitor for autonomous AI coding agents",
    ),
}
"""Patterns for the first words of known side calls, by what they ask for."""
_known = [(what, re.compile("|".join(texts)).match) for what, texts in _PROMPTS.items()]


class SideCalls:
    """Facts of all calls of one trajectory together, by which rules find its side calls.

    Calls may be added in any order and more than once; the answers depend on the set alone. Each
    costs as much as its own request is long, up to a few messages.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all calls."""
        self.has_tools = False
        """True if any call of the trajectory offers tools."""
        self._asked = set[bytes | str]()
        """Keys of the paths in short requests without tools, and ids that requests continue."""
        self._said = set[bytes]()
        """Keys of the paths that end with the replies to such requests."""
        self._added = 0
        self._reasons: dict[tuple[str, int], tuple[int, str | None]] = {}
        """The default rule's result for each completion, with the number of calls at that time."""

    def add(self, completion: Completion) -> None:
        """Take in a call."""
        self._added += 1
        previous = completion.api.previous_reply(completion.exchange.params)
        if isinstance(previous, str):
            self._asked.add(previous)
        if completion.tools:
            self.has_tools = True
        elif is_short(completion.prompt):
            self._asked.update(_keys(completion.prompt))
            self._said.update(_said(completion))

    def goes_on(self, completion: Completion) -> bool:
        """True if a request continues its reply, or it continues another reply itself.

        Only requests without tools and of few messages are looked at.
        """
        if isinstance(completion.api.previous_reply(completion.exchange.params), str):
            return True
        if completion.id in self._asked or not self._asked.isdisjoint(_said(completion)):
            return True
        return not self._said.isdisjoint(_keys(completion.prompt))

    def reason(self, completion: Completion) -> str | None:
        """Why it is a side call by the default rule; None if it is none."""
        key, added = (completion.exchange.span_id, completion.choice_index), self._added
        known = self._reasons.get(key)
        if known is None or known[0] != added:
            known = self._reasons[key] = added, known_side_call(completion, self)
        return known[1]


def _keys(path: MessagePath | None) -> Iterator[bytes]:
    return (node.key for node in path or ())


def _said(completion: Completion) -> Iterator[bytes]:
    """The key of the path that ends with its reply, where it said anything that can be seen."""
    if completion.path is not None and completion.path.key not in _keys(completion.prompt):
        yield completion.path.key


Rule = Callable[[Completion, SideCalls], str | None]
"""Returns why a completion is a side call; None where it is none by this rule."""


def is_short(prompt: MessagePath | None) -> bool:
    """True if a request has as few messages as those of side calls."""
    return prompt is not None and prompt.length <= _LONGEST


def other_model(completion: Completion, _: SideCalls) -> str | None:
    """A call of another model than the policy, where the user said which model that is."""
    policy, asked = completion.exchange.policy_model, completion.request_model
    if policy is None or asked is None or asked == policy:
        return None
    return f"it asks the model {asked!r}, and the policy is {policy!r}"


def known_prompt(completion: Completion, calls: SideCalls) -> str | None:
    """A call without tools, beside calls with tools, whose instructions are those of a known one.

    A conversation that goes on is none.
    """
    if not _is_beside(completion, calls):
        return None
    for text in _texts(completion):
        for what, matches in _known:
            if matches(text):
                return f"it asks for {what}"
    return None


def quota_probe(completion: Completion, calls: SideCalls) -> str | None:
    """A request for one token with the text "quota", beside calls with tools."""
    prompt = completion.prompt
    if prompt is None or prompt.length > 1 or not _is_beside(completion, calls):
        return None
    if length_limit(completion.sampling) != 1 or list(_texts(completion)) != ["quota"]:
        return None
    return "it asks how much quota is left"


def without_tools(completion: Completion, calls: SideCalls) -> str | None:
    """A short call without tools, beside calls with tools, that nothing goes on from.

    It does not hold by default: a sub-agent without tools, or a last answer that the agent asks for
    without them, looks the same.
    """
    return "it has no tools, and other calls do" if _is_beside(completion, calls) else None


def known_side_call(completion: Completion, calls: SideCalls) -> str | None:
    """The rule that holds by default: a call of a model that is not the policy, where
    `configure(policy_model=...)` said which is; or one of a known harness beside its agent, for a
    title, for the check of a command, for its quota.
    """
    return reason_by((other_model, known_prompt, quota_probe), completion, calls)


def reason_by(rules: Iterable[Rule], completion: Completion, calls: SideCalls) -> str | None:
    """Why it is a side call by these rules; None if it is none."""
    return next((why for rule in rules if (why := rule(completion, calls))), None)


def reasons_by(rules: Sequence[Rule], completions: Iterable[Completion]) -> dict[str, str]:
    """The side calls among the completions of a rollout: reasons by the span ids of their calls.

    Of a call with several choices the first one decides.
    """
    calls, first = SideCalls(), dict[str, Completion]()
    for completion in completions:
        calls.add(completion)
        known = first.setdefault(completion.span_id, completion)
        if completion.choice_index < known.choice_index:
            first[completion.span_id] = completion
    found = {id_: reason_by(rules, completion, calls) for id_, completion in first.items()}
    return {id_: why for id_, why in found.items() if why}


def _is_beside(completion: Completion, calls: SideCalls) -> bool:
    return (
        calls.has_tools
        and not completion.tools
        and is_short(completion.prompt)
        and not calls.goes_on(completion)
    )


def _texts(completion: Completion) -> Iterator[str]:
    """The texts that a short request begins with: its instructions, then its messages."""
    instructions = completion.api.instructions_of(completion.exchange.params)
    for message in (*instructions, *path_messages(completion.prompt)):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("assistant", "model", "tool"):
            yield from map(str.strip, texts_of(message))
