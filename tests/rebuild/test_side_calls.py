"""Side calls of any rollout: the order decides nothing, any content is judged, in linear time."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import reconstruct
from otel_rollout.side_calls import SideCalls
from tests.kit.conversations import TASK, TITLE, TOOLS, said, user
from tests.kit.random_agents import Rollout, operations, turn

SHORT = st.lists(
    st.one_of(
        st.sampled_from([*TITLE, *TASK, user("quota")]),
        st.text(max_size=5).map(user),
        st.text(max_size=5).map(said),
    ),
    min_size=1,
    max_size=4,
)


def plays(requests: list[tuple[list[Any], bool]]) -> Rollout:
    """A rollout that makes these calls: messages, and whether they have tools."""
    made = Rollout(1, None)
    for messages, has_tools in requests:
        turns = [turn(message["role"], message["content"]) for message in messages]
        reply = {"role": "assistant", "content": f"reply {len(made.calls)}"}
        made.end(made.begin(turns, TOOLS if has_tools else None, [reply], "complete"))
    return made


@given(st.lists(st.tuples(SHORT, st.booleans()), max_size=8), st.randoms(use_true_random=False))
def test_the_order_decides_nothing(requests: Any, order: random.Random):
    """However calls come, each is a side call or not; in a rollout without tools none is."""
    (whole,) = reconstruct(plays(requests).spans())
    expected = {c.span_id: c.side_call for c in whole.completions}
    if not any(has_tools for _, has_tools in requests):
        assert set(expected.values()) <= {None}
    shuffled = [*whole.completions, *whole.completions[::2]]
    order.shuffle(shuffled)
    calls = SideCalls()
    for completion in shuffled:
        calls.add(completion)
        calls.reason(completion)
    assert {c.span_id: calls.reason(c) for c in whole.completions} == expected
    assert [h.side_call for h in whole.histories] == sorted(
        (h.side_call for h in whole.histories), key=lambda why: why is not None
    )


@given(st.lists(SHORT, max_size=6))
def test_plain_chats_have_no_side_calls(requests: Any):
    """Whatever they say, as long as no call has tools."""
    (whole,) = reconstruct(plays([(messages, False) for messages in requests]).spans())
    assert all(c.side_call is None for c in whole.completions)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["role", "text", "content", "parts"]), inner),
        ),
        max_leaves=8,
    )
)
def test_content_of_any_shape_is_judged(content: Any):
    """What a request says need not be what a model API takes; nothing raises."""
    (whole,) = reconstruct(plays([([user(content)], False), (list(TASK), True)]).spans())
    assert {c.side_call for c in whole.completions} <= {None, "it asks for a title"}


def test_content_that_is_nested_deep_is_judged():
    """As deep as JSON may be on a span."""
    content: Any = "You are a title generator"
    for _ in range(840):
        content = [content]
    (whole,) = reconstruct(plays([([user(content)], False), (list(TASK), True)]).spans())
    assert [c.side_call for c in whole.completions] == [None, None]


def test_to_judge_is_linear():
    """Twice the calls take about twice the operations, of a chat that grows without tools too."""

    def judge(count: int) -> int:
        made = Rollout(1, None)
        messages = [turn("user", "hello")]
        for number in range(count):
            reply = {"role": "assistant", "content": f"reply {number}"}
            made.end(made.begin(messages, None, [reply], "complete"))
            messages += [turn("assistant", reply["content"]), turn("user", f"{number}")]
            made.end(made.begin([turn("user", "t")], TOOLS, [reply], "complete"))
        (trajectory,) = reconstruct(made.spans())
        completions = trajectory.completions
        fresh = SideCalls()

        def work() -> None:
            for completion in completions:
                fresh.add(completion)
            for completion in completions:
                fresh.reason(completion)

        return operations(work)

    assert judge(200) < 2.4 * judge(100)
