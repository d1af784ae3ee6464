"""`python -m otel_rollout.testing`: the default server in the foreground."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from otel_rollout.testing.server import ModelServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the default server until SIGTERM, SIGINT or the end of standard input.

    The first line of output is its base URL.
    """
    parser = argparse.ArgumentParser(prog="python -m otel_rollout.testing")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--chunk-size", type=int, default=8, help="characters per stream event")
    parser.add_argument("--completion-tokens", type=int, help="reply with a text of so many bytes")
    options = parser.parse_args(arguments)
    size = options.completion_tokens
    text = None if size is None else ("lorem ipsum " * (size // 12 + 1))[:size]
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())

    def wait_for_end_of_input() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock, held here, aborts the interpreter's exit
            pass
        stopped.set()

    with ModelServer(text, chunk_size=options.chunk_size, port=options.port) as server:
        print(server.base_url, flush=True)
        threading.Thread(target=wait_for_end_of_input, daemon=True).start()
        while not stopped.is_set():  # no wait(): a signal that comes just before it does not end it
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
