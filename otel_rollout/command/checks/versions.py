"""The packages that are installed, and environment variables that switch something off."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import InvalidRequirement, Requirement

from otel_rollout.command.checks.finding import Finding

_PACKAGES = (
    "otel-rollout",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-instrumentation",
    "opentelemetry-instrumentation-openai",
    "opentelemetry-instrumentation-threading",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-otlp-proto-grpc",
    "openai",
    "anthropic",
)
_FALSE = ("false", "0", "no", "off")


def versions() -> Iterator[Finding]:
    """The installed packages, and those whose requirements are not met."""
    there = installed(_PACKAGES)
    wrong = list(_conflicts(there))
    for package, asked, got in wrong:
        yield Finding.problem(
            package,
            f"it asks for {asked}, but {got}: install versions that go together "
            f"(pip install -U otel-rollout, and what pip check says)",
        )
    if not wrong:
        yield Finding.ok("versions", f"python {platform.python_version()}, {listed(there)}")


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    there = {}
    for name in names:
        try:
            there[name] = version(name)
        except PackageNotFoundError:
            continue
    return there


def listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}".rstrip() for name, number in versions.items())


def _conflicts(there: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(package, what it asks for, what is there instead) of what does not go together."""
    for package in there:
        for text in requires(package) or ():
            try:
                asked = Requirement(text)
            except InvalidRequirement:
                continue
            if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
                continue
            try:
                got = version(asked.name)
            except PackageNotFoundError:
                yield package, str(asked), "it is not installed"
                continue
            if not asked.specifier.contains(got, prereleases=True):
                yield package, f"{asked.name}{asked.specifier}", f"{got} is installed"


def environment() -> Iterator[Finding]:
    """Environment variables that switch recording, or texts on spans, off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding.problem(
            "OTEL_SDK_DISABLED", "it is true: nothing is recorded at all. Unset it"
        )
    if os.environ.get("TRACELOOP_TRACE_CONTENT", "").strip().lower() in _FALSE:
        yield Finding.warning(
            "TRACELOOP_TRACE_CONTENT",
            "it is off: LLM spans have no texts, so nobody can read them in a trace backend. "
            "Trajectories have them all the same",
        )
