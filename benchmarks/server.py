"""The model server of the benchmarks, in its own process; its replies have realistic sizes.

512 sampled tokens with ids and log-probabilities, the prompt's ids (one per 4 characters), 5-digit
ids; streamed, 51 events of 10 tokens each; fewer or more where a request has `max_tokens`. The
model "drifts" reads a reply with two tokens in its middle as one. Prints its base URL; ends when
its input does.
"""

import json
import sys
from typing import Any

from otel_rollout.testing import ModelServer, Raw

TOKENS = 512
IDS = [10_000 + (i * 7919) % 90_000 for i in range(TOKENS)]
LOGPROBS = [
    {"token": "word", "logprob": -((i * 37) % 1000 + 1) / 512, "bytes": [119, 111, 114, 100]}
    | {"top_logprobs": []}
    for i in range(TOKENS)
]
USAGE = {"prompt_tokens": 0, "completion_tokens": TOKENS, "total_tokens": TOKENS}
_number = iter(range(10**9))


def _prompt_ids(messages: list[dict[str, Any]], *, drifts: bool) -> list[int]:
    ids: list[int] = []
    middle = TOKENS // 2
    replayed = [*IDS[:middle], 150_000, *IDS[middle + 2 :]] if drifts else IDS
    for message in messages:
        size = len(message["content"]) // 4
        ids += replayed if message["role"] == "assistant" else [200 + len(ids) % 7, *IDS[:size]]
    return ids


def reply(request: dict[str, Any]) -> Raw:
    """A reply of realistic size."""
    head = {"id": f"chatcmpl-{next(_number)}", "created": 1_700_000_000, "model": "m"}
    drifts = request.get("model") == "drifts"
    prompt = {"prompt_token_ids": _prompt_ids(request["messages"], drifts=drifts)}
    count = request.get("max_tokens", TOKENS)
    times = -(-count // TOKENS)
    ids, logprobs = (IDS * times)[:count], (LOGPROBS * times)[:count]
    if not request.get("stream"):
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "word" * count},
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
            "token_ids": ids,
        }
        usage = {**USAGE, "completion_tokens": count, "total_tokens": count}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage, **prompt}
        return Raw(body=json.dumps(body, separators=(",", ":")).encode())
    chunks = []
    for start in range(0, count, 10):
        tokens = slice(start, start + 10)
        size = len(ids[tokens])
        choice = {
            "index": 0,
            "delta": {"role": "assistant"} | {"content": "word" * size},
            "logprobs": {"content": logprobs[tokens]},
            "finish_reason": "stop" if start + 10 >= count else None,
            "token_ids": ids[tokens],
        }
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        chunks.append({**chunk, **prompt} if start == 0 else chunk)
    data = [f"data: {json.dumps(c, separators=(',', ':'))}\n\n".encode() for c in chunks]
    return Raw(content_type="text/event-stream", chunks=[*data, b"data: [DONE]\n\n"])


if __name__ == "__main__":
    with ModelServer(reply, token_ids=True, logprobs=True) as server:
        print(server.base_url, flush=True)
        sys.stdin.read()
