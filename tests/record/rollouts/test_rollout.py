"""Rollouts as users write them: nothing about their function changes, and no two of them mix."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace

from otel_rollout import (
    ConfigurationError,
    NoActiveRolloutError,
    NotARolloutError,
    get_current_trajectory,
    rollout,
)
from otel_rollout import semconv as sc
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.conversations import user
from tests.kit.played import ask, ask_async, assert_replays, contents
from tests.kit.recording import Clients, Recording

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
    assert trajectory.warnings == [NO_CALL.words]


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
    (warning,) = trajectory.warnings
    assert warning == "it made no model call that was captured before it ended as 'error'"
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
    assert "decorate a function that runs it to its end" in str(caught.value)


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
        group_size=4,
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
    assert trajectory.group_size == 4
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
    assert attributes["rollout.group_size"] == 4
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
        ({"group_size": "4"}, r"rollout\(group_size=...\): expected int, got '4'"),
        ({"timeout": 10**400}, r"rollout\(timeout=...\): expected seconds"),
        ({"group_size": 0}, r"rollout\(group_size=...\): expected a number from 1 on, got 0"),
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


def test_what_a_framework_writes_on_the_rollouts_span(recording: Recording, clients: Clients):
    """An attribute of ours that it overwrites is ours again at the end; its own ones stay."""
    client: Any = clients.sync(clients.serve("fine"))
    with rollout("agent") as trajectory:
        span = trace.get_current_span()
        span.set_attributes({sc.GEN_AI_OPERATION_NAME: "chat", "its.own": 1, sc.ROLLOUT_ID: "x"})
        ask(client, user("hi"))
    assert trajectory.warnings == []
    (written,) = [s for s in recording.spans if s.name == "invoke_agent agent"]
    assert written.attributes
    assert written.attributes[sc.GEN_AI_OPERATION_NAME] == "invoke_agent"
    assert written.attributes[sc.ROLLOUT_ID] == trajectory.id
    assert written.attributes["its.own"] == 1
