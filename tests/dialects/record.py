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
from tests.dialects.agent_kinds import LENGTHS, text_of

ROOT = Path(__file__).parents[2]
RECORDED = Path(os.environ.get("OTEL_ROLLOUT_RECORDED") or Path(__file__).parent / "recorded")
"""Folder of the recordings; `make test-newest` names another."""
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
_CACHED = {
    "usage": {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
}
_ADD = ToolCall("add", ARGUMENTS)
_TWO = (_ADD, ToolCall("add", '{"a": 2}'))
KINDS: dict[str, Any] = {
    "cached": [Reply("So.", extra=_CACHED), Reply("Well.", extra=_CACHED)],
    "custom_tools": [
        Reply(tool_calls=[ToolCall("shell", "ls -l\n", custom=True), _ADD]),
        "One file.",
    ],
    "endings": [
        Reply("and", finish_reason=reason)
        for reason in ("length", "content_filter", "eos", "length", "content_filter")
    ],
    "files": ["Nothing."],
    "functions": ["It is 7."],
    "image_result": ["A dot."],
    "long_reply": [text_of(length) for length in LENGTHS],
    "long_text": ["ok"] * len(LENGTHS),
    "mixed_reply": [Reply("Both.", reasoning="Let me add.", tool_calls=_TWO), "3.5"],
    "named_reasoning": [Reply("So.", message_extra={"reasoning": "Let me think."}), "That is it."],
    "no_result": [Reply(tool_calls=[_ADD]), "Nothing."],
    "odd_texts": ['[{"type": "text", "text": "y"}]', '{"b": 1.50}'],
    "one_tool_part": [Reply(tool_calls=[_ADD]), "3.5"],
    "refused_before": ["Because."],
    "response_format": ['{"city": "Lima"}'],
    "responses_custom": [Reply(tool_calls=[ToolCall("shell", "ls -l\n", custom=True)]), "Done."],
    "responses_reasoning": [Reply("So.", reasoning="Let me think."), "That is it."],
    "responses_tool_stream": [Reply("Both.", tool_calls=_TWO)],
    "responses_tools": [Reply("Both.", tool_calls=_TWO), "3.5 and 3.5"],
    "stream_cached": [Reply("So.", extra=_CACHED)],
    "stream_named_reasoning": [Reply("So.", message_extra={"reasoning": "Let me think."})],
    "streamed_choices": [Reply(choices=[Reply("a"), Reply("b", finish_reason="length")])],
    "tool_parts": [Reply(tool_calls=[_ADD]), "3.5"],
    "tool_texts": [Reply(tool_calls=[_ADD]), "3.5"],
}
REPLIES |= KINDS
_SEARCH = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "redacted_thinking", "data": "b64"},
    {"type": "text", "text": "Found."},
]
_USED = {
    "usage": {
        "input_tokens": 5,
        "cache_creation_input_tokens": 7,
        "cache_read_input_tokens": 16,
        "output_tokens": 4,
    }
}
ANTHROPIC: dict[str, Any] = {
    "abandoned": ["A reply that is long enough for several events."],
    "cached": [Reply("So.", extra=_USED), Reply("Well.", extra=_USED)],
    "chat": [Reply("Paris.", extra={"model": "claude-served"}), "Lima."],
    "count": ["So."],
    "cut": [Reply("A reply that is long enough for several events.", cut_after=5)],
    "endings": [
        # As a server may that is not Anthropic's.
        Reply("and", finish_reason="max_tokens", extra={"token_ids": [1], "logprobs": {}}),
        Reply("and", extra={"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        Reply("and", finish_reason="refusal"),
    ],
    "error": [
        Raw(400, b'{"type":"error","error":{"message":"too many tokens","type":"invalid"}}'),
        "Fine.",
    ],
    "image": ["A dot.", "Yes."],
    "no_content": ["So.", "Well."],
    "odd_blocks": [Reply(message_extra={"content": _SEARCH}), "Well."],
    "part_list": ["Three.", "Four."],
    "raw_stream": ["So."],
    "stream": ["Paris.", "Lima."],
    "stream_thinking": [Reply("So.", reasoning="Let me think."), "That is it."],
    "stream_tools": [Reply("Adding.", tool_calls=[_ADD]), "It is 3.5."],
    "thinking": [Reply("So.", reasoning="Let me think."), "That is it."],
    "tool_image": [Reply(tool_calls=[_ADD]), "A dot."],
    "tool_results": [Reply("Both.", tool_calls=_TWO), "3.5"],
    "tools": [Reply(tool_calls=[_ADD]), "It is 3.5."],
    "truncated": ["z" * 160, "ok"],
    "value_limit": ["z" * 160, "ok"],
}
_MODE = "ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE"
LIMITS = {
    "value_limit": {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "128"},
    "truncated": {"ANTHROPIC_OPEN_TELEMETRY_TRACES_MAX_CONTENT_BYTES": "300"},
    "no_content": {_MODE: "metadata_only"},
}
"""Environment of the scenarios that run under a limit, or without content."""
BOTH = ["chat", "error", "stream", "stream_tools", "tools"]
"""What is recorded under two instrumentations at once."""
EXPORTED = ("langchain", "langfuse", "langsmith", "litellm", "weave")
"""Products whose exports are recorded, not spans."""
CONTENT = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY"}
ENVIRONMENT = {
    "genai": CONTENT,
    "openai-v2": {**CONTENT, "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"},
    "anthropic": {_MODE: "content"},
    # Long enough for the texts, too short for the picture.
    "openinference": {"OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH": "100"},
}


def record(dialect: str, python: str, *names: str) -> None:
    """Record a dialect anew; if `names` are given, only these scenarios, beside those there."""
    spans, wire = RECORDED / f"{dialect}.jsonl", RECORDED / f"{dialect}.wire.jsonl"
    if not names:
        spans.unlink(missing_ok=True)
        wire.unlink(missing_ok=True)
    replies = ANTHROPIC if dialect == "anthropic" else REPLIES
    asked = names or (BOTH if dialect == "both" else sorted(replies))
    if dialect == "langfuse":  # its records are made of attributes that are whole
        asked = [name for name in asked if name not in LIMITS]
    plain = [name for name in asked if name not in LIMITS]
    runs = [(plain, dict[str, str]()), *(([n], LIMITS[n]) for n in asked if n in LIMITS)]
    for run, environment in runs:
        if run:
            _run(dialect, python, {name: replies[name] for name in run}, environment)


def _run(dialect: str, python: str, replies: dict[str, Any], environment: dict[str, str]) -> None:
    spans, wire = RECORDED / f"{dialect}.jsonl", RECORDED / f"{dialect}.wire.jsonl"
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ModelServer(reply, token_ids=name == "tokens", logprobs=name == "tokens")
            )
            for name, reply in replies.items()
        }
        urls = json.dumps({name: server.base_url for name, server in servers.items()})
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
        module = "exported" if dialect in EXPORTED else "instrumented"
        subprocess.run(
            [python, "-m", f"tests.dialects.{module}", dialect, str(spans), urls],
            cwd=ROOT,
            env={**plain, **ENVIRONMENT.get(dialect, {}), **environment},
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
