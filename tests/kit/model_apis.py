"""A tool loop of two turns in the shapes of model APIs other than OpenAI's and Anthropic's.

The first reply thinks and calls a tool twice, the second answers. Shapes are those of the
providers' references, and what their Python clients send.
"""

from __future__ import annotations

import json
from typing import Any

from tests.kit.talk import Talk, array, frames, lines, sse

Json = dict[str, Any]
CALLS = ({"a": 1, "b": 2}, {"a": 3, "b": 4})
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": PARAMETERS}

# --- Gemini


def _candidate(parts: list[Json], finish: str | None = None, index: int = 0) -> Json:
    ends = {"finishReason": finish} if finish else {}
    return {"content": {"role": "model", "parts": parts}, **ends, "index": index}


def _gemini(number: int, parts: list[Json], finish: str | None = None) -> Json:
    return {
        "candidates": [_candidate(parts, finish)],
        "usageMetadata": {
            "promptTokenCount": 7,
            "candidatesTokenCount": 5,
            "thoughtsTokenCount": 2,
            "totalTokenCount": 14,
        },
        "modelVersion": "gemini-m",
        "responseId": f"response-{number}",
    }


_THOUGHT = {"text": "I add.", "thought": True}
_G_CALLS: list[Json] = [
    {"functionCall": {"name": "add", "args": CALLS[0], "id": "1"}, "thoughtSignature": "c2ln"},
    {"functionCall": {"name": "add", "args": CALLS[1]}},
]
_GEMINI = {
    "replies": (
        _gemini(1, [_THOUGHT, {"text": "Let me see."}, *_G_CALLS], "STOP"),
        _gemini(2, [{"text": "It is 3 and 7.", "thoughtSignature": "c2ln"}], "STOP"),
    ),
    "streams": (
        [
            _gemini(1, [{"text": "I ", "thought": True}]),
            _gemini(1, [{"text": "add.", "thought": True}, {"text": "Let "}]),
            _gemini(1, [{"text": "me see."}, _G_CALLS[0]]),
            _gemini(1, [_G_CALLS[1]], "STOP"),
        ],
        [
            _gemini(2, [{"text": "It is "}]),
            _gemini(2, [{"text": "3 and 7."}]),
            _gemini(2, [{"text": "", "thoughtSignature": "c2ln"}], "STOP"),
        ],
    ),
    "question": {
        "contents": [{"parts": [{"text": "1 + 2 and 3 + 4?"}], "role": "user"}],
        "systemInstruction": {"parts": [{"text": "Add. " * 60}], "role": "user"},
        "tools": [{"functionDeclarations": [FUNCTION]}],
        "generationConfig": {"temperature": 0.5, "maxOutputTokens": 99},
    },
    "said": lambda reply: reply["candidates"][0]["content"],
    "results": lambda said: [
        said,
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "add", "response": {"result": n}}} for n in (3, 7)
            ],
        },
    ],
    "conversation": "contents",
}
_MODEL = "/v1beta/models/gemini-m"
GEMINI = Talk(
    name="gemini",
    path=f"{_MODEL}:generateContent",
    streamed=f"{_MODEL}:streamGenerateContent?alt=sse",
    content_type="text/event-stream",
    framed=sse,
    **_GEMINI,  # type: ignore[arg-type]
)
_VERTEX = "/v1/projects/p/locations/l/publishers/google/models/gemini-m"
GEMINI_ARRAY = Talk(
    name="gemini-array",
    path=f"{_VERTEX}:generateContent",
    streamed=f"{_VERTEX}:streamGenerateContent",
    content_type="application/json; charset=UTF-8",
    framed=array,
    **_GEMINI,  # type: ignore[arg-type]
)

# --- Ollama

_O_CALLS: list[Json] = [
    {"id": f"call_{n}", "function": {"index": n, "name": "add", "arguments": arguments}}
    for n, arguments in enumerate(CALLS)
]
_COUNTS = {"done": True, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 5}


