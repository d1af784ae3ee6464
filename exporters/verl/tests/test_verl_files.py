"""Parquet files, read back by verl's own datasets with a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from otel_rollout_verl import to_verl_prompts, to_verl_sft
from otel_rollout_verl.dataset import TrajectorySFTDataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from exporters.kit.agents import (
    TOOLS,
    ask,
    chain,
    choices,
    failing_calls,
    forgetful,
    fork,
    interleaved,
    play,
    play_group,
    titled,
    tool_loop,
    truncated,
    user,
)
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    get_current_trajectory,
    rollout,
)
from otel_rollout.export import row_exporter, row_exporter_from_texts
from otel_rollout.testing import Reply, ToolCall

pytestmark = pytest.mark.trainer

TEMPLATE = """{% if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>{{ call.function.name
}} {{ ARGUMENTS }}</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CAREFUL = (
    "call.function.arguments if call.function.arguments is string "
    "else call.function.arguments | tojson"
)


def tokenizer(arguments: str = CAREFUL) -> Any:
    """One token per byte, and ChatML's two."""
    letters = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token) for token in ("<|im_start|>", "<|im_end|>")])
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE.replace("ARGUMENTS", arguments),
    )


def export(path: Path, groups: list[TrajectoryGroup], **options: Any) -> Path:
    """The file that the exporter `verl` makes of these groups."""
    exporter = row_exporter("verl", **options)
    lines, output = path / "rows.jsonl", path / "data.parquet"
    with lines.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for group in groups for row in exporter.rows(group))
    exporter.finish(lines, output)
    assert not list(path.glob("*.unfinished"))
    return output


def sft(path: Path, kind: Any = MultiTurnSFTDataset, **options: Any) -> list[tuple[str, str]]:
    """What verl makes of the file: of each row its text, and the parts of it that train."""
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 4096})
    tokens = tokenizer(**options)
    rows = []
    for row in kind(str(path), tokens, config):
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        assert len(ids) == len(mask)
        trained = [i for i, trains in zip(ids, mask, strict=True) if trains]
        rows.append((tokens.decode(ids), tokens.decode(trained)))
    return rows


def of(*trajectories: Trajectory) -> list[TrajectoryGroup]:
    return [TrajectoryGroup([trajectory]) for trajectory in trajectories]


async def test_prompts_of_tasks(recording: Recording, clients: Clients, tmp_path: Path):
    """Each prompt of a task once, failed rollouts included; RLHFDataset gives it to the agent."""
    group = await play_group(clients, [1.0, 0.0, None])
    assert len(group.failures) == 1
    other = TrajectoryGroup([await play(clients, tool_loop)])
    path = export(tmp_path, [group, other], ability="talk", split="test", agent_name="mine")
    config = OmegaConf.create({"cache_dir": str(tmp_path), "max_prompt_length": 512})
    dataset: Any = RLHFDataset(str(path), tokenizer(), config)
    first, second = dataset
    assert first["raw_prompt"] == [{"role": "system", "content": "be brief"}, user("one")]
    assert second["raw_prompt"] == [user("tool: add")]
    assert [row["data_source"] for row in (first, second)] == ["chain", "tool_loop"]
    assert [row["index"] for row in (first, second)] == [0, 1]
    assert first["ability"] == "talk"
    assert first["agent_name"] == "mine"
    assert first["extra_info"]["split"] == "test"
    assert first["reward_model"] == {"style": "rule", "ground_truth": None}
    assert first["tools_kwargs"] == {}


async def test_side_calls_are_no_prompts(recording: Recording, clients: Clients):
    """The task is what the agent was asked first, not a title beside it; nor is that learned."""
    group = TrajectoryGroup([await play(clients, titled)])
    (row,) = to_verl_prompts(group)
    assert row["prompt"] == [user("one")]
    (row,) = to_verl_sft(group)
    assert row["messages"][0]["content"] == "one"


