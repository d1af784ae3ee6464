"""The gate before a row: what is no sample of the policy is in no row, and the reason is said."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
import requests

from otel_rollout import Trajectory, configure, rollout, to_token_rows
from otel_rollout.export import TokenRows, dropped_completions, row_exporter
from otel_rollout.testing import Raw, Reply
from otel_rollout.trajectory import DROPS, TrajectoryGroup, tokens
from otel_rollout.view.findings import findings_of
from tests.kit.calling import STREAMED
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
PROMPT = [1, 2]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}}


def choice(index: Any, ids: list[Any], **more: Any) -> Json:
    return {"index": index, "finish_reason": "stop", "token_ids": ids, **more}


def reply(choices: list[Json], usage: int | None, *, stream: bool, kind: str = "chat") -> Raw:
    """A reply of vLLM's, or its stream: a chunk for each choice, then the count."""
    counts = {"prompt_tokens": 2, "completion_tokens": usage, "total_tokens": 2}
    head: Json = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    part = {"role": "assistant", "content": "x"}
    shown: Json = {"text": "x"} if kind == "text" else {"delta" if stream else "message": part}
    prompts = {"prompt_token_ids": PROMPT}
    made = [{**each, **shown, **(prompts if kind == "text" else {})} for each in choices]
    more: Json = {} if usage is None else {"usage": counts}
    if not stream:
        return Raw(body=json.dumps({**head, **prompts, "choices": made, **more}).encode())
    chunks = [{**head, **prompts, "choices": [each]} for each in made]
    chunks += [{**head, "choices": [], **more}] if more else []
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    return Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")


def called(
    recording: Recording, clients: Clients, answer: Any, stream: bool = False, **request: Any
) -> Trajectory:
    """The trajectory of one call."""
    client = clients.sync(clients.serve(answer))
    make: Any = client.chat.completions if "prompt" not in request else client.completions
    asked = {} if "prompt" in request else {"messages": [{"role": "user", "content": "hi"}]}

    @rollout
    def agent() -> None:
        made = make.create(model="m", stream=stream, **{**asked, **request})
        for _ in made if stream else ():
            pass

    agent()
    return recording.trajectory


def ids_of(trajectory: Trajectory) -> list[list[int]]:
    return [row.token_ids for row in trajectory.token_sequences()]


def reasons(trajectory: Trajectory) -> list[str]:
    return [drop.reason for drop in trajectory.token_sequences().dropped]


def test_each_cause_has_an_advice():
    """Of every reason it is said what to do."""
    assert all(advice.endswith(".") for _, advice in DROPS.values())


# --- ids


@STREAMED
@pytest.mark.parametrize("wrong", [-1, 2**31, 7912345678901234567, 17912345678901234567, 1.5, "7"])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_ids_that_can_be_none(
    recording: Recording, clients: Clients, wrong: Any, kind: str, stream: bool
):
    """A placeholder of speculative decoding, a hash of an image: the reply does not train."""
    answer = reply([choice(0, [5, wrong, 7])], 3, stream=stream, kind=kind)
    request = {"prompt": [1, 2]} if kind == "text" else {}
    trajectory = called(recording, clients, answer, stream, **request)
    assert ids_of(trajectory) == []
    assert reasons(trajectory) == [
        f"the token ids of its reply have {wrong!r} at place 1, which can be none: expected a "
        f"whole number from 0 to 2147483647"
    ]
    with pytest.warns(match="can be none"):
        assert to_token_rows(trajectory) == []


@pytest.mark.parametrize("wrong", [-1, 2**31, 17912345678901234567, True])
def test_prompts_that_can_be_none(recording: Recording, clients: Clients, wrong: Any):
    """Those of SGLang's images, and those that a request gave."""
    answer = json.loads(reply([choice(0, [5])], 1, stream=False).body)
    answer["prompt_token_ids"] = [1, wrong]
    trajectory = called(recording, clients, Raw(body=json.dumps(answer).encode()))
    assert ids_of(trajectory) == []
    (reason,) = reasons(trajectory)
    assert reason.startswith(f"the token ids of its prompt have {wrong!r} at place 1, which can")


