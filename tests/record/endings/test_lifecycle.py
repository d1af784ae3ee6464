"""How calls end: each has one exchange span that says how, whatever became of the call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from otel_rollout import TrajectorySpanProcessor, gather_trajectory, rollout
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.testing import Reply
from tests.kit.calling import BOTH, Caller, Script, done, entered, read
from tests.kit.comparing import attribute, exchange_spans, replayed, replays
from tests.kit.conversations import ASK, chat
from tests.kit.ending import SLOW, TEXT, collect_garbage, ended, open_stream, said
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow


def processor_of(recording: Recording) -> TrajectorySpanProcessor:
    processors = recording.provider._active_span_processor._span_processors
    (found,) = [p for p in processors if isinstance(p, TrajectorySpanProcessor)]
    return found


@pytest.fixture(autouse=True)
async def nothing_leaks(recording: Recording) -> AsyncIterator[None]:
    """After each test: no span of a rollout is buffered, no call is held."""
    yield
    processor = processor_of(recording)
    assert (processor._buffers, processor._bytes) == ({}, 0)
    await collect_garbage()
    # Not isinstance(): it would load the lazy modules that openai has. Some versions of the client
    # keep a response that was read; then what capture has of it must be empty.
    calls = [o for o in gc.get_objects() if type(o) is ExchangeRecorder]
    assert [c for c in calls if not c.finished or c._body or c._asked.body or c._chunks] == []


class ConsumerError(Exception):
    """What the user's code raises while it reads a stream."""


async def _break(client: Any) -> Any:
    stream = await open_stream(client)
    await read(stream, 3)
    return stream


async def _break_and_drop(client: Any) -> None:
    await read(await open_stream(client), 3)
    await collect_garbage() if isinstance(client, openai.AsyncOpenAI) else gc.collect()


async def _close(client: Any) -> Any:
    stream = await open_stream(client)
    await read(stream, 3)
    await done(stream.close())
    return stream


async def _with(client: Any) -> Any:
    async with entered(await open_stream(client)) as stream:
        await read(stream, 3)
    return stream


async def _consumer_error(client: Any) -> None:
    stream = await open_stream(client)
    await read(stream, 3)
    raise ConsumerError("the reply is not what was hoped for")


async def _consumer_error_in_with(client: Any) -> None:
    async with entered(await open_stream(client)) as stream:
        await read(stream, 3)
        raise ConsumerError("the reply is not what was hoped for")


async def _streaming_response(client: Any) -> None:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK, stream=True)) as response:
        await read(response.iter_bytes(), 3)


ABANDONED: dict[str, Script] = {
    "break": _break,
    "break and drop": _break_and_drop,
    "close": _close,
    "with": _with,
    "consumer error": _consumer_error,
    "consumer error in with": _consumer_error_in_with,
    "streaming response": _streaming_response,
}


@BOTH
# The instrumentor does not await the response of with_streaming_response.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine '.*.parse' was never awaited:RuntimeWarning")
@pytest.mark.parametrize("case", ABANDONED)
async def test_abandoned_streams(
    recording: Recording, clients: Clients, caller: Caller, case: str
) -> None:
    """A stream that is read no further is a partial completion, however it was left."""
    held: list[Any] = []

    async def script(client: Any) -> None:
        with contextlib.suppress(ConsumerError), rollout("agent"):
            held.append(await ABANDONED[case](client))

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    trajectory, completion = ended(recording, "abandoned")
    assert trajectory.warnings == []
    assert TEXT.startswith(said(completion))
    assert 16 <= len(said(completion)) < len(TEXT)
    held.clear()
    assert completion.error is None
    assert completion.request_messages == ASK
    assert trajectory.status == ("error" if case.startswith("consumer") else "complete")
    assert completion.token_ids == list(said(completion).encode())


