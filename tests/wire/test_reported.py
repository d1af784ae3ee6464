"""Errors that servers report, as one line that has their codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import Json, error_text

CASES: list[tuple[Json, str | None, int | None, str]] = [
    (
        {"message": "no", "code": "rate_limited", "type": "t"},
        None,
        429,
        "no (HTTP 429, rate_limited)",
    ),
    ({"message": "no", "code": 400, "type": "BadRequestError"}, None, None, "no (code 400)"),
    ({"message": "no", "code": 400}, None, 400, "no (HTTP 400)"),
    (
        {"message": "no", "type": "overloaded_error", "code": None},
        None,
        None,
        "no (overloaded_error)",
    ),
    ({"message": "Error code: 429 - slow"}, None, 429, "Error code: 429 - slow"),
    ({"message": "theirs", "code": "x1"}, "the client's", None, "the client's (x1)"),
    ("overloaded", None, 529, "overloaded (HTTP 529)"),
    (None, "refused", None, "refused"),
    (None, "", 500, " (HTTP 500)"),
]


@pytest.mark.parametrize(("error", "message", "status", "text"), CASES)
def test_an_error_has_its_message_and_the_codes_that_it_lacks(
    error: Json, message: str | None, status: int | None, text: str
) -> None:
    """A code that the message has already is not said twice."""
    assert error_text(error, message=message, status=status) == text


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda j: (
            st.lists(j) | st.dictionaries(st.sampled_from(["message", "code", "type", "status"]), j)
        ),
    )
)
def test_whatever_a_server_sends_is_a_line(error: Json) -> None:
    """Any JSON gives a text, and a code that is a text or a number is in it."""
    text = error_text(error)
    if isinstance(error, dict) and isinstance(code := error.get("code"), str):
        assert code in text
