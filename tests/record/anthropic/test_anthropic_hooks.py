"""The hooks into the Anthropic client: put in at any time, taken out for good."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

import otel_rollout
from otel_rollout.record import process_state
from tests.kit.comparing import exchange_spans
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import Claude, ask

pytestmark = pytest.mark.slow


def run_python(code: str) -> str:
    """The output of a program, in an interpreter of its own."""
    program = textwrap.dedent(code)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


CALL = """
    import json, sys
    import otel_rollout
    from otel_rollout import InMemoryTrajectoryExporter, rollout
    from otel_rollout.testing import ModelServer

    def call():
        import anthropic
        with ModelServer("Paris") as server:
            url = server.base_url.removesuffix("/v1")
            with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
                with rollout("agent"):
                    client.messages.create(
                        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
                    )

    exporter = InMemoryTrajectoryExporter()
"""


@pytest.mark.parametrize("first", ["", "import anthropic", "import anthropic._base_client"])
def test_the_library_may_be_imported_before_or_after(first: str) -> None:
    """The library does not import anthropic; it is hooked whenever the user imports it."""
    code = f"""
    {first}
    {CALL}
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
    print("anthropic" in sys.modules)
    call()
    (trajectory,) = exporter.get_finished_trajectories()
    print([completion.status for completion in trajectory.completions])
    """
    assert run_python(code).split("\n")[:2] == [str(bool(first)), "['complete']"]


def test_what_is_taken_out_stays_out() -> None:
    """After shutdown an import hooks nothing; after a second `configure` it is hooked once."""
    code = f"""
    {CALL}
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
    otel_rollout.shutdown()
    import anthropic._base_client as base
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
    from otel_rollout.record import capture
    capture.instrument()
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    print(hasattr(base.SyncAPIClient.request.__wrapped__, "__wrapped__"))
    call()
    otel_rollout.shutdown()
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    print([len(t.completions) for t in exporter.get_finished_trajectories()])
    """
    assert run_python(code).split() == ["False", "True", "False", "False", "[1]"]


def test_a_version_without_the_methods_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is optional: what cannot be hooked is said in the log, and nothing is raised."""
    import anthropic._base_client as base

    monkeypatch.delattr(base.BaseClient, "_build_request")
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        otel_rollout.configure()
    assert "anthropic" in caplog.text
    assert "BaseClient._build_request" in caplog.text
    assert not hasattr(base.SyncAPIClient.request, "__wrapped__")
    assert process_state.hooks.installed


async def test_outside_a_rollout_nothing_is_done(recording: Recording, clients: Clients) -> None:
    """A call outside any rollout leaves no exchange span."""
    caller = Claude(True)
    await caller.run(ask(caller.client(clients, clients.serve("Paris"))))
    assert exchange_spans(recording) == []
