"""The exchange span's format: whatever is written is read back, or reported as missing."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import otel_rollout.spans.writer as writer_module
from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.exchange import PACKED, PLACEHOLDER
from otel_rollout.spans.reader import ExchangeReader
from otel_rollout.spans.record import SpanRecord, as_record
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.token_paths import extend_tokens, tokens_in
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.wire import dumps, path_messages, token_array

texts = st.text(max_size=12) | st.sampled_from(
    ['"', "\\", '\\"token_ids":[1]', "é", "🙂", "\ud800"]
)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts
values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), values)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def span(number: int, attributes: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        name="exchange",
        trace_id="1" * 32,
        span_id=f"{number:016x}",
        parent_span_id=None,
        start_time_ns=number,
        end_time_ns=number + 1,
        attributes={sc.EXCHANGE_VERSION: 1, sc.EXCHANGE_STATUS: "complete", **attributes},
    )


def encode(body: Any, separators: tuple[str, str] = (",", ":"), *, ascii_only: bool) -> bytes:
    text = json.dumps(body, separators=separators, ensure_ascii=ascii_only)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate travels escaped or not at all
        return json.dumps(body, separators=separators).encode()


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[bytes, Any]]:
    """Request bodies of one rollout: growing, forking and unrelated lists of messages."""
    pool = draw(st.lists(messages, min_size=2, max_size=5))
    style, ascii_only = draw(separators), draw(st.booleans())
    paths: list[list[Any]] = [[]]
    bodies = []
    for _ in range(draw(st.integers(1, 8))):
        path = list(draw(st.sampled_from(paths)))
        path = path[: draw(st.integers(0, len(path)))]
        path += draw(st.lists(st.sampled_from(pool), min_size=0 if path else 1, max_size=3))
        paths.append(path)
        body: dict[str, Any] = {"messages": path}
        if draw(st.booleans()):
            body["tools"] = [{"type": "function", "function": {"name": "f" * 300}}]
        if draw(st.booleans()):
            body = {"model": "m", **body, "temperature": 0.5}
        bodies.append((encode(body, style, ascii_only=ascii_only), body))
    return bodies


@given(conversations(), st.randoms(use_true_random=False))
def test_requests_are_read_back_in_any_order(
    bodies: list[tuple[bytes, Any]], order: random.Random
) -> None:
    """Every request comes back equal, whatever the order of its spans and with duplicates."""
    writer = ExchangeWriter()
    spans = [span(i, writer.request(body)) for i, (body, _) in enumerate(bodies)]
    shuffled = spans + spans[:2]
    order.shuffle(shuffled)
    reader = ExchangeReader()
    for each in shuffled:
        reader.add(each)
    for written, (body, _) in zip(spans, bodies, strict=True):
        exchange = reader.read(written)
        assert exchange.damage == []
        assert exchange.request() == json.loads(body)


@given(conversations(), st.data())
def test_a_missing_span_is_reported_and_never_guessed(
    bodies: list[tuple[bytes, Any]], data: st.DataObject
) -> None:
    """With spans lost, each remaining request is right or says what it lacks."""
    writer = ExchangeWriter()
    spans = [span(i, writer.request(body)) for i, (body, _) in enumerate(bodies)]
    kept = data.draw(st.sets(st.sampled_from(range(len(spans)))))
    reader = ExchangeReader()
    for i in kept:
        reader.add(spans[i])
    for i in kept:
        exchange = reader.read(spans[i])
        if not exchange.damage:
            assert exchange.request() == json.loads(bodies[i][0])
        else:
            assert exchange.prompt is None or "parameter" in exchange.damage[0]


def test_one_lost_span_costs_one_exchange() -> None:
    """Every message is carried twice: without any one span the others are whole."""
    writer, path, spans = ExchangeWriter(), [], []
    for i in range(20):
        path.append({"role": "user", "content": f"{i}" * 100})
        spans.append(span(i, writer.request(encode({"messages": path}, ascii_only=True))))
    for lost in range(20):
        reader = ExchangeReader()
        for i, each in enumerate(spans):
            if i != lost:
                reader.add(each)
        damaged = [i for i in range(20) if i != lost and reader.read(spans[i]).damage]
        assert damaged == []


def test_the_request_costs_what_is_new() -> None:
    """A conversation of 200 turns is written at most three times over, not a hundred times."""
    writer, path, written = ExchangeWriter(), [], 0
    for i in range(200):
        path.append({"role": "user", "content": f"{i:04}" * 250})
        attributes = writer.request(encode({"messages": path, "model": "m"}, ascii_only=True))
        written += sum(len(v) for v in attributes.values() if isinstance(v, str))
    assert written < 3 * sum(len(json.dumps(message)) for message in path)


@pytest.mark.parametrize("cut", [1, 10, 40, 80])
def test_a_cut_attribute_is_noticed(cut: int) -> None:
    """A length limit that cuts the messages or the response makes damage, not another text."""
    writer = ExchangeWriter()
    attributes: dict[str, Any] = writer.request(
        encode({"messages": [{"role": "user", "content": "x" * 50}] * 2}, ascii_only=True)
    )
    attributes |= writer.response(encode({"id": "1", "choices": ["y" * 90]}, ascii_only=True))
    for key in (sc.REQUEST_MESSAGES, sc.RESPONSE_BODY):
        reader = ExchangeReader()
        written = span(1, attributes)
        written = replace(written, attributes=with_lengths(written.attributes))
        reader.add(as_record(written))
        assert not reader.read(as_record(written)).damage
        short = replace(written, attributes={**written.attributes, key: attributes[key][:cut]})
        reader = ExchangeReader()
        reader.add(as_record(short))
        assert reader.read(as_record(short)).damage


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"not json", b'{"messages": [1', b'{"messages": [{}]} x', b"\xff\xfe", b'{"a": 1'],
)
def test_what_is_no_json_object_is_kept_as_it_is(body: bytes) -> None:
    """A body that is not understood is kept raw, and the next one does not build on it."""
    writer = ExchangeWriter()
    good = encode({"messages": [{"role": "user", "content": "a"}]}, ascii_only=True)
    spans = [span(i, writer.request(b)) for i, b in enumerate((body, good))]
    reader = ExchangeReader()
    reader.add(spans[1])
    assert reader.read(spans[1]).request() == json.loads(good)
    reader.add(spans[0])
    assert reader.read(spans[0]).request() == body.decode("utf-8", "backslashreplace")


ids = st.lists(st.integers(0, 2**33), max_size=6)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5), separators, st.booleans())
def test_token_ids_are_read_back(
    turns: list[tuple[list[int], list[int]]], style: tuple[str, str], per_choice: bool
) -> None:
    """Responses with token ids come back equal, where prompts continue earlier ones too."""
    writer, spans, bodies = ExchangeWriter(), [], []
    prompt: list[int] = []
    for i, (new, reply) in enumerate(turns):
        prompt = prompt + new
        choice: dict[str, Any] = {"index": 0, "token_ids": reply, "text": '"token_ids":[7]'}
        body: dict[str, Any] = {"id": f"r{i}", "choices": [choice]}
        (choice if per_choice else body)["prompt_token_ids"] = prompt
        bodies.append(body)
        spans.append(span(i, writer.response(encode(body, style, ascii_only=False))))
        prompt = prompt + reply
    reader = ExchangeReader()
    for each in reversed(spans):
        reader.add(each)
    for each, body in zip(spans, bodies, strict=True):
        exchange = reader.read(each)
        assert exchange.damage == []
        assert exchange.response() == body


def test_a_reply_may_hold_what_stands_for_token_ids() -> None:
    """Then the ids stay in it: what its reader puts in their place is put there once."""
    for said, stays in (("~", False), (PLACEHOLDER, False), ({PACKED: 0}, True)):
        body = {"id": "r", "said": said, "prompt_token_ids": [7, 1]}
        written: dict[str, Any] = ExchangeWriter().response(encode(body, ascii_only=True))
        assert (sc.RESPONSE_PROMPT_IDS not in written) is stays
        reader, record = ExchangeReader(), span(0, written)
        reader.add(record)
        assert reader.read(record).response() == body


def test_token_ids_of_a_prompt_that_changed_are_missing() -> None:
    """Their digests show it, so they have no checksum."""
    written = ExchangeWriter().response(b'{"id":"r","prompt_token_ids":[70,12]}')
    assert sc.RESPONSE_PROMPT_IDS in written
    ids = written[sc.RESPONSE_PROMPT_IDS]
    assert isinstance(ids, str)
    for changed in (ids.replace("70,", "71,"), ids.replace("70,12", "70012"), ids[:-1]):
        record = span(0, {**written, sc.RESPONSE_PROMPT_IDS: changed})
        reader = ExchangeReader()
        reader.add(record)
        exchange = reader.read(record)
        assert exchange.damage
        assert exchange.prompts == [None]


@given(conversations(), st.lists(st.lists(st.integers(0, 400), max_size=5), max_size=5))
def test_arrays_too_long_to_be_kept_are_written_the_same(
    bodies: list[tuple[bytes, Any]], prompts: list[list[int]]
) -> None:
    """Whether an array is compared with the last one or by its digests makes no difference."""
    kept, hashed = ExchangeWriter(), ExchangeWriter()
    replies = [encode({"prompt_token_ids": ids}, ascii_only=True) for ids in prompts]
    with pytest.MonkeyPatch.context() as patch:
        written = [kept.request(body) for body, _ in bodies] + list(map(kept.response, replies))
        patch.setattr(writer_module, "_LONGEST_TEXT", -1)
        again = [hashed.request(body) for body, _ in bodies] + list(map(hashed.response, replies))
    assert written == again


@pytest.mark.parametrize("longest", [1 << 20, -1], ids=["compared", "hashed"])
def test_a_number_that_goes_on_is_another_one(
    monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """The ids 7, 12 do not continue the ids 7, 1, though the text does."""
    monkeypatch.setattr(writer_module, "_LONGEST_TEXT", longest)
    writer, reader = ExchangeWriter(), ExchangeReader()
    bodies = [{"id": "r", "prompt_token_ids": ids} for ids in ([7, 1], [7, 12], [7, 12, 3])]
    spans = [span(i, writer.response(encode(b, ascii_only=True))) for i, b in enumerate(bodies)]
    for each in spans:
        reader.add(each)
    assert [reader.read(each).response() for each in spans] == bodies


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-5, 5) | st.booleans(), max_size=4))
def test_ids_are_those_that_an_array_takes(ids: list[int]) -> None:
    try:
        expected = array("q", ids).tolist()
    except OverflowError:
        with pytest.raises(OverflowError):
            token_array(ids)
        return
    path = extend_tokens(None, ids)
    assert (path.length, path.to_list()) == (len(expected), expected)


@given(
    st.text(st.sampled_from('0123456789, -e.\n[]"²'), max_size=24)
    | st.from_regex(r"[1-9]+(,[1-9]+)*")
)
@example("01")
@example("1,02")
def test_ids_in_a_text_are_those_that_json_reads(text: str) -> None:
    """Whether they are read at once or later; what is no list of integers is refused at once."""
    try:
        ids = json.loads(f"[{text}]")
    except ValueError:
        ids = [None]
    if not set(map(type, ids)) <= {int}:
        with pytest.raises(ValueError, match=r"."):
            tokens_in(text)
        return
    assume(all(abs(each) < 1 << 63 for each in ids))
    path = tokens_in(text)
    assert (path.length, path.typecode) == (len(ids), token_array(ids).typecode)
    assert path.after(extend_tokens(None, [1 << 40])).to_list() == [1 << 40, *ids]
    if path.text is not None:
        assert path.text == dumps(ids)[1:-1]


@pytest.mark.parametrize("ids", [[1.0], ["1"], [None], [1, [2]]])
def test_what_is_no_id_is_refused(ids: list[Any]) -> None:
    with pytest.raises(TypeError):
        token_array(ids)


def test_a_prefix_is_not_known_by_its_end_alone() -> None:
    """A message with the length and the last bytes of another one is written and read as itself."""
    writer, reader = ExchangeWriter(), ExchangeReader()
    texts = ("a" + "x" * 40, "b" + "x" * 40)
    asked = [[{"content": text}, {"content": "go"}] for text in texts for _ in range(3)]
    bodies = [{"model": "m", "messages": messages} for messages in asked]
    spans = [span(i, writer.request(encode(b, ascii_only=True))) for i, b in enumerate(bodies)]
    for each in spans:
        reader.add(each)
    assert [reader.read(each).request() for each in spans] == bodies


def test_what_is_between_known_messages_is_looked_at() -> None:
    """Messages that follow each other without a comma are no list, also where both are known."""
    writer = ExchangeWriter()
    writer.request(b'{"messages":[{"a":1},{"b":2},{"c":3}]}')
    body = b'{"messages":[{"a":1} {"b":2}]}'
    assert writer.request(body) == {sc.REQUEST_RAW: body.decode()}


def test_token_ids_cost_what_is_new() -> None:
    """Prompts that grow to 40,000 ids are written at most three times over."""
    writer, written = ExchangeWriter(), 0
    prompt: list[int] = []
    for i in range(100):
        reply = [1000 + i] * 200
        prompt = prompt + [i] * 200
        body = {"prompt_token_ids": prompt, "choices": [{"token_ids": reply}]}
        attributes = writer.response(encode(body, ascii_only=True))
        written += sum(len(v) for v in attributes.values() if isinstance(v, str))
        prompt = prompt + reply
    assert written < 3 * len(json.dumps(prompt)) + 100 * 400


@given(values)
@settings(max_examples=200)
def test_any_response_is_read_back(body: Any) -> None:
    """A response of any JSON is read back equal."""
    text = encode(body, ascii_only=False)
    written = span(1, dict(ExchangeWriter().response(text)))
    reader = ExchangeReader()
    reader.add(written)
    assert reader.read(written).response() == json.loads(text)


def test_a_newer_format_is_said() -> None:
    """A span of a later format says that the library must be updated."""
    reader = ExchangeReader()
    newer = span(1, {sc.EXCHANGE_VERSION: sc.SCHEMA_VERSION + 1})
    reader.add(newer)
    assert any("update otel-rollout" in damage for damage in reader.read(newer).damage)


# --- large messages


def _large_play(bodies: list[list[dict[str, Any]]]) -> tuple[list[SpanRecord], list[Any]]:
    writer = ExchangeWriter()
    spans = []
    for number, messages in enumerate(bodies, 1):
        attributes = {
            sc.EXCHANGE_VERSION: 1,
            sc.EXCHANGE_STATUS: "complete",
            **writer.request(json.dumps({"messages": messages}).encode()),
        }
        spans.append(
            SpanRecord(
                "x", "1" * 32, f"{number:016x}", None, number, number, with_lengths(attributes)
            )
        )
    return spans, bodies


def _windows(count: int, kept: int) -> list[list[dict[str, Any]]]:
    """An agent that keeps its last screenshots, and a line of text of the older ones."""
    shots = [{"role": "user", "content": f"{i} " + "x" * 50_000} for i in range(count)]
    short = [{"role": "user", "content": f"screenshot {i}"} for i in range(count)]
    return [short[: max(0, i - kept)] + shots[max(0, i - kept) : i] for i in range(1, count + 1)]


def test_a_large_message_behind_another_beginning_is_not_written_again():
    """Screenshots that stay while what is before them changes are on two spans, as any message."""
    spans, bodies = _large_play(_windows(20, 5))
    written = sum(len(str(v)) for span in spans for v in span.attributes.values())
    assert written < 2.2 * 20 * 50_000
    for seed in range(5):
        reader = ExchangeReader()
        shuffled = [*spans, *spans[::2]]
        random.Random(seed).shuffle(shuffled)
        for span in shuffled:
            reader.add(span)
        values: set[int] = set()
        for span, messages in zip(spans, bodies, strict=True):
            exchange = reader.read(span)
            assert exchange.damage == []
            assert exchange.request() == {"messages": messages}
            prompt = path_messages(exchange.prompt)
            values |= {id(m) for m in prompt if len(m["content"]) > 1000}
        assert len(values) == 20  # each is one object, however many requests have it


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_lost_large_messages_are_never_replaced_by_others(seed: int, kept: int):
    """With any spans lost a request is whole, or said to be damaged; it is never another one."""
    spans, bodies = _large_play(_windows(8, kept))
    chosen = random.Random(seed)
    left = [span for span in spans if chosen.random() < 0.6]
    chosen.shuffle(left)
    reader = ExchangeReader()
    for span in left:
        reader.add(span)
    for span in left:
        exchange = reader.read(span)
        messages = bodies[int(span.span_id, 16) - 1]
        if exchange.prompt_is_known:
            assert exchange.request() == {"messages": messages}
        else:
            assert any("on a span that is missing" in sentence for sentence in exchange.damage)


def test_what_is_repeated_was_cut():
    """Without the attribute that says which messages are elsewhere, null is no message."""
    spans, _ = _large_play(_windows(8, 3))
    with_repeated = [span for span in spans if sc.REQUEST_REPEATED in span.attributes]
    assert with_repeated
    reader, without = ExchangeReader(), []
    for span in spans:
        left = {k: v for k, v in span.attributes.items() if k != sc.REQUEST_REPEATED}
        cut = frozenset({sc.REQUEST_REPEATED}) if span in with_repeated else frozenset()
        short = replace(span, attributes=left, cut=cut)
        reader.add(short)
        without += [short] if cut else []
    for span in without:
        exchange = reader.read(span)
        assert exchange.damage
        if exchange.prompt_is_known:  # another span carries the same beginning
            assert None not in path_messages(exchange.prompt)


def test_a_large_message_is_there_once_in_the_data_of_a_trajectory():
    """`to_dict` has each screenshot once, and `from_dict` gives an equal trajectory."""
    spans, bodies = _large_play(_windows(20, 5))
    own = {sc.ROLLOUT_ID: "r", sc.REQUEST_PATH: "/chat/completions"}
    spans = [
        replace(
            span,
            attributes=with_lengths(
                {**{k: v for k, v in span.attributes.items() if k != sc.LENGTHS}, **own}
            ),
        )
        for span in spans
    ]
    (trajectory,) = reconstruct(spans)
    text = json.dumps(trajectory.to_dict())
    assert len(text) < 1.2 * 20 * 50_000
    read = Trajectory.from_dict(json.loads(text))
    assert read == trajectory
    assert [c.request for c in read.completions] == [{"messages": body} for body in bodies]


def test_one_lost_span_loses_no_large_message():
    """Each is on two spans, also where others only name it."""
    spans, bodies = _large_play(_windows(10, 3))
    for lost in spans:
        reader = ExchangeReader()
        for span in spans:
            if span is not lost:
                reader.add(span)
        for span, messages in zip(spans, bodies, strict=True):
            if span is not lost:
                assert reader.read(span).request() == {"messages": messages}
