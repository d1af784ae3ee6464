"""The test kit: OpenAI's own client over real HTTP must understand every reply of `ModelServer`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout.testing import (
    ByteTokenizer,
    ModelServer,
    Raw,
    Reply,
    SequentialIdGenerator,
    ToolCall,
    token_logprob,
)

pytestmark = pytest.mark.slow

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ADD = ToolCall("add", '{"a":  1, "b": "é"}')
TOKENIZER = ByteTokenizer()


@contextlib.contextmanager
def connected(server: ModelServer) -> Iterator[openai.OpenAI]:
    with (
        server,
        openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=0) as client,
    ):
        yield client


def send(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST where there is something to post."""
    address = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(address.netloc, timeout=30)) as connection:
        connection.request("GET" if body is None else "POST", address.path, body)
        response = connection.getresponse()
        return response.status, response.read()


def post(server: ModelServer, body: dict[str, Any], path: str = "/chat/completions") -> Any:
    return json.loads(send(server.base_url + path, json.dumps(body).encode())[1])


def test_plain_reply_carries_text_ids_and_usage():
    """A plain completion says the text, its exact token ids, and a usage that counts them."""
    with connected(ModelServer(["Paris."], token_ids=True, logprobs=True)) as client:
        completion = client.chat.completions.create(model="m", messages=ASK)
    choice, extra = completion.choices[0], completion.model_extra or {}
    assert (completion.id, completion.model) == ("chatcmpl-000001", "m")
    assert (choice.message.content, choice.finish_reason) == ("Paris.", "stop")
    token_ids = (choice.model_extra or {})["token_ids"]
    assert token_ids == [*b"Paris.", ByteTokenizer.end_token_id]
    assert extra["prompt_token_ids"] == TOKENIZER.encode_messages(ASK)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(extra["prompt_token_ids"])
    assert completion.usage.completion_tokens == len(token_ids)
    assert completion.usage.total_tokens == len(extra["prompt_token_ids"]) + len(token_ids)


