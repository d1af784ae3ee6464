"""What an export leaves out for its age, and what that does to what trains."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, gather_group, record_reward, rollout
from otel_rollout.command.cli import main
from otel_rollout.export import Facts, LeftOut, PolicyLag
from tests.command.exports import rows_in, trajectories_of
from tests.kit.recording import Clients

ANY_FACTS = st.builds(
    Facts,
    versions=st.lists(st.integers(0, 9) | st.just("7") | st.just("main"), max_size=3).map(tuple),
    ending=st.sampled_from(["complete", "error", "timeout"]),
    task_id=st.none() | st.sampled_from("ab"),
    reward=st.none() | st.floats(-1, 1),
)


@given(st.lists(ANY_FACTS, max_size=30), st.integers(0, 4), st.integers(0, 30))
def test_every_trajectory_is_counted_once_whatever_is_added_to_what(
    each: list[Facts], most: int, cut: int
):
    limit = PolicyLag.of(most, each)
    whole, parts = LeftOut(), (LeftOut(), LeftOut())
    for number, facts in enumerate(each):
        whole.add(facts, limit.reason(facts))
        parts[number < cut].add(facts, limit.reason(facts))
    found: Any = whole.to_dict()
    left = [facts for facts in each if limit.reason(facts)]
    assert found["left_out"] == len(left)
    assert found["kept"] == len(each) - len(left)
    for what in ("version", "ending", "task"):
        assert sum(row["kept"] for row in found[what]) == found["kept"]
        assert sum(row["left_out"] for row in found[what]) == found["left_out"]
    joined: Any = LeftOut(parts[0].counts + parts[1].counts).to_dict()
    assert joined["reasons"] == found["reasons"]
    numbers = [int(v) for facts in each for v in facts.versions if v != "main"]
    for facts in each:
        own = [int(v) for v in facts.versions if v != "main"]
        assert (limit.reason(facts) is not None) == bool(own and max(numbers) - min(own) > most)
    json.dumps(found, allow_nan=False)


@rollout
async def agent(client: Any, calls: int, reward: float | None):
    for _ in range(calls):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "q"}], logprobs=True
        )
    if reward is None:
        raise RuntimeError("it broke")
    record_reward(reward)


async def several_versions(clients: Clients) -> list[Trajectory]:
    client = clients.asynchronous(clients.serve())
    found: list[Trajectory] = []
    for version, calls in ((1, 3), (2, 2), (4, 1)):
        group = await gather_group(
            [agent(client, calls, reward) for reward in (0.0, 1.0, None) * 2],
            group_id=f"g{version}",
            policy_version=version,
        )
        found += [*group, *group.failures]
    return found


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.usefixtures("recording")
async def test_what_is_left_out_is_not_there_and_is_reported(
    clients: Clients, tmp_path: Path, capsys: Any, jobs: int
):
    source = trajectories_of(await several_versions(clients), tmp_path / "t")
    to = ["--to", "tokens", "-o", str(tmp_path / "rows"), "--jobs", str(jobs), "--force"]
    assert main(["export", *to, source, "--policy-lag", "2"]) == 0
    kept = {(row["group_id"], row["trajectory_id"]) for row in rows_in(tmp_path / "rows")}
    assert Counter(group.partition("@")[0] for group, _ in kept) == {"g2": 4, "g4": 4}
    told = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert told[-4] == (
        "10 of 18 trajectories left out: 6 sampled more than 2 versions before 4, "
        "4 failed without a reward"
    )
    assert told[-3] == "by version: 1: 6 of 6, 2: 2 of 6, 4: 2 of 6"
    assert told[-2] == "by ending: error: 6 of 6, complete: 4 of 12"
    assert told[-1] == "mean reward: 0.500 of what is kept, 0.500 of what is left out"
    assert main(["export", *to, source, "--where", "'g1@' not in group_id"]) == 0
    assert len({row["trajectory_id"] for row in rows_in(tmp_path / "rows")}) == 8
    told = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert (
        "10 of 18 trajectories left out: 6 not kept by --where, 4 failed without a reward"
    ) in told


@pytest.mark.usefixtures("recording")
async def test_versions_without_numbers(clients: Clients, tmp_path: Path, capsys: Any):
    """Nothing is left out for an age that nobody knows, and that is said."""
    group = await gather_group(
        [agent(clients.asynchronous(clients.serve()), 1, 1.0)], group_id="g", policy_version="main"
    )
    source = trajectories_of(group, tmp_path / "t")
    to = ["export", "--to", "tokens", "-o", str(tmp_path / "rows"), source, "--policy-lag"]
    assert main([*to, "0"]) == 0
    told = capsys.readouterr().err
    assert "no trajectory names a version that is a number" in told
    assert "1 group, 1 trajectory -> 1 row" in told
    with pytest.raises(SystemExit):
        main([*to, "-1"])
