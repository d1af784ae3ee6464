"""One rollout in several processes: handed on as OpenTelemetry context, continued, and rejoined.

`traceparent` names the span that the other process works for, the baggage entry `rollout.id` the
rollout that its model calls belong to. Each process records its own part, with the number of its
calls on a span of its own. All these spans together are one trajectory: a trace backend brings
them together, or `Trajectory.add_spans` where the other process hands its spans back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context

from otel_rollout.errors import ConfigurationError
from otel_rollout.record.added_fields import NOTHING, Added, added_fields
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT, TOKEN_FIELDS, attached, detach
from otel_rollout.record.current import Run, begin_part, current_rollout, end, running_rollout
from otel_rollout.record.options import Options
from otel_rollout.record.processes.carrier import (
    Carried,
    Carrier,
    carrier_of,
    context_of_carrier,
    trace_id_of,
    with_rollout,
    within,
    without_rollout,
)
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.rollout_span import close, start_span
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.model_post import is_signed
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json, dumps, object_in


def propagate(*, environ: bool = False) -> dict[str, str]:
    """Headers with which another process continues the current rollout.

        requests.post(url, headers=propagate(), json=task)
        subprocess.run(command, env={**os.environ, **propagate(environ=True)})
        pool.submit(work, task, propagate())

    The other process calls `continue_rollout`, or just `configure()` where the environment has
    them. Outside a rollout, and under `no_capture()`, only the current span is propagated; {} if
    there is none.

    environ: False (default): names of the W3C headers (`traceparent`, `baggage`); True: names for
        environment variables (`TRACEPARENT`, `BAGGAGE`).
    """
    context = otel_context.get_current()
    active = current_rollout()
    if active is not None:
        with active.lock:
            active.handed_on += 1
        own = active.span.get_span_context()
        if own.is_valid and own.trace_id != trace_id_of(context):
            # A framework opened a trace of its own, but the parts of a rollout are in its trace.
            context = trace.set_span_in_context(active.span, context)
        context = with_rollout(context, active, active.policy_version)
    return carrier_of(context, environ=environ)


class Model(Protocol):
    """A pydantic model that keeps the fields that it does not know."""

    @property
    def model_extra(self) -> dict[str, Any] | None: ...


class continue_rollout:  # noqa: N801 - used as `with continue_rollout(...)`
    """Continue, in this process, the rollout that a carrier brings.

        with continue_rollout(request.headers) as part:
            answer = agent(task)                      # its model calls belong to the rollout
        return answer, part.spans

    carrier: HTTP headers, environment variables or the `_meta` of a request of MCP, as a mapping
        (or a pydantic model that keeps what it does not know), with names in any case. None
        (default): `os.environ`.

    Works with `async with` too. A carrier without a rollout only continues its trace, and invalid
    values are ignored: a server never fails for the headers it gets. With a secret
    (`configure(rollout_secret=...)`), so does one that was not made with it; the log says so.
    ConfigurationError for a carrier that is no mapping.
    """

    def __init__(self, carrier: Carrier | Model | None = None) -> None:
        self._carrier = _mapping(carrier)
        self._run: Run | None = None
        self._token: Any = None
        self._active: ActiveRollout | None = None

    @property
    def spans(self) -> list[SpanRecord]:
        """The spans that this process recorded of the rollout, once the block has ended.

        They can be pickled. [] where the rollout runs in this very process, which has them.
        """
        return list(self._active.records) if self._active is not None else []

    def __enter__(self) -> continue_rollout:
        with guarded("a rollout could not be continued; its calls here are not recorded"):
            self._continue(context_of_carrier(self._carrier))
        return self

    def _continue(self, context: Context) -> None:
        """Enter the context that the carrier brought, and this process's part of its rollout."""
        carried = Carried.found_in(context)
        context = without_rollout(context)
        here = None if carried is None else came_back(carried)
        if carried is not None and here is None:
            self._run = begin_part(carried, context)
            self._active = self._run.active
            return
        if here is not None:
            context = otel_context.set_value(ROLLOUT, here, context)
            context = within(here, otel_context.set_value(CAPTURE_OFF, False, context))
        self._token = otel_context.attach(context)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run, self._run = self._run, None
        token, self._token = self._token, None
        end(run, error=error)
        if token is not None:
            detach(token)

    async def __aenter__(self) -> continue_rollout:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)


