"""Side calls: calls that a harness makes beside its agent, such as for the title of a session.

They stay in the trajectory and train nothing. Rules find them, plain functions of one completion
and of what the rollout's calls have in common. A rule has to be sure: a call of the policy that is
taken for a side call is lost to training, and nobody would miss it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import length_limit, path_messages, texts_of

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
        self._asked: set[bytes | str] = set()
        """Keys of the paths in short requests without tools, and ids that requests continue."""
        self._replies: set[bytes] = set()
        """Keys of the paths that end with the replies to such requests."""
        self._reasons: dict[tuple[str, int], str | None] = {}
        """The default rule's results, since the last call was added."""

    def add(self, completion: Completion) -> None:
        """Take in a call."""
        if (previous := _continued_id(completion)) is not None:
            self._asked.add(previous)
        if completion.tools:
            self.has_tools = True
        elif _is_short(completion):
            self._asked.update(_keys(completion))
            self._replies.update(_reply_keys(completion))
        self._reasons = {}  # a thread that asks meanwhile has the former one

    def goes_on(self, completion: Completion) -> bool:
        """True if a request continues its reply, or it continues another reply itself.

        Only requests without tools and of few messages are looked at.
        """
        return (
            _continued_id(completion) is not None
            or completion.id in self._asked
            or not self._asked.isdisjoint(_reply_keys(completion))
            or not self._replies.isdisjoint(_keys(completion))
        )

    def reason(self, completion: Completion) -> str | None:
        """Why it is a side call by the default rule; None if it is none."""
        reasons, key = self._reasons, (completion.exchange.span_id, completion.choice_index)
        if key not in reasons:
            reasons[key] = known_side_call(completion, self)
        return reasons[key]


Rule = Callable[[Completion, SideCalls], str | None]
"""Returns why a completion is a side call; None where it is none by this rule."""


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
    policy = completion.exchange.policy_model
    if policy is not None and completion.request_model not in (None, policy):
        return f"it asks the model {completion.request_model!r}, and the policy is {policy!r}"
    if not _is_beside(completion, calls):
        return None
    texts = list(_texts(completion))
    for text in texts:
        for what, matches in _known:
            if matches(text):
                return f"it asks for {what}"
    is_single = completion.prompt is not None and completion.prompt.length == 1
    if is_single and texts == ["quota"] and length_limit(completion.sampling) == 1:
        return "it asks how much quota is left"
    return None


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
    reasons = {
        id_: next((why for rule in rules if (why := rule(completion, calls))), None)
        for id_, completion in first.items()
    }
    return {id_: why for id_, why in reasons.items() if why}


def _is_beside(completion: Completion, calls: SideCalls) -> bool:
    """Whether it is short, has no tools where other calls do, and no call goes on from it."""
    return (
        calls.has_tools
        and not completion.tools
        and _is_short(completion)
        and not calls.goes_on(completion)
    )


def _is_short(completion: Completion) -> bool:
    """Whether a request has as few messages as those of side calls."""
    return completion.prompt is not None and completion.prompt.length <= _LONGEST


def _continued_id(completion: Completion) -> str | None:
    """The id of the reply that a request names as the one that it continues."""
    previous = completion.api.previous_reply(completion.exchange.params)
    return previous if isinstance(previous, str) else None


def _keys(completion: Completion) -> Iterator[bytes]:
    """The keys of the paths to each message of a request."""
    return (node.key for node in completion.prompt or ())


def _reply_keys(completion: Completion) -> Iterator[bytes]:
    """The key of the path that ends with its reply, where it said anything that can be seen."""
    if completion.path is not None and completion.path.key not in _keys(completion):
        yield completion.path.key


def _texts(completion: Completion) -> Iterator[str]:
    """The texts that a short request begins with: its instructions, then its messages."""
    instructions = completion.api.instructions_of(completion.exchange.params)
    for message in (*instructions, *path_messages(completion.prompt)):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("assistant", "model", "tool"):
            yield from map(str.strip, texts_of(message))
