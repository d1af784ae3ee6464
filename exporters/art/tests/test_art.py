"""What ART's own tokeniser makes of our trajectories is what the model saw and said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import art
import pytest
from art.preprocessing.tokenize import TokenizedResult, tokenize_trajectory_groups
from openai.types.chat.chat_completion import Choice
from otel_rollout_art import ArtRows, from_art_row, to_art_group, to_art_row, to_art_trajectory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exporters.kit.agents import (
    AGENTS,
    Agent,
    ask,
    chain,
    choices,
    failing_calls,
    fork,
    interleaved,
    play,
    play_group,
    run_readme,
    tool_loop,
    truncated,
    user,
)
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    rollout,
)
from otel_rollout.export import row_exporter
from otel_rollout.testing import ByteTokenizer, Raw, Reply

pytestmark = pytest.mark.trainer

SERVED = hasattr(art.trajectories, "LegacyHistory")
"""From 0.5.20 on (Python 3.12) ART trains prompts as they were served; before, it renders them."""
rendered = pytest.mark.skipif(SERVED, reason="this ART takes the ids of prompts")
served = pytest.mark.skipif(not SERVED, reason="this ART renders prompts")

TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer and template of the model server, as transformers has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # GPT-2's letters for bytes.
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + position): byte for position, byte in enumerate(others)}
    special = list(ByteTokenizer.special_tokens)
    vocabulary = {**letters, **ByteTokenizer.special_tokens}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    assert made.encode("<|user|>é<|end|>") == [257, 0xC3, 0xA9, 261]
    return made


def tokenized(
    tokenizer: PreTrainedTokenizerFast, *groups: art.TrajectoryGroup
) -> list[TokenizedResult]:
    """What ART would train on."""
    return list(
        tokenize_trajectory_groups(
            tokenizer,
            list(groups),
            allow_training_without_logprobs=False,
            scale_rewards=False,
            shuffle_group_trajectories=False,
            drop_zero_advantage_trajectories=False,
        )
    )


def group_of(trajectory: Trajectory, **options: Any) -> art.TrajectoryGroup:
    return to_art_group(TrajectoryGroup.of([trajectory]), **options)


def trained(results: list[TokenizedResult]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each run of trained tokens."""
    runs: list[tuple[list[int], list[float]]] = []
    for result in results:
        last = 0
        for mask, token_id, logprob in zip(
            result.assistant_mask, result.token_ids, result.logprobs, strict=True
        ):
            if mask and not last:
                runs.append(([], []))
            if mask:
                runs[-1][0].append(token_id)
                runs[-1][1].append(logprob)
            last = mask
    return sorted(runs)


def sampled(trajectory: Trajectory) -> list[tuple[list[int], list[float | None] | None]]:
    return sorted((c.token_ids or [], c.logprobs) for c in trajectory.completions if c.trainable)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
@pytest.mark.parametrize("mode", ["auto", "per_call"])
async def test_each_reply_trains_once_with_its_ids(
    recording: Recording,
    clients: Clients,
    tokenizer: PreTrainedTokenizerFast,
    agent: Agent,
    mode: Any,
):
    """Over all histories every sampled token has mask 1 once, with its own log-probability."""
    trajectory = await play(clients, agent)
    results = tokenized(tokenizer, group_of(trajectory, mode=mode))
    assert len(sampled(trajectory)) >= 2
    assert trained(results) == sampled(trajectory)
    for result in results:
        known = [not math.isnan(value) for value in result.logprobs]
        assert known == [bool(mask) for mask in result.assistant_mask]


@pytest.mark.parametrize("agent", [chain, interleaved, truncated, failing_calls])
async def test_conversations_are_our_rows(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast, agent: Agent
):
    """Where ART can, it gets a conversation as one: its ids and mask are those of our row."""
    trajectory = await play(clients, agent)
    results = tokenized(tokenizer, group_of(trajectory, mode="conversation"))
    rows = trajectory.token_sequences()
    # What follows the last trained reply is cut by ART; here nothing does.
    assert sorted((r.token_ids, r.assistant_mask) for r in results) == sorted(
        (row.token_ids, row.loss_mask) for row in rows
    )


