"""Documents that every reader of ATIF takes, and that come back equal."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atif import Trajectory as Atif
from hypothesis import given, settings
from otel_rollout_atif import AtifRows, from_atif, to_atif, to_rollout_details

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ExportError,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    get_current_trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.command.cli import main
from otel_rollout.export import row_exporter
from otel_rollout.testing import Reply, ToolCall
from tests.kit.documents import ATIF
from tests.kit.random_agents import Rollout, all_spans, plays, trained

if sys.version_info >= (3, 12):  # Harbor's own
    from harbor.utils.trajectory_validator import TrajectoryValidator
else:
    TrajectoryValidator = None

pytestmark = pytest.mark.trainer
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJg"
    "gg=="
)
README = (Path(__file__).parents[1] / "README.md").read_text()


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """The document as JSON gives it, which both models take, with everything in it."""
    document = json.loads(json.dumps(document, allow_nan=False))
    assert Atif.model_validate(document).model_dump(exclude_none=True) == document
    if TrajectoryValidator is not None:
        validator = TrajectoryValidator()
        assert validator.validate(document), validator.errors
    return document


def written(trajectories: Iterable[Trajectory], output: Path, *options: str) -> int:
    """The exit status of the command that writes documents of trajectories."""
    source = output.with_name("source.jsonl")
    source.unlink(missing_ok=True)
    JsonlTrajectoryExporter(source).export(list(trajectories))
    arguments = ["export", "--to", "atif", str(source), "-o", str(output), "--force"]
    return main([*arguments, *(part for each in options for part in ("--option", each))])


def in_file(path: Path) -> dict[str, Any]:
    """A document in a file, whose media are there."""
    if TrajectoryValidator is not None:
        validator = TrajectoryValidator()
        assert validator.validate(path), validator.errors
    return checked(json.loads(path.read_text()))


def nested(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document, and all inside it."""
    yield document
    for inner in document.get("subagent_trajectories", ()):
        yield from nested(inner)


async def broken(client: Any) -> None:
    """It fails behind its first call."""
    await agents.ask(client, [agents.user("one")])
    raise ValueError("no tool of this name")


async def silent(client: Any) -> None:
    """It asks nothing of a model."""


async def hard(clients: Clients) -> Trajectory:
    """Whatever JSON and ATIF do not like."""
    replies = [
        Reply(tool_calls=[ToolCall("f", '{"a": NaN}'), ToolCall("f", "[1]"), ToolCall("f", "{")]),
        Reply("\ud83d and é", extra={"score": math.nan, "big": 2**70}),
    ]
    client = clients.asynchronous(clients.serve(replies))

    @rollout(task_id="t")
    async def agent() -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
        far = {"type": "image_url", "image_url": {"url": "https://a.b/c.jpg?d"}}
        odd = {"type": "image_url", "image_url": {"url": "https://a.b/c"}}
        text = {"type": "text", "text": "what is this?"}
        messages: list[Any] = [{"role": "user", "content": [text, image, sound, far, odd]}]
        message = await agents.ask(client, messages, tools=agents.TOOLS)
        for call in [*message["tool_calls"], {"id": "of nobody"}]:
            result = {"role": "tool", "tool_call_id": call["id"], "content": [text, image]}
            messages.append(result)
        await agents.ask(client, messages, tools=agents.TOOLS)
        trajectory = get_current_trajectory()
        trajectory.metadata["mixed"] = [1, "a", math.inf, {"b": None}]
        trajectory.rewards["style"] = 0.1
        record_reward(1 / 3)
        return {"answer": None}

    return await gather_trajectory(agent())


async def everything(clients: Clients) -> list[Trajectory]:
    """Trajectories of all kinds that have a step."""
    played = [await agents.play(clients, agent, 0.5) for agent in agents.AGENTS]
    played.append(await agents.play(clients, broken, None, raise_errors=False))
    played.append(await agents.play(clients, agents.titled))
    played.append(await hard(clients))
    return played


async def test_documents_come_back_equal(recording: Recording, clients: Clients):
    """Whatever is in them, and both models take them, with every option."""
    for trajectory in await everything(clients):
        assert from_atif(checked(to_atif(trajectory))) == [trajectory]
        assert from_atif(checked(to_atif(trajectory, prompt_token_ids=True))) == [trajectory]


