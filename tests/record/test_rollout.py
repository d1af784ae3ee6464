"""Rollouts as users write them: nothing about their function changes, and no two of them mix."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import random
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    InMemoryTrajectoryExporter,
    NoActiveRolloutError,
    NotARolloutError,
    Trajectory,
    TrajectorySealedError,
    UnknownCompletionError,
    get_current_trajectory,
    get_history,
    no_capture,
    reconstruct,
    rollout,
)
from otel_rollout.testing import Reply, ToolCall

if TYPE_CHECKING:
    from tests.conftest import Clients, Recording


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=list(messages), **options)


async def ask_async(client: openai.AsyncOpenAI, *messages: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=list(messages))


def contents(trajectory: Trajectory) -> list[list[str]]:
    """The texts of each history."""
    return [[message["content"] for message in h.messages()] for h in trajectory.histories]


def assert_replays(recording: Recording) -> None:
    """Every trajectory is what its spans, in any order and some of them twice, rebuild."""
    spans = list(recording.spans)
    spans += random.Random(1).sample(spans, len(spans) // 2)
    for seed in range(3):
        random.Random(seed).shuffle(spans)
        replayed = {trajectory.id: trajectory for trajectory in reconstruct(spans)}
        assert replayed.keys() == {trajectory.id for trajectory in recording.trajectories}
        for trajectory in recording.trajectories:
            assert replayed[trajectory.id].to_dict() == trajectory.to_dict()


# --- what is decorated stays what it was


class Value:
    """Something that is not JSON and has an identity."""


async def documented(first: int, /, second: str = "x", *, third: bool = True) -> Value:
    """What it does."""
    return Value()


@pytest.mark.parametrize("decorate", [rollout, rollout(), rollout("named"), rollout(task_id=1)])
def test_a_decorated_function_keeps_its_face(decorate: Callable[[Any], Any]):
    """Name, module, docstring, signature and being a coroutine function do not change."""
    decorated = decorate(documented)
    assert (decorated.__name__, decorated.__qualname__) == ("documented", "documented")
    assert (decorated.__module__, decorated.__doc__) == (__name__, "What it does.")
    assert inspect.signature(decorated) == inspect.signature(documented)
    assert inspect.iscoroutinefunction(decorated)
    assert decorated.__wrapped__ is documented


def test_a_sync_function_returns_the_very_object(recording: Recording):
    """The value comes back as the object it is, and one that is no JSON is no output."""
    value = Value()

    @rollout
    def agent() -> Value:
        return value

    assert agent() is value
    assert not inspect.iscoroutinefunction(agent)
    trajectory = recording.trajectory
    assert (trajectory.name, trajectory.status, trajectory.output) == ("agent", "complete", None)
    assert trajectory.warnings == []


async def test_an_async_function_returns_the_very_object(recording: Recording):
    """The awaited value is the same object; JSON is also the trajectory's output."""
    value = {"answer": [1, None, "é"]}

    @rollout(name="solver")
    async def agent() -> Any:
        return value

    assert await agent() is value
    assert recording.trajectory.name == "solver"
    assert recording.trajectory.output == value
    assert recording.trajectory.output is not value


def test_every_kind_of_callable(recording: Recording):
    """Methods, static and class methods, callable objects and partials run as rollouts."""

    class Agent:
        @rollout
        def method(self, x: int) -> tuple[Any, int]:
            return self, x

        @rollout
        @staticmethod
        def static(x: int) -> int:
            return x

        @staticmethod
        @rollout
        def static_inside(x: int) -> int:
            return x

        @rollout(name="of-class")
        @classmethod
        def of_class(cls, x: int) -> tuple[Any, int]:
            return cls, x

        def __call__(self, x: int) -> int:
            return x

    agent = Agent()
    assert agent.method(1) == (agent, 1)
    assert agent.static(2) == Agent.static(2) == 2
    assert agent.static_inside(3) == 3
    assert agent.of_class(4) == Agent.of_class(4) == (Agent, 4)
    assert rollout(agent)(5) == 5
    assert rollout(functools.partial(agent.static_inside, 6))() == 6
    names = [trajectory.name for trajectory in recording.trajectories]
    assert names == [
        "method",
        *["static"] * 2,
        "static_inside",
        *["of-class"] * 2,
        "Agent",
        "static_inside",
        "partial",
    ]


