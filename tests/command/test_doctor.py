"""Each fault of a set-up is found, and a clean set-up has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai._base_client
import pytest
import requests
import wrapt
from opentelemetry import trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, TrajectorySpanProcessor
from otel_rollout.command.checks import Finding, check
from otel_rollout.command.cli import main
from otel_rollout.command.doctor import run_setup
from otel_rollout.errors import ConfigurationError
from otel_rollout.record import capture
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def found(findings: list[Finding], subject: str) -> Finding:
    """The only finding on this subject that is not fine."""
    (finding,) = (finding for finding in bad(findings) if finding.subject == subject)
    return finding


@pytest.fixture
def setup() -> tuple[InMemoryTrajectoryExporter, InMemorySpanExporter, TracerProvider]:
    """A set-up that has everything."""
    trajectories, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure(
        service_name="clean", exporters=[trajectories], span_exporters=[spans]
    )
    return trajectories, spans, provider


def test_a_clean_set_up_has_only_fine_findings(setup: Any):
    """Nothing is amiss, the self-test says so, and it leaves the exporters and provider alone."""
    trajectories, spans, provider = setup
    processors = provider._active_span_processor._span_processors
    findings = check()
    assert bad(findings) == []
    assert [f.subject for f in findings] == [
        "versions",
        "tracer provider",
        "TrajectorySpanProcessor",
        "span limits",
        "threads",
        "clients",
        "self-test",
    ]
    assert "trajectories go to InMemoryTrajectoryExporter" in str(findings[2])
    assert trajectories.get_finished_trajectories() == ()
    assert provider._active_span_processor._span_processors == processors
    provider.force_flush()
    assert "invoke_agent otel-rollout doctor" in [s.name for s in spans.get_finished_spans()]


def test_the_self_test_leaves_running_rollouts_alone(setup: Any):
    """A rollout that runs meanwhile is exported as ever, and the check is no part of it."""
    trajectories, _, _ = setup
    with otel_rollout.rollout("mine") as mine:
        assert bad(check()) == []
    assert trajectories.get_finished_trajectories() == (mine,)
    assert mine.completions == []
    assert mine.warnings == []


# --- clients


def test_a_library_that_is_not_hooked(setup: Any, monkeypatch: pytest.MonkeyPatch):
    """Something replaced the method that had the hook."""
    with monkeypatch.context() as replacing:
        replacing.setattr(requests.Session, "send", requests.Session.get)
        finding = found(check(), "clients")
    assert finding.level == "warning"
    assert "methods of requests.sessions were replaced" in finding.text


# --- provider


def test_nothing_is_set_up():
    """Without a provider nothing is recorded."""
    findings = check()
    assert found(findings, "tracer provider").level == "problem"
    assert "none is set" in found(findings, "tracer provider").text
    assert found(findings, "capture").level == "problem"
    assert "self-test" not in [f.subject for f in findings]


def test_a_provider_that_is_not_the_sdks():
    """One that takes no processors is named."""
    trace.set_tracer_provider(trace.NoOpTracerProvider())
    assert "NoOpTracerProvider is not the SDK's" in found(check(), "tracer provider").text


def test_a_provider_without_our_processor():
    """A provider that knows nothing of trajectories gives none."""
    trace.set_tracer_provider(TracerProvider())
    findings = check()
    assert found(findings, "TrajectorySpanProcessor").level == "problem"
    assert "problem" in [f.level for f in findings if f.subject == "self-test"]


def test_two_processors_of_ours(setup: Any):
    """Each of two would hand everything over."""
    setup[2].add_span_processor(TrajectorySpanProcessor())
    assert "there are 2" in found(check(), "TrajectorySpanProcessor").text


def test_the_sdk_is_disabled(monkeypatch: pytest.MonkeyPatch):
    """The variable that turns everything off is a problem."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    otel_rollout.configure()
    findings = check()
    assert found(findings, "OTEL_SDK_DISABLED").level == "problem"
    assert "problem" in [f.level for f in bad(findings) if f.subject == "self-test"]


