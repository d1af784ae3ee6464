"""The public test kit: a local model server that speaks real HTTP, and reproducible ids.

A response is a pure function of the request, its reply and its sequence number, so the same
requests in the same order give the same bytes, token ids and log-probabilities. If a request
continues a conversation, its prompt ids start with the previous prompt ids and completion ids, as
on a vLLM server whose client replays messages verbatim.

    with ModelServer(["Paris.", Reply(tool_calls=[ToolCall("add", '{"a": 1}')])]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="unused")

`python -m otel_rollout.testing` runs the default server in the foreground.
"""

from otel_rollout.testing.bodies import ByteTokenizer as ByteTokenizer
from otel_rollout.testing.bodies import Reply as Reply
from otel_rollout.testing.bodies import ToolCall as ToolCall
from otel_rollout.testing.bodies import token_logprob as token_logprob
from otel_rollout.testing.ids import SequentialIdGenerator as SequentialIdGenerator
from otel_rollout.testing.server import ModelServer as ModelServer
from otel_rollout.testing.server import Raw as Raw
from otel_rollout.testing.server import WireExchange as WireExchange