@served
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_every_row_is_ours(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast, agent: Agent
):
    """Ids, mask and log-probabilities, whatever the template and the conversations are."""
    trajectory = await play(clients, agent)
    results = tokenized(tokenizer, group_of(trajectory, mode="per_call"))
    rows = [row for row in trajectory.token_sequences() if any(row.loss_mask)]
    found = [(r.token_ids, r.assistant_mask, trained([r])) for r in results]
    expected = [(row.token_ids, row.loss_mask, _runs(row)) for row in rows]
    assert sorted(found) == sorted(expected)


def _runs(row: TokenSequence) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each run of trained tokens of a row."""
    spans = [(start, end) for _, start, end in row.spans if row.loss_mask[start]]
    return sorted((row.token_ids[start:end], row.logprobs[start:end]) for start, end in spans)


@rendered
async def test_a_tool_loop_is_exact_per_call(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast
):
    """Each history of it is the prompt that the model saw and what it said."""
    trajectory = await play(clients, tool_loop)
    results = tokenized(tokenizer, group_of(trajectory))
    assert [result.token_ids for result in results] == [
        [*(c.prompt_token_ids or []), *(c.token_ids or [])] for c in trajectory.completions
    ]


@rendered
async def test_tools_are_rendered_as_they_were_sent(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast
):
    """Members of a tool stay in their order, also those that ART does not know."""
    tool = {"type": "function", "x-note": 1, "function": {"parameters": {}, "name": "f"}}
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        messages: list[Any] = [user("hi")]
        await ask(client, messages, tools=[tool])
        await ask(client, [*messages, user("more")], tools=[tool])
        await ask(client, [user("apart")], tools=[tool, tool])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    for mode in ("conversation", "per_call"):
        made = to_art_trajectory(trajectory, mode=mode)
        for tools in (made.tools, *(history.tools for history in made.additional_histories)):
            for served in tools or ():
                assert json.dumps(served) == json.dumps(tool)
    own = tokenizer.chat_template
    tokenizer.chat_template = "{{ tools | tojson }}" + TEMPLATE
    try:
        main, other = tokenized(tokenizer, group_of(trajectory))
    finally:
        tokenizer.chat_template = own
    assert json.dumps([tool]) in tokenizer.decode(other.token_ids)
    # ART's tokeniser makes the main conversation anew, and with it the order of its tools.
    assert json.dumps(tool) not in tokenizer.decode(main.token_ids)


async def test_replies_that_begin_within_a_character(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast
):
    """ART reads the bytes of the first token as text; half a character is none."""
    client = clients.asynchronous(clients.serve("é ☃"))

    @rollout
    async def agent() -> None:
        await ask(client, [user("hi")])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    assert trained(tokenized(tokenizer, group_of(trajectory))) == sampled(trajectory)
    assert (trajectory.completions[0].token_ids or [])[0] == 0xC3


@rendered
async def test_why_a_tool_loop_is_no_conversation(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast
):
    """ART tokenises calls of a choice that is not the last twice, so this is refused."""
    trajectory = await play(clients, tool_loop)
    with pytest.raises(ExportError, match=r"calls tools and is not the last.*mode='per_call'"):
        to_art_trajectory(trajectory, mode="conversation")
    per_call = to_art_trajectory(trajectory)
    (last,) = per_call.additional_histories
    (first,) = [m for m in per_call.messages_and_choices if isinstance(m, Choice)]
    items: Any = [first if "tool_calls" in m else m for m in last.messages_and_choices[:-1]]
    items = [first if isinstance(m, dict) and m["role"] == "assistant" else m for m in items]
    wrong = art.Trajectory(
        messages_and_choices=[*items, last.messages_and_choices[-1]], tools=last.tools, reward=1.0
    )
    (result,) = tokenized(tokenizer, art.TrajectoryGroup([wrong]))
    assert tokenizer.decode(result.token_ids).count('"arguments"') == 2
    ids = trajectory.token_sequences()[0].token_ids
    assert bytes(i for i in ids if i < 256).count(b'"arguments"') == 1


async def test_a_fork_trains_what_is_shared_once(recording: Recording, clients: Clients):
    """The reply that two conversations go on from is a choice in one of them."""
    made = to_art_trajectory(await play(clients, fork), mode="conversation")
    histories = [
        made.messages_and_choices,
        *(h.messages_and_choices for h in made.additional_histories),
    ]
    counts = [sum(isinstance(item, Choice) for item in items) for items in histories]
    assert counts == [2, 1]
    assert all(len(items) == 4 for items in histories)


async def test_choices_of_one_call_are_told_apart(recording: Recording, clients: Clients):
    """Both train, and say which choice they were."""
    made = to_art_trajectory(await play(clients, choices), mode="per_call")
    last = [
        made.messages_and_choices[-1],
        *(h.messages_and_choices[-1] for h in made.additional_histories),
    ]
    assert sorted(item.index for item in last if isinstance(item, Choice)) == [0, 0, 1]


async def test_policies_of_its_own_server(recording: Recording, clients: Clients):
    """The spans of a choice are there as its server sent them, and the steps follow from them."""
    common = {"lora_slot": "m", "update_seq": 1}
    spans = [
        {"start_token": 0, "end_token": 2, "policy_version": 7, **common},
        {"start_token": 2, "end_token": 6, "policy_version": 8, **common},
    ]

    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "aaaaaa"},
        "logprobs": {"content": [entry] * 6},
        "token_ids": [97] * 6,
        "policy_token_spans": spans,
    }
    body = {"id": "c", "model": "m", "prompt_token_ids": [1, 2], "choices": [choice]}
    client = clients.asynchronous(clients.serve(Raw(body=json.dumps(body).encode())))
    async with rollout("agent") as trajectory:
        await ask(client, [user("hi")])
        trajectory.reward = 1.0
    made = to_art_trajectory(recording.trajectory)
    (said,) = (item for item in made.messages_and_choices if isinstance(item, Choice))
    assert (said.model_extra or {})["policy_token_spans"] == spans
    assert (made.initial_policy_version, made.final_policy_version) == (7, 8)


async def test_what_else_art_knows(recording: Recording, clients: Clients):
    """Rewards, metrics, metadata, versions, logs and tools are where ART looks for them."""
    client = clients.asynchronous(clients.serve(["hello"]))

    async with rollout("agent", task_id="t", policy_version=7) as trajectory:
        await ask(client, [user("hi")], tools=[])
        trajectory.reward = 0.5
        trajectory.rewards["style"] = 0.25
        trajectory.metrics["steps"] = 2
        trajectory.metadata["difficulty"] = "hard"
        trajectory.metadata["tags"] = ["a", "b"]
        trajectory.log("done")
    made = to_art_trajectory(recording.trajectory)
    assert made.reward == 0.5
    assert made.metrics == {"steps": 2, "reward/style": 0.25}
    assert made.metadata == {
        "trajectory_id": trajectory.id,
        "name": "agent",
        "task_id": "t",
        "difficulty": "hard",
        "tags": '["a", "b"]',
    }
    assert (made.initial_policy_version, made.final_policy_version) == (7, 7)
    assert made.logs == ["done"]


async def test_groups_with_failures(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast
):
    """Scored rollouts are trajectories, those that failed are exceptions; advantages are ours."""
    group = await play_group(clients, [1.0, None, 0.0])
    made = to_art_group(group)
    assert [t.reward for t in made] == [1.0, 0.0]
    (error,) = made.exceptions
    assert (error.type, error.message) == ("ValueError", "no")
    assert "raise ValueError" in error.traceback
    assert made.metadata == {"group_id": group.key}
    assert [result.advantage for result in tokenized(tokenizer, made)] == group.advantages()


async def test_lines_of_a_file_become_live_again(
    recording: Recording, clients: Clients, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    """A row is JSON; the group made of it trains the same tokens."""
    exporter = row_exporter("art", mode="per_call")
    group = TrajectoryGroup.of([await play(clients, tool_loop, group_id="g")])
    (tmp_path / "part").write_text(
        "".join(json.dumps(row, allow_nan=False) + "\n" for row in exporter.rows(group))
    )
    exporter.finish(tmp_path / "part", tmp_path / "rows.jsonl")
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    again = tokenized(tokenizer, from_art_row(json.loads(line)))
    assert trained(again) == sampled(group[0])


async def test_a_reward_that_is_not_known_is_not_zero(recording: Recording, clients: Clients):
    """It is refused, or the trajectory is left out."""
    trajectory = await play(clients, chain, reward=None)
    with pytest.raises(ExportError, match=f"{trajectory.id}.*has no reward.*unscored='drop'"):
        to_art_trajectory(trajectory)
    with pytest.raises(ExportError, match="has no reward"):
        list(ArtRows().rows(TrajectoryGroup.of([trajectory])))
    assert list(ArtRows(unscored="drop").rows(TrajectoryGroup.of([trajectory]))) == []


async def test_what_cannot_train_is_said(recording: Recording, clients: Clients):
    """No ids, no log-probabilities, another API: refused, with what to do."""
    bare = clients.asynchronous(clients.serve("hello", token_ids=False))
    client = clients.asynchronous(clients.serve("hello", logprobs=False))

    @rollout
    async def without_ids() -> None:
        await ask(bare, [user("hi")])

    @rollout
    async def without_logprobs() -> None:
        await ask(client, [user("hi")])

    @rollout
    async def text() -> None:
        await client.completions.create(model="m", prompt="hi", logprobs=0)

    for agent, reason in (
        (without_ids, "sends token ids to those who ask|sent no token ids"),
        (without_logprobs, "log-probability is known.*request_token_ids"),
        (text, "/completions'.*only"),
    ):
        trajectory = await gather_trajectory(agent())
        trajectory.reward = 1.0
        with pytest.raises(ExportError, match=reason):
            to_art_trajectory(trajectory)


async def test_what_is_not_to_be_trained_is_left_out(recording: Recording, clients: Clients):
    """A judge's rollout is no row, and no error."""
    judge = await play(clients, chain, reward=None, trainable=False)
    assert list(ArtRows().rows(TrajectoryGroup.of([judge]))) == []


