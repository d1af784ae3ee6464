"""Keys of what recording keeps in the OpenTelemetry context, which follows tasks by itself.

Threads get it from `opentelemetry-instrumentation-threading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token

from opentelemetry import context as otel_context

ROLLOUT = otel_context.create_key("otel-rollout-current")
"""The `ActiveRollout` that calls belong to. Not set: the process's default. None: no rollout."""
CAPTURE_OFF = otel_context.create_key("otel-rollout-no-capture")
"""True under `no_capture()`."""
GATHERING = otel_context.create_key("otel-rollout-gathering")
"""The `Gathering` of a `gather_trajectory` whose rollout is about to begin."""
TOKEN_FIELDS = otel_context.create_key("otel-rollout-token-fields")
"""Request fields added beside those that ask for token ids. False: they are not asked for.
None or not set: as `configure` said."""


def detach(token: Token[otel_context.Context]) -> None:
    """Leave a context that was attached.

    A coroutine that is closed from outside, or a scope that a framework leaves in another task,
    ends in a context that is not its own: that one stays as it is.
    """
    try:
        token.var.reset(token)  # OpenTelemetry's own logs an error where there is none
    except ValueError:
        pass


@contextmanager
def attached(context: otel_context.Context) -> Iterator[None]:
    """The block runs in this context."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        detach(token)
