"""The agents of `agent*.py`, traced by a product whose records are exported; see `record.py`.

It runs in an environment with the client and the product's library, and nothing of this project.
Each scenario is one trace whose root has its name. What the library sends is kept here, and
written as its own export writes it.

    python -m tests.dialects.exported PRODUCT RECORDS.jsonl '{"scenario": "http://...", ...}'
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

Lines = list[Any]
Run = Callable[[str, str], None]


@contextmanager
def serving(answer: Callable[[str, Any], Any]) -> Iterator[str]:
    """The address of a server that answers JSON with JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = json.dumps(answer(self.path, json.loads(content or b"{}"))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_PATCH = do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def agents(instrument: Callable[[Any], Any] | None = None) -> Run:
    """Runs the scenarios of the OpenAI client; `instrument` is called with each client."""
    if instrument is not None:
        importlib.import_module("tests.dialects.agent").instrument_client = instrument  # type: ignore[attr-defined]
    return importlib.import_module("tests.dialects.agent_kinds").run  # type: ignore[no-any-return]


def by_langsmith(servers: dict[str, str], *, langchain: bool = False) -> Lines:
    """Runs as `Client.list_runs` gives them, of a store that keeps what the client sends.

    langchain: of an agent of LangChain's.
    """
    langsmith = importlib.import_module("langsmith")
    wrap_openai = importlib.import_module("langsmith.wrappers").wrap_openai
    runs: dict[str, dict[str, Any]] = {}

    def answer(path: str, content: Any) -> Any:
        if path.endswith("/runs/query"):
            return {"runs": [{"session_id": "1" * 32, **run} for run in runs.values()]}
        if "/runs" in path:
            run_id = content.get("id") or path.rpartition("/")[2]
            known = {key: value for key, value in content.items() if value is not None}
            known.pop("attachments", None)
            runs.setdefault(run_id, {}).update(known)
        return {}

    with serving(answer) as url:
        client = langsmith.Client(
            url, api_key="k", auto_batch_tracing=False, omit_traced_runtime_info=True
        )
        run = agents(lambda made: wrap_openai(made, tracing_extra={"client": client}))
        run = by_chat_model if langchain else run
        with langsmith.tracing_context(enabled=True, client=client):
            for name, address in servers.items():
                with langsmith.trace(name, client=client):
                    run(name, address)
        client.flush()
        found = list(client.list_runs(project_id="1" * 32))
    return [json.loads(each.json(exclude_none=True)) for each in found]


def by_chat_model(name: str, url: str) -> None:
    """A tool loop, or a talk, of LangChain's chat model."""
    tools = importlib.import_module("tests.dialects.agent").TOOLS
    model = importlib.import_module("langchain_openai").ChatOpenAI(
        model="org/test-model", base_url=url, api_key="k", max_retries=0, temperature=0.7
    )
    model = model.bind_tools(tools) if name.endswith("tools") else model
    messages: list[Any] = [("system", "Be terse."), ("user", "1.50 + 2?")]
    for _ in range(2):
        reply = model.invoke(messages)
        messages.append(reply)
        for call in reply.tool_calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3.50"}
            messages.append(result)
        if not reply.tool_calls:
            messages.append(("user", "sure?"))


def by_langfuse(servers: dict[str, str]) -> Lines:
    """Observations: the values that the library sends, by the names that the API has for them."""
    os.environ["LANGFUSE_PUBLIC_KEY"] = os.environ["LANGFUSE_SECRET_KEY"] = "k"
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    client = importlib.import_module("langfuse").Langfuse(span_exporter=kept)
    importlib.import_module("langfuse.openai")
    run = agents()
    for name, address in servers.items():
        with client.start_as_current_observation(name=name):
            run(name, address)
    client.flush()
    rows = [observation(span) for span in kept.get_finished_spans()]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def observation(span: Any) -> Any:
    """A span of the library as `/api/public/observations` gives it."""
    sent = below("langfuse.observation.", span.attributes)
    row = {
        "id": f"{span.context.span_id:016x}",
        "traceId": f"{span.context.trace_id:032x}",
        "parentObservationId": f"{span.parent.span_id:016x}" if span.parent else None,
        "type": sent.get("type", "span").upper(),
        "name": span.name,
        "startTime": span.start_time,
        "endTime": span.end_time,
        "level": sent.get("level", "DEFAULT"),
        "statusMessage": sent.get("status_message"),
        "model": sent.get("model.name"),
        "modelParameters": json.loads(sent.get("model.parameters", "{}")),
        "input": plain(sent.get("input")),
        "output": plain(sent.get("output")),
        "usageDetails": json.loads(sent.get("usage_details", "{}")),
        "completionStartTime": plain(sent.get("completion_start_time")),
        "metadata": {key: plain(value) for key, value in below("metadata.", sent).items()},
    }
    for key in ("startTime", "endTime"):
        moment = datetime.fromtimestamp(row[key] // 1000 / 1e6, timezone.utc)
        row[key] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return row


def below(prefix: str, attributes: Any) -> dict[str, Any]:
    """The attributes whose names begin with the prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in attributes.items() if k.startswith(prefix)}


def plain(text: str | None) -> Any:
    """The value of a text that is JSON; another text as it is."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def by_weave(servers: dict[str, str]) -> Lines:
    """Calls as `Client.get_calls` gives them, of a server that keeps what the client sends."""
    weave = importlib.import_module("weave")
    types = "weave.vendor.weave_server_sdk.types.call_read_response"
    of_server = importlib.import_module(types).Call
    calls: dict[str, dict[str, Any]] = {}

    class Server:
        def call_start(self, request: Any) -> Any:
            start = dict(request["start"])
            start.setdefault("id", start.get("call_id"))
            calls[start["id"]] = start
            return {"id": start["id"], "trace_id": start["trace_id"]}

        def call_end(self, request: Any) -> Any:
            calls[request["end"]["id"]].update(request["end"])
            return {}

        def obj_create(self, request: Any) -> Any:
            return SimpleNamespace(digest=hashlib.sha256(repr(request).encode()).hexdigest())

        file_create = obj_create

        def calls_query_stream(self, request: Any) -> Any:
            return iter([of_server.model_validate(row) for row in calls.values()])

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    made = importlib.import_module("weave.trace.weave_client").WeaveClient
    client = made("ann", "adder", Server(), ensure_project_exists=False)
    context = importlib.import_module("weave.trace.context.weave_client_context")
    context.set_weave_client_global(client)
    importlib.import_module(
        "weave.integrations.openai.openai_sdk"
    ).get_openai_patcher().attempt_patch()
    run = agents()
    for name, address in servers.items():
        weave.op(lambda name, address: run(name, address), name=name)(name, address)
    client.flush()
    rows = [call.to_dict() for call in client.get_calls()]
    for row in rows:
        row["attributes"] = {"weave": {"kind": row["attributes"]["weave"].get("kind")}}
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def by_litellm(servers: dict[str, str]) -> Lines:
    """What LiteLLM hands to callbacks that log, of the same calls by its own functions."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm: Any = importlib.import_module("litellm")
    logger: Any = importlib.import_module("litellm.integrations.custom_logger").CustomLogger
    rows: Lines = []

    class Kept(logger):
        def log_success_event(self, kwargs: Any, **_: Any) -> None:
            row = json.loads(json.dumps(kwargs["standard_logging_object"], default=str))
            rows.append({k: v for k, v in row.items() if v is not None and k not in UNREAD})

        log_failure_event = log_success_event

    litellm.callbacks = [Kept()]
    scenario = [""]

    def instrument(client: Any) -> None:
        def called(function: Callable[..., Any], provider: str = "openai") -> Callable[..., Any]:
            def call(model: str, **arguments: Any) -> Any:
                return function(
                    model=f"{provider}/{model}",
                    api_base=str(client.base_url),
                    api_key="k",
                    litellm_trace_id=scenario[0],
                    max_retries=0,
                    **arguments,
                )

            return call

        client.chat.completions.create = called(litellm.completion)
        client.responses.create = called(litellm.responses)
        client.completions.create = called(litellm.text_completion, "text-completion-openai")

    run = agents(instrument)
    for name, address in servers.items():
        scenario[0] = name
        try:
            run(name, address)
        except Exception as error:
            print(f"{name}: {error!r}"[:300], file=sys.stderr)
    time.sleep(3)  # it logs in threads
    return rows


UNREAD = ("model_map_information", "hidden_params", "response_cost_failure_debug_info", "metadata")
"""Members of LiteLLM's payload that are large, and that nothing is read from."""
PRODUCTS: dict[str, Callable[[dict[str, str]], Lines]] = {
    "langchain": partial(by_langsmith, langchain=True),
    "langfuse": by_langfuse,
    "langsmith": by_langsmith,
    "litellm": by_litellm,
    "weave": by_weave,
}


def main(product: str, path: str, servers: str) -> None:
    lines = PRODUCTS[product](json.loads(servers))
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            kept = without_stacks(json.loads(json.dumps(line, default=str)))
            file.write(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")


def without_stacks(value: Any) -> Any:
    """The record without stack traces, which name files of this machine."""
    if isinstance(value, dict):
        empty = {name: type(each)() for name, each in value.items() if name == "traceback"}
        return {name: without_stacks(each) for name, each in value.items()} | empty
    if isinstance(value, list):
        return list(map(without_stacks, value))
    if not isinstance(value, str):
        return value
    if value.startswith('{"type": ') and '"traceback"' in value:  # an exception, in Weave
        return json.dumps(without_stacks(json.loads(value)))
    return value.partition("\n\nTraceback (most recent call last)")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