def test_log_probabilities_are_one_per_token_and_exact_in_float32():
    """Every sampled id has its entry, strictly negative and unchanged by a float32."""
    with connected(ModelServer("é!", token_ids=True, logprobs=True)) as client:
        choice = client.chat.completions.create(model="m", messages=ASK, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    ids = (choice.model_extra or {})["token_ids"]
    assert [entry.logprob for entry in entries] == [token_logprob(i, t) for i, t in enumerate(ids)]
    for entry in entries:
        assert entry.logprob < 0
        assert struct.unpack("<f", struct.pack("<f", entry.logprob))[0] == entry.logprob
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    assert bytes(byte for entry in entries[:3] for byte in entry.bytes or []) == "é!".encode()


@pytest.mark.parametrize("asked", [False, True])
def test_ids_and_log_probabilities_only_on_request(asked: bool):
    """The server sends them only when the request asks, and else names them, as vLLM does."""
    request = {"messages": ASK, "return_token_ids": asked, "logprobs": asked}
    with ModelServer() as server:
        response = post(server, request)
    choice = response["choices"][0]
    sent = [response["prompt_token_ids"], choice["token_ids"], choice["logprobs"]]
    assert [value is not None for value in sent] == [asked] * 3
    assert choice["stop_reason"] is None


def test_default_reply_echoes_the_last_user_message():
    """Without a reply of its own the server echoes, from text and from parts alike."""
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with connected(ModelServer()) as client:
        completion = client.chat.completions.create(model="m", messages=parts)
        assert completion.choices[0].message.content == "You said: hi"
        assert client.completions.create(model="m", prompt="hi").choices[0].text == "You said: hi"
        assert client.responses.create(model="m", input="hi").output_text == "You said: hi"


RICH = Reply(
    "The capital is Paris — naïve?",
    reasoning="Let me think.",
    tool_calls=[ADD, ToolCall("stop", "", id="mine")],
    message_extra={"annotations": []},
)


NEW_CLIENT = pytest.mark.skipif(
    tuple(map(int, openai.__version__.split(".")[:2])) < (1, 100),
    reason="the client's own stream helpers are not there, or do not work, before openai 1.100",
)


@NEW_CLIENT
def test_stream_accumulates_to_the_plain_reply():
    """The client's accumulator builds from a stream the message that a plain request gets."""
    with connected(ModelServer(RICH)) as client:
        plain = client.chat.completions.create(model="m", messages=ASK)
        with client.chat.completions.stream(model="m", messages=ASK) as stream:
            streamed = stream.get_final_completion()
    expected, got = plain.choices[0], streamed.choices[0]
    assert got.message.content == expected.message.content == RICH.content
    assert (got.message.model_extra or {})["reasoning_content"] == RICH.reasoning
    assert got.finish_reason == expected.finish_reason == "tool_calls"
    assert [(c.id, c.function.arguments) for c in got.message.tool_calls or []] == [
        ("call_000002_0_0", ADD.arguments),
        ("mine", ""),
    ]


def test_stream_carries_ids_in_pieces_and_usage_at_the_end():
    """The deltas' ids and log-probabilities concatenate to those of the plain reply."""
    with connected(ModelServer(RICH, token_ids=True, logprobs=True)) as client:
        plain = client.chat.completions.create(model="m", messages=ASK)
        chunks = list(
            client.chat.completions.create(
                model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
        )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    ids = [token_id for choice in choices for token_id in (choice.model_extra or {})["token_ids"]]
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content or []]
    assert ids == (plain.choices[0].model_extra or {})["token_ids"]
    assert plain.choices[0].logprobs is not None
    assert [e.logprob for e in entries] == [
        e.logprob for e in plain.choices[0].logprobs.content or []
    ]
    prompts = ["prompt_token_ids" in (chunk.model_extra or {}) for chunk in chunks]
    assert prompts == [True] + [False] * (len(chunks) - 1)
    assert chunks[-1].usage == plain.usage
    assert not chunks[-1].choices
    assert sum(bool(choice.delta.tool_calls) for choice in choices) > 4


async def test_async_client():
    """The asynchronous client reads plain and streamed replies."""
    with ModelServer("Paris.") as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="unused") as client:
            plain = await client.chat.completions.create(model="m", messages=ASK)
            stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert plain.choices[0].message.content == "".join(texts) == "Paris."


def test_several_choices():
    """`n` repeats a reply; `choices` gives distinct ones; a stream interleaves them."""
    distinct = Reply(choices=[Reply("heads up"), Reply("tails", finish_reason="length")])
    with connected(
        ModelServer(["same", distinct, distinct], token_ids=True, logprobs=True)
    ) as client:
        same = client.chat.completions.create(model="m", messages=ASK, n=2)
        two = client.chat.completions.create(model="m", messages=ASK, n=2)
        stream = client.chat.completions.create(model="m", messages=ASK, n=2, stream=True)
        streamed = [chunk.choices[0] for chunk in stream]
    assert [choice.message.content for choice in same.choices] == ["same", "same"]
    assert [(c.index, c.message.content) for c in two.choices] == [(0, "heads up"), (1, "tails")]
    assert [c.index for c in streamed[:4]] == [0, 1, 0, 1]
    assert "".join(c.delta.content or "" for c in streamed if c.index == 1) == "tails"
    ids = [(choice.model_extra or {})["token_ids"] for choice in two.choices]
    assert ids == [[*b"heads up", ByteTokenizer.end_token_id], [*b"tails"]]
    assert two.usage is not None
    assert two.usage.completion_tokens == len(ids[0]) + len(ids[1])


