"""Windows of tokens: what the server sent of each, and nothing that it did not send."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, rollout
from otel_rollout.errors import ConfigurationError
from otel_rollout.view.tokens import Tokenizer, Tokens, entropy
from otel_rollout.wire import Alternative
from tests.kit.conversations import said, user
from tests.kit.recording import Clients, Recording
from tests.view.made import Call, made

HI = user("hi")


def entries(*texts: str, **more: Any) -> Any:
    """Log-probabilities of a chat, one entry for each text."""
    return {"logprobs": {"content": [{"token": t, "logprob": -0.5, **more} for t in texts]}}


def window(trajectory: Trajectory, row: int = 0, vocabulary: Any = None) -> Any:
    """All tokens of a row."""
    tokens = Tokens(trajectory, trajectory.token_sequences(), vocabulary)
    return tokens.window(row, 0, 1000)


class Letters:
    """A vocabulary in which 1 is `<1>`, and which ends at 100."""

    def text(self, id_: int) -> str | None:
        """The text of an id."""
        return f"<{id_}>" if id_ < 100 else None


def test_a_row_of_a_real_call(recording: Recording, clients: Clients):
    """All lists are aligned, and alternatives stand at their place."""
    client = clients.sync(clients.serve("Paris"))
    with rollout("agent"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "a P"}],
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )
    (row,) = recording.trajectory.token_sequences()
    found = window(recording.trajectory)
    assert found["ids"] == row.token_ids
    assert found["length"] == len(row)
    start = row.prompt_length
    assert found["texts"][start:] == ["P", "a", "r", "i", "s", "<|end|>"]
    assert found["texts"][:start] == [None, "a", None, "P", "<|end|>", None]
    assert found["textsFrom"] == "-e-ee-" + "h" * 6
    assert found["mask"] == found["sampled"] == [0] * start + [1] * 6
    assert found["completions"] == [None] * start + [0] * 6
    assert found["logprobs"] == [None] * start + row.logprobs[start:]
    first = found["alternatives"][str(start)]
    assert [each["text"] for each in first] == ["P", "Q"]
    logprobs = [each["logprob"] for each in first]
    expected = -sum(math.exp(value) * value for value in logprobs)
    assert found["entropy"][start] == pytest.approx(expected)
    assert found["entropy"][:start] == [None] * start


def test_a_window_is_a_part_of_a_row():
    """It says where it begins and how long the row is; beyond its end there is nothing."""
    trajectory = made(Call([HI], prompt_ids=[1, 2, 3], ids=[4, 5], choice=entries("a", "b")))
    tokens = Tokens(trajectory, trajectory.token_sequences())
    part = tokens.window(0, 2, 2)
    assert (part["start"], part["length"], part["ids"]) == (2, 5, [3, 4])
    assert part["texts"] == [None, "a"]
    assert tokens.window(0, 99, 2)["ids"] == []
    with pytest.raises(LookupError, match="row: expected 0 to 0, got 1"):
        tokens.window(1, 0, 1)


def test_texts_come_from_anywhere_in_the_trajectory():
    """An id whose text came in one reply has it in the prompt of the next."""
    first = Call([HI], prompt_ids=[1], ids=[4, 5], choice=entries("a", "b"))
    second = Call([HI, said("yes"), HI], prompt_ids=[1, 4, 5, 4], ids=[6], choice=entries("c"))
    assert window(made(first, second))["texts"] == [None, "a", "b", "a", "c"]


def test_an_id_with_two_texts_is_not_known_elsewhere():
    """Its own text stands where it came; nothing is guessed in a prompt."""
    first = Call([HI], prompt_ids=[1], ids=[4, 4], choice=entries("a", "A"))
    second = Call([HI, said("yes"), HI], prompt_ids=[1, 4, 4, 4], ids=[6], choice=entries("c"))
    assert window(made(first, second))["texts"] == [None, "a", "A", None, "c"]


def test_texts_of_a_prompt_come_from_its_log_probabilities():
    """VLLM lists them with their texts."""
    listed = [None, {"2": {"logprob": -1.0, "decoded_token": " b"}}]
    call = Call([HI], prompt_ids=[1, 2], ids=[3], extra={"prompt_logprobs": listed})
    assert window(made(call))["texts"] == [None, " b", None]


def test_a_part_of_a_character_is_shown_by_its_bytes():
    """It is not put together with the tokens beside it."""
    choice = {
        "logprobs": {
            "content": [
                {"token": "\\xe2\\x82", "logprob": -0.5, "bytes": [0xE2, 0x82]},
                {"token": "\\xac", "logprob": -0.5, "bytes": [0xAC]},
            ]
        }
    }
    found = window(made(Call([HI], prompt_ids=[1], ids=[7, 8], choice=choice)))
    assert found["texts"] == [None, "\\xe2\\x82", "\\xac"]


def test_without_texts_nothing_is_known():
    """No text, no log-probability, no entropy; the ids are there."""
    found = window(made(Call([HI], prompt_ids=[1, 2], ids=[3, 4])))
    assert found["texts"] == found["logprobs"] == found["entropy"] == [None] * 4
    assert found["alternatives"] == {}
    assert found["textsFrom"] == "----"


def test_a_tokenizer_gives_the_texts_that_did_not_come():
    """The server's own stand first; an id that the tokenizer lacks stays unknown."""
    call = Call([HI], prompt_ids=[1, 200], ids=[4, 5], choice=entries("a", "b"))
    found = window(made(call), vocabulary=Letters())
    assert found["texts"] == ["<1>", None, "a", "b"]
    assert found["textsFrom"] == "t-hh"


