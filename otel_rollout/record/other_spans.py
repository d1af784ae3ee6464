"""Spans that other libraries draw inside a running rollout: model calls, and tools.

A framework may draw the span of a model call of its own. If neither a call that was captured nor a
request that was seen lies under it, that call went by: it is counted. A tool that a framework
draws is not drawn again. Nothing else is read of these spans, and a trajectory holds none of them:
a model call that an exchange span has is marked, for who keeps spans only to rebuild from them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.trace import StatusCode

from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state

_KEPT = 256
"""The last calls in which that of a span is looked for, and the ancestors of a call."""
_LLM_KINDS = ("LLM", "EMBEDDING")


def here_and_now() -> tuple[int, int, int]:
    """Id of the current span, 0 where there is none, and the time, as beginning and end."""
    now = time.time_ns()
    return trace.get_current_span().get_span_context().span_id, now, now


@dataclass(slots=True, eq=False)
class Call:
    """A call of a model that was captured, or seen."""

    began_ns: int
    libraries: list[str]
    """Libraries that have drawn it: around it, or beside it."""
    ended_ns: int | None = None
    """None while it lasts."""


class OtherSpans:
    """The spans that are open inside one rollout, but its own and its calls'."""

    def __init__(self) -> None:
        self._open: dict[int, Span] = {}
        """The open spans by their ids."""
        self._covered: set[int] = set()
        """Open spans with a call under them."""
        self._calls: deque[Call] = deque(maxlen=_KEPT)
        """The last calls."""

    @property
    def open(self) -> list[int]:
        """Ids of the spans that are open."""
        return list(self._open)

    def began(self, span: Span) -> None:
        """A span has begun."""
        if span.context is not None:
            self._open[span.context.span_id] = span

    def called(
        self,
        parent_id: int,
        began_ns: int,
        ended_ns: int | None = None,
        *,
        is_exported: bool = False,
    ) -> Call:
        """A call begins under the span `parent_id`: one that is captured, or seen.

        ended_ns: None while it lasts.
        is_exported: True if an exchange span of it goes wherever the spans around it go.
        """
        libraries: list[str] = []
        for _ in range(_KEPT):
            span = self._open.get(parent_id)
            if span is None:
                break
            self._covered.add(parent_id)
            if is_model_call(span.attributes or {}):
                libraries.append(_library(span))
                if is_exported:
                    span.set_attribute(sc.HAS_EXCHANGE, True)
            parent_id = _parent_of(span)
        call = Call(began_ns, libraries, ended_ns)
        self._calls.append(call)
        return call

    def ended(self, span: ReadableSpan) -> tuple[str, str] | None:
        """A span has ended; library and name of the model call that went by under it, or None.

        A call that failed said nothing that could be missing.
        """
        if span.context is None:
            return None
        span_id = span.context.span_id
        self._open.pop(span_id, None)
        is_covered = span_id in self._covered
        self._covered.discard(span_id)
        if not is_model_call(span.attributes or {}):
            return None
        if is_covered:
            return None
        if span.status.status_code is StatusCode.ERROR or self._has_call_beside(span):
            return None
        self.called(_parent_of(span), span.start_time or 0, span.end_time)
        return _library(span), span.name

    def _has_call_beside(self, span: ReadableSpan) -> bool:
        """Whether there was a call meanwhile that its library did not draw with another span.

        Libraries that draw from callbacks do not make their spans current, and clients draw inside
        their calls: the call is not under the span then.
        """
        start, end, library = span.start_time or 0, span.end_time or 0, _library(span)
        for call in list(self._calls):
            if call.began_ns > end or (call.ended_ns is not None and call.ended_ns < start):
                continue
            if library not in call.libraries:
                call.libraries.append(library)
                return True
        return False


def _parent_of(span: ReadableSpan) -> int:
    """Id of the span around it; 0: there is none."""
    return span.parent.span_id if span.parent else 0


def _library(span: ReadableSpan) -> str:
    scope = span.instrumentation_scope
    return (scope.name if scope else "") or "an unnamed library"


def is_model_call(attributes: Mapping[str, object]) -> bool:
    """True if a span with these attributes is one model call, in any of the usual conventions."""
    return (
        attributes.get(sc.GEN_AI_OPERATION_NAME) in sc.MODEL_OPERATIONS
        or attributes.get(sc.OPENINFERENCE_KIND) in _LLM_KINDS
        or attributes.get(sc.LLM_REQUEST_TYPE) in sc.LLM_REQUEST_TYPES
    )


def note_tool(rollout: object, span: ReadableSpan, *, has_ended: bool) -> None:
    """Tell of a tool that a span is of, by the id of its call; once it has ended, by its name."""
    attributes = span.attributes or {}
    is_inference = attributes.get(sc.OPENINFERENCE_KIND) == "TOOL"
    call_id = attributes.get(sc.GEN_AI_TOOL_CALL_ID)
    if call_id is None and is_inference:
        call_id = attributes.get(sc.OPENINFERENCE_TOOL_ID)
    is_tool = is_inference or attributes.get(sc.GEN_AI_OPERATION_NAME) == sc.OPERATION_EXECUTE_TOOL
    if call_id is not None or (is_tool and has_ended):
        name = attributes.get(sc.GEN_AI_TOOL_NAME) or attributes.get(sc.OPENINFERENCE_TOOL_NAME)
        began = span.start_time or 0
        process_state.observers.notify("tool_began", rollout, call_id, name or span.name, began)