def test_fields_of_a_reply_that_change_the_shape():
    """`id`, `usage`, `extra`, `message_extra`, `refusal` and `finish_reason` show on the wire."""
    reply = Reply(
        refusal="No.",
        id="",
        usage=False,
        extra={"weight_version": "7"},
        message_extra={"audio": None},
        finish_reason="content_filter",
    )
    with ModelServer(reply) as server:
        response = post(server, {"messages": ASK})
        body = json.dumps({"messages": ASK, "stream": True}).encode()
        events = send(f"{server.base_url}/chat/completions", body)[1].decode().split("\n\n")
    assert "id" not in response
    assert "usage" not in response
    assert response["weight_version"] == "7"
    assert response["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": "No.",
        "audio": None,
    }
    assert response["choices"][0]["finish_reason"] == "content_filter"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {"refusal": "No.", "audio": None},
        {},
    ]
    assert all(chunk["weight_version"] == "7" for chunk in chunks)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (Raw(404, b'{"error": {"message": "no such model"}}'), openai.NotFoundError),
        (Raw(429, b"slow down", "text/plain", {"retry-after": "1"}), openai.RateLimitError),
        (Raw(503, b"<html>bad gateway</html>", "text/html"), openai.InternalServerError),
        (Raw(599, b""), openai.InternalServerError),
        (Raw(200, b'{"id": '), (json.JSONDecodeError, openai.APIResponseValidationError)),
    ],
)
def test_raw_responses_are_sent_verbatim(raw: Raw, error: Any):
    """Raw bytes, status and headers arrive as given, and the client raises what they mean."""
    server = ModelServer(raw)
    with connected(server) as client:
        with pytest.raises(error) as raised:
            client.chat.completions.create(model="m", messages=ASK)
        exchange = server.exchanges[0]
    assert (exchange.status, exchange.response) == (raw.status, raw.body)
    if isinstance(raised.value, openai.APIStatusError):
        assert raised.value.response.content == raw.body
        assert all(raised.value.response.headers[k] == v for k, v in raw.headers.items())


def test_cut_stream_breaks_in_the_client_and_records_what_was_sent():
    """`cut_after` ends a stream without its end: the client sees so many events and an error."""
    server = ModelServer(Reply("Paris is the capital.", cut_after=2))
    with connected(server) as client:
        seen: list[object] = []
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        # openai 3 wraps what httpx raises, openai 1 and 2 do not.
        with pytest.raises(Exception, match=r"incomplete chunked read|Connection error"):
            collections.deque(map(seen.append, stream))
        assert len(seen) == 2
        assert server.exchanges[0].response.count(b"data: ") == 2


def test_cut_plain_reply_is_a_connection_error():
    """`cut_after` on a plain reply sends half the body, and the client cannot take it for whole."""
    server = ModelServer(Reply("Paris", cut_after=0))
    with connected(server) as client:
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="m", messages=ASK)
        assert b'"choices"' in server.exchanges[0].response
        assert not server.exchanges[0].response.endswith(b"}")


def test_delays_hold_back_headers_and_chunks():
    """`delay` and `chunk_delay` are at least what they say, and stopping does not wait for them."""
    server = ModelServer(Reply("12", delay=0.05, chunk_delay=0.05), chunk_size=1)
    with connected(server) as client:
        begin = time.monotonic()
        list(client.chat.completions.create(model="m", messages=ASK, stream=True))
        assert time.monotonic() - begin >= 0.05 * 6
    with connected(ModelServer(Reply("1", delay=60))) as client:
        late = threading.Thread(target=_expect_connection_error, args=(client,))
        late.start()
        time.sleep(0.1)
    late.join(10)
    assert not late.is_alive()


def _expect_connection_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=ASK)