class Redacting(SpanProcessor):
    """Replaces what models said."""

    def on_end(self, span: ReadableSpan) -> None:
        attributes: Any = span._attributes
        for key in list(attributes or {}):
            if "response.body" in key or "response.events" in key:
                attributes._immutable = False
                attributes[key] = "[redacted]"


def test_a_processor_in_front_changes_spans():
    """What is called before ours is named, and the self-test shows what it does."""
    provider = TracerProvider()
    provider.add_span_processor(Redacting())
    otel_rollout.configure(tracer_provider=provider)
    findings = check()
    assert "Redacting is called before ours" in found(findings, "order of processors").text
    assert "problem" in [f.level for f in findings if f.subject == "self-test"]


def test_a_processor_behind_is_fine(setup: Any):
    """What changes spans after us changes no trajectory."""
    setup[2].add_span_processor(Redacting())
    assert "order of processors" not in [f.subject for f in check()]


def test_processors_in_processors(setup: Any):
    """Ours is found inside of one that only calls others."""
    provider = TracerProvider()
    ours = TrajectorySpanProcessor()
    inner = type(provider._active_span_processor)()
    inner.add_span_processor(ours)
    provider.add_span_processor(inner)
    otel_rollout.shutdown()
    trace._TRACER_PROVIDER = provider
    assert "TrajectorySpanProcessor" not in [f.subject for f in bad(check())]


@pytest.mark.filterwarnings("ignore::otel_rollout.TruncationWarning")
@pytest.mark.parametrize(
    "limits", [SpanLimits(max_span_attribute_length=20), SpanLimits(max_span_attributes=8)]
)
def test_limits_that_cut(limits: SpanLimits):
    """A limit is found by looking, and by trying."""
    otel_rollout.configure(tracer_provider=TracerProvider(span_limits=limits))
    findings = check()
    assert found(findings, "span limits").level == "problem"
    assert "problem" in [f.level for f in findings if f.subject == "self-test"]


# --- what is hooked in


def test_threads_without_context(setup: Any):
    """Without its instrumentation a pool's calls are in no rollout."""
    ThreadingInstrumentor().uninstrument()
    try:
        assert found(check(), "threads").level == "problem"
    finally:
        ThreadingInstrumentor().instrument()


def test_capture_was_taken_out(setup: Any):
    """A client whose method was replaced after us is not captured: seen, and tried."""
    capture.uninstrument()
    findings = check()
    assert "SyncAPIClient.request" in found(findings, "capture").text
    assert "problem" in [f.level for f in findings if f.subject == "self-test"]


def test_what_wraps_capture_is_fine(setup: Any):
    """Another library's hook around ours is no fault."""
    owner = openai._base_client.SyncAPIClient
    wrapped = wrapt.FunctionWrapper(
        vars(owner)["request"], lambda call, _, args, kwargs: call(*args, **kwargs)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:  # until before capture is taken out
        monkeypatch.setattr(owner, "request", wrapped)
        assert bad(check()) == []


def test_a_self_test_that_fails_says_so(setup: Any):
    """Whatever happens in it is a finding, and the provider is left as it was."""
    processors = setup[2]._active_span_processor._span_processors
    owner = openai._base_client.SyncAPIClient

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    with pytest.MonkeyPatch.context() as monkeypatch:  # until before capture is taken out
        monkeypatch.setattr(owner, "request", broken)
        finding = found(check(), "self-test")
    assert finding.level == "problem"
    assert "no network here" in finding.text
    assert setup[2]._active_span_processor._span_processors == processors


# --- the user's set-up, and the command


SETUP = """
import otel_rollout
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

def configure():
    otel_rollout.configure(service_name="mine", span_exporters=[InMemorySpanExporter()])

async def later():
    configure()

def broken():
    raise ValueError("no configuration file")

if __name__ == "__main__":
    raise SystemExit("this would train")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    name = f"user_setup_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("target", ["{}:configure", "{}:later", "{}.py:configure"])
def test_the_users_set_up_is_checked(
    target: str, module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A function of a module or of a file sets this process up, without running the program."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend("")
    assert main(["doctor", target.format(module)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 problems, 0 warnings"
    assert all(len(line) <= 80 for line in lines)
    assert {line.split()[0] for line in lines[:-2] if not line.startswith(" ")} == {"ok"}


def test_a_set_up_that_fails(module: str, capsys: pytest.CaptureFixture[str]):
    """What the user's function raises is a problem, and the rest is checked."""
    assert main(["doctor", f"{module}:broken"]) == 1
    out = capsys.readouterr().out
    assert "broken raised ValueError: no configuration" in " ".join(out.split())
    assert "tracer provider" in out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_anywhere", "no module"),
        ("nowhere.py", "no file"),
        ("json:nothing", "no function"),
    ],
)
def test_a_set_up_that_is_not_there(target: str, message: str):
    """The error names what was asked for."""
    with pytest.raises(ConfigurationError, match=message):
        run_setup(target)


