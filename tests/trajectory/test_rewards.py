"""Rewards have one home: whoever reads or sets one reads or sets it there."""

from __future__ import annotations

import pickle
from typing import Any

from otel_rollout import Reward, Step, Trajectory, record_reward, rollout
from otel_rollout.trajectory import AllRewards
from tests.kit.recording import Clients, Recording


def ask(client: Any, text: str) -> Any:
    message = {"role": "user", "content": text}
    return client.chat.completions.create(model="m", messages=[message])


def test_a_reward_is_the_same_wherever_it_is_looked_at(recording: Recording, clients: Clients):
    """Set on a step, a completion or the trajectory; read from each, and from the spans."""
    client = clients.sync(clients.serve("yes"))
    with rollout("x") as trajectory:
        first, second = ask(client, "a"), ask(client, "b")
        trajectory.steps[0].reward = 0.25
        record_reward(0.5, completion_id=second.id)
        trajectory.rewards["style"] = 0.75
    assert [c.reward for c in trajectory.completions] == [0.25, 0.5]
    assert [(s.reward, s.scored) for s in trajectory.steps] == [(0.25, True), (0.5, True)]
    assert trajectory.all_rewards[None, first.id, 0] == 0.25
    assert trajectory.all_rewards["style", None, 0] == 0.75
    trajectory.steps[1].reward = 1.0  # after the end: a span of its own
    assert trajectory.completions[1].reward == 1.0
    assert len(recording.spans_named("evaluate")) == 1


def test_the_last_reward_of_a_completion_counts():
    """Whatever its name; removed, the one before it counts again."""
    rewards = AllRewards()
    rewards.put(Reward(1.0, completion_id="c"))
    rewards.put(Reward(2.0, name="style", completion_id="c"))
    rewards.put(Reward(3.0, completion_id="c", choice_index=1))
    assert rewards.of_completion("c", 0) == 2.0
    assert rewards.of_completion("c", 1) == 3.0
    rewards.remove(("style", "c", 0))
    assert rewards.of_completion("c", 0) == 1.0
    rewards.remove((None, "c", 0))
    assert rewards.of_completion("c", 0) is None
    assert rewards.of_completion("other", 0) is None
    assert [reward.choice_index for reward in rewards.all()] == [1]


def test_a_change_is_told_once():
    """Also where a reward is set and removed several times in between."""
    told: list[Any] = []
    rewards = AllRewards()
    rewards.on_change = lambda key, reward: told.append((key, reward))
    rewards.put(Reward(1.0))
    with rewards.at_once():
        rewards.put(Reward(2.0))
        rewards.put(Reward(3.0))
        rewards.put(Reward(1.0, name="n"))
        rewards.remove(("n", None, 0))
        assert len(told) == 1
    key = (None, None, 0)
    assert told == [(key, 1.0), (key, 3.0), (("n", None, 0), None)]
    rewards.remove(("unknown", None, 0))
    rewards.join(AllRewards({("far", None, 0): Reward(1.0, name="far")}))
    assert len(told) == 3
    assert rewards["far", None, 0] == 1.0


def test_copies_of_rewards_are_on_no_trace():
    """A pickle has the rewards in their order, and tells nobody of changes."""
    rewards = AllRewards()
    rewards.on_change = lambda *_: None
    rewards.put(Reward(1.0, name="b"))
    rewards.put(Reward(2.0, name="a"))
    copied = pickle.loads(pickle.dumps(rewards))
    assert list(copied.items()) == list(rewards.items())
    assert copied == rewards == {reward.key: reward for reward in rewards.all()}
    assert copied.on_change is None


def test_a_step_that_is_built_by_hand_has_a_reward_of_its_own():
    """It is that of no completion until the trajectory is judged."""
    step = Step(chat_completions=[{"role": "user", "content": "a"}], reward=0.5)
    trajectory = Trajectory(name="hand", steps=[step])
    assert (step.reward, step.scored) == (0.5, True)
    assert trajectory.reward is None
    assert not trajectory.all_rewards
    again = pickle.loads(pickle.dumps(step))
    assert again == step
    again.reward = 1.0
    assert again != step
