"""A rollout without a model call says so, unless it is one that needs none of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    EmptyRowsWarning,
    ExportError,
    InMemoryTrajectoryExporter,
    Step,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    Workflow,
    continue_rollout,
    gather_group,
    no_capture,
    propagate,
    reconstruct,
    rollout,
    to_token_rows,
)
from otel_rollout.export import (
    JsonRows,
    TokenRows,
    row_exporter,
    row_exporter_from_texts,
    row_exporters,
)
from otel_rollout.export.rowfile import Tally, rows_of
from otel_rollout.export.store import item_of
from otel_rollout.record.current import rollout_of
from otel_rollout.record.transports.uncaptured import note_outside, note_uncaptured
from otel_rollout.testing import Reply
from tests.kit.conversations import user
from tests.kit.played import ask
from tests.kit.recording import Clients, Recording

NO_CALL = "it made no model call that was captured"


def empty(trajectory: Trajectory) -> bool:
    return any(warning.startswith(NO_CALL) for warning in trajectory.warnings)


def test_a_rollout_without_a_call_says_so(recording: Recording):
    """In its warnings, with what to check; and so do its rows, and a file that it was read from."""
    with rollout("agent") as trajectory:
        assert trajectory.warnings == trajectory.missing_calls == []
    (warning,) = trajectory.warnings
    assert warning.startswith(f"{NO_CALL}: check that its client")
    assert trajectory.missing_calls == [warning]
    read = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert read.missing_calls == [warning]
    for each in (trajectory, read):
        with pytest.warns(EmptyRowsWarning, match=NO_CALL):
            (dropped,) = to_token_rows([each]).dropped
        assert (dropped.completion, dropped.reason, str(dropped)) == (None, warning, warning)
        assert each.token_sequences().dropped == [dropped]


def test_a_failed_rollout_says_it_without_advice(recording: Recording):
    """It may have failed before its first call: there is nothing to check."""
    with contextlib.suppress(ValueError), rollout("agent") as trajectory:
        raise ValueError
    assert trajectory.warnings == [f"{NO_CALL} before it ended as 'error'"]


def test_a_rollout_with_a_call_is_not_told(recording: Recording, clients: Clients):
    """Also where the call failed, is still open, made no completion, or came too late."""
    client = clients.sync(clients.serve([Reply("hi"), ValueError("no"), Reply("hi")]))
    for _ in range(2):
        with contextlib.suppress(Exception), rollout("agent"):
            ask(client, user("a"))
    with rollout("embeds"):
        client.embeddings.create(model="m", input="a")
    assert not any(map(empty, recording.trajectories))
    assert len(recording.trajectories) == 3


def test_no_capture_leaves_none(recording: Recording, clients: Clients):
    """Calls that are left out on purpose are not captured."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent") as trajectory, no_capture():
        ask(client, user("a"))
    assert empty(trajectory)


def test_a_rollout_around_others_needs_no_call(recording: Recording, clients: Clients):
    """The calls are those of the rollouts inside it; one of these may be without any."""
    client = clients.sync(clients.serve("hi"))
    with rollout("outer") as outer, rollout("middle") as middle:
        with rollout("inner") as inner:
            ask(client, user("a"))
        with rollout("idle") as idle:
            pass
    assert [each.warnings for each in (outer, middle, inner)] == [[], [], []]
    assert empty(idle)


async def test_a_group_inside_a_rollout(recording: Recording, clients: Clients):
    """Also where they are gathered."""
    client = clients.sync(clients.serve("hi"))

    @rollout
    async def agent() -> None:
        ask(client, user("a"))

    with rollout("outer") as outer:
        await gather_group([agent(), agent()])
    assert outer.warnings == []


class Solve(Workflow):
    """Calls a rollout, calls itself, builds a trajectory by hand, or does nothing."""

    def __init__(self, client: Any, how: str) -> None:
        super().__init__(client)
        self.how = how

    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        if self.how == "rollout":
            with rollout("agent"):
                ask(self.rollout_engine, user("a"))
        elif self.how == "by hand":
            reply = ask(self.rollout_engine, user("a"))
            steps = [Step(chat_completions=[user("a"), reply.choices[0].message.model_dump()])]
            self.commit("agent", trajectory=Trajectory(name="agent", steps=steps))
        elif self.how == "by hand, not captured":
            steps = [Step(chat_completions=[user("a")], model_response="b")]
            self.commit("agent", trajectory=Trajectory(name="agent", steps=steps))


@pytest.mark.parametrize("how", ["rollout", "by hand", "by hand, not captured", "nothing"])
async def test_workflows(
    recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture, how: str
):
    """No trajectory of a run is told falsely; a run without any call is in the log."""
    client = clients.sync(clients.serve("hi"))
    episode = await Solve(client, how).run_with_termination_handling("task", "1:0")
    assert [t.warnings for t in episode.trajectories] == [[]] * (how != "nothing")
    assert [t.warnings for t in recording.trajectories] == [[]] * (how != "nothing")
    assert (NO_CALL in caplog.text) == (how in ("nothing", "by hand, not captured"))