async def test_async_callables(recording: Recording):
    """An object with an async `__call__` and a plain function that hands on a coroutine run too."""

    class Agent:
        async def __call__(self, text: str) -> str:
            await asyncio.sleep(0)
            return get_current_trajectory().id + text

    async def inner(text: str) -> str:
        await asyncio.sleep(0)
        return get_current_trajectory().id + text

    @rollout
    def outer(text: str) -> Any:
        return inner(text)

    assert (await rollout(Agent())("!")) == recording.trajectories[0].id + "!"
    assert (await outer("?")) == recording.trajectories[1].id + "?"
    assert [t.name for t in recording.trajectories] == ["Agent", "outer"]
    assert [t.output for t in recording.trajectories] == [
        recording.trajectories[0].id + "!",
        recording.trajectories[1].id + "?",
    ]
    with pytest.raises(NoActiveRolloutError):
        get_current_trajectory()


class BrokenError(Exception):
    """An exception of the user's, with state."""


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_passes_unmodified(recording: Recording, asynchronous: bool):
    """The same exception object arrives, with its text, notes, cause and innermost frame."""
    cause = KeyError("cause")
    error = BrokenError("went wrong", 7)
    error.__cause__ = cause

    def fail() -> None:
        raise error

    async def fail_async() -> None:
        fail()

    async def call() -> None:
        if asynchronous:
            await rollout(fail_async)()
        rollout(fail)()

    with pytest.raises(BrokenError) as caught:
        await call()
    assert caught.value is error
    assert error.args == ("went wrong", 7)
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert not getattr(error, "__notes__", [])
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "fail"
    assert sum("otel_rollout" in frame.filename for frame in frames) == 1  # the wrapper itself
    trajectory = recording.trajectory
    assert (trajectory.status, trajectory.termination_reason) == ("error", "error")
    assert trajectory.error is not None
    assert trajectory.error["type"] == "BrokenError"
    assert trajectory.error["message"] == "('went wrong', 7)"
    assert "in fail" in trajectory.error["traceback"]
    assert trajectory.warnings == []
    assert_replays(recording)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_is_no_error_ends_a_rollout_as_cancelled(
    recording: Recording, kind: type[BaseException]
):
    """An interrupt passes, and the trajectory says that it was cancelled."""

    @rollout
    def agent() -> None:
        raise kind()

    with pytest.raises(kind):
        agent()
    assert (recording.trajectory.status, recording.trajectory.termination_reason) == (
        "cancelled",
        "cancelled",
    )


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class CallableGenerator:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("function", [generator, async_generator, CallableGenerator()])
@pytest.mark.parametrize("decorate", [rollout, rollout("x")])
def test_generators_are_refused(function: Any, decorate: Callable[[Any], Any]):
    """A generator function is refused, with what to do instead."""
    with pytest.raises(NotARolloutError, match="is a generator function") as caught:
        decorate(function)
    assert "with rollout(" in str(caught.value)
    assert "decorate the function that consumes it" in str(caught.value)


@pytest.mark.parametrize("thing", [Value, 3, None.__class__, ["a"]])
def test_what_is_no_function_is_refused(thing: Any):
    """A class, a number or a list is refused, and named in the error."""
    with pytest.raises(NotARolloutError, match="expected a function, got") as caught:
        rollout(thing)
    assert repr(thing) in str(caught.value)


# --- options


