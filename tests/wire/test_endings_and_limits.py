"""What servers do to replies: stopped, echoed, constrained, counted otherwise, several at once."""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

import pytest

from otel_rollout import Completion, rollout, to_token_rows
from otel_rollout.testing import Raw
from tests.kit.calling import BOTH, Caller, done, entered, outcome
from tests.kit.conversations import ASK
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
PROMPT, IDS, LOGPROBS = [101, 7, 102], [40, 41, 2], [-0.25, -1.5, -0.125]
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
ROW = (PROMPT + IDS, [0, 0, 0, 1, 1, 1], [0.0, 0.0, 0.0, *LOGPROBS])


def entries(values: list[Any], ids: list[int] | None = None) -> Json:
    names = [{}] * len(values) if ids is None else [{"id": token} for token in ids]
    rows = [
        {**name, "token": "x", "bytes": None, "logprob": value, "top_logprobs": []}
        for name, value in zip(names, values, strict=True)
    ]
    return {"content": rows}


def chat(finish: str | None = "stop", **choice: Any) -> Json:
    """A reply of vLLM's; `choice` is what is different about its choice."""
    message = {"role": "assistant", "content": "ab"}
    whole = {
        "index": 0,
        "finish_reason": finish,
        "message": message,
        "token_ids": IDS,
        "logprobs": entries(LOGPROBS),
        **choice,
    }
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [whole], "usage": USAGE, "prompt_token_ids": PROMPT}


def stream_of(reply: Json) -> Raw:
    """The same reply as a stream of one choice in two chunks, and its count."""
    (choice,) = reply["choices"]
    head = {**reply, "object": "chat.completion.chunk", "usage": None}
    rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason")}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [
        {**head, "choices": [{**rest, "delta": choice["message"], "finish_reason": None}]},
        {**head, "choices": [last]},
        {**head, "choices": [], "usage": reply["usage"]},
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    return Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")


def body(value: Any) -> Raw:
    return Raw(body=json.dumps(value).encode())


def served(recording: Recording, clients: Clients, reply: Raw, **request: Any) -> Completion:
    with rollout("x"):
        create: Any = clients.sync(clients.serve(reply)).chat.completions.create
        answer = create(model="m", messages=ASK, stream=not reply.body, **request)
        if not reply.body:
            list(answer)
    return recording.trajectories[-1].completions[0]


def trained(recording: Recording, **options: Any) -> tuple[list[int], list[int], list[float]]:
    (row,) = recording.trajectory.token_sequences(**options)
    return row.token_ids, row.loss_mask, row.logprobs


# --- replies that the server stopped


