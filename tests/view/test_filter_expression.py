"""Filters over overviews: they mean what Python means, None is not known, and nothing is run."""

from __future__ import annotations

import sqlite3
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory
from otel_rollout.errors import ConfigurationError
from otel_rollout.view import Overview, Where
from otel_rollout.view.fields import COLUMNS, row_of

PLAIN = Overview.of(Trajectory(id="a" * 32, name="agent", reward=0.5))
NUMBERS = [name for name, kind in COLUMNS.items() if kind == "number"]
TEXTS = [name for name, kind in COLUMNS.items() if kind == "text"]

texts = st.text(st.characters(exclude_characters="\0"), max_size=8)
numbers = st.integers(-3, 3) | st.floats(allow_nan=False, width=32) | st.integers()
finite = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
"""JSON has no others; `row_of` makes null of them."""
overviews = st.builds(
    replace,
    st.just(PLAIN),
    name=texts,
    status=st.sampled_from(["complete", "error"]) | texts,
    task_id=st.none() | texts,
    sample_index=st.none() | st.integers(),
    reward=st.none() | st.floats(allow_nan=False),
    turns=st.integers(0, 5),
    seconds=st.none() | st.floats(0, 10),
    versions=st.lists(st.integers(0, 3) | texts, max_size=3).map(tuple),
    findings=st.lists(st.sampled_from(["drift", "unscored"]), unique=True).map(tuple),
    metrics=st.dictionaries(texts, st.floats(-2, 2), max_size=2),
    metadata=st.dictionaries(
        texts, st.none() | st.booleans() | texts | finite | st.lists(texts), max_size=3
    ),
)


def kept(text: str, overview: Overview = PLAIN) -> bool:
    """True if the filter keeps the overview."""
    return Where.parse(text).matches(overview)


def in_python(text: str, overview: Overview) -> bool:
    """What Python says of the expression, over the same names."""
    return bool(eval(text, {"__builtins__": {}}, asdict(overview)))


def test_columns_are_the_fields_of_an_overview():
    """In the same order, so that a row and a table of them go together."""
    assert list(COLUMNS) == [field.name for field in fields(Overview)]


@given(
    overviews,
    st.sampled_from(NUMBERS),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    numbers,
)
def test_comparisons_of_numbers_are_those_of_python(
    overview: Overview, name: str, op: str, number: float
):
    """Also of numbers that SQLite does not hold exactly, and of infinities."""
    written = repr(number).replace("inf", "1e999")
    if getattr(overview, name) is None:
        assert not kept(f"{name} {op} {written}", overview)
    elif abs(number) < 2**53 and abs(getattr(overview, name)) < 2**53:
        assert kept(f"{name} {op} {written}", overview) is in_python(
            f"{name} {op} {written}", overview
        )


@given(
    overviews,
    st.sampled_from(TEXTS),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "in"]),
    texts,
)
def test_comparisons_of_texts_are_those_of_python(
    overview: Overview, name: str, op: str, text: str
):
    """By code points, with quotes, semicolons and whatever else a text has."""
    written = f"{text!r} {op} {name}"
    if getattr(overview, name) is None:
        assert not kept(written, overview)
    else:
        assert kept(written, overview) is in_python(written, overview)


@given(overviews, texts | st.integers(0, 3))
def test_membership_is_that_of_python(overview: Overview, item: str | int):
    """In lists, in what is written out, and among the names of metrics."""
    for written in (
        f"{item!r} in versions",
        f"{item!r} not in versions",
        "'drift' in findings",
        *([f"{item!r} in metrics", f"name in ['x', {item!r}]"] if isinstance(item, str) else []),
        f"turns not in [1, {item}]" if isinstance(item, int) else "turns in (1, 2)",
    ):
        assert kept(written, overview) is in_python(written, overview), written


