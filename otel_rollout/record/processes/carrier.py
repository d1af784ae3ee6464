"""Carriers: the W3C headers that name a rollout to another process, made of a context and read.

Their baggage has the rollout's id. Whoever can send a header can name a rollout: with a secret that
its processes share, the baggage has a proof too (an HMAC), and one without it names no rollout.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_rollout import semconv as sc
from otel_rollout.record.options import Options
from otel_rollout.record.provider import rollout_tracer
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.wire import dumps, try_loads

logger = logging.getLogger("otel_rollout")

SECRET_VARIABLE = "OTEL_ROLLOUT_SECRET"  # noqa: S105 - its name
"""The environment variable of the secret that the processes of a rollout share."""

_propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_is_id = re.compile(r"[0-9a-f]{32}").fullmatch


class Carrier(Protocol):
    """Headers as any server has them, an environment, or the `_meta` of a request of MCP."""

    def items(self) -> Iterable[tuple[str, Any]]: ...


def carrier_of(context: Context, *, environ: bool = False) -> dict[str, str]:
    """The W3C headers of a context; names for environment variables if `environ`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return {key.upper(): value for key, value in carrier.items()} if environ else carrier


def context_of_carrier(carrier: Carrier, context: Context | None = None) -> Context:
    """The context that a carrier brings. context: what it is added to. None: the current one."""
    headers = {str(key).lower(): value for key, value in carrier.items() if isinstance(value, str)}
    return _propagator.extract(headers, otel_context.get_current() if context is None else context)


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
    sampled: bool = True
    """False: its spans are not exported."""
    group_id: str | None = None
    """The group of the rollout. None: not known."""
    group_size: int | None = None
    """Number of samples that its group is to have. None: not known."""
    group_run: str | None = None
    """Which run of that group it is. None: not known, or all are one."""
    outer_group_id: str | None = None
    """As `ActiveRollout` has it."""
    task_id: str | None = None
    """The task of the rollout, for those inside it. None: not known."""

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
            own.trace_flags.sampled,
            *group_of(active),
        )

    @classmethod
    def by(cls, headers: Mapping[str, str], secret: bytes | None = None) -> Carried | None:
        """The carrier that these headers are. None: they name no rollout, or do not prove it.

        secret: what the proof is made with. None: that of the process, if it has one.
        """
        return cls.found_in(context_of_carrier(headers, Context()), secret)

    @classmethod
    def found_in(cls, context: Context, secret: bytes | None = None) -> Carried | None:
        """The rollout that a carrier brought into this context; None without one, or its proof."""
        rollout_id = baggage.get_baggage(sc.ROLLOUT_ID, context)
        if not isinstance(rollout_id, str) or not _is_id(rollout_id):
            return None
        if not _is_proven(rollout_id, context, secret or rollout_secret()):
            return None
        return cls(
            rollout_id,
            trace_id_of(context),
            trace.get_current_span(context).get_span_context().span_id,
            _policy_version(baggage.get_baggage(sc.ROLLOUT_POLICY_VERSION, context)),
            baggage.get_baggage(sc.ROLLOUT_TRAINABLE, context) != dumps(False),
            True,
            *_group_in(baggage.get_baggage(sc.ROLLOUT_GROUP_ID, context)),
        )

    @property
    def options(self) -> Options:
        """The options of a part of it."""
        own = ("policy_version", "trainable", "group_id", "group_size", "group_run", "task_id")
        return Options(**{name: getattr(self, name) for name in own})

    def part(self) -> ActiveRollout:
        """The part of it that this process is to have; its span is not started."""
        return part_of(self.rollout_id, self.options, self.outer_group_id)

    @property
    def context(self) -> Context:
        """A context in its trace; an empty one where that is not known."""
        flags = trace.TraceFlags(self.sampled)
        span = trace.SpanContext(self.trace_id, self.span_id, is_remote=True, trace_flags=flags)
        if not span.is_valid:
            return Context()
        return trace.set_span_in_context(trace.NonRecordingSpan(span), Context())


def part_of(rollout_id: str, options: Options, outer_group_id: str | None) -> ActiveRollout:
    """A part of a rollout of another process; its span is not started."""
    tracer = rollout_tracer()
    return ActiveRollout(options, tracer, None, part_of=rollout_id, outer_group_id=outer_group_id)


def within(active: ActiveRollout, context: Context) -> Context:
    """The context of a rollout's code: where `configure` says so, its baggage names the rollout."""
    context = without_rollout(context)
    if not process_state.settings.baggage:
        return context
    version = active.versioned.options.policy_version
    # A version that changes while the rollout runs is not that of each call.
    return with_rollout(context, active, None if callable(version) else version)


