"""Processes that `multiprocessing` begins inside a rollout, in each of its ways."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

import otel_rollout
from otel_rollout import no_capture, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.record.processes import child_reports, children
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
WAYS = pytest.mark.parametrize("way", multiprocessing.get_all_start_methods())
FEW = pytest.mark.parametrize("way", ["fork", "spawn"])
HANDED_ON = (
    "it was handed on to another process, of which no span is here: calls that were made there "
    "are missing (reconstruct from the spans of both, or add_spans)"
)


@pytest.fixture(autouse=True)
def no_file_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a rollout and its processes write for each other is gone once the rollout has ended."""
    paths: list[str] = []

    def noted() -> str:
        paths.append(child_reports.new_file())
        return paths[-1]

    monkeypatch.setattr(children, "new_file", noted)
    yield
    assert not any(map(os.path.exists, paths))


class Saved(SpanProcessor):
    """Writes each span that ends to a file, as it ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_end(self, span: ReadableSpan) -> None:
        with open(self.path, "ab") as file:
            pickle.dump(as_record(span), file)


def saved(path: Path) -> list[SpanRecord]:
    spans = []
    with path.open("rb") as file:
        while file.peek(1):
            spans.append(pickle.load(file))
    return spans


def ask(base_url: str, text: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def work(
    base_url: str, path: str, texts: list[str], instrumentor: Literal["openai"] | None = None
) -> None:
    """What a process does: it records, and makes its calls."""
    provider = otel_rollout.configure(instrumentor=instrumentor)
    provider.add_span_processor(Saved(path))
    for text in texts:
        ask(base_url, text)


def pool_work(base_url: str, texts: list[str]) -> None:
    otel_rollout.configure(instrumentor=None)
    for text in texts:
        ask(base_url, text)


def begin(way: str, target: Callable[..., object], *arguments: Any) -> None:
    context: Any = multiprocessing.get_context(way)
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@WAYS
def test_a_process_continues_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path, way: str
):
    """Its calls are in the rollout that it was begun in; without its spans they are missed."""
    server = clients.serve("hello")
    path = tmp_path / "spans"
    with rollout("agent", policy_version=3, trainable=False):
        ask(server.base_url, "parent")
        begin(way, work, server.base_url, str(path), ["one", "two"])
    assert recording.trajectory.warnings == [HANDED_ON]
    spans = [as_record(span) for span in recording.spans] + saved(path)
    (rebuilt,) = reconstruct(spans)
    assert rebuilt.warnings == []
    assert sorted(c.request_messages[-1]["content"] for c in rebuilt.completions) == [
        "one",
        "parent",
        "two",
    ]
    assert {c.policy_version for c in rebuilt.completions} == {3}
    assert not any(c.trainable for c in rebuilt.completions)
    assert reconstruct(reversed(spans)) == [rebuilt]


@WAYS
def test_a_process_is_sent_with_the_group_of_its_rollout(
    recording: Recording, clients: Clients, tmp_path: Path, way: str
):
    """Also where the rollout has it from the one around it."""
    server = clients.serve("hello")
    with rollout("outer", group_id="g"), rollout("agent"):
        begin(way, work, server.base_url, str(tmp_path / "spans"), ["one"])
    found = [each for each in saved(tmp_path / "spans") if sc.ROLLOUT_ID in each.attributes]
    assert [each.text(sc.ROLLOUT_OUTER_GROUP_ID) for each in found] == ["g", "g"]


@FEW
def test_a_process_without_calls_is_nothing_to_warn_of(recording: Recording, way: str):
    """Only a process that makes a call for the rollout is missed."""
    with rollout("agent"):
        begin(way, os.getpid)
    assert recording.trajectory.warnings == [NO_CALL.words]


@FEW
def test_a_process_outside_is_in_no_rollout(
    recording: Recording, clients: Clients, tmp_path: Path, way: str
):
    """Neither is one that is begun under `no_capture()`."""
    server = clients.serve("hello")
    begin(way, work, server.base_url, str(tmp_path / "before"), ["before"], "openai")
    with rollout("agent"), no_capture():
        begin(way, work, server.base_url, str(tmp_path / "judge"), ["judge"], "openai")
    assert recording.trajectory.warnings == [NO_CALL.words]
    for name in ("before", "judge"):
        spans = saved(tmp_path / name)
        assert spans
        assert not [span for span in spans if span.name.startswith(("recording", "continue"))]


@pytest.mark.parametrize(
    ("way", "kind"), [("fork", "executor"), ("spawn", "executor"), ("spawn", "pool")]
)
def test_a_pool_tells_the_rollout_that_began_it(
    recording: Recording, clients: Clients, way: str, kind: str
):
    """Its workers serve many rollouts: their calls are in none, and the first one says so."""
    server = clients.serve("hello")
    context: Any = multiprocessing.get_context(way)
    with rollout("agent"):
        pool: Any = (
            ProcessPoolExecutor(1, mp_context=context) if kind == "executor" else context.Pool(1)
        )
        with pool:
            arguments = (server.base_url, ["one", "two"])
            if kind == "executor":
                pool.submit(pool_work, *arguments).result(120)
            else:
                pool.apply_async(pool_work, arguments).get(120)
    assert recording.trajectory.completions == []
    assert recording.trajectory.warnings == [
        "2 model calls were made outside any rollout while it ran, in a process of a pool: if "
        "they are its own, hand the rollout on to there (propagate, continue_rollout)",
        NO_CALL.words,
    ]


def end_late(base_url: str, path: str, gone: str) -> None:
    while not Path(gone).exists():
        pass
    work(base_url, path, ["late"])


@FEW
def test_a_process_that_outlives_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path, way: str
):
    """It records its part all the same, and nothing fails where the rollout's file is gone."""
    server = clients.serve("hello")
    path, gone = tmp_path / "spans", tmp_path / "gone"
    context: Any = multiprocessing.get_context(way)
    with rollout("agent"):
        process = context.Process(target=end_late, args=(server.base_url, str(path), str(gone)))
        process.start()
    gone.touch()
    process.join(120)
    assert process.exitcode == 0
    (rebuilt,) = reconstruct([*map(as_record, recording.spans), *saved(path)])
    assert [c.request_messages[-1]["content"] for c in rebuilt.completions] == ["late"]
