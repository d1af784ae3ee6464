"""The options of `configure`: each one is declared, typed and checked here, and nowhere else.

`configure` makes them, recording reads `process_state.settings`, a second `configure` compares, and
`shutdown` puts the defaults back. What an option means to its user is said at `configure`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.record.boundary import guarded
from otel_rollout.record.privacy.content import Content
from otel_rollout.trajectory import Completion, Rule, SideCalls, reasons_by
from otel_rollout.wire import dumps

MAX_BYTES = 4 << 30
_LONGEST_REASON = 200
"""Characters of a reason that are kept."""
WHOLE = Content()
"""Everything is recorded and exported."""


def _is_text(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_functions(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and all(map(callable, value)))


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value is each or value == each for each in values)


def _option(
    default: Any,
    expected: str,
    is_valid: Callable[[object], bool],
    *,
    later: bool = False,
    secret: bool = False,
    unasked: Any = None,
) -> Any:
    """A field that is an option of `configure`.

    later: a second `configure` may change it.
    secret: an error shows the type of what was got, and not what it was.
    unasked: what `configure` has where its user gives nothing. None: the default.
    """
    unasked = default if unasked is None else unasked
    metadata = {"expected": expected, "is_valid": is_valid, "later": later, "secret": secret}
    return field(default=default, metadata={**metadata, "unasked": unasked})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What recording does in this process; the defaults hold where nothing is configured.

    ConfigurationError for an option of the wrong type.
    """

    service_name: str | None = _option(None, "a name", _is_text)
    instrumentor: Literal["openai", "genai"] | None = _option(
        None, "'openai', 'genai' or None", _one_of("openai", "genai", None), unasked="openai"
    )
    request_token_ids: bool = _option(False, "True or False", _is_switch, later=True)
    content: Content = _option(  # noqa: RUF009
        WHOLE, "a rule for content", lambda value: isinstance(value, Content)
    )
    """What of prompts and replies is recorded, and may be on spans that are exported."""
    rollout_secret: str | None = _option(
        None, "a text that is not empty", _is_text, later=True, secret=True
    )
    llm_spans: Literal["outer", "both"] = _option(
        "outer", "'outer' or 'both'", _one_of("outer", "both")
    )
    tool_spans: bool = _option(True, "True or False", _is_switch)
    baggage: bool = _option(False, "True or False", _is_switch, later=True)
    reward_in_name: bool = _option(False, "True or False", _is_switch, later=True)
    policy_model: str | None = _option(None, "the name of a model", _is_text, later=True)
    logprobs_mode: Literal["raw", "processed"] | None = _option(
        None, "'raw', 'processed' or None", _one_of("raw", "processed", None), later=True
    )
    rl_conventions: bool = _option(False, "True or False", _is_switch)
    side_calls: tuple[Rule, ...] | None = _option(
        None, "functions of a completion and the calls beside it", _is_functions, later=True
    )
    """The user's own rules for side calls. None: the default ones."""
    announce: bool = _option(True, "True or False", _is_switch, later=True, unasked=True)
    max_bytes: int = _option(MAX_BYTES, "a number from 1 on", _is_count)
    train_endpoint: str | None = _option(None, "an address that is not empty", _is_text)
    train_folder: str | os.PathLike[str] | None = _option(  # noqa: RUF009
        None, "a folder", lambda value: _is_text(value) or isinstance(value, os.PathLike)
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, rule = getattr(self, option.name), option.metadata
            if not rule["is_valid"](value):
                shown = type(value) if rule["secret"] and value != "" else repr(value)
                raise ConfigurationError(
                    f"configure({option.name}=...): expected {rule['expected']}, got {shown}"
                )

    def asked(self) -> Iterator[tuple[str, bool]]:
        """The options with a value of the user's, and whether a second `configure` may set them."""
        for option in fields(self):
            if getattr(self, option.name) != option.metadata["unasked"]:
                yield option.name, option.metadata["later"]


def as_rules(rules: Iterable[Rule] | None) -> tuple[Rule, ...] | None:
    """The argument `side_calls` of `configure`. ConfigurationError for what is no list."""
    if rules is None:
        return None
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ConfigurationError(
            f"configure(side_calls=...): expected a list of functions, got {rules!r}; write [rule]"
        )
    return tuple(rules)


def verdict(rules: Sequence[Rule], completions: Iterable[Completion]) -> dict[str, str]:
    """The attribute of a rollout's span that says which of these are side calls, and why.

    Default rules follow from what is on the spans; these are code that a reader elsewhere does not
    have. One that fails has not said that a call is none: the call is taken for one.
    """
    reasons = reasons_by([_safe(rule) for rule in rules], completions)
    return {
        sc.ROLLOUT_SIDE_CALLS: dumps({id_: why[:_LONGEST_REASON] for id_, why in reasons.items()})
    }


def _safe(rule: Rule) -> Rule:
    """The rule, which raises nothing and gives a text or None."""
    name = getattr(rule, "__qualname__", repr(rule))

    def asked(completion: Completion, calls: SideCalls) -> str | None:
        with guarded("the rule %s for side calls failed; the call is not trained", name):
            reason = rule(completion, calls)
            if reason is None or isinstance(reason, str):
                return reason
            raise TypeError(f"expected a reason, which is a text, or None, got {reason!r}")
        return f"the rule {name} failed"

    return asked
