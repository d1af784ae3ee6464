"""Rates by policy version and task: failures, pass@k, tokens, order, and what is in no rate."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory
from otel_rollout.command.cli import main
from otel_rollout.errors import ConfigurationError
from otel_rollout.view.answers import CURVES, Answers
from otel_rollout.view.curves import FAILED, By, Curve, SampleRow, Scores, pass_at_k
from otel_rollout.view.html import InMemory
from tests.view.made import ask, scored, write

Output = pytest.CaptureFixture[str]
HOUR = 3600 * 10**9


def sample(reward: float | None, **fields: Any) -> SampleRow:
    """A trajectory of one version."""
    return SampleRow(reward, **fields)


def curve(by: str, *samples: SampleRow, **options: Any) -> list[dict[str, Any]]:
    """The points of a curve."""
    found = Curve(By.parse("by", by), **options)
    for each in samples:
        found.add(each)
    return found.to_list()


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_pass(passes: list[bool], data: st.DataObject):
    """Of all ways to choose k of the samples, those with at least one that passes."""
    k = data.draw(st.integers(1, len(passes)))
    chosen = list(combinations(passes, k))
    expected = sum(map(any, chosen)) / len(chosen)
    assert pass_at_k(len(passes), sum(passes), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_tasks_and_not_over_samples():
    """A task with many samples counts once; one with fewer than k counts not at all."""
    scores = Scores()
    for task, rewards in {"a": [1, 0], "b": [0, 0, 0, 0], "c": [1]}.items():
        for reward in rewards:
            scores.add(sample(reward, task_id=task))
    assert scores.pass_rate == pytest.approx(2 / 7)
    at = {k: scores.pass_at(k) for k in (1, 2, 4, 8)}
    assert at == {1: ((0.5 + 0 + 1) / 3, 3), 2: ((1 + 0) / 2, 2), 4: (0.0, 1), 8: (None, 0)}


def test_what_has_no_reward_is_counted_and_in_no_mean():
    """Unknown is not zero: of a value without a reward nothing is known."""
    first, second = curve(
        "policy_version",
        sample(1.0, versions=(1,), task_id="a"),
        sample(None, versions=(1,), task_id="a"),
        sample(None, versions=(2,), task_id="a"),
    )
    assert (first["count"], first["scored"], first["mean"], first["pass_rate"]) == (2, 1, 1.0, 1.0)
    assert first["pass_at"] == {"1": 1.0}
    assert (second["count"], second["scored"]) == (1, 0)
    assert second["mean"] is second["pass_rate"] is second["pass_at"]["1"] is None


@pytest.mark.parametrize(
    ("threshold", "rate"), [(0.5, 0.75), (0.25, 1.0), (1.0, 0.5), (-1.0, 1.0), (1.5, 0.0)]
)
def test_a_pass_is_what_the_user_says(threshold: float, rate: float):
    """A reward equal to the threshold passes."""
    samples = [sample(reward, task_id="a") for reward in (0.25, 0.5, 1.0, 1.0)]
    (point,) = curve("task_id", *samples, threshold=threshold)
    assert point["pass_rate"] == rate


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ([10, 9, 2], [2, 9, 10]),
        (["step-10", "step-9"], ["step-9", "step-10"]),
        (["f3a", "0b1"], ["f3a", "0b1"]),
        (["final", 3, None, 1], [1, 3, "final", None]),
        ([2.5, 0.5], [0.5, 2.5]),
    ],
)
def test_versions_are_in_their_order(came: list[Any], expected: list[Any]):
    """Numbers by size, names by their numbers, others as they came, and what is not known last."""
    samples = [sample(1.0, versions=() if each is None else (each,)) for each in came]
    assert [point["value"] for point in curve("policy_version", *samples)] == expected


def test_a_trajectory_of_several_versions_counts_at_each():
    """And the answer has how many these are."""
    found = Curve(By.parse("by", "policy_version"))
    for versions in [(1,), (1, 2)]:
        found.add(sample(1.0, versions=versions))
    assert [point["count"] for point in found.to_list()] == [2, 1]
    assert (found.all.count, found.several) == (2, 1)


CRASHED = [sample(None, status="error", task_id="a") for _ in range(12)]


@given(
    st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), st.sampled_from(["complete", *FAILED])))
)
def test_a_failure_has_not_passed(came: list[tuple[float | None, str]]):
    """Rates are of failures and of what has a reward; with `scored_only` of the latter alone."""
    for scored_only in (False, True):
        scores = Scores(scored_only=scored_only)
        for reward, status in came:
            scores.add(sample(reward, status=status))
        failed = [status in FAILED for _, status in came]
        passed = [
            reward == 1 and (scored_only or not fails)
            for (reward, _), fails in zip(came, failed, strict=True)
        ]
        rated = [
            reward is not None or (fails and not scored_only)
            for (reward, _), fails in zip(came, failed, strict=True)
        ]
        assert (scores.count, scores.failed) == (len(came), sum(failed))
        assert (scores.rated, scores.passed) == (sum(rated), sum(passed))


def test_crashes_are_in_the_rates():
    """Of 16 samples 12 crashed, and 3 passed: 19 %, and pass@2 is of all 16."""
    samples = [*CRASHED, *(sample(reward, task_id="a") for reward in (1, 1, 1, 0))]
    (point,) = curve("task_id", *samples)
    assert (point["count"], point["failed"], point["scored"], point["rated"]) == (16, 12, 4, 16)
    assert point["pass_rate"] == 3 / 16
    assert point["pass_at"]["2"] == pytest.approx(pass_at_k(16, 3, 2))
    (point,) = curve("task_id", *samples, scored_only=True)
    assert (point["failed"], point["rated"], point["pass_rate"]) == (12, 4, 0.75)


def test_what_always_fails_is_hardest():
    """It has a rate of 0, and is before what has a low reward."""
    others = [sample(reward, task_id=task) for task, reward in (("b", 0.1), ("c", 1.0))]
    found = curve("task_id", *others, *CRASHED)
    assert [(p["value"], p["pass_rate"]) for p in found] == [("a", 0.0), ("b", 0.0), ("c", 1.0)]


def test_each_k_has_the_number_of_its_tasks():
    """pass@k of few tasks can be below that of more."""
    many = [sample(0.0, task_id="hard") for _ in range(8)]
    few = [sample(1.0, task_id=f"easy-{n}") for n in range(9) for _ in range(4)]
    point = Curve(By.parse("by", "policy_version"))
    for each in (*many, *few):
        point.add(each)
    (found,) = point.to_list()
    assert found["pass_at"] == {"1": 0.9, "2": 0.9, "4": 0.9, "8": 0.0}
    assert found["pass_at_tasks"] == {"1": 10, "2": 10, "4": 10, "8": 1}


def test_sums_of_tokens_say_what_they_are_of():
    """Of a value where no trajectory has counts, the sum is unknown, and not 0."""
    first, second = curve(
        "task_id",
        sample(0.0, task_id="a", prompt_tokens=5, sampled_tokens=2),
        sample(0.0, task_id="a", prompt_tokens=7, sampled_tokens=None),
        sample(1.0, task_id="b"),
    )
    names = ("prompt_tokens", "prompt_tokens_known", "sampled_tokens", "sampled_tokens_known")
    assert [first[name] for name in names] == [12, 2, 2, 1]
    assert [second[name] for name in names] == [None, 0, None, 0]


def test_the_hardest_tasks_are_first():
    """Then what has no reward, then what has no task."""
    tasks = [("easy", 1.0), ("none", None), ("hard", 0.0), (None, 0.0), ("fair", 0.5)]
    found = curve("task_id", *(sample(reward, task_id=task) for task, reward in tasks))
    assert [point["value"] for point in found] == ["hard", "fair", "easy", "none", None]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Two versions of two tasks, with samples that are not scored, and one of no version."""
    lines = []
    for number, (version, task, reward) in enumerate(
        [
            *((1, "a", 0.0), (1, "a", 1.0), (1, "b", 0.0), (1, "b", None)),
            *((2, "a", 1.0), (2, "b", 0.7), (None, "b", 0.2)),
        ]
    ):
        made = scored(f"t{number}", reward, task_id=task, start_time_ns=(number + 1) * HOUR)
        for exchange in made["exchanges"]:
            exchange["policy_version"] = version
        lines.append(made)
    return str(write(tmp_path / "t.jsonl", *lines))


