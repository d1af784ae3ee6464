"""Token ids and log-probabilities of every server that gives them, in the shape that it sends.

The replies are written by hand after the servers' own sources, and come over real HTTP to the real
client; what the library made of them is compared with what the server had sampled.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from otel_rollout import Completion, request_token_ids, rollout
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.wire import sampled_texts
from tests.kit.recording import Clients, Recording

HI: Any = [{"role": "user", "content": "hi"}]
PROMPT = [101, 7, 102]
IDS = [40, 41, 2]
LOGPROBS = [-0.25, -1.5, -0.125]
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def chat(message: Any = None, **choice: Any) -> dict[str, Any]:
    """A reply of one choice; `choice` is what the server adds to it."""
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "ab", **(message or {})},
                **choice,
            }
        ],
        "usage": USAGE,
    }


def chunk(delta: Any = None, *, top: Any = None, **choice: Any) -> dict[str, Any]:
    """A chunk of a streamed reply; without anything about a choice it has none."""
    choices = [{"index": 0, "delta": delta or {}, **choice}] if delta or choice else []
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": choices, **(top or {})}


def text(**choice: Any) -> dict[str, Any]:
    """A reply of the legacy endpoint."""
    head = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "usage": USAGE}
    return {**head, "choices": [{"index": 0, "text": "ab", "finish_reason": "stop", **choice}]}


def entries(*, id: bool = False, as_ids: bool = False, count: int = 3) -> dict[str, Any]:  # noqa: A002
    """Log-probabilities as chats have them, with what tells the ids, if something does."""
    rows: list[dict[str, Any]] = []
    for token, logprob in list(zip(IDS, LOGPROBS, strict=True))[:count]:
        name = f"token_id:{token}" if as_ids else "x"
        own = {"id": token} if id else {}
        rows.append({**own, "token": name, "bytes": None, "logprob": logprob, "top_logprobs": []})
    return {"content": rows}


def body(value: Any) -> Raw:
    return Raw(body=json.dumps(value).encode())


def events(*chunks: Any, done: bool = True) -> Raw:
    """A stream of these chunks; one that is text is an event as it is."""
    lines = [c if isinstance(c, str) else f"data: {json.dumps(c)}" for c in chunks]
    lines += ["data: [DONE]"] if done else []
    return Raw(chunks=[f"{line}\n\n".encode() for line in lines], content_type="text/event-stream")


def served(recording: Recording, clients: Clients, reply: Raw, **request: Any) -> Completion:
    """The completion of a call that this is the reply to."""
    server = clients.serve(reply)
    with rollout("x"):
        answer = clients.sync(server).chat.completions.create(
            model="m", messages=HI, **{"stream": not reply.body, **request}
        )
        if not reply.body:
            list(answer)
    (completion,) = recording.trajectory.completions
    assert completion.status == "complete"
    return completion


def told(completion: Completion) -> tuple[Any, Any, Any]:
    return completion.prompt_token_ids, completion.token_ids, completion.logprobs


def trained(recording: Recording) -> tuple[list[int], list[int], list[float]]:
    (row,) = recording.trajectory.token_sequences()
    return row.token_ids, row.loss_mask, row.logprobs


ROW = (PROMPT + IDS, [0, 0, 0, 1, 1, 1], [0.0, 0.0, 0.0, *LOGPROBS])
SGLANG = {"input_ids": PROMPT, "output_ids": [IDS]}
TRIPLES = [[logprob, token, "x"] for token, logprob in zip(IDS, LOGPROBS, strict=True)]
WHOLE: dict[str, Any] = {
    "vllm": {**chat(token_ids=IDS, logprobs=entries()), "prompt_token_ids": PROMPT},
    "vllm, tokens written as ids": {
        **chat(token_ids=None, logprobs=entries(as_ids=True)),
        "prompt_token_ids": PROMPT,
    },
    "sglang": chat(token_ids=IDS, prompt_token_ids=PROMPT, logprobs=entries()),
    "sglang, newer": chat(response_token_ids=IDS, prompt_token_ids=PROMPT, logprobs=entries()),
    "sglang, meta_info": chat(
        prompt_token_ids=PROMPT, meta_info={"output_token_logprobs": TRIPLES}
    ),
    "sglang, extension": {**chat(logprobs=entries()), "sglext": SGLANG},
}
STREAMED: dict[str, list[Any]] = {
    "vllm": [
        chunk({"role": "assistant", "content": ""}, top={"prompt_token_ids": PROMPT}),
        chunk({"content": "a"}, token_ids=IDS[:1], logprobs={"content": entries()["content"][:1]}),
        # A parser may keep text back; what was sampled comes all the same.
        chunk({}, token_ids=IDS[1:2], logprobs={"content": entries()["content"][1:2]}),
        chunk(
            {"content": "b"},
            token_ids=IDS[2:],
            logprobs={"content": entries()["content"][2:]},
            finish_reason="stop",
        ),
        chunk(top={"usage": USAGE}),
    ],
    "sglang, extension": [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "ab"}, logprobs=entries()),
        chunk({}, finish_reason="stop", matched_stop=2),
        chunk(top={"sglext": SGLANG}),
        chunk(top={"usage": USAGE}),
    ],
    "sglang, ids as an event of their own": [
        chunk({"role": "assistant", "content": "ab"}, logprobs=entries()),
        chunk({}, finish_reason="stop"),
        chunk(top={"sglext": {"cached_tokens_details": {"device": 1, "host": 0}}}),
        "event: sglext_ids\ndata: " + json.dumps(chunk(top={"sglext": SGLANG})),
        chunk(top={"usage": USAGE}),
    ],
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_reply(recording: Recording, clients: Clients, name: str):
    """What the server sampled is what the completion has, and what trains."""
    completion = served(recording, clients, body(WHOLE[name]))
    assert told(completion) == (PROMPT, IDS, LOGPROBS)
    assert completion.sampled_in_response == 3
    assert trained(recording) == ROW
    assert completion.response == WHOLE[name]


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_reply(recording: Recording, clients: Clients, name: str):
    """The same for a stream, whose ids come in pieces, or all in the end."""
    completion = served(recording, clients, events(*STREAMED[name]))
    assert told(completion) == (PROMPT, IDS, LOGPROBS)
    assert completion.message == {"role": "assistant", "content": "ab"}
    assert trained(recording) == ROW


def test_choices_of_an_extension(recording: Recording, clients: Clients):
    """SGLang's extension has a list of ids for each choice, and one prompt for all."""
    reply = chat(logprobs=entries())
    second = {**reply["choices"][0], "index": 1, "logprobs": entries(count=2)}
    reply["choices"].append(second)
    reply["sglext"] = {"input_ids": PROMPT, "output_ids": [IDS, IDS[:2]]}
    reply["usage"] = {**USAGE, "completion_tokens": 5}
    server = clients.serve(body(reply))
    with rollout("x"):
        clients.sync(server).chat.completions.create(model="m", messages=HI, n=2)
    first, other = recording.trajectory.completions
    assert told(first) == (PROMPT, IDS, LOGPROBS)
    assert told(other) == (PROMPT, IDS[:2], LOGPROBS[:2])
    assert {c.sampled_in_response for c in (first, other)} == {5}
    assert len(recording.trajectory.token_sequences()) == 2


