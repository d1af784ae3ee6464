"""Phoenix as a program that listens on 127.0.0.1 alone: its gRPC port has no setting for that."""

from __future__ import annotations

import sys
from typing import Any

import grpc.aio
from phoenix.server.main import main

make_server = grpc.aio.server


def server(*args: Any, **options: Any) -> Any:
    """A gRPC server that binds this host where it is told to bind all addresses."""
    made: Any = make_server(*args, **options)
    bind = made.add_insecure_port
    made.add_insecure_port = lambda address: bind(address.replace("[::]", "127.0.0.1"))
    return made


grpc.aio.server = server
sys.argv = ["phoenix", "serve"]
main()
