"""JSON is read as `json` reads it, whichever library reads it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_rollout.wire import Json, cut_elements, cut_value, loads, loads_bounded
from otel_rollout.wire import json as json_of_wire
from otel_rollout.wire.json import DEEPEST

_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters())  # lone surrogates too
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)
_ODD = [
    *(
        "1e400",
        "-1e400",
        "[NaN, -Infinity, Infinity]",
        '"\\ud800"',
        '"a\nb"',
        "1.7976931348623159e308",
    ),
    *('{"a": 1, "a": 2}', "-0", "-0.0", "1E5", "5e-324", '"\\u0000"', " \r\n\t[ ] ", "1" * 400),
    *("01", "[1,]", "nul", "", '{"a"}', "\ufeff{}", "1 x", "'a'", "[1 2]", "+1", ".5", "1.", "tru"),
    *(
        "[" * 900 + "]" * 900,
        "[" * 9000 + "]" * 9000,
        '"\\x"',
        '"\x7f\u2028"',
        "\x0b1",
        "//1",
        "{1: 2}",
    ),
]


def outcome(read: Callable[[Any], Json], text: str | bytes) -> str:
    """The value as Python writes it, so that 1 is not 1.0 and NaN is NaN; or that it failed."""
    try:
        return repr(read(text))
    except (ValueError, RecursionError) as error:
        return type(error).__mro__[-3].__name__


def reference(text: str | bytes) -> Json:
    return json.loads(text, strict=False)


@pytest.mark.parametrize("text", _ODD)
def test_odd_texts_are_read_as_json_reads_them(text: str) -> None:
    assert outcome(loads, text) == outcome(reference, text)
    assert outcome(loads, text.encode()) == outcome(reference, text.encode())


@given(_values, st.booleans(), st.sampled_from([None, 1]))
@example(math.nan, True, None)
def test_values_are_read_as_json_reads_them(
    value: Json, ensure_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    assert outcome(loads, text) == outcome(reference, text)


@given(_values, st.randoms(use_true_random=False))
def test_damaged_texts_are_read_as_json_reads_them(value: Json, chance: random.Random) -> None:
    text = list(json.dumps(value, ensure_ascii=chance.random() < 0.5))
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(text) + 1)
        text[place : place + chance.randint(0, 2)] = chance.choice(["", *'{}[]",:\\0e.-+ \n\tNu'])
    assert outcome(loads, "".join(text)) == outcome(reference, "".join(text))


def test_equal_texts_with_nan_are_equal() -> None:
    assert loads('{"a": [NaN]}') == loads('{"a": [NaN]}')


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_is_nested_too_deep_is_refused(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any Python: where it does not count all levels itself, brackets are counted."""
    monkeypatch.setattr(json_of_wire, "_IS_COUNTED", is_counted)
    for text in ("[" * DEEPEST + "]" * DEEPEST, '{"a":' * 700 + "1" + "}" * 700):
        assert loads_bounded(text) == json.loads(text)
    for text in ("[" * 851 + "]" * 851, '{"a":' * 851 + "1" + "}" * 851, "[" * 9000 + "]" * 9000):
        assert cut_value(text) is None
        with pytest.raises(ValueError, match="nested deeper than 850"):
            loads_bounded(text)
    brackets_in_texts = json.dumps(["[" * 2000, {"]": "{" * 2000}])
    assert bytes(cut_value(brackets_in_texts) or b"").decode() == brackets_in_texts


@pytest.mark.parametrize("inside", ["1],[2", "", "]", "1,2", "[1", '"', "1 2"])
def test_a_text_does_not_leave_its_margin(inside: str) -> None:
    """What stands around a text while it is read is no part of it."""
    text = inside + " " * DEEPEST
    assert cut_value(text) is None
    assert cut_elements(text) is None
    with pytest.raises(ValueError, match=r"Expecting|Extra|Unterminated|Invalid"):
        loads_bounded(text)


def test_a_number_too_long_is_found_in_one_walk() -> None:
    """Runs of digits that are nearly too long cost what they are long."""
    nearly, too_long = "5" * 4299, "5" * 4300
    assert cut_elements(f"[{','.join([nearly] * 300)}]") is not None
    assert cut_elements(f"[{nearly},{too_long}]") is None
