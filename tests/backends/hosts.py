"""Hosts with addresses of their own, and programs on them that are killed and started again.

A host is a network namespace where this user may make them, else this machine with ports of its
own; only a namespace's link can be cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.ports import free_ports

SECONDS = 90.0
"""Time for a program to be ready: Go and Java start slowly on a busy machine."""
_NETWORK = "192.0.2"  # for documentation: nobody's


@dataclass
class Host:
    """One host of a network."""

    name: str
    address: str
    namespace: str | None
    """None: this machine."""
    _ports: Iterator[int] = field(default_factory=lambda: iter(free_ports(64)))

    def free_address(self) -> str:
        """An address and a port on it that no other program of the tests has."""
        return f"{self.address}:{next(self._ports)}"

    def command(self, *command: str) -> list[str]:
        """The command that runs a command on this host."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*inside, *command]

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """The host's link is down meanwhile; connections stay open and carry nothing."""
        if self.namespace is None:  # as far as one machine can have it
            yield
            return
        _ip("-n", self.namespace, "link", "set", "eth0", "down")
        try:
            yield
        finally:
            _ip("-n", self.namespace, "link", "set", "eth0", "up")


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts that reach each other, and nothing else."""
    with ExitStack() as stack:
        try:
            switch = _namespace(stack, "switch")
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            made = {n: _wired(stack, switch, n, i) for i, n in enumerate(names, 1)}
        except (OSError, subprocess.CalledProcessError):
            made = {name: Host(name, "127.0.0.1", None) for name in names}
        yield made


def _wired(stack: ExitStack, switch: str, name: str, number: int) -> Host:
    namespace, address = _namespace(stack, name), f"{_NETWORK}.{number}"
    peer = f"port{number}"
    _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", peer, "netns", switch)
    _ip("-n", switch, "link", "set", peer, "master", "switch", "up")
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip("-n", namespace, "link", "set", link, "up")
    return Host(name, address, namespace)


def _namespace(stack: ExitStack, name: str) -> str:
    namespace = f"rollout-{os.getpid()}-{name}"
    _ip("netns", "add", namespace)
    stack.callback(_ip, "netns", "delete", namespace)
    return namespace


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@dataclass
class Program:
    """A program on a host, which can be killed and started again."""

    host: Host
    command: list[str]
    folder: Path
    ready: str
    """A text of its output from which on it serves."""
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What the last start of it has written."""
        return self.folder / f"log-{self.starts}.txt"

    def start(self) -> Program:
        """Start it, and wait until it is ready."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.host.command(*self.command),
                cwd=self.folder,
                env={**inherited, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while self.ready.encode() not in self.log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                shown = self.log.read_text(errors="replace")[-4000:]
                pytest.fail(f"{' '.join(self.command)} is not ready:\n{shown}", pytrace=False)
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        """SIGKILL, to all that it has started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where it does not end."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing meanwhile, and its connections stay open."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self, seconds: float) -> int:
        """The exit status of a program that ends by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def has_ended(self) -> bool:
        """True if it does not run."""
        return self._process is None or self._process.poll() is not None

    def _end(self, how: signal.Signals) -> None:
        if (process := self._process) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = None