def _ollama(message: Json, **ends: Any) -> Json:
    said = {"role": "assistant", "content": "", **message}
    return {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": said, **ends}


def _replayed_by_ollama(said: Json) -> Json:
    """The Python client leaves out ids and empty texts."""
    calls = [
        {"function": {name: call["function"][name] for name in ("name", "arguments")}}
        for call in said["tool_calls"]
    ]
    return {**{name: value for name, value in said.items() if value}, "tool_calls": calls}


OLLAMA = Talk(
    name="ollama",
    path="/api/chat",
    streamed="/api/chat",
    content_type="application/x-ndjson",
    replies=(
        _ollama({"thinking": "I add.", "tool_calls": _O_CALLS}, **_COUNTS),
        _ollama({"content": "It is 3 and 7."}, **_COUNTS),
    ),
    streams=(
        [
            _ollama({"thinking": "I "}, done=False),
            _ollama({"thinking": "add."}, done=False),
            _ollama({"tool_calls": _O_CALLS[:1]}, done=False),
            _ollama({"tool_calls": _O_CALLS[1:]}, done=False),
            _ollama({}, **_COUNTS),
        ],
        [
            _ollama({"content": "It is "}, done=False),
            _ollama({"content": "3 and 7."}, done=False),
            _ollama({}, **_COUNTS),
        ],
    ),
    framed=lines,
    question={
        "model": "m",
        "messages": [{"role": "user", "content": "1 + 2 and 3 + 4?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "options": {"temperature": 0.5, "num_predict": 99},
    },
    said=lambda reply: reply["message"],
    results=lambda said: [
        _replayed_by_ollama(said),
        *({"role": "tool", "tool_name": "add", "content": n} for n in ("3", "7")),
    ],
)

# --- Cohere

_C_CALLS: list[Json] = [
    {
        "id": f"add_{n}",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps(arguments)},
    }
    for n, arguments in enumerate(CALLS)
]
_C_USAGE = {
    "billed_units": {"input_tokens": 1, "output_tokens": 1},
    "tokens": {"input_tokens": 7.0, "output_tokens": 5.0},
}


def _delta(kind: str, index: int | None = None, **message: Any) -> Json:
    place = {} if index is None else {"index": index}
    return {"type": kind, **place, "delta": {"message": message}}


def _call_events(index: int, call: Json) -> list[Json]:
    text = call["function"]["arguments"]
    opened = {**call, "function": {"name": "add", "arguments": ""}}
    return [
        _delta("tool-call-start", index, tool_calls=opened),
        *(
            _delta("tool-call-delta", index, tool_calls={"function": {"arguments": piece}})
            for piece in (text[:5], text[5:])
        ),
        {"type": "tool-call-end", "index": index},
    ]


_OPENED: Json = {
    "role": "assistant",
    "content": [],
    "tool_plan": "",
    "tool_calls": [],
    "citations": [],
}
COHERE = Talk(
    name="cohere",
    path="/v2/chat",
    streamed="/v2/chat",
    content_type="text/event-stream",
    replies=(
        {
            "id": "c1",
            "finish_reason": "TOOL_CALL",
            "message": {"role": "assistant", "tool_plan": "I add.", "tool_calls": _C_CALLS},
            "usage": _C_USAGE,
        },
        {
            "id": "c2",
            "finish_reason": "COMPLETE",
            "message": {
                "role": "assistant",
                "content": [{"type": "text", "text": "It is 3 and 7."}],
            },
            "usage": _C_USAGE,
        },
    ),
    streams=(
        [
            {"id": "c1", **_delta("message-start", **_OPENED)},
            _delta("tool-plan-delta", tool_plan="I "),
            _delta("tool-plan-delta", tool_plan="add."),
            *(event for n, call in enumerate(_C_CALLS) for event in _call_events(n, call)),
            {
                "type": "message-end",
                "delta": {"finish_reason": "TOOL_CALL", "usage": _C_USAGE},
            },
        ],
        [
            {"id": "c2", **_delta("message-start", **_OPENED)},
            _delta("content-start", 0, content={"type": "text", "text": ""}),
            _delta("content-delta", 0, content={"text": "It is "}),
            _delta("content-delta", 0, content={"text": "3 and 7."}),
            {"type": "content-end", "index": 0},
            {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": _C_USAGE}},
        ],
    ),
    framed=sse,
    question={
        "model": "command",
        "messages": [{"role": "user", "content": "1 + 2 and 3 + 4?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "temperature": 0.5,
        "max_tokens": 99,
    },
    said=lambda reply: reply["message"],
    results=lambda said: [
        said,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": n}
            for call, n in zip(said["tool_calls"], ("3", "7"), strict=True)
        ),
    ],
)

# --- Bedrock's Converse

_B_CALLS: list[Json] = [
    {"toolUse": {"toolUseId": f"t{n}", "name": "add", "input": arguments}}
    for n, arguments in enumerate(CALLS)
]
_B_ENDS = {"usage": {"inputTokens": 7, "outputTokens": 5, "totalTokens": 12}}
_B_THOUGHT = {"reasoningContent": {"reasoningText": {"text": "I add.", "signature": "c2ln"}}}


def _converse(content: list[Json], reason: str) -> Json:
    message = {"role": "assistant", "content": content}
    return {
        "metrics": {"latencyMs": 3},
        "output": {"message": message},
        "stopReason": reason,
        **_B_ENDS,
    }


def _block(index: int, *deltas: Json, start: Json | None = None) -> list[Json]:
    opened = [] if start is None else [{"start": start, "contentBlockIndex": index}]
    return [
        *({"contentBlockStart": event} for event in opened),
        *({"contentBlockDelta": {"delta": d, "contentBlockIndex": index}} for d in deltas),
        {"contentBlockStop": {"contentBlockIndex": index}},
    ]


def _use_events(index: int, block: Json) -> list[Json]:
    use = block["toolUse"]
    text = json.dumps(use["input"])
    start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
    pieces = [{"toolUse": {"input": piece}} for piece in ("", text[:4], text[4:])]
    return _block(index, *pieces, start=start)


def _metadata() -> Json:
    return {"metadata": {**_B_ENDS, "metrics": {"latencyMs": 3}}}


_BEDROCK = "/model/us.anthropic.claude-m%3A0"
CONVERSE = Talk(
    name="converse",
    path=f"{_BEDROCK}/converse",
    streamed=f"{_BEDROCK}/converse-stream",
    content_type="application/vnd.amazon.eventstream",
    replies=(
        _converse([_B_THOUGHT, {"text": "Let me see."}, *_B_CALLS], "tool_use"),
        _converse([{"text": "It is 3 and 7."}], "end_turn"),
    ),
    streams=(
        [
            {"messageStart": {"role": "assistant"}},
            *_block(
                0,
                {"reasoningContent": {"text": "I add."}},
                {"reasoningContent": {"signature": "c2ln"}},
            ),
            *_block(1, {"text": "Let me "}, {"text": "see."}),
            *_use_events(2, _B_CALLS[0]),
            *_use_events(3, _B_CALLS[1]),
            {"messageStop": {"stopReason": "tool_use"}},
            _metadata(),
        ],
        [
            {"messageStart": {"role": "assistant"}},
            *_block(0, {"text": "It is "}, {"text": "3 and 7."}),
            {"messageStop": {"stopReason": "end_turn"}},
            _metadata(),
        ],
    ),
    framed=frames,
    question={
        "messages": [{"role": "user", "content": [{"text": "1 + 2 and 3 + 4?"}]}],
        "system": [{"text": "Add. " * 60}],
        "toolConfig": {
            "tools": [
                {
                    "toolSpec": {
                        "name": "add",
                        "description": "adds",
                        "inputSchema": {"json": PARAMETERS},
                    }
                }
            ]
        },
        "inferenceConfig": {"temperature": 0.5, "maxTokens": 99},
    },
    said=lambda reply: reply["output"]["message"],
    results=lambda said: [
        said,
        {
            "role": "user",
            "content": [
                {
                    "toolResult": {
                        "toolUseId": f"t{n}",
                        "content": [{"json": {"sum": total}}],
                        "status": "success",
                    }
                }
                for n, total in enumerate((3, 7))
            ],
        },
    ],
)

# --- Mistral


def _mistral(number: int, content: Any, calls: list[Json], finish: str) -> Json:
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return {
        "id": f"m{number}",
        "object": "chat.completion",
        "model": "magistral-m",
        "created": 1,
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
    }


def _mistral_chunk(number: int, delta: Json, finish: str | None = None) -> Json:
    usage = {"usage": _mistral(0, "", [], "stop")["usage"]} if finish else {}
    return {
        "id": f"m{number}",
        "object": "chat.completion.chunk",
        "model": "magistral-m",
        "created": 1,
        "choices": [{"index": 0, "finish_reason": finish, "delta": delta}],
        **usage,
    }


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}


_M_CALLS: list[Json] = [
    {"id": call["id"], "function": call["function"], "index": n} for n, call in enumerate(_C_CALLS)
]


def _replayed_by_mistral(said: Json) -> Json:
    """The Python client adds types, and whether the reply goes on."""
    return {**said, "tool_calls": [{**c, "type": "function"} for c in said["tool_calls"]]} | {
        "prefix": False
    }


_PLAIN_CALLS = [{name: call[name] for name in ("id", "function")} for call in _M_CALLS]
MISTRAL = Talk(
    name="mistral",
    path="/v1/chat/completions",
    streamed="/v1/chat/completions",
    content_type="text/event-stream",
    replies=(
        _mistral(
            1,
            [_thinking("I add."), {"type": "text", "text": "Let me see."}],
            _PLAIN_CALLS,
            "tool_calls",
        ),
        _mistral(2, "It is 3 and 7.", [], "stop"),
    ),
    streams=(
        [
            _mistral_chunk(1, {"role": "assistant", "content": ""}),
            _mistral_chunk(1, {"content": [_thinking("I ")]}),
            _mistral_chunk(1, {"content": [_thinking("add.")]}),
            _mistral_chunk(1, {"content": "Let me "}),
            _mistral_chunk(1, {"content": "see."}),
            _mistral_chunk(1, {"tool_calls": _M_CALLS}, "tool_calls"),
        ],
        [
            _mistral_chunk(2, {"role": "assistant", "content": "It is "}),
            _mistral_chunk(2, {"content": "3 and 7."}),
            _mistral_chunk(2, {"content": ""}, "stop"),
        ],
    ),
    framed=lambda chunks: [*sse(chunks), b"data: [DONE]\n\n"],
    question={
        "model": "magistral-m",
        "messages": [{"role": "user", "content": "1 + 2 and 3 + 4?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "temperature": 0.5,
        "max_tokens": 99,
    },
    said=lambda reply: reply["choices"][0]["message"],
    results=lambda said: [
        _replayed_by_mistral(said),
        *(
            {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": n}
            for call, n in zip(said["tool_calls"], ("3", "7"), strict=True)
        ),
    ],
)

TALKS = (GEMINI, GEMINI_ARRAY, OLLAMA, COHERE, CONVERSE, MISTRAL)
