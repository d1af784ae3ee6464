"""Alternatives and texts of prompts: where servers put them."""

from __future__ import annotations

from typing import Any

import pytest

from otel_rollout.wire import Alternative, alternatives, prompt_texts

CHAT = [{"token": "a", "logprob": -0.1, "bytes": [97]}, {"token": "b", "logprob": -2.0}]
ENTRY = {"token": "a", "logprob": -0.1, "top_logprobs": CHAT}
BOTH = [Alternative(b"a", None, -0.1), Alternative(b"b", None, -2.0)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"logprobs": {"content": [ENTRY]}}, BOTH),
        (
            {
                "logprobs": {
                    "tokens": ["a"],
                    "token_logprobs": [-0.1],
                    "top_logprobs": [{"b": -2.0, "a": -0.1}],
                }
            },
            BOTH,
        ),
        (
            {
                "output": [
                    {
                        "content": [
                            {"logprobs": [{"token": "a", "logprob": -0.1, "top_logprobs": CHAT}]}
                        ]
                    }
                ]
            },
            BOTH,
        ),
        (
            {
                "logprobsResult": {
                    "chosenCandidates": [{"token": "a", "logProbability": -0.1, "tokenId": 5}],
                    "topCandidates": [
                        {"candidates": [{"token": "a", "logProbability": -0.1, "tokenId": 5}]}
                    ],
                }
            },
            [Alternative(b"a", 5, -0.1)],
        ),
        (
            {"meta_info": {"output_top_logprobs": [[[-0.1, 5, "a"], [-2.0, 6, None]]]}},
            [Alternative(b"a", 5, -0.1), Alternative(None, 6, -2.0)],
        ),
        (
            {
                "completion_probabilities": [
                    {"token": "a", "id": 5, "probs": [{"tok_str": "a", "prob": 1.0}]}
                ]
            },
            [Alternative(b"a", None, 0.0)],
        ),
        (
            {
                "logprobs": {
                    "content": [
                        {
                            "token": "token_id:7",
                            "logprob": -0.1,
                            "top_logprobs": [{"token": "token_id:7", "logprob": -0.1}],
                        }
                    ]
                }
            },
            [Alternative(None, 7, -0.1)],
        ),
    ],
)
def test_alternatives_of_every_server(choice: dict[str, Any], expected: list[Alternative]):
    """The most likely first, with text, id and log-probability as far as they came."""
    assert alternatives(choice) == [expected]


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"logprobs": None},
        {"logprobs": {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": []}]}},
        {"logprobs": {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": 7}]}},
        {"logprobs": {"content": ["a", None]}},
        {"logprobs": {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": "x"}},
        {"logprobsResult": {"topCandidates": [{"candidates": ["a"]}]}},
        {"meta_info": {"output_top_logprobs": [[["x", 5, "a"], [1], 7]]}},
    ],
)
def test_where_none_came_there_are_none(choice: dict[str, Any]):
    """Also where what came is of another shape."""
    assert alternatives(choice) == []


def test_texts_of_prompts():
    """Of the ids in `prompt_logprobs`; a part of a character is no text."""
    listed = [None, {"5": {"decoded_token": "a"}, "6": {"decoded_token": "\ufffd"}}, {"x": 1}]
    assert prompt_texts({}, {"prompt_logprobs": listed}) == {5: b"a"}
    assert prompt_texts({"prompt_logprobs": listed}, {}) == {5: b"a"}
    assert prompt_texts({}, {"prompt_logprobs": 7}) == {}
