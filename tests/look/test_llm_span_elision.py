"""LLM spans show what is new in a call, and say so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import otel_rollout
from otel_rollout import no_capture, reconstruct, rollout
from otel_rollout.otlp import JsonLinesSpanExporter, read_json_lines
from otel_rollout.testing import Reply, ToolCall
from tests.kit.recording import Clients
from tests.look.llm_spans import CHOICES, DRAWS_RESPONSES, TOOL, chunk, says, sse

INSTRUMENTORS = CHOICES[:-1]
ELIDED = "rollout.elided_messages"
INPUT = "gen_ai.input.messages"
TASK: Any = [
    {"role": "system", "content": "You are careful. " * 100},
    {"role": "user", "content": "Repair the test. " * 100},
]

_instrumentor = version("opentelemetry-instrumentation-openai").split(".")
WRITES_TOOLS = tuple(map(int, _instrumentor[:2])) > (0, 60)
"""True if the default instrumentor writes tool definitions: the oldest does not."""


class Lane:
    """The look lane: what an exporter of `configure` gets."""

    def __init__(self, **options: Any) -> None:
        self.exported = InMemorySpanExporter()
        self.provider = otel_rollout.configure("x", span_exporters=[self.exported], **options)

    def llm(self) -> list[ReadableSpan]:
        self.provider.force_flush()
        spans = self.exported.get_finished_spans()
        ours = ("rollout started", "recording", "invoke_agent", "execute_tool")
        return [span for span in spans if not span.name.startswith(ours)]

    def rollout_span(self) -> ReadableSpan:
        spans = self.exported.get_finished_spans()
        return next(span for span in spans if span.name.startswith("invoke_agent"))


def get(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


def texts(span: ReadableSpan, name: str = INPUT) -> list[Any]:
    """What the messages of a span say, one entry for each part."""
    parts = [part for message in json.loads(get(span, name)) for part in message["parts"]]
    return [part.get("content", part.get("response", part.get("arguments"))) for part in parts]


def shows_tools(span: ReadableSpan) -> bool:
    """True if the span has tool definitions, in any version of the instrumentor."""
    names = ("gen_ai.tool.definitions", "llm.request.functions.")
    return any(name.startswith(names) for name in span.attributes or {})


def is_ours(text: Any) -> bool:
    return isinstance(text, str) and "not repeated" in text


Way = Callable[[Any], Any]
REPEATS: dict[str, Way] = {
    "object": lambda message: message,
    "dump": lambda message: message.model_dump(),
    "by hand": lambda message: {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [
            {"id": c.id, "type": "function", "function": c.function.model_dump()}
            for c in message.tool_calls or ()
        ],
    },
}


def agent(client: Any, turns: int, *, stream: bool = False, repeat: Way = REPEATS["dump"]) -> None:
    """A coding agent: each reply calls a tool, whose result is long."""
    messages = list(TASK)
    for turn in range(turns):
        asked: Any = {"model": "m", "messages": messages, "tools": [TOOL]}
        if stream:
            messages.append(_joined(client.chat.completions.create(**asked, stream=True)))
        else:
            messages.append(repeat(client.chat.completions.create(**asked).choices[0].message))
        content = f"result {turn} " * 200
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": content})


def _joined(stream: Any) -> dict[str, Any]:
    """The reply of a stream, put together as an agent does."""
    text, calls = "", list[dict[str, Any]]()
    for item in stream:
        for choice in item.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


def replies(request: Any) -> Reply:
    turn = sum(message["role"] == "assistant" for message in request.get("messages", ()))
    arguments = json.dumps({"text": f"change {turn} " * 200})
    return Reply(tool_calls=[ToolCall("f", arguments, f"c{turn}")])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_a_conversation_is_shown_once(instrumentor: Any, stream: bool, clients: Clients):
    """Each span shows what is new after a line about what stands before; together they show all."""
    lane = Lane(instrumentor=instrumentor)
    with rollout("x"):
        agent(clients.sync(clients.serve(replies)), 4, stream=stream)
    spans = lane.llm()
    assert [span.name for span in spans] == ["chat m"] * 4
    assert [get(span, "rollout.turn") for span in spans] == [1, 2, 3, 4]
    assert [get(span, ELIDED) for span in spans] == [None, 3, 5, 7]
    if WRITES_TOOLS or instrumentor != "openai":
        assert [get(span, "rollout.elided_tools") for span in spans] == [None, 1, 1, 1]
        assert list(map(shows_tools, spans)) == [True, False, False, False]
    assert texts(spans[0]) == [message["content"] for message in TASK]
    for turn, span in enumerate(spans[1:]):
        before, *new = texts(span)
        assert is_ours(before)
        assert new == [f"result {turn} " * 200]
    said = [texts(span, "gen_ai.output.messages")[-1] for span in spans]
    assert said == [{"text": f"change {turn} " * 200} for turn in range(4)]


@pytest.mark.parametrize("repeat", REPEATS)
def test_replies_are_known_however_they_are_repeated(repeat: str, clients: Clients):
    """The client's object, its dump, and a dict by hand are the reply that was shown."""
    lane = Lane()
    with rollout("x"):
        agent(clients.sync(clients.serve(replies)), 3, repeat=REPEATS[repeat])
    assert [get(span, ELIDED) for span in lane.llm()] == [None, 3, 5]