def test_the_command_without_a_set_up(capsys: pytest.CaptureFixture[str]):
    """It checks what `configure()` does here."""
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 problems, 0 warnings"


# --- the user's model server


def asked(reply: Any, **options: Any) -> tuple[Finding, list[Any]]:
    """What is found about a server with this reply, and the requests that it got."""
    with ModelServer(reply, **options) as server:
        findings = check(server=server.base_url)
        requests = [json.loads(wire.request or b"{}") for wire in server.exchanges]
    (finding,) = (finding for finding in findings if finding.subject == "model server")
    return finding, [each for each in requests if each.get("stream") or not each]


def test_a_model_server_that_gives_all(setup: Any):
    """A streamed call with tools is made, as an agent makes it, and exported nowhere."""
    call = Reply(tool_calls=[ToolCall("look", "{}")])
    finding, requests = asked(call, token_ids=False, logprobs=False)
    assert (finding.level, requests[-1]["model"]) == ("ok", "test-model")
    assert requests[-1]["stream"]
    assert requests[-1]["tools"]
    assert requests[-1]["return_token_ids"]
    assert requests[-1]["stream_options"] == {"include_usage": True}
    assert "sent the ids of all" in finding.text
    assert setup[0].get_finished_trajectories() == ()


def chunks(*choices: Any, usage: Any) -> Raw:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    parts: list[Any] = [{**head, "choices": [choice]} for choice in choices]
    parts[0]["prompt_token_ids"] = [1, 2]
    parts += [{**head, "choices": [], "usage": usage}] if usage else []
    lines = [f"data: {json.dumps(part)}\n\n".encode() for part in parts]
    return Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")


FIRST = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "token_ids": [3]}
LAST = {"index": 0, "delta": {}, "finish_reason": "stop"}
FAULTS: dict[str, tuple[Any, str]] = {
    "tokens that a parser lost": (
        chunks(FIRST, LAST, usage={"prompt_tokens": 2, "completion_tokens": 2}),
        "sampled 2 tokens and sent the ids of 1",
    ),
    "no count": (chunks(FIRST, LAST, usage=None), "has no count of its tokens"),
    "no ids": (
        chunks({**FIRST, "token_ids": None}, LAST, usage={"completion_tokens": 1}),
        "has no token ids",
    ),
    "refused": (Raw(400, b'{"error": {"message": "no tools here"}}'), "no tools here"),
    "malformed": (Raw(chunks=[b"data: {\n\n"], content_type="text/event-stream"), "raised"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_model_server_that_loses_something(setup: Any, name: str):
    """Each fault is a problem that says what is lost."""
    reply, text = FAULTS[name]
    finding, _ = asked(reply)
    assert finding.level == "problem"
    assert text in finding.text


def test_a_model_server_that_does_not_stream(setup: Any):
    """What was not streamed is not called so."""
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [3, 4]}
    whole: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{**choice, "message": {"role": "assistant", "content": "a"}}],
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    finding, _ = asked(Raw(body=json.dumps(whole).encode()))
    assert (finding.level, "a streamed call" in finding.text) == ("warning", False)
    assert "asked for a stream and got a whole reply" in finding.text
    lossy = {**whole, "usage": {**whole["usage"], "completion_tokens": 3}}
    finding, _ = asked(Raw(body=json.dumps(lossy).encode()))
    assert (finding.level, "a streamed call" in finding.text) == ("problem", False)


