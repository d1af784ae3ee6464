"""A server that breaks off its reply where a test says, and what the calls of these tests share."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

WAIT = 30.0
"""Seconds for what takes none, on a machine that has other things to do."""
Step = bytes | threading.Event
"""Bytes to send, or an event to wait for."""


class BreakingServer:
    """Answers every request with the same steps, then closes or resets the connection."""

    def __init__(self, steps: Sequence[Step], *, reset: bool = False) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                length = 0
                while (line := self.rfile.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.rfile.read(length)
                with contextlib.suppress(OSError):
                    for step in steps:
                        if isinstance(step, bytes):
                            self.wfile.write(step)
                        else:
                            step.wait(WAIT)
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exc_info()[1], OSError | ValueError):
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def event(delta: str, finish_reason: str | None = None) -> bytes:
    reason = "null" if finish_reason is None else f'"{finish_reason}"'
    return (
        '{"id":"cut-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        f'[{{"index":0,"delta":{{"content":"{delta}"}},"finish_reason":{reason}}}]}}'
    ).encode()


def framed(data: bytes) -> bytes:
    """A server-sent event as a chunk of a chunked body."""
    data = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
