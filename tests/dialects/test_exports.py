"""Exports of products: the forms that their records come in, and records that are damaged."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import Trajectory, reconstruct
from otel_rollout.command import cli
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp import read
from otel_rollout.rebuild.dialects.call import Fact
from tests.dialects.compare import RECORDED, lost_in, pairs, spans_of, trajectories_of
from tests.kit.fuzzing import read_all

PRODUCTS = ("langchain", "langfuse", "langsmith", "litellm", "weave")
every_product = pytest.mark.parametrize("product", PRODUCTS)
SHORT = ("chat", "choices", "error", "tools", "stream_tools", "responses")


@cache
def rows_of(product: str) -> list[dict[str, Any]]:
    """The records of a few scenarios."""
    lines = (RECORDED / f"{product}.jsonl").read_text().splitlines()
    kept = {t.trace_id for name, t in trajectories_of(product).items() if name in SHORT}
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if next(read(file(row))).trace_id in kept]


def file(value: Any, **options: Any) -> io.BytesIO:
    return io.BytesIO(json.dumps(value, **options).encode())


def inferred(source: Any, errors: list[Any] | None = None) -> list[Trajectory]:
    on_error = None if errors is None else errors.append
    return reconstruct(read(source, on_error=on_error), infer_rollouts=True)


def only(source: Any) -> Trajectory:
    (trajectory,) = inferred(source)
    return trajectory


@every_product
def test_the_form_of_a_file_decides_nothing(product: str):
    """A list, on one line or several, an answer of an API, and texts of JSON are the same."""
    rows = rows_of(product)
    expected = inferred(file(rows))
    assert len(expected) >= 2
    assert inferred(file(rows, indent=2)) == expected
    member = {"langfuse": "data", "weave": "calls"}.get(product, "runs")
    answer = {member: rows, "meta": {"page": 1}}
    assert inferred(file(answer)) == inferred(file(answer, indent=2)) == expected
    table = [
        {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}
        for row in rows
    ]
    assert inferred(file(table)) == expected


def test_what_langchain_keeps_is_named():
    """Its recorded runs differ from the wire in nothing but what the completion says."""
    compared = 0
    for wire, exchange, of_call in pairs("langchain"):
        found = lost_in(wire, exchange, of_call)
        assert {fact.value for fact in found if isinstance(fact, Fact)} <= {*exchange.lost}
        assert all(isinstance(fact, Fact) for fact in found), wire.scenario
        assert not exchange.damage
        compared += 1
    assert compared == 4
    assert [len(t.histories) for t in trajectories_of("langchain").values()] == [1, 1]


@every_product
def test_the_commands_show_them(product: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An export is a source like any other."""
    source = tmp_path / "dump.json"
    source.write_bytes(file(rows_of(product)).read())
    assert cli.main(["list", str(source), "--infer-rollouts"]) == 0
    assert "1.50 + 2?" in capsys.readouterr().out
    assert cli.main(["show", str(source), "--infer-rollouts"]) == 0
    assert "3.50" in capsys.readouterr().out


def test_feedback_is_metadata_and_no_reward():
    """LangSmith's feedback and Langfuse's scores are beside the trace, for the user to choose."""
    runs = json.loads(json.dumps(rows_of("langsmith")))
    for run in runs:
        run["feedback_stats"] = {"helpful": {"n": 1, "avg": 1.0}}
    for trajectory in inferred(file(runs)):
        assert trajectory.metadata["feedback"] == {"helpful": {"n": 1, "avg": 1.0}}
        assert trajectory.reward is None
    traces: dict[str, Any] = {}
    for row in rows_of("langfuse"):
        traces.setdefault(row["traceId"], []).append(row)
    trace_id, observations = next(iter(traces.items()))
    trace = {"id": trace_id, "timestamp": "2026-11-26T00:00:00Z", "observations": observations}
    scores = [{"name": "helpful", "value": 0.5}, {"name": "tone", "stringValue": "kind"}]
    trajectory = only(file({**trace, "metadata": {"user": "ann"}, "scores": scores}))
    assert trajectory.metadata == {"user": "ann", "scores": {"helpful": 0.5, "tone": "kind"}}
    assert trajectory.reward is None
    with pytest.raises(SpanFormatError, match="ids of its observations alone"):
        inferred(file({**trace, "observations": ["a", "b"]}))


def test_a_blob_export_of_langfuse_is_read():
    """Its members are in snake case, and its values texts."""
    names = {"traceId": "trace_id", "startTime": "start_time", "endTime": "end_time"}
    names |= {"parentObservationId": "parent_observation_id", "model": "provided_model_name"}
    names |= {"modelParameters": "model_parameters", "usageDetails": "usage_details"}
    names |= {"completionStartTime": "completion_start_time", "statusMessage": "status_message"}
    rows = [
        {names.get(k, k): json.dumps(v) if isinstance(v, dict | list) else v for k, v in r.items()}
        for r in rows_of("langfuse")
    ]
    assert inferred(file(rows)) == inferred(file(rows_of("langfuse")))


def test_spans_of_langfuse_itself_are_read():
    """What its library sends over OTLP is what its export has."""
    spans = [span for row in rows_of("langfuse") for span in read(file(row))]
    assert reconstruct(spans, infer_rollouts=True) == inferred(file(rows_of("langfuse")))
    assert {span.attributes["langfuse.observation.type"] for span in spans} == {
        "generation",
        "span",
    }


def test_usage_by_the_names_of_langfuse():
    """Its server counts cached tokens apart; the sum is the request's."""
    row = next(row for row in rows_of("langfuse") if row["type"] == "GENERATION")
    counted = {"input": 10, "input_cached_tokens": 90, "output": 5, "total": 105}
    (completion,) = only(file({**row, "usageDetails": counted})).completions
    assert completion.usage is not None
    assert (completion.usage["prompt_tokens"], completion.usage["completion_tokens"]) == (100, 5)