def test_the_vocabulary_of_every_exporter(recording: Recording, clients: Clients):
    """`max_token_id` is one option for all: those of the library, and of others."""
    answer = reply([choice(0, [5, 900])], 2, stream=False)
    trajectory = called(recording, clients, answer)
    trajectory.reward = 1.0
    group = TrajectoryGroup([trajectory])
    assert len(to_token_rows(trajectory, max_token_id=900)) == 1
    with pytest.warns(match="which can be none"):
        assert to_token_rows(trajectory, max_token_id=899) == []
    assert list(TokenRows(max_token_id=899).rows(group)) == []
    assert [*dropped_completions(group, max_token_id=899)]
    for limit, count in ((899, 0), (900, 1)):
        exporter = row_exporter("parquet", max_token_id=limit)
        (row,) = exporter.rows(group)
        assert len(row["input_ids"]) == count
        assert len([*exporter.dropped(group)]) == 1 - count  # type: ignore[attr-defined]
    assert len(trajectory.token_sequences()) == 1
    for wrong in (-1, True, 1.0, "9"):
        with pytest.raises(ValueError, match="max_token_id"):
            trajectory.token_sequences(max_token_id=wrong)  # type: ignore[arg-type]


# --- choices


CHOICES: dict[str, tuple[int, list[Json], int | None, list[list[int]], str]] = {
    "as many as asked": (2, [choice(0, [5]), choice(1, [6, 7])], 3, [[5], [6, 7]], ""),
    "fewer, and the count agrees": (3, [choice(0, [5]), choice(2, [6])], 2, [[5], [6]], ""),
    "fewer, and no count": (3, [choice(1, [5])], None, [[5]], ""),
    "fewer, and the count is of more": (2, [choice(0, [5])], 2, [], "sampled 2 tokens and sent 1"),
    "more than asked": (1, [choice(0, [5]), choice(1, [6])], 2, [], "asks for 1 of the 2 choices"),
    "more ids than counted": (2, [choice(0, [5]), choice(1, [6, 7])], 2, [], "sampled 2 tokens"),
}


@STREAMED
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_choices_are_held_against_the_request(
    recording: Recording, clients: Clients, name: str, kind: str, stream: bool
):
    """What disagrees with `n` or `usage` is in no row; what is missing is said."""
    n, choices, usage, expected, reason = CHOICES[name]
    answer = reply(choices, usage, stream=stream, kind=kind)
    request = {"prompt": [1, 2]} if kind == "text" else {}
    trajectory = called(recording, clients, answer, stream, n=n, **request)
    assert ids_of(trajectory) == [PROMPT + ids for ids in expected]
    assert all(reason in each for each in reasons(trajectory))
    warned = [warning for warning in trajectory.warnings if "choices" in warning]
    assert warned == (
        [f"completion 'c': its request asks for {n} choices, and {len(choices)} came"]
        if len(choices) < n
        else []
    )


@pytest.mark.parametrize("indices", [(0, 0), (1, None), (1, 1)])
def test_an_index_that_comes_twice(recording: Recording, clients: Clients, indices: Any):
    """Unstreamed, their places tell them apart."""
    choices = [choice(index, [5 + place]) for place, index in enumerate(indices)]
    trajectory = called(recording, clients, reply(choices, 2, stream=False), n=2)
    assert ids_of(trajectory) == [[*PROMPT, 5], [*PROMPT, 6]]
    assert [completion.choice_index for completion in trajectory.completions] == [0, 1]


def test_prompts_in_one_request_have_choices_each(recording: Recording, clients: Clients):
    """Of two prompts with `n=2` there are four."""
    choices = [choice(index, [5 + index]) for index in range(4)]
    prompt = [[1, 2], [1, 2]]
    answer = reply(choices, 4, stream=False, kind="text")
    trajectory = called(recording, clients, answer, prompt=prompt, n=2)
    assert ids_of(trajectory) == [[*PROMPT, 5 + index] for index in range(4)]
    assert trajectory.warnings == []


# --- what no policy sampled


@pytest.mark.parametrize(
    "more",
    [
        {"use_beam_search": True},
        {"best_of": 4},
        {"num_beams": 2},
        {"beam_width": 3},
        {"sampling_params": {"best_of": 2}},
        {"parameters": {"best_of": 2}},
    ],
)
def test_what_a_search_found_does_not_train(
    recording: Recording, clients: Clients, more: dict[str, Any]
):
    """Beams, and the best of several samples."""
    trajectory = called(recording, clients, "hi", extra_body=more)
    assert ids_of(trajectory) == []
    assert "choose among samples" in reasons(trajectory)[0]