def test_a_model_server_that_refuses_fields(setup: Any):
    """The finding names the fields that the server refuses."""

    def picky(body: dict[str, Any]) -> Any:
        refusal = Raw(422, b'{"error": {"message": "Unexpected fields in the request"}}')
        return refusal if "return_token_ids" in body else Reply("a", tool_calls=[])

    finding, requests = asked(picky)
    assert finding.level == "problem"
    assert "refuses the fields that ask for token ids" in finding.text
    assert "return_token_ids" in finding.text
    assert "return_token_ids" not in requests[-1]


@pytest.mark.parametrize(
    ("mode", "level", "said"),
    [
        ("raw", "ok", "raw: from before temperature"),
        ("processed", "ok", "processed: of what was sampled from"),
        ("wrong", "problem", "wrong: off by up to 22 nats from raw ones"),
    ],
)
def test_log_probabilities_are_measured(setup: Any, mode: Any, level: str, said: str):
    """By the server itself, which is given what it sampled as a prompt; `/v1` may be left out."""
    with ModelServer("something that nobody expects", logprobs_mode=mode) as server:
        address = server.base_url.removesuffix("/v1")
        (finding,) = measured_at(address)
        asked = json.loads(server.exchanges[-1].request)
    assert (finding.level, finding.text[: len(said)]) == (level, said)
    assert (asked["prompt_logprobs"], asked["max_tokens"]) == (0, 1)
    assert setup[0].get_finished_trajectories() == ()


def measured_at(address: str) -> list[Finding]:
    findings = check(server=address)
    assert [f.level for f in findings if f.subject == "model server"] == ["ok"]
    return [finding for finding in findings if finding.subject == "log-probabilities"]


@pytest.mark.parametrize(
    "routes",
    [{"/v1/completions": Raw(404, b"{}")}, {"/v1/completions": Raw(200, b'{"choices": [{}]}')}],
)
def test_a_server_that_cannot_be_measured(setup: Any, routes: Any):
    """One without such an endpoint, or without log-probabilities of prompts, is no fault."""
    with ModelServer("a", routes=routes) as server:
        (finding,) = measured_at(server.base_url)
    assert (finding.level, finding.text[:14]) == ("ok", "not measurable")


def test_a_mode_that_was_configured_wrong():
    """What is measured holds against what the user said."""
    otel_rollout.configure(span_exporters=[InMemorySpanExporter()], logprobs_mode="processed")
    with ModelServer("something that nobody expects") as server:
        (finding,) = measured_at(server.base_url)
    assert finding.level == "problem"
    assert "configured with logprobs_mode='processed'" in finding.text


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:9404",
        "localhost",
        "",
        "ftp://h",
        "http://h:99999",
        "http://[::1",
    ],
)
def test_a_server_that_is_no_address(setup: Any, capsys: pytest.CaptureFixture[str], address: str):
    """The sentence of `gateway --upstream`, with an example."""
    assert main(["doctor", "--server", address]) == 1
    assert "expected the address of a model server, such as" in capsys.readouterr().err


def test_a_password_and_what_is_raised_are_not_printed_raw(
    setup: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An address has no password where it is printed; an exception steers no terminal."""
    assert main(["doctor", "--server", "http://me:secret@127.0.0.1:9/v1", "--model", "m"]) == 1
    said = capsys.readouterr().out
    assert "http://127.0.0.1:9/v1" in said
    assert "secret" not in said
    (tmp_path / "odd.py").write_text("raise ValueError('\\x1b[31m red')")
    assert main(["doctor", str(tmp_path / "odd.py")]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_model_server_that_is_not_there(setup: Any, capsys: pytest.CaptureFixture[str]):
    """It is a problem of the command too."""
    assert main(["doctor", "--server", "http://127.0.0.1:9/v1", "--model", "m"]) == 1
    assert "model server: a streamed call with tools to http://127.0.0.1:9/v1 raised" in (
        " ".join(capsys.readouterr().out.split())
    )
