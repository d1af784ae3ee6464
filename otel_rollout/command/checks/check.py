"""The check as a whole: what of a rollout would be lost in this process, and what to do about it.

It looks at the process as it is: a program calls `check()` after its own set-up. What cannot be
seen it tries: a rollout with a call, through the provider that is there, to a model server of its
own. The rollout's spans go where all spans go, its trajectory to no exporter.
"""

from __future__ import annotations

from otel_rollout.command.checks.process import (
    Finding,
    hooks,
    processors,
    sdk_provider,
    tracer_provider,
    versions,
)
from otel_rollout.command.checks.trials import model_server, one_rollout
from otel_rollout.gateway import root_of
from otel_rollout.record import public_address, rollout_provider


def check(*, server: str | None = None, model: str | None = None) -> list[Finding]:
    """The findings about this process as it is; nothing but a `problem` costs training data.

    `server`: base URL of a model server that gets, in a rollout too, a request for a streamed reply
    with tools, and requests by which its log-probabilities are measured; `model`: which of its
    models. None: none is asked; the first that it lists.
    ConfigurationError for a `server` that is no address.
    """
    if server is not None:
        root_of(public_address(server), "server to check")
    provider = rollout_provider()
    findings = [*versions(), *tracer_provider(provider)]
    sdk = sdk_provider(provider)
    if sdk is not None:
        findings += processors(sdk)
    findings += hooks()
    if sdk is not None:
        findings += one_rollout(sdk)
    if server is not None and sdk is not None:
        findings += model_server(sdk, server, model)
    return findings
