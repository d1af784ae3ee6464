"""Requests that name earlier items by id: they mean the same as requests that send the items."""

from __future__ import annotations

import json
import random
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.trajectory import Conversations
from otel_rollout.wire import reference_of
from tests.kit.comparing import replayed
from tests.kit.conversations import table, user
from tests.kit.recording import Clients, Recording

Json: TypeAlias = dict[str, Any]


def reference(id_: str, *, typed: bool = True) -> Json:
    return {"type": "item_reference", "id": id_} if typed else {"id": id_}


def referring(items: Any) -> list[Json]:
    """The items as a client sends them that refers to all that the server knows."""
    return [reference(item.id) for item in items]


# --- at random: requests with references and the same requests in full


Step = tuple[int, int, int, bool]
"""Which conversation a call continues, which of its items it refers to and how it orders them, and
whether it stays open while the next one is made."""
steps = st.lists(st.tuples(*[st.integers(0, 2**16)] * 3, st.booleans()), min_size=1, max_size=12)


def played(calls: list[Step], *, refer: bool, processes: int = 1) -> list[SpanRecord]:
    """The spans of an agent with several conversations, some of whose calls overlap."""
    writers = [ExchangeWriter() for _ in range(processes)]
    spans: list[SpanRecord] = []
    heads: list[list[Json]] = [[{**user("go"), "id": "in_0"}], [user("go")]]
    known: set[str] = set()
    waiting: list[tuple[int, Json, list[Json], list[Json]]] = []

    def end(number: int, attributes: Json, asked: list[Json], said: list[Json]) -> None:
        body = {"id": f"r{number}", "status": "completed", "output": said}
        response = writers[number % processes].response(json.dumps(body).encode())
        ended = len(spans) + clock
        outcome = {sc.EXCHANGE_ENDED: ended, sc.EXCHANGE_STATUS: "complete"}
        spans.append(
            SpanRecord(
                name="recording",
                trace_id="1" * 32,
                span_id=f"{number:016x}",
                parent_span_id=None,
                start_time_ns=attributes[sc.EXCHANGE_STARTED],
                end_time_ns=ended,
                attributes=with_lengths({**attributes, **response, **outcome}),
            )
        )
        known.update(item["id"] for item in (*asked, *said) if "id" in item)
        heads.append([*asked, *said, {**user(f"and {number}?"), "id": f"in_{number + 1}"}])

    for number, (head, chosen, order, stays_open) in enumerate(calls):
        clock = 100 * number
        asked = list(heads[head % len(heads)])
        if order % 4 == 0:
            random.Random(order).shuffle(asked)
        sent = [
            reference(item["id"], typed=bool(chosen >> place + 8 & 1))
            if refer and chosen >> place % 8 & 1 and item.get("id") in known
            else item
            for place, item in enumerate(asked)
        ]
        attributes: Json = {
            sc.EXCHANGE_VERSION: 1,
            sc.ROLLOUT_ID: "1" * 32,
            sc.EXCHANGE_PROCESS: f"p{number % processes}",
            sc.EXCHANGE_STARTED: clock,
            sc.REQUEST_PATH: "/responses",
            **writers[number % processes].request(json.dumps({"input": sent}).encode()),
        }
        thought = {"type": "reasoning", "id": f"rs_{number}", "summary": [{"text": f"t{number}"}]}
        call = {"type": "function_call", "id": f"fc_{number}", "call_id": "c", "name": "f"}
        said: list[Json] = [thought, {**call, "arguments": f"[{number}]"}]
        waiting.append((number, attributes, asked, said))
        if not stays_open:
            ready = waiting[-1:] if order % 3 else waiting[:]
            del waiting[-len(ready) :]
            for one in reversed(ready):
                end(*one)
    for one in waiting:
        end(*one)
    return spans


def shown(trajectory: Trajectory) -> list[Any]:
    return [history.to_list() for history in trajectory.histories]


@pytest.mark.parametrize("processes", [1, 2])
@given(calls=steps, seed=st.integers(0, 99))
@settings(max_examples=100)
def test_a_reference_means_its_item(processes: int, calls: list[Step], seed: int) -> None:
    """Histories, prompts and warnings are those of requests with the items; the wire is kept."""
    (full,) = reconstruct(played(calls, refer=False, processes=processes))
    spans = played(calls, refer=True, processes=processes)
    (short,) = reconstruct(spans)
    assert shown(short) == shown(full)
    assert short.warnings == full.warnings
    for mine, theirs in zip(short.completions, full.completions, strict=True):
        assert mine.request_messages == theirs.request_messages
    shuffled = [*spans, *spans[::2]]
    random.Random(seed).shuffle(shuffled)
    (again,) = reconstruct(shuffled)
    read = Trajectory.from_dict(short.to_dict())
    for other in (again, read):
        assert other == short
        assert [c.request for c in other.completions] == [c.request for c in short.completions]
        assert shown(other) == shown(short)
    order = random.Random(seed)
    by_end = sorted(short.completions, key=lambda c: c.exchange.ended)
    for completions in (by_end, order.sample(by_end, len(by_end))):
        growing = Conversations()
        for completion in completions:
            growing.add(completion)
            if order.random() < 0.5:
                growing.histories({})
        assert [history.to_list() for history in growing.histories({})] == shown(short)
        assert growing.ambiguities == []


