"""The instrumentors that begin LLM spans: put in with a guard around them, and taken out again.

The one idea: whoever instruments, each call has one span, behind a guard (`guard.py`). The
invariant: after the undoing, every package that was changed here is as it was before.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import wrapt
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.instrumentation.openai.shared.config import Config
from opentelemetry.sdk.trace import TracerProvider

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.extras import to_install
from otel_rollout.look.guard import Guard, log_swallowed
from otel_rollout.record import SWITCHES

Undo = Callable[[], None]
_SCOPE = "opentelemetry.instrumentation.openai"
_GENAI = "opentelemetry.instrumentation.genai.openai"
_CONTENT = next(iter(SWITCHES))
_GUARDED = {
    *(("Completions", name) for name in ("create", "parse")),
    *(("Responses", name) for name in ("create", "parse", "retrieve", "cancel")),
    ("Embeddings", "create"),
    ("Images", "generate"),
}


def check_installed(name: str) -> None:
    """Import the instrumentor `name`. ConfigurationError if it is not installed."""
    try:
        import_module(_GENAI if name == "genai" else _SCOPE)
    except ImportError as error:
        raise ConfigurationError(
            "configure(instrumentor='genai'): opentelemetry-instrumentation-genai-openai is "
            f"not installed ({error}): {to_install('otel-rollout[genai]')} --pre"
        ) from None


def instrument(name: str | None, provider: TracerProvider) -> Undo:
    """Let the instrumentor `name` write LLM spans to `provider`; returns a function that undoes it.

    One that instruments already is left as it is, and no second one is added. The default one is
    guarded, also where it is the user's, and whoever calls its `instrument` from now on.
    """
    genai = sys.modules[_GENAI].OpenAIInstrumentor() if _GENAI in sys.modules else None
    undo = ExitStack()
    taken = genai is not None and genai.is_instrumented_by_opentelemetry
    with warnings.catch_warnings():  # its own code, which its user cannot change
        warnings.simplefilter("ignore", DeprecationWarning)
        kind = import_module(f"{_SCOPE}.v1").OpenAIV1Instrumentor
        _mend(kind, undo)
    undo.callback(_leave_theirs)
    if taken or kind().is_instrumented_by_opentelemetry:
        _guard()
    elif name == "genai":
        _instrument_genai(genai, provider, undo)
    elif name == "openai":
        _instrument_openai(provider, undo)
    return undo.close


def _instrument_genai(instrumentor: Any, provider: TracerProvider, undo: ExitStack) -> None:
    if _CONTENT not in os.environ:
        os.environ[_CONTENT] = "span_only"  # off by default, and it has no other switch
        undo.callback(os.environ.pop, _CONTENT, None)
    instrumentor.instrument(tracer_provider=provider)
    _guard()
    undo.callback(unwrap)
    undo.callback(instrumentor.uninstrument)


def _instrument_openai(provider: TracerProvider, undo: ExitStack) -> None:
    unwrap()  # what the user took out is in there still
    # The default upload_base64_image makes it lose every conversation with an image in it.
    instrumentor = OpenAIInstrumentor(upload_base64_image=None, exception_logger=log_swallowed)
    instrumentor.instrument(tracer_provider=provider)
    ours = [wrapper for _, _, wrapper in _wrapped_methods()]

    def take_out() -> None:
        if any(wrapper is own for _, _, wrapper in _wrapped_methods() for own in ours):
            OpenAIInstrumentor().uninstrument()

    undo.callback(take_out)


# --- what is put into its modules, and taken out again


def _mend(kind: Any, undo: ExitStack) -> None:
    """Replace functions of the instrumentor whose faults no wrapper can hide."""

    def replace(owner: Any, name: str, new: Callable[[Any], Any]) -> None:
        if name in vars(owner):
            old = vars(owner)[name]
            setattr(owner, name, new(old))
            undo.callback(setattr, owner, name, old)

    def followed_by(step: Callable[[], None]) -> Callable[[Any], Any]:
        def new(old: Any) -> Any:
            def method(self: Any, **kwargs: Any) -> None:
                old(self, **kwargs)
                step()

            return method

        return new

    replace(kind, "_instrument", followed_by(_guard))
    replace(kind, "_uninstrument", followed_by(unwrap))  # its own leaves every wrapper in place
    for name in ("", ".chat_wrappers", ".completion_wrappers", ".embeddings_wrappers"):
        module = import_module(f"{_SCOPE}.shared{name}")
        replace(module, "run_async", lambda _: _run)
        replace(module, "_set_completions", _only_choices)
        replace(module, "is_openai_v1", lambda _: _yes)
    responses = import_module(f"{_SCOPE}.v1.responses_wrappers")
    replace(responses, "responses", lambda _: _Pending())
    replace(responses, "set_data_attributes", _as_chat)


def _yes() -> bool:
    """True: the instrumentor parses two version numbers for it, six times a call."""
    return True


def _as_chat(old: Callable[..., None]) -> Callable[..., None]:
    """Give the span of a response, which starts when it has ended, the name of a chat's."""

    def write(response: Any, span: trace.Span) -> None:
        model = getattr(response, "request_model", None)
        span.update_name(f"{sc.OPERATION_CHAT} {model}" if model else sc.OPERATION_CHAT)
        span.set_attribute(sc.OPENAI_API_TYPE, "responses")
        span.set_attribute(sc.GEN_AI_OPERATION_NAME, sc.OPERATION_CHAT)
        old(response, span)

    return write