def test_options_are_on_the_trajectory_and_the_span(recording: Recording):
    """Every option reaches the trajectory, ids as text, and the rollout span."""

    @rollout(
        name="solver",
        task_id=7,
        group_id="g",
        sample_index=3,
        policy_version=12,
        metadata={"split": "train"},
        trainable=False,
    )
    def agent() -> None:
        get_current_trajectory().metadata["more"] = 1

    agent()
    trajectory = recording.trajectory
    assert (trajectory.name, trajectory.task_id, trajectory.group_id) == ("solver", "7", "g")
    assert (trajectory.sample_index, trajectory.policy_version) == (3, 12)
    assert trajectory.metadata == {"split": "train", "more": 1}
    assert trajectory.trainable is False
    (span,) = recording.spans
    assert span.name == "invoke_agent solver"
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "invoke_agent"
    assert attributes["gen_ai.agent.name"] == "solver"
    assert attributes["rollout.id"] == trajectory.id
    assert attributes["rollout.task_id"] == "7"
    assert attributes["rollout.group_id"] == "g"
    assert attributes["rollout.sample_index"] == 3
    assert attributes["rollout.policy_version"] == 12
    assert json.loads(str(attributes["rollout.metadata"])) == {"split": "train", "more": 1}
    assert attributes["rollout.exchange_count"] == 0
    assert_replays(recording)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task_id": 1.5}, r"rollout\(task_id=...\): expected str or int, got 1.5"),
        ({"group_id": ["g"]}, r"rollout\(group_id=...\): expected str or int, got \['g'\]"),
        ({"sample_index": "0"}, r"rollout\(sample_index=...\): expected int, got '0'"),
        ({"sample_index": True}, r"rollout\(sample_index=...\): expected int, got True"),
        ({"policy_version": 0.1}, r"rollout\(policy_version=...\): expected str or int, got 0.1"),
        ({"metadata": [1]}, r"rollout\(metadata=...\): expected Mapping, got \[1\]"),
        ({"trainable": "no"}, r"rollout\(trainable=...\): expected True or False, got 'no'"),
        ({"tsak_id": 1}, r"expected the options name, task_id, .*, got tsak_id"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str):
    """A wrong option is refused where it is written, with what was expected."""
    with pytest.raises(ConfigurationError, match=text):
        rollout(**options)


def test_metadata_that_is_no_json_is_refused():
    """Metadata that no span could carry is refused at once."""
    with pytest.raises(ValueError, match=r"rollout\(metadata=...\).*expected a JSON value"):
        rollout(metadata={"x": object()})


def test_a_function_with_options_is_refused():
    """`rollout(function, option=...)` is not one of the two spellings, and says which are."""
    call: Any = rollout
    with pytest.raises(ConfigurationError, match=r"expected @rollout or @rollout\(option=...\)"):
        call(generator, task_id=1)


# --- scopes


def test_a_scope_is_a_rollout(recording: Recording, clients: Clients):
    """A `with` body is one rollout, with options of its own."""
    client = clients.sync(clients.serve())
    with rollout("solver", task_id="t", group_id=5) as trajectory:
        assert get_current_trajectory() is trajectory
        assert (trajectory.status, trajectory.sealed) == ("running", False)
        ask(client, user("a"))
    assert recording.trajectory is trajectory
    assert (trajectory.name, trajectory.task_id, trajectory.group_id) == ("solver", "t", "5")
    assert contents(trajectory) == [["a", "You said: a"]]
    assert trajectory.status == "complete"
    assert_replays(recording)


async def test_an_async_scope_is_a_rollout(recording: Recording, clients: Clients):
    """`async with` does what `with` does, and passes exceptions on."""
    client = clients.asynchronous(clients.serve())
    error = BrokenError()

    async def run() -> None:
        async with rollout("solver"):
            await ask_async(client, user("a"))
            raise error

    with pytest.raises(BrokenError) as caught:
        await run()
    assert caught.value is error
    trajectory = recording.trajectory
    assert contents(trajectory) == [["a", "You said: a"]]
    assert trajectory.status == "error"


def test_a_scope_without_a_name(recording: Recording):
    """A scope that is not named is called `rollout`."""
    with rollout() as trajectory:
        pass
    assert trajectory.name == "rollout"
    assert recording.spans[0].name == "invoke_agent rollout"


def test_an_open_scope_cannot_be_entered_again(recording: Recording):
    """Entering a scope that is open is refused and harms nothing; afterwards it may be reused."""
    scope = rollout("x")
    with scope as first:
        with pytest.raises(NotARolloutError, match="entered already"), scope:
            pass
        assert get_current_trajectory() is first
    with scope as second:
        assert get_current_trajectory() is second
    assert [t.id for t in recording.trajectories] == [first.id, second.id]
    assert [t.status for t in recording.trajectories] == ["complete", "complete"]


# --- which rollout a call belongs to


