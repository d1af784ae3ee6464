"""The programs of deploy/ as they are run on many hosts: receivers, collectors, rebuilders."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.backends.hosts import Host, Program
from tests.backends.programs import REPOSITORY, binary

DEPLOY = REPOSITORY / "deploy"
READY = "Everything is ready"
TOKEN = "a token of receivers"
_MAIN = str(Path(sys.executable).with_name("otel-rollout"))


def here(name: str = "here") -> Host:
    """A host that is this machine."""
    return Host(name, "127.0.0.1", None)


def receiver(host: Host, folder: Path, *options: str, **environment: str) -> Program:
    """A receiver; the last word of its command is its address for gRPC."""
    command = [_MAIN, "receive", "--journal", "journal", "--out", "trajectories.jsonl", *options]
    command += ["--token", TOKEN, "--http", host.free_address(), "--grpc", host.free_address()]
    return Program(host, command, folder, "grpc ", {"PYTHONPATH": str(REPOSITORY), **environment})


def agents_collector(host: Host, folder: Path, receivers: Sequence[str]) -> Program:
    """A collector that sends to receivers at these addresses."""
    return _collector(
        host,
        folder,
        "collector-agent.yaml",
        OTEL_ROLLOUT_RECEIVERS=json.dumps(receivers),
        OTEL_ROLLOUT_TOKEN=TOKEN,
    )


def kafka_collector(host: Host, folder: Path, brokers: str) -> Program:
    """A collector that sends to Kafka."""
    kafka = json.dumps(brokers.split(","))
    return _collector(host, folder, "collector-kafka.yaml", OTEL_ROLLOUT_KAFKA=kafka)


def endpoint(collector: Program) -> str:
    """Where a collector listens, over HTTP."""
    return f"http://{collector.environment['OTEL_ROLLOUT_OTLP_HTTP']}"


def _collector(host: Host, folder: Path, config: str, **environment: str) -> Program:
    """A collector with a shipped configuration."""
    command = [str(binary("otelcol-scale")), "--config", str(DEPLOY / config)]
    places = {
        "OTEL_ROLLOUT_OTLP_GRPC": host.free_address(),
        "OTEL_ROLLOUT_OTLP_HTTP": host.free_address(),
        "OTEL_ROLLOUT_HEALTH": host.free_address(),
        "OTEL_ROLLOUT_METRICS_PORT": host.free_address().rpartition(":")[2],
    }
    return Program(host, command, folder, READY, {**places, **environment})


def rebuilder(folder: Path, brokers: str, *options: str) -> Program:
    """One of the processes that rebuild from Kafka."""
    command = [_MAIN, "rebuild", "--kafka", brokers, *options]
    return Program(
        here(), command, folder, "spans -> trajectories", {"PYTHONPATH": str(REPOSITORY)}
    )
