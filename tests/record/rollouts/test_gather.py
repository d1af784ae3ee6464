"""`gather_trajectory`: the coroutine runs as it would, and its one trajectory comes back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    NotARolloutError,
    NotRecordedError,
    Trajectory,
    gather_trajectory,
    get_current_trajectory,
    reconstruct,
    rollout,
)
from otel_rollout.testing import Reply
from tests.kit.recording import Clients, Recording


async def ask(client: openai.AsyncOpenAI, text: str) -> str:
    message: Any = {"role": "user", "content": text}
    completion = await client.chat.completions.create(model="m", messages=[message])
    return completion.choices[0].message.content or ""


@rollout
async def agent(client: openai.AsyncOpenAI, text: str = "hi") -> str:
    return await ask(client, text)


def texts(trajectory: Trajectory) -> list[list[str]]:
    return [[message["content"] for message in h.messages()] for h in trajectory.histories]


async def test_the_sealed_trajectory_comes_back(recording: Recording, clients: Clients):
    """What comes back is sealed, whole, and the object that the exporter got."""
    trajectory = await gather_trajectory(agent(clients.asynchronous(clients.serve())))
    assert trajectory is recording.trajectory
    assert trajectory.sealed
    assert (trajectory.name, trajectory.status) == ("agent", "complete")
    assert trajectory.output == "You said: hi"
    assert texts(trajectory) == [["hi", "You said: hi"]]
    assert trajectory.warnings == []


async def test_it_is_the_trajectory_that_the_agent_saw(recording: Recording):
    """The live trajectory inside and the one that comes back are one object."""
    seen: list[Trajectory] = []

    @rollout
    async def watching() -> None:
        seen.append(get_current_trajectory())
        seen[0].reward = 0.5

    trajectory = await gather_trajectory(watching())
    assert seen == [trajectory]
    assert seen[0] is trajectory
    assert trajectory.reward == 0.5


async def test_options_override_the_decorators(recording: Recording):
    """Options of the call win over those of the decorator; metadata of both is kept."""

    @rollout(name="a", task_id="t", group_id="g", sample_index=1, metadata={"x": 1, "y": 1})
    async def decorated() -> None:
        pass

    trajectory = await gather_trajectory(
        decorated(), task_id=9, sample_index=0, policy_version=3, metadata={"y": 2}, trainable=False
    )
    assert (trajectory.name, trajectory.task_id, trajectory.group_id) == ("a", "9", "g")
    assert (trajectory.sample_index, trajectory.policy_version) == (0, 3)
    assert trajectory.metadata == {"x": 1, "y": 2}
    assert trajectory.trainable is False
    assert dict(recording.spans[0].attributes or {})["rollout.task_id"] == "9"
    again = await gather_trajectory(decorated(), name="b", group_id="h")
    assert (again.name, again.task_id, again.group_id) == ("b", "t", "h")
    assert recording.spans[1].name == "invoke_agent b"


async def test_trainable_can_be_switched_back_on(recording: Recording):
    """`trainable=True` of the call wins over `trainable=False` of the decorator."""

    @rollout(trainable=False)
    async def decorated() -> None:
        pass

    assert (await gather_trajectory(decorated(), trainable=True)).trainable is True


@pytest.mark.parametrize("options", [{"task_id": 1.5}, {"tsak_id": 1}])
async def test_wrong_options_are_refused(recording: Recording, options: dict[str, Any]):
    """A wrong option is the error that `@rollout` gives, and the coroutine is closed unrun."""
    ran = list[int]()

    @rollout
    async def decorated() -> None:
        ran.append(1)

    with pytest.raises(ConfigurationError, match="task_id"):
        await gather_trajectory(decorated(), **options)
    gc.collect()  # a coroutine that was left would warn here
    assert ran == []
    assert recording.trajectories == ()


async def plain() -> None:
    pass


async def test_a_task_is_refused(recording: Recording):
    """A Task runs in a context of its own already: the error says what to pass."""

    @rollout
    async def decorated() -> None:
        pass

    wrong: Any = asyncio.ensure_future(decorated())
    with pytest.raises(NotARolloutError, match=r"got the Task .*pass the coroutine itself"):
        await gather_trajectory(wrong)
    await wrong
    future: Any = asyncio.get_running_loop().create_future()
    with pytest.raises(NotARolloutError, match=r"got the Future .*pass the coroutine itself"):
        await gather_trajectory(future)


async def test_an_undecorated_coroutine_is_refused(recording: Recording):
    """A coroutine of a plain function is closed and refused, with both ways out."""
    with pytest.raises(NotARolloutError, match=r"'plain' is not decorated with @rollout") as caught:
        await gather_trajectory(plain())
    assert "async with rollout(" in str(caught.value)
    gc.collect()

    @functools.wraps(plain)
    async def wrapped() -> None:
        await rollout(plain)()

    with pytest.raises(NotARolloutError, match="outermost, above other decorators"):
        await gather_trajectory(wrapped())


async def test_what_is_no_coroutine_is_refused(recording: Recording):
    """A future of a pool and any other thing are refused."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    things: list[Any] = [None, "x", future]
    for thing in things:
        with pytest.raises(NotARolloutError, match="expected the coroutine of a function"):
            await gather_trajectory(thing)


