"""A rollout that nothing records is said once, with what to do; and only where it is news."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, TrajectorySpanProcessor, rollout
from otel_rollout.record import process_state
from tests.kit.programs import python


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    monkeypatch.setattr(process_state, "warned_unrecorded", False)


@rollout
def agent() -> str:
    return "done"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [sentence for sentence in found if "nothing records it" in sentence]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first rollout is named with what to call; the function runs as ever."""
    assert [agent() for _ in range(3)] == ["done"] * 3
    with rollout("other"):
        pass
    (sentence,) = said(caplog)
    assert "'agent'" in sentence
    assert "otel_rollout.configure()" in sentence


def test_a_provider_without_our_processor_is_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SDK that somebody else set up records no trajectories."""
    monkeypatch.setattr(process_state, "provider", TracerProvider())
    agent()
    assert len(said(caplog)) == 1


def test_a_provider_that_was_set_up_by_hand_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our processor on it, trajectories are recorded, and nothing is said."""
    provider, exporter = TracerProvider(), InMemoryTrajectoryExporter()
    provider.add_span_processor(TrajectorySpanProcessor(exporter))
    monkeypatch.setattr(process_state, "provider", provider)
    agent()
    assert len(exporter.get_finished_trajectories()) == 1
    assert said(caplog) == []


def test_who_wants_none_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK is switched off on purpose."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    agent()
    assert said(caplog) == []


def test_after_a_shutdown_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has configured and shut down knows."""
    otel_rollout.configure()
    otel_rollout.shutdown()
    agent()
    assert said(caplog) == []


@pytest.mark.slow
def test_a_program_sees_it_on_stderr() -> None:
    """Without any set-up of logging; stdout is the program's own."""
    code = "import contextlib, io, otel_rollout\n@otel_rollout.rollout\ndef agent(): print('ok')\n"
    code += "with contextlib.redirect_stderr(io.StringIO()) as err:\n  agent(); agent()\n"
    code += "print(err.getvalue().count('nothing records it'))"
    assert python("-c", code).split() == ["ok", "ok", "1"]