def test_nested_rollouts_have_their_own_trajectories(recording: Recording, clients: Clients):
    """A rollout inside another is a trajectory of its own; neither has the other's calls."""
    client = clients.sync(clients.serve())

    @rollout
    def inner() -> None:
        ask(client, user("inner"))

    @rollout
    def outer() -> None:
        ask(client, user("before"))
        inner()
        with rollout("scope"):
            ask(client, user("scope"))
        ask(client, user("after"))

    outer()
    by_name = {trajectory.name: trajectory for trajectory in recording.trajectories}
    assert [t.name for t in recording.trajectories] == ["inner", "scope", "outer"]
    assert contents(by_name["inner"]) == [["inner", "You said: inner"]]
    assert contents(by_name["scope"]) == [["scope", "You said: scope"]]
    assert contents(by_name["outer"]) == [
        ["before", "You said: before"],
        ["after", "You said: after"],
    ]
    assert by_name["outer"].parent_id is None
    assert by_name["inner"].parent_id == by_name["scope"].parent_id == by_name["outer"].id
    assert len({t.trace_id for t in recording.trajectories}) == 1
    assert all(t.warnings == [] for t in recording.trajectories)
    assert_replays(recording)


def test_calls_outside_of_a_rollout_are_nobodys(recording: Recording, clients: Clients):
    """A call before, after, or under `no_capture` is in no trajectory, but still on the trace."""
    client = clients.sync(clients.serve())
    ask(client, user("before"))
    with rollout("x") as trajectory:
        with no_capture():
            ask(client, user("judge"))
            assert get_current_trajectory() is trajectory
            with rollout("judge") as judged:
                ask(client, user("judge's own"))
        ask(client, user("in"))
    ask(client, user("after"))
    assert contents(trajectory) == [["in", "You said: in"]]
    assert contents(judged) == [["judge's own", "You said: judge's own"]]
    assert len(recording.spans_named("exchange")) == 2
    assert len(recording.spans_named("openai.chat")) == 5
    assert trajectory.warnings == []


AGENTS = 200


def expected(text: str) -> list[list[str]]:
    turns = [f"{text}/{turn}" for turn in range(3)]
    return [[word for turn in turns for word in (turn, f"You said: {turn}")]]


def check_agents(recording: Recording, ids: dict[str, str]) -> None:
    assert len(recording.trajectories) == len(ids) == AGENTS
    for trajectory in recording.trajectories:
        text = trajectory.task_id or ""
        assert ids[text] == trajectory.id
        assert contents(trajectory) == expected(text)
        assert [len(c.token_ids or ()) for c in trajectory.completions] == [
            len(f"You said: {text}/{turn}") + 1 for turn in range(3)
        ]
        assert trajectory.warnings == []
    assert_replays(recording)


async def test_many_rollouts_in_one_event_loop(recording: Recording, clients: Clients):
    """200 agents at once, three calls each, and each trajectory has exactly its own messages."""
    client = clients.asynchronous(clients.serve())
    ids: dict[str, str] = {}

    async def agent(text: str) -> None:
        async with rollout("agent", task_id=text) as trajectory:
            messages = list[Any]()
            for turn in range(3):
                messages.append(user(f"{text}/{turn}"))
                completion = await ask_async(client, *messages)
                messages.append(completion.choices[0].message.model_dump(exclude_none=True))
                assert get_current_trajectory() is trajectory
            ids[text] = trajectory.id

    await asyncio.gather(*(agent(f"agent-{number}") for number in range(AGENTS)))
    check_agents(recording, ids)


def test_many_rollouts_in_a_thread_pool(recording: Recording, clients: Clients):
    """200 agents over 32 threads, half of them calling from threads of their own, never mix."""
    client = clients.sync(clients.serve())
    ids: dict[str, str] = {}

    def agent(number: int) -> None:
        text = f"agent-{number}"
        with rollout("agent", task_id=text) as trajectory:
            messages = list[Any]()
            for turn in range(3):
                messages.append(user(f"{text}/{turn}"))
                replies = list[Any]()

                def call(messages: Any = tuple(messages), replies: Any = replies) -> None:
                    replies.append(ask(client, *messages))

                if number % 2:
                    thread = threading.Thread(target=call)
                    thread.start()
                    thread.join()
                else:
                    call()
                messages.append(replies[0].choices[0].message.model_dump(exclude_none=True))
            ids[text] = trajectory.id

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(agent, range(AGENTS)))
    check_agents(recording, ids)