def test_one_sample_of_one_trains(recording: Recording, clients: Clients):
    """`best_of=1` and no beams are what everybody does."""
    more = {"best_of": 1, "use_beam_search": False, "num_beams": 1}
    assert len(ids_of(called(recording, clients, "hi", extra_body=more))) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"5": -100}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["no"]},
        {"min_tokens": 3},
        {"guided_regex": "a"},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
        {"ignore_eos": True},
    ],
)
def test_masks_are_constraints(recording: Recording, clients: Clients, more: dict[str, Any]):
    """They train; their log-probabilities are not the policy's, which `check` says."""
    trajectory = called(recording, clients, "hi", extra_body=more)
    (row,) = to_token_rows(trajectory)
    assert (row["logprobs_mode"], row["logprobs_modes"]) == ("constrained", ["constrained"])
    assert any("under a constraint" in finding.text for finding in findings_of(trajectory))
    (hidden,) = to_token_rows(trajectory, constrained_logprobs="nan")
    assert math.isnan(hidden["logprobs"][-1])


# --- images, sound, files


@pytest.mark.parametrize("part", [IMAGE, SOUND, FILE])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_token_ids_cannot_say(recording: Recording, clients: Clients, part: Json, role: str):
    """Images, sound and files, also in results of tools: no row, alike everywhere."""
    text = {"type": "text", "text": "look"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before: list[Any] = [{"role": "user", "content": "hi"}]
    before += [{"role": "assistant", "content": None, "tool_calls": [call]}] * (role == "tool")
    named = {"tool_call_id": "a"} if role == "tool" else {}
    messages = [*before, {"role": role, "content": [text, part], **named}]
    trajectory = called(recording, clients, "a dot", messages=messages)
    kind = part["type"]
    assert ids_of(trajectory) == []
    (drop,) = trajectory.token_sequences().dropped
    expected = f"its conversation has {kind}, for which its token ids are placeholders"
    assert (drop.reason, drop.cause, drop.lacks_only_ids) == (expected, "media", True)
    assert len(to_token_rows(trajectory, on_media="keep")) == 1
    assert list(TokenRows().rows(TrajectoryGroup([trajectory]))) == []


def test_calls_beside_an_image_train(recording: Recording, clients: Clients):
    """What came before it, or in another conversation; what names a reply that saw it is not."""
    client = clients.sync(clients.serve(["hi", "a dot", "still a dot", "bye", "bye"]))
    seen: Any = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    shown: Any = [{"role": "user", "content": [seen]}]

    @rollout
    def agent() -> None:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        first = client.responses.create(model="m", input=shown)
        client.responses.create(model="m", input="and now?", previous_response_id=first.id)
        client.responses.create(model="m", input="bye")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "bye"}])

    agent()
    found = recording.trajectory.token_sequences()
    causes = [drop.cause for drop in found.dropped if drop.cause == "media"]
    assert (len(found), causes) == (2, ["media", "media"])


# --- sampling and mode


def test_rows_have_the_sampling_and_the_mode(recording: Recording, clients: Clients):
    """The request's members by their names; where calls differ, those of each."""
    client = clients.sync(clients.serve(["a", "b", "c"]))

    @rollout
    def agent(*temperatures: float) -> None:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for temperature in temperatures:
            made = client.chat.completions.create(
                model="m", messages=messages, temperature=temperature, extra_body={"top_k": 3}
            )
            messages += [made.choices[0].message.model_dump(exclude_none=True), messages[0]]

    configure(logprobs_mode="processed")
    agent(1.7)
    agent(1.7, 0.5)
    one, two = recording.trajectories
    (row,) = to_token_rows(one)
    assert row["sampling"] == {"temperature": 1.7, "top_k": 3}
    (row,) = to_token_rows(two)
    assert [each["temperature"] for each in row["sampling"]] == [1.7, 0.5]
    assert (row["logprobs_mode"], row["logprobs_modes"]) == ("processed", ["processed"] * 2)
    again = Trajectory.from_json(two.to_json())
    assert to_token_rows(again) == to_token_rows(two)
    table = to_token_rows([one, two]).to_arrow()
    assert table.column("logprobs_mode").to_pylist() == ["processed"] * 2
    assert json.loads(table.column("sampling")[0].as_py()) == {"temperature": 1.7, "top_k": 3}


