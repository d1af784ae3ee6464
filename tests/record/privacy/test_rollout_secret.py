"""A carrier continues a rollout only with the proof that the processes' secret makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace

import otel_rollout
from otel_rollout import ConfigurationError, continue_rollout, propagate, reconstruct, rollout
from otel_rollout.record.processes.carrier import SECRET_VARIABLE
from otel_rollout.record.state import process_state
from otel_rollout.spans import as_record
from otel_rollout.testing import ModelServer
from tests.kit.recording import Clients, Recording

Change = Callable[[dict[str, str]], dict[str, str]]


def ask(clients: Clients, server: ModelServer) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    clients.sync(server).chat.completions.create(model="m", messages=messages)


def use_secret(secret: str | None) -> None:
    """What `configure` does with it; None takes it away, which `configure` cannot."""
    process_state.use(replace(process_state.settings, rollout_secret=secret))


def handed_on(secret: str | None) -> dict[str, str]:
    """The headers of a rollout that runs in another process, which has this secret."""
    use_secret(secret)
    with rollout("agent", policy_version="v é") as trajectory:
        carrier = propagate()
        del process_state.rollouts[trajectory.id]
    return carrier


@pytest.mark.not_replayed("it ended before it was continued")
@pytest.mark.parametrize("environ", [False, True])
def test_with_the_same_secret_it_is_continued(
    environ: bool, recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """Given to `configure`, or in the environment."""
    if environ:
        monkeypatch.setenv(SECRET_VARIABLE, "s3cret")
    carrier = handed_on(None if environ else "s3cret")
    assert "s3cret" not in str(carrier)
    with continue_rollout(carrier) as part:
        ask(clients, clients.serve("hello"))
        assert propagate()["baggage"].count("rollout.proof") == 1
    assert {span.name for span in part.spans} == {
        "recording /chat/completions",
        "continue_rollout in another process",
    }
    (rebuilt,) = reconstruct([*map(as_record, recording.spans), *part.spans])
    assert [c.policy_version for c in rebuilt.completions] == ["v é"]


def other_trace(carrier: dict[str, str]) -> dict[str, str]:
    return {**carrier, "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def without_trace(carrier: dict[str, str]) -> dict[str, str]:
    return {"baggage": carrier["baggage"]}


def without_proof(carrier: dict[str, str]) -> dict[str, str]:
    baggage = carrier["baggage"].split(",")
    return {**carrier, "baggage": ",".join(b for b in baggage if "proof" not in b)}


def other_version(carrier: dict[str, str]) -> dict[str, str]:
    return {**carrier, "baggage": carrier["baggage"].replace("v+", "w+")}


def other_rollout(carrier: dict[str, str]) -> dict[str, str]:
    baggage = carrier["baggage"].split(",")
    other = [f"rollout.id={'c' * 32}" if "rollout.id=" in b else b for b in baggage]
    return {**carrier, "baggage": ",".join(other)}


@pytest.mark.parametrize(
    "change", [other_trace, without_trace, without_proof, other_version, other_rollout]
)
def test_a_changed_carrier_continues_nothing(
    change: Change, recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
):
    """It is logged, the work goes on, and its calls belong to no rollout."""
    carrier = handed_on("s3cret")
    assert change(carrier) != carrier
    with caplog.at_level(logging.WARNING), continue_rollout(change(carrier)) as part:
        ask(clients, clients.serve("hello"))
        assert "rollout" not in propagate().get("baggage", "")
    assert part.spans == []
    assert "is not continued" in caplog.text
    assert "s3cret" not in caplog.text
    (rebuilt,) = reconstruct(recording.spans)
    assert rebuilt.completions == []


@pytest.mark.parametrize("secret", [None, "other"])
def test_a_process_with_another_secret_is_no_part(
    secret: str | None, recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
):
    """Nor is one without a secret, for one that has one."""
    carrier = handed_on(secret)
    use_secret("s3cret")
    with continue_rollout(carrier) as part:
        pass
    assert part.spans == []
    assert caplog.text.count("is not continued") == 1


def test_a_header_cannot_name_a_rollout_of_this_very_process(
    recording: Recording, caplog: pytest.LogCaptureFixture
):
    """Somebody who learned an id does not get into the rollout that runs here."""
    use_secret("s3cret")
    with rollout("agent"):
        carrier = without_proof(propagate())
        token = otel_rollout.no_capture()
        with token, continue_rollout(carrier):
            assert otel_rollout.propagate().keys() <= {"traceparent", "baggage"}
            assert "rollout.id" not in propagate().get("baggage", "")
    assert "is not continued" in caplog.text


@pytest.mark.parametrize("secret", ["", b"bytes", 1])
def test_a_secret_is_a_text(secret: Any):
    """And an error does not show it."""
    with pytest.raises(ConfigurationError, match=r"rollout_secret=\.\.\.") as raised:
        otel_rollout.configure(rollout_secret=secret)
    assert "bytes'" not in str(raised.value).replace("<class 'bytes'", "")


def test_configure_sets_it_and_shutdown_forgets_it():
    otel_rollout.configure(rollout_secret="s3cret")
    otel_rollout.configure()
    with rollout("agent"):
        assert "rollout.proof" in propagate()["baggage"]
    otel_rollout.shutdown()
    assert process_state.settings.rollout_secret is None


def test_a_part_is_in_the_rollouts_trace_whatever_trace_is_current(recording: Recording):
    """A framework opens a root of its own; that a part is in another trace would look foreign."""
    tracer = recording.provider.get_tracer("framework")
    root = trace.set_span_in_context(trace.INVALID_SPAN)
    with rollout("agent") as trajectory, tracer.start_as_current_span("root", context=root) as span:
        assert f"{span.get_span_context().trace_id:032x}" != trajectory.trace_id
        assert trajectory.trace_id in propagate()["traceparent"]