# --- one by one, over the real client


async def test_each_kind_of_item(recording: Recording, clients: Clients) -> None:
    """Reasoning, a message and a call are in the history as they were said, and are no break."""
    said = Reply("Wait.", reasoning="Hm.", tool_calls=[ToolCall("add", '{"a": 1}', id="call_1")])
    server = clients.serve([said, "2"])
    client = clients.asynchronous(server)
    result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    async with rollout("agent") as live:
        first = await client.responses.create(model="m", input=[user("1 + 1?")])
        sent: Any = [user("1 + 1?"), *referring(first.output), result]
        await client.responses.create(model="m", input=sent)
        running = [history.to_list() for history in live.histories]
    trajectory = replayed(recording)
    assert shown(trajectory) == running
    assert trajectory.warnings == []
    (history,) = trajectory.histories
    assert history.messages() == [
        *(user("1 + 1?"), *trajectory.completions[0].items, result),
        *trajectory.completions[1].items,
    ]
    assert [item.trainable for item in history.items] == [False, True, True, True, False, True]
    assert not any(item.is_break for item in history.items)
    second = trajectory.completions[1]
    assert second.request_messages == history.messages()[:-1]
    assert second.request["input"] == sent == json.loads(server.exchanges[1].request)["input"]


async def test_forks_and_agents_side_by_side(recording: Recording, clients: Clients) -> None:
    """Two requests that refer to one reply fork; those of another conversation stay apart."""
    client = clients.asynchronous(clients.serve(["same", "same", "b", "c", "d"]))

    async def ask(*items: Any) -> Any:
        return (await client.responses.create(model="m", input=list(items))).output

    async with rollout("agent"):
        one, other = await ask(user("u")), await ask(user("u"))
        second = await ask(user("u"), *referring(other), user("2"))
        await ask(user("u"), *referring(one), user("3"))
        await ask(user("u"), *referring(other), user("2"), *second, user("4"))
    trajectory = replayed(recording)
    assert [history.completion_ids[-1] for history in trajectory.histories] == [
        *("resp_000005", "resp_000004"),
    ]
    assert trajectory.warnings == []
    messages = trajectory.get_history("resp_000005").messages()
    assert [m["content"] for m in messages if m["role"] == "user"] == ["u", "2", "4"]


async def test_after_a_reply_that_was_named_by_its_id(
    recording: Recording, clients: Clients
) -> None:
    """A request may name the reply before it, and refer to what was said earlier."""
    client = clients.asynchronous(clients.serve(["a", "b"]))
    async with rollout("agent"):
        first = await client.responses.create(model="m", input="u")
        again: Any = [*referring(first.output), user("again")]
        await client.responses.create(model="m", input=again, previous_response_id=first.id)
    assert table(replayed(recording)) == ["user u, 0* a, assistant a, user again, 1* b"]


async def test_a_server_with_one_id_for_all(recording: Recording, clients: Clients) -> None:
    """Where ids repeat, a reference means what was said last before it, never its own reply."""
    replies = [Reply(text, message_extra={"id": "same"}) for text in "abc"]
    client = clients.asynchronous(clients.serve(replies))
    async with rollout("agent"):
        sent: Any = [user("u")]
        for _ in replies:
            said = await client.responses.create(model="m", input=sent)
            sent = [*sent[:1], reference(said.output[0].id or ""), user("on")]
    assert table(replayed(recording)) == [
        "user u, assistant b, user on, 2* c",
        "user u, 0* a, user on, 1* b",
    ]


async def test_an_item_of_elsewhere(recording: Recording, clients: Clients) -> None:
    """It stays a reference, two of them are two messages, and the trajectory names it."""
    client = clients.asynchronous(clients.serve(["a", "b", "c"]))
    async with rollout("agent"):
        sent: Any = [user("u"), reference("msg_9")]
        first = await client.responses.create(model="m", input=sent)
        for id_ in ("msg_8", "msg_9"):
            later: Any = [user("u"), reference(id_), *referring(first.output), user("v")]
            await client.responses.create(model="m", input=later)
    trajectory = replayed(recording)
    assert [history.completion_ids for history in trajectory.histories] == [
        ["resp_000001", "resp_000003"],
        ["resp_000002"],
    ]
    assert trajectory.messages()[1] == reference("msg_9")
    assert [warning.partition(", which")[0] for warning in trajectory.warnings] == [
        "completion 'resp_000001' refers to the item 'msg_9'",
        "completion 'resp_000002' refers to the item 'msg_8'",
        "completion 'resp_000003' refers to the item 'msg_9'",
    ]


@pytest.mark.parametrize(
    ("item", "id_"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "msg_1"),
        ({"type": None, "id": "msg_1"}, "msg_1"),
        ({"id": "msg_1"}, "msg_1"),
        ({"type": "item_reference", "id": 7}, None),
        ({"type": "item_reference"}, None),
        ({"type": ["item_reference"], "id": "msg_1"}, None),
        ({"type": "message", "id": "msg_1"}, None),
        ({"id": "msg_1", "role": "user"}, None),
        ({"id": "msg_1", "content": "hi"}, None),
        ("msg_1", None),
    ],
)
def test_what_is_a_reference(item: Any, id_: str | None) -> None:
    """An item with nothing but an id; the client may leave its type out."""
    assert reference_of(item) == id_
