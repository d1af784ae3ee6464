"""The verdict of the user's own rules on a rollout's calls, written when the rollout ends.

The default rules follow from what is on the exchange spans, and nothing is written for them. Rules
of the user's are code that a reader elsewhere does not have: what they say goes onto the span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.record.boundary import guarded
from otel_rollout.trajectory import Completion, Rule, SideCalls, reasons_by
from otel_rollout.wire import dumps

_LONGEST = 200
"""Characters of a reason that are kept."""


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

    A rule that fails has not said that a call is none: the call is taken for one.
    """
    reasons = reasons_by([_safe(rule) for rule in rules], completions)
    return {sc.ROLLOUT_SIDE_CALLS: dumps({id_: why[:_LONGEST] for id_, why in reasons.items()})}


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