async def test_custom_tools_are_refused(recording: Recording, clients: Clients):
    """ART's types have function tools only: the error is ours, and names the trajectory."""
    client = clients.asynchronous(clients.serve(Reply("hello")))

    @rollout
    async def agent() -> None:
        tool: Any = {"type": "custom", "custom": {"name": "grep"}}
        await ask(client, [user("hi")], tools=[tool])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    with pytest.raises(ExportError, match=f"{trajectory.id}: ART refuses it"):
        to_art_trajectory(trajectory)


def test_wrong_options_are_named():
    """At start-up, with what was expected."""
    with pytest.raises(ConfigurationError, match="expected 'auto', 'per_call' or 'conv"):
        row_exporter("art", mode="all")
    with pytest.raises(ConfigurationError, match="unscored: expected"):
        to_art_row(TrajectoryGroup([]), unscored="zero")  # type: ignore[arg-type]


async def test_an_image_trains_with_its_pixels_or_not(recording: Recording, clients: Clients):
    """The ART that would train it without them is not given it."""
    client = clients.asynchronous(clients.serve("a cat"))

    @rollout
    async def agent() -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        await ask(client, [{"role": "user", "content": [image]}])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    with pytest.raises(ExportError, match="has image_url, for which its token ids are placehold"):
        to_art_trajectory(trajectory)
    if SERVED:
        with pytest.raises(ExportError, match=r"role 'user'.*without the image"):
            to_art_trajectory(trajectory, on_media="keep")
    else:
        (asked, _) = to_art_trajectory(trajectory, on_media="keep").messages_and_choices
        assert "image_url" in str(asked)