def test_spend_logs_of_litellm():
    """Their request is beside; without prompts in them the calls say what to switch on."""
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
    }
    said = {"id": "c", "choices": [{"index": 0, "finish_reason": "stop", "message": SAID}]}
    row = {
        "request_id": "c",
        "call_type": "acompletion",
        "startTime": "2026-11-26 07:00:00.123+01:00",
        "endTime": "2026-11-26T06:00:01Z",
        "session_id": "s",
        "model": "m",
        "messages": {},
        "response": json.dumps(said),
        "proxy_server_request": json.dumps(body),
    }
    trajectory = only(file(row))
    assert trajectory.messages() == [*body["messages"], SAID]
    assert trajectory.start_time_ns % 10**9 == 123_000_000
    assert (trajectory.end_time_ns or 0) - trajectory.start_time_ns == 877_000_000
    times = {"startTime": "2026-11-26T06:00:02Z", "endTime": "2026-11-26T06:00:03Z"}
    both = only(file([row, {**row, **times, "request_id": "d"}]))
    assert len(both.completions) == 2
    assert (both.end_time_ns or 0) - trajectory.start_time_ns == 2_877_000_000
    (completion,) = only(file({**row, "proxy_server_request": {}, "response": {}})).completions
    assert not completion.trainable
    assert any("store_prompts_in_spend_logs" in each for each in completion.exchange.damage)


SAID = {"role": "assistant", "content": "Hello."}


def test_spans_of_phoenix_in_its_other_forms():
    """Its `/spans` and its dataframe hold what its OTLP does."""
    root = next(s for s in spans_of("openinference") if s.name == "tools")
    spans = [span for span in spans_of("openinference") if span.trace_id == root.trace_id]
    spans.sort(key=lambda span: span.start_time_ns)
    plain: list[dict[str, Any]] = [
        {
            "name": span.name,
            "span_kind": span.attributes.get("openinference.span.kind", "CHAIN"),
            "parent_id": span.parent_span_id,
            "start_time": 1_790_000_000_000 + 10 * number,  # recorded ones may be equal
            "end_time": 1_790_000_000_005 + 10 * number,
            "status_code": "UNSET",
            "status_message": "",
        }
        for number, span in enumerate(spans)
    ]
    ids = [{"trace_id": span.trace_id, "span_id": span.span_id} for span in spans]
    answer = [
        {**row, "context": each, "attributes": dict(span.attributes)}
        | {"start_time": f"2026-11-26T07:00:00.{row['start_time'] % 1000:03}Z"}
        for row, each, span in zip(plain, ids, spans, strict=True)
    ]
    frame = [
        {**row, **{f"context.{k}": v for k, v in each.items()}}
        | {f"attributes.{k}": v for k, v in nested(span.attributes).items()}
        for row, each, span in zip(plain, ids, spans, strict=True)
    ]
    expected = trajectories_of("openinference")["tools"]
    for form in ({"data": answer, "next_cursor": None}, frame, answer):
        trajectory = only(file(form))
        assert trajectory.messages() == expected.messages()
        assert [c.usage for c in trajectory.completions] == [c.usage for c in expected.completions]
        assert [c.tools for c in trajectory.completions] == [c.tools for c in expected.completions]


def nested(attributes: Any) -> dict[str, Any]:
    """Attributes as columns of a dataframe, those of messages as a list."""
    found: dict[str, Any] = {"llm.input_messages": [], "llm.tools": None}
    for name, value in attributes.items():
        if name.startswith("llm.input_messages."):
            number, _, rest = name.removeprefix("llm.input_messages.").partition(".")
            rows = found["llm.input_messages"]
            while len(rows) <= int(number):
                rows.append({})
            rows[int(number)][rest] = value
        else:
            found[name] = value
    return found


# --- damage


def changes(value: Any, draw: random.Random) -> Any:
    """The value with one part of it gone, cut, or something else."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changes(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], changes(value[place], draw), *value[place + 1 :]]
    if isinstance(value, str) and draw.random() < 0.3:
        return value[: draw.randrange(len(value) + 1)]
    return draw.choice(JUNK)


JUNK: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, "", "x", "null", "[", "{}", [], {}, [1], [None], [[]]),
    *({"a": 1}, [{"role": 1}], [{"content": {"a": 1}}], {"choices": [1]}, {"messages": [[1]]}),
)


@every_product
def test_no_damage_of_a_record_makes_reading_fail(product: str):
    """What is of another shape is an error with its place, or damage of its call."""
    draw = random.Random(product)
    rows = rows_of(product)
    errors: list[SpanFormatError] = []
    for _ in range(25):
        place = draw.randrange(len(rows))
        damaged = [*rows[:place], changes(rows[place], draw), *rows[place + 1 :]]
        lines = "".join(json.dumps(row) + "\n" for row in damaged).encode()
        for trajectory in inferred(io.BytesIO(lines), errors):
            read_all(trajectory)
            for completion in trajectory.completions:
                assert not (completion.trainable and completion.message is None)
    assert all("line" in str(error) and len(str(error)) < 900 for error in errors)


def test_records_that_no_id_names_are_reported():
    """One record that cannot be read costs no other."""
    rows = [{**row, "id": None} if number == 0 else row for number, row in enumerate(runs())]
    errors: list[SpanFormatError] = []
    assert len(inferred(file(rows), errors)) == len(inferred(file(runs())))
    assert "not a record as langsmith exports it" in str(errors[0])
    with pytest.raises(SpanFormatError, match="expected the id of a"):
        inferred(file(rows))


def runs() -> list[dict[str, Any]]:
    return rows_of("langsmith")
