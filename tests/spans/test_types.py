"""The type of each attribute of ours: one of another type counts as cut."""

from __future__ import annotations

from otel_rollout import semconv as sc
from otel_rollout.spans.record import _READERS

_UNREAD = {
    *(sc.ROLLOUT_CALL_COUNT, sc.ROLLOUT_USAGE_COUNT, sc.ROLLOUT_REWARD),
    *(sc.ROLLOUT_PROOF, sc.ROLLOUT_TOKEN_TYPE),
}
"""Sums for backends, what is in headers alone, and an attribute of a metric."""


def test_every_attribute_that_is_read_has_a_type():
    """Each name of a rollout, a reward, an exchange, a request or a response is in the table."""
    parts = ("ROLLOUT_", "REWARD", "EXCHANGE_", "REQUEST_", "RESPONSE_")
    own = {
        value
        for name, value in vars(sc).items()
        if name.startswith(parts) and isinstance(value, str) and value.startswith(f"{sc.PREFIX}.")
    }
    assert own - _UNREAD - _READERS.keys() == set()
