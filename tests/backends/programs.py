"""The real Jaeger, collector, Phoenix and MLflow, each a process on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.kit.ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]

COLLECTOR_CONFIG = REPOSITORY / "collector-config.yaml"

JAEGER_CONFIG = REPOSITORY / "tools" / "jaeger.yaml"

# Now, since the tests run without the OTEL_* variables.
TOOLS = Path(os.environ.get("OTEL_ROLLOUT_TOOLS") or REPOSITORY / ".tools")

START_SECONDS = 60.0  # Jaeger needs one; a machine that compiles beside it, many

PAGE_SECONDS = 180.0  # Phoenix and MLflow need ten to thirty

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


@dataclass(frozen=True)
class Page:
    """Phoenix or MLflow."""

    url: str
    """Where its page is, and where it takes OTLP over HTTP."""
    pid: int


T = TypeVar("T")

RunCollector = Callable[..., AbstractContextManager[Collector]]


def binary(name: str) -> Path:
    return _there(TOOLS / name, "run make backends")


def _there(path: Path, hint: str) -> Path:
    """The path. Without the file the test fails where it must run, and is skipped elsewhere."""
    if not path.is_file():
        message = f"{path} is missing: {hint}"
        if os.environ.get("CI") or os.environ.get("OTEL_ROLLOUT_REQUIRE_BACKENDS"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return path


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def _is_healthy(url: str) -> bool:
    try:
        with _opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _running(
    command: list[str],
    environment: Mapping[str, str],
    health: str,
    folder: Path,
    seconds: float = START_SECONDS,
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
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + seconds
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started


@contextmanager
def start_jaeger(folder: Path, config: Path = JAEGER_CONFIG) -> Iterator[Jaeger]:
    api, api_grpc, otlp_grpc, otlp_http, health = free_addresses(5)
    environment = {
        "OTEL_ROLLOUT_JAEGER_UI": api,
        "OTEL_ROLLOUT_JAEGER_GRPC": api_grpc,
        "OTEL_ROLLOUT_JAEGER_OTLP_GRPC": otlp_grpc,
        "OTEL_ROLLOUT_JAEGER_OTLP_HTTP": otlp_http,
        "OTEL_ROLLOUT_JAEGER_HEALTH": health,
    }
    command = [str(binary("jaeger")), "--config", str(config)]
    with _running(command, environment, f"{health}/status", folder):
        yield Jaeger(f"http://{api}", otlp_grpc, f"http://{otlp_http}")


@contextmanager
def start_collector(
    folder: Path, config: Path = COLLECTOR_CONFIG, **settings: str
) -> Iterator[Collector]:
    otlp_grpc, otlp_http, health, nobody = free_addresses(4)
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


@contextmanager
def start_phoenix(folder: Path) -> Iterator[Page]:
    http, grpc = free_addresses(2)
    environment = {
        "PHOENIX_WORKING_DIR": str(folder / "data"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": http.rpartition(":")[2],
        "PHOENIX_GRPC_PORT": grpc.rpartition(":")[2],
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    command = [str(page_program("python")), str(Path(__file__).with_name("phoenix_here.py"))]
    with _running(command, environment, f"{http}/healthz", folder, PAGE_SECONDS) as pid:
        yield Page(f"http://{http}", pid)


@contextmanager
def start_mlflow(folder: Path) -> Iterator[Page]:
    (http,) = free_addresses(1)
    host, _, port = http.rpartition(":")
    command = [str(page_program("mlflow")), "server", "--host", host, "--port", port]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    with _running(command, {}, f"{http}/health", folder, PAGE_SECONDS) as pid:
        yield Page(f"http://{http}", pid)


def page_program(name: str) -> Path:
    """A program of the environment in which Phoenix and MLflow are."""
    return _there(REPOSITORY / ".venv-phoenix" / "bin" / name, "run make .venv-phoenix/.ready")


def eventually(get: Callable[[], T], done: Callable[[T], bool], seconds: float = 20.0) -> T:
    """The value of `get` once it is `done`, or its last one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = get()
        except (LookupError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
        else:
            if done(value) or time.monotonic() > deadline:
                return value
        time.sleep(0.1)
