"""Tokens of prompts and replies: by usage, else by ids, of all calls; unknown is None."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anthropic
import openai
import pytest

from otel_rollout import Trajectory, overviews, rollout
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.view import Overview, Where
from otel_rollout.view.as_text import format_trajectory
from tests.kit.conversations import user
from tests.kit.recording import Clients
from tests.view.made import Call, made


def counts(trajectory: Trajectory) -> tuple[int | None, int | None]:
    """Tokens of prompts, and sampled ones."""
    overview = Overview.of(trajectory)
    return overview.prompt_tokens, overview.sampled_tokens


def usage(prompt: Any, sampled: Any) -> dict[str, Any]:
    """What a server counts."""
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": sampled}}


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_of_all_calls_is_summed(clients: Clients, stream: bool, n: int) -> None:
    """A prompt counts once for all choices of its call; a refused call used nothing."""
    client = clients.sync(clients.serve(["a", "b", Raw(400, b'{"error": {"message": "no"}}')]))
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    with rollout("agent") as trajectory:
        for _ in range(3):
            with suppress(openai.APIError):
                reply: Any = client.chat.completions.create(
                    model="m", messages=[user("hi")], n=n, **(more if stream else {})
                )
                list(reply)
    calls = {each.span_id: each.usage for each in trajectory.completions if each.usage}
    assert len(calls) == 2
    expected = [
        sum(each[name] for each in calls.values())
        for name in ("prompt_tokens", "completion_tokens")
    ]
    assert counts(trajectory) == tuple(expected)
    assert f", {expected[1]} sampled tokens, {expected[0]} prompt tokens" in format_trajectory(
        trajectory, width=None
    )


@pytest.mark.usefixtures("recording")
def test_messages_are_counted_too() -> None:
    """Under the names that Anthropic's API has."""
    with ModelServer("Bonjour.") as server:
        url = server.base_url.removesuffix("/v1")
        with (
            anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
            rollout("x") as made_by_it,
        ):
            client.messages.create(model="c", max_tokens=9, messages=[user("hi")])
    found = counts(made_by_it)
    assert None not in found
    assert min(each or 0 for each in found) > 0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call([user("x")], extra=usage(7, 3)), (7, 3)),
        (Call([user("x")], prompt_ids=[1, 2], ids=[3]), (2, 1)),
        (Call([user("x")], prompt_ids=[1, 2], ids=[3], extra=usage(0, 0)), (2, 1)),
        (Call([user("x")], extra=usage(7, None)), (7, None)),
        (Call([user("x")], extra=usage(None, 3)), (None, 3)),
        (Call([user("x")], extra=usage(0, 0)), (None, None)),
        (Call([user("x")]), (None, None)),
    ],
)
def test_what_is_not_counted_is_not_known(call: Call, expected: tuple[Any, Any]) -> None:
    """A single call without a count makes the sum of a trajectory unknown, and never 0."""
    assert counts(made(call)) == expected
    known = Call([user("y")], extra=usage(10, 10))
    total = tuple(None if each is None else each + 10 for each in expected)
    assert counts(made(call, known)) == total
    filtered = Where.parse("prompt_tokens is None").matches(Overview.of(made(call)))
    assert filtered == (expected[0] is None)


def test_a_table_has_them() -> None:
    """`overviews(...)` is a table with both columns."""
    (row,) = overviews(made(Call([user("x")], extra=usage(7, 3))))
    assert (row.to_dict()["prompt_tokens"], row.to_dict()["sampled_tokens"]) == (7, 3)