def test_a_rollout_whose_calls_are_elsewhere(recording: Recording, clients: Clients):
    """A process that continues it has the calls: it is told as missing, or is there."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent") as lonely:
        headers = propagate()
    assert not empty(lonely)
    assert "handed on to another process" in lonely.missing_calls[0]
    del headers
    with rollout("agent") as whole:
        headers = propagate()
        with continue_rollout(headers):
            ask(client, user("a"))
    assert whole.warnings == []


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.not_replayed("spans are left out on purpose")
def test_a_part_without_its_rollout(recording: Recording, clients: Clients, calls: int):
    """What another process recorded alone says nothing about calls of the whole."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent"):
        headers = propagate()
    otel_rollout.shutdown()
    other = InMemorySpanExporter()
    provider = otel_rollout.configure(exporters=[])
    provider.add_span_processor(SimpleSpanProcessor(other))
    with continue_rollout(headers) as part:
        for _ in range(calls):
            ask(client, user("a"))
    (alone,) = reconstruct(part.spans)
    assert not empty(alone)
    (whole,) = reconstruct([*recording.spans, *part.spans])
    assert empty(whole) == (not calls)


@pytest.mark.not_replayed("content is kept off the spans")
def test_content_that_is_kept_off_is_missing(clients: Clients):
    """What `content="none"` left out of a trace was there."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(content="none")
    provider.add_span_processor(SimpleSpanProcessor(spans))
    client = clients.sync(clients.serve("hi"))
    with rollout("agent"):
        ask(client, user("a"))
    (trajectory,) = reconstruct(spans.get_finished_spans())
    assert trajectory.completions == []
    assert not empty(trajectory)
    assert "1 of 1 model calls are missing" in trajectory.missing_calls[0]


@pytest.mark.not_replayed("spans are left out on purpose")
def test_without_the_rollouts_span_nothing_is_known(recording: Recording, clients: Clients):
    """The trajectory says that its span is missing, not that there was no call."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent"):
        ask(client, user("a"))
    (trajectory,) = reconstruct(recording.spans_named("recording"))
    assert not empty(trajectory)
    assert trajectory.missing_calls == trajectory.warnings[:1]


def test_the_log_says_it_once(recording: Recording, caplog: pytest.LogCaptureFixture):
    """With the name of the rollout; not for each rollout, and not for one that failed."""

    @rollout
    def silent() -> None:
        pass

    with contextlib.suppress(ValueError), rollout("failed"):
        raise ValueError
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        for _ in range(3):
            silent()
    (record,) = [record for record in caplog.records if record.name == "otel_rollout"]
    assert record.getMessage().startswith(f"rollout 'silent': {NO_CALL}")


def test_where_the_calls_were_seen_they_are_named(
    recording: Recording, caplog: pytest.LogCaptureFixture
):
    """Then nothing has to be checked: the trajectory and the log name what was not captured."""
    with rollout("agent") as trajectory:
        active = rollout_of(None)
        assert active is not None
        note_uncaptured(active, "ollama (httpx)", "/api/chat")
    seen = "1 request to /api/chat went through ollama (httpx) and was not captured"
    assert trajectory.warnings == trajectory.missing_calls == [seen]
    assert f"rollout 'agent': {seen}" in caplog.text
    assert [d.reason for d in trajectory.token_sequences().dropped] == [seen]
    with rollout("beside") as beside:
        note_outside()  # it need not be the rollout's own
    assert [empty([beside][0]), len(beside.missing_calls)] == [True, 2]


IDS: Any = {"return_token_ids": True, "logprobs": True}


def trained(rows: list[TokenSequence]) -> int:
    return sum(sum(row.loss_mask) for row in rows)


def partly_captured(clients: Clients) -> Trajectory:
    """A trajectory with a call that trains, and one that was not captured."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent", group_id="g") as trajectory:
        ask(client, user("a"), extra_body=IDS)
        active = rollout_of(None)
        assert active is not None
        note_uncaptured(active, "requests", "/api/chat")
    trajectory.reward = 1.0
    return trajectory


def test_rows_may_require_all_calls(recording: Recording, clients: Clients):
    """By default what was captured trains; where all calls are required, it is refused."""
    trajectory = partly_captured(clients)
    assert trained(trajectory.token_sequences()) > 0
    assert len(to_token_rows([trajectory])) == 1
    read = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    for each in (trajectory, read):
        with pytest.raises(ExportError, match=r"require_all_calls.*went through requests"):
            each.token_sequences(require_all_calls=True)
        with pytest.raises(ExportError, match=each.id):
            to_token_rows([each], require_all_calls=True)


def test_a_whole_trajectory_is_not_refused(recording: Recording, clients: Clients):
    """All its calls are there; and one that does not train anyway is not refused either."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent") as whole:
        ask(client, user("a"), extra_body=IDS)
    with contextlib.suppress(ValueError), rollout("failed") as failed:
        raise ValueError
    assert len(to_token_rows([whole], require_all_calls=True)) == 1
    with rollout("not trained", trainable=False) as other:
        pass
    assert to_token_rows([other], require_all_calls=True) == []
    assert [d.completion for d in failed.token_sequences().dropped] == [None]