@given(overviews, st.data(), st.sampled_from(["==", "!="]), texts | st.integers(-3, 3))
def test_values_of_metadata_are_compared_as_what_they_are(
    overview: Overview, data: st.DataObject, op: str, value: str | int
):
    """A text is never equal to a number; a missing one, null and a list are not known."""
    key = data.draw(st.sampled_from([*overview.metadata, "not there"]))
    written = f"metadata[{key!r}] {op} {value!r}"
    found = overview.metadata.get(key)
    known = not (found is None or isinstance(found, list))
    assert kept(written, overview) is (known and in_python(written, overview))
    assert kept(f"metadata[{key!r}] is None", overview) is (found is None)


@given(overviews, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
def test_fields_are_compared_with_each_other(overview: Overview, one: str, other: str):
    """Chained too, and with `and`, `or` and `not` around, where no None is among them."""
    text = f"not {one} < {other} and -1 <= {one} <= {other} or {other} == -{one}"
    if getattr(overview, one) is not None and getattr(overview, other) is not None:
        assert kept(text, overview) is in_python(text, overview)


@pytest.mark.parametrize(
    "unknown",
    [
        "reward < 1",
        "reward == 1",
        "task_id == 'x'",
        "reward in [1]",
        "reward in []",
        "metrics['x'] > 0",
        "metadata['x'] == 'y'",
        "'y' in metadata['x']",
        "1 < reward < 2",
    ],
)
def test_not_of_what_is_not_known_is_not_known(unknown: str):
    """A filter keeps what is true, and None makes neither a comparison nor its `not` true."""
    unscored = replace(PLAIN, reward=None)
    assert not kept(unknown, unscored)
    assert not kept(f"not ({unknown})", unscored)
    assert not kept(f"{unknown} and True", unscored)
    assert kept(f"{unknown} or True", unscored)
    assert kept(f"not ({unknown} and False)", unscored)


@pytest.mark.parametrize("asked", ["is None", "== None"])
def test_none_is_asked_for(asked: str):
    """By `is` and by `==`, from either side."""
    assert kept(f"reward {asked}", replace(PLAIN, reward=None))
    assert not kept(f"reward {asked}")
    assert kept("None is not reward")
    assert kept("reward != None")
    assert kept(f"metrics['x'] {asked} and metadata['x'] {asked}")
    assert not kept(f"metadata['x'] {asked}", replace(PLAIN, metadata={"x": [1]}))
    assert not kept(f"task_id {asked}", replace(PLAIN, task_id="null"))


def test_a_value_of_metadata_may_hold_others():
    """`in` looks into a list, the keys of an object and a text; nothing is in a number."""
    overview = replace(
        PLAIN, metadata={"list": ["a", 1], "object": {"a": 1}, "text": "cat", "number": 12}
    )
    for name in ("list", "object", "text"):
        assert kept(f"'a' in metadata['{name}']", overview)
        assert kept(f"'b' not in metadata['{name}']", overview)
    assert kept("1 in metadata['list']", overview)
    for text in ("'1' in metadata['number']", "metadata['text'] < 1", "turns >= metadata['text']"):
        assert not kept(text, overview)
        assert not kept(f"not {text}", overview)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected an expression such as"),
        ("reward", "expected a comparison"),
        ("reward <", "expected an expression"),
        ("rewards < 1", "is a list or an object"),
        ("reward < 'x'", "is a number, \"'x'\" is a text"),
        ("prize > 1", "there is no field 'prize'; expected one of id, name"),
        ("status['x'] == 1", "expected one of metrics, rewards, metadata"),
        ("metrics[0] == 1", "expected a field"),
        ("reward == 1 + 1", "got '1 + 1'"),
        ("len(versions) > 1", "got 'len(versions)'"),
        ("__import__('os').system('true') == 0", "expected a field"),
        ("(lambda: 1)() == 1", "expected a field"),
        ("[turns for turns in versions] == 1", "expected a field"),
        ("reward is 1", "`is` asks for None alone"),
        ("reward < None", "None is compared by `is None`"),
        ("reward in [None]", "expected texts and numbers in a list"),
        ("status in versions", "expected a text or a number before"),
        ("1 in reward", "nothing is in 'reward'"),
        ("versions == 1", "is a list or an object"),
        ("reward == 1j", "expected a text, a number"),
        ("reward == b'x'", "expected a text, a number"),
        ("-status == 1", "expected a number after the minus"),
        ("not " * 100 + "True", "nested deeper than 50 levels"),
        ("-" * 10_000 + "1 == 1", "expected"),
        ("(" * 5_000 + "1 == 1" + ")" * 5_000, "expected an expression"),
        ("x" * 30_000, "expected at most 20000"),
        (" or ".join(["turns == 1"] * 500), "more than 400 comparisons"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_anything_else_is_refused_in_words(text: str, said: str):
    """What it is, what was expected; nothing of it is run."""
    with pytest.raises(ConfigurationError) as caught:
        kept(text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("where ")
    assert len(str(caught.value)) < 1_000


pieces = st.sampled_from(
    [
        *COLUMNS,
        "metadata['x']",
        "'a'",
        '"\'; --"',
        "1",
        "-2.5",
        "None",
        "True",
        "[1, 'a']",
        "[]",
        *[
            "<",
            ">",
            "==",
            "!=",
            "in",
            "not",
            "and",
            "or",
            "is",
            "(",
            ")",
            "[",
            "]",
            ",",
            ".",
            ":",
            "=",
            "+",
            "-",
            "*",
            ";",
            "#",
            "\\",
            "\n",
            "lambda",
            "if",
            "else",
            "for",
        ],
    ]
)


@given(st.lists(pieces, max_size=12).map(" ".join) | st.text(max_size=40))
def test_no_text_raises_anything_else(text: str):
    """A random text is a filter or a ConfigurationError, and what is a filter runs."""
    try:
        where = Where.parse(text)
    except ConfigurationError:
        return
    assert where.matches(PLAIN) in (True, False)


@given(overviews, texts)
def test_its_sql_means_the_same_over_a_table(overview: Overview, text: str):
    """Columns with declared types too: what a text column has is not turned into a number."""
    declared = {"text": "TEXT", "number": "REAL", "list": "TEXT", "object": "TEXT"}
    columns = ", ".join(f'"{name}" {declared[kind]}' for name, kind in COLUMNS.items())
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE t ({columns})")
    marks = ", ".join("?" * len(COLUMNS))
    connection.execute(f"INSERT INTO t VALUES ({marks})", row_of(overview))
    for written in (
        f"name == {text!r} or status < {text!r}",
        "metadata['1'] == name",
        f"turns in [1, 2] and {text!r} not in versions",
        "reward >= seconds or not turns > metadata['x']",
    ):
        where = Where.parse(written)
        found = connection.execute(f"SELECT 1 FROM t WHERE {where.sql}", where.parameters)
        assert (found.fetchone() is not None) is kept(written, overview), written
    connection.close()


@pytest.mark.parametrize("value", ["'", '"', "'; DROP TABLE t; --", '"]', "{}", "{0}", "?", "\\"])
def test_texts_are_never_sql(value: str):
    """As a value, as a name in brackets and as both at once."""
    overview = replace(PLAIN, name=value, metrics={value: 1.0}, metadata={value: value})
    assert kept(f"name == {value!r}", overview)
    assert kept(f"metrics[{value!r}] == 1", overview)
    assert kept(f"metadata[{value!r}] == name and {value!r} in metrics", overview)
    where = Where.parse(f"name == {value!r}")
    assert (where.sql, where.parameters) == ('("name" = ?)', (value,))


def test_any_value_of_an_overview_is_a_row():
    """Numbers beyond 64 bits, lone surrogates, NaN in metadata."""
    strange: dict[str, Any] = {
        "name": "\ud800",
        "sample_index": 10**400,
        "metadata": {"x": float("nan"), "y": [float("inf")]},
    }
    overview = replace(PLAIN, **strange)
    assert overview.to_dict()["metadata"] == {"x": None, "y": [None]}
    assert kept("sample_index > 9 and metadata['x'] is None and turns == 0", overview)
    assert kept("sample_index < " + "9" * 400 + " or name == '\\ud800'", overview)
