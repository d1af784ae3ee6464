"""Ports for programs that can only be told one: they bind it some time after it was chosen."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(10_000, 32_768)
"""No connection of another test is given one of these: systems take theirs from above."""


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody has bound."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports are free")
