"""Tokens of a row with all that is known of each: text, log-probability, alternatives, entropy.

Texts are those that came with log-probabilities: at the place itself, or of the same id anywhere in
the trajectory if it has one text everywhere. What did not come is looked up in a tokenizer that
the user names; without one it is not known. Nothing is guessed.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import Completion, TokenSequence, Trajectory
from otel_rollout.view.page_types import Alternative as ShownAlternative
from otel_rollout.view.page_types import TokenWindow
from otel_rollout.wire import Alternative, alternatives, prompt_texts, sampled_texts

MOST_TOKENS = 4096
"""Tokens of one window."""
_MOST_ALTERNATIVES = 20
_HERE, _ELSEWHERE, _TOKENIZER, _UNKNOWN = "het-"
"""Where a token's text is from: it came here, or with the same id elsewhere, or not at all."""


class Vocabulary(Protocol):
    """Gives the texts of token ids. Any thread may ask."""

    def text(self, id_: int) -> str | None:
        """The text of a token; None for an id that it does not have."""


class Tokenizer:
    """The vocabulary of a tokenizer: a file `tokenizer.json`, a folder with one, or a name on the
    model hub. ConfigurationError without the package `tokenizers`, or where there is none.
    """

    def __init__(self, name: str) -> None:
        try:
            tokenizers: Any = import_module("tokenizers")
        except ImportError:
            raise ConfigurationError(
                f"the tokenizer {name!r} needs the package tokenizers: pip install tokenizers"
            ) from None
        path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
        way = "from_file" if os.path.exists(path) else "from_pretrained"
        try:
            self._tokenizer = getattr(tokenizers.Tokenizer, way)(path)
        except Exception as error:  # the package raises no other
            raise ConfigurationError(
                f"expected a tokenizer.json, a folder with one or a name on the model hub, got "
                f"{name!r} ({error})"
            ) from None

    def text(self, id_: int) -> str | None:
        """The text of a token; one that is only a part of a character as the vocabulary has it."""
        piece = self._tokenizer.id_to_token(id_)
        if piece is None:
            return None
        text: str = self._tokenizer.decode([id_], skip_special_tokens=False)
        if not text or "\ufffd" in text:
            return str(piece)
        # Where "▁" stands for a space, decoding drops that of a first token.
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text