async def test_every_way_to_make_a_coroutine(recording: Recording):
    """Methods, class methods, partials and callable objects can be gathered."""

    class Agent:
        @rollout
        async def method(self, x: int) -> int:
            return x

        @rollout
        @classmethod
        async def of_class(cls, x: int) -> int:
            return x

        @rollout
        @staticmethod
        async def static(x: int) -> int:
            return x

        async def __call__(self, x: int) -> int:
            return x

    made: list[Callable[[int], Coroutine[Any, Any, int]]] = [
        Agent().method,
        Agent.of_class,
        Agent.static,
        rollout(Agent()),
        functools.partial(Agent().method),
        rollout(functools.partial(plain_number)),
    ]
    for number, function in enumerate(made):
        trajectory = await gather_trajectory(function(number), task_id=number)
        assert (trajectory.output, trajectory.task_id) == (number, str(number))


async def plain_number(x: int) -> int:
    return x


async def test_a_plain_function_that_hands_on_a_coroutine(recording: Recording):
    """`@rollout` above a decorator whose wrapper is no coroutine function can be gathered too."""

    @rollout(task_id="t")
    def handing_on(x: int) -> Coroutine[Any, Any, int]:
        return plain_number(x)

    assert await handing_on(1) == 1
    trajectory = await gather_trajectory(handing_on(2))
    assert (trajectory.output, trajectory.task_id) == (2, "t")


async def test_options_of_a_run_that_has_begun(recording: Recording):
    """Options for a rollout that its call began already are taken over, on the span too."""

    @rollout
    def handing_on(x: int) -> Coroutine[Any, Any, int]:
        return plain_number(x)

    trajectory = await gather_trajectory(handing_on(2), name="n", task_id="t", metadata={"a": 1})
    assert (trajectory.name, trajectory.task_id, trajectory.metadata["a"]) == ("n", "t", 1)
    (span,) = recording.spans
    assert span.name == "invoke_agent n"
    assert reconstruct(recording.spans) == [trajectory]


class BrokenError(Exception):
    pass


async def test_an_exception_passes_and_the_trajectory_is_exported(
    recording: Recording, clients: Clients
):
    """The same exception arrives; the partial trajectory, with the error, is at the exporter."""
    client = clients.asynchronous(clients.serve())
    error = BrokenError("went wrong")

    @rollout
    async def failing() -> None:
        await ask(client, "a")
        raise error

    with pytest.raises(BrokenError) as caught:
        await gather_trajectory(failing(), task_id="t")
    assert caught.value is error
    assert error.__context__ is None
    trajectory = recording.trajectory
    assert (trajectory.status, trajectory.termination_reason) == ("error", "error")
    assert trajectory.error is not None
    assert (trajectory.error["type"], trajectory.error["message"]) == ("BrokenError", "went wrong")
    assert trajectory.task_id == "t"
    assert texts(trajectory) == [["a", "You said: a"]]
    assert trajectory.output is None


async def test_raise_errors_false_returns_the_trajectory(recording: Recording, clients: Clients):
    """With `raise_errors=False` a failed run is a trajectory that says so."""
    client = clients.asynchronous(clients.serve(Reply("x", id="r")))

    @rollout
    async def failing() -> None:
        await ask(client, "a")
        raise BrokenError("went wrong")

    trajectory = await gather_trajectory(failing(), raise_errors=False)
    assert trajectory is recording.trajectory
    assert trajectory.status == "error"
    assert trajectory.error is not None
    assert trajectory.error["type"] == "BrokenError"
    assert [c.id for c in trajectory.completions] == ["r"]


@pytest.mark.parametrize("raise_errors", [True, False])
async def test_a_cancelled_run_is_exported(
    recording: Recording, clients: Clients, raise_errors: bool
):
    """Cancelling the caller cancels the run and passes; what was said until then is exported."""
    client = clients.asynchronous(clients.serve(["first", Reply("slow", delay=30)]))
    asked = asyncio.Event()

    @rollout
    async def slow() -> None:
        await ask(client, "a")
        asked.set()
        await ask(client, "b")

    async def gather() -> Trajectory:
        return await gather_trajectory(slow(), raise_errors=raise_errors)

    task = asyncio.ensure_future(gather())
    await asked.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trajectory = recording.trajectory
    assert (trajectory.status, trajectory.termination_reason) == ("cancelled", "cancelled")
    assert [c.status for c in trajectory.completions] == ["complete", "cancelled"]
    assert texts(trajectory) == [["a", "first"]]


