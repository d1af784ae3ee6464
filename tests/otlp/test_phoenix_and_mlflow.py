"""Spans read from the APIs of Phoenix and MLflow, and from their saved answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import SpanFormatError, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.command.cli import main
from otel_rollout.otlp import read, read_mlflow, read_phoenix
from otel_rollout.testing import Reply
from tests.kit.comparing import assert_equal_to_microseconds
from tests.kit.recording import Clients, Recording
from tests.otlp.apis import Api, mlflow, mlflow_span, phoenix, phoenix_span, sent

TEXTS: list[Any] = ["hello", '"quoted"', "17", "true", "null", "1e5", '{"a": 1.50}', "", "[1, 2"]


@pytest.fixture
def varied(recording: Recording, clients: Clients) -> tuple[Any, ...]:
    """The spans of rollouts with texts that look like JSON wherever a user may put texts."""
    client = clients.sync(clients.serve([Reply(text or "-") for text in TEXTS]))
    for text in TEXTS:

        @rollout(task_id=text, group_id=text or None)
        def agent(text: str) -> Any:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            return text

        with rollout("with fields", policy_version=text) as trajectory:
            trajectory.metadata["split"] = text
            trajectory.metadata["nested"] = {"n": 1, "is": True, "list": ["a", ""]}
            trajectory.log(text)
            trajectory.metrics["m"] = 0.5
            trajectory.reward = 1
            agent(text)
    return recording.spans


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_project_of_phoenix(varied: Any, recording: Recording, limit: int):
    """All pages are read; nothing but what is below a microsecond is lost."""
    with phoenix(varied, "my agents") as api:
        spans = list(read_phoenix(api.url + "/", "my agents", limit=limit))
        assert len(spans) == len(varied)
        assert len(api.asked) == -(-len(varied) // limit)
    assert_equal_to_microseconds(reconstruct(spans), list(recording.trajectories))


def test_addresses_of_phoenix(varied: Any, recording: Recording):
    """Of a project, a trace and a filter, in the browser and in the API."""
    first = recording.trajectories[0]
    with phoenix(varied) as api:
        for path in ("projects/default", "projects/default/spans", "v1/projects/default"):
            assert len(list(read(f"{api.url}/{path}"))) == len(varied)
        own = [span for span in varied if f"{span.context.trace_id:032x}" == first.trace_id]
        for path in (
            f"projects/default/traces/{first.trace_id}",
            f"projects/default/traces/{first.trace_id}?selectedSpanNodeId=U3Bhbjo1",
            f"v1/projects/default/spans/otlpv1?limit=2&trace_id={first.trace_id}",
        ):
            assert len(list(read(f"{api.url}/{path}"))) == len(own)
        with pytest.raises(LookupError, match="no project 'other'"):
            list(read(f"{api.url}/projects/other"))
        with pytest.raises(LookupError, match="no trace"):
            list(read_phoenix(api.url, trace_id="ab" * 16))
        list(read_phoenix(api.url, headers={"Authorization": "Bearer x"}))
        assert api.headers[-1]["Authorization"] == "Bearer x"


@pytest.mark.parametrize("value", [None, [1, {"a": 2}], {"a.b": 1}, {}])
def test_metadata_that_phoenix_loses_is_missing(recording: Recording, value: Any):
    """Nulls, lists and names with dots are not what they were: the trajectory says so."""
    with rollout("agent") as trajectory:
        trajectory.metadata["kept"] = "x"
        trajectory.metadata["other"] = value
    with phoenix(recording.spans) as api:
        (found,) = reconstruct(read_phoenix(api.url))
    assert found.warnings == [
        f"its {sc.ROLLOUT_METADATA} was cut, or did not come",
        *trajectory.warnings,
    ]
    assert found.metadata == {}


def test_a_trace_of_mlflow(varied: Any, recording: Recording):
    """By its id in either spelling and by its addresses, with nothing lost."""
    with mlflow(varied) as api:
        for live in recording.trajectories:
            if live.parent_id is None:
                inner = [t for t in recording.trajectories if t.parent_id == live.id]
                expected = sorted([live, *inner], key=lambda t: (t.start_time_ns, t.id))
                for name in (live.trace_id, f"tr-{live.trace_id}", live.trace_id.upper()):
                    assert reconstruct(read_mlflow(api.url, name)) == expected
                for path in (
                    f"#/experiments/1/traces?selectedEvaluationId=tr-{live.trace_id}",
                    f"#/experiments/1/traces/tr-{live.trace_id}",
                    f"api/3.0/mlflow/traces/get?trace_id=tr-{live.trace_id}",
                    f"ajax-api/3.0/mlflow/get-trace-artifact?request_id=tr-{live.trace_id}",
                ):
                    assert reconstruct(read(f"{api.url}/{path}")) == expected
        with pytest.raises(LookupError, match="no trace"):
            read_mlflow(api.url, "ab" * 16)


def saved(folder: Path, *documents: Any) -> Path:
    path = folder / "saved.json"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


def test_saved_answers(recorded: Any, recording: Recording, tmp_path: Path):
    """Pages of Phoenix in one file, and MLflow's answer; by the command too."""
    rows = [phoenix_span(span) for span in sent(recorded)]
    pages = saved(
        tmp_path,
        {"data": rows[:2], "next_cursor": "x"},
        {"data": rows[2:], "next_cursor": None},
    )
    assert_equal_to_microseconds(reconstruct(read(pages)), list(recording.trajectories))
    answer = saved(tmp_path, {"spans": [mlflow_span(span) for span in sent(recorded)]})
    assert reconstruct(read(answer)) == list(recording.trajectories)
    assert main(["rebuild", str(answer), "-o", str(tmp_path / "out.jsonl")]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(recording.trajectories)


def test_the_answer_of_mlflow_that_was_parsed(recorded: Any, recording: Recording, tmp_path: Path):
    """`traces/get` gives objects for texts that are JSON: they are written again."""

    def value(stored: str) -> Any:
        return otlp_value(json.loads(stored))

    def otlp_value(found: Any) -> Any:
        if isinstance(found, dict):
            rows = [{"key": key, "value": otlp_value(item)} for key, item in found.items()]
            return {"kvlist_value": {"values": rows}}
        if isinstance(found, list):
            return {"array_value": {"values": [otlp_value(item) for item in found]}}
        kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
        return {} if found is None else {kinds[type(found)]: found}

    spans = []
    for span in map(mlflow_span, sent(recorded)):
        rows = [{"key": key, "value": value(text)} for key, text in span["attributes"].items()]
        spans.append({**span, "attributes": rows, "events": []})
    path = saved(tmp_path, {"trace": {"trace_info": {}, "spans": spans}})
    assert reconstruct(read(path)) == list(recording.trajectories)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"data": [{"id": "x", "context": {}}], "next_cursor": None},
            "expected an answer",
        ),
        ({"data": 5, "next_cursor": None}, "expected an answer"),
        ([], "expected an answer"),
        (
            {"data": [{"trace_id": "zz", "span_id": "1", "attributes": []}], "next_cursor": None},
            "expected an id of 16 bytes",
        ),
        ({"data": [], "next_cursor": "same"}, "after itself"),
    ],
)
def test_what_is_no_answer_of_phoenix(answer: Any, message: str):
    """It is said, and ends."""
    with Api(lambda *_: answer) as api, pytest.raises(SpanFormatError, match=message):
        list(read_phoenix(api.url))