STOPPED = ["repetition", "content_filter", "insufficient_system_resource", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", STOPPED)
def test_a_reply_that_the_server_stopped(
    recording: Recording, clients: Clients, reason: str | None, stream: bool
) -> None:
    """It is truncated, as is one whose reason nobody knows; it trains unless that is masked."""
    reply = chat(reason)
    completion = served(recording, clients, stream_of(reply) if stream else body(reply))
    assert (completion.status, completion.truncated) == ("complete", True)
    assert completion.finish_reason == reason
    assert trained(recording) == ROW
    assert recording.trajectory.token_sequences()[0].truncated
    assert recording.trajectory.token_sequences(mask_truncated=True) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_a_finish_reason(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """Servers leave out what is null: without the member it is truncated as with null."""
    reply = chat(None)
    if stream:
        raw = stream_of(reply)
        raw = Raw(
            chunks=[part.replace(b', "finish_reason": null', b"") for part in raw.chunks or ()],
            content_type=raw.content_type,
        )
    else:
        del reply["choices"][0]["finish_reason"]
        raw = body(reply)
    completion = served(recording, clients, raw)
    assert "finish_reason" not in completion.choice
    assert (completion.status, completion.truncated) == ("complete", True)
    assert trained(recording) == ROW


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "function_call", "STOP", "end_turn"])
def test_a_reply_that_the_model_ended(recording: Recording, clients: Clients, reason: str) -> None:
    """It is whole, whichever API's word a proxy passes on."""
    completion = served(recording, clients, body(chat(reason)))
    assert (completion.status, completion.truncated) == ("complete", False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_the_server_aborted(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """Around an update of the weights: it is cancelled, and trains only when asked for."""
    reply = chat("abort")
    completion = served(recording, clients, stream_of(reply) if stream else body(reply))
    assert (completion.status, completion.trainable) == ("cancelled", False)
    assert completion.error == {"type": "Aborted", "message": "finish reason 'abort'"}
    assert (completion.aborted, completion.truncated) == (True, True)
    assert completion.message is not None
    trajectory = recording.trajectory
    assert trajectory.status == "complete"
    rows = trajectory.token_sequences()
    assert rows == []
    assert rows.dropped[0].reason == (
        "its call ended as 'cancelled': Aborted: finish reason 'abort'"
    )
    assert trained(recording, on_abort="keep") == ROW
    assert trajectory.token_sequences(on_abort="keep")[0].truncated
    with pytest.raises(ValueError, match=r"on_abort=.*'drop' or 'keep', got 'yes'"):
        trajectory.token_sequences(on_abort="yes")  # type: ignore[arg-type]


def test_an_aborted_reply_of_a_rollout_that_does_not_train(
    recording: Recording, clients: Clients
) -> None:
    """Asking for aborted replies asks for no more than those."""
    with rollout("x", trainable=False):
        server = clients.serve(body(chat("abort")))
        clients.sync(server).chat.completions.create(model="m", messages=ASK)
    assert recording.trajectory.token_sequences(on_abort="keep") == []


def test_an_abort_of_one_choice(recording: Recording, clients: Clients) -> None:
    """The other choices of the response are what they are."""
    reply = chat()
    reply["choices"].append({**chat("abort")["choices"][0], "index": 1})
    reply["usage"] = {**USAGE, "completion_tokens": 6}
    with rollout("x"):
        clients.sync(clients.serve(body(reply))).chat.completions.create(
            model="m", messages=ASK, n=2
        )
    assert [c.status for c in recording.trajectory.completions] == ["complete", "cancelled"]
    assert len(recording.trajectory.token_sequences()) == 1


@pytest.mark.parametrize("usage", [{**USAGE, "completion_tokens": 0}, None])
def test_an_abort_before_the_first_token(
    recording: Recording, clients: Clients, usage: Json | None
) -> None:
    """An empty list of ids says that nothing was sampled, not that nobody asked."""
    for reason, options in (("abort", {"on_abort": "keep"}), ("stop", {})):
        reply = {**chat(reason, token_ids=[], logprobs=None), "usage": usage}
        served(recording, clients, body(reply))
        rows = recording.trajectories[-1].token_sequences(**options)  # type: ignore[arg-type]
        assert rows == []
        assert rows.dropped[0].reason == (
            f"it has no token ids: nothing was sampled (finish reason {reason!r})"
        )


# --- constrained decoding


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_constrained_decoding(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """They are said to be such, also where the server calls them raw; an option makes them NaN."""
    reply = {**chat(), "logprobs_mode": "raw_logprobs"}
    request: Json = {"response_format": {"type": "json_object"}}
    raw = stream_of(reply) if stream else body(reply)
    completion = served(recording, clients, raw, **request)
    assert completion.logprobs_mode == "constrained"
    assert completion.logprobs == LOGPROBS
    assert trained(recording) == ROW
    (row,) = to_token_rows(recording.trajectories)
    assert row["logprobs_modes"] == ["constrained"]
    ids, mask, logprobs = trained(recording, constrained_logprobs="nan")
    assert (ids, mask) == ROW[:2]
    assert logprobs[:3] == [0.0] * 3
    assert all(math.isnan(value) for value in logprobs[3:])
    (row,) = to_token_rows(recording.trajectories, constrained_logprobs="nan")
    assert all(math.isnan(value) for value in row["logprobs"][3:])
    with pytest.raises(ValueError, match="constrained_logprobs"):
        recording.trajectory.token_sequences(constrained_logprobs="drop")  # type: ignore[arg-type]


def test_free_log_probabilities_stay(recording: Recording, clients: Clients) -> None:
    """The option is for constrained decoding alone."""
    completion = served(recording, clients, body(chat()), response_format={"type": "text"})
    assert completion.logprobs_mode is None
    assert trained(recording, constrained_logprobs="nan") == ROW


# --- values that stand for others


@pytest.mark.parametrize(
    "value",
    [
        *(-9999.0, -9999, -3.4028234663852886e38, -3.40282e38, -1.7976931348623157e308),
        *(-3.3895313892515355e38, math.inf, -(10**400), 10**400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_values_that_stand_for_none(
    recording: Recording, clients: Clients, value: float, stream: bool
) -> None:
    """-9999, a lowest float and what no float is are no log-probabilities; it is said."""
    reply = chat(logprobs=entries([-0.25, value, -math.inf]))
    completion = served(recording, clients, stream_of(reply) if stream else body(reply))
    assert completion.logprobs == [-0.25, None, -math.inf]
    (warning,) = recording.trajectory.warnings
    assert "1 log-probabilities are not numbers, or stand for one that is not known" in warning


def test_a_list_without_a_log_probability(recording: Recording, clients: Clients) -> None:
    """Wherever it is, it is no answer to ids; a list that was not asked for is not there at all."""
    empty: list[Json] = [
        {"logprobs": {"content": []}},
        {"logprobs": {"content": None, "refusal": []}},
        {"logprobs": {"token_logprobs": []}},
        {"logprobs": None, "completion_probabilities": []},
        {"logprobs": None, "meta_info": {"output_token_logprobs": []}},
    ]
    for choice in empty:
        served(recording, clients, body(chat(**choice)))
        (dropped,) = recording.trajectories[-1].token_sequences().dropped
        assert dropped.reason == "it has 3 token ids and 0 log-probabilities"
    for nothing in (None, {}, {"content": None}):
        served(recording, clients, body(chat(logprobs=nothing)))
        assert len(recording.trajectories[-1].token_sequences()) == 1


def test_low_values_that_are_known(recording: Recording, clients: Clients) -> None:
    """A value that is only low is what the server said."""
    values = [-9998.9, -10000.5, -0.0]
    assert served(recording, clients, body(chat(logprobs=entries(values)))).logprobs == values
    assert recording.trajectory.warnings == []


def test_entries_that_the_server_left_out(recording: Recording, clients: Clients) -> None:
    """llama.cpp leaves out tokens that are a part of a character: the other ids are not all."""
    reply = chat(token_ids=None, logprobs=entries(LOGPROBS[:2], IDS[:2]))
    completion = served(recording, clients, body(reply))
    assert completion.token_ids is None
    (dropped,) = recording.trajectory.token_sequences().dropped
    assert dropped.reason == "the server sent no token ids of 1 of the 3 tokens it sampled"
    whole = chat(token_ids=None, logprobs=entries(LOGPROBS, IDS))
    assert served(recording, clients, body(whole)).token_ids == IDS


# --- echo


def text_reply(said: str, logprobs: Json | None, **choice: Any) -> Json:
    whole = {"index": 0, "text": said, "finish_reason": "stop", "logprobs": logprobs, **choice}
    head = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [whole], "usage": USAGE}


def echoed(*, as_ids: bool, texts: list[str]) -> Json:
    """Log-probabilities of prompt and reply, as vLLM writes them, offsets included."""
    names = [f"token_id:{token}" for token in PROMPT + IDS] if as_ids else texts
    offsets = [sum(map(len, names[:end])) for end in range(len(names))]
    values = [None, -3.0, -3.0, *LOGPROBS]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


TEXTS = ["Once ", "upon", "!", " a", " time", ""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token_id:"])
@pytest.mark.parametrize("listed", [False, True], ids=["no list of ids", "a list of ids"])
@pytest.mark.parametrize("prompt", ["Once upon!", PROMPT], ids=["text", "ids"])
def test_an_echo(
    recording: Recording, clients: Clients, prompt: Any, listed: bool, as_ids: bool, stream: bool
) -> None:
    """A list of ids is the truth, and vLLM leaves the prompt out of the text; no prompt trains."""
    reply_text = " a time"
    ids: Json = {"token_ids": IDS, "prompt_token_ids": PROMPT} if listed else {}
    said = reply_text if listed else "Once upon!" + reply_text
    reply = text_reply(said, echoed(as_ids=as_ids, texts=TEXTS), **ids)
    raw = body(reply)
    if stream:
        (choice,) = reply["choices"]
        last = {"index": 0, "text": "", "finish_reason": "stop"}
        chunks = [
            {**reply, "usage": None, "choices": [{**choice, "finish_reason": None}]},
            {**reply, "usage": None, "choices": [last]},
            {**reply, "choices": []},
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
        raw = Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")
    with rollout("x"):
        create: Any = clients.sync(clients.serve(raw)).completions.create
        answer = create(model="m", prompt=prompt, echo=True, stream=stream)
        if stream:
            list(answer)
    (completion,) = recording.trajectory.completions
    assert completion.logprobs == LOGPROBS
    assert completion.token_ids == (IDS if listed or as_ids else None)
    if not (as_ids and not listed and prompt == PROMPT):  # offsets into other texts tell nothing
        assert completion.message == {"role": "assistant", "content": reply_text}
    if listed or (as_ids and prompt == PROMPT):
        assert trained(recording) == ROW
    else:
        assert recording.trajectory.token_sequences() == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_a_prefill(recording: Recording, clients: Clients, stream: bool) -> None:
    """In chats vLLM puts the text that the reply goes on from before it: nobody sampled that."""
    prefill = {"role": "assistant", "content": [{"type": "text", "text": "Sure: "}]}
    reply = chat(message={"role": "assistant", "content": "Sure: ab"})
    options = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    with rollout("x") as trajectory:
        server = clients.serve(stream_of(reply) if stream else body(reply))
        create: Any = clients.sync(server).chat.completions.create
        for messages in ([*ASK, prefill], ASK):
            answer = create(model="m", messages=messages, stream=stream, extra_body=options)
            list(answer)
    first, other = trajectory.completions
    assert first.message == first.choice["message"] == {"role": "assistant", "content": "ab"}
    assert other.message == {"role": "assistant", "content": "Sure: ab"}
    assert trajectory.histories[1].messages() == [*ASK, prefill, first.message]
    assert [c.token_ids for c in trajectory.completions] == [IDS, IDS]


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token_id:"])
def test_an_echo_of_several_choices(recording: Recording, clients: Clients, as_ids: bool) -> None:
    """The count is compared with what was sampled, without the prompts that are repeated."""
    ids: Json = {"token_ids": IDS, "prompt_token_ids": PROMPT}
    reply = text_reply(" a time", echoed(as_ids=as_ids, texts=TEXTS), **ids)
    reply["choices"].append({**reply["choices"][0], "index": 1})
    reply["usage"] = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    with rollout("x"):
        create: Any = clients.sync(clients.serve(body(reply))).completions.create
        create(model="m", prompt="Once upon!", echo=True, n=2)
    rows = recording.trajectory.token_sequences()
    assert [(row.token_ids, row.loss_mask, row.logprobs) for row in rows] == [ROW, ROW]


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token_id:"])
@pytest.mark.parametrize("said", ["Once upon! a time", " a time", "<s>Once upon! a time"])
def test_an_echo_without_a_count(
    recording: Recording, clients: Clients, said: str, as_ids: bool
) -> None:
    """Where nothing tells the prompt's tokens from the others, none of them is called sampled.

    The prompt may also be left out of the text, or be written there in another way.
    """
    logprobs = echoed(as_ids=as_ids, texts=TEXTS)
    if not as_ids:
        del logprobs["text_offset"]
    reply = {**text_reply(said, logprobs, prompt_token_ids=PROMPT), "usage": None}
    with rollout("x"):
        clients.sync(clients.serve(body(reply))).completions.create(
            model="m", prompt="Once upon!", echo=True
        )
    (completion,) = recording.trajectory.completions
    assert (completion.token_ids, completion.logprobs) == (None, None)
    assert recording.trajectory.token_sequences() == []


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_tokens": 0.0}]
)
def test_a_limit_of_no_tokens(recording: Recording, clients: Clients, limit: Json) -> None:
    """VLLM samples one token all the same; nobody asked for it."""
    served(recording, clients, body(chat()), **limit)
    rows = recording.trajectory.token_sequences()
    assert rows == []
    assert f"allows no token ({next(iter(limit))}=0)" in rows.dropped[0].reason


def test_an_echo_and_a_limit_of_no_tokens(recording: Recording, clients: Clients) -> None:
    """The log-probabilities are the prompt's, and no one else's."""
    logprobs = {"tokens": ["a"] * 3, "token_logprobs": [None, -1.0, -2.0], "text_offset": [0, 1, 2]}
    reply = text_reply("", logprobs, token_ids=IDS[:1], prompt_token_ids=PROMPT)
    with rollout("x"):
        clients.sync(clients.serve(body(reply))).completions.create(
            model="m", prompt=PROMPT, echo=True, max_tokens=0
        )
    (completion,) = recording.trajectory.completions
    assert (completion.token_ids, completion.logprobs) == (IDS[:1], None)
    assert recording.trajectory.token_sequences() == []


# --- several conversations at once, and paths that nobody knows


def test_a_batch_of_chats(recording: Recording, clients: Clients) -> None:
    """Each choice answers the conversation of its index, and is a history of its own."""
    conversations = [[{"role": "user", "content": text}] for text in ("a?", "b?" * 300)]
    reply = chat()
    del reply["prompt_token_ids"]
    second = {"index": 1, "message": {"role": "assistant", "content": "B"}, "token_ids": IDS[:2]}
    reply["choices"].append({**reply["choices"][0], **second, "logprobs": None})
    reply["usage"] = {**USAGE, "completion_tokens": 5}
    server = clients.serve(routes={"/v1/chat/completions/batch": body(reply)})
    request = {"model": "m", "messages": conversations}
    with rollout("x"):
        answer: Any = clients.sync(server).post(
            "/chat/completions/batch", cast_to=object, body=request
        )
    assert answer == reply
    trajectory = recording.trajectory
    assert [c.request_messages for c in trajectory.completions] == conversations
    assert [c.token_ids for c in trajectory.completions] == [IDS, IDS[:2]]
    assert [len(history.messages()) for history in trajectory.histories] == [2, 2]
    assert trajectory.completions[0].request == request
    assert trajectory.warnings == []


def test_a_batch_of_chats_with_several_choices(recording: Recording, clients: Clients) -> None:
    """As with several prompts of a text completion: those of one conversation stand together."""
    conversations = [[{"role": "user", "content": text}] for text in ("a?", "b?")]
    reply = chat()
    (choice,) = reply["choices"]
    reply["choices"] = [{**choice, "index": index} for index in range(4)]
    server = clients.serve(routes={"/v1/chat/completions/batch": body(reply)})
    request = {"model": "m", "messages": conversations, "n": 2}
    with rollout("x") as trajectory:
        client = clients.sync(server)
        client.post("/chat/completions/batch", cast_to=object, body=request)
    asked = [completion.request_messages for completion in trajectory.completions]
    assert asked == [conversations[0]] * 2 + [conversations[1]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_choices_at_an_unknown_path(recording: Recording, clients: Clients, stream: bool) -> None:
    """What was sampled there is in no completion, and the trajectory says so."""
    raw = stream_of(chat()) if stream else body(chat())
    path = "/inference/v1/generate"
    server = clients.serve(routes={f"/v1{path}": raw})
    with rollout("x"):
        clients.sync(server).post(path, cast_to=object, body={"token_ids": PROMPT})
    assert recording.trajectory.completions == []
    (warning,) = recording.trajectory.warnings
    assert f"its response has choices, but no model API is known at '{path}'" in warning


@pytest.mark.parametrize("reply", [{"data": [1]}, {"choices": []}, {"x": '"choices"'}])
def test_other_replies_at_an_unknown_path(
    recording: Recording, clients: Clients, reply: Json
) -> None:
    """Nothing was sampled: there is nothing to say."""
    server = clients.serve(routes={"/v1/other": body(reply)})
    with rollout("x"):
        clients.sync(server).post("/other", cast_to=object, body={"a": 1})
    assert recording.trajectory.warnings == []


# --- bodies that are not what they are said to be


async def _plain(client: Any) -> Any:
    return await done(client.chat.completions.create(model="m", messages=ASK))


async def _raw(client: Any) -> Any:
    create = client.chat.completions.with_raw_response.create
    return (await done(create(model="m", messages=ASK))).status_code


async def _read(client: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK)) as response:
        return await done(response.read())


async def _post(client: Any) -> Any:
    request = {"model": "m", "messages": ASK}
    return await done(client.post("/chat/completions", cast_to=object, body=request))


WHOLE = json.dumps(chat()).encode()
BODIES: dict[str, tuple[bytes, str, str]] = {
    "no JSON": (b"<html>busy</html>", "application/json", "error"),
    "HTML": (b"<html>busy</html>", "text/html", "error"),
    "nothing": (b"", "application/json", "error"),
    "cut": (WHOLE[:60], "application/json", "error"),
    "a list": (b"[1]", "application/json", "error"),
    "JSON after empty lines": (b"\n" * 99 + WHOLE + b"\n" * 99, "application/json", "complete"),
    "JSON after a byte order mark": (codecs.BOM_UTF8 + WHOLE, "application/json", "complete"),
    "empty lines, called events": (b"\n" * 99 + WHOLE, "text/event-stream", "complete"),
    "JSON": (WHOLE, "application/json", "complete"),
    "JSON, called events": (WHOLE, "text/event-stream", "complete"),
    "JSON, called text": (WHOLE, "text/plain", "complete"),
}


@BOTH
@pytest.mark.parametrize("name", BODIES)
async def test_one_body_has_one_status(
    recording: Recording, clients: Clients, caller: Caller, name: str
) -> None:
    """However the call is made, the same bytes are the same exchange and completion."""
    content, content_type, status = BODIES[name]
    for way in (_plain, _raw, _read, _post):

        async def script(way: Any = way) -> Any:
            server = clients.serve(Raw(body=content, content_type=content_type))
            with rollout("x"):
                return await way(caller.client(clients, server))

        await outcome(caller.run(script()))
    exchanges = [t.exchanges[0] for t in recording.trajectories]
    completions = [t.completions[0] for t in recording.trajectories]
    assert [e.status for e in exchanges] == [status] * 4
    assert [c.status for c in completions] == [status] * 4
    assert [c.token_ids for c in completions] == [IDS if status == "complete" else None] * 4


def test_events_that_are_called_json(recording: Recording, clients: Clients) -> None:
    """The client reads them as a stream, and so does the record."""
    raw = stream_of(chat())
    mislabelled = Raw(chunks=raw.chunks, content_type="application/json")
    completion = served(recording, clients, mislabelled)
    assert (completion.status, completion.stream) == ("complete", True)
    assert completion.token_ids == IDS