def test_prompts_of_an_extension_cost_what_is_new(recording: Recording, clients: Clients):
    """A prompt in SGLang's extension is written as the ids that earlier prompts did not have."""
    prompts = [list(range(1000, 5000 + 10 * turn)) for turn in range(12)]
    replies = [
        body({**chat(), "sglext": {"input_ids": ids, "output_ids": [IDS]}}) for ids in prompts
    ]
    server = clients.serve(replies)
    with rollout("x"):
        client = clients.sync(server)
        for _ in prompts:
            client.chat.completions.create(model="m", messages=HI)
    assert [c.prompt_token_ids for c in recording.trajectory.completions] == prompts
    values = [value for span in recording.spans for value in (span.attributes or {}).values()]
    assert sum(len(str(value)) for value in values) < 4 * len(str(prompts[0]))


def test_an_argument_called_input_ids(recording: Recording, clients: Clients):
    """What a tool is called with stays what it is, whatever its arguments are called."""
    pytest.importorskip("anthropic")
    import anthropic

    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"input_ids": PROMPT}}
    reply = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [block],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    server = clients.serve(body(reply))
    client = anthropic.Anthropic(api_key="k", base_url=server.base_url.removesuffix("/v1"))
    with rollout("x"), client:
        client.messages.create(model="m", max_tokens=9, messages=HI)
    (completion,) = recording.trajectory.completions
    assert completion.message == {"role": "assistant", "content": [block]}


