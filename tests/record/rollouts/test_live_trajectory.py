"""The trajectory while its rollout runs: what it shows, and where there is none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    NoActiveRolloutError,
    TrajectorySealedError,
    UnknownCompletionError,
    get_current_trajectory,
    get_history,
    reconstruct,
    rollout,
)
from otel_rollout.testing import Reply, ToolCall
from tests.kit.conversations import user
from tests.kit.played import ask, assert_replays, contents
from tests.kit.recording import Clients, Recording

# --- the live trajectory


def test_there_is_no_trajectory_outside(recording: Recording):
    """Outside a rollout the current trajectory is an error that says how to open one."""
    for call in (get_current_trajectory, lambda: get_history("x")):
        with pytest.raises(NoActiveRolloutError, match=r"decorate .* with @rollout"):
            call()
    with rollout("x"):
        get_current_trajectory()
    with pytest.raises(NoActiveRolloutError):
        get_current_trajectory()


def test_a_live_trajectory_shows_what_has_come(recording: Recording, clients: Clients):
    """Completions, histories and messages are there as soon as the call has returned."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        assert (trajectory.completions, trajectory.histories, trajectory.messages()) == ([], [], [])
        ask(client, user("a"))
        assert [c.message and c.message["content"] for c in trajectory.completions] == [
            "You said: a"
        ]
        ask(client, *trajectory.messages(), user("b"))
        ask(client, user("other"))
        assert contents(trajectory) == [
            ["other", "You said: other"],
            ["a", "You said: a", "b", "You said: b"],
        ]
        assert trajectory.completions[0].token_ids == [*b"You said: a", 261]
        assert trajectory.completions[0].trainable
        live = [h.to_list() for h in trajectory.histories]
        live_ids = [c.id for c in trajectory.completions]
    assert [h.to_list() for h in trajectory.histories] == live
    assert [c.id for c in trajectory.completions] == live_ids
    assert_replays(recording)


CALL = Reply(tool_calls=[ToolCall("add", '{"a": 1}', id="call_1")])
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_a_history_is_continued_by_appending(recording: Recording, clients: Clients):
    """`get_history` gives messages ready to send; what is appended and sent is one history."""
    server = clients.serve([CALL, "It is 2."])
    client = clients.sync(server)
    with rollout("x") as trajectory:
        first = ask(client, user("1+1?"))
        history = get_history(first.id)
        assert [m["role"] for m in history.messages()] == ["user", "assistant"]
        history.append(RESULT)
        assert history.messages()[-1] == RESULT
        second = ask(client, *history.messages())
        assert get_history(second.id).messages()[:3] == history.messages()
    (final,) = trajectory.histories
    assert final.messages()[:3] == history.messages()
    assert final.messages()[3]["content"] == "It is 2."
    assert final.completion_ids == [first.id, second.id]
    assert [item.trainable for item in final.items] == [False, True, False, True]
    sent = json.loads(server.exchanges[1].request)["messages"]
    assert sent == history.messages()
    assert trajectory.warnings == []
    assert_replays(recording)


def test_an_appended_message_that_is_not_sent_is_kept(recording: Recording, clients: Clients):
    """A tool result after the last call is in the history, live, sealed and replayed."""
    client = clients.sync(clients.serve([CALL]))
    with rollout("x") as trajectory:
        first = ask(client, user("1+1?"))
        trajectory.get_history(first.id).append(RESULT)
        assert trajectory.histories[0].messages()[-1] == RESULT
        assert get_history(first.id).messages()[-1] == RESULT
    assert trajectory.histories[0].messages()[-1] == RESULT
    (replayed,) = reconstruct(recording.spans)
    assert replayed.messages()[-1] == RESULT
    assert replayed.histories[0].items[-1].completion is None
    assert_replays(recording)


