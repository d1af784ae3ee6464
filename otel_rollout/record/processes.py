"""One rollout in several processes: handed on as OpenTelemetry context, continued, and rejoined.

`traceparent` names the span that the other process works for, the baggage entry `rollout.id` the
rollout that its model calls belong to. Each process records its own part, with the number of its
calls on a span of its own. All these spans together are one trajectory: a trace backend brings
them together, or `Trajectory.add_spans` where the other process hands its spans back.

Whoever can send a header can name a rollout. With a secret that its processes share, a carrier
also has a proof (an HMAC), and one without it continues nothing.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT, detach
from otel_rollout.record.current import (
    Run,
    begin_part,
    current_rollout,
    end,
    running_rollout,
)
from otel_rollout.record.options import Options
from otel_rollout.record.running import ActiveRollout, close
from otel_rollout.record.state import process_state
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import dumps, loads

logger = logging.getLogger("otel_rollout")

SECRET_VARIABLE = "OTEL_ROLLOUT_SECRET"  # noqa: S105 - its name
"""The environment variable of the secret that the processes of a rollout share."""

_propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_is_id = re.compile(r"[0-9a-f]{32}").fullmatch


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
        context = baggage.set_baggage(sc.ROLLOUT_ID, active.id, context)
        if (version := active.policy_version) is not None:
            context = baggage.set_baggage(sc.ROLLOUT_POLICY_VERSION, dumps(version), context)
        if not active.trajectory.trainable:
            context = baggage.set_baggage(sc.ROLLOUT_TRAINABLE, dumps(False), context)
        own = active.span.get_span_context()
        if own.is_valid and own.trace_id != _trace_id(context):
            # A framework opened a trace of its own, but the parts of a rollout are in its trace.
            context = trace.set_span_in_context(active.span, context)
        if (secret := _secret()) is not None:
            context = baggage.set_baggage(sc.ROLLOUT_PROOF, _proof(secret, context), context)
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return {key.upper(): value for key, value in carrier.items()} if environ else carrier


class Carrier(Protocol):
    """Headers as any server has them, or an environment."""

    def items(self) -> Iterable[tuple[str, str]]: ...


class continue_rollout:  # noqa: N801 - used as `with continue_rollout(...)`
    """Continue, in this process, the rollout that a carrier brings.

        with continue_rollout(request.headers) as part:
            answer = agent(task)                      # its model calls belong to the rollout
        return answer, part.spans

    carrier: HTTP headers or environment variables, as a mapping, with names in any case. None
        (default): `os.environ`.

    Works with `async with` too. A carrier without a rollout only continues its trace, and invalid
    values are ignored: a server never fails for the headers it gets. With a secret
    (`configure(rollout_secret=...)`), so does one that was not made with it; the log says so.
    ConfigurationError for a carrier that is no mapping.
    """

    def __init__(self, carrier: Carrier | None = None) -> None:
        if carrier is None:
            carrier = dict(os.environ)
        if not hasattr(carrier, "items"):
            raise ConfigurationError(
                f"continue_rollout(...): expected headers or environment variables as a mapping, "
                f"got {carrier!r}"
            )
        self._carrier = carrier
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
            self._continue(_extract(self._carrier))
        return self

    def _continue(self, context: otel_context.Context) -> None:
        """Enter the context that the carrier brought, and this process's part of its rollout."""
        rollout_id = _rollout_in(context)
        version = _policy_version(baggage.get_baggage(sc.ROLLOUT_POLICY_VERSION, context))
        trainable = baggage.get_baggage(sc.ROLLOUT_TRAINABLE, context) != dumps(False)
        if rollout_id is None:
            self._token = otel_context.attach(_without_rollout(context))
            return
        context = _without_rollout(context)
        here = running_rollout(rollout_id)
        if here is not None:
            with here.lock:
                here.handed_on -= 1
            context = otel_context.set_value(ROLLOUT, here, context)
            context = otel_context.set_value(CAPTURE_OFF, False, context)
            self._token = otel_context.attach(context)
            return
        options = Options(policy_version=version, trainable=trainable)
        self._run = begin_part(rollout_id, options, context)
        self._active = self._run.active

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        run, self._run = self._run, None
        token, self._token = self._token, None
        end(run, error=error)
        if token is not None:
            detach(token)

    async def __aenter__(self) -> continue_rollout:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace_back)


def continue_environment() -> ActiveRollout | None:
    """Make this whole process part of the rollout that its environment names, if any.

    The part ends with `leave_environment`, before the provider is shut down.
    """
    if _rollout_in(_extract(dict(os.environ))) is None:
        return None
    active = continue_rollout().__enter__()._active
    process_state.default = active
    return active


def leave_environment(active: ActiveRollout) -> None:
    """End this process's part of the rollout that its environment named."""
    process_state.default = None
    close(active)


def _extract(carrier: Carrier) -> otel_context.Context:
    headers = {str(key).lower(): value for key, value in carrier.items() if isinstance(value, str)}
    return _propagator.extract(headers, otel_context.get_current())


def _rollout_in(context: otel_context.Context) -> str | None:
    """The id of the rollout that a carrier brought; None without one, or without its proof."""
    rollout_id = baggage.get_baggage(sc.ROLLOUT_ID, context)
    if not isinstance(rollout_id, str) or not _is_id(rollout_id):
        return None
    secret, proof = _secret(), str(baggage.get_baggage(sc.ROLLOUT_PROOF, context) or "")
    if secret is None or hmac.compare_digest(proof.encode(), _proof(secret, context).encode()):
        return rollout_id
    logger.warning(
        "a carrier names the rollout %s, but %s: it is not continued, and calls here do not belong "
        "to it. The process that called propagate() needs the same rollout_secret "
        "(configure(rollout_secret=...) or %s).",
        rollout_id,
        "its proof was made with another secret" if proof else "has no proof",
        SECRET_VARIABLE,
    )
    return None


_CARRIED = (
    sc.ROLLOUT_ID,
    sc.ROLLOUT_POLICY_VERSION,
    sc.ROLLOUT_TRAINABLE,
    sc.ROLLOUT_PROOF,
)
"""Baggage of ours."""


def _without_rollout(context: otel_context.Context) -> otel_context.Context:
    """The context without our baggage: it is for this process, not for those that it calls."""
    for name in _CARRIED:
        context = baggage.remove_baggage(name, context)
    return context


def _secret() -> bytes | None:
    text = process_state.rollout_secret or os.environ.get(SECRET_VARIABLE)
    return text.encode("utf-8", "surrogateescape") if text else None


def _proof(secret: bytes, context: otel_context.Context) -> str:
    """The HMAC of all that a carrier says of its rollout, and of the trace that it is in."""
    said = [str(baggage.get_baggage(name, context) or "") for name in _CARRIED[:-1]]
    message = "\n".join([f"{_trace_id(context):032x}", *said])
    return hmac.digest(secret, message.encode("utf-8", "backslashreplace"), "sha256").hex()


def _trace_id(context: otel_context.Context) -> int:
    return trace.get_current_span(context).get_span_context().trace_id


def _policy_version(text: object) -> str | int | None:
    try:
        value = loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None
