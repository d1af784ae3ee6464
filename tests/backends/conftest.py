"""The real Jaeger, collector, Phoenix and MLflow, started for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.programs import (
    Collector,
    Jaeger,
    Page,
    RunCollector,
    binary,
    start_collector,
    start_jaeger,
    start_mlflow,
    start_phoenix,
)


@pytest.fixture(scope="session")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """A Jaeger of this test session."""
    with start_jaeger(tmp_path_factory.mktemp("jaeger")) as started:
        yield started


@pytest.fixture(scope="session")
def collector(jaeger: Jaeger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """A collector of this test session, with the shipped config, in front of that Jaeger."""
    folder = tmp_path_factory.mktemp("collector")
    with start_collector(folder, OTEL_ROLLOUT_JAEGER=jaeger.otlp_grpc) as started:
        yield started


@pytest.fixture(scope="session")
def run_collector() -> RunCollector:
    """`run_collector(folder, config=..., OTEL_ROLLOUT_...=...)`: one more, to be broken by a test.

    It runs in `folder`, with the shipped config and no Jaeger unless told otherwise.
    """
    return start_collector


@pytest.fixture(scope="session")
def otelcol() -> Path:
    """The collector's binary."""
    return binary("otelcol")


@pytest.fixture(scope="session")
def jaeger_binary() -> Path:
    """Jaeger's binary."""
    return binary("jaeger")


@pytest.fixture(scope="session")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A Phoenix of this test session."""
    with start_phoenix(tmp_path_factory.mktemp("phoenix")) as started:
        yield started


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """An MLflow of this test session."""
    with start_mlflow(tmp_path_factory.mktemp("mlflow")) as started:
        yield started
