"""Files and pickles of an earlier version, from when every module lay on one level, are read.

`written_before/` has one rollout, written by that version: a tool loop with token ids, a fork, a
late reward; and an episode with a step that was built by hand. `expected.json` is what that version
read them as. The files are never written anew: a version that cannot read them is wrong.
"""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    Completion,
    Episode,
    JsonlTrajectoryExporter,
    Step,
    Trajectory,
    TrajectoryGroup,
    reconstruct,
)
from otel_rollout.otlp import read_json_lines

FOLDER = Path(__file__).parent / "written_before"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
FORMER = {
    "episode": "otel_rollout.episodes",
    "group": "otel_rollout.groups",
    "history": "otel_rollout.histories",
    "rewards": "otel_rollout.trajectory",
    "spans": "otel_rollout.spans",
    "token_sequences": "otel_rollout.tokens",
    "trajectory": "otel_rollout.trajectory",
}
"""The module path that each pickle names for its outermost class."""


def unpickled(name: str) -> Any:
    return pickle.loads((FOLDER / f"{name}.pickle").read_bytes())


@pytest.mark.parametrize("name", FORMER)
def test_the_pickles_name_the_former_modules(name: str) -> None:
    """Each pickle was written by the version with one level: it names a module of then."""
    path = FOLDER / f"{name}.pickle"
    assert FORMER[name] in [argument for _, argument, _ in pickletools.genops(path.read_bytes())]


def test_a_trajectory() -> None:
    """A pickled trajectory has everything that it had, with its completions and late reward."""
    trajectory = unpickled("trajectory")
    assert type(trajectory) is Trajectory
    assert trajectory.to_dict() == EXPECTED["trajectory"]
    assert trajectory.reward == 1.0
    assert [type(completion) for completion in trajectory.completions] == [Completion] * 4
    assert Trajectory.from_dict(EXPECTED["trajectory"]) == trajectory


def test_token_sequences() -> None:
    """Pickled token sequences have the same ids, masks and log-probabilities, and completions."""
    rows = unpickled("token_sequences")
    fields = EXPECTED["token_sequences"][0]
    found = [{name: getattr(row, name) for name in fields} for row in rows]
    assert json.loads(json.dumps(found)) == EXPECTED["token_sequences"]
    for row in rows:
        assert [completion.id for completion in row.completions] == row.completion_ids
    assert list(rows) == list(unpickled("trajectory").token_sequences())


def test_a_group() -> None:
    """A pickled group has its id and its trajectories."""
    group = unpickled("group")
    assert type(group) is TrajectoryGroup
    assert (group.id, [member.id for member in group]) == (
        EXPECTED["group"]["id"],
        EXPECTED["group"]["trajectories"],
    )
    assert [member.reward for member in group] == EXPECTED["group"]["rewards"]


def test_an_episode() -> None:
    """A pickled episode has its trajectories, and the step that was built by hand."""
    episode = unpickled("episode")
    assert type(episode) is Episode
    assert episode.to_dict() == EXPECTED["episode"]
    assert episode.trajectories[0] == unpickled("trajectory")
    (step,) = episode.trajectories[1].steps
    assert type(step) is Step
    assert (step.reward, step.done, step.action) == (1.0, True, "4")


def test_a_history() -> None:
    """A pickled history has its messages, and which of them train."""
    history = unpickled("history")
    assert {
        "messages": history.messages(),
        "completion_ids": history.completion_ids,
        "trainable": [item.trainable for item in history.items],
    } == EXPECTED["history"]


def test_rewards() -> None:
    """Pickled rewards have their names and values."""
    assert dict(unpickled("rewards")) == EXPECTED["rewards"]


def test_spans() -> None:
    """Pickled spans are those of the OTLP/JSON file; both give the trajectory that was live."""
    spans = unpickled("spans")
    read = list(read_json_lines(FOLDER / "traces.jsonl"))
    assert [span.name for span in read] == EXPECTED["spans"]
    assert spans == read
    for source in (spans, read):
        (trajectory,) = reconstruct(source)
        assert trajectory.to_dict() == EXPECTED["trajectory"]


def test_a_file_of_trajectories() -> None:
    """A file of the JSON lines exporter gives the trajectory as it was before its late reward."""
    (trajectory,) = JsonlTrajectoryExporter.read(FOLDER / "trajectories.jsonl")
    earlier = [reward for reward in EXPECTED["trajectory"]["rewards"] if "name" in reward]
    assert trajectory.to_dict() == {**EXPECTED["trajectory"], "reward": None, "rewards": earlier}
