"""`TrajectoryReceiver`: spans of rollouts in over OTLP, whole trajectories out."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from otel_rollout.errors import ConfigurationError
from otel_rollout.evidence import OpenRollouts
from otel_rollout.export import JsonlTrajectoryExporter, TrajectoryExporter
from otel_rollout.extras import module_of
from otel_rollout.gateway import Served
from otel_rollout.hosts import LOOPBACK, is_loopback
from otel_rollout.journal import SEGMENT_BYTES, Journal, Place
from otel_rollout.receive.endpoints import GrpcEndpoint, HttpEndpoint
from otel_rollout.receive.handover import HandOver
from otel_rollout.receive.heads import HeadFile
from otel_rollout.receive.intake import Intake, Limits
from otel_rollout.receive.outputs import ExporterOutput, FileOutput, Output, RowFormat
from otel_rollout.worker_processes import pool_of

_HEADER_SECONDS = 20.0
Address = tuple[str, int]
"""Host and port; port 0 is any free one."""


class TrajectoryReceiver(Served["TrajectoryReceiver"]):
    """Receives spans of rollouts over OTLP, and hands their trajectories over when they are whole.

        with TrajectoryReceiver("trajectories.jsonl", journal="journal") as receiver:
            print(receiver.grpc_address, receiver.url)

    In the running event loop (`async with`), or, with a plain `with`, in a thread of its own. A
    request is answered when its spans are on the disk, in the journal. A rollout is handed over
    when its spans prove that it is whole, with the others of its group; or, after a time in which
    no span of it came, with what is missing. Each is handed over at least once.

    out: a file of trajectories, one a line; or any exporter of trajectories.
    to: an exporter of rows by its name, as `otel-rollout export --to` has it: the file gets its
        rows instead. None: trajectories. options: of this exporter, as texts.
    journal: a folder, which one receiver uses at a time. It keeps the heads of what was handed
        over, for `otel-rollout audit`.
    grpc, http: where to listen. Another host than this machine needs a token.
    rollout_seconds, group_seconds: how long after the last span of a rollout, or of a group, it is
        handed over without what is missing. A group whose size no span names waits for that time.
    token: what clients have to send, as `Authorization: Bearer TOKEN`. None: nothing.
    tls: the files of a certificate and of its key. None: no TLS.
    jobs: processes that rebuild trajectories. 0: a thread of this one does.
    journal_bytes: bytes of the journal at most; when it is full, clients have to try again. None:
        as many as the disk takes.
    limits: what is taken.

    ConfigurationError for a wrong option, without the extra `receive`, and if another process uses
    the journal; OSError if a port is not free.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | TrajectoryExporter,
        *,
        journal: str | os.PathLike[str],
        to: str | None = None,
        options: Mapping[str, str] | None = None,
        grpc: Address = ("127.0.0.1", 4317),
        http: Address = ("127.0.0.1", 4318),
        rollout_seconds: float = 3600,
        group_seconds: float = 7200,
        token: str | None = None,
        tls: tuple[str, str] | None = None,
        jobs: int = 0,
        journal_bytes: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        for module in ("grpc", "uvicorn", "httptools"):
            module_of("receive", module, "otel-rollout receive")
        for name, (host, _) in (("grpc", grpc), ("http", http)):
            if token is None and not is_loopback(host):
                raise ConfigurationError(
                    f"receiver, {name}: {host!r} can be reached by others, which needs a token: "
                    f"name one (--token-file)"
                )
        self._limits = limits or Limits()
        if journal_bytes is not None and journal_bytes < self._limits.body_bytes:
            raise ConfigurationError(
                f"receiver, journal_bytes: expected room for a request of "
                f"{self._limits.body_bytes} bytes at least, got {journal_bytes}"
            )
        self._rows = None if to is None else RowFormat(to, tuple(sorted((options or {}).items())))
        if self._rows is not None:
            self._rows.check()
            if not isinstance(out, str | os.PathLike):
                raise ConfigurationError("receiver, to: expected a file as `out` for its rows")
        self._out, self._jobs, self._grpc_at, self._token = out, jobs, grpc, token
        self._folder, self._journal_bytes = Path(journal), journal_bytes
        self._seconds = rollout_seconds, group_seconds
        self._tls_files = tls and _key_and_certificate(*tls)
        self.grpc_address = ""
        """Its address for OTLP over gRPC, HOST:PORT, once it is served."""
        super().__init__(None, *http, _HEADER_SECONDS, tls=tls)

    def _open(self) -> None:
        """Open the journal, and go on with what is in it."""
        output, most = self._output(), self._journal_bytes
        segment = SEGMENT_BYTES if most is None else min(SEGMENT_BYTES, most // 64)
        self._journal = Journal(self._folder, segment_bytes=segment, max_bytes=most)
        self._heads = HeadFile(self._folder)
        rollout_seconds, group_seconds = self._seconds
        self._rollouts = OpenRollouts[Place](
            rollout_seconds=rollout_seconds,
            group_seconds=group_seconds,
            rollout_is_done=self._heads.has_rollout,
            group_is_done=self._heads.has_group,
        )
        lock = self._lock = threading.RLock()
        opened = self._journal, self._heads, self._rollouts
        self._handover = HandOver(
            *opened, output, lock, self._workers, 2 * max(1, self._jobs), self._rows
        )
        self._intake = Intake(*opened, self._limits, lock, self._handover.look)
        self._intake.replay(time.monotonic())
        taken = self._intake, self._limits, self._token
        self._grpc = GrpcEndpoint(*taken, self._tls_files)
        self._application = HttpEndpoint(*taken, LOOPBACK | {self._host}, self.metrics)

    def _output(self) -> Output:
        out = self._out.path if isinstance(self._out, JsonlTrajectoryExporter) else self._out
        if isinstance(out, str | os.PathLike):
            return FileOutput(out, is_rows=self._rows is not None)
        return ExporterOutput(out)

    def _workers(self) -> Executor:
        if not self._jobs:
            return ThreadPoolExecutor(1, "otel-rollout-rebuild")
        return pool_of(self._jobs)

    async def __aenter__(self) -> TrajectoryReceiver:
        self._open()
        self._intake.start()
        self._handover.start()
        try:
            host, port = self._grpc_at
            self.grpc_address = f"{host}:{await self._grpc.start(host, port)}"
            return await super().__aenter__()
        except BaseException:
            await self._ended()
            raise

    def _begun(self) -> TrajectoryReceiver:
        return self

    async def _ended(self) -> None:
        await self._grpc.stop()
        self._close()

    def _close(self) -> None:
        """Answer what waits, hand over what is ready, and close the files."""
        if self._intake.is_running:
            self._intake.stop()
        if self._handover.is_running:
            self._handover.stop()
        self._heads.close()
        self._journal.close()

    @property
    def is_running(self) -> bool:
        """True while it takes requests and hands over."""
        return self._intake.is_running and self._handover.is_running

    def counts(self) -> dict[str, int]:
        """Its counters by name: spans by what they were, requests by answers, rollouts by ends."""
        with self._lock:
            held = len(self._rollouts)
        sums = Counter({f"handed_over_{k}": n for k, n in self._handover.counts.items()})
        sums.update({f"received_{k}": n for k, n in self._intake.counts.items()})
        return {**sums, "open_rollouts": held, "journal_bytes": self._journal.size}

    def metrics(self) -> str:
        """The same as Prometheus reads it, and what was missing of rollouts that were not whole."""
        found = self.counts()
        for reason, count in self._handover.reasons.items():
            found[f'not_whole{{reason="{reason}"}}'] = count
        return "".join(f"otel_rollout_receiver_{name} {found[name]}\n" for name in sorted(found))


def _key_and_certificate(certificate: str, key: str) -> tuple[bytes, bytes]:
    """What is in these files. ConfigurationError unless they belong together."""
    found = Path(key).read_bytes(), Path(certificate).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"receiver, tls: expected the files of a certificate and of its key, got "
            f"{certificate!r} and {key!r} ({error.reason or error})"
        ) from None
    return found