@served
async def test_what_art_captures_is_recorded_once(recording: Recording, clients: Clients):
    """With its own hooks in the same process: one exchange of ART's, one completion of ours."""
    client = clients.asynchronous(clients.serve(["hello", "again"]))

    @rollout
    async def agent() -> None:
        first = await ask(client, [user("hi")])
        await ask(client, [user("hi"), first, user("more")])

    theirs: Any = art.Trajectory()
    with theirs:
        ours = await gather_trajectory(agent())
    assert len(ours.completions) == len(theirs.exchanges.chat_completions) == 2
    assert not ours.warnings


async def test_sound_is_refused(recording: Recording, clients: Clients):
    """Neither token ids nor messages give it to the trainer."""
    client = clients.asynchronous(clients.serve("a bell"))

    @rollout
    async def agent() -> None:
        audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        await ask(client, [{"role": "user", "content": [audio]}])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    with pytest.raises(ExportError, match="has input_audio, for which its token ids"):
        to_art_trajectory(trajectory)
    with pytest.raises(ExportError, match="holds input_audio"):
        to_art_trajectory(trajectory, on_media="keep")


def test_the_readme_runs(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
):
    """Its example gives a group that ART trains on."""
    made = run_readme(Path(__file__).parents[1], clients, monkeypatch)
    assert len(trained(tokenized(tokenizer, made["group"]))) == 4
