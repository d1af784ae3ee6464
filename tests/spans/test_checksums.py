"""Texts that became others of the same length, ids that were cut, and fields of wrong types."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import ExchangeWriter, SpanRecord, as_record, as_records, with_lengths
from otel_rollout.spans.exchange import PLACEHOLDER
from otel_rollout.spans.reply_form import unpacked
from otel_rollout.wire import unpack_events

ID = "a" * 32
ATTRIBUTES: dict[str, Any] = with_lengths(
    {sc.EXCHANGE_VERSION: 1, sc.ROLLOUT_ID: ID, sc.RESPONSE_BODY: '{"id": 1}'}
)
SPAN = SpanRecord("exchange", "1" * 32, "1" * 16, None, 1, 2, ATTRIBUTES)


def test_a_text_of_the_same_length_is_seen():
    """Redaction that keeps the length, or a store that maps characters."""
    assert as_record(SPAN).cut == frozenset()
    changed = as_record(replace(SPAN, attributes={**ATTRIBUTES, sc.RESPONSE_BODY: '{"id": 2}'}))
    assert changed.cut == {sc.RESPONSE_BODY}
    assert changed.text(sc.RESPONSE_BODY) is None


@pytest.mark.parametrize("end", [2, None])
def test_an_id_that_was_cut_is_cut_whatever_else_is_left(end: int | None):
    """Without lengths an id of 32 hex digits is whole, and a shorter one names nobody."""
    for text, whole in ((ID, True), (ID[:10], False), (ID[:-1] + "x", False), ("", False)):
        attributes: dict[str, Any] = {
            sc.EXCHANGE_VERSION: 1,
            sc.ROLLOUT_ID: text,
            sc.LENGTHS: '{".id":3',
        }
        found = as_record(replace(SPAN, end_time_ns=end, attributes=attributes))
        assert (found.text(sc.ROLLOUT_ID) == ID) is whole
        assert (sc.ROLLOUT_ID in found.cut) is not whole


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", 1), ("start_time_ns", -1), ("end_time_ns", "x"), ("attributes", [1]), ("events", 1)],
)
def test_a_field_of_another_type_is_missing(field: str, value: Any):
    """It has a value of its type, and its name is in `cut`."""
    change: dict[str, Any] = {field: value}
    found = as_record(replace(SPAN, **change))
    assert field in found.cut
    assert type(getattr(found, field)) is not type(value) or getattr(found, field) != value


def test_a_span_without_ids_is_passed_over(caplog: pytest.LogCaptureFixture):
    """It names nobody; what is no span at all is an error."""
    nameless: Any = replace(SPAN, trace_id=None)  # type: ignore[arg-type]
    assert [record.key for record in as_records([nameless, SPAN])] == [SPAN.key]
    assert "is passed over" in caplog.text
    with pytest.raises(SpanFormatError):
        list(as_records(["no span"]))


@given(st.binary(max_size=40), st.booleans(), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_bytes_of_a_stream_are_kept(data: bytes, prompt: bool, end: bytes) -> None:
    """They are those of its packed events, or kept beside them; and the known checksum is right."""
    events = [b'data: {"prompt_token_ids":[1,2]}'] * prompt + [b"data: %b" % data] * 5
    body = end.join([*events, b"data: [DONE]", b""])
    writer = ExchangeWriter()
    written = writer.response(body, events=True)
    assert with_lengths(written, checksums=writer.checksums) == with_lengths(written)
    form = json.loads(str(written.get(sc.RESPONSE_FORM, "{}")))
    text = "\n\n".join(unpack_events(str(written[sc.RESPONSE_EVENTS])))
    feeds = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert text.replace(PLACEHOLDER + "0}", "[1,2]") == feeds.decode("utf-8", "backslashreplace")
    text = text.replace("\n", form.get("line_end", "\n"))
    text = text.replace(PLACEHOLDER + "0}", "[1,2]")
    assert body == (unpacked(form["raw"]) if "raw" in form else text.encode())