def test_text_completions_take_every_prompt_shape():
    """A prompt may be text, texts, or ids; ids go in and come out verbatim."""
    with connected(ModelServer("Paris", token_ids=True, logprobs=True)) as client:
        ids = client.completions.create(model="m", prompt=[1, 258, 3])
        texts = client.completions.create(model="m", prompt=["a", "b"], n=2, logprobs=0)
        stream = list(client.completions.create(model="m", prompt="é", stream=True))
    assert (ids.choices[0].model_extra or {})["prompt_token_ids"] == [1, 258, 3]
    assert (ids.choices[0].model_extra or {})["token_ids"] == [*b"Paris", 261]
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [(c.model_extra or {})["prompt_token_ids"] for c in texts.choices[1:3]] == [[97], [98]]
    assert texts.choices[0].logprobs is not None
    assert texts.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert "".join(chunk.choices[0].text for chunk in stream) == "Paris"
    assert (stream[0].choices[0].model_extra or {})["prompt_token_ids"] == [0xC3, 0xA9]
    assert stream[-1].choices[0].finish_reason == "stop"


def test_embeddings_are_deterministic_in_both_encodings():
    """Base64, which the client asks for by default, and floats give the same vectors."""
    with connected(ModelServer()) as client:
        packed = client.embeddings.create(model="e", input=["a", "b"])
        plain = client.embeddings.create(model="e", input=["a", "b"], encoding_format="float")
        short = client.embeddings.create(model="e", input="a", dimensions=3)
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    assert packed.data[0].embedding != packed.data[1].embedding
    assert len(short.data[0].embedding) == 3


@NEW_CLIENT
def test_responses_plain_and_streamed():
    """The Responses API gives reasoning, message and function call items, in a stream as well."""
    with connected(ModelServer(RICH)) as client:
        plain = client.responses.create(model="m", input="hi", previous_response_id="resp_0")
        with client.responses.stream(
            model="m", input=[{"role": "user", "content": "hi"}]
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [item.type for item in plain.output] == ["reasoning", "message"] + 2 * ["function_call"]
    assert plain.output_text == final.output_text == RICH.content
    assert (plain.previous_response_id, plain.status) == ("resp_0", "completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert final.usage == plain.usage
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == RICH.content


def test_truncated_response_is_incomplete():
    """`finish_reason="length"` makes a Responses reply incomplete, for want of tokens."""
    with connected(ModelServer(Reply("Par", finish_reason="length"))) as client:
        response = client.responses.create(model="m", input="hi")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_models_and_unknown_paths():
    """The model list works, and anything else is a 404 in OpenAI's shape."""
    with connected(ModelServer()) as client:
        assert [model.id for model in client.models.list()] == ["test-model"]
        with pytest.raises(openai.NotFoundError, match="no POST /v1/moderations"):
            client.moderations.create(input="x")


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": []}'])
def test_bad_requests_are_refused(body: bytes):
    """A request that is no JSON, or has no messages, is a 400 that says so."""
    with ModelServer() as server:
        status, response = send(f"{server.base_url}/chat/completions", body)
    assert status == 400
    assert set(json.loads(response)["error"]) == {"message", "type", "code", "param"}


def test_failing_replies_are_an_error_that_is_not_retried():
    """A raising function, an exhausted list and a wrong type are an HTTP 500 that says so."""

    def fail(body: dict[str, Any]) -> str:
        raise ValueError(f"no idea about {body['model']}")

    wrong: Any = [7]
    failing = [(fail, "no idea about m"), ([], "ran out of replies"), (wrong, "gave 7")]
    for reply, reason in failing:
        with (
            ModelServer(reply) as server,
            openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=3) as client,
        ):
            with pytest.raises(openai.InternalServerError, match=reason):
                client.chat.completions.create(model="m", messages=ASK)
            assert len(server.exchanges) == 1


def test_exchanges_hold_the_bytes_of_the_wire():
    """What a client sent and received is what `exchanges` holds, until it is cleared."""
    server = ModelServer("Paris.")
    with connected(server) as client:
        raw = client.chat.completions.with_raw_response.create(model="m", messages=ASK)
        (exchange,) = server.exchanges
        assert exchange.path == "/v1/chat/completions"
        assert json.loads(exchange.request)["messages"] == ASK
        assert exchange.request_headers["authorization"] == "Bearer unused"
        assert (exchange.status, exchange.response) == (200, raw.content)
        server.clear()
        assert server.exchanges == []


def test_the_same_requests_give_the_same_bytes():
    """Two servers answer the same requests, plain and streamed, with equal bytes."""
    requests: dict[str, dict[str, Any]] = {
        "/chat/completions": {"messages": ASK, "n": 2},
        "/completions": {"prompt": ["p", "q"]},
        "/responses": {"input": "i"},
    }

    def run() -> list[bytes]:
        with ModelServer(RICH) as server:
            for path, body in requests.items():
                for stream in (False, True):
                    content = json.dumps({**body, "stream": stream}).encode()
                    assert send(server.base_url + path, content)[0] == 200
            return [exchange.response for exchange in server.exchanges]

    first, second = run(), run()
    assert len(first) == 6
    assert first == second


async def test_concurrent_requests():
    """Two hundred requests at once all get their own answer."""
    with ModelServer() as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="unused") as client:

            async def ask(number: int) -> tuple[str, str | None]:
                messages: list[Any] = [{"role": "user", "content": str(number)}]
                completion = await client.chat.completions.create(model="m", messages=messages)
                return completion.id, completion.choices[0].message.content

            answers = await asyncio.gather(*(ask(number) for number in range(200)))
        assert [said for _, said in answers] == [f"You said: {number}" for number in range(200)]
        assert len({response_id for response_id, _ in answers}) == 200
        assert len(server.exchanges) == 200