@pytest.mark.parametrize("by", ["policy_version", "task_id"])
def test_the_page_and_the_list_have_the_same_numbers(by: str, path: str, capsys: Output):
    """One computation: and the filter of each point keeps the trajectories that it counts."""
    assert main(["list", "--json", "--group-by", by, "--pass-threshold", "0.6", path]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
    assert summary["pass_threshold"] == 0.6
    lines = Path(path).read_text().splitlines()
    with InMemory(Trajectory.from_json(line) for line in lines) as held:
        asked = Answers(held)
        found = ask(asked, "curve", by=by, **{"pass": 0.6})
        listed = [
            {k: v for k, v in p.items() if k not in ("place", "where")} for p in found["points"]
        ]
        assert listed == summary["groups"]
        for point in found["points"]:
            if point["where"] is not None:
                kept = ask(asked, "trajectories", where=point["where"])
                assert kept["total"] == point["count"]
        part = ask(asked, "curve", by=by, where='task_id == "a"')
        assert part["count"] == 3


def test_a_wrong_question_says_what_is_expected(path: str):
    """In the words of the address."""
    with InMemory([]) as held:
        asked = Answers(held)
        for query, said in [({"by": "x"}, ", ".join(CURVES)), ({"pass": "x"}, "got 'x'")]:
            with pytest.raises(ConfigurationError, match=said):
                ask(asked, "curve", **query)
        for text in ("nan", "inf"):
            with pytest.raises(ConfigurationError, match="finite"):
                ask(asked, "curve", **{"pass": text})
        assert ask(asked, "curve")["points"] == []


def test_the_table_of_the_list(path: str, capsys: Output, monkeypatch: pytest.MonkeyPatch):
    """All values are there, with what passes and what is left out, as wide as the terminal."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list", "--group-by", "policy_version", path]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("by policy_version"))
    assert lines[at].split()[2:] == [
        *("count", "failed", "scored", "mean", "passed", "pass@1", "pass@2", "prompt", "sampled")
    ]
    assert lines[at + 1].split()[:4] == ["1", "4", "0", "3"]
    assert lines[at + 1].split()[5:] == ["33.3%", "25.0%", "of", "2", "100.0%", "of", "1", "-", "-"]
    assert lines[at + 2].split()[5:] == ["100.0%", "100.0%", "of", "2", "-", "-", "-"]
    assert lines[at + 3].split()[0] == "-"
    about = " ".join(text.split())
    assert "passed: reward >= 0.5 (--pass-threshold); a failure has not passed" in about
    assert "1 trajectory without a reward, in no rate" in about
    assert max(map(len, lines[at : at + 4])) <= 100
    assert main(["list", "--group-by", "policy_version", "--scored-only", path]) == 0
    assert "rates are of those with a reward alone" in " ".join(capsys.readouterr().out.split())


def test_no_value_is_left_out(tmp_path: Path, capsys: Output):
    """Also where there are many."""
    lines = [scored(f"t{n}", 1.0, task_id=f"task-{n}") for n in range(45)]
    assert main(["list", "--group-by", "task_id", str(write(tmp_path / "t.jsonl", *lines))]) == 0
    output = capsys.readouterr().out
    table = output[output.index("by task_id") :]
    assert [name for name in (f"task-{n} " for n in range(45)) if name not in table] == []
