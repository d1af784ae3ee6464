"""Side calls in rows: left out and listed with the reason, or included where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    ConfigurationError,
    JsonlTrajectoryExporter,
    TrajectoryGroup,
    gather_group,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.command import main
from otel_rollout.export import row_exporter, row_exporter_from_texts
from tests.kit.conversations import TOOLS, ask, system, user
from tests.kit.recording import Clients, Recording

TITLE = system("You are a title generator. You output ONLY a thread title. Nothing else.")


async def play(clients: Clients) -> TrajectoryGroup:
    """Two agents with tools, the first of which has a title made beside it."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def agent(beside: bool) -> None:
        if beside:
            await ask(client, TITLE, user("one"))
        await ask(client, user("one"), tools=TOOLS)
        record_reward(float(beside))

    return await gather_group([agent(True), agent(False)], group_id="g")


async def test_rows_leave_them_out_and_say_so(recording: Recording, clients: Clients):
    """A row for each agent; the share and the advantage of each are as without the side call."""
    group = await play(clients)
    rows = to_token_rows(group, credit="split")
    assert [(row["rows"], row["reward"], row["advantage"]) for row in rows] == [
        (1, 1.0, 0.5),
        (1, 0.0, -0.5),
    ]
    assert [row["history"] for row in rows] == [0, 0]
    assert [dropped.reason for dropped in rows.dropped] == [
        "it is a side call: it asks for a title"
    ]
    assert len(to_token_rows(group, on_side_call="keep")) == 3


@pytest.mark.parametrize("include", [False, True])
async def test_every_exporter_can_include_them(
    recording: Recording, clients: Clients, include: bool
):
    """The option is there for exporters that do not declare it, also as a text."""
    group = await play(clients)
    texts = {"include_side_calls": "true" if include else "false"}
    for exporter in (
        row_exporter("tokens", include_side_calls=include),
        row_exporter_from_texts("tokens", texts),
        row_exporter("tokens", include_side_calls=include, require_all_calls=True),
    ):
        assert len(list(exporter.rows(group))) == (3 if include else 2)
        dropped: Any = exporter
        assert len(list(dropped.dropped(group))) == (0 if include else 1)
    assert group[0].completions[0].side_call is not None, "the group itself stays"


def test_a_wrong_value_is_named():
    """Of a command line and of Python."""
    with pytest.raises(ConfigurationError, match=r"include_side_calls: expected .*, got 'perhaps'"):
        row_exporter_from_texts("tokens", {"include_side_calls": "perhaps"})
    with pytest.raises(ConfigurationError, match="option include_side_calls: expected"):
        row_exporter("tokens", include_side_calls=1)


async def test_the_command_counts_them(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The report of an export has the reason, and `show` the tree."""
    source, output = tmp_path / "t.jsonl", tmp_path / "rows.jsonl"
    exporter = JsonlTrajectoryExporter(source)
    exporter.export(list(await play(clients)))
    exporter.shutdown()
    assert main(["export", "--to", "tokens", str(source), "-o", str(output)]) == 0
    assert "it is a side call: it asks for a title" in capsys.readouterr().err
    assert len(list(map(json.loads, output.read_text().splitlines()))) == 2
    assert main(["show", str(source)]) == 0
    assert "(side call: it asks for a title)" in capsys.readouterr().out
