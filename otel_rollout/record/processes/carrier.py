"""Carriers: the W3C headers that name a rollout to another process, made of a context and read.

Their baggage has the rollout's id. Whoever can send a header can name a rollout: with a secret that
its processes share, the baggage has a proof too (an HMAC), and one without it names no rollout.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Iterable
from typing import Any, Protocol

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_rollout import semconv as sc
from otel_rollout.record.observer import RunningRollout
from otel_rollout.record.options import Options
from otel_rollout.record.state import process_state
from otel_rollout.wire import dumps, loads

logger = logging.getLogger("otel_rollout")

SECRET_VARIABLE = "OTEL_ROLLOUT_SECRET"  # noqa: S105 - its name
"""The environment variable of the secret that the processes of a rollout share."""

_propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_is_id = re.compile(r"[0-9a-f]{32}").fullmatch


class Carrier(Protocol):
    """Headers as any server has them, an environment, or the `_meta` of a request of MCP."""

    def items(self) -> Iterable[tuple[str, Any]]: ...


def carrier_of(context: otel_context.Context, *, environ: bool = False) -> dict[str, str]:
    """The W3C headers of a context; names for environment variables if `environ`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return {key.upper(): value for key, value in carrier.items()} if environ else carrier


def context_of_carrier(
    carrier: Carrier, context: otel_context.Context | None = None
) -> otel_context.Context:
    """The context that a carrier brings. context: what it is added to. None: the current one."""
    headers = {str(key).lower(): value for key, value in carrier.items() if isinstance(value, str)}
    return _propagator.extract(headers, otel_context.get_current() if context is None else context)


def within(active: RunningRollout, context: otel_context.Context) -> otel_context.Context:
    """The context of a rollout's code: where `configure` says so, its baggage names the rollout."""
    context = without_rollout(context)
    if not process_state.settings.baggage:
        return context
    version = active.options.policy_version
    # A version that changes while the rollout runs is not that of each call.
    return with_rollout(context, active, None if callable(version) else version)


def with_rollout(
    context: otel_context.Context, active: RunningRollout, version: str | int | None
) -> otel_context.Context:
    """The context with baggage that names the rollout, and the version of its policy."""
    context = baggage.set_baggage(sc.ROLLOUT_ID, active.id, without_rollout(context))
    if version is not None:
        context = baggage.set_baggage(sc.ROLLOUT_POLICY_VERSION, dumps(version), context)
    if not active.trajectory.trainable:
        context = baggage.set_baggage(sc.ROLLOUT_TRAINABLE, dumps(False), context)
    if (secret := rollout_secret()) is not None:
        context = baggage.set_baggage(sc.ROLLOUT_PROOF, _proof(secret, context), context)
    return context


def options_in(context: otel_context.Context) -> Options:
    """The options of the rollout that the baggage names."""
    return Options(
        policy_version=_policy_version(baggage.get_baggage(sc.ROLLOUT_POLICY_VERSION, context)),
        trainable=baggage.get_baggage(sc.ROLLOUT_TRAINABLE, context) != dumps(False),
    )


def trace_id_of(context: otel_context.Context) -> int:
    """The trace of the context's span; 0 if it has none."""
    return trace.get_current_span(context).get_span_context().trace_id


def rollout_in(context: otel_context.Context, secret: bytes | None = None) -> str | None:
    """The id of the rollout that a carrier brought; None without one, or without its proof.

    secret: what the proof is made with. None: that of the process; without one none is needed.
    """
    rollout_id = baggage.get_baggage(sc.ROLLOUT_ID, context)
    if not isinstance(rollout_id, str) or not _is_id(rollout_id):
        return None
    secret = secret or rollout_secret()
    proof = str(baggage.get_baggage(sc.ROLLOUT_PROOF, context) or "")
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
_CARRIED_NAMES = frozenset(_CARRIED)


def without_rollout(context: otel_context.Context) -> otel_context.Context:
    """The context without our baggage: it is for this process, not for those that it calls."""
    for name in baggage.get_all(context).keys() & _CARRIED_NAMES:
        context = baggage.remove_baggage(name, context)
    return context


def rollout_secret() -> bytes | None:
    """The secret that the processes of a rollout share. None: there is none."""
    text = process_state.settings.rollout_secret or os.environ.get(SECRET_VARIABLE)
    return text.encode("utf-8", "surrogateescape") if text else None


def _proof(secret: bytes, context: otel_context.Context) -> str:
    """The HMAC of all that a carrier says of its rollout, and of the trace that it is in."""
    said = [str(baggage.get_baggage(name, context) or "") for name in _CARRIED[:-1]]
    message = "\n".join([f"{trace_id_of(context):032x}", *said])
    return hmac.digest(secret, message.encode("utf-8", "backslashreplace"), "sha256").hex()


def _policy_version(text: object) -> str | int | None:
    try:
        value = loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None
