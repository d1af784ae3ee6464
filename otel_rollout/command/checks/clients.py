"""What becomes of model calls: instrumentations that create spans, our hooks, client libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)

from otel_rollout import semconv as sc
from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.versions import installed, listed
from otel_rollout.record import capture, process_state

_OWN_HOOKS = ("openai", "anthropic", "groq", "together", "cerebras-cloud-sdk")
"""Clients with hooks of their own: all their calls are captured, with retries."""
_ON_HTTP = {
    "litellm": "openai, httpx, aiohttp",
    "google-genai": "httpx, aiohttp",
    "ollama": "httpx",
    "mistralai": "httpx",
    "cohere": "httpx",
    "huggingface_hub": "httpx or requests",
}
"""Clients without hooks of their own, and what they send with."""
_HTTP = ("httpx", "httpx2", "aiohttp", "requests")
"""HTTP libraries with hooks that capture."""
_ON_COUNTED = {"boto3": "botocore", "dspy": "lm15"}
"""Clients on libraries whose calls are only counted."""
_COUNTED = ("urllib3", "botocore", "lm15")
"""HTTP libraries with hooks that only count; Python's own are such, too."""
_NOT_SEEN = {
    "claude-agent-sdk": ("claude_agent_sdk", "another program makes its calls"),
    "google-generativeai": ("google.generativeai", "it calls over gRPC"),
    "google-cloud-aiplatform": ("vertexai", "it calls over gRPC"),
    "curl_cffi": ("curl_cffi", "it has a network stack of its own"),
    "pycurl": ("pycurl", "it has a network stack of its own"),
}
"""Libraries whose calls are not seen: the module to look for, and why."""


def clients() -> Iterator[Finding]:
    """What becomes of the calls of each client, and of each HTTP library."""
    own, on_http, http = installed(_OWN_HOOKS), installed(_ON_HTTP), installed(_HTTP)
    replaced = [] if capture.not_hooked() else capture.libraries_not_hooked()
    if replaced:
        yield Finding.warning(
            "clients",
            f"methods of {', '.join(replaced)} were replaced after they were hooked: model calls "
            f"through them may be neither captured nor counted. Call otel_rollout.configure() "
            f"after whatever replaces them",
        )
    if own:
        yield Finding.ok("clients", f"captured by hooks of their own: {listed(own)}")
    if on_http:
        above = {name: f"{number} (on {_ON_HTTP[name]})" for name, number in on_http.items()}
        yield Finding.ok(
            "clients", f"captured where they send, if the API is known: {listed(above)}"
        )
    if http:
        yield Finding.ok(
            "HTTP libraries",
            f"calls of known model APIs are captured, other model calls counted: {listed(http)}",
        )
    if found := installed(_ON_COUNTED):
        above = {name: f"{number} (on {_ON_COUNTED[name]})" for name, number in found.items()}
        yield Finding.ok(
            "clients",
            f"counted, not captured: {listed(above)}. Ask the model through LiteLLM or another "
            f"client that is captured (dspy.LM(..., engine='litellm')), or through the gateway",
        )
    counted = listed({**installed(_COUNTED), "http.client": "", "urllib": ""})
    yield Finding.ok("HTTP libraries", f"model calls are counted, not captured: {counted}")
    for name, number in installed(_NOT_SEEN).items():
        module, reason = _NOT_SEEN[name]
        yield Finding(
            "warning" if module in sys.modules else "ok",
            "clients",
            f"not seen, neither captured nor counted: {name} {number}; {reason}",
        )


def programs() -> Iterator[Finding]:
    """The programs that rollouts of this process started, and whose model calls nobody sees."""
    counted = dict(process_state.programs)
    for given in (True, False):
        found = {name: n for (name, mark), n in counted.items() if (mark == sc.GIVEN) is given}
        if not found:
            continue
        names = ", ".join(name if n == 1 else f"{name} ({n} times)" for name, n in found.items())
        text = f"rollouts started {names}"
        cure = "rollout(..., gateway=True) captures them"
        if given:
            text += f" with the address or the key of a model server: its calls are lost. {cure}"
            yield Finding.problem("programs", text)
        else:
            yield Finding.ok("programs", f"{text}: if these make model calls, {cure}")


def instrumentors() -> Iterator[Finding]:
    """The instrumentations that create spans of model calls, and that of threads."""
    active = sorted(
        {
            kind.__module__
            for kind in _subclasses(BaseInstrumentor)
            if getattr(getattr(kind, "_instance", None), "_is_instrumented_by_opentelemetry", False)
        }
    )
    yield from _llm_spans(
        [
            name
            for name in active
            if "openai" in name
            and "agents" not in name
            and not any(name.startswith(f"{other}.") for other in active)  # a part of the other one
        ]
    )
    for name in active:
        if ".httpx" in name:
            text = f"{name} is active: each call has a further span in traces"
            yield Finding.warning("HTTP spans", text)
    if any(name.endswith(".threading") for name in active):
        yield Finding.ok("threads", "work that is given to threads and pools keeps its rollout")
    else:
        yield Finding.problem(
            "threads",
            "opentelemetry-instrumentation-threading is not active: calls from threads and pools "
            "are in no rollout. ThreadingInstrumentor().instrument(), or configure()",
        )


def _llm_spans(instrumentations: list[str]) -> Iterator[Finding]:
    """The instrumentations of OpenAI's client: one is enough, and it should record texts."""
    if len(instrumentations) > 1:
        yield Finding.warning(
            "LLM spans",
            f"{len(instrumentations)} instrumentations are active: {', '.join(instrumentations)}. "
            f"Each call has a span of each in traces (once in trajectories). Use one: "
            f"configure(instrumentor=None) adds none",
        )
    elif instrumentations:
        again = (
            "not drawn again: the framework's span stays (configure(llm_spans='both') has both)"
            if process_state.settings.llm_spans == "outer"
            else "drawn again inside that span (configure(llm_spans='outer') has that alone)"
        )
        which = instrumentations[0]
        text = f"{which}; in a rollout a call that a framework draws itself is {again}"
        yield Finding.ok("LLM spans", text)
    else:
        yield Finding.warning(
            "LLM spans",
            "no instrumentation of OpenAI is active: traces show no prompts or replies to "
            "people. Use configure(instrumentor='openai')",
        )
    genai = [name for name in instrumentations if "genai" in name or "openai_v2" in name]
    content = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    if genai and not os.environ.get(content):
        yield Finding.warning(
            content,
            f"it is not set, and {genai[0]} records texts only if it is: nobody can read them in "
            f"a trace backend. Trajectories have them. Set it to SPAN_ONLY",
        )


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in type.__subclasses__(kind):
        yield each
        yield from _subclasses(each)


def capture_hooks() -> Iterator[Finding]:
    """The hooks on clients, without which model calls are not captured."""
    missing = capture.not_hooked()
    if missing:
        yield Finding.problem(
            "capture",
            f"model calls are not captured: {', '.join(missing)} is not hooked. Call "
            f"otel_rollout.configure(), after whatever replaces the client's methods",
        )
    else:
        yield Finding.ok("capture", "the methods of the OpenAI client are hooked")