def came_back(carried: Carried) -> ActiveRollout | None:
    """The rollout that a carrier names, if it runs in this very process: it is not handed on."""
    active = running_rollout(carried.rollout_id)
    if active is not None:
        with active.lock:
            active.handed_on = max(0, active.handed_on - 1)  # by the baggage alone: not counted
    return active


def continue_environment() -> ActiveRollout | None:
    """Make this whole process part of the rollout that its environment names, if any.

    The part ends with `leave_environment`, before the provider is shut down.
    """
    if Carried.by(dict(os.environ)) is None:
        return None
    active = continue_rollout().__enter__()._active
    process_state.default = active
    return active


def leave_environment(active: ActiveRollout) -> None:
    """End this process's part of the rollout that its environment named."""
    process_state.default = None
    close(active)


def _mapping(carrier: Any) -> Carrier:
    """The carrier as a mapping; ConfigurationError if it is none."""
    if carrier is None:
        return dict(os.environ)
    found = carrier if hasattr(carrier, "items") else getattr(carrier, "model_extra", None)
    if found is None:
        raise ConfigurationError(
            f"continue_rollout(...): expected headers or environment variables as a mapping, got "
            f"{carrier!r}"
        )
    mapping: Carrier = found
    return mapping


# --- for a gateway, which records the calls of rollouts none of whose code runs here


OUTSIDE = otel_context.set_value(
    CAPTURE_OFF, True, otel_context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True, Context())
)
"""The context of a gateway's own work: in no rollout, and no instrumentation makes spans of it."""


def headers_of(
    active: ActiveRollout, *, environ: bool = False, secret: bytes | None = None
) -> dict[str, str]:
    """The W3C headers of a rollout, as `propagate` gives them, without counting it as handed on.

    secret: proves them. None: that of the process, if it has one.
    """
    context = trace.set_span_in_context(active.span, Context())
    context = with_rollout(context, active, active.policy_version, secret)
    return carrier_of(context, environ=environ)


def begin_here(options: Options) -> ActiveRollout:
    """Begin a rollout whose code runs elsewhere. `close` ends it."""
    active = ActiveRollout(options, rollout_tracer(), None)
    start_span(active, Context())
    return active


def begin_part_here(carried: Carried) -> ActiveRollout:
    """Begin a part of a rollout of another process. `close` ends it."""
    part = carried.part()
    start_span(part, carried.context)
    return part


def record_call(active: ActiveRollout, path: str) -> ExchangeRecorder:
    """The recorder of a call of this rollout that somebody else makes, whatever is current."""
    context = trace.set_span_in_context(active.span, Context())
    with attached(otel_context.set_value(ROLLOUT, active, context)):
        return ExchangeRecorder(active, path)


def fields_here() -> Json:
    """What `request_token_ids` around this place says, for `with_fields`. None: nothing."""
    return otel_context.get_value(TOKEN_FIELDS)


def with_fields(
    path: str, body: bytes, headers: Mapping[str, str], fields: Json, url: str = ""
) -> tuple[bytes, Added]:
    """A request's body with the fields that ask for token ids, and the fields that were added.

    What the client wrote stays as it wrote it. A body that is signed, or is no JSON object, stays
    as it is, and so does every other one where nobody asks for token ids, and one of a kind for
    which this server is known to refuse the fields.

    fields: as `fields_here` gave them. None: as `configure` said.
    url: address of the model server.
    """
    asks = process_state.settings.request_token_ids if fields is None else fields is not False
    if not asks:
        return body, NOTHING
    if is_signed(headers) or (params := object_in(body)) is None:
        return body, NOTHING
    with attached(otel_context.set_value(TOKEN_FIELDS, fields, OUTSIDE)):
        found = added_fields(path, params, url)
    added = found.fields
    if not added:
        return body, found
    if added.keys() & params.keys():
        return dumps({**params, **added}).encode(), found
    start = body.rstrip()[:-1]
    return start + (b"," if params else b"") + dumps(added)[1:].encode(), found
