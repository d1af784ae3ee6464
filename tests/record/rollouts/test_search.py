"""What backends find rollouts by: rewards as numbers, counts, and the status where it failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    Reward,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
    reconstruct,
    record_reward,
    rollout,
    tool,
)
from otel_rollout.record.attributes import reward_numbers
from otel_rollout.testing import Raw, Reply, ToolCall
from otel_rollout.workflows import run_workflows
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

REWARD, REWARDS = "rollout.reward", "rollout.rewards."


def of_span(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def numbers(span: Any) -> dict[str, Any]:
    """The rewards that are numbers on a span."""
    attributes = dict(span.attributes or {})
    return {k: v for k, v in attributes.items() if k == REWARD or k.startswith(REWARDS)}


def test_every_reward_is_a_number(recording: Recording):
    """That of the trajectory and the named ones; that of a completion is none of the rollout's."""
    with rollout("x") as trajectory:
        record_reward(1)
        record_reward(0.5, name="format")
        record_reward(2, name="länge in Zeichen")
        trajectory.rewards["zero"] = 0
    (span,) = recording.spans
    assert numbers(span) == {
        REWARD: 1.0,
        f"{REWARDS}format": 0.5,
        f"{REWARDS}l_nge_in_Zeichen": 2.0,
        f"{REWARDS}zero": 0.0,
    }
    assert all(type(number) is float for number in numbers(span).values())


def test_no_reward_is_no_number(recording: Recording):
    """Unknown is not 0."""
    with rollout("x"):
        pass
    assert numbers(recording.spans[0]) == {}


