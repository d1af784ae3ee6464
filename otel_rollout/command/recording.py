"""The set-up of a verb that records, and the message about its output."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_SERVICE_NAME,
)

from otel_rollout.command.argument_types import limits_of
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.gateway import LIMITS
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.terminal import note
from otel_rollout.wiring import configure, shutdown


class Recorded:
    """What became of the records, once the block of `recording` has ended."""

    is_whole = False
    """True if all spans arrived where they should."""


@contextmanager
def recording(
    *,
    exporters: Sequence[TrajectoryExporter] = (),
    spans: str | None = None,
    token_ids: bool = False,
    policy_model: str | None = None,
    logprobs_mode: Literal["raw", "processed"] | None = None,
) -> Iterator[Recorded]:
    """Record rollouts while the block runs, and over OTLP if the environment has an endpoint.

    exporters: receive finished trajectories.
    spans: a file that spans are appended to, as OTLP/JSON lines. None: none.
    token_ids: True asks the model server for token ids with every call.
    policy_model: the model that is trained. None: not set.
    logprobs_mode: which log-probabilities the server sends. None: not known.
    """
    recorded = Recorded()
    configure(
        service_name=os.environ.get(OTEL_SERVICE_NAME) or "otel-rollout",
        exporters=exporters,
        span_exporters=[JsonLinesSpanExporter(spans)] if spans else [],
        request_token_ids=token_ids,
        policy_model=policy_model,
        logprobs_mode=logprobs_mode,
        # LLM spans are for people: they are needed only where spans are exported.
        instrumentor="openai" if spans or endpoint() else None,
    )
    gc.collect()
    gc.freeze()  # collections skip what is imported: they would delay every call of a gateway
    try:
        yield recorded
    finally:
        recorded.is_whole = shutdown()


def gateway_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `serve` that were given, with names as it has them; limits by the environment.

    ConfigurationError for a limit that is no number, or not above 0.
    """
    given = {name: getattr(options, name) for name in ("host", "renderer", "allow_paths")}
    given |= limits_of("OTEL_ROLLOUT_GATEWAY_", LIMITS)
    return {name: value for name, value in given.items() if value is not None}


def secret_of(option: str, name: str | None) -> str | None:
    """The value of the environment variable that an option names; None without the option.

    A secret on the command line would be in `ps`. ConfigurationError if the variable is not set.
    """
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"{option} {name}: this environment variable is not set")
    return value


def endpoint() -> str | None:
    """The OTLP endpoint that the environment names. None: there is none."""
    return os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or os.environ.get(
        OTEL_EXPORTER_OTLP_ENDPOINT
    )


def note_places(recorded: Recorded, *, out: str | None = None, spans: str | None = None) -> int:
    """Print where the records are, or that something is missing there; the exit status."""
    places = [
        f"{name} ({what})" for name, what in ((out, "trajectories"), (spans, "spans")) if name
    ]
    if otlp := endpoint():
        places.append(f"{otlp} (spans, OTLP)")
    if not places:
        note(f"nothing was kept: give --out or --spans, or set {OTEL_EXPORTER_OTLP_ENDPOINT}")
        return 0
    note(
        ("" if recorded.is_whole else "not all of it arrived: see above. ")
        + "-> "
        + ", ".join(places)
    )
    return int(not recorded.is_whole)