def _only_choices(old: Callable[..., None]) -> Callable[..., None]:
    """Write no list of replies where none was shown: it would replace ours."""
    return lambda span, choices: old(span, choices) if choices else None


def _run(step: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits nothing; `asyncio.run` would take the thread's loop away."""
    if Config.upload_base64_image is None:
        try:
            step.send(None)
        except StopIteration:
            return
        step.close()
    else:
        thread = threading.Thread(target=asyncio.run, args=(step,))
        thread.start()
        thread.join()


_MOST_PENDING = 1000


class _Pending(dict[str, Any]):
    """Responses that may still be retrieved; the instrumentor's dict keeps all of them for ever."""

    def __setitem__(self, key: str, data: Any) -> None:
        self.pop(key, None)
        if getattr(data, "response_status", None) in ("queued", "in_progress"):
            # A span that starts at a float, as that of `cancel` would, cannot be exported.
            if isinstance(getattr(data, "start_time", None), float):
                data.start_time = int(data.start_time)
            super().__setitem__(key, data)
            if len(self) > _MOST_PENDING:
                del self[next(iter(self))]


def _wrapped_methods() -> Iterator[tuple[type, str, Any]]:
    """Each method of the client that has an instrumentor's wrapper, or a guard, around it."""
    for name, module in sys.modules.copy().items():
        if not name.startswith("openai.resources."):
            continue
        for owner in list(vars(module).values()):
            # isinstance would load lazy proxies. A class is looked at where it is made.
            if issubclass(type(owner), type) and owner.__module__ == name:
                for attribute, value in list(vars(owner).items()):
                    if _is_wrapper(value):
                        yield owner, attribute, value


def _is_wrapper(value: Any) -> bool:
    if not issubclass(type(value), wrapt.FunctionWrapper):
        return False
    wrapper = value._self_wrapper
    return isinstance(wrapper, Guard) or _module(wrapper).startswith((_SCOPE, _GENAI))


def _module(wrapper: Any) -> str:
    return str(getattr(wrapper, "__module__", ""))


def _guard() -> None:
    for owner, attribute, wrapper in _wrapped_methods():
        if isinstance(wrapper._self_wrapper, Guard):
            continue
        if (owner.__name__.removeprefix("Async"), attribute) in _GUARDED:
            method = wrapper.__wrapped__
            while _is_wrapper(method):  # a second one would write every span twice
                method = method.__wrapped__
            is_genai = _module(wrapper._self_wrapper).startswith(_GENAI)
            guard = Guard(owner, wrapper, is_genai=is_genai)
            setattr(owner, attribute, wrapt.FunctionWrapper(method, guard))


def unwrap() -> None:
    for owner, attribute, wrapper in _wrapped_methods():
        method = wrapper
        while _is_wrapper(method):
            if isinstance(method._self_wrapper, Guard):
                method._self_wrapper.over = True
            method = method.__wrapped__
        setattr(owner, attribute, method)


def _leave_theirs() -> None:
    for owner, attribute, wrapper in _wrapped_methods():
        if isinstance(wrapper._self_wrapper, Guard):
            setattr(owner, attribute, wrapper._self_wrapper.guarded)
