"""The span of a rollout speaks: the task, the answer, the tokens, for people who look at it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from opentelemetry.sdk.trace import ReadableSpan

import otel_rollout
from otel_rollout import Workflow, reconstruct, rollout
from otel_rollout.look.sums import SHOWN
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.workflows import run_workflows
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
ASKED, SAMPLED = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
SHOWN_ONLY = (INPUT, OUTPUT, "input.value", "output.value")


def of_span(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def root(recording: Recording, name: str = "invoke_agent") -> dict[str, Any]:
    """Attributes of the last span of this name."""
    return dict(recording.spans_named(name)[-1].attributes or {})


def texts(value: Any) -> list[tuple[str, str]]:
    """Role and text of messages on a span."""
    return [(m["role"], " ".join(p["content"] for p in m["parts"])) for m in json.loads(value)]


def ask(client: Any, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=list(messages), **options)


SYSTEM_PROMPT = {"role": "system", "content": "Be brief."}


def test_the_task_and_the_answer_are_on_the_span(recording: Recording, clients: Clients):
    """The last message of the first call, and the text of the last reply."""
    client = clients.sync(clients.serve(["first", "It is 4."]))
    with rollout("solve") as trajectory:
        ask(client, SYSTEM_PROMPT, user("2 + 2?"))
        ask(client, SYSTEM_PROMPT, user("2 + 2?"), user("are you sure?"))
    span = root(recording)
    assert texts(span[INPUT]) == [("user", "2 + 2?")]
    assert texts(span[OUTPUT]) == [("assistant", "It is 4.")]
    assert (span["input.value"], span["output.value"]) == ("2 + 2?", "It is 4.")
    assert span["gen_ai.conversation.id"] == trajectory.id
    usage = [completion.usage or {} for completion in trajectory.completions]
    assert span[ASKED] == sum(each["prompt_tokens"] for each in usage) > 0
    assert span[SAMPLED] == sum(each["completion_tokens"] for each in usage) > 0
    assert (span["rollout.call_count"], span["rollout.usage_count"]) == (2, 2)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("It is 4.", "It is 4."),
        ("4", "It is 4."),
        ("It is 4. I asked twice.", "It is 4. I asked twice."),
        ({"answer": 5}, '{"answer":5}'),
        (None, "It is 4."),
        ("", "It is 4."),
        (1.0, "It is 4."),
        (True, "It is 4."),
        (object(), "It is 4."),
    ],
)
def test_the_output_is_shown_where_it_says_more(
    recording: Recording, clients: Clients, output: Any, shown: str
):
    """A text or a structure that is not in the last reply; a number says less."""
    client = clients.sync(clients.serve("It is 4."))

    @rollout
    def solve() -> Any:
        ask(client, user("2 + 2?"))
        return output

    solve()
    assert texts(root(recording)[OUTPUT]) == [("assistant", shown)]


def test_without_a_call_only_what_is_known_is_there(recording: Recording):
    """No task and no tokens are made up; what the function returned came of it."""

    @rollout
    def solve() -> int:
        return 4

    solve()
    span = root(recording)
    assert not {INPUT, ASKED, SAMPLED, "rollout.usage_count"} & span.keys()
    assert texts(span[OUTPUT]) == [("assistant", "4")]
    assert span["rollout.call_count"] == 0


@pytest.mark.parametrize("counted", [True, False])
def test_a_stream_counts_only_what_it_tells(recording: Recording, clients: Clients, counted: bool):
    """The sums say of how many calls they are; without any there is no sum."""
    client = clients.sync(clients.serve())
    options = {"stream_options": {"include_usage": True}} if counted else {}
    with rollout("solve"):
        for stream in (False, True) if counted else (True, True):
            more = {"stream": True, **options} if stream else {}
            reply = ask(client, user('hi \\ " é'), **more)
            if stream:
                list(reply)
    span = root(recording)
    assert texts(span[OUTPUT]) == [("assistant", 'You said: hi \\ " é')]
    assert span["rollout.call_count"] == 2
    assert span.get("rollout.usage_count") == (2 if counted else None)
    assert (ASKED in span, SAMPLED in span) == (counted, counted)


def greeted(recording: Recording) -> Any:
    """The attributes of the root, which show "hi" and what was answered."""
    span = root(recording)
    assert texts(span[INPUT]) == [("user", "hi")]
    assert texts(span[OUTPUT]) == [("assistant", "Bonjour.")]
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_speak_too(recording: Recording, clients: Clients, stream: bool):
    """Anthropic's instructions, messages, reply and counts."""
    url = clients.serve("Bonjour.").base_url.removesuffix("/v1")
    asked: Any = {"model": "c", "max_tokens": 9, "system": "Be kind.", "messages": [user("hi")]}
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client, rollout("x"):
        reply = client.messages.create(**asked, stream=stream)
        if stream:
            list(reply)
    span = greeted(recording)
    assert span[ASKED] > 0
    assert span[SAMPLED] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_speaks_too(recording: Recording, clients: Clients, stream: bool):
    """A text for input, `instructions` for a system prompt."""
    client = clients.sync(clients.serve("Bonjour."))
    with rollout("x"):
        reply = client.responses.create(
            model="m", input="hi", instructions="Be kind.", stream=stream
        )
        if stream:
            list(reply)
    span = greeted(recording)
    assert span["rollout.usage_count"] == 1


