"""A rollout inside others is sent with the group of the nearest one around it that has one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    Trajectory,
    Workflow,
    continue_rollout,
    propagate,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout import semconv as sc
from otel_rollout.evidence import Evidence
from otel_rollout.gateway.tokens import Tokens
from otel_rollout.record import begin_part_here, close, process_state
from otel_rollout.record.context import ROLLOUT
from otel_rollout.record.current import rollout_of
from otel_rollout.spans import SpanRecord, as_record
from tests.kit.conversations import user
from tests.kit.played import ask
from tests.kit.recording import Clients
from tests.kit.workflows import MultiTurn

pytestmark = pytest.mark.not_replayed("parts are in the process of their rollout")
Way = Callable[[], AbstractContextManager[object]]
"""From a rollout into another process that continues it, or into a function."""
Groups = tuple[object, object]
"""The group of a rollout, and the one that it is sent with."""
TOKENS = Tokens(b"secret", 60)


@contextmanager
def elsewhere() -> Iterator[None]:
    """The current rollout is taken for one of another process."""
    active: Any = rollout_of(None)
    del process_state.rollouts[active.id]
    yield
    process_state.rollouts[active.id] = active


@contextmanager
def by_carrier() -> Iterator[None]:
    """A request with the headers of `propagate`."""
    carrier = propagate()
    with elsewhere(), continue_rollout(carrier):
        yield


@contextmanager
def by_token() -> Iterator[None]:
    """A gateway of another process, which a call with a token asks."""
    active: Any = rollout_of(None)
    with elsewhere():
        part = begin_part_here(TOKENS.read(TOKENS.own(active)).carried)
    context = otel_context.set_value(ROLLOUT, part, trace.set_span_in_context(part.span))
    token = otel_context.attach(context)
    yield
    otel_context.detach(token)
    close(part)


@pytest.fixture
def sent() -> Iterator[Callable[[], list[SpanRecord]]]:
    """Records; the function ends that, and gives the spans of rollouts that were exported."""
    exporter = InMemorySpanExporter()
    otel_rollout.configure("x", span_exporters=[exporter], instrumentor=None)

    def ended() -> list[SpanRecord]:
        assert otel_rollout.shutdown()
        return [as_record(span) for span in exporter.get_finished_spans()]

    yield ended
    otel_rollout.shutdown()


def rollout_id(record: SpanRecord) -> str | None:
    return record.text(sc.ROLLOUT_ID) or record.text(sc.ROLLOUT_STARTED)


def groups_of(record: SpanRecord) -> Groups:
    return record.text(sc.ROLLOUT_GROUP_ID), record.text(sc.ROLLOUT_OUTER_GROUP_ID)


@pytest.mark.parametrize("first", [nullcontext, by_carrier, by_token])
@pytest.mark.parametrize("second", [nullcontext, by_carrier, by_token])
def test_every_span_names_both(
    sent: Callable[[], list[SpanRecord]], clients: Clients, first: Way, second: Way
):
    """Start, calls, parts, rollouts and late rewards of three rollouts, some given a group."""
    client = clients.sync(clients.serve("ok"))
    expected = dict[str | None, Groups]()

    def run(groups: tuple[str | None, ...], outer: str | None, ways: tuple[Way, ...]) -> None:
        own = groups[0]
        with rollout("x", group_id=own) as trajectory:
            expected[trajectory.id] = own, None if own else outer
            ask(client, user("hi"))
            if ways:
                with ways[0]():
                    ask(client, user("from there"))
                    run(groups[1:], own or outer, ways[1:])
        record_reward(1.0, trajectory=trajectory)

    for groups in itertools.product((None, "g", "h"), repeat=3):
        run(groups, None, (first, second))
    found = sent()
    assert len({each.name.split()[0] for each in found}) == 4 + ({first, second} != {nullcontext})
    assert {rollout_id(each) for each in found} == expected.keys()
    assert [e.name for e in found if groups_of(e) != expected[rollout_id(e)]] == []


async def test_trajectories_that_agents_build(
    sent: Callable[[], list[SpanRecord]], clients: Clients
):
    """They have groups of their own, and the calls of the workflow's run."""
    engine: Any = clients.asynchronous(clients.serve(["1", "3"]))
    await MultiTurn(rollout_engine=engine).run_with_termination_handling({"q": 1}, "t:0")
    found = {groups_of(each) for each in sent() if rollout_id(each)}
    assert found == {("t", None), ("t:guesser", "t")}


async def test_rollouts_of_a_workflows_run(sent: Callable[[], list[SpanRecord]]):
    """The run is whole where all of them are, also those that were given a group."""

    class Two(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            with rollout("one"), rollout("inside"):
                pass
            with rollout("two", group_id="own"):
                pass

    await Two().run_with_termination_handling({"q": 1}, "t:0")
    found = {groups_of(each) for each in sent()}
    assert found == {("t", None), ("t:one", "t"), ("t:inside", "t"), ("own", "t")}


def test_a_late_reward_of_a_copy(sent: Callable[[], list[SpanRecord]]):
    """A judge that has the trajectory of a rollout inside another one from a file."""
    with rollout("x") as live:
        pass
    copy = Trajectory.from_dict(live.to_dict())
    record_reward(1.0, trajectory=copy, group_id="g")
    copy.group_id = "own"
    record_reward(2.0, trajectory=copy, group_id="g")
    rewards = [groups_of(each) for each in sent() if sc.REWARD in each.attributes]
    assert rewards == [(None, "g"), ("own", None)]


def test_a_late_reward_names_the_group_of_the_rollout_around(
    sent: Callable[[], list[SpanRecord]], clients: Clients
):
    """It makes no sample of one inside a member, also where that one's own span is lost."""
    client = clients.sync(clients.serve("ok"))
    with rollout("x", group_id="g"), rollout("y") as inner:
        ask(client, user("hi"))
    record_reward(1.0, trajectory=inner.id, group_id="g")
    spans = [each for each in sent() if rollout_id(each) == inner.id]
    rewards = [each for each in spans if sc.REWARD in each.attributes]
    assert [groups_of(each) for each in rewards] == [("g", None)]
    without = [each for each in spans if sc.ROLLOUT_SCHEMA_VERSION not in each.attributes]
    for some, group in ((spans, None), (without, None), (rewards, "g")):
        (found,) = reconstruct(some)
        evidence = Evidence(inner.id)
        for each in some:
            evidence.add(each)
        assert (found.group_id, evidence.head(()).group) == (group, group)


async def test_a_rollout_that_is_given_its_group_when_it_runs(sent: Callable[[], list[SpanRecord]]):
    """`gather_group` inside another rollout gives its own."""

    @rollout
    async def inner() -> None:
        pass

    @rollout
    async def outer() -> None:
        await otel_rollout.gather_group([inner(), inner()], group_id="own")

    await otel_rollout.gather_trajectory(outer(), group_id="g")
    spans = sent()
    (run,) = {each.text(sc.ROLLOUT_GROUP_RUN) for each in spans} - {None}
    assert {groups_of(each) for each in spans} == {("g", None), ("own", f"own@{run}")}