def with_rollout(
    context: Context, active: ActiveRollout, version: str | int | None, secret: bytes | None = None
) -> Context:
    """The context with baggage that names the rollout, and the version of its policy."""
    context = baggage.set_baggage(sc.ROLLOUT_ID, active.id, without_rollout(context))
    if version is not None:
        context = baggage.set_baggage(sc.ROLLOUT_POLICY_VERSION, dumps(version), context)
    if not active.trajectory.trainable:
        context = baggage.set_baggage(sc.ROLLOUT_TRAINABLE, dumps(False), context)
    if any(group := group_of(active)):
        context = baggage.set_baggage(sc.ROLLOUT_GROUP_ID, dumps(group), context)
    if (secret := secret or rollout_secret()) is not None:
        context = baggage.set_baggage(sc.ROLLOUT_PROOF, _proof(secret, context), context)
    return context


def trace_id_of(context: Context) -> int:
    """The trace of the context's span; 0 if it has none."""
    return trace.get_current_span(context).get_span_context().trace_id


def _is_proven(rollout_id: str, context: Context, secret: bytes | None) -> bool:
    """Whether the context has the proof that this secret makes; None: there need not be one."""
    proof = str(baggage.get_baggage(sc.ROLLOUT_PROOF, context) or "")
    if secret is None or hmac.compare_digest(proof.encode(), _proof(secret, context).encode()):
        return True
    logger.warning(
        "a carrier names the rollout %s, but %s: it is not continued, and calls here do not belong "
        "to it. The process that called propagate() needs the same rollout_secret "
        "(configure(rollout_secret=...) or %s).",
        rollout_id,
        "its proof was made with another secret" if proof else "has no proof",
        SECRET_VARIABLE,
    )
    return False


_CARRIED = (
    sc.ROLLOUT_ID,
    sc.ROLLOUT_POLICY_VERSION,
    sc.ROLLOUT_TRAINABLE,
    sc.ROLLOUT_GROUP_ID,
    sc.ROLLOUT_PROOF,
)
"""Baggage of ours."""
_CARRIED_NAMES = frozenset(_CARRIED)


def without_rollout(context: Context) -> Context:
    """The context without our baggage: it is for this process, not for those that it calls."""
    for name in baggage.get_all(context).keys() & _CARRIED_NAMES:
        context = baggage.remove_baggage(name, context)
    return context


def rollout_secret() -> bytes | None:
    """The secret that the processes of a rollout share. None: there is none."""
    text = process_state.settings.rollout_secret or os.environ.get(SECRET_VARIABLE)
    return text.encode("utf-8", "surrogateescape") if text else None


def _proof(secret: bytes, context: Context) -> str:
    """The HMAC of all that a carrier says of its rollout, and of the trace that it is in."""
    values = [str(baggage.get_baggage(name, context) or "") for name in _CARRIED[:-1]]
    message = "\n".join([f"{trace_id_of(context):032x}", *values])
    return hmac.digest(secret, message.encode("utf-8", "backslashreplace"), "sha256").hex()


Group = tuple[str | None, int | None, str | None, str | None, str | None]
"""Id, size and run of a rollout's group, the group that it is sent with, and its task."""


def group_of(active: ActiveRollout) -> Group:
    """The group of a rollout, as a carrier has it; a long id is left out."""
    trajectory, outer = active.trajectory, active.outer_group_id
    group_id, size, run = trajectory.group_id, trajectory.group_size, trajectory.group_run
    if group_id is None or _is_too_long(group_id):
        group_id = size = run = None
    outer = None if outer is None or _is_too_long(outer) else outer
    task_id = trajectory.task_id
    return group_id, size, run, outer, task_id if len(task_id or "") <= _LONGEST else None


_LONGEST = 200
"""Characters of a group's id: baggage that is too large does not arrive at all."""


def _is_too_long(group_id: str) -> bool:
    return len(group_id) > _LONGEST and _is_reported(group_id)


@lru_cache(16)  # once for each of some
def _is_reported(group_id: str) -> bool:
    logger.warning(
        "the group id %.40r... has %d characters: spans of other processes do not name the group. "
        "%d characters are carried to them",
        *(group_id, len(group_id), _LONGEST),
    )
    return True


def _group_in(text: object) -> Group:
    """The group that an entry of the baggage names."""
    found = try_loads(text) if isinstance(text, str) else None
    if not isinstance(found, list) or len(found) != 5:
        return None, None, None, None, None
    size = found.pop(1)
    group_id, run, outer, task_id = (each if isinstance(each, str) else None for each in found)
    if group_id is None:
        return None, None, None, outer, task_id
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    return group_id, size if is_size else None, run, outer, task_id


def _policy_version(text: object) -> str | int | None:
    value = try_loads(text) if isinstance(text, str) else None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None
