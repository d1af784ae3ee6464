"""The user's own rules for side calls: asked when a rollout ends, and what they said is kept."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    Completion,
    ConfigurationError,
    InMemoryTrajectoryExporter,
    Trajectory,
    continue_rollout,
    gather_trajectory,
    propagate,
    reconstruct,
    rollout,
)
from otel_rollout import semconv as sc
from otel_rollout.rebuild.rollout_span import NOT_KNOWN
from otel_rollout.side_calls import SideCalls, known_side_call, without_tools
from otel_rollout.spans import as_record
from otel_rollout.testing import Raw
from tests.kit.conversations import TASK, TITLE, TOOLS, ask, system, user
from tests.kit.recording import Clients, Recording


def small_talk(completion: Completion, _: SideCalls) -> str | None:
    """A rule of a user's own."""
    asked: Any = completion.request_messages[-1]
    return "it is small talk" if "weather" in asked["content"] else None


def configured(**options: Any) -> Recording:
    """The library, configured with these options."""
    exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure(exporters=[exporter], instrumentor=None, **options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Recording(provider, exporter, spans)


async def agent(client: Any) -> None:
    """Three calls: a title, small talk, and one with tools."""
    await ask(client, *TITLE)
    await ask(client, user("How is the weather?"))
    await ask(client, *TASK, tools=TOOLS)


def reasons(trajectory: Trajectory) -> list[str | None]:
    return [completion.side_call for completion in trajectory.completions]


A_TITLE, TALK = "it asks for a title", "it is small talk"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, [A_TITLE, None, None]),
        ((), [None, None, None]),
        ([small_talk], [None, TALK, None]),
        ([known_side_call, small_talk], [A_TITLE, TALK, None]),
        ([without_tools], ["it has no tools, and other calls do"] * 2 + [None]),
    ],
)
async def test_rules_of_ones_own(clients: Clients, rules: Any, expected: list[str | None]):
    """They hold instead of the default one, here and where the spans are read without them."""
    recording = configured(side_calls=rules)
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        await agent(client)
    trajectory = recording.trajectory
    spans = recording.spans
    otel_rollout.shutdown()
    assert reasons(trajectory) == expected
    assert [c.trainable for c in trajectory.completions] == [why is None for why in expected]
    (rebuilt,) = reconstruct(spans)
    assert reasons(rebuilt) == expected
    assert reasons(Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))) == expected


async def test_rules_are_asked_when_the_rollout_ends(clients: Clients):
    """Until then only the default one tells; a look in between changes nothing."""
    recording = configured(side_calls=[small_talk])
    client = clients.asynchronous(clients.serve())
    with rollout("agent") as trajectory:
        await agent(client)
        assert reasons(trajectory) == [A_TITLE, None, None]
        assert len(trajectory.histories) == 3
    assert reasons(trajectory) == [None, TALK, None]
    assert trajectory.histories[-1].side_call == TALK
    assert recording.trajectory is trajectory


@pytest.mark.not_replayed("the rollout's span is left out")
async def test_a_verdict_that_is_lost(clients: Clients):
    """Without the rollout's span nobody knows what its rules said: none of its calls trains."""
    recording = configured(side_calls=[small_talk])
    with rollout("agent"):
        await agent(clients.asynchronous(clients.serve()))
    (rebuilt,) = reconstruct(recording.spans_named("recording"))
    assert reasons(rebuilt) == [NOT_KNOWN] * 3
    assert not any(completion.trainable for completion in rebuilt.completions)
    assert rebuilt.token_sequences() == []


@pytest.mark.not_replayed("the rollout's span is left out")
async def test_without_rules_of_ones_own_no_verdict_can_be_lost(clients: Clients):
    """The policy's model is on each call: the rollout's span decides nothing."""
    recording = configured(policy_model="policy")
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        await ask(client, user("one"), model="policy")
        await ask(client, user("two"), model="small")
    (rebuilt,) = reconstruct(recording.spans_named("recording"))
    assert reasons(rebuilt) == [None, "it asks the model 'small', and the policy is 'policy'"]
    (own,) = recording.spans_named("invoke_agent")
    assert sc.ROLLOUT_SIDE_CALLS not in (own.attributes or {})


def broken(completion: Completion, calls: SideCalls) -> str | None:
    raise RuntimeError(f"no {completion.id} {calls.has_tools}")


def numbered(completion: Completion, _: SideCalls) -> Any:
    return completion.choice_index