@pytest.mark.parametrize(
    ("mode", "more", "said"),
    [
        (None, {"temperature": 1.7}, "whether their log-probabilities are of that is not known"),
        ("raw", {"top_p": 0.9}, "their log-probabilities are from before that"),
        ("raw", {"extra_body": {"repetition_penalty": 1.1}}, "with repetition_penalty=1.1, and"),
        ("processed", {"temperature": 1.7}, None),
        (None, {"temperature": 1, "top_p": 1, "frequency_penalty": 0}, None),
        (None, {"extra_body": {"top_k": -1, "min_p": 0.0}}, None),
    ],
)
def test_check_names_samplers(
    recording: Recording, clients: Clients, mode: Any, more: Any, said: str | None
):
    """Where a sampler is on, and log-probabilities are not known to be of what was sampled from."""
    configure(logprobs_mode=mode)
    trajectory = called(recording, clients, Reply("hi"), **more)
    found = [each for each in findings_of(trajectory) if "were sampled with" in each.text]
    assert len(found) == (said is not None)
    assert all(said in each.text and each.kind == "inexact" for each in found if said)


# --- how much


def test_rows_are_made_one_at_a_time(recording: Recording, clients: Clients):
    """An export holds one row, however many share a prompt."""
    trajectory = called(
        recording, clients, "hi", n=20, messages=[{"role": "user", "content": "x" * 20_000}]
    )
    group = TrajectoryGroup([trajectory])

    def peak(take: Any) -> int:
        tracemalloc.start()
        take(TokenRows().rows(group))
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    peak(list)  # what is read once is read now
    assert 6 * peak(lambda rows: [len(row["input_ids"]) for row in rows]) < peak(list)


def test_the_rows_of_a_trajectory_have_a_bound(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """What is beyond is dropped with the reason: a small file can name one prompt many times."""
    trajectory = called(recording, clients, "hi", n=4)
    length = len(trajectory.token_sequences()[0])
    monkeypatch.setattr(tokens, "ROW_IDS", 2 * length)
    found = trajectory.token_sequences()
    assert (len(found), [drop.cause for drop in found.dropped]) == (2, ["too_many"] * 2)
    assert f"more than {2 * length} token ids" in found.dropped[0].reason


@pytest.mark.parametrize("more", [0, 70_000], ids=["short", "long"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_beside_choices(
    recording: Recording, clients: Clients, stream: bool, more: int
) -> None:
    """Whatever was sampled, and however much of it, it is no whole reply."""
    error: Json = {"error": {"message": "provider disconnected", "code": 502}}
    body: Json = json.loads(reply([choice(0, [5])], 1, stream=False).body)
    body["choices"][0]["message"]["content"] = "x" * more
    if stream:
        part = body["choices"][0]
        part["delta"] = part.pop("message")
        lines = [f"data: {json.dumps(each)}\n\n".encode() for each in (error, body)]
        answer = Raw(chunks=[*lines, b"data: [DONE]\n\n"], content_type="text/event-stream")
    else:
        answer = Raw(body=json.dumps(body | error).encode())
    url = f"{clients.serve(answer).base_url}/chat/completions"
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with rollout("agent") as trajectory:
        requests.post(url, json=asked, timeout=30)
    (completion,) = trajectory.completions
    assert completion.status == "error"
    assert "provider disconnected" in str(completion.error)
    assert trajectory.token_sequences() == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_embeds"])
def test_media_without_a_type(recording: Recording, clients: Clients, kind: str) -> None:
    """A part that is named by its member alone, as some servers take it."""
    part = {kind: IMAGE["image_url"] if kind == "image_url" else {"data": "AA==", "format": "wav"}}
    messages = [{"role": "user", "content": [part]}]
    answer = reply([choice(0, [5])], 1, stream=False)
    found = called(recording, clients, answer, messages=messages)
    assert [drop.cause for drop in found.token_sequences().dropped] == ["media"]