def test_llama_cpp_chat(recording: Recording, clients: Clients):
    """llama.cpp has ids on the entries of log-probabilities, and none of the prompt."""
    completion = served(recording, clients, body(chat(logprobs=entries(id=True))))
    assert told(completion) == (None, IDS, LOGPROBS)
    (dropped,) = recording.trajectory.token_sequences().dropped
    assert "token ids of the prompt" in dropped.reason


NATIVE: dict[str, Any] = {
    "index": 0,
    "content": "ab",
    "tokens": IDS,
    "model": "m",
    "stop": True,
    "stop_type": "limit",
    "stopping_word": "",
    "tokens_predicted": 3,
    "tokens_evaluated": 3,
    "completion_probabilities": entries(id=True)["content"],
}


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("with_tokens", [False, True])
def test_llama_cpp_completion(recording: Recording, clients: Clients, path: str, with_tokens: bool):
    """llama.cpp's own endpoint is one that generates; a prompt of ids makes its row exact."""
    reply = NATIVE if with_tokens else {**NATIVE, "tokens": []}
    server = clients.serve(routes={f"/v1{path}": body(reply)})
    with rollout("x"):
        answer: Any = clients.sync(server).post(
            path, cast_to=object, body={"prompt": PROMPT, "n_predict": 3, "temperature": 0.5}
        )
    assert answer == reply
    (completion,) = recording.trajectory.completions
    assert completion.status == "complete"
    assert completion.message == {"role": "assistant", "content": "ab"}
    assert completion.request_messages == [{"role": "user", "content": PROMPT}]
    assert completion.usage == {"prompt_tokens": 3, "completion_tokens": 3}
    assert (completion.finish_reason, completion.truncated) == ("limit", True)
    assert completion.stop_reason is None
    assert completion.sampling == {"n_predict": 3, "temperature": 0.5}
    assert completion.logprobs_mode == "raw"
    assert told(completion) == (PROMPT, IDS, LOGPROBS)
    assert trained(recording) == ROW


def test_llama_cpp_completion_streamed(recording: Recording, clients: Clients):
    """Its stream has no end marker: the last piece says that it is."""
    import openai

    probabilities = NATIVE["completion_probabilities"]
    pieces = [
        {
            "index": 0,
            "content": content,
            "tokens": IDS[start:end],
            "stop": False,
            "completion_probabilities": probabilities[start:end],
        }
        for content, start, end in (("a", 0, 1), ("b", 1, 3))
    ]
    last = {**NATIVE, "content": "", "tokens": []}
    del last["completion_probabilities"]
    replies = [events(*pieces, last, done=False), events(*pieces, done=False)]
    with rollout("x"):
        for reply in replies:
            server = clients.serve(routes={"/v1/completion": reply})
            stream = clients.sync(server).post(
                "/completion",
                cast_to=object,
                body={"prompt": PROMPT, "stream": True},
                stream=True,
                stream_cls=openai.Stream[object],
            )
            list(stream)
    whole, cut = recording.trajectory.completions
    assert told(whole) == (PROMPT, IDS, LOGPROBS)
    assert whole.response == {**NATIVE}
    assert (cut.status, cut.trainable) == ("error", False)
    assert cut.message == {"role": "assistant", "content": "ab"}
    assert trained(recording) == ROW