async def test_what_is_right_comes_from_metadata(recording: Recording, clients: Clients):
    """A text as it is, anything else as JSON; of rollouts inside rollouts no prompt is made."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def inner() -> None:
        await ask(client, [user("inner")])

    async def run(truth: Any) -> Trajectory:
        @rollout
        async def outer() -> None:
            get_current_trajectory().metadata["answer"] = truth
            await ask(client, [user(f"what is {truth}?")])
            await inner()

        return await gather_trajectory(outer())

    truths = ["42", 42, {"a": 1}]
    rows = [
        row
        for truth in truths
        for row in to_verl_prompts(
            TrajectoryGroup([await run(truth)]), ground_truth="answer", data_source="sums"
        )
    ]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["42", "42", '{"a":1}']
    assert {row["data_source"] for row in rows} == {"sums"}
    nested = [t for t in recording.trajectories if t.name == "inner"]
    assert len(nested) == 3
    assert to_verl_prompts(TrajectoryGroup(nested)) == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "image_url",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "one text",
        ),
        ({"role": "user", "name": "Ada", "content": "hi"}, "'name'"),
        ({"role": "tool", "tool_call_id": "c", "content": "hi"}, "'tool_call_id'"),
    ],
)
async def test_prompts_that_verl_cannot_hold(
    recording: Recording, clients: Clients, message: Any, why: str
):
    """The error names the trajectory and the message."""

    async def agent(client: openai.AsyncOpenAI) -> None:
        await ask(client, [user("first"), message])

    trajectory = await play(clients, agent)
    with pytest.raises(ExportError, match=f"{trajectory.id}.*message 1.*{why}"):
        to_verl_prompts(TrajectoryGroup([trajectory]))


@pytest.mark.parametrize("agent", [chain, interleaved, choices, failing_calls])
@pytest.mark.parametrize("columns", ["arrow", "json"])
async def test_every_reply_of_a_conversation_trains(
    recording: Recording, clients: Clients, tmp_path: Path, agent: Any, columns: str
):
    """Each that was sampled once, with its end of turn, and nothing else."""
    trajectory = await play(clients, agent)
    path = export(tmp_path, of(trajectory), format="sft", columns=columns)
    kind = MultiTurnSFTDataset if columns == "arrow" else TrajectorySFTDataset
    rows = sft(path, kind)
    assert len(rows) == len(trajectory.histories)
    replies = [
        [item.message["content"] for item in history.items if item.completion]
        for history in trajectory.histories
    ]
    assert [trained for _, trained in rows] == [
        "".join(f"{reply}<|im_end|>\n" for reply in said) for said in replies
    ]
    assert sum(map(len, replies)) == sum(c.trainable for c in trajectory.completions)
    system = "<|im_start|>system\nbe brief<|im_end|>\n" if agent is chain else ""
    assert rows[0][0].startswith(f"{system}<|im_start|>user\n")


async def test_calls_of_tools(recording: Recording, clients: Clients, tmp_path: Path):
    """Their arguments are the text that was sampled; or objects, for templates that want those."""
    client = clients.asynchronous(clients.serve(replies_with_tools))

    @rollout
    async def agent(name: str) -> None:
        messages = [user(f"tool: {name}")]
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        await ask(client, messages, tools=tools)
        messages.append({"role": "tool", "tool_call_id": "c", "content": "3"})
        await ask(client, messages, tools=tools)

    # Different keys, an order of its own, spaces, and a null that was sampled.
    one = await gather_trajectory(agent("one"))
    two = await gather_trajectory(agent("two"))
    path = export(tmp_path, of(one, two), format="sft")
    said = [trained for _, trained in sft(path)]
    assert said == [f"<tool_call>f {text}</tool_call><|im_end|>\nok<|im_end|>\n" for text in CALLS]
    for text, _ in sft(path):
        assert text.startswith("<|im_start|>tools\n")
        (tools,) = json.loads(text.split("\n")[1].removesuffix("<|im_end|>"))
        assert tools["function"]["parameters"] == PARAMETERS
    careless = "call.function.arguments | tojson"
    path = export(tmp_path, of(one, two), format="sft", columns="json")
    for (_, trained), text in zip(
        sft(path, TrajectorySFTDataset, arguments=careless), CALLS, strict=True
    ):
        call, _, _ = trained.removeprefix("<tool_call>f ").partition("</tool_call>")
        assert json.loads(call) == json.loads(text)


CALLS = ['{"b":  1, "a": "Zürich"}', '{"q": null}']
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer", "minimum": 0}},
    "required": ["b"],
}


def replies_with_tools(body: dict[str, Any]) -> Reply:
    text = body["messages"][-1]["content"]
    if text.startswith("tool: "):
        return Reply(tool_calls=[ToolCall("f", CALLS[text == "tool: two"])])
    return Reply("ok")


async def test_tools_that_a_column_damages(recording: Recording, clients: Clients, tmp_path: Path):
    """They are refused, and come back exactly as they were from JSON columns."""
    tools: list[Any] = [
        {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
        {
            "type": "function",
            "function": {
                "name": "g",
                "parameters": {"type": "object", "properties": {"z": {"enum": [1, 2]}}},
            },
        },
    ]

    def agent(tools: list[Any]) -> Any:
        async def run(client: openai.AsyncOpenAI) -> None:
            await ask(client, [user("hi")], **({"tools": tools} if tools else {}))

        return run

    two, one, none = [await play(clients, agent(t)) for t in (tools, tools[:1], [])]
    with pytest.raises(ExportError, match=r"do not survive.*columns='json'"):
        export(tmp_path, of(two), format="sft")
    empty = await play(clients, agent(TOOLS))  # an object without keys
    with pytest.raises(ExportError, match=r"do not survive.*columns='json'"):
        export(tmp_path, of(empty), format="sft")
    for others in (of(one, none), of(one, two)):
        with pytest.raises(ExportError, match=f"{others[1][0].id}.*other tools.*columns='json'"):
            export(tmp_path, others, format="sft")
    path = export(tmp_path, of(two, one, none, empty), format="sft", columns="json")
    dataset: Any = TrajectorySFTDataset(
        str(path), tokenizer(), OmegaConf.create({"pad_mode": "no_padding"})
    )
    assert dataset.tools == [tools, tools[:1], None, TOOLS]
    assert len(list(dataset)) == 4


async def test_a_message_has_what_it_had(recording: Recording, clients: Clients, tmp_path: Path):
    """No message has a field of another: of Arrow columns those that no row needs are not there."""
    trajectory = await play(clients, chain)
    path = export(tmp_path, of(trajectory), format="sft")
    (row,) = pq.read_table(path).to_pylist()
    assert all(message.keys() == {"role", "content"} for message in row["messages"])
    assert "tools" not in row
    assert "enable_thinking" not in row
    assert row["reward"] == 1.0
    assert row["trajectory_id"] == trajectory.id
    tools = await play(clients, tool_loop)
    path = export(tmp_path, of(tools, trajectory), format="sft", columns="json")
    rows = [json.loads(row["messages"]) for row in pq.read_table(path).to_pylist()]
    keys = [sorted(message) for message in rows[0]]
    assert keys == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["content", "role", "tool_call_id"],
        ["content", "role"],
    ]


@pytest.mark.parametrize(
    ("agent", "why", "skipped", "trained"),
    [
        (fork, "is context", 1, 2),
        (forgetful, "replayed without its reasoning", 0, 1),
    ],
)
async def test_replies_that_must_not_train_here(
    recording: Recording, clients: Clients, agent: Any, why: str, skipped: int, trained: int
):
    """There is no mask for a message: the conversation is refused, left out, or trained."""
    trajectory = await play(clients, agent)
    with pytest.raises(ExportError, match=f"{trajectory.id}.*{why}.*untrained='skip'"):
        to_verl_sft([trajectory])
    rows = to_verl_sft([trajectory], untrained="skip")
    assert len(rows) == skipped
    assert len(to_verl_sft([trajectory], untrained="train")) == trained


async def test_cut_replies_get_no_end_of_turn(recording: Recording, clients: Clients):
    """The template would write one: what was cut is not learned, what came before it is."""
    trajectory = await play(clients, truncated)
    assert to_verl_sft([trajectory]) == []
    client = clients.asynchronous(
        clients.serve([Reply("whole"), Reply("cut", finish_reason="length"), Reply("end")])
    )

    @rollout
    async def agent(calls: int) -> None:
        messages = [user("one")]
        for _ in range(calls):
            await ask(client, messages)
            messages.append(user("go on"))

    (row,) = to_verl_sft([await gather_trajectory(agent(2))])
    assert [message["content"] for message in row["messages"]] == ["one", "whole"]
    client = clients.asynchronous(
        clients.serve([Reply("whole"), Reply("cut", finish_reason="length"), Reply("end")])
    )
    with pytest.raises(ExportError, match="was cut at a length limit"):
        to_verl_sft([await gather_trajectory(agent(3))])


async def test_replies_that_the_agent_wrote(recording: Recording, clients: Clients):
    """Examples in the prompt are no replies of the model."""

    async def agent(client: openai.AsyncOpenAI) -> None:
        shots: list[Any] = [user("2+2"), {"role": "assistant", "content": "4"}, user("3+3")]
        await ask(client, shots)

    trajectory = await play(clients, agent)
    with pytest.raises(ExportError, match="a reply that no model sampled"):
        to_verl_sft([trajectory])
    (row,) = to_verl_sft([trajectory], untrained="train")
    assert len(row["messages"]) == 4


async def test_only_good_rollouts(recording: Recording, clients: Clients):
    """Those that are scored high enough; what is not scored is not good, and not bad either."""
    rewards = [0.0, None, 1.0, 0.5]
    trajectories = [await play(clients, chain, reward=reward) for reward in rewards]
    rows = to_verl_sft(trajectories, min_reward=0.5)
    assert [row["reward"] for row in rows] == [1.0, 0.5]
    assert [row["reward"] for row in to_verl_sft(trajectories)] == rewards


async def test_thinking_is_a_column(recording: Recording, clients: Clients, tmp_path: Path):
    """It is what the request told the template; rows that say nothing do not go with others."""

    def agent(thinking: bool | None) -> Any:
        async def run(client: openai.AsyncOpenAI) -> None:
            body = {} if thinking is None else {"enable_thinking": thinking}
            await ask(client, [user("hi")], extra_body={"chat_template_kwargs": body})

        return run

    on, off, none = [await play(clients, agent(t)) for t in (True, False, None)]
    path = export(tmp_path, of(on, off), format="sft")
    dataset: Any = MultiTurnSFTDataset(
        str(path), tokenizer(), OmegaConf.create({"pad_mode": "no_padding"})
    )
    assert dataset.enable_thinking == [True, False]
    assert len(list(dataset)) == 2
    with pytest.raises(ExportError, match=f"{none.id}.*enable_thinking"):
        export(tmp_path, of(on, none), format="sft")


async def test_other_apis_are_refused(recording: Recording, clients: Clients):
    """Their messages are not those that verl renders."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def agent() -> None:
        await client.responses.create(model="m", input="hi")

    trajectory = await gather_trajectory(agent())
    with pytest.raises(ExportError, match=r"chat completions.*responses"):
        to_verl_prompts(TrajectoryGroup([trajectory]))
    with pytest.raises(ExportError, match=r"chat completions.*responses"):
        to_verl_sft([trajectory])