@pytest.mark.parametrize("rule", [broken, numbered])
async def test_a_rule_that_fails(
    clients: Clients, rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises nothing into the agent, and what it could not judge does not train."""
    recording = configured(side_calls=[small_talk, rule])
    with rollout("agent"), caplog.at_level(logging.ERROR):
        await agent(clients.asynchronous(clients.serve()))
    name = rule.__qualname__
    assert reasons(recording.trajectory) == [
        f"the rule {name} failed",
        TALK,
        f"the rule {name} failed",
    ]
    assert recording.trajectory.status == "complete"
    assert f"the rule {name} for side calls failed" in caplog.text


async def test_a_long_reason_is_cut(clients: Clients):
    """A reason is a sentence."""
    recording = configured(side_calls=[lambda *_: "x" * 10_000])
    with rollout("agent"):
        await agent(clients.asynchronous(clients.serve()))
    assert reasons(recording.trajectory) == ["x" * 200] * 3


async def test_all_choices_of_a_call_are_judged_as_one(clients: Clients):
    """The first choice decides."""
    recording = configured(side_calls=[lambda c, _: f"choice {c.choice_index}"])
    with rollout("agent"):
        await ask(clients.asynchronous(clients.serve()), user("one"), n=3)
    assert reasons(recording.trajectory) == ["choice 0"] * 3


async def test_a_failed_side_call_is_one(clients: Clients):
    """How a call ended has nothing to do with it, and why it does not train is said once."""
    recording = configured()
    server = clients.serve(iter([Raw(503, b"{}"), "Paris."]))
    client = clients.asynchronous(server)
    with rollout("agent"):
        with pytest.raises(Exception, match="503"):
            await ask(client, *TITLE)
        await ask(client, *TASK, tools=TOOLS)
    failed, _ = recording.trajectory.completions
    assert (failed.status, failed.side_call) == ("error", A_TITLE)
    (dropped,) = recording.trajectory.token_sequences().dropped
    assert dropped.reason.startswith("its call ended as 'error'")


@pytest.mark.not_replayed("it ended before it was continued elsewhere")
async def test_the_process_that_makes_a_call_judges_it(clients: Clients):
    """A part elsewhere with other rules says so on its own span."""
    recording = configured(side_calls=[known_side_call])
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        headers = propagate()
        await ask(client, user("How is the weather?"))
    own = [as_record(span) for span in recording.spans]
    otel_rollout.configure(side_calls=[small_talk])
    with continue_rollout(headers) as part:
        await ask(client, user("The weather there?"))
        await ask(client, *TASK, tools=TOOLS)
    (rebuilt,) = reconstruct([*own, *part.spans])
    assert reasons(rebuilt) == [None, TALK, None]
    calls = [span for span in part.spans if sc.ROLLOUT_PART not in span.attributes]
    (rebuilt,) = reconstruct([*own, *calls])
    assert reasons(rebuilt) == [None, NOT_KNOWN, NOT_KNOWN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_model": ""}, "expected the name of a model, got ''"),
        ({"policy_model": ["a"]}, "expected the name of a model"),
        ({"side_calls": small_talk}, "expected a list of functions"),
        ({"side_calls": "title"}, "expected a list of functions, got 'title'"),
        ({"side_calls": ["title"]}, "expected functions of a completion"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    """They name the argument, and what was given."""
    with pytest.raises(ConfigurationError, match=message):
        otel_rollout.configure(**options)


async def test_configured_again(clients: Clients):
    """The later rules and model hold for rollouts that begin then; what is not given stays."""
    recording = configured(policy_model="m")
    otel_rollout.configure(side_calls=[small_talk])
    with rollout("agent"):
        await agent(clients.asynchronous(clients.serve()))
    otel_rollout.configure()
    with rollout("agent"):
        await ask(clients.asynchronous(clients.serve()), user("weather"), model="small")
    assert [reasons(t) for t in recording.trajectories] == [[None, TALK, None], [TALK]]


async def test_side_calls_do_not_count_in_groups(recording: Recording, clients: Clients):
    """Rewards are of rollouts: what was asked beside an agent changes none."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def solve(beside: bool) -> None:
        if beside:
            await ask(client, *TITLE)
        await ask(client, system("You solve."), user("1 + 1"), tools=TOOLS)
        otel_rollout.record_reward(1.0)

    first, second = await asyncio.gather(
        gather_trajectory(solve(True)), gather_trajectory(solve(False))
    )
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert [len(t.token_sequences()) for t in (first, second)] == [1, 1]
    assert len(recording.trajectories) == 2