class Tokens:
    """The tokens of the rows of one trajectory."""

    def __init__(
        self,
        trajectory: Trajectory,
        rows: Sequence[TokenSequence],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._completions = trajectory.completions
        self._number = {completion: n for n, completion in enumerate(self._completions)}
        self._rows = rows
        self._vocabulary = vocabulary
        self._alternatives: dict[Completion, list[list[Alternative]]] = {}

    def window(self, row: int, start: int, count: int) -> TokenWindow:
        """What is known of `count` tokens of a row from `start` on.

        LookupError where there is no such row.
        """
        if not 0 <= row < len(self._rows):
            raise LookupError(f"row: expected 0 to {len(self._rows) - 1}, got {row}")
        tokens, start = self._rows[row], max(0, start)
        end = min(len(tokens), start + max(0, count))
        places = [self._span(tokens, place) for place in range(start, end)]
        texts = [self._text(tokens, start + n, span) for n, span in enumerate(places)]
        listed = [self._listed(tokens, start + n, span) for n, span in enumerate(places)]
        logprobs = [_known(tokens, place) for place in range(start, end)]
        return {
            "row": row,
            "start": start,
            "length": len(tokens),
            "ids": tokens.token_ids[start:end],
            "texts": [text for text, _ in texts],
            "logprobs": logprobs,
            "mask": tokens.loss_mask[start:end],
            "sampled": tokens.sampled[start:end],
            "completions": [
                None if span is None else self._number[tokens.completions[span]] for span in places
            ],
            "alternatives": {str(n): self._shown(each) for n, each in enumerate(listed) if each},
            "entropy": [entropy(each) for each in listed],
            "textsFrom": "".join(origin for _, origin in texts),
        }

    def text(self, id_: int) -> str | None:
        """The text of an id; None where it is not known."""
        return self._of_id(id_)[0]

    def _of_id(self, id_: int) -> tuple[str | None, str]:
        known = self._texts.get(id_)
        if known is not None:
            return readable(known), _ELSEWHERE
        text = self._vocabulary.text(id_) if self._vocabulary is not None else None
        return text, _UNKNOWN if text is None else _TOKENIZER

    def _text(self, tokens: TokenSequence, place: int, span: int | None) -> tuple[str | None, str]:
        if span is not None:
            texts = self._sampled.get(tokens.completions[span], ())
            at = place - tokens.spans[span][1]
            if at < len(texts) and (own := texts[at]) is not None:
                return readable(own), _HERE
        return self._of_id(tokens.token_ids[place])

    def _listed(self, tokens: TokenSequence, place: int, span: int | None) -> list[Alternative]:
        if span is None:
            return []
        completion = tokens.completions[span]
        if completion not in self._alternatives:
            found, ids = alternatives(completion.choice), completion.token_ids or ()
            self._alternatives[completion] = found if len(found) == len(ids) else []
        found, at = self._alternatives[completion], place - tokens.spans[span][1]
        return found[at] if at < len(found) else []

    def _shown(self, listed: list[Alternative]) -> list[ShownAlternative]:
        return [
            {"text": self._named(each), "id": each.id, "logprob": each.logprob}
            for each in listed[:_MOST_ALTERNATIVES]
            if math.isfinite(each.logprob)
        ]

    def _named(self, each: Alternative) -> str:
        if each.text is not None:
            return readable(each.text)
        text = None if each.id is None else self.text(each.id)
        return f"token {each.id}" if text is None else text

    @staticmethod
    def _span(tokens: TokenSequence, place: int) -> int | None:
        """The place in `spans` of the completion that sampled a token; None: nobody did."""
        found = bisect_right(tokens.spans, place, key=lambda span: span[1]) - 1
        return found if found >= 0 and place < tokens.spans[found][2] else None

    @cached_property
    def _sampled(self) -> dict[Completion, list[bytes | None]]:
        """The texts of the tokens of each completion, of those that have one for each."""
        found = {}
        for completion in self._completions:
            texts, ids = sampled_texts(completion.choice), completion.token_ids or ()
            if texts and len(texts) == len(ids):
                found[completion] = texts
        return found

    @cached_property
    def _texts(self) -> Mapping[int, bytes]:
        """The texts of ids that have the same one wherever it came."""
        found: dict[int, bytes] = {}
        several = set[int]()

        def see(id_: int | None, text: bytes | None) -> None:
            if id_ is not None and text is not None and found.setdefault(id_, text) != text:
                several.add(id_)

        for completion in self._completions:
            for id_, text in zip(
                completion.token_ids or (), self._sampled.get(completion, ()), strict=False
            ):
                see(id_, text)
            reply = completion.exchange.reply
            whole = reply if isinstance(reply, Mapping) else {}
            for id_, text in prompt_texts(completion.choice, whole).items():
                see(id_, text)
        return {id_: text for id_, text in found.items() if id_ not in several}


def readable(text: bytes) -> str:
    """The text of a token, with escapes for bytes that are only a part of a character."""
    return text.decode("utf-8", "backslashreplace")


def entropy(listed: Sequence[Alternative]) -> float | None:
    """Nats over the tokens that are listed at a place: a lower bound; None where none are."""
    if not listed:
        return None
    terms = (-math.exp(a.logprob) * a.logprob for a in listed if math.isfinite(a.logprob))
    return max(0.0, math.fsum(terms))


def _known(tokens: TokenSequence, place: int) -> float | None:
    value = tokens.logprobs[place]
    return value if tokens.sampled[place] and math.isfinite(value) else None
