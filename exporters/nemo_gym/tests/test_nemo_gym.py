"""Token entries that Gym's own classes take and build chains of, and that come back equal."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otel_rollout_nemo_gym import NemoGymRows, TrajectoryTokens, to_token_entries
from pydantic import BaseModel, ConfigDict, model_validator

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    reconstruct,
    rollout,
)
from otel_rollout.command.cli import main
from otel_rollout.export import Documents
from tests.kit.documents import ENTRY
from tests.kit.random_agents import Rollout, all_spans, plays

try:
    import nemo_gym.token_id_capture as gym
except ImportError:  # PyPI's has no token capture: the rules of its fields

    class TokenEntry(BaseModel):
        model_config = ConfigDict(extra="allow")

        schema_version: int = 1
        rollout_id: str
        model_call_id: str
        model: str = ""
        prompt_token_ids: list[int]
        generation_token_ids: list[int]
        generation_log_probs: list[float]
        routed_experts: Any | None = None
        output_items: list[dict[str, Any]] = []
        token_item_index: int | None = None
        created_at: float = 0.0

        @model_validator(mode="after")
        def _whole(self) -> TokenEntry:
            assert self.schema_version <= 1
            assert len(self.generation_token_ids) == len(self.generation_log_probs)
            assert self.token_item_index in (None, *range(len(self.output_items)))
            return self

    class TokenCaptureSnapshot(NamedTuple):
        rollout_id: str
        entries: tuple[TokenEntry, ...]
        incomplete: bool
        snapshot_id: str
        version: int

    gym = ModuleType("nemo_gym.token_id_capture")
    vars(gym).update(TokenEntry=TokenEntry, TokenCaptureSnapshot=TokenCaptureSnapshot)
    sys.modules |= {"nemo_gym": ModuleType("nemo_gym"), gym.__name__: gym}

pytestmark = pytest.mark.trainer
IS_REAL = hasattr(gym, "TokenCaptureStore")


def read(*lines: Any) -> list[Trajectory]:
    """The trajectories of entries."""
    known, errors = Documents(), list[SpanFormatError]()
    for line in lines:
        assert list(known.read(line)) == []
    found = list(known.rollouts(errors.append))
    assert errors == []
    assert [Trajectory.from_json(each.to_json()) for each in found] == found
    return found


def written(trajectory: Trajectory) -> dict[str, Any]:
    """The row of the exporter, which Gym's own class takes."""
    (row,) = NemoGymRows().rows(TrajectoryGroup([trajectory]))
    row = json.loads(json.dumps(row, allow_nan=False))
    for entry in row["entries"]:
        gym.TokenEntry.model_validate(entry)
    return dict(row)


def exported(trajectories: list[Trajectory], output: Path) -> int:
    """The exit status of the command."""
    source = output.with_name("source.jsonl")
    JsonlTrajectoryExporter(source).export(trajectories)
    return main(["export", "--to", "nemo_gym", str(source), "-o", str(output)])


async def test_entries_are_what_was_sampled(recording: Recording, clients: Clients):
    """Of every kind of agent: ids, log-probabilities and text of each reply."""
    for agent in agents.AGENTS:
        trajectory = await agents.play(clients, agent)
        made = to_token_entries(trajectory)
        said = [each for each in trajectory.completions if each.items]
        assert not made.incomplete
        for entry, completion in zip(made.entries, said, strict=True):
            assert entry["generation_token_ids"] == completion.token_ids
            assert entry["prompt_token_ids"] == completion.prompt_token_ids
            assert entry["generation_log_probs"] == completion.logprobs
            assert entry["output_items"] == [{"type": "message", **(completion.message or {})}]
        assert read(*written(trajectory)["entries"]) == [trajectory]
    chosen = to_token_entries(await agents.play(clients, agents.choices)).entries
    ids = [str(entry["model_call_id"]) for entry in chosen]
    assert ids[1] == f"{ids[0]}.1"
    assert len(set(ids)) == 3