def test_a_late_reward_is_a_number_on_its_span(recording: Recording, clients: Clients):
    """By the same name as on the rollout's; one that is taken back has none."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        reply = client.chat.completions.create(model="m", messages=[user("hi")])
    trajectory.reward = 1
    trajectory.rewards["format"] = 0.25
    trajectory.reward = None
    record_reward(3, completion_id=reply.id, trajectory=trajectory)
    spans = recording.spans_named("evaluate")
    assert list(map(numbers, spans)) == [{REWARD: 1.0}, {f"{REWARDS}format": 0.25}, {}, {}]
    scores = [(span.attributes or {}).get("gen_ai.evaluation.score.value") for span in spans]
    assert scores == [1.0, 0.25, None, 3.0]


@pytest.mark.not_replayed("a reward is set on a copy")
def test_a_late_reward_is_found_by_its_group(recording: Recording):
    """A search is about one span: that of a late reward has the tags of its rollout."""
    with rollout("x", task_id="t1", group_id="g1", sample_index=3, policy_version=7) as trajectory:
        pass
    trajectory.reward = 1
    copy = reconstruct(recording.spans)[0]
    record_reward(2, name="judge", trajectory=copy)
    for span in recording.spans_named("evaluate"):
        found = span.attributes or {}
        assert found["rollout.task_id"] == "t1"
        assert found["rollout.group_id"] == "g1"
        assert found["rollout.sample_index"] == 3
        assert found["rollout.policy_version"] == 7
    assert [t.rewards for t in reconstruct(recording.spans)] == [{"judge": 2.0}]


def test_a_trajectory_built_by_hand_has_its_numbers(recording: Recording):
    """Its span is made at the end of the run, and has its rewards."""

    class Built(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            said = {"role": "assistant", "content": "4"}
            system = {"role": "system", "content": "Be brief."}
            step = Step(chat_completions=[system, user("2 + 2?"), said], reward=0.5)
            built = Trajectory(name="guesser", steps=[step])
            built.rewards["format"] = 0.25
            self.commit(trajectory=built)

    asyncio.run(run_workflows(lambda: Built(), [{"q": 1}]))
    (span,) = recording.spans_named("invoke_agent guesser")
    assert numbers(span) == {REWARD: 0.5, f"{REWARDS}format": 0.25}


@given(st.lists(st.text(min_size=1), unique=True, max_size=50))
def test_names_of_rewards_are_safe(names: list[str]):
    """Whatever they are, as many are there as there is room for, each under a name of its own."""
    rewards = [Reward(float(number), name=name) for number, name in enumerate(names)]
    found = reward_numbers(rewards)
    assert list(found.values()) == [float(n) for n in range(min(len(names), 32))]
    for name in found:
        assert name.removeprefix(REWARDS).replace("_", "a").replace(".", "a").isascii()
        assert len(name) < 64 + 50


def test_tools_that_failed_are_errors(recording: Recording, clients: Clients):
    """Those that `tool` draws, and those that are drawn from requests."""
    url = clients.serve([Reply(tool_calls=[ToolCall("a", "{}", id="c1")]), "x"]).base_url
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client, rollout("x"):
        reply = client.chat.completions.create(model="m", messages=[user("go")])
        answer: Any = {"role": "tool", "tool_call_id": "c1", "content": "no", "is_error": True}
        said: Any = reply.choices[0].message.model_dump(exclude_none=True)
        client.chat.completions.create(model="m", messages=[user("go"), said, answer])
        with tool("fine"):
            pass
        with pytest.raises(KeyError), tool("broken"):
            raise KeyError("gone")
    failed = [s for s in recording.spans_named("execute_tool") if not s.status.is_ok]
    said = {s.name: s.status.description for s in failed if s.status.description}
    assert said == {"execute_tool a": "no", "execute_tool broken": "KeyError: 'gone'"}


# --- the status


def cancelled() -> None:
    raise asyncio.CancelledError


def late() -> None:
    raise TimeoutError("took 3 s")


def broken() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (broken, "ValueError: no such thing"),
        (late, "TimeoutError: took 3 s"),
        (cancelled, "CancelledError"),
    ],
)
def test_a_rollout_that_did_not_end_well_is_an_error(
    recording: Recording, end: Callable[[], None], sentence: str
):
    """Failed, timed out or cancelled: its status says so in a sentence."""
    with pytest.raises(BaseException), rollout("x"):  # noqa: B017 - each of several kinds
        end()
    (span,) = recording.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == sentence


def test_a_rollout_that_ended_well_is_none(recording: Recording, clients: Clients):
    """Also if a call in it failed, whose own span is one."""
    client = clients.sync(clients.serve([Raw(500, b'{"error": {"message": "busy"}}'), "x"]))
    with rollout("x"):
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=[user("hi")])
        client.chat.completions.create(model="m", messages=[user("hi")])
    assert [s.status.is_unset for s in recording.spans_named("invoke_agent")] == [True]
    failed, well = recording.spans_named("recording")
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.status.description or "").startswith("InternalServerError: ")
    assert "busy" in (failed.status.description or "")
    assert well.status.is_unset


async def test_a_rollout_that_is_cancelled_in_a_call_is_an_error(
    recording: Recording, clients: Clients
):
    """The rollout is; its call was given up, which is no failure of the call."""
    came = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(_: Any) -> Reply:
        loop.call_soon_threadsafe(came.set)
        return Reply("x", delay=5)

    client = clients.asynchronous(clients.serve(hang))

    @rollout
    async def agent() -> None:
        await client.chat.completions.create(model="m", messages=[user("hi")])

    task = asyncio.ensure_future(agent())
    await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (call,) = recording.spans_named("recording")
    (root,) = recording.spans_named("invoke_agent")
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "CancelledError"
    assert call.status.is_unset
    assert of_span(call)["rollout.exchange.status"] == "cancelled"


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_a_workflow_that_a_limit_cut_is_an_error(recording: Recording, reason: TerminationReason):
    """Too many turns or tokens; a run that ended as it should is none."""

    class Ending(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            raise TerminationEvent(reason)

    asyncio.run(run_workflows(lambda: Ending(), [{"q": 1}], retry_limit=1))
    (span,) = recording.spans_named("invoke_workflow")
    is_cut = reason.value.startswith("max_")
    assert (span.status.status_code is StatusCode.ERROR) is is_cut
    assert span.status.description == (f"ended early: {reason.value}" if is_cut else None)


# --- the reward in the name


def named(**options: Any) -> InMemorySpanExporter:
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return spans


def test_a_reward_can_be_in_the_name_of_the_root():
    """The one that it has when it ends; not in names of rollouts inside it."""
    spans = named(reward_in_name=True)
    with rollout("solve"):
        with rollout("inner"):
            record_reward(1)
        record_reward(1)
    with rollout("solve") as trajectory:
        pass
    trajectory.reward = 0.5
    with rollout("solve"):
        record_reward(-1 / 3)
    assert [span.name for span in spans.get_finished_spans()] == [
        "invoke_agent inner",
        "invoke_agent solve [1.00]",
        "invoke_agent solve",
        "evaluate rollout: reward",
        "invoke_agent solve [-0.33]",
    ]


def test_by_default_it_is_not():
    """Backends list operations by name."""
    spans = named()
    with rollout("solve"):
        record_reward(1)
    otel_rollout.shutdown()
    assert [span.name for span in spans.get_finished_spans()] == ["invoke_agent solve"]


def test_the_option_ends_with_shutdown(caplog: pytest.LogCaptureFixture):
    """A later `configure` starts from its own arguments; one that is wrong is refused."""
    named(reward_in_name=True)
    otel_rollout.shutdown()
    spans = named()
    with caplog.at_level(logging.ERROR), rollout("solve"):
        record_reward(1)
    assert [span.name for span in spans.get_finished_spans()] == ["invoke_agent solve"]
    assert caplog.text == ""
    otel_rollout.shutdown()
    with pytest.raises(ConfigurationError, match="expected True or False, got 'yes'"):
        otel_rollout.configure(reward_in_name="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("strange", [object(), {"role": "user", "content": object()}, None])
def test_strange_steps_cost_a_built_trajectory_nothing(recording: Recording, strange: Any):
    """What cannot be shown is not; the trajectory and its numbers are there."""

    class Built(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            built = Trajectory(name="guesser", steps=[Step(chat_completions=[strange])])
            built.rewards["format"] = 0.25
            self.commit(trajectory=built)

    asyncio.run(run_workflows(lambda: Built(), [{"q": 1}]))
    (span,) = recording.spans_named("invoke_agent guesser")
    assert numbers(span)[f"{REWARDS}format"] == 0.25
