"""One script, run by every stack: what is recorded is what the log of the server says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import rollout
from tests.frameworks.script import (
    ANSWER,
    REQUESTS,
    TOOLS,
    Script,
    judge,
    judge_conversations,
    judge_spans,
)
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
NAMES = sorted(path.stem for path in Path(__file__).parent.glob("stack_*.py"))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_stack(
    recording: Recording,
    clients: Clients,
    name: str,
    stream: bool,
) -> None:
    """Tools at once, one that fails, a refusal, helpers at once: all of it is in one trajectory."""
    stack: Any = importlib.import_module(f"tests.frameworks.{name}")
    if stream and not getattr(stack, "STREAMS", True):
        pytest.skip("it does not stream")
    script = getattr(stack, "SCRIPT", Script)(**getattr(stack, "OPTIONS", {}))
    server = clients.serve(script, token_ids=False, logprobs=False)
    async with rollout("agent"):
        answer = await stack.run(server.base_url, stream)
    assert ANSWER in answer
    assert len(server.exchanges) == getattr(stack, "REQUESTS", REQUESTS)
    rewrites = getattr(stack, "REWRITES", False)
    trajectory = judge(recording, server, rewrites=rewrites)
    judge_spans(recording, tools_run=getattr(stack, "TOOLS", TOOLS))
    if getattr(stack, "CHAT", True):
        judge_conversations(trajectory, server)
    assert len(trajectory.histories) == 3 or rewrites