@pytest.mark.parametrize(
    "answer",
    [
        5,
        {"spans": 5},
        {"spans": [5]},
        {"spans": [{"trace_id": "zz", "attributes": {}}]},
        {"spans": [{"trace_id": "zz", "attributes": {"a": 5}, "events": 5}]},
        {"spans": [{"trace_id": "zz", "attributes": {"a": "x"}}]},
        {"spans": [{"trace_id": "zz", "attributes": {}, "events": [5]}]},
    ],
)
def test_what_is_no_answer_of_mlflow(answer: Any):
    """It is said."""
    with Api(lambda *_: answer) as api, pytest.raises(SpanFormatError):
        read_mlflow(api.url, "ab" * 16)


def test_addresses_of_no_backend():
    """What could be meant is said."""
    for address in ("http://127.0.0.1:1/x", "http://127.0.0.1:1/#/experiments/1"):
        with pytest.raises(SpanFormatError, match="in Phoenix or MLflow"):
            list(read(address))
    with pytest.raises(SpanFormatError, match="http address of Phoenix"):
        list(read_phoenix("file:///etc"))
    for path in ("/projects/x/jaeger/trace/" + "a" * 32, "/trace/" + "a" * 32):
        with pytest.raises(OSError):  # it is Jaeger's, and nobody answers
            list(read(f"http://127.0.0.1:1{path}"))