def test_full_shows_whole_conversations(clients: Clients):
    """With `content="full"`, and outside of rollouts, spans are as the instrumentor writes them."""
    lane = Lane(content="full")
    client = clients.sync(clients.serve(replies))
    with rollout("x"):
        agent(client, 3)
    assert [len(texts(span)) for span in lane.llm()] == [2, 4, 6]
    otel_rollout.shutdown()
    lane = Lane()
    agent(client, 2)
    with rollout("x"), no_capture():
        agent(client, 2)
    assert [len(texts(span)) for span in lane.llm()] == [2, 4, 2, 4]
    assert {get(span, ELIDED) for span in lane.llm()} == {None}


def test_none_shows_no_content(clients: Clients):
    """With `content="none"` no message is on a span, new or not."""
    lane = Lane(content="none")
    with rollout("x"):
        agent(clients.sync(clients.serve(replies)), 3)
    for span in lane.llm():
        assert INPUT not in (span.attributes or {})
        assert ELIDED not in (span.attributes or {})
        assert "careful" not in str(dict(span.attributes or {}))
    assert [span.name for span in lane.llm()] == ["chat m"] * 3


def test_forks_retries_and_edits(clients: Clients):
    """What follows an edit is new; a retry shows its last message; samples share their past."""
    lane = Lane()
    client = clients.sync(clients.serve("answer"))
    user = {"role": "user", "content": "more"}
    edited = {"role": "assistant", "content": "answer, edited"}

    def ask(*messages: Any, **options: Any) -> Any:
        return client.chat.completions.create(model="m", messages=[*messages], **options)

    with rollout("x"):
        reply = ask(*TASK, n=2).choices[1].message
        ask(*TASK)
        ask(*TASK, reply, user)
        ask(*TASK, edited, user)
        with rollout("inside"):
            ask(*TASK)
    found = [(get(s, "rollout.turn"), get(s, ELIDED), len(texts(s))) for s in lane.llm()]
    assert found == [(1, None, 2), (1, 1, 2), (2, 3, 2), (2, 2, 3), (1, None, 2)]


