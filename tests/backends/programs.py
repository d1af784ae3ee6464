"""The real Jaeger and the real collector, each a process on free loopback ports."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

COLLECTOR_CONFIG = REPOSITORY / "collector-config.yaml"

JAEGER_CONFIG = REPOSITORY / "tools" / "jaeger.yaml"

START_SECONDS = 60.0  # Jaeger needs one; a machine that compiles beside it, many

STOP_SECONDS = 15.0

# A proxy set in the environment must not see, or refuse, what goes to this host.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Jaeger:
    api_url: str
    otlp_grpc: str
    otlp_http: str


@dataclass(frozen=True)
class Collector:
    otlp_http: str
    otlp_grpc: str
    traces_file: Path
    pid: int


RunCollector = Callable[..., AbstractContextManager[Collector]]


def binary(name: str) -> Path:
    folder = Path(os.environ.get("OTEL_ROLLOUT_TOOLS") or REPOSITORY / ".tools")
    path = folder / name
    if not path.is_file():
        message = f"{path} is missing: run make backends"
        if os.environ.get("CI") or os.environ.get("OTEL_ROLLOUT_REQUIRE_BACKENDS"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return path


def _free_addresses(count: int) -> list[str]:
    with ExitStack() as held:  # all at once, else the same port may come twice
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _is_healthy(url: str) -> bool:
    try:
        with _opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], health: str, folder: Path
) -> Iterator[int]:
    """The process's id, from when it is healthy; at the end it is stopped, whatever happened."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(f"http://{health}"):
            if process.poll() is not None or time.monotonic() > deadline:
                state = "runs, but is not healthy" if process.poll() is None else "ended"
                shown = log.read_text(errors="replace")[-8000:]
                pytest.fail(f"{' '.join(command)} {state}; {log} says\n{shown}", pytrace=False)
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def start_jaeger(folder: Path) -> Iterator[Jaeger]:
    api, api_grpc, otlp_grpc, otlp_http, health = _free_addresses(5)
    environment = {
        "OTEL_ROLLOUT_JAEGER_UI": api,
        "OTEL_ROLLOUT_JAEGER_GRPC": api_grpc,
        "OTEL_ROLLOUT_JAEGER_OTLP_GRPC": otlp_grpc,
        "OTEL_ROLLOUT_JAEGER_OTLP_HTTP": otlp_http,
        "OTEL_ROLLOUT_JAEGER_HEALTH": health,
    }
    command = [str(binary("jaeger")), "--config", str(JAEGER_CONFIG)]
    with _running(command, environment, f"{health}/status", folder):
        yield Jaeger(f"http://{api}", otlp_grpc, f"http://{otlp_http}")


@contextmanager
def start_collector(
    folder: Path, config: Path = COLLECTOR_CONFIG, **settings: str
) -> Iterator[Collector]:
    otlp_grpc, otlp_http, health, nobody = _free_addresses(4)
    environment = {
        "OTEL_ROLLOUT_OTLP_GRPC": otlp_grpc,
        "OTEL_ROLLOUT_OTLP_HTTP": otlp_http,
        "OTEL_ROLLOUT_HEALTH": health,
        "OTEL_ROLLOUT_JAEGER": nobody,
        **settings,
    }
    traces_file = folder / settings.get("OTEL_ROLLOUT_TRACES_FILE", "traces/traces.jsonl")
    command = [str(binary("otelcol")), "--config", str(config)]
    with _running(command, environment, health, folder) as pid:
        yield Collector(f"http://{otlp_http}", otlp_grpc, traces_file, pid)