def test_a_history_is_the_callers_own_copy(recording: Recording, clients: Clients):
    """Changing what `messages()` gave changes nothing that was recorded."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        completion = ask(client, user("a"))
        messages = get_history(completion.id).messages()
        messages[0]["content"] = "changed"
        messages.clear()
        assert contents(trajectory) == [["a", "You said: a"]]
    assert contents(trajectory) == [["a", "You said: a"]]


def test_the_history_of_another_choice(recording: Recording, clients: Clients):
    """With n > 1 `choice` tells the completions of one response apart."""
    two = Reply(choices=[Reply("left"), Reply("right")])
    client = clients.sync(clients.serve([two]))
    with rollout("x") as trajectory:
        completion = ask(client, user("a"), n=2)
        assert get_history(completion.id).messages()[-1]["content"] == "left"
        assert get_history(completion.id, 1).messages()[-1]["content"] == "right"
        with pytest.raises(UnknownCompletionError, match="with choice 2"):
            get_history(completion.id, 2)
    assert contents(trajectory) == [["a", "left"], ["a", "right"]]


def test_an_unknown_completion_lists_the_known_ones(recording: Recording, clients: Clients):
    """The error for an id that is not there names those that are."""
    client = clients.sync(clients.serve())
    with rollout("x"):
        with pytest.raises(UnknownCompletionError, match="no call of it has ended yet"):
            get_history("nope")
        first, second = ask(client, user("a")), ask(client, user("b"))
        with pytest.raises(UnknownCompletionError, match="no completion 'nope'") as caught:
            get_history("nope")
    assert f"it has {first.id!r}, {second.id!r}" in str(caught.value)


def test_appending_after_the_end_is_refused(recording: Recording, clients: Clients):
    """A history that was got before or after the end takes no more messages once it is over."""
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        completion = ask(client, user("a"))
        history = get_history(completion.id)
        with pytest.raises(ValueError, match="expected a JSON value"):
            history.append(object())
    for late in (history, trajectory.get_history(completion.id), trajectory.histories[0]):
        with pytest.raises(TrajectorySealedError, match="append while"):
            late.append(RESULT)
        assert len(late.messages()) == 2


def test_metrics_metadata_and_logs(recording: Recording):
    """What the agent sets while it runs is on the sealed trajectory and on its span."""
    with rollout("x", metadata={"a": 1}) as trajectory:
        trajectory.metrics["turns"] = 3
        trajectory.metrics["gone"] = 1
        del trajectory.metrics["gone"]
        trajectory.metadata["nested"] = {"é": [None, True, (1, 2)]}
        trajectory.log("first")
        trajectory.log("zweite Zeile: \ud800")
    assert trajectory.metrics == {"turns": 3}
    assert trajectory.metadata == {"a": 1, "nested": {"é": [None, True, [1, 2]]}}
    assert trajectory.logs == ["first", "zweite Zeile: \ud800"]
    assert_replays(recording)


def test_metadata_is_checked_when_it_is_set(recording: Recording):
    """A value or name that JSON has no place for is refused at the line that sets it."""
    with rollout("x") as trajectory:
        with pytest.raises(ValueError, match=r"trajectory.metadata\['x'\]: expected a JSON value"):
            trajectory.metadata["x"] = object()
        names: Any = trajectory.metadata
        with pytest.raises(ValueError, match="expected a name"):
            names[3] = 1
        mutable = [1]
        trajectory.metadata["list"] = mutable
        mutable.append(2)
    assert trajectory.metadata == {"list": [1]}


@pytest.mark.parametrize("value", ["good", None, [1], float("nan"), float("inf"), object()])
def test_metrics_are_numbers(recording: Recording, value: Any):
    """A metric that is no finite number is refused at the line that sets it, like a reward."""
    with rollout("x") as trajectory, pytest.raises(ValueError, match=r"metrics\['m'\]"):
        trajectory.metrics["m"] = value
    assert trajectory.metrics == {}


def test_a_sealed_trajectory_takes_no_more(recording: Recording):
    """After the end metrics, metadata and logs are closed, and each error says so."""
    with rollout("x") as trajectory:
        trajectory.metrics["m"] = 1
    assert trajectory.sealed
    attempts: list[Callable[[], object]] = [
        lambda: trajectory.metrics.update(m=2),
        lambda: trajectory.metrics.clear(),
        lambda: trajectory.metadata.update(m=2),
        lambda: trajectory.log("late"),
    ]
    for attempt in attempts:
        with pytest.raises(TrajectorySealedError, match="has ended"):
            attempt()
    assert (trajectory.metrics, trajectory.metadata, trajectory.logs) == ({"m": 1}, {}, [])


# --- where nothing is recorded


def test_without_configure_functions_just_run(clients: Clients):
    """With no SDK at all the agent runs as ever, and nothing is raised."""
    client = clients.sync(clients.serve())

    @rollout(task_id="t")
    def agent() -> Any:
        trajectory = get_current_trajectory()
        trajectory.reward = 1
        trajectory.metrics["m"] = 1
        trajectory.log("x")
        return ask(client, user("a")).choices[0].message.content

    assert agent() == "You said: a"
    with rollout("x") as trajectory:
        trajectory.reward = 0.5
    assert (trajectory.status, trajectory.reward) == ("complete", 0.5)
    assert reconstruct([]) == []


def test_a_disabled_sdk_records_nothing(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """With OTEL_SDK_DISABLED=true the agent runs, and there is no trajectory of it."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure("x", [exporter])
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        assert ask(client, user("a")).choices[0].message.content == "You said: a"
        trajectory.reward = 1
    assert trajectory.completions == []
    assert exporter.get_finished_trajectories() == ()


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, ParentBased(TraceIdRatioBased(0))])
def test_training_does_not_sample(clients: Clients, sampler: Any):
    """What the user's sampler drops is recorded all the same, and no span exporter gets it."""
    simple, batch = InMemorySpanExporter(), InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(simple))
    provider.add_span_processor(BatchSpanProcessor(batch))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client, user("a"))
        with rollout("nested"):
            ask(client, user("b"))
    trajectory.reward = 1
    provider.force_flush()
    nested, outer = exporter.get_finished_trajectories()
    assert outer is trajectory
    assert contents(outer) == [["a", "You said: a"]]
    assert contents(nested) == [["b", "You said: b"]]
    assert outer.completions[0].token_ids == [*b"You said: a", 261]
    assert outer.warnings == nested.warnings == []
    assert simple.get_finished_spans() == batch.get_finished_spans() == ()
    with provider.get_tracer("of the user").start_as_current_span("x") as span:
        assert not span.is_recording()  # our sampler is ours alone
    provider.shutdown()


def test_a_partly_sampled_provider_exports_whole_rollouts(clients: Clients):
    """Of rollouts that the sampler keeps every span is exported, of the others none."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.5)))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve())
    for _ in range(20):
        with rollout("x"):
            ask(client, user("a"))
    held = {trajectory.id: trajectory for trajectory in exporter.get_finished_trajectories()}
    exported = reconstruct(spans.get_finished_spans())
    assert len(held) == 20
    assert 0 < len(exported) < 20
    assert all(trajectory == held[trajectory.id] for trajectory in exported)
    provider.shutdown()


def test_an_error_with_a_lone_surrogate_can_be_exported(recording: Recording):
    """The text of any exception can be encoded: it would take other spans of its batch with it."""
    with contextlib.suppress(ValueError), rollout("x"):
        raise ValueError("half \ud83d of it")
    (span,) = recording.spans
    assert (span.status.description or "").encode() == b"ValueError: half \\ud83d of it"
    assert all(str(value).encode() for value in (span.attributes or {}).values())
    assert (recording.trajectory.error or {})["message"] == "half \\ud83d of it"