async def test_threads_keep_the_rollout(recording: Recording, clients: Clients):
    """`to_thread`, `run_in_executor`, a pool and a timer call within the rollout around them."""
    client = clients.sync(clients.serve())

    def call(text: str) -> None:
        ask(client, user(text))

    with ThreadPoolExecutor(2) as pool:  # started before any rollout
        pool.submit(str).result()
        async with rollout("agent") as trajectory:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(call, "to_thread")
            await loop.run_in_executor(None, call, "default executor")
            await loop.run_in_executor(pool, call, "executor")
            await asyncio.wrap_future(pool.submit(call, "submit"))
            timer = threading.Timer(0, call, ["timer"])
            timer.start()
            await asyncio.to_thread(timer.join)
        pool.submit(call, "outside").result()
    said = [texts[0] for texts in contents(trajectory)]
    assert said == ["to_thread", "default executor", "executor", "submit", "timer"]
    assert trajectory.warnings == []


async def test_a_task_that_outlives_its_rollout_is_said(recording: Recording, clients: Clients):
    """Calls that end or begin after the rollout are no part of it, and the trajectory says so."""
    client = clients.asynchronous(clients.serve(lambda _: Reply("late", delay=0.2)))

    async def background() -> None:
        await ask_async(client, user("still open"))
        await ask_async(client, user("begun after"))

    @rollout
    async def agent() -> asyncio.Task[None]:
        task = asyncio.ensure_future(background())
        await asyncio.sleep(0.05)
        return task

    await (await agent())
    assert recording.trajectory.completions == []
    assert recording.trajectory.warnings == [
        "1 model calls had not ended when the rollout did; they are not part of it",
        "1 model calls began after the rollout had ended; they are not part of it",
    ]
    assert_replays(recording)


# --- the live trajectory


def test_there_is_no_trajectory_outside(recording: Recording):
    """Outside a rollout the current trajectory is an error that says how to open one."""
    for call in (get_current_trajectory, lambda: get_history("x")):
        with pytest.raises(NoActiveRolloutError, match=r"decorate .* with @rollout"):
            call()
    with rollout("x"):
        get_current_trajectory()
    with pytest.raises(NoActiveRolloutError):
        get_current_trajectory()


def test_a_live_trajectory_shows_what_has_come(recording: Recording, clients: Clients):
    """Completions, histories and messages are there as soon as the call has returned."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        assert (trajectory.completions, trajectory.histories, trajectory.messages()) == ([], [], [])
        ask(client, user("a"))
        assert [c.message and c.message["content"] for c in trajectory.completions] == [
            "You said: a"
        ]
        ask(client, *trajectory.messages(), user("b"))
        ask(client, user("other"))
        assert contents(trajectory) == [
            ["a", "You said: a", "b", "You said: b"],
            ["other", "You said: other"],
        ]
        assert trajectory.completions[0].token_ids == [*b"You said: a", 261]
        assert trajectory.completions[0].trainable
        live = [h.to_list() for h in trajectory.histories]
        live_ids = [c.id for c in trajectory.completions]
    assert [h.to_list() for h in trajectory.histories] == live
    assert [c.id for c in trajectory.completions] == live_ids
    assert_replays(recording)


CALL = Reply(tool_calls=[ToolCall("add", '{"a": 1}', id="call_1")])
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_a_history_is_continued_by_appending(recording: Recording, clients: Clients):
    """`get_history` gives messages ready to send; what is appended and sent is one history."""
    server = clients.serve([CALL, "It is 2."])
    client = clients.sync(server)
    with rollout("x") as trajectory:
        first = ask(client, user("1+1?"))
        history = get_history(first.id)
        assert [m["role"] for m in history.messages()] == ["user", "assistant"]
        history.append(RESULT)
        assert history.messages()[-1] == RESULT
        second = ask(client, *history.messages())
        assert get_history(second.id).messages()[:3] == history.messages()
    (final,) = trajectory.histories
    assert final.messages()[:3] == history.messages()
    assert final.messages()[3]["content"] == "It is 2."
    assert final.completion_ids == [first.id, second.id]
    assert [item.trainable for item in final.items] == [False, True, False, True]
    sent = json.loads(server.exchanges[1].request)["messages"]
    assert sent == history.messages()
    assert trajectory.warnings == []
    assert_replays(recording)


def test_an_appended_message_that_is_not_sent_is_kept(recording: Recording, clients: Clients):
    """A tool result after the last call is in the history, live, sealed and replayed."""
    client = clients.sync(clients.serve([CALL]))
    with rollout("x") as trajectory:
        first = ask(client, user("1+1?"))
        trajectory.get_history(first.id).append(RESULT)
        assert trajectory.histories[0].messages()[-1] == RESULT
        assert get_history(first.id).messages()[-1] == RESULT
    assert trajectory.histories[0].messages()[-1] == RESULT
    (replayed,) = reconstruct(recording.spans)
    assert replayed.messages()[-1] == RESULT
    assert replayed.histories[0].items[-1].completion is None
    assert_replays(recording)


def test_a_history_is_the_callers_own_copy(recording: Recording, clients: Clients):
    """Changing what `messages()` gave changes nothing that was recorded."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        completion = ask(client, user("a"))
        messages = get_history(completion.id).messages()
        messages[0]["content"] = "changed"
        messages.clear()
        assert contents(trajectory) == [["a", "You said: a"]]
    assert contents(trajectory) == [["a", "You said: a"]]


