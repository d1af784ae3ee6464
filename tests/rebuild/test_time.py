"""Rebuilding takes time in proportion to what there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from otel_rollout import reconstruct
from otel_rollout.trajectory import Conversations
from tests.kit.random_agents import TOOLS, Rollout, operations, resent, turn

pytestmark = pytest.mark.slow


def growing(rollout: Rollout, turns: int) -> None:
    """One conversation, each turn on top of the last."""
    messages = [turn("system", "s")]
    for number in range(turns):
        messages = [*messages, turn("user", f"{number}")]
        reply = {"role": "assistant", "content": f"reply {number}"}
        call = rollout.begin(messages, TOOLS, [reply], "complete")
        rollout.end(call)
        messages = [*messages, resent(call.choices[0], number % 6, 0)]


def compacted(rollout: Rollout, turns: int) -> None:
    """A conversation that begins anew after every ten turns."""
    for number in range(turns // 10):
        messages = [turn("system", "s"), turn("user", f"summary {number}")]
        for step in range(10):
            reply = {"role": "assistant", "content": f"reply {number} {step}"}
            call = rollout.begin(messages, None, [reply], "complete")
            rollout.end(call)
            messages = [*messages, resent(call.choices[0], 0, 0), turn("user", f"{step}")]


def resampled(rollout: Rollout, turns: int) -> None:
    """A prompt that is asked again and again, and answered in other words each time."""
    messages = [turn("user", f"{number}") for number in range(20)]
    for number in range(turns):
        reply = {"role": "assistant", "content": f"reply {number}"}
        rollout.end(rollout.begin(messages, None, [reply], "complete"))


@pytest.mark.parametrize("agent", [growing, compacted, resampled])
def test_time_is_linear(agent: Callable[[Rollout, int], None]) -> None:
    """Twice the turns take about twice the operations to rebuild, whatever the agent does."""

    def rebuild(turns: int) -> int:
        rollout = Rollout(1, None)
        agent(rollout, turns)
        spans = rollout.spans()

        def work() -> None:
            (trajectory,) = reconstruct(spans)
            assert trajectory.warnings == []
            assert len(trajectory.completions) == turns

        return operations(work)

    assert rebuild(400) < 2.4 * rebuild(200)


def test_a_long_prompt_is_walked_once() -> None:
    """What thousands of samples of a long prompt continue is found without a walk for each."""

    def search(samples: int) -> int:
        rollout = Rollout(1, None)
        messages = [turn("user", f"{number}") for number in range(1000)]
        for number in range(samples):
            reply = {"role": "assistant", "content": f"reply {number}"}
            rollout.end(rollout.begin(messages, None, [reply], "complete"))
        (trajectory,) = reconstruct(rollout.spans())
        completions = trajectory.completions
        return operations(lambda: Conversations(completions).ambiguities)

    assert search(100) - search(50) < 5000
