"""The size of a group is on its trajectories, and group and size on every span of ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from otel_rollout import (
    Trajectory,
    continue_rollout,
    gather_group,
    propagate,
    reconstruct,
    rollout,
)
from otel_rollout.record.state import process_state
from otel_rollout.spans import as_record
from otel_rollout.view.filter_expression import Where
from otel_rollout.view.overview import Overview
from tests.kit.comparing import exchange_spans
from tests.kit.conversations import ask, user
from tests.kit.recording import Clients, Recording

GROUP, SIZE = "rollout.group_id", "rollout.group_size"


def on(span: Any) -> tuple[Any, Any]:
    """Group and size that a span names."""
    attributes: Mapping[str, Any] = span.attributes or {}
    return attributes.get(GROUP), attributes.get(SIZE)


@rollout
async def agent(client: Any) -> None:
    await ask(client, user("hi"))


@pytest.mark.parametrize("options", [{}, {"group_size": 16, "sample_index": 9}])
async def test_a_gathered_group_knows_its_size(
    recording: Recording, clients: Clients, options: dict[str, Any]
):
    """Also of a generator; whoever spreads a group over processes says how large it is."""
    client = clients.asynchronous(clients.serve())
    group = await gather_group((agent(client) for _ in range(3)), group_id="g", **options)
    size = options.get("group_size", 3)
    assert [t.group_size for t in group] == [size] * 3
    assert [t.sample_index for t in group] == ([9] * 3 if options else [0, 1, 2])
    ours = [span for span in recording.spans if "rollout.id" in (span.attributes or {})]
    assert {on(span) for span in ours} == {("g", size)}
    assert len(exchange_spans(recording)) == 3
    assert Trajectory.from_json(group[0].to_json()).group_size == size
    assert all(t.group_size == size for t in reconstruct(recording.spans))


async def test_late_rewards_name_their_group(recording: Recording):
    """The span of a reward that came after the end is found by its group, too."""
    with rollout("a", group_id="g", group_size=2) as trajectory:
        pass
    trajectory.reward = 1.0
    assert on(recording.spans[-1]) == ("g", 2)
    assert "evaluate" in recording.spans[-1].name


async def test_calls_without_a_group_name_none(recording: Recording, clients: Clients):
    """A size without a group is on the rollout alone."""
    client = clients.asynchronous(clients.serve())
    with rollout("a", group_size=2):
        await ask(client, user("hi"))
    (span,) = exchange_spans(recording)
    assert not {GROUP, SIZE} & (span.attributes or {}).keys()


async def test_a_rollout_whose_span_is_lost_is_in_its_group(recording: Recording, clients: Clients):
    """Its calls name the group: the others do not look whole without it."""
    client = clients.asynchronous(clients.serve())
    with rollout("a", group_id="gruppe é", group_size=2):
        await ask(client, user("hi"))
    (rebuilt,) = reconstruct(exchange_spans(recording))
    assert (rebuilt.status, rebuilt.group_id, rebuilt.group_size) == ("unknown", "gruppe é", 2)


@pytest.mark.not_replayed("it ended before it was continued")
@pytest.mark.parametrize(("group", "there"), [("g é,=;", True), ("g" * 5000, False)])
def test_calls_of_other_processes_name_the_group(
    recording: Recording,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    group: str,
    there: bool,
):
    """The carrier has it; an id that is too long for headers is left out, which is logged once."""
    client = clients.sync(clients.serve())
    with rollout("a", group_id=group, group_size=2) as trajectory:
        carrier = propagate()
        assert propagate() == carrier
        del process_state.rollouts[trajectory.id]
    said = [each for each in caplog.messages if "has 5000 characters" in each]
    assert len(said) == (not there)
    with continue_rollout(carrier) as part:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert len(part.spans) == 2
    assert {on(span) for span in part.spans} == {(group, 2) if there else (None, None)}
    (rebuilt,) = reconstruct([*map(as_record, recording.spans), *part.spans])
    assert (rebuilt.group_id, len(rebuilt.completions)) == (group, 1)


def test_it_can_be_filtered_by():
    """And a line that an earlier version wrote has none."""
    trajectory = Trajectory(id="a", group_id="g", group_size=8)
    assert Where.parse("group_size == 8").matches(Overview.of(trajectory))
    line = trajectory.to_json().replace('"group_size":8,', "")
    assert "group_size" not in line
    assert Trajectory.from_json(line).group_size is None


async def test_functions_that_are_not_async(recording: Recording):
    """A group of functions has a size, too."""

    @rollout
    def plain() -> None:
        pass

    group = await gather_group([functools.partial(plain)] * 2)
    assert [t.group_size for t in group] == [2, 2]
