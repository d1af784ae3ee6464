"""An MCP server whose tool asks a model.

python mcp_server.py stdio|SOCKET BASE_URL SPANS continue|alone

SOCKET: the file descriptor of a socket that listens.
"""

from __future__ import annotations

import contextlib
import pickle
import sys

import openai
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

import otel_rollout
from otel_rollout.spans import as_record

transport, base_url, path, how = sys.argv[1:]


class Saved(SpanProcessor):
    """Writes each span that ends to a file, as it ends."""

    def on_end(self, span: ReadableSpan) -> None:
        with open(path, "ab") as file:
            pickle.dump(as_record(span), file)


otel_rollout.configure(instrumentor=None).add_span_processor(Saved())
server = MCPServer("tools")
client = openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0)


@server.tool()
async def summarise(text: str, context: Context) -> str:
    """Summarise a text."""
    meta = context.request_context.meta
    with otel_rollout.continue_rollout(meta) if how == "continue" else contextlib.nullcontext():
        completion = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}]
        )
    return completion.choices[0].message.content or ""


if transport == "stdio":
    server.run("stdio")
else:
    uvicorn.run(server.streamable_http_app(), fd=int(transport))