def test_what_is_shown_is_bounded(recording: Recording, clients: Clients):
    """Each text has about 4 KB and says that it was cut; the task is the end of a conversation."""
    client = clients.sync(clients.serve("a\n" * 20_000))
    history = [user(f"{number} " + "é" * 400) for number in range(30)]
    with rollout("x"):
        ask(client, {"role": "system", "content": "s" * 50_000}, *history, user("the task"))
    span = root(recording)
    assert texts(span[INPUT]) == [("user", "the task")]
    assert "cut: 40000 characters in all" in span[OUTPUT]
    assert all(len(span[name].encode()) < 2.2 * SHOWN for name in SHOWN_ONLY)


def test_images_and_tools_are_named(recording: Recording, clients: Clients):
    """Parts that are no text are no text here either; a reply of calls alone shows them."""
    call = ToolCall("search", '{"q": 1}', id="call_1")
    client = clients.sync(clients.serve(Reply(tool_calls=[call])))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    with rollout("x"):
        ask(client, {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]})
    span = root(recording)
    assert texts(span[INPUT]) == [("user", "what is it? <image_url>")]
    assert texts(span[OUTPUT]) == [("assistant", '→ search({"q": 1})')]


def test_a_rollout_has_what_those_inside_it_used(recording: Recording, clients: Clients):
    """Sums of both; task and answer are its own where it has any."""
    client = clients.sync(clients.serve())

    with rollout("outer"):
        with rollout("inner"):
            client.chat.completions.create(model="small", messages=[user("inner task")])
        ask(client, user("outer task"))
    inner, outer = map(of_span, recording.spans_named("invoke_agent"))
    assert inner["rollout.call_count"] == 1
    assert outer["rollout.call_count"] == outer["rollout.usage_count"] == 2
    assert outer[ASKED] > inner[ASKED]
    assert texts(outer[INPUT]) == [("user", "outer task")]
    assert texts(outer[OUTPUT]) == [("assistant", "You said: outer task")]


def test_a_workflow_speaks_by_its_rollouts(recording: Recording, clients: Clients):
    """The first task and the last answer of those inside it; it is a chain to OpenInference."""
    client = clients.sync(clients.serve())

    class Solving(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            for number in (1, 2):
                with rollout("solver"):
                    ask(client, user(f"{task['q']} {number}"))

    asyncio.run(run_workflows(lambda: Solving(), [{"q": "why"}]))
    span = root(recording, "invoke_workflow")
    assert texts(span[INPUT]) == [("user", "why 1")]
    assert texts(span[OUTPUT]) == [("assistant", "You said: why 2")]
    assert span["rollout.call_count"] == 2
    assert span["openinference.span.kind"] == "CHAIN"


@pytest.mark.not_replayed("what was said is on no span that is exported")
def test_without_content_only_numbers_are_left(clients: Clients):
    """`content="none"`: no message, but the sums."""
    exporter = otel_rollout.InMemoryTrajectoryExporter()
    provider = otel_rollout.configure(exporters=[exporter], content="none")
    span = speak(provider, exporter, clients)
    assert not span.keys() & set(SHOWN_ONLY)
    assert "2 + 2" not in str(span)
    assert span[ASKED] > 0


def test_what_is_shown_is_redacted(clients: Clients):
    """`redact` sees the task and the answer before the span has them."""
    exporter = otel_rollout.InMemoryTrajectoryExporter()
    hide = {"redact": lambda body: body.replace(b"2 + 2", b"***")}
    provider = otel_rollout.configure(exporters=[exporter], **hide)  # type: ignore[arg-type]
    span = speak(provider, exporter, clients)
    assert texts(span[INPUT]) == [("user", "***?")]
    assert texts(span[OUTPUT]) == [("assistant", "You said: ***?")]
    assert span["rollout.usage_count"] == 1


def speak(provider: Any, exporter: Any, clients: Clients) -> dict[str, Any]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    client = clients.sync(clients.serve())

    @rollout
    def solve() -> Any:
        return ask(client, user("2 + 2?")).choices[0].message.content

    solve()
    return root(Recording(provider, exporter, spans))


def cut(span: ReadableSpan, length: int) -> SpanRecord:
    """The span as a backend keeps it that cuts what people read."""
    record = as_record(span)
    attributes = {
        key: value[:length] if key in SHOWN_ONLY and isinstance(value, str) else value
        for key, value in record.attributes.items()
    }
    return SpanRecord(
        record.name,
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        record.start_time_ns,
        record.end_time_ns,
        attributes,
    )


@pytest.mark.parametrize("length", [0, 9, 2048])
def test_losing_what_is_shown_loses_nothing(recording: Recording, clients: Clients, length: int):
    """A trajectory is rebuilt alike with these attributes cut, and without them."""
    client = clients.sync(clients.serve("a" * 9000))
    with rollout("x"):
        ask(client, user("b" * 9000))
    (live,) = recording.trajectories
    assert reconstruct([cut(span, length) for span in recording.spans]) == [live]
    names = {*SHOWN_ONLY, ASKED, SAMPLED, "rollout.call_count", "rollout.usage_count"}
    (lengths,) = [root(recording)["rollout.lengths"]]
    assert not [name for name in names if name.removeprefix("rollout") in lengths]


@pytest.mark.not_replayed("a limit on the number of attributes is set")
def test_a_limit_on_the_number_of_attributes_drops_these_first(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """What trajectories are rebuilt from is set last: the SDK drops the oldest."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "20")
    exporter = otel_rollout.InMemoryTrajectoryExporter()
    with pytest.warns(otel_rollout.TruncationWarning):
        provider = otel_rollout.configure(exporters=[exporter])
    span = speak(provider, exporter, clients)
    assert INPUT not in span
    assert {"rollout.id", "rollout.output", "rollout.lengths", "rollout.status"} <= span.keys()
