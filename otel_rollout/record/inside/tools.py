"""Tool calls as spans: the tool, its arguments, its result."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.errors import NotARolloutError
from otel_rollout.record.attributes import exception_event, sentence, text_of
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import detach
from otel_rollout.record.current import rollout_of
from otel_rollout.record.privacy.secrets import Secrets
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.rollouts import is_async
from otel_rollout.record.state import process_state

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING = object()
_CALL_ID = "tool_call_id"


class tool:  # noqa: N801 - used as a decorator
    """Record the run of a tool as an `execute_tool` span.

        @tool                                      @tool(name="web_search")
        def search(query): ...                     async def search(query): ...

        search(query="x", tool_call_id=call.id)    # the id joins the span to the model's call

        with tool(call.function.name, call_id=call.id, arguments=call.function.arguments) as span:
            span.result = run(...)

    name: str, the tool's name. None (default): the function's name, or "tool" for a `with`.
    call_id: str, for a `with`: the id of the model's tool call that is answered. None (default):
        not known.
    arguments: for a `with`: the call's arguments, as JSON text or a value. Not given: not recorded.

    A decorated function keeps its name, signature, return value and exceptions; it also takes
    `tool_call_id`, which is passed on only if the function declares it. NotARolloutError for what
    is no function.
    """

    result: object
    """The tool's result; set it inside the `with`. Not set: not recorded."""

    @overload
    def __new__(cls, name: F, /) -> F: ...  # type: ignore[misc]

    @overload
    def __new__(
        cls, name: str | None = None, *, call_id: str | None = None, arguments: object = ...
    ) -> tool: ...

    def __new__(
        cls, name: Any = None, *, call_id: str | None = None, arguments: object = _NOTHING
    ) -> Any:
        if name is not None and not isinstance(name, str):
            return cls(getattr(name, "__name__", type(name).__name__))(name)
        recorded = super().__new__(cls)
        recorded._name = name
        recorded._call_id = call_id
        recorded._arguments = arguments
        recorded._span = trace.INVALID_SPAN
        recorded._token = None
        recorded.result = _NOTHING
        return recorded

    _name: str | None
    _call_id: str | None
    _arguments: object
    _span: trace.Span
    _token: Any

    def __call__(self, function: F) -> F:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(self(function.__func__))
        if not callable(function) or inspect.isclass(function):
            raise NotARolloutError(f"@tool: expected a function, got {function!r}")
        name = self._name or getattr(function, "__name__", type(function).__name__)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = inspect.Signature()
        takes_id = _CALL_ID in signature.parameters

        def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tool:
            call_id = None if takes_id else kwargs.pop(_CALL_ID, None)
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError:
                arguments = {"args": list(args), **kwargs}
            if takes_id:
                call_id = arguments.pop(_CALL_ID, None)
            for bound in ("self", "cls"):
                arguments.pop(bound, None)
            return tool(name, call_id=call_id, arguments=arguments)

        if is_async(function):

            @functools.wraps(function)
            async def run_tool_async(*args: Any, **kwargs: Any) -> Any:
                with opened(args, kwargs) as span:
                    span.result = await function(*args, **kwargs)
                return span.result

            return run_tool_async  # type: ignore[return-value]

        @functools.wraps(function)
        def run_tool(*args: Any, **kwargs: Any) -> Any:
            with opened(args, kwargs) as span:
                span.result = function(*args, **kwargs)
            return span.result

        return run_tool  # type: ignore[return-value]

    def __enter__(self) -> tool:
        with guarded("a tool span could not be opened; the tool runs without one"):
            self._open(self._name or "tool")
        return self

    def _open(self, name: str) -> None:
        attributes = {
            sc.GEN_AI_OPERATION_NAME: sc.OPERATION_EXECUTE_TOOL,
            sc.GEN_AI_TOOL_NAME: name,
            sc.GEN_AI_TOOL_TYPE: "function",
        }
        active = rollout_of(None)
        if active is not None:
            attributes[sc.ROLLOUT_ID] = active.id
            now = time.time_ns()
            process_state.observers.notify("tool_began", active, self._call_id, name, now)
        if self._call_id is not None:
            attributes[sc.GEN_AI_TOOL_CALL_ID] = str(self._call_id)
        content = process_state.content
        if self._arguments is not _NOTHING:
            attributes[sc.GEN_AI_TOOL_CALL_ARGUMENTS] = content.recorded(text_of(self._arguments))
        span_name = f"{sc.OPERATION_EXECUTE_TOOL} {name}"
        if active is not None:
            span_name = active.tools_begun.numbered(span_name, active.replies)
        self._span = rollout_tracer().start_span(span_name, attributes=content.shown(attributes))
        self._token = otel_context.attach(trace.set_span_in_context(self._span))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with guarded("a tool span could not be closed cleanly"):
                self._close(error)
        finally:
            self._span.end()

    def _close(self, error: BaseException | None) -> None:
        if self._token is not None:
            detach(self._token)
            self._token = None
        content = process_state.content
        if self.result is not _NOTHING:
            result = {sc.GEN_AI_TOOL_CALL_RESULT: content.recorded(text_of(self.result))}
            self._span.set_attributes(content.shown(result))
        if error is not None:
            active = rollout_of(None)
            event = exception_event(error, _scrub if active is None else active.scrub)
            self._span.add_event(sc.EVENT_EXCEPTION, event)
            self._span.set_attribute(sc.ERROR_TYPE, type(error).__qualname__)
            description = sentence(error, event[sc.EXCEPTION_MESSAGE])
            self._span.set_status(trace.StatusCode.ERROR, description)


def _scrub(text: str) -> str:
    return process_state.content.recorded(Secrets().scrub(text))
