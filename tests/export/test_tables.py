"""Rows and overviews as tables: the same columns whatever is in them, and nothing is invented."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import (
    ConfigurationError,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    overviews,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.export import Rows
from otel_rollout.testing import Reply
from otel_rollout.view import Overview, Overviews
from tests.kit.recording import Clients, Recording


async def play(clients: Clients, rewards: list[float | None]) -> TrajectoryGroup:
    """A group of agents with a call each."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout(metadata={"from": "a\ud800"})
    async def agent(reward: float | None) -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        if reward is not None:
            record_reward(reward)

    return await gather_group([agent(r) for r in rewards], group_id="g", policy_version=3)


async def test_rows_are_an_arrow_table(recording: Recording, clients: Clients) -> None:
    """Each column has what the rows have; what is not known is null, an unknown log-prob NaN."""
    group = await play(clients, [1.0, None])
    rows = to_token_rows(group)
    rows[0]["logprobs"][-1] = math.nan
    table = rows.to_arrow()
    assert table.column_names == list(rows[0])
    assert table["input_ids"].to_pylist() == [row["input_ids"] for row in rows]
    assert table["input_ids"].type == pyarrow.list_(pyarrow.int32())
    assert table["reward"].to_pylist() == [1.0, None]
    assert table["policy_versions"].to_pylist() == [["3"], ["3"]]
    first = table["logprobs"][0].as_py()
    assert math.isnan(first[-1])
    assert first[:-1] == rows[0]["logprobs"][:-1]
    (span,) = table["spans"][0].as_py()
    assert [span["completion_id"], span["start"], span["end"]] == rows[0]["spans"][0]


def test_spans_of_versions_are_a_column(recording: Recording, clients: Clients) -> None:
    """Of a call that weights changed in; null where the server names no version of a token."""
    replies = Reply("ab", weight_versions=[("7", 2), ("8", 1)]), Reply("cd")
    client = clients.sync(clients.serve([*replies]))
    with rollout("x") as trajectory:
        for text in ("one", "two"):
            message: Any = {"role": "user", "content": text}
            client.chat.completions.create(model="m", messages=[message])
    rows = to_token_rows(trajectory)
    start = rows[0]["prompt_length"]
    spans = [["7", start, start + 2], ["8", start + 2, start + 3]]
    assert [row["policy_version_spans"] for row in rows] == [spans, None]
    named = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
    table = rows.to_arrow()
    assert table["policy_version_spans"].to_pylist() == [named, None]
    assert table["policy_versions"].to_pylist() == [["7", "8"], [None]]


@given(
    st.lists(
        st.tuples(
            st.none() | st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)),
            st.none() | st.lists(st.none() | st.floats()),
        ),
        min_size=1,
    )
)
def test_tokens_of_a_table_are_the_lists_of_the_rows(
    values: list[tuple[list[int | None] | None, list[float | None] | None]],
) -> None:
    """None is null and NaN stays NaN; ids of more than 32 bits are refused."""
    rows = Rows()
    for ids, logprobs in values:
        rows.append(dict.fromkeys(Rows._columns) | {"input_ids": ids, "logprobs": logprobs})
    table = rows.to_arrow()
    made = table["input_ids"].to_pylist(), table["logprobs"].to_pylist()
    assert repr([*zip(*made, strict=True)]) == repr(values)
    rows[-1]["input_ids"] = [0, 2**31]
    with pytest.raises(pyarrow.ArrowInvalid):
        rows.to_arrow()


async def test_rows_are_a_data_frame(recording: Recording, clients: Clients) -> None:
    """Numbers can be reckoned with, lists are the lists of the rows."""
    frame = to_token_rows(await play(clients, [1.0, 0.0, None])).to_pandas()
    assert frame["reward"].mean() == 0.5
    assert frame.groupby("group_id")["advantage"].sum().tolist() == [0.0]
    assert frame["sample_index"].tolist() == [0, 1, 2]
    assert isinstance(frame["input_ids"][0], list)
    assert frame["history"].dtype == "Int64"


async def test_overviews_are_a_table(recording: Recording, clients: Clients) -> None:
    """A line for each trajectory, with the fields of `Overview`; lone surrogates are escaped."""
    group = await play(clients, [1.0, None])
    found = overviews(group)
    assert isinstance(found, Overviews)
    assert list(found) == [Overview.of(trajectory) for trajectory in group]
    table = found.to_arrow()
    assert table["reward"].to_pylist() == [1.0, None]
    assert table["versions"].to_pylist() == [["3"], ["3"]]
    assert table["metadata"][0].as_py() == '{"from":"a\\ud800"}'
    frame = found.to_pandas()
    assert frame["turns"].tolist() == [1, 1]
    assert frame["metadata"][0] == {"from": "a\ud800"}


async def test_parquet_is_written_whole(
    recording: Recording, clients: Clients, tmp_path: Path
) -> None:
    """The file reads back as the table; one that cannot be written leaves what was there."""
    rows, path = to_token_rows(await play(clients, [1.0])), tmp_path / "rows.parquet"
    rows.to_parquet(path)
    assert pyarrow.parquet.read_table(path).equals(rows.to_arrow())
    before = path.read_bytes()
    rows[0]["input_ids"] = ["no id"]
    with pytest.raises(pyarrow.ArrowInvalid):
        rows.to_parquet(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize("table", [Rows(), Overviews()], ids=["rows", "overviews"])
def test_an_empty_table_has_all_columns(table: Any) -> None:
    """Arrow, pandas: the schema is that of a table with rows."""
    names = list(type(table)._columns)
    assert len(names) > 20
    assert table.to_arrow().column_names == list(table.to_pandas().columns) == names
    assert table.to_arrow().num_rows == len(table.to_pandas()) == 0
    assert pyarrow.null() not in table.to_arrow().schema.types


async def test_every_field_is_a_column(recording: Recording, clients: Clients) -> None:
    """No key of a row and no field of an overview is missing in the tables."""
    rows = to_token_rows(await play(clients, [1.0]))
    assert list(Rows._columns) == list(rows[0])
    assert list(Overviews._columns) == [field.name for field in dataclasses.fields(Overview)]
    pairs = zip(rows.to_arrow().schema, Rows().to_arrow().schema, strict=True)
    assert all(one == other for one, other in pairs)


@given(
    st.lists(
        st.tuples(
            st.none() | st.text(), st.none() | st.floats(allow_nan=False, allow_infinity=False)
        )
    )
)
def test_any_names_and_rewards_are_kept(values: list[tuple[str | None, float | None]]) -> None:
    """Whatever texts there are, each trajectory is a line in order, with its own reward."""
    made = overviews([Trajectory(task_id=name, reward=reward) for name, reward in values])
    table = made.to_arrow()
    assert table["reward"].to_pylist() == [reward for _, reward in values]
    assert [t is None for t in table["task_id"].to_pylist()] == [name is None for name, _ in values]
    assert isinstance(made.to_pandas(), pandas.DataFrame)


@pytest.mark.parametrize("method", ["to_pandas", "to_arrow", "to_parquet"])
def test_what_is_not_installed_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    for name in ("pandas", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"dist 'otel-rollout\[tables\]'"):
        getattr(Rows(), method)(*["x.parquet"][: method == "to_parquet"])
