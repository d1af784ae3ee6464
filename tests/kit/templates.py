"""A toy chat template and tokenizer that drift in known ways, and a rollout of calls through them.

The model samples one token per character. What a prompt is rendered and tokenised with may differ:
reasoning may be left out, tool arguments be written in another form, digits become one token, and
the prefix may change from call to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.testing.bodies import content_text

Message = dict[str, Any]


@dataclass
class Toy:
    """The server's template and tokenizer."""

    drops_reasoning: bool = False
    """Replayed reasoning is not rendered."""
    opens_reasoning: bool = False
    """A prompt ends with the mark that opens reasoning."""
    rewrites_arguments: bool = False
    """Tool arguments are parsed and written anew."""
    merges_digits: bool = False
    """Digits that stand together are one token in a prompt."""
    counts_calls: bool = False
    """A prompt begins with the number of the call, which every call changes."""
    trims: bool = False
    """White space around the content of a reply is left out."""
    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str, *, sampled: bool = False) -> list[int]:
        """The ids of a text; digits may be merged unless they are sampled one by one."""
        digits = r"\d+|" if self.merges_digits and not sampled else ""
        pieces = re.findall(rf"<\|\w+\|>|</?think>|{digits}(?s:.)", text)
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id."""
        pieces = list(self.ids)
        return [pieces[token] for token in ids]

    def said(self, message: Message, *, replayed: bool = False) -> str:
        """The text of a reply, with its end."""
        text, content = "", content_text(message.get("content"))
        if (reasoning := message.get("reasoning_content")) and not (
            replayed and self.drops_reasoning
        ):
            text += f"<think>{reasoning}</think>"
        text += content.strip() if replayed and self.trims else content
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if replayed and self.rewrites_arguments:
                arguments = json.dumps(json.loads(arguments))
            text += f"<|call|>{arguments}"
        return text + "<|end|>"

    def prompt(self, messages: Sequence[Message], number: int) -> list[int]:
        """The ids of the prompt of a call."""
        text = f"<|call_{number}|>" if self.counts_calls else ""
        for message in messages:
            text += f"<|{message['role']}|>"
            if message["role"] == "assistant":
                text += self.said(message, replayed=True)
            else:
                text += f"{message['content']}<|end|>"
        return self.encode(text + "<|assistant|>" + "<think>" * self.opens_reasoning)


@dataclass
class Calls:
    """A rollout's calls to a server with this template, as spans."""

    toy: Toy = field(default_factory=Toy)
    texts: bool = True
    """Whether log-probabilities come, which have the texts of the sampled tokens."""
    writer: ExchangeWriter = field(default_factory=ExchangeWriter)
    spans: list[SpanRecord] = field(default_factory=list)

    def call(
        self,
        messages: Sequence[Message],
        message: Message,
        *,
        ids: bool = True,
        model: str = "m",
        finish: str = "stop",
        sampled: list[int] | None = None,
        prompt: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """One call: the ids of its prompt and of its reply."""
        number = len(self.spans) + 1
        prompt = self.toy.prompt(messages, number) if prompt is None else prompt
        if sampled is None:
            text = self.toy.said(message)
            text = text.removeprefix("<think>") if self.toy.opens_reasoning else text
            text = text.removesuffix("<|end|>") if finish == "length" else text
            sampled = self.toy.encode(text, sampled=True)
        entries = [{"token": text, "logprob": -0.5} for text in self.toy.texts(sampled)]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "message": {"role": "assistant", **message},
            "token_ids": sampled if ids else None,
            "logprobs": {"content": entries} if self.texts else None,
        }
        reply: Message = {"id": f"c{number}", "model": model, "choices": [choice]}
        reply["prompt_token_ids"] = prompt if ids else None
        self._record(number, {"model": model, "messages": list(messages)}, reply)
        return prompt, sampled

    def _record(self, number: int, body: Message, reply: Message) -> None:
        attributes = {
            sc.EXCHANGE_VERSION: 1,
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: number,
            sc.EXCHANGE_ENDED: number,
            sc.EXCHANGE_STATUS: "complete",
            sc.REQUEST_PATH: "/chat/completions",
            **self.writer.request(json.dumps(body).encode()),
            **self.writer.response(json.dumps(reply).encode()),
        }
        self._span(f"exchange {number}", number, attributes)

    def _span(self, name: str, start: int, attributes: dict[str, Any]) -> None:
        span_id = f"{len(self.spans) + 1:016x}"
        attributes = with_lengths({sc.ROLLOUT_ID: "r", **attributes})
        self.spans.append(SpanRecord(name, "1" * 32, span_id, None, start, 10**6, attributes))

    def trajectory(self, *, backwards: bool = False) -> Trajectory:
        """The trajectory of the calls."""
        attributes = {
            sc.ROLLOUT_SCHEMA_VERSION: 1,
            sc.ROLLOUT_STATUS: "complete",
            sc.ROLLOUT_PROCESS: "p",
            sc.ROLLOUT_EXCHANGE_COUNT: len(self.spans),
            sc.ROLLOUT_OPEN_COUNT: 0,
        }
        calls = list(self.spans)
        self._span("invoke_agent x", 0, attributes)
        spans, self.spans = self.spans, calls
        (trajectory,) = reconstruct(spans[::-1] if backwards else spans)
        return trajectory


def calling(arguments: str, number: int = 0) -> list[Message]:
    """The tool calls of a reply: one, with these arguments."""
    function = {"name": "f", "arguments": arguments}
    return [{"id": f"call_{number}", "type": "function", "function": function}]
