"""What docs/frameworks.md shows, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import agents
import pytest

from otel_rollout import Trajectory
from otel_rollout.testing import ModelServer
from tests.frameworks.wire import TOOL_LOOP

pytestmark = pytest.mark.framework

TEXT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
BLOCKS = re.findall(r"## ([^\n]*)\n+```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_block_is_run() -> None:
    """Each framework of the table has its block below."""
    assert len(BLOCKS) == TEXT.count("```python") == 4


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_block(name: str, code: str) -> None:
    """It gives a trajectory with the tool loop in it, token ids and log-probabilities too."""
    values: dict[str, Any] = {"__name__": "docs"}
    with ModelServer(TOOL_LOOP, token_ids=False, logprobs=False) as server:
        try:
            exec(code.replace("http://localhost:8000/v1", server.base_url), values)
        finally:
            agents.set_tracing_disabled(False)
    trajectory: Trajectory = values["trajectory"]
    assert trajectory.warnings == []
    (history,) = trajectory.histories
    assert len(history.completions) == len(server.exchanges) == 2
    assert history.messages()[-2]["content"] == "5"
    assert history.messages()[-1]["content"] == "It is 5."
    for completion in history.completions:
        assert completion.trainable
        assert completion.token_ids
        assert completion.logprobs
