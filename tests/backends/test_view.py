"""The page on what the real Jaeger gives back, and its link to the trace there."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
import requests

import otel_rollout
from otel_rollout import record_reward, rollout
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp import read_jaeger
from otel_rollout.testing import ModelServer
from otel_rollout.view.answers import Answers
from otel_rollout.view.index import Index

if TYPE_CHECKING:
    from tests.backends.programs import Jaeger

pytestmark = pytest.mark.backend


def wait_for(jaeger: Jaeger, trace_id: str, spans: int) -> None:
    """Wait until Jaeger has so many spans of the trace."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(SpanFormatError, OSError, LookupError):
            if len(list(read_jaeger(jaeger.api_url, trace_id))) >= spans:
                return
        time.sleep(0.1)


def test_the_link_leads_to_the_trace(
    jaeger: Jaeger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page reads a trace by its address in Jaeger, and links to that same address."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", jaeger.otlp_http)
    otel_rollout.configure(service_name="seen")
    with (
        ModelServer("It is 4.", token_ids=True, logprobs=True) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none-needed") as client,
        rollout("solve") as trajectory,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "2 + 2?"}])
        record_reward(1)
    assert otel_rollout.shutdown()
    wait_for(jaeger, trajectory.trace_id, spans=3)
    address = f"{jaeger.api_url}/trace/{trajectory.trace_id}"
    with Index([address], path=tmp_path / "index") as index:
        index.wait()
        answers = Answers(index, jaeger=f"{jaeger.api_url}/")
        detail = answers.trajectory({"id": trajectory.id[:8]})
    assert detail["overview"]["reward"] == 1.0
    assert [node["text"] for node in detail["nodes"]] == ["2 + 2?", "It is 4."]
    assert detail["trace"] == address
    shown = requests.get(address, timeout=30)
    assert shown.status_code == 200
    data = requests.get(address.replace("/trace/", "/api/traces/"), timeout=30).json()["data"]
    assert trajectory.id in str(data[0]["spans"])