@settings(max_examples=40, deadline=None)
@given(plays(repeats=True))
def test_any_tree_comes_back_equal(rollouts: list[Rollout]):
    """Forks, edits, retries, compaction, failed calls, rollouts in each other; each trains once."""
    found = [each for each in reconstruct(all_spans(rollouts)) if each.histories]
    for trajectory in found:
        rest = [each for each in found if each is not trajectory]
        document = checked(to_atif(trajectory, children=rest))
        inside = [each for each in rest if each.parent_id == trajectory.id]
        assert from_atif(document) == [trajectory, *inside]
        learned = Counter(
            (step["extra"]["otel_rollout"]["completion_id"], facts.get("choice_index", 0))
            for each in nested(document)
            for step in each["steps"]
            if (facts := step.get("extra", {}).get("otel_rollout", {})).get("trainable")
        )
        of_inside = Counter[tuple[str, int]]()
        for each in inside:
            of_inside += trained(each)
        assert learned == trained(trajectory) + of_inside


async def test_steps(recording: Recording, clients: Clients):
    """Who said what, with which tools; ids and log-probabilities are those that were sampled."""
    trajectory = await agents.play(clients, agents.tool_loop)
    document = checked(to_atif(trajectory))
    asked, called, said = document["steps"]
    assert (asked["source"], asked["message"]) == ("user", "tool: add")
    (call,) = called["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("add", {"a": 1, "b": "Zürich"})
    assert called["observation"]["results"] == [
        {"source_call_id": call["tool_call_id"], "content": "3"}
    ]
    assert document["agent"]["tool_definitions"] == agents.TOOLS
    assert document["agent"]["name"] == "tool_loop"
    for step, completion in zip((called, said), trajectory.completions, strict=True):
        assert step["metrics"]["completion_token_ids"] == completion.token_ids
        assert step["metrics"]["logprobs"] == completion.logprobs
        assert "prompt_token_ids" not in step["metrics"]
        assert step["llm_call_count"] == 1
    assert document["extra"]["otel_rollout"]["reward"] == 1.0
    whole = to_atif(trajectory, prompt_token_ids=True)["steps"][2]["metrics"]
    assert whole["prompt_token_ids"] == trajectory.completions[1].prompt_token_ids


async def test_without_our_record_it_is_anothers(recording: Recording, clients: Clients):
    """Each reply trains once all the same, and rows of tokens are the same."""
    for agent in (agents.chain, agents.tool_loop, agents.interleaved, agents.fork):
        trajectory = await agents.play(clients, agent)
        document = to_atif(trajectory, prompt_token_ids=True)
        del document["extra"]
        for inner in document.get("subagent_trajectories", ()):
            del inner["extra"]
        read = from_atif(document)
        rows = [row for each in read for row in each.token_sequences()]
        own = trajectory.token_sequences()
        assert sum(map(sum, (row.loss_mask for row in rows))) == sum(
            map(sum, (row.loss_mask for row in own))
        )
        if agent not in (agents.interleaved, agents.fork):  # there main is not the first row
            assert rows[0].token_ids == own[0].token_ids
            assert rows[0].logprobs == own[0].logprobs


async def test_forks_are_embedded(recording: Recording, clients: Clients):
    """What an earlier conversation has is copied context there, without metrics."""
    document = checked(to_atif(await agents.play(clients, agents.fork)))
    (fork,) = document["subagent_trajectories"]
    copied = [step.get("is_copied_context", False) for step in fork["steps"]]
    assert copied == [True, True, False, False]
    assert ["metrics" in step for step in fork["steps"]] == [False, False, False, True]
    assert fork["extra"] == {"otel_rollout": {"history": 1}}
    titled = checked(to_atif(await agents.play(clients, agents.titled)))
    (side,) = titled["subagent_trajectories"]
    assert "title" in side["extra"]["otel_rollout"]["side_call"]


async def test_what_has_no_place_is_beside(recording: Recording, clients: Clients):
    """Arguments that are no object, results of no call, unknown log-probabilities, lost calls."""
    document = checked(to_atif(await hard(clients)))
    first, called, *_ = document["steps"]
    assert [call["arguments"] for call in called["tool_calls"]] == [{}, {}, {}]
    raw = [call["extra"]["otel_rollout"]["arguments"] for call in called["tool_calls"]]
    assert raw == ['{"a": NaN}', "[1]", "{"]
    assert "source_call_id" not in called["observation"]["results"][-1]
    assert called["observation"]["results"][-1]["extra"]["otel_rollout"] == {
        "tool_call_id": "of nobody"
    }
    kinds = [part["type"] for part in first["message"]]
    assert kinds == ["text", "image", "audio", "image", "text"]
    assert first["message"][4]["text"] == "<image_url> https://a.b/c"
    failing = to_atif(await agents.play(clients, agents.failing_calls))
    assert len(failing["extra"]["otel_rollout"]["calls_without_reply"]) == 1
    data = (await agents.play(clients, agents.chain)).to_dict()
    data["exchanges"][0]["response"]["choices"][0]["logprobs"]["content"][0]["logprob"] = None
    step = checked(to_atif(Trajectory.from_dict(data)))["steps"][2]
    assert "logprobs" not in step["metrics"]
    assert step["extra"]["otel_rollout"]["unknown_logprobs"] == 1


async def test_rollout_details(recording: Recording, clients: Clients):
    """As Harbor's agents hand them on: each turn that trains once, the main conversation first."""
    trajectory = await agents.play(clients, agents.fork)
    main_detail, fork = to_rollout_details(trajectory)
    first, right, left = trajectory.completions
    assert main_detail["prompt_token_ids"] == [first.prompt_token_ids, left.prompt_token_ids]
    assert main_detail["completion_token_ids"] == [first.token_ids, left.token_ids]
    assert main_detail["logprobs"] == [first.logprobs, left.logprobs]
    assert fork["extra"] == {"completion_id": [right.id]}
    document = checked(to_atif(trajectory, rollout_details=True))
    assert document["extra"]["otel_rollout"]["rollout_details"] == [main_detail, fork]
    client = clients.asynchronous(clients.serve("hello", token_ids=False))

    @rollout
    async def without() -> None:
        await agents.ask(client, [agents.user("hi")])

    with pytest.raises(ExportError, match="no token ids of its prompt, which RolloutDetail needs"):
        to_rollout_details(await gather_trajectory(without()))


async def test_a_folder_of_documents(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A file for each, media beside; what has no step is reported; all of it is a source again."""
    played = await everything(clients)
    nothing = await agents.play(clients, silent, None)
    output = tmp_path / "documents"
    assert written([*played, nothing], output) == 0
    assert "has no step" in capsys.readouterr().err
    files = sorted(output.glob("*.json"))
    found = {each.id: each for file in files for each in from_atif(in_file(file))}
    assert found == {each.id: each for each in played}
    assert sorted(path.suffix for path in (output / "media").iterdir()) == [".png", ".wav"]
    assert main(["list", "--json", str(output)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(played) + 1
    data = played[0].to_dict() | {"id": "a/" + "b" * 300}
    long = [Trajectory.from_dict({**data, "group_id": group}) for group in ("g", "h")]
    assert written(long, tmp_path / "long") == 0  # two of one id, which is longer than a name
    assert len(list((tmp_path / "long").glob("*.json"))) == 2


async def test_lines_of_documents(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With rollouts inside others embedded in those; without them, they stand alone."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout(name="inner")
    async def inner(depth: int) -> None:
        await agents.ask(client, [agents.user(f"inner {depth}")])
        if depth:
            await inner(depth - 1)

    @rollout(name="outer")
    async def outer() -> None:
        await agents.ask(client, [agents.user("outer")])
        await inner(1)
        await inner(0)

    await outer()
    trajectories = list(recording.trajectories)
    output = tmp_path / "documents.jsonl"
    assert written(trajectories, output) == 0
    (line,) = output.read_text().splitlines()
    document = checked(json.loads(line))
    depth = [
        len(each.get("subagent_trajectories", ())) for each in document["subagent_trajectories"]
    ]
    assert sorted(depth) == [0, 1]
    by_id = {each.id: each for each in trajectories}
    assert {each.id: each for each in from_atif(document)} == by_id
    (group,) = TrajectoryGroup.by_id(trajectories, children=True)
    (row,) = AtifRows().rows(group)
    assert {each.id: each for each in from_atif(row)} == by_id
    orphans = [each for each in trajectories if each.name == "inner"]
    assert written(orphans, output) == 0
    assert len(output.read_text().splitlines()) == 2
    again = tmp_path / "again.jsonl"
    assert main(["export", "--to", "atif", str(output), "-o", str(again)]) == 0
    assert sorted(again.read_text()) == sorted(output.read_text())
    capsys.readouterr()


async def test_other_apis(recording: Recording, clients: Clients):
    """The instructions of the Responses API are a step; the items of a reply are one."""
    client = clients.sync(clients.serve(Reply("hi", reasoning="hm")))
    with rollout("responses") as trajectory:
        client.responses.create(model="m", instructions="be brief", input="hello")
    document = checked(to_atif(trajectory))
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent"]
    assert document["steps"][0]["message"] == "be brief"
    assert document["steps"][2]["reasoning_content"] == "hm"
    assert from_atif(document) == [trajectory]


def test_anothers_document_goes_on():
    """What was read of another's document is a document again, and comes back equal."""
    (trajectory,) = from_atif(copy.deepcopy(ATIF))
    document = checked(to_atif(trajectory))
    assert document["agent"]["version"] == "2.0"
    assert [step["source"] for step in document["steps"]] == [
        "system",
        "user",
        "agent",
        "agent",
        "user",
    ]
    assert from_atif(document) == [trajectory]


async def test_a_damaged_record_is_an_error(recording: Recording, clients: Clients):
    """It is no document of another program's."""
    document = to_atif(await agents.play(clients, agents.chain))
    document["extra"]["otel_rollout"]["trajectory"] = document["extra"]["otel_rollout"][
        "trajectory"
    ][:-9]
    with pytest.raises(SpanFormatError, match="no JSON"):
        from_atif(document)


FACTS: dict[str, Callable[[Trajectory], Any]] = {
    "texts and reasoning": lambda t: [
        [m.get(name) for name in ("role", "content", "reasoning_content", "reasoning")]
        for m in t.messages()
    ],
    "tool calls whose arguments are an object": lambda t: [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for message in t.messages()
        for call in message.get("tool_calls") or ()
    ],
    "the text of arguments": lambda t: [m.get("tool_calls") for m in t.messages()],
    "tool definitions": lambda t: [c.tools for c in t.completions],
    "models": lambda t: [c.model for c in t.completions],
    "token ids of replies": lambda t: [c.token_ids for c in t.completions],
    "log-probabilities": lambda t: [c.logprobs for c in t.completions],
    "prompt token ids": lambda t: [c.prompt_token_ids for c in t.completions],
    "usage": lambda t: [c.usage for c in t.completions],
    "when each reply began": lambda t: [c.exchange.start_time_ns // 10**9 for c in t.completions],
    "top log-probabilities": lambda t: [c.choice.get("logprobs") for c in t.completions],
    "sampling parameters": lambda t: [c.exchange.params.get("temperature") for c in t.completions],
    "finish reasons": lambda t: [c.finish_reason for c in t.completions],
    "policy versions": lambda t: [c.policy_versions for c in t.completions],
    "rewards": lambda t: [t.reward, t.rewards],
    "group, sample, task": lambda t: [t.group_id, t.sample_index, t.task_id],
    "how it ended": lambda t: t.status,
    "metadata": lambda t: t.metadata,
}
"""What a trajectory has."""


async def test_the_table_of_losses(recording: Recording, clients: Clients):
    """The README's table is what other readers find in a document, which know no `extra`."""
    call = Reply(reasoning="hm", tool_calls=[ToolCall("f", '{"a": 1.50}')], finish_reason="length")
    client = clients.asynchronous(clients.serve([call, Reply("so")]))

    @rollout(group_id="g", sample_index=3, task_id="t", policy_version=7)
    async def agent() -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        more = {"logprobs": True, "top_logprobs": 2}
        asked = await agents.ask(client, messages, tools=agents.TOOLS, temperature=0.5, **more)
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "1.5"}
        await agents.ask(client, [*messages, result], tools=agents.TOOLS, temperature=0.5, **more)
        get_current_trajectory().rewards["style"] = 0.5
        record_reward(1.0)
        get_current_trajectory().metadata["seed"] = 4

    trajectory = await gather_trajectory(agent())
    rows = ["| | by default | with `prompt_token_ids=true` |", "|---|---|---|"]
    read = [
        from_atif(without_extra(to_atif(trajectory, prompt_token_ids=ids)))[0]
        for ids in (False, True)
    ]
    for name, fact in FACTS.items():
        assert fact(trajectory)
        kept = ["yes" if fact(other) == fact(trajectory) else "no" for other in read]
        rows.append(f"| {name} | {' | '.join(kept)} |")
    assert "\n".join(rows) in README, "\n".join(rows)


def without_extra(value: Any) -> Any:
    """The document as a reader has it that knows no `extra`."""
    if isinstance(value, dict):
        return {key: without_extra(each) for key, each in value.items() if key != "extra"}
    return [without_extra(each) for each in value] if isinstance(value, list) else value


def test_options_are_checked():
    """By their names and types."""
    assert isinstance(row_exporter("atif", rollout_details=True), AtifRows)
    with pytest.raises(Exception, match="prompt_token_ids"):
        row_exporter("atif", prompt_token_ids=3)


def test_the_readme_runs(clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    monkeypatch.chdir(tmp_path)
    names = agents.run_readme(Path(__file__).parents[1], clients, monkeypatch)
    assert len(names["details"]) == 1