def test_a_list_of_replies_is_shared_out_once():
    """Concurrent requests each take a different reply of a list."""
    with ModelServer(str(number) for number in range(50)) as server:
        said: list[str] = []

        def ask() -> None:
            for _ in range(10):
                response = post(server, {"messages": ASK})
                said.append(response["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(said, key=int) == [str(number) for number in range(50)]


def test_clients_that_hang_up_are_silent(capfd: pytest.CaptureFixture[str]):
    """Resets before, inside and after a request print nothing, and the server lives on."""
    slow = Reply("x" * 4000, chunk_delay=0.001)
    with ModelServer(slow) as server:
        address = ("127.0.0.1", urlsplit(server.base_url).port or 0)
        body = json.dumps({"messages": ASK, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        for data, read in (
            (b"", 0),
            (b"POST /v1", 0),
            (head, 0),
            (head + body, 0),
            (head + body, 9),
        ):
            with socket.create_connection(address) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(data)
                if read:
                    connection.recv(read)
        time.sleep(0.3)
        assert all(exchange.status == 200 for exchange in server.exchanges)
        assert len(server.exchanges) == 2
        assert post(server, {"messages": ASK})["choices"]
    assert capfd.readouterr() == ("", "")


def test_stopping_closes_kept_connections():
    """A stopped server is gone for pooled connections too, and can be started again."""
    server = ModelServer()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.base_url
    with server:
        url = f"{server.base_url}/models"
        kept = http.client.HTTPConnection(urlsplit(url).netloc)
        kept.request("GET", "/v1/models")
        assert kept.getresponse().read()
    with contextlib.closing(kept):
        assert kept.sock.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        send(url)
    server.stop()
    with server.start():
        assert send(f"{server.base_url}/models")[0] == 200


def test_chunk_size_must_be_positive():
    """A chunk size that could never send anything is refused at once."""
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ModelServer(chunk_size=0)


text = st.text(min_size=1, max_size=20)
replies = st.builds(
    Reply,
    st.none() | text,
    reasoning=st.none() | text,
    refusal=st.none() | text,
    tool_calls=st.lists(st.builds(ToolCall, text, text), max_size=2),
    finish_reason=st.sampled_from([None, "length"]),
)
turns = st.lists(
    st.tuples(replies, st.booleans(), st.sampled_from(["user", "tool"]), text), max_size=4
)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ModelServer, list[Reply]]]:
    script: list[Reply] = []
    with ModelServer(lambda _: script[-1], chunk_size=3, token_ids=True) as server:
        yield server, script


@settings(max_examples=60, deadline=None)
@given(turns)
def test_prompt_ids_continue_the_previous_ids(
    scripted: tuple[ModelServer, list[Reply]],
    turns: list[tuple[Reply, bool, str, str]],
):
    """A message replayed as received gives a prompt that starts with all ids before it."""
    server, script = scripted
    messages: list[Any] = [{"role": "system", "content": "s"}, *ASK]
    previous: list[int] = []
    for reply, stream, role, content in turns:
        script.append(reply)
        plain = post(server, {"messages": messages})
        prompt_ids, choice = plain["prompt_token_ids"], plain["choices"][0]
        assert prompt_ids[: len(previous)] == previous
        if stream:
            body = json.dumps({"messages": messages, "stream": True}).encode()
            events = send(f"{server.base_url}/chat/completions", body)[1].split(b"\n\n")[:-2]
            parts = [json.loads(event[6:])["choices"][0] for event in events]
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert TOKENIZER.decode(choice["token_ids"]).endswith("<|end|>") or (
            reply.finish_reason == "length"
        )
        assert plain["usage"]["completion_tokens"] == len(choice["token_ids"])
        previous = prompt_ids + choice["token_ids"]
        answer = {"role": role, "content": content, "tool_call_id": "x"}
        messages = [*messages, choice["message"], answer]


def test_dropped_reasoning_breaks_the_prefix():
    """A client that does not replay the reasoning gets a prompt that no longer continues."""
    with ModelServer(Reply("4", reasoning="2+2"), token_ids=True, logprobs=True) as server:
        first = post(server, {"messages": ASK})
        said = {"role": "assistant", "content": "4"}
        second = post(server, {"messages": [*ASK, said, *ASK]})
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] != before


@given(st.text())
def test_tokenizer_round_trip(content: str):
    """Decoding inverts encoding, and no text reaches the special ids."""
    token_ids = TOKENIZER.encode(content)
    assert TOKENIZER.decode(token_ids) == content
    assert all(token_id < 256 for token_id in token_ids)


def test_tokenizer_template():
    """Each message is its role, its text and the end; an unknown role is refused."""
    ids = TOKENIZER.encode_messages([{"role": "user", "content": "<|end|>"}])
    assert ids == [257, *b"<|end|>", 261, 258]
    assert TOKENIZER.decode([258, *b"hi", 261]) == "<|assistant|>hi<|end|>"
    assert TOKENIZER.encode_messages([], add_generation_prompt=False) == []
    for role in ("end", "critic", None):
        with pytest.raises(ValueError, match="no such role"):
            TOKENIZER.encode_messages([{"role": role, "content": "x"}])


def test_sequential_ids():
    """Trace and span ids count from 1, each on its own, and never repeat across threads."""
    ids = SequentialIdGenerator()
    assert [ids.generate_trace_id(), ids.generate_trace_id(), ids.generate_span_id()] == [1, 2, 1]
    taken: list[int] = []

    def take() -> None:
        taken.extend(ids.generate_span_id() for _ in range(1000))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2, 8002))


@pytest.mark.parametrize("ending", ["terminate", "interrupt", "end of input"])
def test_command_serves_until_told_to_stop(ending: str):
    """The command prints its URL, replies at the given length, and ends without a word."""
    command = [sys.executable, "-m", "otel_rollout.testing", "--completion-tokens", "30"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        response = send(f"{url}/completions", b'{"prompt": "hi"}')[1]
        assert len(json.loads(response)["choices"][0]["text"]) == 30
        if ending == "end of input":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM if ending == "terminate" else signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