def test_alternatives_that_are_ids_get_their_texts():
    """`return_tokens_as_token_ids`: from the tokenizer; without one they are named by the id."""
    top = [{"token": "token_id:7", "logprob": -0.1}, {"token": "token_id:300", "logprob": -2.0}]
    choice = entries("token_id:7", top_logprobs=top)
    call = Call([HI], prompt_ids=[1], ids=[7], choice=choice)
    shown = window(made(call), vocabulary=Letters())["alternatives"]["1"]
    assert [(each["text"], each["id"]) for each in shown] == [("<7>", 7), ("token 300", 300)]
    assert window(made(call))["alternatives"]["1"][0]["text"] == "token 7"


def test_lists_of_another_length_are_left_alone():
    """Texts and alternatives of more tokens than there are ids belong to none of them."""
    top = [{"token": "a", "logprob": -0.1}]
    known = {"meta_info": {"output_token_logprobs": [[-0.5, 7, None]]}}
    choice = entries("a", "b", top_logprobs=top) | known
    found = window(made(Call([HI], prompt_ids=[1], ids=[7], choice=choice)))
    assert found["logprobs"] == [None, -0.5]
    assert found["texts"] == found["entropy"] == [None, None]
    assert found["alternatives"] == {}


def test_a_token_that_two_rows_share_is_of_its_call_in_both():
    """It trains in the first row only."""
    calls = [Call([HI], "one", prompt_ids=[1], ids=[2])]
    for number in (5, 6):
        prompt = [HI, said("one"), user(str(number))]
        calls.append(Call(prompt, prompt_ids=[1, 2, number], ids=[9]))
    first, second = (window(made(*calls), row) for row in (0, 1))
    assert first["completions"] == [None, 0, None, 1]
    assert second["completions"] == [None, 0, None, 2]
    assert (first["mask"], second["mask"]) == ([0, 1, 0, 1], [0, 0, 0, 1])


def test_long_rows_are_read_in_windows():
    """A hundred thousand tokens; a window costs what it holds."""
    ids = list(range(100_000))
    trajectory = made(Call([HI], prompt_ids=[1], ids=ids))
    tokens = Tokens(trajectory, trajectory.token_sequences())
    assert tokens.window(0, 99_000, 4096)["ids"] == ids[98_999:]


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(0, 7))
def test_entropy_of_a_part_is_a_lower_bound(weights: list[float], kept: int):
    """What is not listed would add to it; it is never below zero."""
    total = sum(weights)
    whole = [Alternative(None, n, math.log(w / total)) for n, w in enumerate(weights)]
    part, all_ = entropy(whole[:kept]), entropy(whole)
    assert all_ is not None
    assert -1e-9 <= all_ <= math.log(len(weights)) + 1e-9
    assert part is None if not whole[:kept] else part is not None and part <= all_ + 1e-9


def test_a_tokenizer_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigurationError, match="pip install tokenizers"):
        Tokenizer("some-model")
