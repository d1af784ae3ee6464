"""Fixtures of all tests, and the hook that rebuilds the rollouts of every test from their spans.

The hook needs nothing from a test. It watches each of our span processors while the test runs;
then every rollout that ended must be equal to the one that its spans give, shuffled and some of
them twice, over each transport of `tests/kit/transports.py`.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import AsyncIterator, Generator, Iterator

import hypothesis
import openai
import pytest
from opentelemetry import trace
from opentelemetry.instrumentation import dependencies
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter
from otel_rollout.record import capture, openai_client
from tests.kit.calling import Configure
from tests.kit.recording import Clients, Recording
from tests.kit.spending import Spending
from tests.kit.witness import Witness

__all__ = [
    "Clients",
    "Recording",
    "capture_only",
    "clean_environment",
    "clients",
    "configure",
    "frozen_before",
    "imported",
    "no_hook_is_left",
    "pytest_configure",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "recording",
]

# The machine may be slow, and CI must not depend on luck.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize="CI" in os.environ,
    # These judge the first few inputs that are drawn, and so fail by chance.
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
)

hypothesis.settings.load_profile("tests")

# A background job of a shell ignores SIGINT, and nohup SIGHUP: so would the programs of the tests.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_configure(config: pytest.Config) -> None:
    """Sum the CPU seconds of the tests of each folder."""
    config.pluginmanager.register(Spending())


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """What most tests use is imported before the first begins, and versions are read once.

    An instrumentor reads its library's whole metadata each time that it begins.
    """
    vars(dependencies)["version"] = functools.cache(importlib.metadata.version)
    openai.OpenAI(api_key="k").chat.completions.create
    otel_rollout.configure()
    otel_rollout.shutdown()


@pytest.fixture(scope="module", autouse=True)
def frozen_before(imported: None) -> None:
    """What earlier modules of tests imported is not looked at by every collection of a test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test; then each rollout that it recorded is rebuilt from its spans and compared.

    A test where that cannot hold says why: `@pytest.mark.not_replayed("a span is dropped")`.
    """
    marker = item.get_closest_marker("not_replayed")
    if marker is not None:
        assert marker.args, "not_replayed needs a reason"
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        witness = Witness(monkeypatch)
        yield
    witness.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged of odd texts can be sent to the process that runs the tests."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    """Fail the test that leaves a hook behind, not one that runs after it in the process."""
    yield
    every = {openai_client.MODULE: openai_client.HOOKS, **capture.LIBRARIES}
    left = [
        hook.name
        for name, hooks in every.items()
        for hook in hooks
        if name in sys.modules and hook.is_in_place(sys.modules[name])
    ]
    assert left == []


@pytest.fixture(autouse=True)
def clean_environment(
    no_hook_is_left: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """No OTEL_* or OPENAI_* variable of the machine, no global provider of another test."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "OPENAI_")):
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("install") is None:
        # Nothing is asked over TLS: a client would read all certificates, 35 ms of CPU.
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", os.path.dirname(__file__))
    yield
    otel_rollout.shutdown()
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()


@pytest.fixture
def recording() -> Recording:
    """The library, configured as a user would, with a span exporter to look at."""
    exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure(service_name="tests", exporters=[exporter])
    provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    return Recording(provider, exporter, span_exporter)


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    """Servers and clients that are closed at the end of the test."""
    made = Clients()
    yield made
    for client in made.closing:
        if isinstance(client, openai.AsyncOpenAI):
            await client.close()
        else:
            client.close()
    for server in made.servers:
        server.stop()


@pytest.fixture
def configure(request: pytest.FixtureRequest) -> Configure:
    """Configure the library when called, not before."""
    return lambda: request.getfixturevalue("recording")


@pytest.fixture
def capture_only() -> Configure:
    """Configure the library when called, without an instrumentor beside capture."""

    def configure() -> Recording:
        exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
        provider = otel_rollout.configure(exporters=[exporter], instrumentor=None)
        provider.add_span_processor(SimpleSpanProcessor(span_exporter))
        return Recording(provider, exporter, span_exporter)

    return configure
