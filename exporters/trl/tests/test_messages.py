"""Conversations and token rows for SFT, DPO, reward models and KTO, on the real trainers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from otel_rollout_trl import to_trl_kto, to_trl_preferences, to_trl_sft, to_trl_sft_tokens
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectory,
    record_reward,
    request_token_ids,
    rollout,
)
from otel_rollout.export import row_exporter_from_texts
from otel_rollout.testing import Reply, ToolCall

pytestmark = pytest.mark.trainer

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 1,
    "per_device_train_batch_size": 8,
}


def learned(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """The ids of each row that the trainer computed its loss from, and 1 where it learned."""
    rows: list[tuple[list[int], list[int]]] = []
    compute_loss = trainer.compute_loss

    def spy(model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        shapes = zip(inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True)
        for ids, there, labels in shapes:
            kept = there.bool()
            rows.append((ids[kept].tolist(), (labels[kept] != -100).int().tolist()))
        return compute_loss(model, inputs, *args, **options)

    trainer.compute_loss = spy
    trainer.train()
    return sorted(rows)


def sft(rows: list[dict[str, Any]], tokenizer: Any, model: Any, path: Path, **options: Any) -> Any:
    return learned(
        SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows, on_mixed_types="use_json"),
            args=SFTConfig(output_dir=str(path), max_length=None, **options, **QUIET),
        )
    )


def ours(trajectories: list[Trajectory]) -> list[tuple[list[int], list[int]]]:
    rows = [row for trajectory in trajectories for row in trajectory.token_sequences()]
    return sorted((row.token_ids, row.loss_mask) for row in rows)


async def two_tools(client: Any) -> None:
    """Two tools whose arguments have other names and types, as Arrow does not like them."""
    messages = [agents.user("tools")]
    message = await agents.ask(client, messages, tools=agents.TOOLS)
    for call in message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
    await agents.ask(client, messages, tools=agents.TOOLS)


def _two_calls(request: dict[str, Any]) -> Reply:
    if request["messages"][-1]["role"] == "tool":
        return Reply("done")
    return Reply(
        tool_calls=[
            ToolCall("add", '{"a": 1, "b": {"c": [1, "x"]}}'),
            ToolCall("find", '{"q": "é"}'),
        ]
    )


async def play_tools(clients: Clients) -> Trajectory:
    client = clients.asynchronous(clients.serve(_two_calls))

    @rollout
    async def agent() -> None:
        await two_tools(client)

    with request_token_ids():
        return await gather_trajectory(agent())


async def play_replies(
    clients: Clients, replies: list[tuple[str, float | None]], prompt: str = "one"
) -> TrajectoryGroup:
    """A group of rollouts that are asked the same, and reply differently."""
    texts = iter([reply for reply, _ in replies])
    client = clients.asynchronous(clients.serve(lambda _: Reply(next(texts))))

    @rollout
    async def agent(reward: float | None) -> None:
        await agents.ask(client, [agents.user(prompt)])
        if reward is not None:
            record_reward(reward)

    return await gather_group(
        [agent(reward) for _, reward in replies], group_id="g", max_concurrency=1
    )


# --- SFT


async def test_sft_of_tokens_learns_what_was_sampled(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """Ids and mask of the trainer's loss are those of the token sequences, whatever the agent."""
    played = [await agents.play(clients, agent) for agent in agents.AGENTS]
    rows = to_trl_sft_tokens(played)
    args = {**QUIET, "per_device_train_batch_size": len(rows)}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=SFTConfig(output_dir=str(tmp_path), max_length=None, **args),
    )
    assert learned(trainer) == ours(played)


