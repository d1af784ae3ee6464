"""The client libraries that are installed, and what becomes of the model calls that they make."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.versions import installed, listed
from otel_rollout.record import capture

_OWN_HOOKS = ("openai", "anthropic", "groq", "together", "cerebras-cloud-sdk")
"""Clients with hooks of their own: all their calls are captured, with retries."""
_ON_HTTP = {
    "litellm": "openai, httpx, aiohttp, boto3",
    "dspy": "lm15",
    "lm15": "sockets of its own",
    "google-genai": "httpx, aiohttp",
    "ollama": "httpx",
    "mistralai": "httpx",
    "cohere": "httpx",
    "boto3": "botocore",
    "huggingface_hub": "httpx or requests",
}
"""Clients without hooks of their own, and what they send with."""
_HTTP = ("httpx", "httpx2", "aiohttp", "requests", "botocore")
"""HTTP libraries with hooks that capture."""
_COUNTED = ("urllib3",)
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
    counted = listed({**installed(_COUNTED), "http.client": "", "urllib": ""})
    yield Finding.ok("HTTP libraries", f"model calls are counted, not captured: {counted}")
    for name, number in installed(_NOT_SEEN).items():
        module, reason = _NOT_SEEN[name]
        yield Finding(
            "warning" if module in sys.modules else "ok",
            "clients",
            f"not seen, neither captured nor counted: {name} {number}; {reason}",
        )
