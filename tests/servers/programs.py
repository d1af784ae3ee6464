"""The real vLLM and llama.cpp's real server, each a process on a free loopback port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.kit.ports import free_ports

START_SECONDS = 600.0  # vLLM imports for half a minute where nothing else runs, else for minutes
STOP_SECONDS = 20.0

_VLLM = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",  # for /pause and new weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# A proxy set in the environment must not see, or refuse, what goes to this host.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def start_vllm(
    model: Path, log: Path, *options: str, python: str = sys.executable
) -> AbstractContextManager[str]:
    """Its address, from when it answers; python: of the environment that has vLLM."""
    (port,) = free_ports(1)
    # Not the command `vllm`, which asks for the version of a package that is not `vllm-cpu`.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]
    return _running([*command, *options], _VLLM, port, log)


def start_llama(model: Path, log: Path) -> AbstractContextManager[str]:
    """Its address, from when it answers."""
    (port,) = free_ports(1)
    program = Path(__file__).with_name("llama_server.py")
    return _running(
        [sys.executable, str(program), str(model / "model.gguf"), str(port)], {}, port, log
    )


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], port: int, log: Path
) -> Iterator[str]:
    """The address, from when the process is healthy; at the end all its processes are stopped."""
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # vLLM has processes of its own
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                state = "runs, but is not healthy" if process.poll() is None else "ended"
                shown = log.read_text(errors="replace")[-8000:]
                pytest.fail(f"{' '.join(command)} {state}; {log} says\n{shown}", pytrace=False)
            time.sleep(0.2)
        yield address
    finally:
        _stop(process)


def _is_healthy(address: str) -> bool:
    try:
        with _opener.open(f"{address}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what it started may outlive it
    except ProcessLookupError:
        pass
    process.wait()
