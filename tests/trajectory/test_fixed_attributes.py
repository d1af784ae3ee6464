"""A misspelt attribute is an error that names the right one, and pickles of all ages are read."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import weakref
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from otel_rollout import Episode, Step, TokenSequence, Trajectory, TrajectoryGroup, rollout
from otel_rollout.spans import extend_tokens
from tests.kit.recording import Clients, Recording

OPEN = [
    (Trajectory(name="a"), "rewrad", "reward"),
    (Trajectory(name="a"), "metadat", "metadata"),
    (Step(), "obsevation", "observation"),
    (Episode(), "is_corect", "is_correct"),
    (TrajectoryGroup([]), "failure", "failures"),
]


@pytest.mark.parametrize(("owner", "wrong", "right"), OPEN)
def test_a_misspelt_attribute_is_an_error(owner: object, wrong: str, right: str) -> None:
    """It names the attribute that was meant, and nothing is set."""
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'; did you mean '{right}'"):
        setattr(owner, wrong, 1)
    assert not hasattr(owner, wrong)


def test_a_traceback_has_one_suggestion() -> None:
    """Python would add one of its own."""
    code = "import otel_rollout; otel_rollout.Trajectory().rewrad = 1"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert printed.lower().count("did you mean") == 1


@pytest.mark.parametrize(
    ("owner", "way"),
    [(Trajectory(), "metadata"), (Step(), "info"), (Episode(), "info")],
)
def test_a_value_of_the_users_own_is_told_its_place(owner: object, way: str) -> None:
    """Where no attribute is meant, the error says where further values go."""
    with pytest.raises(AttributeError, match=f"values of your own go into `{way}`"):
        setattr(owner, "zzz", 1)  # noqa: B010 - the name is none


def test_what_exists_can_be_set_and_what_is_computed_says_so() -> None:
    """Fields take values as ever; a property without a setter says that it has none."""
    trajectory = Trajectory()
    trajectory.reward, trajectory.name = 0.5, "solver"
    assert (trajectory.reward, trajectory.name) == (0.5, "solver")
    for name in ("sealed", "completions"):
        with pytest.raises(AttributeError) as caught:
            setattr(trajectory, name, True)
        assert "did you mean" not in str(caught.value)


def test_a_subclass_may_have_attributes_of_its_own() -> None:
    """One that declares no slots takes any."""

    class Mine(Trajectory):
        pass

    mine: Any = Mine()
    mine.anything = 1
    assert mine.anything == 1


def test_a_completion_says_how_it_is_rewarded(recording: Recording, clients: Clients) -> None:
    """It is read-only, and its error names the way to its reward."""
    client = clients.sync(clients.serve("Paris"))
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    (completion,) = recording.trajectory.completions
    with pytest.raises(FrozenInstanceError, match=r"reward cannot be set; trajectory\.add_reward"):
        completion.reward = 1.0  # type: ignore[misc,assignment]
    with pytest.raises(FrozenInstanceError, match="did you mean 'reward'"):
        completion.rewrad = 1.0  # type: ignore[attr-defined]
    row = TokenSequence(extend_tokens(None, [1]), 1, [], [])
    with pytest.raises(FrozenInstanceError, match="take a copy of the list"):
        row.token_ids = []


def test_copies_pickles_and_weak_references_are_as_ever() -> None:
    """Each of them is equal after a copy and a pickle, and can be referred to weakly."""
    step = Step(thought="t", reward=0.5)
    for one in (Trajectory(name="a"), step, Episode(id="e"), TrajectoryGroup([])):
        assert pickle.loads(pickle.dumps(one)) == one == copy.copy(one) == copy.deepcopy(one)
        assert weakref.ref(one)() is one
