"""A message is read once: a shape of part that an API adds is read wherever messages are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import rollout
from otel_rollout.testing import Raw
from otel_rollout.view.as_text import format_trajectory
from otel_rollout.view.messages import message_row
from otel_rollout.view.search import searched_text
from otel_rollout.wire import (
    Other,
    Part,
    ToolCall,
    ToolResult,
    media_of,
    message,
    normalised_key,
)
from otel_rollout.wire.conversation import contents_key
from otel_rollout.wire.message import Shapes, content_parts
from tests.kit.recording import Clients, Recording
from tests.wire.shape_tables import TABLES


def _wish(part: Mapping[str, Any]) -> Part:
    return ToolCall(part["number"], part["wanted"], part["details"], ["wish", part["number"]])


def _fulfilled(part: Mapping[str, Any]) -> Part:
    return ToolResult(part["wish"], part["gift"], content_parts(part["gift"]))


MADE_UP = Shapes(types={"wish": _wish, "fulfilled": _fulfilled}, result_marks=(b'"fulfilled"',))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes, added to those that are known."""
    for name in TABLES:
        monkeypatch.setattr(message, name, dict(getattr(message, name)))
    message.add_shapes(MADE_UP)


def asked(details: str, **others: Any) -> dict[str, Any]:
    part = {"type": "wish", "number": "1", "wanted": "add", "details": details, **others}
    return {"role": "assistant", "content": [part]}


GIFT = [{"type": "text", "text": "forty-two"}, {"type": "image_url", "image_url": {"url": "x"}}]
ANSWER = {"role": "user", "content": [{"type": "fulfilled", "wish": "1", "gift": GIFT}]}


@pytest.mark.usefixtures("made_up")
def test_a_shape_that_is_added_is_read_everywhere(recording: Recording, clients: Clients):
    """One history, a span of the tool, and people find and see it, as with any other call."""
    choice = {"index": 0, "finish_reason": "stop"}
    bodies = [
        {"id": name, "model": "m", "choices": [{**choice, "message": said}]}
        for name, said in (("1", asked('{"a":1}')), ("2", {"role": "assistant", "content": "so"}))
    ]
    client = clients.sync(clients.serve([Raw(200, json.dumps(body).encode()) for body in bodies]))
    messages: list[Any] = [{"role": "user", "content": "add"}]
    with rollout("agent"):
        for more in ([], [asked('{"a": 1}', parsed=1), ANSWER]):
            messages += more
            body = {"model": "m", "messages": messages}
            client.post("/chat/completions", body=body, cast_to=object)
    trajectory = recording.trajectory
    (history,) = trajectory.histories
    assert [item.trainable for item in history.items] == [False, True, False, True]
    (span,) = recording.spans_named("execute_tool add")
    assert (span.attributes or {})["gen_ai.tool.call.arguments"] == '{"a": 1}'
    assert "forty-two" in str((span.attributes or {})["gen_ai.tool.call.result"])
    for shown in (searched_text(trajectory), format_trajectory(trajectory)):
        assert "→ add({" in shown
        assert "forty-two <image_url>" in shown


@pytest.mark.usefixtures("made_up")
def test_the_page_has_the_parts_of_a_shape_that_is_added():
    """Its call, its result's text and media; another call is another message."""
    (call,) = message_row(asked("{}")).calls
    assert (call.id, call.name, call.text) == ("1", "add", "{}")
    row = message_row(ANSWER)
    assert (row.text, row.call_id, row.links) == ("forty-two", "1", ("x",))
    assert media_of(ANSWER) == ["image_url"]
    assert normalised_key(asked('{"a":2}')) != normalised_key(asked('{"a":1}'))


@pytest.mark.parametrize(
    "name", ["functionCall", "function_response", "inlineData", "toolUse", "reasoningContent"]
)
def test_a_part_whose_value_is_null_is_shown_as_it_is(name: str):
    """A member that is null says nothing about the part: it is another part, of that name."""
    (part,) = content_parts([{name: None}])
    assert isinstance(part, Other)
    assert part.kind == name


_scalars = st.sampled_from(
    [None, True, 1, 1.0, -0.0, 0, float("nan"), float("inf"), 1 << 70, "", "null", "\ud800", "é"]
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "b", "\udc00"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(_values, _values)
def test_keys_are_equal_where_the_json_is(one: Any, other: Any):
    """NaN is not null, and a key does not depend on the order of members."""
    keys = [contents_key([{"type": "novel", "x": [each]}]) for each in (one, other)]
    texts = [json.dumps([each], sort_keys=True) for each in (one, other)]
    assert (keys[0] == keys[1]) is (texts[0] == texts[1])


def test_a_key_tells_nan_from_null_and_has_no_order():
    tools: list[Any] = [{"a": [float("nan")], "b": 1}, {"b": 1, "a": [None]}, {"b": 1, "a": [1.5]}]
    assert len({contents_key([tool]) for tool in tools}) == 3
    assert contents_key([{"a": [1.5], "b": 1}]) == contents_key([tools[2]])
