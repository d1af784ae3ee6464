"""Records calls for a rollout that its W3C headers identify, where none of its code runs.

The gateway uses it.

A rollout that runs in this process is recorded into directly, on its own clock. Any other one is
continued as a part, as `continue_rollout` does, but without entering its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context

from otel_rollout.record.calls import added_fields
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT, TOKEN_FIELDS, detach
from otel_rollout.record.current import running_rollout
from otel_rollout.record.options import Options
from otel_rollout.record.processes.carrier import (
    carrier_of,
    context_of_carrier,
    options_in,
    rollout_in,
    with_rollout,
)
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.rollout_span import start_span
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.model_post import is_signed
from otel_rollout.wire import Json, dumps, loads

OUTSIDE = otel_context.set_value(
    CAPTURE_OFF, True, otel_context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True, Context())
)
"""The context of a gateway's own work: in no rollout, and nobody's instrumentation draws it."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What a carrier says of one rollout."""

    rollout_id: str
    """32 hexadecimal digits."""
    trace_id: int
    """The trace that it is in; 0: not known."""
    span_id: int
    """Its span, or one inside it; 0: not known."""
    policy_version: str | int | None = None
    """None: not known."""
    trainable: bool = True

    @classmethod
    def of(cls, active: ActiveRollout) -> Carried:
        """The carrier of a rollout that runs in this process."""
        own = active.span.get_span_context()
        return cls(
            active.id,
            own.trace_id,
            own.span_id,
            active.policy_version,
            active.trajectory.trainable,
        )

    @classmethod
    def by(cls, headers: Mapping[str, str], secret: bytes | None = None) -> Carried | None:
        """The carrier that these headers are. None: they name no rollout, or do not prove it.

        secret: what the proof is made with. None: that of the process, if it has one.
        """
        context = context_of_carrier(headers, Context())
        rollout_id = rollout_in(context, secret)
        if rollout_id is None:
            return None
        span, options = trace.get_current_span(context).get_span_context(), options_in(context)
        version = options.policy_version
        assert not callable(version)
        return cls(rollout_id, span.trace_id, span.span_id, version, options.trainable)

    @property
    def context(self) -> Context:
        """A context in its trace; an empty one where that is not known."""
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        span = trace.SpanContext(self.trace_id, self.span_id, is_remote=True, trace_flags=flags)
        if not span.is_valid:
            return Context()
        return trace.set_span_in_context(trace.NonRecordingSpan(span), Context())


def headers_of(active: ActiveRollout, *, environ: bool = False) -> dict[str, str]:
    """The W3C headers of a rollout, as `propagate` gives them, without counting it as handed on."""
    context = trace.set_span_in_context(active.span, Context())
    return carrier_of(with_rollout(context, active, active.policy_version), environ=environ)


def begin_here(options: Options) -> ActiveRollout:
    """Begin a rollout whose code runs elsewhere. `close` ends it."""
    active = ActiveRollout(options, rollout_tracer(), None)
    start_span(active, Context())
    return active


def rollout_or_part(carried: Carried) -> ActiveRollout:
    """The rollout itself where it runs in this process, else a new part of it."""
    active = running_rollout(carried.rollout_id)
    if active is None:
        options = Options(policy_version=carried.policy_version, trainable=carried.trainable)
        active = ActiveRollout(options, rollout_tracer(), None, part_of=carried.rollout_id)
        start_span(active, carried.context)
    return active


def came_back(carried: Carried) -> None:
    """Headers that `propagate` made came to the very process whose rollout they name."""
    active = running_rollout(carried.rollout_id)
    if active is not None:
        with active.lock:
            active.handed_on = max(0, active.handed_on - 1)


def record_call(active: ActiveRollout, path: str) -> ExchangeRecorder:
    """The recorder of a call of this rollout that somebody else makes, whatever is current."""
    context = trace.set_span_in_context(active.span, Context())
    token = otel_context.attach(otel_context.set_value(ROLLOUT, active, context))
    try:
        return ExchangeRecorder(active, path)
    finally:
        detach(token)


def fields_here() -> Json:
    """What `request_token_ids` around this place says, for `with_fields`. None: nothing."""
    return otel_context.get_value(TOKEN_FIELDS)


def with_fields(
    path: str, body: bytes, headers: Mapping[str, str], fields: Json
) -> tuple[bytes, dict[str, Json]]:
    """A request's body with the fields that ask for token ids, and the fields that were added.

    What the client wrote stays as it wrote it. A body that is signed, or is no JSON object, stays
    as it is, and so does every other one where nobody asks for token ids.

    fields: as `fields_here` gave them. None: as `configure` said.
    """
    asks = process_state.settings.request_token_ids if fields is None else fields is not False
    if not asks:
        return body, {}
    try:
        params = None if is_signed(headers) else loads(body)
    except (ValueError, RecursionError):
        return body, {}
    token = otel_context.attach(otel_context.set_value(TOKEN_FIELDS, fields, OUTSIDE))
    try:
        added = added_fields(path, params)
    finally:
        detach(token)
    if not added or not isinstance(params, dict):
        return body, {}
    if added.keys() & params.keys():
        return dumps({**params, **added}).encode(), added
    start = body.rstrip()[:-1]
    return start + (b"," if params else b"") + dumps(added)[1:].encode(), added
