"""A group is one call of `gather_group`, or one id that is given with its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectories,
    get_current_trajectory,
    propagate,
    reconstruct,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.command.cli import main
from otel_rollout.export.store import key_of
from otel_rollout.gateway.tokens import Tokens
from otel_rollout.record import Carried
from otel_rollout.record.current import rollout_of
from otel_rollout.spans import as_record
from otel_rollout.workflows import Workflow, run_workflows
from tests.kit.conversations import ask, user
from tests.kit.recording import Clients, Recording

Output = pytest.CaptureFixture[str]


@rollout
async def agent(client: Any, reward: float) -> None:
    await ask(client, user("hi"))
    record_reward(reward)


@pytest.fixture
def client(clients: Clients) -> Any:
    return clients.asynchronous(clients.serve())


async def two_epochs(client: Any, **options: Any) -> list[TrajectoryGroup]:
    """The same group of two, with one version and with the next."""
    return [
        await gather_group(
            [agent(client, 1.0 - epoch), agent(client, 1.0 - epoch)],
            group_id="sum",
            policy_version=epoch,
            **options,
        )
        for epoch in range(2)
    ]


def checked(path: Path, made: list[Trajectory], capsys: Output, *more: str) -> tuple[int, str]:
    path.write_text("".join(each.to_json() + "\n" for each in made))
    return main(["check", str(path), "--require", "whole,unique", *more]), capsys.readouterr().out


async def test_two_calls_are_two_groups(
    recording: Recording, client: Any, tmp_path: Path, capsys: Output
):
    """In memory, from spans, from a file, in rows, in lists and in checks alike."""
    first, second = await two_epochs(client)
    assert (first.id, second.id) == ("sum", "sum")
    assert first.run != second.run
    made = [*first, *second]
    read = [Trajectory.from_json(each.to_json()) for each in made]
    rebuilt = {each.id: each for each in reconstruct(recording.spans)}
    for each in (made, read, [rebuilt[t.id] for t in made]):
        assert [t.group_id for t in each] == ["sum"] * 4
        groups = TrajectoryGroup.by_id(each)
        assert [group.key for group in groups] == [first.key, second.key]
        assert [group.advantages() for group in groups] == [[0.0, 0.0]] * 2
        assert [row["advantage"] for row in to_token_rows(each)] == [0.0] * 4
        assert len({row["group_id"] for row in to_token_rows(each)}) == 2
        assert len(set(map(key_of, each))) == 2
    with pytest.raises(ValueError, match="trajectories of one group"):
        TrajectoryGroup.of(made)
    assert TrajectoryGroup.from_dict(first.to_dict()) == first
    assert [len(group) for group in recording.exporter.groups(2)] == [2, 2]
    assert checked(tmp_path / "t.jsonl", made, capsys)[0] == 0
    assert main(["list", str(tmp_path / "t.jsonl"), "--group-by", "group_id", "--json"]) == 0
    out = capsys.readouterr().out
    assert all(key is not None and key in out for key in (first.key, second.key))


async def test_an_id_with_its_size_is_the_group(
    recording: Recording, client: Any, tmp_path: Path, capsys: Output
):
    """Wherever its samples run; too many of them are said."""
    halves = await two_epochs(client, group_size=4)
    made = [each for half in halves for each in half]
    assert {each.group_key for each in made} == {"sum"}
    assert len(TrajectoryGroup.by_id(made)) == 1
    status, out = checked(tmp_path / "t.jsonl", made, capsys)
    assert status == 0
    again = [each for half in await two_epochs(client, group_size=2) for each in half]
    status, out = checked(tmp_path / "t.jsonl", again, capsys)
    assert status == 1
    assert "has 4 samples, but 2 were expected: sample 0, 1 there more than once" in out


async def test_a_run_that_the_user_names(recording: Recording, client: Any):
    """By the option `group_run`, of every function that takes options."""
    made = [
        (await gather_trajectories([agent(client, 1.0)], group_id="g", group_run=epoch))[0]
        for epoch in (1, 2, 2)
    ]
    assert [each.group_key for each in made] == ["g@1", "g@2", "g@2"]
    assert len(TrajectoryGroup.by_id(made)) == 2


async def test_every_span_of_a_run_names_it(recording: Recording, client: Any):
    """What its processes, gateways and late rewards record, too; rollouts inside it go with it."""
    carried = list[Any]()

    @rollout
    async def outer() -> None:
        active: Any = rollout_of(None)
        tokens = Tokens(b"secret", 60.0)
        carried.append(Carried.by(propagate()))
        carried.append(tokens.read(tokens.own(active)).carried)
        with rollout("inner"):
            await ask(client, user("hi"))
            carried.append(get_current_trajectory().group_run)

    group = await gather_group([outer()], group_id="g")
    group[0].reward = 1.0
    assert [(c.group_id, c.group_run, c.outer_group_id) for c in carried[:2]] == [
        ("g", group.run, group.key)
    ] * 2
    assert carried[2] is None
    records = [
        as_record(span) for span in recording.spans if "rollout.id" in (span.attributes or {})
    ]
    found = {(record.group, record.text("rollout.outer_group_id")) for record in records}
    assert found == {(group.key, group.key), (None, group.key)}


async def test_workflows(recording: Recording, client: Any):
    """Each call of `run_workflows` has groups of its own, for each name of its rollouts."""

    class Solve(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            with rollout("solver"):
                await ask(client, user("hi"))
                record_reward(1.0)

    tasks = [{"id": "a"}, {"id": "b"}]
    for _ in range(2):
        await run_workflows(Solve, tasks, n_samples=2)
    solvers = [t for t in recording.trajectories if t.name == "solver"]
    groups = TrajectoryGroup.by_id(solvers)
    assert [len(group) for group in groups] == [2] * 4
    assert sorted(str(group.id) for group in groups) == ["a:solver", "a:solver"] + ["b:solver"] * 2
