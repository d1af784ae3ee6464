"""What leaves the process with `configure(content="none")` and `configure(redact=...)`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    ContentWarning,
    Episode,
    InMemoryTrajectoryExporter,
    Reward,
    Step,
    Trajectory,
    TrajectorySpanProcessor,
    Workflow,
    continue_rollout,
    get_current_trajectory,
    get_history,
    propagate,
    reconstruct,
    record_reward,
    rollout,
    tool,
)
from otel_rollout.errors import ConfigurationError
from otel_rollout.record import capture, process_state
from otel_rollout.record.privacy.content import Content
from otel_rollout.testing import Raw
from otel_rollout.wire.servers import without_tokens
from tests.kit.recording import Clients, Recording

MARK = "xyzzy"
"""Stands in each text of the user below, and in no name."""
ASKED: list[Any] = [{"role": "user", "content": "?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": f"{MARK} tool"}}
]


def recording_with(**options: Any) -> Recording:
    exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", [exporter], **options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Recording(provider, exporter, spans)


def text_of(spans: Any) -> str:
    return "\n".join(span.to_json() + repr(span.status.description) for span in spans)


@tool
def look(query: str) -> str:
    if "fail" in query:
        raise ValueError(f"{MARK} in an exception")
    return f"{MARK} found"


def agent(client: openai.OpenAI, *, fails: bool = False) -> str:
    """An agent with texts of the user in every place that spans have for them."""
    trajectory = get_current_trajectory()
    asked: list[Any] = [{"role": "user", "content": f"{MARK} asked"}]
    reply = client.chat.completions.create(model="m", messages=asked, tools=TOOLS)
    for chunk in client.chat.completions.create(model="m", messages=asked, stream=True):
        completion_id = chunk.id
    get_history(completion_id).append({"role": "user", "content": f"{MARK} appended"})
    client.completions.create(model="m", prompt=f"{MARK} prompt")
    client.responses.create(model="m", input=f"{MARK} input", instructions=f"{MARK} instruct")
    client.embeddings.create(model="m", input=f"{MARK} embedded")
    trajectory.log(f"{MARK} logged")
    trajectory.metadata["task"] = f"{MARK} task"
    trajectory.metrics["calls"] = 5.0
    record_reward(0.5, name="judge", explanation=f"{MARK} explained")
    look(f"{MARK} query")
    if fails:
        look(f"{MARK} fail")
    return str(reply.choices[0].message.content)


def run(clients: Clients, reply: Any = f"{MARK} said", **options: Any) -> Recording:
    recording = recording_with(**options)
    client = clients.sync(clients.serve(reply))
    with_rollout = rollout("agent")(agent)
    with_rollout(client)
    with pytest.raises(ValueError, match=MARK):
        with_rollout(client, fails=True)
    recording.trajectories[0].rewards["late"] = otel_rollout.Reward(
        1.0, name="late", explanation=f"{MARK} late"
    )
    error = json.dumps({"error": {"message": f"{MARK} is no valid prompt"}}).encode()
    refusing = clients.sync(clients.serve(Raw(400, error)))
    with rollout("refused"), pytest.raises(openai.BadRequestError):
        refusing.chat.completions.create(model="m", messages=[])
    return recording


NOT_EXPORTED = pytest.mark.not_replayed("what was said is on no span that is exported")


@NOT_EXPORTED
@pytest.mark.parametrize("instrumentor", ["openai", None])
def test_no_content_leaves_the_process(clients: Clients, instrumentor: Any):
    """With content="none" no text of the user, prompt or reply is on a span that is exported."""
    recording = run(clients, content="none", instrumentor=instrumentor)
    assert MARK not in text_of(recording.spans)
    assert {span.name for span in recording.spans} >= {
        "invoke_agent agent",
        "execute_tool look",
        "evaluate rollout: reward late",
        *(["chat m"] if instrumentor else []),
    }
    assert recording.spans_named("recording") == []


@NOT_EXPORTED
def test_training_goes_on_without_content(clients: Clients):
    """Trajectories of the process are those that they are with content."""
    lean = run(clients, content="none").trajectories
    otel_rollout.shutdown()
    full = run(clients, content="full").trajectories
    for one, other in zip(lean, full, strict=True):
        assert one.messages() == other.messages()
        assert one.warnings == other.warnings == []
        assert one.output == other.output
        assert one.logs == other.logs
        assert dict(one.metadata) == dict(other.metadata)
        assert [h.messages() for h in one.histories] == [h.messages() for h in other.histories]
    assert lean[0].output == f"{MARK} said"
    assert MARK in str(lean[0].messages())


@NOT_EXPORTED
def test_what_is_exported_without_content_says_so(clients: Clients):
    """A trajectory that is rebuilt from the lean spans says why its calls are not there."""
    recording = run(clients, content="none")
    rebuilt = reconstruct(recording.spans)
    assert [t.id for t in rebuilt] == [t.id for t in recording.trajectories]
    assert rebuilt[0].completions == []
    assert rebuilt[0].rewards == {"judge": 0.5, "late": 1.0}
    assert dict(rebuilt[0].metrics) == {"calls": 5.0}
    assert rebuilt[0].warnings == [
        "5 of 5 model calls are missing: content was kept off its spans "
        "(configure(content='none')), trajectories are whole only in its own process"
    ]


def test_content_is_on_the_spans_by_default(clients: Clients):
    """Without switches, prompts and replies are on the LLM spans and on the exchange spans."""
    recording = run(clients)
    names = [s.name for s in recording.spans if MARK in s.to_json()]
    assert {"chat m", "recording /chat/completions", "execute_tool look"} <= set(names)


@NOT_EXPORTED
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRACELOOP_TRACE_CONTENT", "false"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "event_only"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "false"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "nocontent"),
        ("TRACELOOP_TRACE_CONTENT", "disabled"),
    ],
)
def test_the_switches_of_instrumentations_hold_on_both_lanes(
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
):
    """A switch that turns content off does so for LLM spans and exchange spans, and is named."""
    monkeypatch.setenv(name, value)
    recording = run(clients)
    assert MARK not in text_of(recording.spans)
    assert f"{name}={value}" in caplog.text
    otel_rollout.shutdown()
    assert os.environ[name] == value


@NOT_EXPORTED
def test_the_switches_hold_where_capture_is_set_up_by_hand(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Without `configure` too exchange spans stay in the process; after it, its rule stays."""
    monkeypatch.setenv("TRACELOOP_TRACE_CONTENT", "false")
    exporter, spans, provider = (
        InMemoryTrajectoryExporter(),
        InMemorySpanExporter(),
        TracerProvider(),
    )
    provider.add_span_processor(TrajectorySpanProcessor(exporter))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    client = clients.sync(clients.serve(f"{MARK} said"))
    capture.instrument()
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=ASKED)
    capture.uninstrument()
    assert MARK not in text_of(spans.get_finished_spans())
    assert MARK in str(exporter.get_finished_trajectories()[0].messages())
    assert "TRACELOOP_TRACE_CONTENT=false" in caplog.text
    monkeypatch.delenv("TRACELOOP_TRACE_CONTENT")
    otel_rollout.configure(content="none")
    capture.instrument()
    assert not process_state.content.exported