async def test_sft_of_messages_renders_what_was_sampled(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """Tool arguments come as objects, each with its own keys only, so the template writes them."""
    played = [await agents.play(clients, agents.chain), await play_tools(clients)]
    rows = to_trl_sft(played)
    calls = rows[1]["messages"][1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [
        {"a": 1, "b": {"c": [1, "x"]}},
        {"q": "é"},
    ]
    assert rows[1]["tools"] == agents.TOOLS
    found = sft(rows, tokenizer, model, tmp_path, assistant_only_loss=True)
    assert found == ours(played)


async def test_sft_of_each_completion_is_always_exact(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """A reply that two histories share is one row, learned once."""
    trajectory = await agents.play(clients, agents.fork)
    rows = to_trl_sft([trajectory], per="completion")
    assert len(rows) == len(trajectory.completions) == 3
    found = sft(rows, tokenizer, model, tmp_path)
    expected = []
    for completion in trajectory.completions:
        prompt, said = completion.prompt_token_ids, completion.token_ids
        assert prompt is not None
        assert said is not None
        expected.append((prompt + said, [0] * len(prompt) + [1] * len(said)))
    assert found == sorted(expected)


async def test_sft_refuses_what_the_trainer_would_learn_twice(
    recording: Recording, clients: Clients
):
    """The reply before a fork trains in the first history; the format cannot say so."""
    trajectory = await agents.play(clients, agents.fork)
    with pytest.raises(ExportError, match=r"trains in another history.*per='completion'"):
        to_trl_sft([trajectory])


async def test_sft_refuses_assistant_messages_that_were_not_sampled(
    recording: Recording, clients: Clients
):
    """Examples in a prompt would be learned as if the model had said them."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        example = {"role": "assistant", "content": "an example"}
        await agents.ask(client, [agents.user("a"), example, agents.user("b")])

    trajectory = await gather_trajectory(agent())
    with pytest.raises(ExportError, match=r"an example.*did not sample it"):
        to_trl_sft([trajectory])
    (row,) = to_trl_sft([trajectory], per="completion")
    assert [message["content"] for message in row["prompt"]] == ["a", "an example", "b"]
    assert [message["content"] for message in row["completion"]] == ["hello"]


async def test_sft_of_tokens_has_no_placeholders(recording: Recording, clients: Clients):
    """What token ids cannot say, such as an image in a tool's result, is in no row; it is said."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

    async def look(client: Any) -> None:
        messages: Any = [{"role": "user", "content": [image]}]
        await client.chat.completions.create(model="m", messages=messages)

    trajectory = await agents.play(clients, look)
    assert to_trl_sft_tokens([trajectory]) == []
    exporter: Any = row_exporter_from_texts("trl", {"format": "sft-tokens"})
    (drop,) = exporter.dropped(TrajectoryGroup.of([trajectory]))
    assert "has image_url, for which its token ids are placeholders" in drop.reason
    with pytest.raises(ExportError, match="images, sound or files: then leave it out"):
        to_trl_sft([trajectory])


async def test_sft_leaves_out_what_was_not_good_enough(recording: Recording, clients: Clients):
    """Nor is what nobody scored, or what failed, taken for good."""
    group = await agents.play_group(clients, [1.0, 0.25, None])
    unscored = await agents.play(clients, agents.chain, None)
    everything = [*group, *group.failures, unscored]
    for function in (to_trl_sft, to_trl_sft_tokens):
        assert len(function(everything, min_reward=0.5)) == 1
        assert len(function(everything)) == 3


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(tool_calls=[ToolCall("add", '{"a": 1')]), "no JSON object"),
        (Reply(tool_calls=[ToolCall("add", "[1]")]), "no JSON object"),
        (Reply(refusal="no"), "expected chat messages with text"),
    ],
)
async def test_sft_refuses_what_templates_cannot_render(
    recording: Recording, clients: Clients, reply: Reply, why: str
):
    """Arguments that are no object, and refusals, would be rendered as something else."""
    client = clients.asynchronous(clients.serve(reply))

    @rollout
    async def agent() -> None:
        await agents.ask(client, [agents.user("a")])

    with request_token_ids():
        trajectory = await gather_trajectory(agent())
    with pytest.raises(ExportError, match=why):
        to_trl_sft([trajectory])
    assert len(to_trl_sft_tokens([trajectory])) == 1