async def test_arguments_that_are_no_json(recording: Recording, clients: Clients, tmp_path: Path):
    """The text is kept as it was sampled; an object is not made up for it."""
    reply = Reply(tool_calls=[ToolCall("f", '{"a": ')])
    client = clients.asynchronous(clients.serve(reply))

    @rollout
    async def agent() -> None:
        await ask(client, [user("hi")])

    groups = of(await gather_trajectory(agent()))
    ((_, trained),) = sft(export(tmp_path, groups, format="sft"))
    assert trained == '<tool_call>f {"a": </tool_call><|im_end|>\n'
    with pytest.raises(ExportError, match="no JSON object"):
        list(row_exporter("verl", format="sft", columns="json").rows(groups[0]))


async def test_what_utf8_cannot_hold(recording: Recording, clients: Clients, tmp_path: Path):
    """A lone surrogate is refused by Arrow, and kept by JSON."""
    client = clients.asynchronous(clients.serve(Reply("half \ud83d")))

    @rollout
    async def agent() -> None:
        await ask(client, [user("hi")])

    groups = of(await gather_trajectory(agent()))
    with pytest.raises(ExportError, match="lone surrogate"):
        export(tmp_path, groups, format="sft")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    path = export(tmp_path, groups, format="sft", columns="json")
    (row,) = pq.read_table(path).to_pylist()
    assert json.loads(row["messages"])[1]["content"] == "half \ud83d"