def test_content_that_is_asked_for_against_a_switch_warns(monkeypatch: pytest.MonkeyPatch):
    """configure(content="full") wins over a switch, and says at start-up what it exports."""
    monkeypatch.setenv("TRACELOOP_TRACE_CONTENT", "false")
    with pytest.warns(ContentWarning, match="TRACELOOP_TRACE_CONTENT=false"):
        otel_rollout.configure(content="full")


@pytest.mark.parametrize("options", [{"content": "some"}, {"redact": "sk-"}])
def test_wrong_options(options: Any):
    """A wrong value is refused, by name."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        otel_rollout.configure(**options)


@NOT_EXPORTED
def test_spans_below_a_call_stay_in_the_trace(clients: Clients):
    """Spans that others open while a call is made hang below a span that is exported."""
    recording = recording_with(content="none", instrumentor=None)
    tracer = recording.provider.get_tracer("http")

    class Transport(openai.DefaultHttpxClient):
        def send(self, *args: Any, **kwargs: Any) -> Any:
            with tracer.start_as_current_span("POST"):
                return super().send(*args, **kwargs)

    with Transport() as http_client:
        client = clients.sync(clients.serve("x"), http_client=http_client)
        with rollout("agent"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    (post,) = recording.spans_named("POST")
    (agent_span,) = recording.spans_named("invoke_agent")
    assert post.parent is not None
    assert agent_span.context is not None
    assert post.parent.span_id == agent_span.context.span_id


@NOT_EXPORTED
def test_what_a_part_hands_back_is_whole(clients: Clients):
    """The spans that a process hands back for training have content; those it exports have none."""
    recording = recording_with(content="none")
    client = clients.sync(clients.serve(f"{MARK} said"))
    with rollout("elsewhere"):
        carrier = propagate()
    with continue_rollout(carrier) as part:  # that rollout has ended: this is a part of it
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": MARK}])
        get_current_trajectory().log(f"{MARK} logged")
    assert MARK not in text_of(recording.spans)
    assert f"{MARK} logged" in str([record.attributes for record in part.spans])
    (rebuilt,) = reconstruct(part.spans)
    assert rebuilt.messages()[-1]["content"] == f"{MARK} said"
    assert rebuilt.logs == [f"{MARK} logged"]


# --- redact


def mask(body: bytes) -> bytes:
    return body.replace(MARK.encode(), b"***")


def test_redacted_content_is_nowhere(clients: Clients):
    """What `redact` takes out is on no span and in no trajectory, also of a split stream."""
    recording = run(clients, redact=mask)
    assert MARK not in text_of(recording.spans)
    first = recording.trajectories[0]
    assert MARK not in json.dumps([trajectory.to_dict() for trajectory in recording.trajectories])
    assert first.completions[0].request_messages[0]["content"] == "*** asked"
    assert (first.completions[0].message or {})["content"] == "*** said"
    assert first.output == "*** said"


def test_a_redacted_trajectory_is_marked(clients: Clients):
    """Each redacted call is named in the warnings, does not train, and has no token ids."""
    recording = recording_with(redact=mask)
    client = clients.sync(clients.serve(lambda body: body["messages"][-1]["content"]))
    with rollout("agent"):
        for text in (f"{MARK} a", "b"):
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
    trajectory = recording.trajectory
    redacted, whole = trajectory.completions
    assert not redacted.trainable
    assert whole.trainable
    assert redacted.token_ids is None
    assert redacted.prompt_token_ids is None
    assert redacted.logprobs is None
    assert whole.token_ids
    assert [w for w in trajectory.warnings if "was redacted" in w]
    rows = trajectory.token_sequences()
    assert len(rows) == 1
    assert "was redacted" in rows.dropped[0].reason


def test_redaction_continues_conversations(clients: Clients):
    """Requests and replies are redacted alike, so what continues a reply still does."""
    recording = recording_with(redact=mask)
    client = clients.sync(clients.serve(f"{MARK} said"))
    messages: list[Any] = [{"role": "user", "content": f"{MARK} asked"}]
    with rollout("agent"):
        for stream in (False, True, False):
            reply: Any = client.chat.completions.create(model="m", messages=messages, stream=stream)
            text = (
                "".join(chunk.choices[0].delta.content or "" for chunk in reply)
                if stream
                else reply.choices[0].message.content
            )
            assert text == f"{MARK} said"  # the agent reads what the server said
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    assert len(recording.trajectory.histories) == 1


def broken(_: bytes) -> bytes:
    raise RuntimeError("no")


@pytest.mark.parametrize("redact", [broken, lambda _: None, lambda body: body.decode()])
def test_nothing_is_recorded_where_redacting_fails(clients: Clients, redact: Any):
    """A `redact` that raises or gives no bytes costs the recording its content, not the agent."""
    recording = run(clients, redact=redact)
    assert MARK not in text_of(recording.spans)
    assert len(recording.trajectories[0].completions) == 4
    assert not any(c.trainable for t in recording.trajectories for c in t.completions)


def test_a_stream_that_merges_to_nothing_is_not_recorded(clients: Clients):
    """What is to be redacted may be split over its events, where `redact` cannot see it."""
    event = 'data: {"id": "a", "choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n'
    events = event % MARK[:3] + event % MARK[3:] + "data: no JSON\n\n"
    recording = recording_with(redact=mask)
    client = clients.sync(
        clients.serve(Raw(200, events.encode(), content_type="text/event-stream"))
    )
    with rollout("agent"), pytest.raises(ValueError, match="Expecting"):
        for _ in client.chat.completions.create(model="m", messages=ASKED, stream=True):
            pass
    assert MARK[3:] not in text_of(recording.spans)
    assert MARK[3:] not in json.dumps(recording.trajectory.to_dict())
    assert [c.status for c in recording.trajectory.completions] == ["error"]


@NOT_EXPORTED
@pytest.mark.parametrize("options", [{"content": "none"}, {"redact": mask}], ids=["none", "redact"])
@pytest.mark.parametrize(
    "reply",
    [
        Raw(200, json.dumps({"error": {"message": f"{MARK} is wrong"}}).encode()),
        Raw(200, f"<p>{'x' * 195}{MARK}</p>".encode(), content_type="text/html"),
    ],
    ids=["error", "no JSON"],
)
def test_errors_with_status_200_are_content(clients: Clients, options: Any, reply: Raw):
    """The text of an error is on no LLM span either, nor is the start of what `redact` replaces."""
    recording = recording_with(**options)
    client = clients.sync(clients.serve(reply))
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=ASKED)
    assert "chat m" in [span.name for span in recording.spans]
    assert MARK[:3] not in text_of(recording.spans).replace("x" * 195, "")
    if "redact" in options:
        text = json.dumps(recording.trajectory.to_dict()).replace("x" * 195, "")
        assert MARK[:3] not in text


def test_tokens_are_taken_out_of_replies():
    """No member of a reply that tells its tokens stays, however deep; other bytes must be clean."""
    reply = {
        "id": "a",
        "prompt_token_ids": [1],
        "choices": [{"token_ids": [1], "logprobs": {"content": []}, "message": {"content": "x"}}],
        "sglext": {"input_ids": [1]},
    }
    assert json.loads(without_tokens(json.dumps(reply).encode())) == {
        "id": "a",
        "choices": [{"message": {"content": "x"}}],
    }
    assert without_tokens(b"Bad gateway") == b"Bad gateway"
    assert without_tokens(b'data: {"token_ids": [1]}') == b""


def test_free_text_is_left_out_of_attributes():
    """Of errors and rewards the free text is left out, not the type, name and value."""
    shown = Content(exported=False).shown(
        {
            "rollout.error": '{"type": "E", "message": "m", "traceback": "t"}',
            "rollout.rewards": '[{"name": "a", "value": 1.0, "explanation": "e"}]',
            "rollout.output": '"o"',
            "rollout.metrics": '{"n": 1}',
        }
    )
    assert {key: json.loads(value) for key, value in shown.items()} == {
        "rollout.error": {"type": "E"},
        "rollout.rewards": [{"name": "a", "value": 1.0}],
        "rollout.metrics": {"n": 1},
    }


class ByHand(Workflow):
    """A workflow whose agent builds its trajectory by hand."""

    async def run(self, task: Any, uid: str, **_: Any) -> Episode:
        step = Step(chat_completions=[{"role": "user", "content": f"{MARK} by hand"}])
        built = Trajectory(name="built", steps=[step])
        self.commit(trajectory=built, name="built")
        return Episode(task=task, trajectories=[built])


@NOT_EXPORTED
@pytest.mark.parametrize("options", [{"content": "none"}, {"redact": mask}], ids=["none", "redact"])
def test_content_at_workflows(options: Any) -> None:
    """Episodes and steps that were built by hand are left off the spans, or redacted, too."""
    recording = recording_with(**options)
    asyncio.run(ByHand().run_with_termination_handling({"q": f"{MARK} task"}, "t:0"))
    assert recording.spans
    assert MARK not in text_of(recording.spans)


@NOT_EXPORTED
def test_labels_of_rewards_are_content():
    """A label is a text of the user: it is exported only where content is."""
    recording = recording_with(content="none")
    with rollout("x") as trajectory:
        record_reward(1, label=f"{MARK} pass")
    trajectory.rewards["late"] = Reward(2, label=f"{MARK} poor")
    assert [reward.label for reward in trajectory.all_rewards.all()] == [
        f"{MARK} pass",
        f"{MARK} poor",
    ]
    assert MARK not in text_of(recording.spans)


def test_a_stream_that_contradicts_itself_is_not_recorded_where_it_is_redacted(
    clients: Clients,
) -> None:
    """Its pieces cannot be redacted, and what they are put together to is not what came."""
    recording = recording_with(redact=mask)
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    models = [{"content": f"my {MARK}"}, {"content": "x"}]
    sent = [
        {**head, "model": str(at), "choices": [{"index": 0, "delta": delta}]}
        for at, delta in enumerate(models)
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in sent]
    server = clients.serve(
        Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")
    )
    with rollout("agent"):
        stream = clients.sync(server).chat.completions.create(
            model="m", messages=ASKED, stream=True
        )
        list(stream)
    (completion,) = recording.trajectory.completions
    assert not completion.trainable
    assert MARK not in str(completion.response)