async def test_sft_refuses_replies_without_the_reasoning_that_was_sampled(
    recording: Recording, clients: Clients
):
    """As the conversation went on, they were something that the model never said."""
    trajectory = await agents.play(clients, agents.forgetful)
    with pytest.raises(ExportError, match="its reasoning was sampled, and not sent back"):
        to_trl_sft([trajectory])
    with pytest.raises(ExportError, match="its reasoning was sampled, and not sent back"):
        to_trl_kto([trajectory], threshold=0.0, context="keep")
    rows = to_trl_sft([trajectory], per="completion")
    assert [row["completion"][0].get("reasoning_content") for row in rows] == ["let me see", None]


async def test_sft_refuses_other_apis(recording: Recording, clients: Clients):
    """Their instructions and items are nothing that a chat template renders."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        await client.responses.create(model="m", instructions="be brief", input="hi")

    trajectory = await gather_trajectory(agent())
    for per in ("history", "completion"):
        with pytest.raises(ExportError, match=r"is of .*/responses, and chat templates"):
            to_trl_sft([trajectory], per=per)


async def test_reasoning_has_the_name_that_templates_know(recording: Recording, clients: Clients):
    """VLLM calls it `reasoning`, chat templates `reasoning_content`."""
    replies = [Reply("a", reasoning="x"), Reply("b", message_extra={"reasoning": "y"})]
    client = clients.asynchronous(clients.serve(replies))

    @rollout
    async def agent() -> None:
        for text in ("one", "two"):
            await agents.ask(client, [agents.user(text)])

    rows = to_trl_sft([await gather_trajectory(agent())])
    assert [row["messages"][-1].get("reasoning_content") for row in rows] == ["y", "x"]


# --- preferences


async def test_preferences_are_between_the_best_and_the_worst(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """DPOTrainer and RewardTrainer take a step on them."""
    replies = [("fair", 0.5), ("good", 1.0), ("bad", 0.0), ("unknown", None), ("fine", 1.0)]
    group = await play_replies(clients, replies)
    rows = to_trl_preferences(group)
    (row,) = rows
    assert [row[name][-1]["content"] for name in ("prompt", "chosen", "rejected")] == [
        "one",
        "good",
        "bad",
    ]
    every = to_trl_preferences(group, pairs="all")
    assert [(r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in every] == [
        ("good", "fair"),
        ("good", "bad"),
        ("fine", "fair"),
        ("fine", "bad"),
        ("fair", "bad"),
    ]
    DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(every),
        args=DPOConfig(output_dir=str(tmp_path), **QUIET),
    ).train()


async def test_a_reward_model_learns_from_preferences(
    recording: Recording, clients: Clients, tokenizer: Any, tmp_path: Path
):
    """RewardTrainer takes a step on them."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    group = await play_replies(clients, [("good", 1.0), ("bad", 0.0)])
    config = Qwen2Config(
        vocab_size=262,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=1,
        pad_token_id=256,
    )
    trainer = RewardTrainer(
        model=Qwen2ForSequenceClassification(config),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(to_trl_preferences(group)),
        args=RewardConfig(output_dir=str(tmp_path), **QUIET),
    )
    assert trainer.train().training_loss > 0


async def test_equal_rewards_make_no_pair(recording: Recording, clients: Clients):
    """Nor does one scored trajectory alone."""
    assert to_trl_preferences(await play_replies(clients, [("a", 1.0), ("b", 1.0)])) == []
    assert to_trl_preferences(await play_replies(clients, [("a", 1.0), ("b", None)])) == []


