"""AllRewards: set at any time, unknown until then, and on a span whichever way they are set."""

from __future__ import annotations

import copy
import json
import pickle
import random
from typing import Any

import openai
import pytest

from otel_rollout import (
    NoActiveRolloutError,
    Reward,
    Trajectory,
    UnknownCompletionError,
    get_current_trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.testing import Raw, Reply
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    message: Any = {"role": "user", "content": text}
    return client.chat.completions.create(model="m", messages=[message], **options)


def replayed(recording: Recording) -> Trajectory:
    """What the spans rebuild; the same in every order, and equal to what was exported."""
    spans = list(recording.spans) * 2
    for seed in range(4):
        random.Random(seed).shuffle(spans)
        (trajectory,) = reconstruct(spans)
        assert trajectory.to_dict() == recording.trajectory.to_dict()
    return trajectory


def events(recording: Recording) -> list[dict[str, Any]]:
    """The attributes of every `gen_ai.evaluation.result` event, by span."""
    return [
        {"span": span.name, **dict(event.attributes or {})}
        for span in recording.spans
        for event in span.events
        if event.name == "gen_ai.evaluation.result"
    ]


def test_unknown_is_not_zero(recording: Recording):
    """A reward that nobody set is None; one that is 0 is 0."""
    with rollout("x") as trajectory:
        assert trajectory.reward is None
        assert dict(trajectory.rewards) == {}
    assert recording.trajectory.reward is None
    assert replayed(recording).reward is None
    assert "rollout.reward" not in dict(recording.spans[0].attributes or {})
    assert events(recording) == []
    trajectory.reward = 0
    assert trajectory.reward == 0
    assert trajectory.reward is not None
    assert replayed(recording).reward == 0


def test_rewards_while_the_rollout_runs(recording: Recording, clients: Clients):
    """Every way to say a reward ends on the rollout span, and the last word counts."""
    client = clients.sync(clients.serve(Reply(choices=[Reply("a"), Reply("b")])))
    with rollout("x") as trajectory:
        completion = ask(client, "hi", n=2)
        trajectory.reward = 0.25
        record_reward(1, explanation="all tests pass")
        trajectory.rewards["format"] = 0.5
        record_reward(0, name="length")
        record_reward(0.1, completion_id=completion.id)
        record_reward(0.2, completion_id=completion.id, choice=1, name="style")
        left, right = trajectory.completions
        assert (left.reward, right.reward) == (0.1, 0.2)
    assert trajectory.reward == 1
    assert isinstance(trajectory.reward, Reward)
    assert trajectory.reward.explanation == "all tests pass"
    assert dict(trajectory.rewards) == {"format": 0.5, "length": 0.0}
    rollout_span = recording.spans_named("invoke_agent")[0]
    assert dict(rollout_span.attributes or {})["rollout.reward"] == 1.0
    assert recording.spans_named("evaluate") == []
    again = replayed(recording)
    assert again.reward == 1
    left, right = again.completions
    assert (left.reward, right.reward) == (0.1, 0.2)
    assert right.reward is not None
    assert right.reward.name == "style"


def test_the_event_of_the_conventions(recording: Recording, clients: Clients):
    """Each reward is a `gen_ai.evaluation.result` event: on the rollout span, or on its own."""
    client = clients.sync(clients.serve(Reply("x", id="resp-1")))
    with rollout("x") as trajectory:
        ask(client, "hi")
        record_reward(1, explanation="good")
        record_reward(0.5, name="format")
        record_reward(0.2, completion_id="resp-1")
    trajectory.rewards["late"] = 3
    name, value = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
    assert events(recording) == [
        {
            "span": "invoke_agent x",
            name: "reward",
            value: 1.0,
            "gen_ai.evaluation.explanation": "good",
        },
        {"span": "invoke_agent x", name: "format", value: 0.5},
        {"span": "invoke_agent x", name: "reward", value: 0.2, "gen_ai.response.id": "resp-1"},
        {"span": "evaluate rollout: reward late", name: "late", value: 3.0},
    ]


def test_a_reward_after_the_end(recording: Recording):
    """A late reward is a span of its own in the rollout's trace, and is there on replay."""
    with rollout("x") as trajectory:
        pass
    assert trajectory.sealed
    trajectory.reward = 0.7
    (span,) = recording.spans_named("evaluate")
    root = recording.spans_named("invoke_agent")[0]
    assert span.name == "evaluate rollout: reward"
    assert span.context is not None
    assert root.context is not None
    assert span.parent is not None
    assert span.context.trace_id == root.context.trace_id
    assert span.parent.span_id == root.context.span_id
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "evaluate"
    assert attributes["rollout.id"] == trajectory.id
    assert recording.trajectory.reward == 0.7
    assert replayed(recording).reward == 0.7


def test_a_late_reward_in_another_rollout(recording: Recording):
    """A reward that is set inside another rollout goes to the trace of the one that it is for."""
    with rollout("scored") as trajectory:
        pass
    with rollout("judge") as judge:
        trajectory.reward = 0.5
        assert judge.reward is None
    (span,) = recording.spans_named("evaluate")
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trajectory.trace_id != judge.trace_id
    rewards = {t.name: t.reward for t in reconstruct(recording.spans)}
    assert rewards == {"scored": 0.5, "judge": None}


def test_the_last_of_several_late_rewards_counts(recording: Recording):
    """Late rewards replace earlier ones in the order in which they were set, on replay too."""
    with rollout("x") as trajectory:
        trajectory.reward = 0.1
        trajectory.rewards["a"] = 1
        trajectory.rewards["b"] = 1
    for value in (0.9, 0.5, 0.3, 0.7, 0.2):
        trajectory.reward = value
    trajectory.rewards["a"] = 2
    assert trajectory.reward == 0.2
    assert list(trajectory.rewards.items()) == [("b", 1.0), ("a", 2.0)]
    assert replayed(recording).reward == 0.2
    assert list(replayed(recording).rewards.items()) == [("b", 1.0), ("a", 2.0)]


def test_rewards_can_be_taken_back(recording: Recording):
    """A removed reward is unknown again, before and after the end, on replay too."""
    with rollout("x") as trajectory:
        trajectory.reward = 1
        trajectory.reward = None
        assert trajectory.reward is None
        trajectory.reward = 1
        trajectory.rewards["a"] = 1
        trajectory.rewards["b"] = 1
        del trajectory.rewards["a"]
        with pytest.raises(KeyError):
            trajectory.rewards["a"]
    trajectory.reward = None
    assert trajectory.reward is None
    assert replayed(recording).reward is None
    trajectory.rewards.clear()
    assert dict(replayed(recording).rewards) == {}
    trajectory.rewards["b"] = 4
    trajectory.reward = 2
    assert replayed(recording).reward == 2
    assert dict(replayed(recording).rewards) == {"b": 4.0}


def test_removing_a_reward_that_is_not_there(recording: Recording):
    """`del` of a name that has no reward is a KeyError; None once more is nothing."""
    with rollout("x") as trajectory:
        trajectory.reward = None
        with pytest.raises(KeyError):
            del trajectory.rewards["nope"]


def test_a_named_reward_can_become_the_reward(recording: Recording):
    """`reward = rewards[name]` sets the reward to that number, and the named one stays."""
    with rollout("x") as trajectory:
        trajectory.rewards["correct"] = 1
        trajectory.reward = trajectory.rewards["correct"]
        assert trajectory.reward == 1.0
        trajectory.rewards["also"] = trajectory.rewards["correct"]
    assert dict(trajectory.rewards) == {"correct": 1.0, "also": 1.0}
    assert replayed(recording).reward == 1


def test_all_named_rewards_at_once(recording: Recording):
    """Assigning to `rewards` replaces the named ones and leaves the others."""
    with rollout("x") as trajectory:
        trajectory.reward = 1
        trajectory.rewards["old"] = 1
        trajectory.rewards = {"a": 0.5, "b": 0}
        assert dict(trajectory.rewards) == {"a": 0.5, "b": 0.0}
        assert trajectory.rewards["a"].name == "a"
    trajectory.rewards = {"c": 1}
    assert dict(trajectory.rewards) == {"c": 1.0}
    assert replayed(recording).reward == 1
    assert dict(replayed(recording).rewards) == {"c": 1.0}


def test_rewards_that_are_assigned_keep_what_they_have(recording: Recording):
    """Label and explanation; the name is that of the assignment."""
    with rollout("x") as trajectory:
        judged = Reward(0.5, name="judge", label="fair", explanation="half of it")
        trajectory.rewards = {"quality": judged}
    for each in (trajectory, replayed(recording)):
        found = each.rewards["quality"]
        assert isinstance(found, Reward)
        assert (found.name, found.label, found.explanation) == ("quality", "fair", "half of it")


def test_a_late_step_reward(recording: Recording, clients: Clients):
    """A reward of one completion can come late; it is on that completion alone."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        first, second = ask(client, "a"), ask(client, "b")
    record_reward(0.5, completion_id=second.id, trajectory=trajectory)
    assert [c.reward for c in trajectory.completions] == [None, 0.5]
    assert [c.reward for c in replayed(recording).completions] == [None, 0.5]
    assert trajectory.reward is None
    with pytest.raises(UnknownCompletionError) as caught:
        record_reward(0.5, completion_id="nope", trajectory=trajectory)
    assert repr(first.id) in str(caught.value)


@pytest.mark.parametrize("late", [False, True])
def test_an_unknown_completion_is_refused(recording: Recording, clients: Clients, late: bool):
    """A reward for a completion, or a choice, that is not there is refused and not recorded."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        completion = ask(client, "a")
        if not late:
            with pytest.raises(UnknownCompletionError, match=r"no completion 'nope'; it has"):
                record_reward(1, completion_id="nope")
            with pytest.raises(UnknownCompletionError, match="with choice 1"):
                record_reward(1, completion_id=completion.id, choice=1)
    if late:
        with pytest.raises(UnknownCompletionError, match=r"no completion 'nope'; it has"):
            record_reward(1, completion_id="nope", trajectory=trajectory)
    assert trajectory.all_rewards == {}
    assert recording.spans_named("evaluate") == []


WRONG: list[Any] = [float("nan"), float("inf"), float("-inf"), "1", "good", None, [1]]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_only_finite_numbers_are_rewards(recording: Recording, value: Any):
    """What is no finite number is refused where it is written, and the old reward stays."""
    with rollout("x") as trajectory:
        trajectory.reward = 0.5
        with pytest.raises(ValueError, match="expected a finite number, got"):
            record_reward(value)
        if value is not None:
            with pytest.raises(ValueError, match="expected a finite number, got"):
                trajectory.reward = value
        with pytest.raises(ValueError, match="reward 'named'"):
            trajectory.rewards["named"] = value
        assert trajectory.reward == 0.5
    assert dict(trajectory.rewards) == {}


def test_numbers_of_any_kind_are_rewards(recording: Recording):
    """Integers, booleans and fractions count as the float that they are."""
    with rollout("x") as trajectory:
        for value, number in ((1, 1.0), (True, 1.0), (False, 0.0), (Reward(0.5), 0.5)):
            trajectory.reward = value
            assert trajectory.reward == number
            assert isinstance(trajectory.reward, float)


def test_there_must_be_a_trajectory(recording: Recording):
    """Outside a rollout a reward needs its trajectory said."""
    with pytest.raises(NoActiveRolloutError):
        record_reward(1)
    with rollout("x") as trajectory:
        assert record_reward(0.5) == 0.5
        assert get_current_trajectory().reward == 0.5
    record_reward(0.75, trajectory=trajectory, explanation="late")
    assert replayed(recording).reward == 0.75
    later = replayed(recording).reward
    assert isinstance(later, Reward)
    assert later.explanation == "late"


def test_a_reward_is_a_float():
    """A reward computes, compares and formats like its number, and says what it is for."""
    reward = Reward(0.5, name="n", completion_id="c", choice_index=2, explanation="why")
    assert isinstance(reward, float)
    assert (reward + 1, reward == 0.5, f"{reward:.2f}", hash(reward)) == (
        1.5,
        True,
        "0.50",
        hash(0.5),
    )
    assert sum([reward, Reward(1)]) == 1.5
    assert reward.key == ("n", "c", 2)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_reward_is_carried_whole(protocol: int):
    """Pickled, copied and as JSON fields it keeps its name, completion and explanation."""
    reward = Reward(0.5, name="n", completion_id="c", choice_index=2, explanation="why")
    for other in (
        pickle.loads(pickle.dumps(reward, protocol)),
        copy.copy(reward),
        copy.deepcopy(reward),
        Reward.from_dict(reward.to_dict()),
    ):
        assert type(other) is Reward
        assert other == 0.5
        assert (other.name, other.completion_id, other.choice_index) == ("n", "c", 2)
        assert other.explanation == "why"
    assert Reward(1).to_dict() == {"value": 1.0}


def test_a_trajectory_that_was_read_takes_rewards(recording: Recording):
    """A trajectory from spans or from a file can be scored too, with no rollout behind it."""
    with rollout("x"):
        pass
    again = Trajectory.from_dict(replayed(recording).to_dict())
    again.reward = 0.5
    again.rewards["a"] = 1
    assert Trajectory.from_dict(again.to_dict()) == again
    assert (again.reward, dict(again.rewards)) == (0.5, {"a": 1.0})
    assert recording.trajectory.reward is None


# --- weights, judges elsewhere, policy versions


def test_weighted_rewards_make_the_reward(recording: Recording):
    """Where the reward is not set itself it is the weighted sum of those that have a weight."""
    with rollout("x") as trajectory:
        record_reward(0.5, name="speed")
        assert trajectory.reward is None
        record_reward(1.0, name="correct", weight=0.9)
        record_reward(0.5, name="format", weight=0.2)
        assert trajectory.reward == pytest.approx(1.0)
    assert recording.trajectory.reward == pytest.approx(1.0)
    assert replayed(recording).rewards["format"].weight == 0.2
    (span,) = recording.spans_named("invoke_agent")
    assert dict(span.attributes or {})["rollout.reward"] == pytest.approx(1.0)
    recording.trajectory.reward = 0.25
    assert recording.trajectory.reward == 0.25


@pytest.mark.parametrize(
    "options",
    [
        {"weight": 1.0},
        {"name": "a", "weight": float("nan")},
        {"name": "a", "weight": "1"},
        {"name": "a", "weight": 1.0, "completion_id": "c"},
    ],
)
def test_what_can_be_weighted(recording: Recording, options: dict[str, Any]):
    """Only a named reward of the trajectory, by a finite number."""
    with rollout("x"), pytest.raises(ValueError, match="expected a weight only for"):
        record_reward(1.0, **options)


@pytest.mark.not_replayed("its last rewards are not set on the live trajectory")
def test_a_judge_that_has_only_the_id(recording: Recording):
    """A reward by the trajectory's id is a span; rebuilding puts it where it belongs."""
    with rollout("x") as trajectory:
        record_reward(0.1, name="own")
    with rollout("other"):
        pass
    record_reward(0.7, trajectory=trajectory.id, explanation="good")
    record_reward(0.9, name="own", trajectory=trajectory.id)
    first, other = reconstruct(recording.spans)
    assert first.reward == 0.7
    assert first.rewards == {"own": 0.9}
    assert first.warnings == [NO_CALL.words]
    assert other.reward is None


@pytest.mark.not_replayed("rewards are set on a copy")
def test_a_judge_that_has_a_copy(recording: Recording, clients: Clients):
    """What is recorded on a trajectory that was read is on its trace, and on the copy."""
    with rollout("x"):
        reply = ask(clients.sync(clients.serve()), "hi")
    read = Trajectory.from_dict(recording.trajectory.to_dict())
    record_reward(0.5, trajectory=read)
    record_reward(1.0, trajectory=read, completion_id=reply.id)
    assert read.reward == 0.5
    (rebuilt,) = reconstruct(recording.spans)
    assert rebuilt.reward == 0.5
    assert rebuilt.completions[0].reward == 1.0
    evaluations = recording.spans_named("evaluate")
    assert {f"{s.context.trace_id:032x}" for s in evaluations if s.context} == {read.trace_id}
    with pytest.raises(UnknownCompletionError):
        record_reward(1.0, trajectory=read, completion_id="unknown")


@pytest.mark.not_replayed("its last rewards are not set on the live trajectory")
def test_judges_and_the_process_itself_in_order_of_time(recording: Recording):
    """Whoever scored last counts, whether or not it was the rollout's own process."""
    with rollout("x") as trajectory:
        pass
    trajectory.reward = 0.1
    record_reward(0.2, trajectory=trajectory.id)
    trajectory.reward = 0.3
    assert [t.reward for t in reconstruct(recording.spans)] == [0.3]
    record_reward(0.4, trajectory=trajectory.id)
    for seed in range(4):
        spans = list(recording.spans) * 2
        random.Random(seed).shuffle(spans)
        assert [t.reward for t in reconstruct(spans)] == [0.4]


def test_the_policy_version_of_each_call(recording: Recording, clients: Clients):
    """A function is asked as each call is made: a rollout may run through an update."""
    version = 7
    client = clients.sync(clients.serve())
    with rollout("x", policy_version=lambda: version) as trajectory:
        ask(client, "a")
        version = 8
        ask(client, "b")
        ask(client, "c")
    assert trajectory.policy_version == 7
    assert [c.policy_version for c in trajectory.completions] == [7, 8, 8]
    assert replayed(recording).policy_versions == [7, 8]


def test_a_policy_version_that_changes_during_a_reply(recording: Recording, clients: Clients):
    """Both are known, at once, from spans, and from JSON; one that stays is there once."""
    version: int | str = 7
    server = clients.serve(Reply("some words", chunk_delay=0.01))
    with rollout("x", policy_version=lambda: version) as trajectory:
        stream = clients.sync(server).chat.completions.create(
            model="m", messages=[user("hi")], stream=True
        )
        next(iter(stream))
        version = 8
        list(stream)
        clients.sync(server).chat.completions.create(model="m", messages=[user("again")])
    for each in (trajectory, replayed(recording), Trajectory.from_json(trajectory.to_json())):
        assert [c.policy_versions for c in each.completions] == [(7, 8), (8,)]
        assert [c.policy_version for c in each.completions] == [7, 8]
        assert each.policy_versions == [7, 8]


@pytest.mark.parametrize("version", [lambda: 1 / 0, lambda: 1.5, lambda: None, lambda: True])
def test_a_policy_version_that_is_not_known(recording: Recording, clients: Clients, version: Any):
    """A function that fails, or gives no version, leaves it unknown; the call is made."""
    with rollout("x", policy_version=version) as trajectory:
        ask(clients.sync(clients.serve()), "a")
    assert (trajectory.policy_version, trajectory.policy_versions) == (None, [])
    assert trajectory.completions[0].policy_version is None


def test_a_server_that_says_its_version(recording: Recording, clients: Clients):
    """Where the rollout has none, the version is what the server says of each response."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "meta_info": {"weight_version": "step-12"},
    }
    body = json.dumps({"id": "c1", "choices": [choice]}).encode()
    with rollout("x") as trajectory:
        ask(clients.sync(clients.serve(Raw(body=body))), "a")
    assert trajectory.policy_versions == ["step-12"]


def test_steps_have_the_rewards_of_their_completions(recording: Recording, clients: Clients):
    """Also those that come later, and those that are taken back; what was set on a step stays."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        first, second = ask(client, "a"), ask(client, "b")
        assert [(s.reward, s.scored) for s in trajectory.steps] == [(0.0, False)] * 2
        record_reward(1.0, completion_id=first.id)
        assert [(s.reward, s.scored) for s in trajectory.steps] == [(1.0, True), (0.0, False)]
        trajectory.steps[1].reward = 0.5
    record_reward(2.0, completion_id=first.id, trajectory=trajectory)
    assert [s.reward for s in trajectory.steps] == [2.0, 0.5]
    trajectory.remove_reward((None, first.id, 0))
    assert [(s.reward, s.scored) for s in trajectory.steps] == [(0.0, False), (0.5, True)]
    record_reward(3.0, completion_id=second.id, trajectory=trajectory)
    assert [s.reward for s in trajectory.steps] == [0.0, 3.0]
    assert [s.reward for s in replayed(recording).steps] == [0.0, 3.0]