def test_legacy_tokens_written_as_ids(recording: Recording, clients: Clients):
    """The legacy endpoint writes ids in `tokens`; a prompt of ids is the request's own."""
    logprobs = {
        "tokens": [f"token_id:{token}" for token in IDS],
        "token_logprobs": LOGPROBS,
        "top_logprobs": None,
        "text_offset": [0, 1, 2],
    }
    server = clients.serve(body(text(logprobs=logprobs)))
    with rollout("x"):
        clients.sync(server).completions.create(model="m", prompt=PROMPT)
    assert told(recording.trajectory.completions[0]) == (PROMPT, IDS, LOGPROBS)
    assert trained(recording) == ROW


def test_an_echo_of_tokens_written_as_ids(recording: Recording, clients: Clients):
    """With `echo` the prompt's tokens are no sampled ones."""
    logprobs = {
        "tokens": [f"token_id:{token}" for token in PROMPT + IDS],
        "token_logprobs": [None, -3.0, -3.0, *LOGPROBS],
        "top_logprobs": None,
        "text_offset": [0, 1, 2, 3, 4, 5],
    }
    reply = text(logprobs=logprobs)
    reply["choices"][0]["text"] = "pqrab"
    server = clients.serve(body(reply))
    with rollout("x"):
        clients.sync(server).completions.create(model="m", prompt=PROMPT, echo=True)
    assert told(recording.trajectory.completions[0]) == (PROMPT, IDS, LOGPROBS)
    assert trained(recording) == ROW


@pytest.mark.parametrize("prompt_tokens", [2, 4, None])
def test_a_prompt_of_ids_that_the_server_changed(
    recording: Recording, clients: Clients, prompt_tokens: int | None
):
    """A prompt of another length than was asked with is not known, and nothing trains on it."""
    reply = {**text(token_ids=IDS), "usage": {**USAGE, "prompt_tokens": prompt_tokens}}
    server = clients.serve(body(reply))
    with rollout("x"):
        clients.sync(server).completions.create(model="m", prompt=PROMPT)
    assert told(recording.trajectory.completions[0]) == (None, IDS, None)
    assert recording.trajectory.token_sequences() == []


def test_a_chat_asked_with_ids(recording: Recording, clients: Clients):
    """SGLang takes the ids of a prompt in the place of messages: those are what it saw."""
    reply = body(chat(token_ids=IDS, logprobs=entries()))
    completion = served(recording, clients, reply, extra_body={"input_ids": PROMPT})
    assert told(completion) == (PROMPT, IDS, LOGPROBS)
    assert trained(recording) == ROW


