"""One rollout in several processes: handed on, continued, brought together again."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    Trajectory,
    TrajectorySealedError,
    continue_rollout,
    get_current_trajectory,
    get_history,
    no_capture,
    propagate,
    reconstruct,
    rollout,
)
from otel_rollout.spans.record import SpanRecord, as_record
from otel_rollout.testing import ModelServer
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CHILD = """
    import os, sys
    import openai
    from opentelemetry.sdk.trace import SpanProcessor
    import otel_rollout
    from otel_rollout import semconv as sc
    from otel_rollout.spans import as_record
    import pickle, threading

    class Keep(SpanProcessor):
        def __init__(self): self.records = []
        def on_end(self, span): self.records.append(as_record(span))

    keep = Keep()
    provider = otel_rollout.configure(instrumentor=None)
    provider.add_span_processor(keep)
    client = openai.OpenAI(base_url=sys.argv[1], api_key="k", max_retries=0)

    def ask(text):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(model="m", messages=messages)
"""


def ask(client: openai.OpenAI, text: str, before: list[Any] | None = None) -> Any:
    """One call that says `text` behind what came before."""
    messages = [*(before or []), {"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=messages)


def asked(trajectory: Trajectory) -> list[str]:
    """What each call of a trajectory asked last, in order of the names."""
    return sorted(c.request_messages[-1]["content"] for c in trajectory.completions)


def run_child(body: str, server: ModelServer, path: Path, env: dict[str, str]) -> list[SpanRecord]:
    """Run a program with `CHILD` before it; the spans that it recorded."""
    end = f"""
    otel_rollout.shutdown()
    with open({str(path)!r}, "wb") as file:
        pickle.dump(keep.records, file)
    """
    program = textwrap.dedent(CHILD) + textwrap.dedent(body) + textwrap.dedent(end)
    environ = {**os.environ, **env}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program, server.base_url],
        env=environ,
        check=True,
        timeout=120,
    )
    spans: list[SpanRecord] = pickle.loads(path.read_bytes())
    return spans


def records(recording: Recording) -> list[SpanRecord]:
    return [as_record(span) for span in recording.spans]


# --- what is handed on


def test_headers_and_environment(recording: Recording):
    """The names are the W3C's, in upper case for an environment; both say which rollout it is."""
    with rollout("agent", policy_version=7) as trajectory:
        headers, environ = propagate(), propagate(environ=True)
    assert headers.keys() == {"traceparent", "baggage"}
    assert environ == {key.upper(): value for key, value in headers.items()}
    assert trajectory.trace_id in headers["traceparent"]
    assert trajectory.span_id in headers["traceparent"]
    assert f"rollout.id={trajectory.id}" in headers["baggage"]


def test_the_users_own_baggage_is_handed_on_too(recording: Recording):
    """Baggage that the user has set stays, and the user's context gets none of ours."""
    token = otel_context.attach(baggage.set_baggage("tenant", "a b"))
    try:
        with rollout("agent"):
            headers = propagate()
            assert dict(baggage.get_all()) == {"tenant": "a b"}
    finally:
        otel_context.detach(token)
    assert "tenant=a+b" in headers["baggage"]
    assert "rollout.id=" in headers["baggage"]


def test_outside_a_rollout_there_is_no_rollout_to_hand_on(recording: Recording):
    """Without a rollout only the trace is handed on, and without a span nothing is."""
    assert propagate() == {}
    with recording.provider.get_tracer("mine").start_as_current_span("work"):
        assert propagate().keys() == {"traceparent"}


def test_what_is_not_captured_is_not_handed_on(recording: Recording):
    """Under `no_capture()` the other process gets the trace, not the rollout."""
    with rollout("agent") as trajectory, no_capture():
        assert propagate().keys() == {"traceparent"}
    assert trajectory.warnings == [NO_CALL.words]


@pytest.mark.not_replayed("it ended before it was continued elsewhere")
def test_what_is_not_to_be_trained_on_says_so_everywhere(recording: Recording, clients: Clients):
    """A part of such a rollout does not train either, though the rollout's own span be lost."""
    client = clients.sync(clients.serve("hello"))
    with rollout("judge", trainable=False):
        headers = propagate()
    with rollout("agent"):
        assert "trainable" not in propagate()["baggage"]
    with continue_rollout(headers) as part:
        ask(client, "elsewhere")
    (rebuilt,) = reconstruct(part.spans)
    assert [c.trainable for c in rebuilt.completions] == [False]
    assert reconstruct([*records(recording), *part.spans])[0].completions[0].trainable is False


