"""The Anthropic client: request as sent and reply as received, whichever way it was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.calling import STREAMED, Configure, ask_bare, done, entered, outcome, read
from tests.kit.comparing import attribute, exchange_spans, received, replayed, sent
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import ASK, BLOCKS, BOTH, TOOLS, Claude, Json, ask

CASES: dict[str, tuple[Reply, Json]] = {
    "text": (Reply("Paris, à côté. 🗼"), {"extra_body": {"temperature": 0.25, "top_k": 7}}),
    "thinking": (
        Reply("Paris", reasoning="France, so ..."),
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "tools": (
        Reply(
            "Wait.",
            tool_calls=[ToolCall("add", '{"a": 1.50, "b": "é\\u00e9\\n"}'), ToolCall("find")],
        ),
        {"tools": TOOLS, "tool_choice": {"type": "auto"}},
    ),
    "every kind of block": (Reply(message_extra={"content": BLOCKS}), {"tools": TOOLS}),
    "truncated": (Reply("Par", finish_reason="max_tokens"), {"max_tokens": 3}),
    "stop sequence": (
        Reply("Par", finish_reason="stop_sequence", extra={"stop_sequence": "is"}),
        {"stop_sequences": ["is"]},
    ),
    "nothing said": (Reply(None), {}),
    "no usage": (Reply("Paris", usage=False), {}),
    "system": (Reply("Paris"), {"system": [{"type": "text", "text": "Be brief. " * 40}]}),
    "extra body": (Reply("Paris"), {"extra_body": {"context_management": {"edits": []}}}),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("case", CASES)
async def test_messages(
    configure: Configure, clients: Clients, caller: Claude, stream: bool, case: str
) -> None:
    """A completion holds the request that was sent and the reply as the server means it; the
    caller has what it would have without capture.
    """
    reply, options = CASES[case]
    if stream:
        options = {**options, "stream": True}
    bare = await outcome(caller.run(ask(caller.client(clients, clients.serve(reply)), **options)))
    assert bare[0] == "returned"
    server = clients.serve(reply)
    client = caller.client(clients, server)  # before capture is configured
    recording = configure()

    async def script() -> Any:
        with rollout("agent"):
            return await ask(client, **options)

    assert await outcome(caller.run(script())) == bare

    trajectory = replayed(recording)
    (wire,) = server.exchanges
    (completion,) = trajectory.completions
    body = {key: value for key, value in sent(wire).items() if key != "stream"}
    plain = ask_bare(clients.serve(reply), "/messages", body)
    assert trajectory.warnings == []
    assert completion.request == sent(wire)
    assert completion.response == plain
    assert completion.message == {"role": "assistant", "content": plain["content"]}
    assert completion.id == plain["id"]
    assert completion.status == "complete"
    assert completion.error is None
    assert completion.trainable
    assert completion.finish_reason == plain["stop_reason"]
    assert completion.stop_reason == plain["stop_sequence"]
    assert completion.usage == plain.get("usage")
    assert completion.model == "m"
    assert completion.stream is stream
    assert completion.request_messages == ASK
    assert completion.tools == options.get("tools")
    assert completion.token_ids is None
    assert completion.logprobs is None
    asked = {"max_tokens": 100, **options, **options.get("extra_body", {})}
    assert completion.sampling == {key: asked[key] for key in completion.sampling}
    assert completion.sampling.keys() >= asked.keys() & {"max_tokens", "top_k", "stop_sequences"}
    assert [item.trainable for item in trajectory.histories[0].items] == [False, True]


def _beta(client: Any) -> Any:
    return client.beta.messages


def _plain(client: Any) -> Any:
    return client.messages


@BOTH
@STREAMED
@pytest.mark.parametrize("api", [_plain, _beta])
@pytest.mark.parametrize("way", ["helper", "raw", "streaming", "streaming, unparsed"])
async def test_every_way_of_asking(
    recording: Recording,
    clients: Clients,
    caller: Claude,
    stream: bool,
    api: Callable[[Any], Any],
    way: str,
) -> None:
    """The stream helper, raw and streaming responses and the beta API are one whole exchange."""
    server = clients.serve(Reply("Paris", reasoning="So ...", tool_calls=[ToolCall("add", "{}")]))
    request: Json = {"model": "m", "max_tokens": 9, "messages": ASK}
    if stream and way != "helper":
        request["stream"] = True

    async def script(client: Any) -> None:
        with rollout("agent"):
            messages = api(client)
            if way == "helper":
                async with entered(messages.stream(**request)) as events:
                    final = await done(events.get_final_message())
                assert final.content[1].text == "Paris"
            elif way == "raw":
                raw = await done(messages.with_raw_response.create(**request))
                parsed = await done(raw.parse())
                assert len(await read(parsed)) > 3 if stream else parsed.content[1].text == "Paris"
            else:
                async with entered(messages.with_streaming_response.create(**request)) as raw:
                    if way == "streaming":
                        parsed = await done(raw.parse())
                        if stream:
                            await read(parsed)
                    else:
                        assert b"Paris" in b"".join(await read(raw.iter_bytes()))

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    (wire,), (completion,) = server.exchanges, trajectory.completions
    assert completion.request == sent(wire)
    assert (completion.status, completion.finish_reason) == ("complete", "tool_use")
    assert completion.message is not None
    assert [b["type"] for b in completion.message["content"]] == ["thinking", "text", "tool_use"]
    if not wire.response.startswith(b"event"):
        assert completion.response == received(wire)
    assert len(exchange_spans(recording)) == 1


@BOTH
async def test_what_does_not_generate_is_an_exchange_without_completion(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Counting tokens and batches are recorded, and are nobody's completion."""
    batch = {"id": "msgbatch_1", "type": "message_batch", "processing_status": "in_progress"}
    server = clients.serve(routes={"/v1/messages/batches": Raw(body=json.dumps(batch).encode())})

    async def script(client: Any) -> None:
        with rollout("agent"):
            counted = await done(client.messages.count_tokens(model="m", messages=ASK))
            assert counted.input_tokens > 0
            params = {"model": "m", "max_tokens": 9, "messages": ASK}
            one = {"custom_id": "1", "params": params}
            made = await done(client.messages.batches.create(requests=[one]))
            assert made.id == "msgbatch_1"

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert trajectory.completions == []
    assert trajectory.histories == []
    assert trajectory.warnings == []
    assert [span.name for span in exchange_spans(recording)] == [
        "recording /v1/messages/count_tokens",
        "recording /v1/messages/batches",
    ]
    assert all(attribute(span, "status") == "complete" for span in exchange_spans(recording))