async def test_what_has_no_ids_marks_its_rollout(recording: Recording, clients: Clients):
    """The other calls are there; side calls and failed ones mark nothing."""
    for options in ({"token_ids": False}, {"logprobs": False}):
        client = clients.asynchronous(clients.serve("hello", **options))

        @rollout
        async def without(client: Any = client) -> None:
            await agents.ask(client, [agents.user("hi")])

        made = to_token_entries(await gather_trajectory(without()))
        assert (made.entries, made.incomplete) == ([], True)
    for agent in (agents.titled, agents.failing_calls):
        made = to_token_entries(await agents.play(clients, agent))
        assert (len(made.entries), made.incomplete) == (2, False)
    data = (await agents.play(clients, agents.chain)).to_dict()
    del data["exchanges"][1]["response"]["choices"][0]["token_ids"]
    made = to_token_entries(Trajectory.from_dict(data))
    assert (len(made.entries), made.incomplete) == (1, True)


def with_tokens(trajectory: Trajectory, draw: Any) -> Trajectory:
    """The trajectory as if its server had sent token ids of most replies."""
    data = trajectory.to_dict()
    for number, exchange in enumerate(data["exchanges"]):
        for choice in (exchange["response"] or {}).get("choices", ()):
            if draw(st.integers(0, 3)):
                ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
                logprobs = [-0.5 - number for _ in ids]
                if draw(st.integers(0, 7)) == 0:
                    logprobs[0] = math.nan
                choice |= {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
    return Trajectory.from_dict(json.loads(json.dumps(data).replace("NaN", "null")))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_tree_comes_back_equal(data: st.DataObject):
    """What was written is equal when it is read; without our record the entries are the same."""
    rollouts: list[Rollout] = data.draw(plays())
    for trajectory in reconstruct(all_spans(rollouts)):
        trained = with_tokens(trajectory, data.draw)
        row = written(trained)
        said = [each for each in trained.completions if each.items]
        assert row["incomplete"] or len(row["entries"]) == len(said)
        assert len({entry["model_call_id"] for entry in row["entries"]}) == len(row["entries"])
        order = data.draw(st.permutations(row["entries"]))
        assert read(*order) == ([trained] if order else [])
        bare = [{k: v for k, v in e.items() if k != "otel_rollout"} for e in row["entries"]]
        for lossy in read(*bare):
            again = to_token_entries(lossy)
            by_id = {str(entry["model_call_id"]): entry for entry in again.entries}
            assert by_id == {entry["model_call_id"]: entry for entry in bare}
            assert not again.incomplete


def test_gyms_entries_are_trajectories():
    """They say what they lack, train by their ids, and are written as they were."""
    second = {**ENTRY, "model_call_id": "call-2", "prompt_token_ids": [1, 2, 3, 4, 5]}
    (trajectory,) = read(second, ENTRY)
    assert trajectory.id == "r.1-a_B"
    (row,) = trajectory.token_sequences()
    assert (row.token_ids, row.loss_mask) == ([1, 2, 3, 4, 5, 3, 4], [0, 0, 1, 1, 0, 1, 1])
    assert "the messages of the request" in trajectory.completions[0].lost
    assert to_token_entries(trajectory).entries == [ENTRY, second]


async def test_a_folder_for_gyms_store(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A file for each rollout, `incomplete` beside; it is a source again."""
    whole = await agents.play(clients, agents.chain)
    client = clients.asynchronous(clients.serve("hello", token_ids=False))

    @rollout
    async def without() -> None:
        await agents.ask(client, [agents.user("hi")])

    lacking = await gather_trajectory(without())
    output = tmp_path / "captures"
    assert exported([whole, lacking], output) == 0
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [f"{whole.id}.tokens.jsonl", f"{lacking.id}.tokens.state.json"]
    )
    if IS_REAL:
        store = gym.TokenCaptureStore(output)
        snapshots = [store.freeze_now(each.id) for each in (whole, lacking)]
        assert [len(each.entries) for each in snapshots] == [2, 0]
        assert [each.incomplete for each in snapshots] == [False, True]
        built = gym.trajectories_for_rollout(whole.id, [output])
        assert built is not None
        assert built["mask_sample"] is False
    capsys.readouterr()
    assert main(["list", "--json", str(output)]) == 0
    *lines, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert {line["id"] for line in lines} == {whole.id, lacking.id}
    again = tmp_path / "again.jsonl"
    assert main(["export", "--to", "tokens", str(output), "-o", str(again)]) == 0
    with pytest.raises(SystemExit):
        exported([whole, lacking], output)  # the folder is there
    (output / f"{whole.id}.tokens.state.json").write_text('{"incomplete": true}')
    first, *others = (output / f"{whole.id}.tokens.jsonl").read_text().splitlines()
    bare = {name: value for name, value in json.loads(first).items() if name != "otel_rollout"}
    (output / f"{whole.id}.tokens.jsonl").write_text("\n".join([json.dumps(bare), *others]))
    assert main(["check", "--require", "complete", str(output)]) == 1
    assert "NeMo Gym marked it as incomplete" in capsys.readouterr().out


async def test_ids_are_gyms(recording: Recording, clients: Clients, tmp_path: Path):
    """Other ids are refused, unless the metadata has one; two of one id are an error."""
    trajectory = await agents.play(clients, agents.chain)
    data = trajectory.to_dict() | {"id": "a/b", "metadata": {"gym": "t-1", "odd": 1}}
    odd = Trajectory.from_dict(data)
    with pytest.raises(ExportError, match=r"expected an id of letters.*got 'a/b'"):
        to_token_entries(odd)
    with pytest.raises(ExportError, match=r"metadata\['odd'\].*got 1"):
        to_token_entries(odd, metadata_id="odd")
    assert to_token_entries(odd, metadata_id="gym").rollout_id == "t-1"
    source, output = tmp_path / "source.jsonl", tmp_path / "captures"
    JsonlTrajectoryExporter(source).export([odd, Trajectory.from_dict({**data, "id": "c"})])
    options = ["--to", "nemo_gym", "--option", "metadata_id=gym"]
    assert main(["export", *options, str(source), "-o", str(output)]) == 1
    assert not output.exists()


async def test_a_token_source(recording: Recording, clients: Clients):
    """Live: frozen once, the same each time, retired by exactly what was frozen."""
    source = TrajectoryTokens(recording.exporter)
    if IS_REAL:
        assert isinstance(source, gym.TokenSource)
    trajectory = await agents.play(clients, agents.chain)
    frozen = await source.freeze(trajectory.id)
    assert frozen is await source.freeze(trajectory.id)
    assert [entry.generation_token_ids for entry in frozen.entries] == [
        completion.token_ids for completion in trajectory.completions
    ]
    assert not frozen.incomplete
    if IS_REAL:
        built = await gym.trajectories_from_source(trajectory.id, source)
        assert built is not None
        assert built["mask_sample"] is False
        assert built["metrics"]["generated_tokens_delivered"] > 0
    known = {"snapshot_id": frozen.snapshot_id, "version": frozen.version}
    assert not await source.drop(trajectory.id, snapshot_id="other", version=1)
    assert not await source.drop("other", **known)
    assert await source.drop(trajectory.id, **known)
    assert not await source.drop(trajectory.id, **known)
    with pytest.raises(RuntimeError, match="is retired"):
        await source.freeze(trajectory.id)
    unknown = await source.freeze("unknown")
    assert (unknown.entries, unknown.incomplete) == ((), True)
    await source.close()
    await source.close()
    read_again = TrajectoryTokens(iter([trajectory]))
    assert len((await read_again.freeze(trajectory.id)).entries) == 2


def test_a_source_without_gym_says_so(monkeypatch: pytest.MonkeyPatch):
    """At once, not in the middle of training."""
    monkeypatch.setitem(sys.modules, gym.__name__, None)
    with pytest.raises(ConfigurationError, match="expected a nemo-gym that has token_id_capture"):
        TrajectoryTokens([])


def test_the_readme_runs(clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    monkeypatch.chdir(tmp_path)
    names = agents.run_readme(Path(__file__).parents[1], clients, monkeypatch)
    assert len(names["capture"].entries) == 1
