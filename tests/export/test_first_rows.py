"""`to_token_rows` as people meet it: given one trajectory, an exporter, or what gives no rows."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    ConfigurationError,
    EmptyRowsWarning,
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    overviews,
    rollout,
    to_token_rows,
)
from otel_rollout.testing import Raw
from tests.kit.recording import Clients, Recording


def ask(clients: Clients, reply: Any = "Paris", **options: Any) -> None:
    """A rollout with one call, which may fail."""
    client = clients.sync(clients.serve(reply))
    with rollout("agent", **options):
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        except Exception:  # the test is of what comes of it
            return


def test_a_single_trajectory_gives_its_rows(recording: Recording, clients: Clients) -> None:
    """One trajectory is what a list of it is."""
    ask(clients)
    one = recording.trajectory
    assert list(to_token_rows(one)) == list(to_token_rows([one])) != []
    assert list(overviews(one)) == list(overviews([one]))


def test_an_exporter_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """An exporter in memory could be iterated, for ever; the error names its methods."""
    exporter = InMemoryTrajectoryExporter()
    exporter.shutdown()  # where it is not refused, this test ends all the same
    for call in (to_token_rows, overviews):
        with pytest.raises(ConfigurationError, match=r"get_finished_trajectories\(\)"):
            call(exporter)
        with pytest.raises(ConfigurationError, match="got the exporter"):
            call(JsonlTrajectoryExporter(tmp_path / "t.jsonl"))  # type: ignore[arg-type]


async def later() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "got None"),
        ("trajectory", "got 'trajectory'"),
        ({"id": "x"}, r"Trajectory\.from_dict"),
        ([{"id": "x"}], r"Trajectory\.from_dict"),
        ([3], "got 3 among them"),
    ],
)
def test_what_is_no_trajectory_is_named(given: Any, said: str) -> None:
    """The error says what was got, what is expected, and the way where there is one."""
    with pytest.raises(ConfigurationError, match=said):
        to_token_rows(given)


def test_a_coroutine_is_to_be_awaited() -> None:
    """A gather function that was not awaited is told so."""
    coroutine: Any = later()
    with pytest.raises(ConfigurationError, match="await it first"):
        to_token_rows(coroutine)
    coroutine.close()


def test_a_batch_without_rows_warns_with_the_cause(recording: Recording, clients: Clients) -> None:
    """The warning counts the reasons; `dropped` has each of them."""
    for _ in range(3):
        ask(clients, Raw(429, b'{"error": {"message": "slow down", "code": "rate_limited"}}'))
    with pytest.warns(EmptyRowsWarning, match=r"the 3 trajectories gave no row.*3 x its call") as w:
        rows = to_token_rows(recording.trajectories)
    assert len(rows.dropped) == 3
    assert "rate_limited" in str(w[0].message)
    assert w[0].filename == __file__


def test_a_trajectory_without_calls_warns(recording: Recording) -> None:
    """There is nothing to drop, and still nothing to train on."""
    with rollout("agent"):
        pass
    with pytest.warns(EmptyRowsWarning, match="the trajectory gave no row"):
        to_token_rows(recording.trajectory)


def test_nothing_warns_where_a_row_came_or_nothing_was_given(
    recording: Recording, clients: Clients
) -> None:
    """One row is enough; no trajectories are no news, and neither are those masked on purpose."""
    ask(clients)
    ask(clients, Raw(500, b"{}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(to_token_rows(recording.trajectories)) == 1
        assert to_token_rows([]) == []
        broken = Trajectory(status="error", termination_reason="error")
        assert to_token_rows([broken], mask_reasons=["error"]).masked == [broken]
        with rollout("judge", trainable=False) as judge:
            pass
        assert to_token_rows(judge) == []