async def test_preferences_are_between_replies_to_one_prompt(
    recording: Recording, clients: Clients
):
    """Trajectories of two tasks say nothing about each other."""
    one = await play_replies(clients, [("a", 1.0)])
    other = await play_replies(clients, [("a", 0.0)], prompt="two")
    with pytest.raises(ExportError, match=f"{one[0].id}.*{other[0].id}.*same prompt and tools"):
        to_trl_preferences(TrajectoryGroup([*one, *other]))


async def test_preferences_say_where_the_environment_would_be_learned(
    recording: Recording, clients: Clients
):
    """A user's second turn is not the model's; it is handed over only if that is asked for."""
    group = await agents.play_group(clients, [1.0, 0.0])
    with pytest.raises(ExportError, match=r"'two'.*did not sample it.*context='keep'"):
        to_trl_preferences(group)
    (row,) = to_trl_preferences(group, context="keep")
    assert [message["role"] for message in row["chosen"]] == ["assistant", "user", "assistant"]


async def test_side_calls_are_not_learned(recording: Recording, clients: Clients):
    """A title that was asked beside the agent is in no row, and no second history."""
    titled = await agents.play(clients, agents.titled)
    (row,) = to_trl_sft([titled])
    assert row["messages"][0] == {"role": "user", "content": "one"}
    assert len(to_trl_sft([titled], per="completion")) == 2
    (row,) = to_trl_kto([titled], threshold=0.0, context="keep")
    assert row["prompt"] == [{"role": "user", "content": "one"}]
    assert len(to_trl_sft([titled.with_side_calls(())], per="completion")) == 3


async def test_preferences_need_one_history(recording: Recording, clients: Clients):
    """A fork is no conversation."""
    fork = await agents.play(clients, agents.fork)
    with pytest.raises(ExportError, match="2 histories"):
        to_trl_kto([fork], threshold=0.0)


async def test_kto_labels_by_threshold(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """What nobody scored has no label, and so no row. KTOTrainer takes a step on them."""
    group = await play_replies(clients, [("a", 0.5), ("b", 0.4), ("c", None), ("d", 1.0)])
    rows = to_trl_kto(group, threshold=0.5)
    assert [(r["completion"][0]["content"], r["label"]) for r in rows] == [
        ("a", True),
        ("b", False),
        ("d", True),
    ]
    KTOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=KTOConfig(output_dir=str(tmp_path), **QUIET),
    ).train()


# --- the exporter


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, {"messages", "tools"}),
        ({"format": "sft", "per": "completion"}, {"prompt", "completion", "tools"}),
        ({"format": "sft-tokens", "min_reward": "0.5"}, {"input_ids", "labels"}),
        ({"format": "dpo", "context": "keep"}, {"prompt", "chosen", "rejected", "tools"}),
        (
            {"format": "kto", "threshold": "0.5", "context": "keep"},
            {"prompt", "completion", "label", "tools"},
        ),
    ],
)
async def test_the_exporter_has_a_format_for_each(
    recording: Recording, clients: Clients, options: dict[str, str], columns: set[str]
):
    """With options as texts, since they come from a command line; its rows are JSON."""
    rows = list(
        row_exporter_from_texts("trl", options).rows(await agents.play_group(clients, [1.0, 0.0]))
    )
    assert rows
    assert {frozenset(row) for row in json.loads(json.dumps(rows, allow_nan=False))} == {
        frozenset(columns)
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "ppo"}, "format: expected 'sft', 'sft-tokens'"),
        ({"format": "kto"}, "threshold is missing"),
        (
            {"format": "kto", "threshold": "high"},
            "threshold: expected a number or none, got",
        ),
        ({"format": "dpo", "per": "history"}, "expected the options pairs, context, got 'per'"),
        ({"per": "token"}, "per: expected 'history' or 'completion'"),
        ({"format": "grpo", "choose": "best"}, "choose: expected 'error', 'longest'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_read(options: dict[str, str], message: str):
    """With what was expected."""
    with pytest.raises(ConfigurationError, match=message):
        row_exporter_from_texts("trl", options)
