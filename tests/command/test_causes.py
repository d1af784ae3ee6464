"""Reports of commands: a cause once, with its count, one id, and what to do about it there."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from otel_rollout import NotARolloutError, gather_group, gather_trajectories, rollout
from otel_rollout.command.cli import main
from otel_rollout.record import request_token_ids
from otel_rollout.terminal import for_commands, without_ids_and_numbers
from otel_rollout.testing import ModelServer
from tests.command.exports import trajectories_of
from tests.kit.recording import Recording


@pytest.fixture
def without_ids(recording: Recording, tmp_path: Path) -> str:
    """A file of trajectories of one to three calls, whose server was not asked for token ids."""
    with ModelServer() as server, OpenAI(base_url=server.base_url, api_key="x") as client:
        for group in range(12):
            with rollout("agent", group_id=f"algebra-{group}", sample_index=0, group_size=2):
                for turn in range(1 + group % 3):
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hi" * (turn + 1)}]
                    )
    return trajectories_of(recording.trajectories, tmp_path / "t.jsonl")


def test_export_prints_a_cause_once(without_ids: str, tmp_path: Path, capsys: Any):
    """Twelve groups and 24 replies of one cause each are a line each, with one id and an option."""
    assert main(["export", "--to", "tokens", without_ids, "-o", str(tmp_path / "rows")]) == 1
    said = capsys.readouterr().err
    assert said.count("sends token ids") == 1
    assert said.count("sample … missing (such as algebra-0)") == 1
    assert "--request-token-ids" in said
    assert " N " not in said
    assert len(said) < 1500


def test_check_has_no_numbers_of_the_first(without_ids: str, capsys: Any):
    """What is printed for all of them has no count of one of them, and no count of tokens."""
    assert main(["check", without_ids, "--require", "tokens,exact,reward"]) == 1
    out = capsys.readouterr().out
    assert "12 fail: tokens 12, exact 12, reward 12" in out
    assert "12 tokens" not in out
    assert "--request-token-ids" in out


def asked(recording: Recording, path: Path, content: Any, params: Any) -> str:
    """A file with the trajectory of one call that asks for token ids."""
    with (
        ModelServer() as server,
        OpenAI(base_url=server.base_url, api_key="x") as client,
        rollout("agent"),
        request_token_ids(),
    ):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], **params
        )
    return trajectories_of(recording.trajectories, path / "t.jsonl")


@pytest.mark.parametrize(
    ("content", "params", "said"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], {}, "on_media=keep"),
        ("hi", {"extra_body": {"use_beam_search": True}}, "Sample without beams"),
    ],
    ids=["image", "beams"],
)
def test_check_says_what_to_do_where_nothing_trains(
    recording: Recording, tmp_path: Path, capsys: Any, content: Any, params: Any, said: str
):
    """The advice is that of the reply that no row trains, as `export` prints it."""
    path = asked(recording, tmp_path, content, params)
    assert main(["check", path, "--require", "tokens"]) == 1
    assert said in capsys.readouterr().out
    assert main(["export", "--to", "tokens", path, "-o", str(tmp_path / "rows")]) == 1
    assert said in capsys.readouterr().err


def test_check_names_the_option_for_the_mode(recording: Recording, tmp_path: Path, capsys: Any):
    """Where nobody knows what log-probabilities are of, an agent may be behind a gateway."""
    path = asked(recording, tmp_path, "hi", {"temperature": 0.5})
    assert main(["check", path, "--require", "exact"]) == 1
    assert "`--logprobs-mode processed` at `run` and `gateway`" in capsys.readouterr().out


def test_parts_that_differ_in_ids_alone_are_one():
    """A reason that lists replies is the same for any number of them."""
    one = "t has none: chatcmpl-01: no ids. Run it again"
    three = (
        "t has none: chatcmpl-02: no ids; chatcmpl-3f: no ids; chatcmpl-04: no ids. Run it again"
    )
    assert without_ids_and_numbers(three) == without_ids_and_numbers(one)


def test_remedies_are_options():
    """An argument that is an option of the command is written as one; any other stays."""
    text = "take it with on_failure='keep', mask_truncated=True or other='x'"
    expected = "take it with --option on_failure=keep, --option mask_truncated=True or other='x'"
    assert for_commands(text, ["on_failure", "mask_truncated"]) == expected


def test_a_call_without_with_warns():
    """`request_token_ids()` that nobody enters does nothing, and warns; entered it does not."""
    with pytest.warns(RuntimeWarning, match="was called without `with`"):
        request_token_ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with request_token_ids():
            pass


@pytest.mark.parametrize("gather", [gather_trajectories, gather_group])
@pytest.mark.usefixtures("recording")
def test_one_coroutine_several_times(gather: Any):
    """One coroutine given four times is named as that, not as a missing `configure()`."""

    @rollout
    async def agent() -> None:
        await asyncio.sleep(0)

    async def run() -> object:
        return await gather([agent()] * 4)

    with pytest.raises(NotARolloutError, match="agent' was given several times"):
        asyncio.run(run())


def test_a_backend_that_does_not_answer(capsys: Any):
    """The address is in the sentence, and what to do."""
    assert main(["list", "http://127.0.0.1:9/projects/x"]) == 1
    said = capsys.readouterr().err
    assert "Phoenix at http://127.0.0.1:9 does not answer" in said
    assert "check the address" in said
