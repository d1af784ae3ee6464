"""Streams of the Messages API, merged to the reply that is not streamed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.testing import Reply, ToolCall
from otel_rollout.wire import merge
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import ASK, BLOCKS, BOTH, Claude, Json, events, played

texts = st.text(max_size=12)
inputs = st.dictionaries(texts, st.recursive(st.none() | texts | st.integers(), st.lists))
blocks = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s" + text}, texts),
    st.builds(lambda value: {"type": "tool_use", "id": "t", "name": "n", "input": value}, inputs),
    st.sampled_from(BLOCKS),
)


@pytest.mark.slow
@given(st.lists(blocks, max_size=4), st.integers(1, 9), st.booleans())
def test_a_merged_stream_is_the_unstreamed_reply(content: list[Json], size: int, usage: bool):
    """Whatever blocks a message has, its events merge to it."""
    from otel_rollout.testing.anthropic_bodies import message_body, message_events
    from otel_rollout.testing.bodies import ModelCall

    reply = Reply(usage=usage, message_extra={"content": content})
    call = ModelCall({"messages": ASK}, reply, 1, size, token_ids=False, logprobs=False)
    events = b"".join(message_events(call)).decode()
    merged = merge(events)
    assert merged.body == message_body(call)
    assert merged.complete
    assert merged.error is None
    left = merge(events[: events.index("event: message_stop")])
    assert left == merged
    cut = merge(events[: events.index("event: message_delta")])
    assert cut.body["content"] == merged.body["content"]
    assert not cut.complete


def test_what_newer_servers_stream() -> None:
    """Unknown fields survive: of blocks, deltas, usage and of the message; null changes nothing."""
    start = {"id": "msg_1", "type": "message", "content": [], "usage": {"input_tokens": 3, "x": 1}}
    body = merge(
        events(
            {"type": "message_start", "message": start},
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "compaction", "content": None, "new": [1]},
            },
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "compaction_delta", "content": "short", "encrypted_content": "e"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "hi"},
            },
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "container": {"id": "c"}},
                "usage": {"input_tokens": None, "output_tokens": 5},
                "context_management": {"applied_edits": []},
            },
            {"type": "message_stop"},
        )
    ).body
    assert body == {
        "id": "msg_1",
        "type": "message",
        "content": [
            {"type": "text", "text": "hi"},
            {"type": "compaction", "content": "short", "new": [1], "encrypted_content": "e"},
        ],
        "usage": {"input_tokens": 3, "x": 1, "output_tokens": 5},
        "stop_reason": "end_turn",
        "container": {"id": "c"},
        "context_management": {"applied_edits": []},
    }


@pytest.mark.parametrize(
    "chunk",
    [
        {"type": "message_start"},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": [1]},
        {"type": "content_block_delta", "index": 0, "delta": {"text": 5}},
        {"type": "message_delta", "delta": 5},
    ],
)
def test_events_of_another_shape_are_kept_as_they_are(chunk: Json) -> None:
    """A stream that only seems to be of the Messages API is not merged, and nothing is raised."""
    start = {"type": "message_start", "message": {"content": []}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
    merged = merge(events(start, block, chunk, {"type": "message_stop"}))
    assert merged.body is None
    assert merged.complete


@BOTH
async def test_a_tool_input_that_was_cut_stays_text(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Input that is no JSON, since the reply hit its limit, is the text that was sampled."""
    cut = '{"city": "Par'
    reply = Reply(tool_calls=[ToolCall("find", cut)], finish_reason="max_tokens")
    trajectory = await played(recording, clients, caller, reply, [{"stream": True}])
    (completion,) = trajectory.completions
    assert completion.message is not None
    assert completion.message["content"][0]["input"] == cut
    assert completion.status == "complete"