def test_many_rows_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Row groups are bounded in bytes and share one schema; a file may be empty."""
    monkeypatch.setattr("otel_rollout_verl.files._BATCH", 1000)
    lines, output = tmp_path / "rows.jsonl", tmp_path / "data.parquet"
    row: dict[str, Any] = {"data_source": "d", "prompt": [user("x" * 100)], "ability": ""}
    row |= {"reward_model": {"style": "rule", "ground_truth": None}}
    rows = [{**row, "extra_info": {"split": "train", "task_id": None}} for _ in range(20)]
    rows[-1]["extra_info"] = {"split": "train", "task_id": "late"}
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row_exporter("verl").finish(lines, output)
    assert pq.ParquetFile(output).num_row_groups > 3
    table = pq.read_table(output).to_pylist()
    assert [row["extra_info"]["index"] for row in table] == list(range(20))
    assert table[-1]["extra_info"]["task_id"] == "late"
    lines.write_text("")
    for options in ({}, {"format": "sft"}, {"format": "sft", "columns": "json"}):
        row_exporter("verl", **options).finish(lines, output)
        assert pq.read_table(output).num_rows == 0


async def test_options_of_the_command_line(recording: Recording, clients: Clients):
    """They come as texts; a wrong one is named with what was expected."""
    group = TrajectoryGroup([await play(clients, chain, reward=0.5)])
    assert len(list(row_exporter("verl", format="sft", min_reward=0.5).rows(group))) == 1
    assert list(row_exporter("verl", format="sft", min_reward=0.6).rows(group)) == []
    for name in ("format", "columns", "untrained"):
        with pytest.raises(ConfigurationError, match=f"{name}: expected .* got 'x'"):
            row_exporter_from_texts("verl", {name: "x"})
    with pytest.raises(ConfigurationError, match="untrained: expected"):
        to_verl_sft([], untrained="x")  # type: ignore[arg-type]


async def test_unscored_rewards_stay_unknown_in_the_file(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """None is no 0.0."""
    path = export(tmp_path, of(await play(clients, chain, reward=None)), format="sft")
    assert pq.read_table(path).to_pylist()[0]["reward"] is None