LOST: dict[str, tuple[Any, Any, str | None]] = {
    "ids that a parser lost": (
        {"token_ids": IDS[:1], "logprobs": entries(as_ids=True)},
        (IDS, LOGPROBS),
        None,
    ),
    "log-probabilities that a parser lost": (
        {"token_ids": IDS, "logprobs": entries(as_ids=True, count=1)},
        (IDS, LOGPROBS[:1]),
        "3 token ids and 1 log-probabilities",
    ),
    "log-probabilities that are elsewhere too": (
        {
            "token_ids": IDS,
            "logprobs": entries(count=1),
            "meta_info": {"output_token_logprobs": TRIPLES},
        },
        (IDS, LOGPROBS),
        None,
    ),
    "both lost": (
        {"token_ids": IDS[:2], "logprobs": entries(count=2)},
        (IDS[:2], LOGPROBS[:2]),
        "sampled 3 tokens and sent 2 token ids",
    ),
    "a token that is not written as an id": (
        {
            "logprobs": {
                "content": [
                    *entries(as_ids=True, count=2)["content"],
                    {"token": "x", "logprob": -1.0},
                ]
            }
        },
        (None, [-0.25, -1.5, -1.0]),
        "sent no token ids",
    ),
    "ids that are none": ({"token_ids": ["a", "b", "c"]}, (None, None), "have 'a' at place 0"),
    "lists for no choice": ({"token_ids": []}, (None, None), "sent no token ids"),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_lost(recording: Recording, clients: Clients, name: str, stream: bool):
    """Places with fewer tokens are never mixed with one that has more, nor filled up."""
    choice, expected, reason = LOST[name]
    if stream:
        first = chunk({"role": "assistant", "content": "ab"}, **choice)
        first["prompt_token_ids"] = PROMPT
        reply = events(first, chunk({}, finish_reason="stop"), chunk(top={"usage": USAGE}))
    else:
        reply = body({**chat(**choice), "prompt_token_ids": PROMPT})
    completion = served(recording, clients, reply)
    assert told(completion) == (PROMPT, *expected)
    rows = recording.trajectory.token_sequences()
    if reason is None:
        assert trained(recording) == ROW
    else:
        assert rows == []
        assert reason in rows.dropped[0].reason


@pytest.mark.parametrize(
    "extension",
    [{"output_ids": [[]]}, {"output_ids": []}, {"output_ids": None}, {"output_ids": "x"}, [], "x"],
)
def test_an_extension_without_ids(recording: Recording, clients: Clients, extension: Any):
    """Whatever else is in SGLang's place for ids, the completion is there and has none."""
    completion = served(recording, clients, body({**chat(), "sglext": extension}))
    assert told(completion) == (None, None, None)


@pytest.mark.parametrize(
    "meta",
    [{"output_token_logprobs": [None]}, {"output_token_logprobs": [[-1.0]]}, [], None, "x"],
)
def test_meta_info_of_another_shape(recording: Recording, clients: Clients, meta: Any):
    """The same for `meta_info`."""
    completion = served(recording, clients, body(chat(meta_info=meta)))
    assert told(completion) == (None, None, None)


def test_unknown_and_odd_log_probabilities(recording: Recording, clients: Clients):
    """NaN and null are not known; integers are numbers; an infinite one is what was said."""
    values: list[Any] = [math.nan, None, -1, -math.inf, "x"]
    content = [{"token": "x", "logprob": value} for value in values]
    reply = chat(logprobs={"content": content})
    completion = served(recording, clients, body(reply))
    assert completion.logprobs == [None, None, -1.0, -math.inf, None]
    assert type(completion.logprobs[2]) is float


@pytest.mark.parametrize(
    ("request_says", "reply_says", "mode"),
    [
        ({}, {}, None),
        ({"logprobs_mode": "processed_logprobs"}, {}, "processed"),
        ({"logprobs_mode": "raw_logprobs"}, {}, "raw"),
        ({"logprobs_mode": "processed_logprobs"}, {"logprobs_mode": "raw_logprobs"}, "raw"),
        ({"logprobs_mode": "raw_logits"}, {}, None),
        ({"logprobs_mode": 3}, {}, None),
    ],
)
def test_which_log_probabilities(
    recording: Recording, clients: Clients, request_says: Any, reply_says: Any, mode: Any
):
    """Raw or processed is what the server says, else what it was asked for, else not known."""
    reply = body({**chat(logprobs=entries()), **reply_says})
    completion = served(recording, clients, reply, extra_body=request_says)
    assert completion.logprobs_mode == mode


@pytest.mark.parametrize("place", ["choice", "reply"])
def test_sglang_says_which_weights_and_what_stopped_it(
    recording: Recording, clients: Clients, place: str
):
    """The version of the weights is on the choice or on the reply; `matched_stop` is a stop."""
    version = {"weight_version": "step-7"}
    reply = chat(matched_stop=2, **({"meta_info": version} if place == "choice" else {}))
    if place == "reply":
        reply["metadata"] = version
    completion = served(recording, clients, body(reply))
    assert completion.policy_version == "step-7"
    assert completion.stop_reason == 2


def test_sampling_parameters(recording: Recording, clients: Clients):
    """What changes the distribution that was sampled from is among the sampling parameters."""
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "structured_outputs": {"regex": "a"},
        "stop_regex": "b",
        "ebnf": "c",
        "json_schema": "{}",
        "min_tokens": 2,
        "stop_token_ids": [3],
        "logit_bias": {"4": 1},
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "grammar": "d",
    }
    completion = served(
        recording,
        clients,
        body(chat()),
        temperature=0.5,
        extra_body={**extra, "user": "u", "return_token_ids": True},
    )
    assert completion.sampling == {"temperature": 0.5, **extra}