@BOTH
@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
async def test_a_stream_that_is_never_iterated(
    recording: Recording, clients: Clients, caller: Caller, held: bool
) -> None:
    """A stream that nobody reads is an abandoned completion without a message."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            stream = await open_stream(client)
            if not held:
                del stream
                gc.collect()

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    await collect_garbage()
    _, completion = ended(recording, "abandoned")
    assert completion.message is None
    assert completion.request_messages == ASK


@BOTH
@pytest.mark.parametrize("close", [True, False], ids=["close", "break"])
async def test_a_stream_that_is_left_when_all_is_said(
    recording: Recording, clients: Clients, caller: Caller, close: bool
) -> None:
    """Who breaks at the finish reason has the whole reply: it is complete, and trainable."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            stream = await open_stream(client)
            chunks = await read(stream, 2 + len(TEXT) // 8 + 1)
            assert chunks[-1].choices[0].finish_reason == "stop"
            if close:
                await done(stream.close())

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    _, completion = ended(recording, "complete")
    assert said(completion) == TEXT
    assert completion.finish_reason == "stop"
    assert completion.token_ids == [*TEXT.encode(), 261]


@BOTH
async def test_a_stream_of_two_choices_of_which_one_has_finished(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """A stream that is left before all choices are finished is not complete."""
    replies = [Reply("short"), Reply("a much longer reply than that")]

    async def script(client: Any) -> None:
        with rollout("agent"):
            create = client.chat.completions.create
            stream = await done(create(model="m", messages=ASK, stream=True, n=2))
            while (await read(stream, 1))[0].choices[0].finish_reason is None:
                pass
            await done(stream.close())

    server = clients.serve(Reply(choices=replies, chunk_delay=0.02))
    await caller.run(script(caller.client(clients, server)))
    completions = replayed(recording).completions
    assert [c.status for c in completions] == ["abandoned"] * 2
    assert [c.finish_reason for c in completions] == ["stop", None]
    assert not any(c.trainable for c in completions)


@BOTH
@pytest.mark.parametrize("count", [None, 2, 0], ids=["read", "left", "never read"])
async def test_the_stream_is_let_go(
    recording: Recording, clients: Clients, caller: Caller, count: int | None
) -> None:
    """Capture keeps neither the stream nor its response alive."""

    async def script(client: Any) -> weakref.ref[Any]:
        with rollout("agent"):
            stream = await open_stream(client)
            if count != 0:
                await read(stream, count)
            return weakref.ref(stream.response)

    reference = await caller.run(script(caller.client(clients, clients.serve("Paris"))))
    await collect_garbage()
    if caller.sync or count is not None:  # openai 2 keeps an async response that was read itself
        assert reference() is None
    assert len(replayed(recording).completions) == 1


@BOTH
async def test_a_stream_that_is_cut(clients: Clients, recording: Recording, caller: Caller) -> None:
    """A connection that breaks in a stream: the client's exception, and what had come."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client, stream=True)

    server = clients.serve(Reply(TEXT, cut_after=3))
    with pytest.raises(Exception) as raised:
        await caller.run(script(caller.client(clients, server)))
    trajectory, completion = ended(recording, "error")
    assert said(completion) == TEXT[:16]
    assert completion.token_ids == list(TEXT[:16].encode())
    assert completion.error is not None
    assert completion.error["message"]
    assert trajectory.status == "error"
    assert trajectory.error is not None
    assert trajectory.error["type"] == type(raised.value).__qualname__
    assert [item.trainable for item in trajectory.histories[0].items] == [False, False]


@BOTH
async def test_the_client_times_out(clients: Clients, recording: Recording, caller: Caller) -> None:
    """The client's own timeout is an error of the call, and of the rollout a timeout."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client)

    client = caller.client(clients, clients.serve(Reply("Paris", delay=5)), timeout=0.15)
    with pytest.raises(openai.APITimeoutError):
        await caller.run(script(client))
    trajectory, completion = ended(recording, "error")
    assert completion.error == {"type": "APITimeoutError", "message": "Request timed out."}
    assert completion.message is None
    assert completion.request_messages == ASK
    assert trajectory.termination_reason == "timeout"


@BOTH
async def test_the_client_times_out_in_a_stream(
    clients: Clients, recording: Recording, caller: Caller
) -> None:
    """A stream that stalls longer than the client waits keeps what had come."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client, stream=True)

    stalls = Reply("Paris", chunk_delay=0.3)
    client = caller.client(clients, clients.serve(stalls), timeout=0.15)
    with pytest.raises(Exception, match=r"(?i)timed? ?out|^$"):
        await caller.run(script(client))
    _, completion = ended(recording, "error")
    assert completion.error is not None
    assert "Timeout" in completion.error["type"]


@dataclass
class Cancelled:
    """One way to cancel what a task does."""

    how: str

    async def run(self, script: Any, started: asyncio.Event) -> None:
        """Run a script until it has started, then cancel it."""
        if self.how == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(script, 0.25)
        elif self.how == "timeout":
            if not hasattr(asyncio, "timeout"):
                script.close()
                pytest.skip("asyncio.timeout came with Python 3.11")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.25):
                    await script
        else:
            task = asyncio.ensure_future(script)
            await started.wait()
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("how", ["cancel", "wait_for", "timeout"])
@pytest.mark.parametrize("stream", [False, True], ids=["before headers", "in the stream"])
async def test_a_task_that_is_cancelled(
    recording: Recording, clients: Clients, how: str, stream: bool
) -> None:
    """A cancelled call is recorded as cancelled, with what had come; the rollout has its reason."""
    reply = Reply(TEXT, chunk_delay=0.1) if stream else Reply(TEXT, delay=5)
    client = clients.asynchronous(clients.serve(reply))
    started = asyncio.Event()

    async def script() -> None:
        async with rollout("agent"):
            started.set()
            if stream:
                chunks = await open_stream(client)
                async for _ in chunks:
                    pass
            else:
                await chat(client)

    await Cancelled(how).run(script(), started)
    trajectory, completion = ended(recording, "cancelled")
    is_late = how != "cancel"
    assert trajectory.status == ("error" if is_late else "cancelled")
    assert trajectory.termination_reason == ("timeout" if is_late else "cancelled")
    assert trajectory.warnings == []
    assert completion.error is not None
    assert completion.error["type"] == "CancelledError"
    assert completion.request_messages == ASK
    assert TEXT.startswith(said(completion))


async def test_a_call_that_is_cancelled_inside_its_rollout(
    recording: Recording, clients: Clients
) -> None:
    """An agent that gives up on a slow call and asks again has both calls in its trajectory."""
    server = clients.serve([Reply("slow", delay=5), Reply("fast")])
    client = clients.asynchronous(server)
    async with rollout("agent"):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(chat(client), 0.2)
        await chat(client)
    trajectory = replayed(recording)
    assert [c.status for c in trajectory.completions] == ["cancelled", "complete"]
    assert [c.trainable for c in trajectory.completions] == [False, True]
    assert len(trajectory.histories) == 1
    assert trajectory.status == "complete"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_call_that_ends_after_its_rollout(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """A call that its rollout did not wait for is counted, and is in no trajectory."""
    reply = Reply("late", delay=0.2)
    server = clients.serve(lambda body: reply if body["model"] == "late" else "in time")
    client = clients.asynchronous(server)
    async with rollout("first"):
        task = asyncio.ensure_future(chat(client, model="late", stream=stream))
        await chat(client)
    async with rollout("second"):
        await chat(client)
        await task
    first, second = replays(recording)
    assert [said(c) for c in first.completions] == ["in time"]
    assert [said(c) for c in second.completions] == ["in time"]
    assert first.warnings == [
        "1 model calls had not ended when the rollout did; they are not part of it"
    ]
    assert second.warnings == []
    late = [span for span in exchange_spans(recording) if attribute(span, "late")]
    assert [attribute(span, "status") for span in late] == ["complete"]
    assert len(exchange_spans(recording)) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_call_that_begins_after_its_rollout(
    recording: Recording, clients: Clients, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that a rollout left behind makes calls that are counted, and are in no trajectory."""
    client = clients.asynchronous(clients.serve("Paris"))
    over = asyncio.Event()

    async def leftover() -> None:
        await over.wait()
        await chat(client, stream=stream)

    async with rollout("first"):
        tasks = [asyncio.ensure_future(leftover()) for _ in range(2)]
        await chat(client)
    async with rollout("second"):
        over.set()
        await asyncio.gather(*tasks)
        await chat(client)
    first, second = replays(recording)
    assert [len(first.completions), len(second.completions)] == [1, 1]
    assert first.warnings == [
        "2 model calls began after the rollout had ended; they are not part of it"
    ]
    assert second.warnings == []
    assert len(exchange_spans(recording)) == 4
    assert "has ended, but a model call was made in its context" in caplog.text


async def test_a_stream_that_the_rollout_returns(recording: Recording, clients: Clients) -> None:
    """A stream that is read after its rollout gives the reader everything, and raises nothing."""
    client = clients.asynchronous(clients.serve(SLOW))

    @rollout
    async def agent() -> Any:
        return await open_stream(client)

    chunks = await read(await agent())
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    trajectory = replayed(recording)
    assert trajectory.warnings or [c.status for c in trajectory.completions] == ["abandoned"]
    assert len(exchange_spans(recording)) == 1


@BOTH
async def test_the_live_trajectory_has_a_call_as_soon_as_it_has_ended(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """Inside the rollout, completions are there when the call returns or the stream is read."""

    async def script(client: Any) -> None:
        with rollout("agent") as live:
            assert live.completions == []
            reply = await chat(client)
            assert [c.id for c in live.completions] == [reply.id]
            stream = await open_stream(client)
            await read(stream, 1)
            assert len(live.completions) == 1
            chunks = await read(stream)
            assert [c.id for c in live.completions] == [reply.id, chunks[-1].id]

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    assert replayed(recording).warnings == []


@pytest.mark.slow
async def test_many_concurrent_calls_end_once_each(recording: Recording, clients: Clients) -> None:
    """Calls that end in every way at once leave one exchange span each, with the right status."""
    replies = {
        "complete": Reply("ok"),
        "error": Reply(TEXT, cut_after=2),
        "cancelled": Reply("slow", delay=5),
        "abandoned": SLOW,
    }
    client = clients.asynchronous(clients.serve(lambda body: replies[body["model"]]))

    async def call(status: str) -> None:
        if status == "abandoned":
            create = client.chat.completions.create
            stream = await create(model=status, messages=ASK, stream=True)
            await read(stream, 2)
            await stream.close()
        elif status == "cancelled":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(chat(client, model=status), 0.3)
        else:
            with contextlib.suppress(Exception):
                await chat(client, model=status, stream=status == "error")

    async with rollout("agent"):
        await asyncio.gather(*(call(status) for status in list(replies) * 5))
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert {c.request_model: c.status for c in trajectory.completions} == {s: s for s in replies}
    assert len(exchange_spans(recording)) == 20


@pytest.mark.parametrize("gathered", [False, True], ids=["with", "gathered"])
@pytest.mark.not_replayed("a trajectory must not be held")
async def test_a_pooled_connection_holds_no_trajectory(
    recording: Recording, clients: Clients, gathered: bool
) -> None:
    """A connection keeps the context it was opened in; the trajectory is freed all the same."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        await client.chat.completions.create(model="m", messages=ASK)

    freed = []
    for _ in range(2):
        if gathered:
            trajectory = await gather_trajectory(agent())
        else:
            with rollout("agent") as trajectory:
                await client.chat.completions.create(model="m", messages=ASK)
        freed.append(weakref.ref(trajectory))
        del trajectory
    recording.exporter.clear()
    await collect_garbage()
    assert [ref() for ref in freed] == [None, None]