async def test_many_at_once(clients: Clients):
    """Calls at the same time, in whatever order they end, show every message at least once."""
    lane = Lane()
    client = clients.asynchronous(clients.serve(lambda _: Reply("ok", delay=0.01)))

    async def one(number: int) -> None:
        messages = [*TASK, {"role": "user", "content": f"task {number}"}]
        for _ in range(3):
            made: Any = await client.chat.completions.create(model="m", messages=messages)
            messages += [made.choices[0].message, {"role": "user", "content": f"on {number}"}]

    async with rollout("x"):
        await asyncio.gather(*(one(number) for number in range(8)))
    shown = [text for span in lane.llm() for text in texts(span) if not is_ours(text)]
    assert {message["content"] for message in TASK} <= set(shown)
    assert [shown.count(f"task {number}") for number in range(8)] == [1] * 8
    assert [shown.count(message["content"]) for message in TASK] == [1, 1]


@pytest.mark.skipif(not DRAWS_RESPONSES, reason="draws none of them")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_responses_show_what_is_new(instrumentor: Any, stream: bool, clients: Clients):
    """Whether a call repeats its past or names it by id."""
    lane = Lane(instrumentor=instrumentor)
    client = clients.sync(clients.serve("long answer " * 200))

    def ask(**options: Any) -> Any:
        made: Any = client.responses.create(model="m", stream=stream, **options)
        return list(made)[-1].response if stream else made

    with rollout("x"):
        first = ask(input="question " * 300, instructions="be brief")
        ask(input="more", previous_response_id=first.id, instructions="be brief")
        past = [{"role": "user", "content": "question " * 300}]
        past += ask(input=past, instructions="be brief").output
        ask(input=[*past, {"role": "user", "content": "again"}], instructions="be brief")
    spans = lane.llm()
    assert [span.name for span in spans] == ["chat m"] * 4
    assert [get(span, "rollout.turn") for span in spans] == [1, 2, 1, 2]
    assert [get(span, ELIDED) for span in spans] == [None, None, None, 2]
    assert texts(spans[1]) == ["more"]
    assert is_ours(texts(spans[3])[0])
    assert texts(spans[3])[1:] == ["again"]
    assert ["gen_ai.system_instructions" in (s.attributes or {}) for s in spans] == [
        True,
        *[False] * 3,
    ]
    assert all(get(span, "gen_ai.usage.output_tokens") for span in spans)
    assert {get(span, "gen_ai.response.finish_reasons") for span in spans} == {("completed",)}


def test_text_completions_show_what_is_new(clients: Clients):
    """Of a prompt that has the earlier one and its reply in it, the rest is shown."""
    lane = Lane()
    client = clients.sync(clients.serve("reply " * 200))
    prompt = "prompt " * 400
    with rollout("x"):
        for turn in range(3):
            made = client.completions.create(model="m", prompt=prompt)
            prompt += f"{made.choices[0].text}\nmore {turn}"
    assert [span.name for span in lane.llm()] == ["text_completion m"] * 3
    assert [get(span, ELIDED) for span in lane.llm()] == [None, 2, 4]
    for turn, span in enumerate(lane.llm()[1:]):
        before, new = texts(span)
        assert is_ours(before)
        assert new == f"\nmore {turn}"


def test_bytes_are_linear(clients: Clients):
    """The text on the spans of thirty turns is thrice that of ten."""
    lane = Lane()
    sizes = list[int]()
    for turns in (10, 30):
        with rollout("x"):
            agent(clients.sync(clients.serve(replies)), turns)
        sizes.append(sum(len(str(get(span, INPUT))) for span in lane.llm()))
        lane.exported.clear()
    assert sizes[1] < 3.1 * sizes[0]


# --- reading them back


def test_a_span_that_leaves_messages_out_is_no_conversation(clients: Clients):
    """Where the exchange spans are lost, what is left says so, and begins no conversation."""
    lane = Lane()
    with rollout("x"):
        agent(clients.sync(clients.serve(replies)), 3)
    spans = lane.llm()
    (found,) = reconstruct(spans, infer_rollouts=True)
    assert any("leaves out 3 messages" in warning for warning in found.warnings)
    assert not any(completion.trainable for completion in found.completions[1:])
    assert "not repeated" not in json.dumps([h.messages() for h in found.histories])
    assert "not repeated" not in str([completion.request for completion in found.completions])
    for completion in found.completions[1:]:
        assert completion.request_messages == []


