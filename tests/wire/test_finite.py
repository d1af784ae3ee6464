"""JSON that has words for all its numbers."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import finite

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
)


def expected(value: Any) -> Any:
    """By its parts."""
    if isinstance(value, dict):
        return {key: expected(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expected(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(VALUES)
def test_what_json_has_no_word_for_is_null(value: Any) -> None:
    """All else is as it was, and so is the value itself."""
    before = copy.deepcopy(value)
    found = finite(value)
    assert found == expected(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert repr(value) == repr(before)


def test_any_depth() -> None:
    """Deeper than Python calls itself."""
    value: Any = math.nan
    for _ in range(20_000):
        value = [value]
    found = finite(value)
    for _ in range(20_000):
        (found,) = found
    assert found is None
