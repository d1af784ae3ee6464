"""Documents of other programs: Harbor's ATIF, mini-swe-agent's, Pydantic AI's, Gym's entries."""

from __future__ import annotations

from typing import Any

CALL = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}
TOKENS = {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.5, -1]}
ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s",
    "agent": {"name": "terminus-2", "version": "2.0", "model_name": "m", "extra": {"parser": "x"}},
    "steps": [
        {"step_id": 1, "source": "system", "message": "be brief"},
        {"step_id": 2, "source": "user", "message": "list", "timestamp": "2026-01-01T00:00:00Z"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "timestamp": "2026-01-01T00:00:05.500000+00:00",
            "reasoning_content": "hm",
            "tool_calls": [CALL],
            "observation": {"results": [{"source_call_id": "c1", "content": "a b"}]},
            "metrics": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, **TOKENS},
        },
        {
            "step_id": 4,
            "source": "agent",
            "message": "done",
            "model_name": "n",
            "observation": {"results": [{"content": "are you sure?"}]},
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 4, 5, 6],
                "completion_token_ids": [7],
                "logprobs": [-0.25],
            },
        },
    ],
    "final_metrics": {"total_cost_usd": 0.5, "extra": {}},
}
REPLY = {
    "id": "r1",
    "model": "x-1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": "a\n```\nls\n```"},
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
}
MINI: dict[str, Any] = {
    "info": {
        "model_stats": {"instance_cost": 0.05, "api_calls": 3},
        "config": {"model": {"model_name": "x"}},
        "mini_version": "2.0.0",
        "exit_status": "Submitted",
        "submission": "diff",
    },
    "messages": [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "mend"},
        {"role": "user", "content": "no action", "extra": {"response": REPLY}},
        {
            "role": "assistant",
            "content": "a\n```\nls\n```",
            "extra": {"response": {**REPLY, "id": "r2"}, "timestamp": 1_706_000_000.5},
        },
        {"role": "user", "content": "out", "extra": {"returncode": 0}},
        {"role": "assistant", "content": "bye"},
        {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}},
    ],
    "trajectory_format": "mini-swe-agent-1.1",
}
ENTRY: dict[str, Any] = {
    "schema_version": 1,
    "rollout_id": "r.1-a_B",
    "model_call_id": "call-1",
    "model": "m",
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3, 4],
    "generation_log_probs": [-1.0, -2],
    "routed_experts": [[1]],
    "output_items": [{"type": "message", "role": "assistant", "content": "hi"}],
    "token_item_index": 0,
    "created_at": 1_706_000_000.123457,
    "later": {"a": None},
}
_RUN: dict[str, Any] = {"run_id": "run-1", "conversation_id": "c", "state": "complete"}
_SAMPLED = {"kind": "response", "model_name": "m", "provider_name": "openai", **_RUN}
HISTORY: list[Any] = [  # of 2.68, without members that are null
    {
        "parts": [
            {"content": "You add.", "part_kind": "system-prompt"},
            {"content": "1 + 2?", "part_kind": "user-prompt"},
        ],
        "instructions": "Be short.",
        "kind": "request",
        **_RUN,
    },
    {
        "parts": [
            {"content": "hm", "id": "reasoning_content", "part_kind": "thinking"},
            {"content": "Adding.", "part_kind": "text"},
            {
                "tool_name": "add",
                "args": '{"a": 1, "b": 2}',
                "tool_call_id": "c1",
                "part_kind": "tool-call",
            },
        ],
        "usage": {"input_tokens": 30, "output_tokens": 71},
        "timestamp": "2026-11-26T08:12:00.170325Z",
        "provider_details": {"finish_reason": "tool_calls"},
        "provider_response_id": "r1",
        "finish_reason": "tool_call",
        **_SAMPLED,
    },
    {
        "parts": [
            {"tool_name": "add", "content": 3, "tool_call_id": "c1", "part_kind": "tool-return"}
        ],
        "instructions": "Be short.",
        "kind": "request",
        **_RUN,
    },
    {
        "parts": [{"content": "It is 3.", "part_kind": "text"}],
        "usage": {"input_tokens": 102, "output_tokens": 9},
        "timestamp": "2026-11-26T08:12:00.197Z",
        "provider_response_id": "r2",
        "finish_reason": "stop",
        **_SAMPLED,
    },
]
"""What `all_messages_json` gives of a run with a tool."""