def test_a_file_rebuilds_what_was_live(clients: Clients, tmp_path: Any):
    """The trajectories of a file with such spans are those of the process."""
    path = tmp_path / "spans.jsonl"
    memory = otel_rollout.InMemoryTrajectoryExporter()
    exporter = JsonLinesSpanExporter(path)
    otel_rollout.configure("x", [memory], span_exporters=[exporter])
    with rollout("x"):
        agent(clients.sync(clients.serve(replies)), 3)
    assert otel_rollout.shutdown()
    assert "not repeated" in path.read_text()
    assert tuple(reconstruct(read_json_lines(path))) == memory.get_finished_trajectories()


# --- streams


@pytest.fixture
def streamed() -> Lane:
    return Lane()


def test_a_stream_is_shown_whole(streamed: Lane, clients: Clients):
    """Every choice, with its reasoning and its calls of tools."""
    calls = [
        chunk(says(0, None, role="assistant", reasoning_content="be")),
        chunk(says(0, None, reasoning_content="cause")),
        *(chunk(says(0, text), says(1, text.upper())) for text in "abc"),
        chunk(says(0, None, tool_calls=[{"index": 0, "id": "t", "function": {"name": "f"}}])),
        *(
            chunk(says(0, None, tool_calls=[{"index": 0, "function": {"arguments": text}}]))
            for text in ('{"a"', ": 1}")
        ),
        chunk(says(0, None, "tool_calls"), says(1, None, "length")),
        chunk(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}),
    ]
    client = clients.sync(clients.serve(sse(*calls)))
    with rollout("x"):
        list(client.chat.completions.create(model="m", messages=TASK, n=2, stream=True))
    (span,) = streamed.llm()
    first, second = json.loads(get(span, "gen_ai.output.messages"))
    assert first["parts"] == [
        {"type": "reasoning", "content": "because"},
        {"type": "text", "content": "abc"},
        {"type": "tool_call", "name": "f", "id": "t", "arguments": {"a": 1}},
    ]
    assert second["parts"] == [{"type": "text", "content": "ABC"}]
    assert get(span, "gen_ai.response.finish_reasons") == ("tool_calls", "length")
    assert get(span, "gen_ai.usage.input_tokens") == 3
    assert get(span, "gen_ai.usage.output_tokens") == 2
    assert get(span, "gen_ai.response.id") == "c-1"


def test_errors_keep_name_and_status(streamed: Lane, clients: Clients):
    """A call that fails, and a stream that breaks, are named after the model and say ERROR."""
    client = clients.sync(clients.serve([Reply("long enough", cut_after=3)] * 2))
    with rollout("x"):
        stream = client.chat.completions.create(model="m", messages=TASK, stream=True)
        with pytest.raises(Exception, match=r"Connection error|peer closed"):
            list(stream)
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="m", messages=TASK)
    broken, failed = streamed.llm()
    for span in (broken, failed):
        assert span.name == "chat m"
        assert span.status.status_code is StatusCode.ERROR
        assert get(span, "error.type")
    assert texts(broken, "gen_ai.output.messages")[0] in "long enough"


@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_usage_that_the_agent_is_not_shown(instrumentor: Any, clients: Clients):
    """A count of tokens that only the recording asked for is on the LLM span all the same."""
    lane = Lane(instrumentor=instrumentor, request_token_ids=True)
    client = clients.sync(clients.serve("answer"))
    with rollout("x"):
        stream = client.chat.completions.create(model="m", messages=TASK, stream=True)
        assert all(item.usage is None for item in stream)
    (span,) = lane.llm()
    assert get(span, "gen_ai.usage.output_tokens") == 7
    assert get(span, "gen_ai.usage.input_tokens") > 3000
    assert get(lane.rollout_span(), "gen_ai.usage.output_tokens") == 7
