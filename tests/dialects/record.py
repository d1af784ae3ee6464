"""Records what other instrumentations write: the fixtures beside this file, from real runs.

For each dialect `recorded/{dialect}.jsonl` has its spans, as OTLP/JSON lines, and
`recorded/{dialect}.wire.jsonl` has what our model server saw and sent meanwhile. How to run it,
and with which versions, is in README.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
ARGUMENTS = '{"a": 1.50,\n  "b": "\\u00fc"}'
"""Valid JSON that does not survive being parsed and written anew."""
SERVED = {"model": "org/served-model", "system_fingerprint": "fp"}
"""Another model than the one that was asked for."""

REPLIES: dict[str, Any] = {
    "abandoned": ["A reply that is long enough for several events."],
    "cancelled": [Reply("late", delay=6), "Here."],
    "chat": [Reply("Paris.", extra=SERVED), Reply("Lima.", extra=SERVED)],
    "choices": [Reply(choices=[Reply("a"), Reply("b", finish_reason="length")]), "Yes."],
    "completions": ["upon a time", "there was"],
    "cut": [Reply("A reply that is long enough for several events.", cut_after=4)],
    "embeddings": [],
    "error": [
        Raw(400, b'{"error":{"message":"too many tokens","type":"invalid_request_error"}}'),
        "Fine.",
    ],
    "image": ["A cat.", "Yes."],
    "long": ["70", "71"],
    "parallel_tools": [
        Reply("Both.", tool_calls=[ToolCall("add", ARGUMENTS), ToolCall("add", '{"a": 2}')]),
        "3.5 and 3.5",
    ],
    "part_list": ["Three.", "Four."],
    "reasoning": [Reply("So.", reasoning="Let me think."), "That is it."],
    "refusal": [Reply(refusal="I would rather not."), "Well, then."],
    "remote_image": ["A cat.", "Yes."],
    "responses": [Reply(tool_calls=[ToolCall("add", ARGUMENTS)]), "3.5", "4.5"],
    "responses_stream": ["Hello."],
    "stream": [Reply("Paris.", extra=SERVED), Reply("Lima.", extra=SERVED)],
    "stream_reasoning": [Reply("So.", reasoning="Let me think.")],
    "stream_refusal": [Reply(refusal="I would rather not.")],
    "stream_tools": [Reply(tool_calls=[ToolCall("add", ARGUMENTS)]), "It is 3.5."],
    "structured": ['{"city": "Lima"}'],
    "tokens": ["ok", "ok"],
    "tools": [Reply(tool_calls=[ToolCall("add", ARGUMENTS)]), "It is 3.5."],
    "value_limit": ["z" * 160, "ok"],
}
RUNS: list[tuple[list[str], dict[str, str]]] = [
    (sorted(REPLIES.keys() - {"value_limit"}), {}),
    (["value_limit"], {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "128"}),
]
BOTH = ["chat", "error", "stream", "stream_tools", "tools"]
"""What is recorded under two instrumentations at once."""
CONTENT = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY"}
ENVIRONMENT = {
    "genai": CONTENT,
    "openai-v2": {**CONTENT, "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"},
    # Long enough for the texts, too short for the picture.
    "openinference": {"OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH": "100"},
}


def record(dialect: str, python: str) -> None:
    spans, wire = RECORDED / f"{dialect}.jsonl", RECORDED / f"{dialect}.wire.jsonl"
    spans.unlink(missing_ok=True)
    wire.unlink(missing_ok=True)
    runs = [(BOTH, dict[str, str]())] if dialect == "both" else RUNS
    for names, environment in runs:
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(
                    ModelServer(
                        REPLIES[name], token_ids=name == "tokens", logprobs=name == "tokens"
                    )
                )
                for name in names
            }
            urls = json.dumps({name: server.base_url for name, server in servers.items()})
            plain = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
            subprocess.run(
                [python, str(HERE / "agent.py"), dialect, str(spans), urls],
                env={**plain, **environment, **ENVIRONMENT.get(dialect, {})},
                check=True,
            )
            with wire.open("a", encoding="utf-8") as file:
                for name, server in servers.items():
                    for exchange in server.exchanges:
                        row = {
                            "scenario": name,
                            "path": exchange.path,
                            "request": json.loads(exchange.request),
                            "status": exchange.status,
                            "response": exchange.response.decode(),
                        }
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record(*sys.argv[1:])
