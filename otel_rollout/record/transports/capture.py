"""Capture by hand: hook the clients of this process, without `configure`.

    from otel_rollout.record import capture

    capture.instrument()
    ...
    capture.uninstrument()

Nothing of it raises into a call or changes what the call gives back.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

from otel_rollout.errors import ConfigurationError
from otel_rollout.record import openai_client
from otel_rollout.record.privacy.content import Content, content_rule
from otel_rollout.record.processes import children
from otel_rollout.record.state import process_state
from otel_rollout.record.transports import aiohttp, httpx, urllib3
from otel_rollout.record.transports.post import async_hook, hook

_HTTPX = (
    hook("Client", "send", httpx.HttpxPost),
    async_hook("AsyncClient", "send", httpx.HttpxPost),
)
_LM15 = (hook("StdlibTransport", "stream", urllib3.CountedPost),)
_LM15_ASYNC = (async_hook("StdlibAsyncTransport", "_do_stream", urllib3.CountedPost),)
TRANSPORTS = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "aiohttp.client": (async_hook("ClientSession", "_request", aiohttp.AiohttpPost),),
    "requests.sessions": (hook("Session", "send", urllib3.RequestsPost),),
    "botocore.httpsession": (hook("URLLib3Session", "send", urllib3.CountedPost),),
    "lm15.transports._sync": _LM15,
    "lm15.transports._async": _LM15_ASYNC,
    "dspy._vendor.lm15.transports._sync": _LM15,
    "dspy._vendor.lm15.transports._async": _LM15_ASYNC,
    "urllib3.poolmanager": (hook("PoolManager", "urlopen", urllib3.Urllib3Post),),
    "urllib3.connectionpool": (hook("HTTPConnectionPool", "urlopen", urllib3.Urllib3Post),),
    "http.client": (hook("HTTPConnection", "putrequest", urllib3.HttpClientPost),),
}
"""Hooks of HTTP libraries, each on the method that every request goes through, redirects included;
by the module that has it."""
LIBRARIES = {
    **dict.fromkeys(openai_client.ALIKE, openai_client.HOOKS),
    **TRANSPORTS,
    **children.HOOKS,
}
"""Hooks of all libraries that are not needed."""


def instrument(content: Content | None = None) -> None:
    """Capture the calls of every client of this process, also of those made before.

    content: the rule for content on spans. None (default): that of `configure`, else that of the
        environment's switches.

    That is OpenAI's; and if they are, or once they are, imported, `anthropic` and its like (see
    `openai_client.ALIKE`) and the HTTP libraries of `TRANSPORTS`. Calling it twice is safe.
    ConfigurationError if this version of the OpenAI client lacks the methods that are hooked; of
    the others that is only logged.
    """
    module = importlib.import_module(openai_client.MODULE)
    missing = [hook.name for hook in openai_client.HOOKS if hook.is_missing(module)]
    if missing:
        version = importlib.import_module("openai").__version__
        raise ConfigurationError(
            f"capture hooks {', '.join(missing)} of {openai_client.MODULE}, which openai {version} "
            f"does not have: use a version that otel-rollout is tested with (1.66 to 3.x)"
        )
    if content is not None or process_state.setup is None:
        content = content or content_rule()
        process_state.use(replace(process_state.settings, content=content))
    watch()


def watch() -> None:
    """Hook the clients and libraries that are imported, and others once they are."""
    for name, hooks in {openai_client.MODULE: openai_client.HOOKS, **LIBRARIES}.items():
        process_state.hooks.install(name, hooks)


def uninstrument() -> None:
    """Take the hooks out again."""
    process_state.hooks.remove()


def not_hooked() -> list[str]:
    """The methods of the OpenAI client that are not, or no longer, captured."""
    module = importlib.import_module(openai_client.MODULE)
    return [
        hook.name for hook in openai_client.HOOKS if hook.required and not hook.is_in_place(module)
    ]


def libraries_not_hooked() -> list[str]:
    """The libraries that are imported, and whose calls are not, or no longer, captured."""
    lost = [
        name
        for name, hooks in LIBRARIES.items()
        for module in (sys.modules.get(name),)
        if module is not None
        and not all(hook.is_in_place(module) for hook in hooks if hook.required)
    ]
    return list(dict.fromkeys(name.removesuffix("._base_client") for name in lost))
