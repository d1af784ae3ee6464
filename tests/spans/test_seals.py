"""Lengths and checksums as they are written, and as stores give them back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanRecord, as_record, numbers_of, with_lengths

ID = "0123456789abcdef" * 2
BODY = '{"id":"r1","choices":[{"logprob":-0.5,"n":[1,2,null,"é"]}]}'
ATTRIBUTES: dict[str, Any] = {
    sc.EXCHANGE_VERSION: 1,
    sc.ROLLOUT_ID: ID,
    sc.ROLLOUT_METADATA: '{"a":[1,2]}',
    sc.RESPONSE_BODY: BODY,
}
names = st.text(st.characters(codec="utf-8"), min_size=1)


def record(attributes: dict[str, Any]) -> SpanRecord:
    return SpanRecord("exchange", "1" * 32, "2" * 16, None, 1, 2, attributes)


def parsed_by_a_store(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes as a store gives them back that parses texts which are JSON."""

    def parsed(value: Any) -> Any:
        try:
            found = json.loads(value)
        except (TypeError, ValueError):
            return value
        return found if isinstance(found, dict | list) else value

    return {name: parsed(value) for name, value in attributes.items()}


@given(st.dictionaries(names, st.text(st.characters(codec="utf-8")) | st.integers(), min_size=1))
def test_any_names_and_values_are_sealed(attributes: dict[str, Any]):
    """What is written is read back, is no JSON, and any part of it is refused."""
    seal = with_lengths(attributes)[sc.LENGTHS]
    expected = {
        f"{sc.PREFIX}{name}" if name.startswith(".") else name: len(str(value))
        for name, value in attributes.items()
    }
    read = numbers_of(seal)
    read.pop(sc.CHECKSUMS, None)  # of some names
    assert read == expected
    with pytest.raises(ValueError):
        json.loads(seal)
    for end in range(len(seal)):
        with pytest.raises(ValueError):
            numbers_of(seal[:end])


def test_a_store_that_parses_json_loses_nothing():
    """Objects are the texts again that they were made of."""
    sealed = with_lengths(ATTRIBUTES)
    assert as_record(record(sealed)).cut == frozenset()
    found = as_record(record(parsed_by_a_store(sealed)))
    assert found.cut == frozenset()
    assert found.text(sc.RESPONSE_BODY) == BODY
    assert found.text(sc.ROLLOUT_METADATA) == '{"a":[1,2]}'


def test_a_seal_stays_as_it_was_written():
    """What parses JSON does not find any in it."""
    sealed = with_lengths(ATTRIBUTES)
    parsed = parsed_by_a_store(sealed)
    assert isinstance(parsed[sc.RESPONSE_BODY], dict)
    assert {key: parsed[key] for key in (sc.LENGTHS, sc.CHECKSUMS)} == {
        key: sealed[key] for key in (sc.LENGTHS, sc.CHECKSUMS)
    }


@pytest.mark.parametrize("text", ['{"id": "r1"}', '{"n":1.50}', '{"n":1e5}'])
def test_a_text_that_cannot_be_made_again_is_missing(text: str):
    """Spaces and numbers may have been written in other ways; what else is there, stands."""
    attributes = {**ATTRIBUTES, sc.RESPONSE_BODY: text}
    found = as_record(record(parsed_by_a_store(with_lengths(attributes))))
    assert found.cut == {sc.RESPONSE_BODY}
    assert found.text(sc.ROLLOUT_ID) == ID


@pytest.mark.parametrize("seal", [b"x", 5, ["a"], {"a": b"x"}, ".id:x;", "x", "", '{"a":', "[" * 9])
def test_a_seal_that_cannot_be_read_vouches_for_nothing(seal: Any):
    """Only what the span is stands, and an id that shows no cut."""
    sealed = {**with_lengths(ATTRIBUTES), sc.LENGTHS: seal}
    found = as_record(record(sealed))
    assert found.attributes.keys() == {sc.EXCHANGE_VERSION, sc.ROLLOUT_ID}
    assert found.cut == sealed.keys() - found.attributes.keys()


def test_a_text_of_the_same_length_is_no_text_that_was_written():
    """An object in its place is looked at like any text."""
    sealed = with_lengths(ATTRIBUTES)
    other = json.loads(BODY.replace("r1", "r2"))
    found = as_record(replace(record(sealed), attributes={**sealed, sc.RESPONSE_BODY: other}))
    assert found.cut == {sc.RESPONSE_BODY}
