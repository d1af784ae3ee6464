"""Workflows that are run, nested, stopped: what is held meanwhile, and what is left of them."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import (
    Episode,
    InMemoryTrajectoryExporter,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
    get_current_trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.testing import Raw
from otel_rollout.workflows import reconstruct_episodes, run_workflows
from tests.kit.recording import Clients, Recording
from tests.kit.workflows import ask, rebuilt

ROOT = Path(__file__).parents[2]
ERROR, UNKNOWN = TerminationReason.ERROR, TerminationReason.UNKNOWN


class Plain(Workflow):
    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        return None


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- nested


async def test_a_workflow_inside_a_workflow(recording: Recording, clients: Clients):
    """Each has an episode of its own; no trajectory is in both, and none is lost."""
    client = clients.asynchronous(clients.serve("yes"))

    @rollout
    async def helper(text: str) -> None:
        await ask(client, user(text))

    class Inner(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await ask(client, user("inner"))
            await helper("inner helper")
            return None

    class Outer(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await helper("outer helper")
            episode = await Inner().run_with_termination_handling(task, "inner:0")
            assert [t.name for t in episode.trajectories] == ["helper", "Inner"]
            await ask(client, user("outer"))
            return None

    with rollout("around") as around:
        outer = await Outer().run_with_termination_handling({}, "outer:0")
        assert get_current_trajectory().id == around.id
    assert [t.name for t in outer.trajectories] == ["helper", "Outer"]
    inner, seen = recording.exporter.get_finished_episodes()
    assert (seen, inner.id) == (outer, "inner:0")
    assert inner.trajectories[1].parent_id == outer.trajectories[1].id
    assert outer.trajectories[1].parent_id == around.id
    said = [t.messages()[0]["content"] for e in (inner, outer) for t in e.trajectories]
    assert said == ["inner helper", "inner", "outer helper", "outer"]
    assert around.completions == []
    assert sorted(e.id for e in reconstruct_episodes(recording.spans)) == ["inner:0", "outer:0"]
    assert {t.id for t in reconstruct(recording.spans)} == {t.id for t in recording.trajectories}


# --- endings


async def test_cancelled_while_it_is_judged(recording: Recording, clients: Clients):
    """The episode says how the run had ended, and reaches the exporters."""
    client, judging = clients.asynchronous(clients.serve("yes")), asyncio.Event()

    class Judged(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await ask(client, user("a"))
            raise TerminationEvent(TerminationReason.ENV_DONE)

        async def collect_metrics(self, episode: Episode) -> None:
            judging.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(Judged().run_with_termination_handling({}, "t:0"))
    await judging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    episode = rebuilt(recording)
    assert (episode.id, episode.termination_reason) == ("t:0", TerminationReason.ENV_DONE)
    assert [len(t.completions) for t in episode.trajectories] == [1]


async def test_cancelled_while_a_run_that_timed_out_ends(recording: Recording):
    """A cancellation from outside is never taken for that of the workflow's own clock."""
    ending, may_end = asyncio.Event(), asyncio.Event()

    class Slow(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await may_end.wait()
            return None

    task = asyncio.create_task(Slow(timeout=0.01).run_with_termination_handling({}, "t:0"))
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert rebuilt(recording).termination_reason is UNKNOWN


async def test_a_reset_that_fails_is_an_ending(recording: Recording):
    """The other tasks run; a later one gets the same instance, reset."""

    class Fragile(Plain):
        def reset(self, task: Any = None, uid: str | None = None) -> None:
            super().reset(task, uid)
            if task == "bad":
                raise OSError("no sandbox")

    episodes = await run_workflows(Fragile, ["a", "bad", "b"], n_parallel=1)
    assert [e.termination_reason for e in episodes] == [UNKNOWN, ERROR, UNKNOWN]
    assert episodes[1].info["error"]["error_message"] == "no sandbox"


async def test_a_hook_that_returns_nothing(recording: Recording):
    """An override that changed the episode in place has judged it all the same."""

    class InPlace(Plain):
        def postprocess_episode(self, episode: Any, *args: Any, **kwargs: Any) -> Any:
            super().postprocess_episode(episode, *args, **kwargs)
            episode.info["seen"] = True

    episode = await InPlace().run_with_termination_handling({}, "t:0")
    assert (episode.id, episode.info) == ("t:0", {"seen": True})


@pytest.mark.parametrize("name", ["collect_trajectories", "postprocess_episode"])
async def test_an_episode_comes_whatever_fails(recording: Recording, name: str):
    """What the user overrides may fail; that is said in the episode."""

    def fail(*args: Any) -> Any:
        raise LookupError("broken")

    workflow = Plain()
    setattr(workflow, name, fail)
    episode = await workflow.run_with_termination_handling({}, "t:0")
    assert (episode.id, episode.termination_reason) == ("t:0", ERROR)
    assert episode.info["error"]["error_message"] == "broken"
    rebuilt(recording)


async def test_a_reason_of_another_kind(recording: Recording):
    """By its value, or as text; nothing fails for it."""

    class Ends(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            raise TerminationEvent(task)

    first, second = await run_workflows(Ends, ["timeout", "gave_up"])
    assert first.termination_reason is TerminationReason.TIMEOUT
    assert str(second.termination_reason) == "gave_up"
    for live, read in zip(
        recording.exporter.get_finished_episodes(),
        reconstruct_episodes(recording.spans),
        strict=True,
    ):
        assert read == live


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copy")


async def test_what_cannot_be_recorded_does_no_harm(recording: Recording):
    """Objects that cannot be copied or shown, cycles and lone surrogates: the run goes on."""
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle

    class Odd(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            step = Step(model_response="a", observation=Hostile(), info={"c": cycle})
            self.commit(trajectory=Trajectory(name="odd", steps=[step]))
            return None

    episode = await Odd().run_with_termination_handling({"x": "\ud800", "h": Hostile()}, "t:0")
    assert episode.termination_reason is UNKNOWN
    (read,) = reconstruct_episodes(recording.spans)
    assert read.task == {"x": "\ud800", "h": "<Hostile>"}
    assert read.trajectories[0].steps[0].observation == "<Hostile>"


async def test_secrets_in_errors_are_not_on_the_trace(recording: Recording, clients: Clients):
    """An exception that repeats the client's key is redacted in the episode too."""
    key = "sk-very-secret-key-1234567890"
    refused = Raw(401, json.dumps({"error": {"message": f"wrong key {key}"}}).encode())
    client = clients.asynchronous(clients.serve(refused), api_key=key)

    class Leaks(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await ask(client, user("a"))
            return None

    episode = await Leaks().run_with_termination_handling({}, "t:0")
    assert "wrong key [redacted]" in episode.info["error"]["error_message"]
    assert key not in str(episode.to_dict())
    assert not [span for span in recording.spans if "very-secret" in str(span.attributes)]


async def test_a_reward_of_the_workflow_itself(recording: Recording, clients: Clients):
    """It counts, also where every call is of a rollout inside."""
    client = clients.asynchronous(clients.serve("yes"))

    @rollout
    async def helper() -> None:
        await ask(client, user("a"))

    class Scored(Plain):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await helper()
            record_reward(0.5)
            return None

    episode = await Scored().run_with_termination_handling({}, "t:0")
    assert [(t.name, t.reward) for t in episode.trajectories] == [("helper", None), ("Scored", 0.5)]
    assert (episode.reward, episode.is_correct) == (0.5, True)
    assert len(recording.trajectories) == len(reconstruct(recording.spans)) == 2
    rebuilt(recording)


# --- many


@pytest.mark.slow
async def test_what_is_held_while_many_run():
    """Of thousands of tasks no more than run are there, nor more workflows."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    most = [0, 0, 0]

    class Task:
        def __init__(self) -> None:
            alive.add(self)

    class Light(Plain):
        def __init__(self) -> None:
            super().__init__()
            made.add(self)
            most[2] += 1

        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await asyncio.sleep(0)
            most[0] = max(most[0], len(alive))
            most[1] = max(most[1], len(asyncio.all_tasks()))
            return None

    def tasks() -> Iterator[Task]:
        for _ in range(1500):
            yield Task()

    otel_rollout.configure(exporters=[InMemoryTrajectoryExporter(max_trajectories=1)])
    await run_workflows(Light, tasks(), n_parallel=8, keep_episodes=False)
    # The one before may still be with an idle workflow, and the generator makes the next one.
    assert most[0] <= 2 * 8 + 1
    assert most[1] <= 2 * 8 + 1
    assert most[2] <= 8
    gc.collect()
    assert len(alive) <= 1  # the exporter's
    assert len(made) == 0


async def test_tasks_of_one_id_are_samples_of_it(recording: Recording):
    """A list that repeats its tasks gives no run twice."""
    tasks = [{"id": "a"}, {"id": "b"}, {"id": "a"}]
    episodes = await run_workflows(Plain, tasks, n_samples=2)
    assert [e.id for e in episodes] == ["a:0", "a:1", "b:0", "b:1", "a:2", "a:3"]


INTERRUPTED = """
import asyncio, sys
import otel_rollout
from openai import AsyncOpenAI
from otel_rollout import JsonlTrajectoryExporter, Workflow
from otel_rollout.workflows import run_workflows

class Slow(Workflow):
    async def run(self, task, uid, **kwargs):
        message = {"role": "user", "content": f"task {task}"}
        await self.rollout_engine.chat.completions.create(model="m", messages=[message])
        if task >= 3:
            print("waiting", flush=True)
            await asyncio.Event().wait()

otel_rollout.configure(exporters=[JsonlTrajectoryExporter(sys.argv[1])], instrumentor=None)
try:
    asyncio.run(run_workflows(lambda: Slow(AsyncOpenAI()), range(100), n_parallel=1))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
async def test_an_interrupt_leaves_what_was_finished(clients: Clients, tmp_path: Path):
    """Ctrl-C ends a run of many at once; the file has what had ended, and the one that ran."""
    server = clients.serve("yes")
    path = tmp_path / "trajectories.jsonl"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    variables |= {"PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": server.base_url}
    variables |= {"OPENAI_API_KEY": "none-needed"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(path)],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "waiting\n"
        process.send_signal(signal.SIGINT)
        said, _ = await asyncio.to_thread(process.communicate, timeout=120)
        assert (said, process.returncode) == ("interrupted\n", 0)
    finally:
        process.kill()
        process.wait()
    rows = [Trajectory.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    assert [row.messages()[0]["content"] for row in rows] == [f"task {n}" for n in range(4)]
    assert [row.status for row in rows] == ["complete"] * 3 + ["cancelled"]


SHOWN = """
import asyncio
import logging
import otel_rollout
from otel_rollout import TerminationEvent, Workflow, get_current_trajectory
from otel_rollout.workflows import run_workflows

class Scored(Workflow):
    async def run(self, task, uid, **kwargs):
        if task == 1:
            raise ValueError("no")
        get_current_trajectory().reward = 0.5
        raise TerminationEvent("env_done")

logging.getLogger("otel_rollout").setLevel("ERROR")  # no model is called
otel_rollout.configure(instrumentor=None)
asyncio.run(run_workflows(Scored, range(4), n_parallel=1, progress="solving"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar(terminal: bool):
    """How many, how fast, how they ended: a bar on a terminal, elsewhere a line at the end."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    try:
        if terminal:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        done = subprocess.run(
            [sys.executable, "-c", SHOWN],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=theirs,
            timeout=120,
            check=False,
        )
        os.set_blocking(ours, False)
        shown = os.read(ours, 65536) if select.select([ours], [], [], 0)[0] else b""
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.returncode == 0, shown.decode()
    if not terminal:
        (line,) = shown.decode().splitlines()
        start = r"solving: 4/4 episodes in 0:00:\d\d, [\d.e+]+/s, "
        assert re.fullmatch(start + "reward 0.5, env_done 3, error 1", line)
        return
    last = shown.decode().replace("\r", "\n").strip().splitlines()[-1]
    assert "solving" in last
    assert "4/4" in last
    assert "episodes/s" in last
    assert "reward=0.5" in last
    assert "env_done=3" in last
    assert "error=1" in last


async def test_the_steps_of_a_trajectory_are_made_once(recording: Recording, clients: Clients):
    """Reading them one by one is no square; while it runs, new ones come."""
    client = clients.asynchronous(clients.serve("yes"))
    with rollout("long") as captured:
        for number in range(3):
            await ask(client, user(f"question {number}"))
            assert len(captured.steps) == number + 1
    first = captured.steps
    first[0].reward = 1.0
    for _ in range(3):
        again = captured.steps
        assert again is first
        assert [id(step.completion) for step in again] == [id(c) for c in captured.completions]
    assert [step.scored for step in first] == [True, False, False]
