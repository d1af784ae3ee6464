"""Token ids that stood for the messages of a request, on spans and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import semconv as sc
from otel_rollout.spans import Exchange, ExchangeReader, ExchangeWriter, SpanRecord, with_lengths

PROMPTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=8)


def spans_of(prompts: list[list[int]], *, replied: bool) -> list[SpanRecord]:
    """A call for each prompt, which continues those before it; some replies repeat the ids."""
    writer, spans, ids = ExchangeWriter(), list[SpanRecord](), list[int]()
    for number, new in enumerate(prompts):
        held = len(ids)
        ids = ids + new
        body: dict[str, Any] = {"id": f"c{number}", "choices": []}
        if replied:
            body["prompt_token_ids"] = ids
        attributes = with_lengths(
            {
                sc.EXCHANGE_VERSION: 1,
                sc.REQUEST_PATH: "/chat/completions",
                **writer.request(json.dumps({"messages": [{"role": "user"}]}).encode()),
                **writer.supplied(held, ids),
                **writer.response(json.dumps(body).encode()),
            }
        )
        spans.append(SpanRecord("e", "1" * 32, f"{number:016x}", None, number, 9, attributes))
    return spans


def read(spans: list[SpanRecord]) -> list[Exchange]:
    """The exchanges of the spans, by their ids."""
    reader = ExchangeReader()
    for span in spans:
        reader.add(span)
    return [reader.read(span) for span in sorted(spans, key=lambda span: span.span_id)]


@given(PROMPTS, st.booleans(), st.randoms())
def test_what_was_supplied_is_read_back(prompts: list[list[int]], replied: bool, order: Any):
    """In any order of the spans, all ids are there, and how many of them were held."""
    spans = spans_of(prompts, replied=replied)
    order.shuffle(spans)
    ids: list[int] = []
    for new, exchange in zip(prompts, read(spans), strict=True):
        assert exchange.damage == []
        assert exchange.supplied is not None
        assert exchange.supplied.held == len(ids)
        assert exchange.supplied.new == len(new)
        ids += new
        assert exchange.supplied.prompt is not None
        assert exchange.supplied.prompt.to_list() == ids


@pytest.mark.parametrize("replied", [True, False])
def test_ids_cost_what_is_new(replied: bool):
    """The spans of a long conversation are not the longer the longer it has been."""
    spans = spans_of([[7] * 100] * 50, replied=replied)
    sizes = [len(str(span.attributes[sc.REQUEST_SUPPLIED])) for span in spans]
    assert max(sizes) < 3 * sizes[0] + 200


def test_a_prefix_on_a_span_that_is_missing():
    """The ids are not known then, and the exchange says so; the numbers that are known stay."""
    (exchange,) = read(spans_of([[1, 2]] * 4, replied=False)[3:])
    assert exchange.supplied is not None
    assert (exchange.supplied.held, exchange.supplied.prompt, exchange.supplied.new) == (
        6,
        None,
        None,
    )
    assert "token ids it was asked with" in " ".join(exchange.damage)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"held":1}', '{"held":"x","prompt":{}}', "7"])
def test_what_is_damaged_is_said(text: str):
    """A value that is none is damage of the exchange, and nothing else is."""
    (span,) = spans_of([[1]], replied=True)
    kept = {k: v for k, v in span.attributes.items() if k != sc.LENGTHS}
    (exchange,) = read([replace(span, attributes={**kept, sc.REQUEST_SUPPLIED: text})])
    assert exchange.supplied is None
    assert len(exchange.damage) == 1
    assert exchange.prompts[0] is not None