def test_the_public_server_is_read_the_same_way(recording: Recording, clients: Clients):
    """Ids that are written as tokens are those that the server gives as ids."""
    server: ModelServer = clients.serve("hello")
    with rollout("x"):
        clients.sync(server).chat.completions.create(
            model="m", messages=HI, extra_body={"return_tokens_as_token_ids": True}
        )
    (completion,) = recording.trajectory.completions
    content = completion.choice["logprobs"]["content"]
    assert [f"token_id:{token}" for token in completion.token_ids or ()] == [
        entry["token"] for entry in content
    ]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_streamed_legacy_reply(recording: Recording, clients: Clients, repeats: bool):
    """Ids of the prompt are on a choice's first chunk, or on each; they are the prompt once."""
    pieces = [
        {
            **text(text=content, finish_reason=finish, token_ids=IDS[start:end]),
            "usage": USAGE if finish else None,
        }
        for content, finish, start, end in (
            ("a", None, 0, 1),
            ("", None, 1, 2),
            ("b", "stop", 2, 3),
        )
    ]
    for number, (start, end) in enumerate(((0, 1), (1, 2), (2, 3))):
        choice = pieces[number]["choices"][0]
        choice["logprobs"] = {"tokens": ["x"], "token_logprobs": LOGPROBS[start:end]}
        if number == 0 or repeats:
            choice["prompt_token_ids"] = PROMPT
    server = clients.serve(events(*pieces))
    with rollout("x"):
        list(clients.sync(server).completions.create(model="m", prompt="pqr", stream=True))
    (completion,) = recording.trajectory.completions
    assert told(completion) == (PROMPT, IDS, LOGPROBS)
    assert completion.message == {"role": "assistant", "content": "ab"}
    assert trained(recording) == ROW


def test_asking_sglang_for_the_ids_of_a_stream(recording: Recording, clients: Clients):
    """What SGLang refuses for a stream can be left out, and its extension asked for instead."""
    server = clients.serve(events(*STREAMED["sglang, extension"]))
    fields = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    with request_token_ids(return_token_ids=False, **fields), rollout("x"):
        list(clients.sync(server).chat.completions.create(model="m", messages=HI, stream=True))
    sent = json.loads(server.exchanges[0].request)
    assert sent["return_token_ids"] is False
    assert {key: sent[key] for key in fields} == fields
    assert trained(recording) == ROW


@pytest.mark.parametrize(
    ("logprobs", "texts"),
    [
        (None, []),
        ({"content": [{"token": "a"}, {"token": "\ufffd"}]}, [b"a", None]),
        ({"content": [{"token": "\ufffd", "bytes": [195]}]}, [b"\xc3"]),
        ({"content": [{"token": "x", "bytes": ["no"]}]}, [None]),
        ({"content": [{"token": "token_id:7"}]}, [None]),
        ({"content": ["damaged"]}, []),
        ({"tokens": ["a", "b"], "token_logprobs": [-1, -1]}, [b"a", b"b"]),
    ],
)
def test_texts_of_tokens(logprobs: Any, texts: list[bytes | None]):
    """As log-probabilities have them; a part of a character has its bytes, or is not known."""
    assert sampled_texts({"logprobs": logprobs}) == texts


def test_texts_of_tokens_that_are_listed_with_their_ids():
    """SGLang's, where it was asked for them."""
    rows = [[-0.5, 1, "a"], [-0.5, 2, None]]
    assert sampled_texts({"meta_info": {"output_token_logprobs": rows}}) == [b"a", None]