def test_late_and_open_calls_are_reasons(recording: Recording, clients: Clients):
    """The rollout did not wait for them."""
    client = clients.sync(clients.serve(["hi", Reply("hello there", delay=0.2)]))
    with rollout("agent") as trajectory:
        ask(client, user("a"), extra_body=IDS)
        late = rollout_of(None)
        assert late is not None
        late.begin_call("/v1/chat/completions")
    assert "had not ended when the rollout did" in trajectory.missing_calls[0]
    with pytest.raises(ExportError, match="had not ended"):
        trajectory.token_sequences(require_all_calls=True)


@pytest.mark.not_replayed("a call is counted that has no span")
def test_calls_after_its_end_are_reasons(recording: Recording, clients: Clients):
    """Each is counted once."""
    client = clients.sync(clients.serve("hi"))
    with rollout("agent") as trajectory:
        ask(client, user("a"), extra_body=IDS)
        active = rollout_of(None)
    assert active is not None
    for count in (1, 2):
        active.begin_call("/v1/chat/completions")
        (warning,) = trajectory.missing_calls
        assert warning.startswith(f"{count} model calls began after")
        assert trajectory.warnings == [warning]


def test_exporters_leave_it_out_and_count_it(recording: Recording, clients: Clients):
    """Its group is exported as if it were not there; with `strict` it is an error."""
    client = clients.sync(clients.serve("hi"))
    bad = partly_captured(clients)
    with rollout("agent", group_id="g") as good:
        ask(client, user("a"), extra_body=IDS)
    good.reward = 0.0
    items = [item_of(each)[1] for each in (bad, good)]
    tally, reports = Tally(), list[str]()
    exporter = TokenRows(require_all_calls=True)
    (row,) = rows_of(items, exporter, tally, reports.append, strict=False)
    assert json.loads(row)["trajectory_id"] == good.id
    ((reason, count),) = tally.refused.items()
    assert count == 1
    assert "… request to /api/chat went through requests" in reason
    with pytest.raises(ExportError):
        rows_of(items, exporter, Tally(), reports.append, strict=True)
    assert len(rows_of(items, TokenRows(), Tally(), reports.append, strict=True)) == 2


class IdRows(JsonRows):
    """An exporter that does not declare the option."""

    def rows(self, group: TrajectoryGroup) -> list[dict[str, Any]]:
        return [{"id": trajectory.id} for trajectory in group]


@pytest.mark.parametrize("name", ["tokens", "ids"])
def test_every_exporter_has_the_option(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Also one that does not declare it; a wrong value is an error that says so."""
    found = [EntryPoint("ids", f"{__name__}:IdRows", ""), *row_exporters()]
    module = sys.modules["otel_rollout.export.row_contract"]
    monkeypatch.setattr(module, "row_exporters", lambda: found)
    group = TrajectoryGroup.of([partly_captured(clients)])
    for exporter in (
        row_exporter_from_texts(name, {"require_all_calls": "yes"}),
        row_exporter(name, require_all_calls=True),
    ):
        with pytest.raises(ExportError, match="went through requests"):
            list(exporter.rows(group))
    assert list(row_exporter(name).rows(group))
    assert list(row_exporter(name, require_all_calls=False).rows(group))
    with pytest.raises(ConfigurationError, match="expected 'true' or 'false'"):
        row_exporter_from_texts(name, {"require_all_calls": "perhaps"})
    with pytest.raises(ConfigurationError, match="require_all_calls"):
        row_exporter(name, require_all_calls=2)


def test_a_trajectory_without_a_call_is_counted(recording: Recording):
    """By every exporter, with the reason."""
    with rollout("agent") as trajectory:
        pass
    tally = Tally()
    rows_of([item_of(trajectory)[1]], TokenRows(), tally, print, strict=True)
    ((reason, count),) = tally.empty.items()
    assert (count, reason.startswith(NO_CALL), tally.dropped) == (1, True, {})


def test_in_memory(recording: Recording):
    """An exporter gets the empty trajectory like any other, and it says what it is."""
    exporter = InMemoryTrajectoryExporter()
    recording.provider.add_span_processor(otel_rollout.TrajectorySpanProcessor(exporter))
    with rollout("agent"):
        pass
    assert empty(exporter.get_finished_trajectories()[0])