# --- a process of its own


def test_a_child_process_continues_by_its_environment(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """A program started with the rollout's environment adds its calls to it, threads included."""
    server = clients.serve("hello")
    client = clients.sync(server)
    body = """
    ask("child")
    thread = threading.Thread(target=ask, args=("child thread",))
    thread.start(); thread.join()
    trajectory = otel_rollout.get_current_trajectory()
    trajectory.metrics["steps"] = 2
    trajectory.log("from the child")
    otel_rollout.record_reward(0.5, name="tests")
    """
    with rollout("agent", policy_version="v3") as trajectory:
        ask(client, "parent")
        spans = run_child(body, server, tmp_path / "spans", propagate(environ=True))
        trajectory.metrics["own"] = 1
    (rebuilt,) = reconstruct([*records(recording), *spans])
    assert asked(rebuilt) == ["child", "child thread", "parent"]
    assert rebuilt.warnings == []
    assert {c.policy_version for c in rebuilt.completions} == {"v3"}
    assert dict(rebuilt.metrics) == {"own": 1, "steps": 2}
    assert rebuilt.logs == ["from the child"]
    assert rebuilt.rewards == {"tests": 0.5}
    assert {span.trace_id for span in spans} == {trajectory.trace_id}
    assert reconstruct([*spans, *spans, *records(recording)]) == [rebuilt]


def test_the_parent_alone_says_that_something_is_missing(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """Without the child's spans the trajectory is not presented as whole."""
    server = clients.serve("hello")
    with rollout("agent"):
        ask(clients.sync(server), "parent")
        spans = run_child('ask("child")', server, tmp_path / "spans", propagate(environ=True))
    (warning,) = recording.trajectory.warnings
    assert "handed on to another process" in warning
    assert reconstruct(recording.spans) == [recording.trajectory]
    assert asked(recording.trajectory) == ["parent"]
    # One of the child's two spans is lost: its own span says how many there are.
    lost = [s for s in spans if not s.name.startswith("recording")]
    (rebuilt,) = reconstruct([*records(recording), *lost])
    assert rebuilt.warnings == ["1 of 2 model calls are missing: their spans did not come"]


@pytest.mark.not_replayed("another process recorded a part of it")
def test_spans_that_are_handed_back_complete_the_live_trajectory(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """With the child's spans added, the live trajectory equals the one rebuilt from all."""
    server = clients.serve("hello")
    client = clients.sync(server)
    with rollout("agent") as trajectory:
        first = ask(client, "parent")
        body = """
        reply = ask("child")
        otel_rollout.get_history(reply.id).append({"role": "user", "content": "more"})
        otel_rollout.record_reward(1, completion_id=reply.id)
        otel_rollout.get_current_trajectory().reward = 0.25
        otel_rollout.get_current_trajectory().metadata["host"] = "child"
        """
        spans = run_child(textwrap.dedent(body), server, tmp_path / "s", propagate(environ=True))
        trajectory.add_spans(spans)
        trajectory.add_spans(spans)
        assert asked(trajectory) == ["child", "parent"]
        assert get_history(first.id).completion_ids == [first.id]
        trajectory.reward = 0.75
    live = recording.trajectory
    assert live.warnings == []
    assert live.reward == 0.75
    assert live.metadata == {"host": "child"}
    assert [c.reward for c in live.completions] == [None, 1.0]
    assert live.histories[0].messages()[-1]["content"] == "more"
    assert reconstruct([*spans, *records(recording)]) == [live]
    with pytest.raises(TrajectorySealedError, match="add the spans while it runs"):
        live.add_spans(spans)


def test_spans_of_other_rollouts_are_passed_over(recording: Recording, clients: Clients):
    """`add_spans` takes only what is of this rollout, and not its own span."""
    client = clients.sync(clients.serve("hello"))
    with rollout("other"):
        ask(client, "other")
    with rollout("agent") as trajectory:
        ask(client, "mine")
        trajectory.add_spans(recording.spans)
    assert asked(recording.trajectories[1]) == ["mine"]
    assert recording.trajectories[1].warnings == []


def test_a_rollout_inside_the_child_is_a_child_of_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """`@rollout` in the other process is a trajectory of its own, with the outer one as parent."""
    server = clients.serve("hello")
    body = """
    with otel_rollout.rollout("inner"):
        ask("inner")
    ask("outer")
    """
    with rollout("agent") as trajectory:
        spans = run_child(body, server, tmp_path / "spans", propagate(environ=True))
    by_name = {t.name: t for t in reconstruct([*records(recording), *spans])}
    assert asked(by_name["inner"]) == ["inner"]
    assert by_name["inner"].parent_id == trajectory.id
    assert asked(by_name["agent"]) == ["outer"]
    assert by_name["agent"].warnings == by_name["inner"].warnings == []


def test_an_environment_without_a_rollout_changes_nothing(clients: Clients, tmp_path: Path):
    """`TRACEPARENT` alone, and baggage of others, do not make a process part of anything."""
    server = clients.serve("hello")
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    body = """
    ask("nobody's")
    with otel_rollout.rollout("own") as trajectory:
        ask("own")
    """
    environ = {"TRACEPARENT": parent, "BAGGAGE": "a=b"}
    (own,) = reconstruct(run_child(body, server, tmp_path / "spans", environ))
    assert (own.parent_id, own.warnings, asked(own)) == (None, [], ["own"])
    assert own.trace_id != "1" * 32


@pytest.mark.parametrize("bag", ["a=b", "rollout.id=nonsense", "rollout.id=", "%%%"])
def test_baggage_of_the_environment_without_a_rollout(
    bag: str, clients: Clients, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Whatever it has in it: the process that is configured with it is part of nothing."""
    monkeypatch.setenv("TRACEPARENT", f"00-{'1' * 32}-{'2' * 16}-01")
    monkeypatch.setenv("BAGGAGE", bag)
    recording: Recording = request.getfixturevalue("recording")
    client = clients.sync(clients.serve("hello"))
    ask(client, "nobody's")
    with rollout("own"):
        ask(client, "own")
    (own,) = reconstruct(recording.spans)
    assert (own.parent_id, own.warnings, asked(own)) == (None, [], ["own"])
    assert own.trace_id != "1" * 32


def test_a_process_that_is_killed_is_missed(recording: Recording, clients: Clients, tmp_path: Path):
    """Of a child that ends without its own span, the calls that did come are kept."""
    server = clients.serve("hello")
    with rollout("agent"):
        spans = run_child('ask("child")', server, tmp_path / "spans", propagate(environ=True))
    kept = [span for span in spans if span.name.startswith("recording")]
    (rebuilt,) = reconstruct([*records(recording), *kept])
    assert asked(rebuilt) == ["child"]


# --- a server


@pytest.fixture
def agent_server(clients: Clients) -> Iterator[str]:
    """A server that answers by asking the model, in the rollout that its request brings."""
    client = clients.sync(clients.serve("hello"))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            with continue_rollout(self.headers) as part:
                ask(client, self.path)
            body = pickle.dumps(part.spans)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    # A server's threads know nothing of any rollout.
    token = otel_context.attach(otel_context.Context())
    thread.start()
    otel_context.detach(token)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        body: bytes = answer.read()
        return body


def test_a_server_in_the_same_process_adds_to_the_rollout_that_runs(
    recording: Recording, agent_server: str
):
    """Where the rollout runs in the server's own process, its calls are in the live trajectory."""
    with rollout("agent"):
        assert pickle.loads(get(agent_server + "/a", propagate())) == []
        get(agent_server + "/b", propagate())
        get(agent_server + "/nobody", {})
    assert asked(recording.trajectory) == ["/a", "/b"]
    assert recording.trajectory.warnings == [
        "1 model call was made outside any rollout while it ran, in thread 'Thread-* "
        "(process_request_thread)': if they are its own, hand the rollout on to there (propagate, "
        "continue_rollout)"
    ]
    assert reconstruct(recording.spans) == [recording.trajectory]


def test_rollouts_at_once_through_one_server(recording: Recording, agent_server: str):
    """Each request's calls belong to the rollout whose headers it brought."""

    def agent(name: str) -> None:
        with rollout(name):
            for turn in range(3):
                get(f"{agent_server}/{name}-{turn}", propagate())

    threads = [threading.Thread(target=agent, args=(f"agent{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recording.trajectories) == 8
    for trajectory in recording.trajectories:
        assert asked(trajectory) == [f"/{trajectory.name}-{turn}" for turn in range(3)]
        assert trajectory.warnings == []


def test_a_rollout_all_of_whose_calls_are_made_elsewhere(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """A rollout that makes no call itself has those of the process that works for it."""
    server = clients.serve("hello")
    body = """
    carrier = {"Traceparent": os.environ["MY_PARENT"], "BAGGAGE": os.environ["MY_BAGGAGE"]}
    ask("before")
    for turn in range(2):
        with otel_rollout.continue_rollout(carrier) as part:
            ask(f"turn {turn}")
        assert [r.name for r in part.spans] == [
            "recording /chat/completions", "continue_rollout in another process"
        ]
    ask("after")
    """
    with rollout("agent"):
        headers = propagate()
        environ = {"MY_PARENT": headers["traceparent"], "MY_BAGGAGE": headers["baggage"]}
        spans = run_child(body, server, tmp_path / "spans", environ)
    (rebuilt,) = reconstruct([*records(recording), *spans])
    assert asked(rebuilt) == ["turn 0", "turn 1"]
    assert rebuilt.warnings == []
    assert rebuilt.name == "agent"


def test_a_conversation_that_goes_on_in_another_process(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """A turn in the parent, the next in the child, the third in the parent: one history."""
    server = clients.serve("hello")
    client = clients.sync(server)
    body = """
    import json
    messages = json.loads(os.environ["MESSAGES"])
    reply = client.chat.completions.create(model="m", messages=messages)
    print(reply.id)
    """
    user = {"role": "user", "content": "go on"}
    with rollout("agent"):
        first = ask(client, "begin")
        said = {"role": "assistant", "content": first.choices[0].message.content}
        turns: list[Any] = [{"role": "user", "content": "begin"}, said, user]
        environ = {**propagate(environ=True), "MESSAGES": json.dumps(turns)}
        spans = run_child(body, server, tmp_path / "spans", environ)
        ask(client, "end", [*turns, said])
    (rebuilt,) = reconstruct([*spans, *records(recording)])
    (history,) = rebuilt.histories
    assert len(history.completions) == 3
    assert [item.trainable for item in history.items] == [False, True] * 3


# --- forks


def _child_asks(base_url: str, text: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        ask(client, text)


def _pool_task(base_url: str, text: str, carrier: dict[str, str] | None) -> list[SpanRecord]:
    if carrier is None:
        _child_asks(base_url, text)
        return []
    with continue_rollout(carrier) as part:
        _child_asks(base_url, text)
    return part.spans


@forking
def test_a_forked_process_continues_the_rollout(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """A child of `multiprocessing` records its calls as a part of the rollout it was forked in."""
    server = clients.serve("hello")
    path = tmp_path / "spans.pickle"

    def child() -> None:
        recording.span_exporter.clear()
        _child_asks(server.base_url, "child")
        get_current_trajectory().metrics["in child"] = 1

    # Its own finalizer, so that it runs behind ours.
    def save() -> None:
        path.write_bytes(pickle.dumps(records(recording)))

    def target() -> None:
        multiprocessing.util.Finalize(None, save, exitpriority=1)
        child()

    with rollout("agent"):
        ask(clients.sync(server), "parent")
        process = multiprocessing.get_context("fork").Process(target=target)
        process.start()
        process.join(60)
    assert process.exitcode == 0
    spans: list[SpanRecord] = pickle.loads(path.read_bytes())
    assert asked(recording.trajectory) == ["parent"]
    (rebuilt,) = reconstruct([*records(recording), *spans])
    assert asked(rebuilt) == ["child", "parent"]
    assert dict(rebuilt.metrics) == {"in child": 1}
    assert rebuilt.warnings == []


@forking
def test_a_function_that_forks_ends_once(recording: Recording, clients: Clients, tmp_path: Path):
    """The child's end of the function does not end the parent's rollout a second time."""
    server = clients.serve("hello")
    path = tmp_path / "spans.pickle"

    @rollout
    def agent() -> int:
        child = os.fork()
        _child_asks(server.base_url, "parent" if child else "child")
        return child

    pid = 0
    try:
        pid = agent()
    finally:
        if pid == 0:
            path.write_bytes(pickle.dumps(records(recording)))
            os._exit(0)
    os.waitpid(pid, 0)
    spans: list[SpanRecord] = pickle.loads(path.read_bytes())
    assert [
        n for n in sorted(s.name for s in spans) if n.startswith(("continue", "recording"))
    ] == [
        "continue_rollout in another process",
        "recording /chat/completions",
    ]
    assert not [span for span in spans if span.name.startswith("invoke_agent")]
    (rebuilt,) = reconstruct([*spans, *records(recording)])
    assert asked(rebuilt) == ["child", "parent"]
    assert rebuilt.output == pid
    assert rebuilt.warnings == []


@pytest.mark.not_replayed("another process recorded a part of it")
@forking
def test_a_forked_pool_worker_is_in_no_rollout_by_itself(recording: Recording, clients: Clients):
    """A worker that was forked in one rollout and works for the next adds nothing to the first."""
    server = clients.serve("hello")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        with rollout("first") as first:
            pool.submit(_pool_task, server.base_url, "without", None).result(60)
            spans = pool.submit(_pool_task, server.base_url, "1", propagate()).result(60)
            first.add_spans(spans)
        with rollout("second") as second:
            spans = pool.submit(_pool_task, server.base_url, "2", propagate()).result(60)
            second.add_spans(spans)
    assert [asked(trajectory) for trajectory in recording.trajectories] == [["1"], ["2"]]
    (lost,) = recording.trajectories[0].warnings
    assert lost.startswith(
        "1 model call was made outside any rollout while it ran, in a process of"
    )
    assert recording.trajectories[1].warnings == []


def _spawned(base_url: str, carrier: dict[str, str]) -> list[SpanRecord]:
    otel_rollout.configure(instrumentor=None)
    return _pool_task(base_url, "spawned", carrier)


@pytest.mark.not_replayed("another process recorded a part of it")
def test_a_spawned_pool(recording: Recording, clients: Clients):
    """A spawned worker continues what each task brings, and hands its spans back."""
    server = clients.serve("hello")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, rollout("agent") as trajectory:
        spans = pool.submit(_spawned, server.base_url, propagate()).result(120)
        trajectory.add_spans(spans)
    assert asked(recording.trajectory) == ["spawned"]
    assert recording.trajectory.warnings == []
    assert reconstruct([*records(recording), *spans]) == [recording.trajectory]


# --- bad input


@pytest.mark.parametrize("carrier", ["traceparent", 7, ["traceparent"]])
def test_a_carrier_is_a_mapping(carrier: Any):
    """What is no mapping is refused with a sentence that says so."""
    with pytest.raises(ConfigurationError, match="expected headers or environment variables"):
        continue_rollout(carrier)


@pytest.mark.parametrize(
    "carrier",
    [
        {},
        {"traceparent": "nonsense", "baggage": "rollout.id=short"},
        {"baggage": "rollout.id=" + "g" * 32},
        {"baggage": b"rollout.id=00"},
        {"baggage": "," * 9000},
        {1: 2},
    ],
)
def test_headers_from_outside_never_break_a_server(
    carrier: Any, recording: Recording, clients: Clients
):
    """Headers without a rollout, or with nonsense, leave the code inside as it was."""
    client = clients.sync(clients.serve("hello"))
    before = trace.get_current_span()
    with continue_rollout(carrier) as part:
        ask(client, "nobody's")
    assert part.spans == []
    assert trace.get_current_span() is before
    assert recording.trajectories == ()


@pytest.mark.not_replayed("the rollout's own span is on no side")
def test_a_policy_version_that_is_nested_too_deep_is_ignored(
    recording: Recording, clients: Clients
):
    """The rollout is continued all the same: its calls are recorded, without a policy version."""
    client = clients.sync(clients.serve("hello"))
    deep = "%5B" * 1300
    with continue_rollout({"baggage": f"rollout.id={'b' * 32},rollout.policy_version={deep}"}) as p:
        ask(client, "there")
    (found,) = reconstruct(p.spans)
    assert [c.policy_version for c in found.completions] == [None]


def test_an_exception_passes_through(recording: Recording):
    """What the code inside raises is what comes out, and the part says so on its span."""
    with (
        pytest.raises(KeyError, match="mine"),
        continue_rollout({"baggage": "rollout.id=" + "ab" * 16}) as part,
    ):
        raise KeyError("mine")
    (record,) = part.spans
    assert record.status_error is not None
    assert recording.trajectories == ()  # a part is no trajectory of its own


# --- what the docs show


def test_the_docs_of_processes(recording: Recording):
    """Every block of docs/processes.md compiles; the first runs as it stands."""
    text = (Path(__file__).parents[3] / "docs" / "processes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        compile(block, "docs/processes.md", "exec")
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["headers"].keys() == {"traceparent", "baggage"}