@pytest.mark.parametrize("raise_errors", [True, False])
async def test_a_callers_timeout_is_exported(
    recording: Recording, clients: Clients, raise_errors: bool
):
    """`asyncio.wait_for` around it times out as ever, which the partial trajectory says."""
    client = clients.asynchronous(clients.serve(Reply("slow", delay=30)))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(gather_trajectory(agent(client), raise_errors=raise_errors), 0.2)
    trajectory = recording.trajectory
    assert (trajectory.status, trajectory.termination_reason) == ("error", "timeout")
    assert [c.status for c in trajectory.completions] == ["cancelled"]


@pytest.mark.parametrize("where", ["asyncio", "builtin", "client"])
async def test_a_timeout_inside_is_the_reason(recording: Recording, clients: Clients, where: str):
    """A timeout that the agent raises is why it ended: asyncio's, Python's or the client's."""
    server = clients.serve(Reply("slow", delay=30))
    client = clients.asynchronous(server, timeout=0.2 if where == "client" else 60)

    @rollout
    async def slow() -> None:
        if where == "builtin":
            raise TimeoutError("too slow")
        await asyncio.wait_for(ask(client, "a"), 0.2 if where == "asyncio" else 60)

    trajectory = await gather_trajectory(slow(), raise_errors=False)
    assert (trajectory.status, trajectory.termination_reason) == ("error", "timeout")
    with pytest.raises((asyncio.TimeoutError, TimeoutError, openai.APITimeoutError)):
        await gather_trajectory(slow())


async def test_not_configured():
    """Without an SDK nothing can come back: the error names `configure`, and nothing has run."""
    ran = list[int]()

    @rollout
    async def decorated() -> None:
        ran.append(1)

    with pytest.raises(NotRecordedError, match=r"Call\s+otel_rollout.configure\(\)"):
        await gather_trajectory(decorated())
    gc.collect()
    assert ran == []


async def test_disabled(monkeypatch: pytest.MonkeyPatch):
    """With OTEL_SDK_DISABLED the error names the variable."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    otel_rollout.configure("x")

    @rollout
    async def decorated() -> None:
        pass

    with pytest.raises(NotRecordedError, match="unset OTEL_SDK_DISABLED"):
        await gather_trajectory(decorated())


async def test_a_provider_without_our_processor(monkeypatch: pytest.MonkeyPatch):
    """An SDK provider alone does not record trajectories; the error names the processor."""
    from opentelemetry import trace

    trace.set_tracer_provider(TracerProvider())

    @rollout
    async def decorated() -> None:
        pass

    with pytest.raises(NotRecordedError, match="no TrajectorySpanProcessor"):
        await gather_trajectory(decorated())


async def test_many_at_once(recording: Recording, clients: Clients):
    """A hundred gathers at once give each its own trajectory."""
    client = clients.asynchronous(clients.serve())
    gathered = await asyncio.gather(
        *(
            gather_trajectory(agent(client, f"text {n}"), group_id="g", sample_index=n)
            for n in range(100)
        )
    )
    for number, trajectory in enumerate(gathered):
        assert trajectory.sample_index == number
        assert texts(trajectory) == [[f"text {number}", f"You said: text {number}"]]
    assert {t.id for t in gathered} == {t.id for t in recording.trajectories}


async def test_nested_rollouts_do_not_steal_it(recording: Recording, clients: Clients):
    """Rollouts and gathers inside the gathered one, and after it, keep to themselves."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def outer() -> str:
        await agent(client, "plain")
        inner = await gather_trajectory(agent(client, "gathered"), task_id="inner")
        assert texts(inner) == [["gathered", "You said: gathered"]]
        async with rollout("scope"):
            await ask(client, "scope")
        await ask(client, "outer")
        return inner.id

    trajectory = await gather_trajectory(outer(), task_id="outer")
    assert (trajectory.name, trajectory.task_id) == ("outer", "outer")
    assert texts(trajectory) == [["outer", "You said: outer"]]
    by_name = {t.id: t for t in recording.trajectories}
    assert by_name[str(trajectory.output)].task_id == "inner"
    others = [t for t in recording.trajectories if t is not trajectory]
    assert [t.parent_id for t in others] == [trajectory.id] * 3
    assert [t.task_id for t in others] == ["outer", "inner", "outer"]
    await agent(client, "afterwards")
    assert recording.trajectories[-1].parent_id is None


async def test_context_is_as_before(recording: Recording):
    """A gather leaves no rollout behind, whether it returned or raised."""

    @rollout
    async def failing() -> None:
        raise BrokenError

    async with rollout("around") as around:
        with pytest.raises(BrokenError):
            await gather_trajectory(failing())
        assert get_current_trajectory() is around
        async with rollout("next"):
            pass
    failed, following, _ = recording.trajectories
    assert failed.parent_id == following.parent_id == around.id
