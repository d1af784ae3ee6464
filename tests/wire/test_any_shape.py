"""Requests and replies of any shape: a completion is read of each, and asking it raises nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from otel_rollout import Completion
from otel_rollout.spans import Exchange, members_of
from otel_rollout.trajectory import AllRewards, completions_of
from otel_rollout.trajectory.tokens import token_sequences
from otel_rollout.wire import api_of, extend
from tests.kit.model_apis import COHERE, CONVERSE, GEMINI, TALKS

Json = dict[str, Any]
Place = tuple[Any, ...]
ODD: list[Any] = [
    *(None, True, 0, -1, 5, 1.5, 10**400, -(10**400), math.nan, math.inf),
    *("", "x", "token_id:1", [], [1], [None], ["a"], [[1, 2]], {}, {"a": 1}, {"~packed": -1}),
]
IDS, PROMPT = [40, 41], [7, 8]
ENTRIES = [{"id": token, "token": "x", "logprob": -0.5} for token in IDS]
CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "message": {"role": "assistant", "content": "ab"},
    "token_ids": IDS,
    "logprobs": {"content": ENTRIES, "refusal": None},
    "meta_info": {"output_token_logprobs": [[-0.5, 40, "a"], [-0.5, 41, "b"]]},
}
CHAT: Json = {
    "id": "c",
    "choices": [CHOICE, {**CHOICE, "index": 1}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 4},
    "sglext": {"output_ids": [IDS, IDS], "input_ids": PROMPT},
    "timings": {"predicted_n": 2},
    "prompt_token_ids": PROMPT,
}
ECHO: Json = {
    "tokens": [f"token_id:{token}" for token in PROMPT + IDS],
    "token_logprobs": [None, -1.0, -0.5, -0.5],
    "text_offset": [0, 1, 2, 3],
}
TEXT: Json = {"id": "c", "choices": [{"index": 0, "text": "hi you", "logprobs": ECHO}]}
FLAT: Json = {
    "content": "ab",
    "tokens": IDS,
    "stop_type": "eos",
    "tokens_predicted": 2,
    "tokens_evaluated": 2,
    "completion_probabilities": ENTRIES,
}
SAID = {"role": "user", "content": "a"}
PIECE = {"token_ids": IDS, "text": "ab", "logprobs": [-0.5, -0.5]}
CHOSEN = [{"token": "x", "tokenId": token, "logProbability": -0.5} for token in IDS]
LOGPROBS: Json = {
    "candidates": [
        {**GEMINI.replies[1]["candidates"][0], "logprobsResult": {"chosenCandidates": CHOSEN}}
    ]
}
THINKING = {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": True}}
CALLS: dict[str, tuple[Json, Json]] = {
    "/chat/completions": ({"messages": [SAID], "n": 2, "max_tokens": 2, "echo": True}, CHAT),
    "/v1/chat/completions": ({"messages": [SAID], "tools": [{}], **THINKING}, CHAT),
    "/chat/completions/batch": ({"messages": [[SAID], [SAID]]}, CHAT),
    "/completions": ({"prompt": "hi", "echo": True, "n": 1}, TEXT),
    "/v1/completions": ({"prompt": ["hi", PROMPT], "echo": True}, TEXT),
    "/completion": ({"prompt": PROMPT, "n_predict": 5}, FLAT),
    **{talk.path: (talk.requests()[1], talk.replies[0]) for talk in TALKS},
    "/models/m:generateContent": (GEMINI.question, LOGPROBS),
    "/api/generate": ({"prompt": "a"}, {"response": "b", "done": True, "logprobs": ENTRIES}),
    "/v2/chat?": (COHERE.question, {**COHERE.replies[1], "logprobs": [PIECE, PIECE]}),
    "/model/m/invoke": (CONVERSE.question, CONVERSE.replies[0]),
}


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where all members and elements of a JSON value are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in inner:
        yield (*here, name)
        if isinstance(part, dict | list):
            yield from places(part, (*here, name))


def changed(value: Json, place: Place, odd: Any) -> Json:
    value = copy.deepcopy(value)
    target: Any = value
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = odd
    return value


def completions(path: str, params: Json, reply: Json) -> list[Completion]:
    prompt = None
    api = api_of(path)
    assert api is not None
    for message in params.get(api.conversation, ()) if api.conversation != "prompt" else ():
        prompt = extend(prompt, message)
    exchange = Exchange(
        span_id="s",
        start_time_ns=1,
        end_time_ns=2,
        process="p",
        started=1,
        ended=2,
        path=path,
        status="complete",
        error=None,
        attempts=1,
        status_code=200,
        policy_version=None,
        stream=True,
        response_id=None,
        key=None,
        members=members_of(params),
        raw_request=None,
        prompt=prompt,
        prompt_is_known=True,
        body=json.dumps(reply),
        events=None,
        prompts=[],
        damage=[],
    )
    return completions_of(exchange, AllRewards({}))


@pytest.mark.parametrize("path", CALLS)
def test_replies_and_requests_of_any_shape(path: str) -> None:
    """Each member in turn is something else; what is asked of a completion still has an answer."""
    params, reply = CALLS[path]
    odd_replies = [(params, changed(reply, at, odd)) for at in places(reply) for odd in ODD]
    odd_params = [
        (changed(params, (name,), odd), reply)
        for name in params
        if name not in ("messages", "contents")
        for odd in ODD
    ]
    asked = [name for name in dir(Completion) if not name.startswith("_")]
    for request, answer in odd_replies + odd_params:
        found = completions(path, request, answer)
        for completion in found:
            for name in asked:
                getattr(completion, name)
        repr(token_sequences(found))
        repr(token_sequences(found, masked=lambda c: c.truncated, constrained_logprobs="nan"))