def test_the_history_of_another_choice(recording: Recording, clients: Clients):
    """With n > 1 `choice` tells the completions of one response apart."""
    two = Reply(choices=[Reply("left"), Reply("right")])
    client = clients.sync(clients.serve([two]))
    with rollout("x") as trajectory:
        completion = ask(client, user("a"), n=2)
        assert get_history(completion.id).messages()[-1]["content"] == "left"
        assert get_history(completion.id, 1).messages()[-1]["content"] == "right"
        with pytest.raises(UnknownCompletionError, match="with choice 2"):
            get_history(completion.id, 2)
    assert contents(trajectory) == [["a", "left"], ["a", "right"]]


def test_an_unknown_completion_lists_the_known_ones(recording: Recording, clients: Clients):
    """The error for an id that is not there names those that are."""
    client = clients.sync(clients.serve())
    with rollout("x"):
        with pytest.raises(UnknownCompletionError, match="no call of it has ended yet"):
            get_history("nope")
        first, second = ask(client, user("a")), ask(client, user("b"))
        with pytest.raises(UnknownCompletionError, match="no completion 'nope'") as caught:
            get_history("nope")
    assert f"it has {first.id!r}, {second.id!r}" in str(caught.value)


def test_appending_after_the_end_is_refused(recording: Recording, clients: Clients):
    """A history that was got before or after the end takes no more messages once it is over."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        completion = ask(client, user("a"))
        history = get_history(completion.id)
        with pytest.raises(ValueError, match="expected a JSON value"):
            history.append(object())
    for late in (history, trajectory.get_history(completion.id), trajectory.histories[0]):
        with pytest.raises(TrajectorySealedError, match="append while"):
            late.append(RESULT)
        assert len(late.messages()) == 2


def test_metrics_metadata_and_logs(recording: Recording):
    """What the agent sets while it runs is on the sealed trajectory and on its span."""
    with rollout("x", metadata={"a": 1}) as trajectory:
        trajectory.metrics["turns"] = 3
        trajectory.metrics["gone"] = 1
        del trajectory.metrics["gone"]
        trajectory.metadata["nested"] = {"é": [None, True, (1, 2)]}
        trajectory.log("first")
        trajectory.log("zweite Zeile: \ud800")
    assert trajectory.metrics == {"turns": 3}
    assert trajectory.metadata == {"a": 1, "nested": {"é": [None, True, [1, 2]]}}
    assert trajectory.logs == ["first", "zweite Zeile: \ud800"]
    assert_replays(recording)


def test_metadata_is_checked_when_it_is_set(recording: Recording):
    """A value or name that JSON has no place for is refused at the line that sets it."""
    with rollout("x") as trajectory:
        with pytest.raises(ValueError, match=r"trajectory.metadata\['x'\]: expected a JSON value"):
            trajectory.metadata["x"] = object()
        names: Any = trajectory.metadata
        with pytest.raises(ValueError, match="expected a name"):
            names[3] = 1
        mutable = [1]
        trajectory.metadata["list"] = mutable
        mutable.append(2)
    assert trajectory.metadata == {"list": [1]}


@pytest.mark.parametrize("value", ["good", None, [1], float("nan"), float("inf"), object()])
def test_metrics_are_numbers(recording: Recording, value: Any):
    """A metric that is no finite number is refused at the line that sets it, like a reward."""
    with rollout("x") as trajectory, pytest.raises(ValueError, match=r"metrics\['m'\]"):
        trajectory.metrics["m"] = value
    assert trajectory.metrics == {}


def test_a_sealed_trajectory_takes_no_more(recording: Recording):
    """After the end metrics, metadata and logs are closed, and each error says so."""
    with rollout("x") as trajectory:
        trajectory.metrics["m"] = 1
    assert trajectory.sealed
    attempts: list[Callable[[], object]] = [
        lambda: trajectory.metrics.update(m=2),
        lambda: trajectory.metrics.clear(),
        lambda: trajectory.metadata.update(m=2),
        lambda: trajectory.log("late"),
    ]
    for attempt in attempts:
        with pytest.raises(TrajectorySealedError, match="has ended"):
            attempt()
    assert (trajectory.metrics, trajectory.metadata, trajectory.logs) == ({"m": 1}, {}, [])


# --- where nothing is recorded


def test_without_configure_functions_just_run(clients: Clients):
    """With no SDK at all the agent runs as ever, and nothing is raised."""
    client = clients.sync(clients.serve())

    @rollout(task_id="t")
    def agent() -> Any:
        trajectory = get_current_trajectory()
        trajectory.reward = 1
        trajectory.metrics["m"] = 1
        trajectory.log("x")
        return ask(client, user("a")).choices[0].message.content

    assert agent() == "You said: a"
    with rollout("x") as trajectory:
        trajectory.reward = 0.5
    assert (trajectory.status, trajectory.reward) == ("complete", 0.5)
    assert reconstruct([]) == []


def test_a_disabled_sdk_records_nothing(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """With OTEL_SDK_DISABLED=true the agent runs, and there is no trajectory of it."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure("x", [exporter])
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        assert ask(client, user("a")).choices[0].message.content == "You said: a"
        trajectory.reward = 1
    assert trajectory.completions == []
    assert exporter.get_finished_trajectories() == ()


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, ParentBased(TraceIdRatioBased(0))])
def test_training_does_not_sample(clients: Clients, sampler: Any):
    """What the user's sampler drops is recorded all the same, and no span exporter gets it."""
    simple, batch = InMemorySpanExporter(), InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(simple))
    provider.add_span_processor(BatchSpanProcessor(batch))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client, user("a"))
        with rollout("nested"):
            ask(client, user("b"))
    trajectory.reward = 1
    provider.force_flush()
    nested, outer = exporter.get_finished_trajectories()
    assert outer is trajectory
    assert contents(outer) == [["a", "You said: a"]]
    assert contents(nested) == [["b", "You said: b"]]
    assert outer.completions[0].token_ids == [*b"You said: a", 261]
    assert outer.warnings == nested.warnings == []
    assert simple.get_finished_spans() == batch.get_finished_spans() == ()
    with provider.get_tracer("of the user").start_as_current_span("x") as span:
        assert not span.is_recording()  # our sampler is ours alone
    provider.shutdown()


def test_a_partly_sampled_provider_exports_whole_rollouts(clients: Clients):
    """Of rollouts that the sampler keeps every span is exported, of the others none."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.5)))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve())
    for _ in range(20):
        with rollout("x"):
            ask(client, user("a"))
    held = {trajectory.id: trajectory for trajectory in exporter.get_finished_trajectories()}
    exported = reconstruct(spans.get_finished_spans())
    assert len(held) == 20
    assert 0 < len(exported) < 20
    assert all(trajectory == held[trajectory.id] for trajectory in exported)
    provider.shutdown()


def test_an_error_with_a_lone_surrogate_can_be_exported(recording: Recording):
    """The text of any exception can be encoded: it would take other spans of its batch with it."""
    with contextlib.suppress(ValueError), rollout("x"):
        raise ValueError("half \ud83d of it")
    (span,) = recording.spans
    assert (span.status.description or "").encode() == b"ValueError: half \\ud83d of it"
    assert all(str(value).encode() for value in (span.attributes or {}).values())
    assert (recording.trajectory.error or {})["message"] == "half \\ud83d of it"
