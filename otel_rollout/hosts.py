"""Addresses to listen at, and whether a request is for this machine, by the name that it has.

A web page can let a name of its own lead to this machine (DNS rebinding): a browser here then sends
its requests with that name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
"""Names by which only this machine is reached."""
_host = re.compile(r"(?:\[([^][]+)\]|([^][:]+))(?::\d*)?").fullmatch


def is_named(headers: Iterable[tuple[bytes, bytes]], names: frozenset[str] | None) -> bool:
    """True if a request is for one of these names. None: any address that is a number, no name."""
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    found = _host(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found[1] or found[2]
    return is_ip(name) if names is None else name in names


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def why_not_listening(host: str, port: int, error: OSError | None = None) -> str:
    """The sentence about an address that cannot be listened at. error: None: there is no such port.

    It has the system's reason and not its number.
    """
    if error is None:
        return f"port {port}: expected 0 (a free one) to 65535"
    why = (error.strerror or str(error)).partition(" (while ")[0]  # asyncio and socket add where
    return f"port {port} of {host} cannot be used ({why}): name another, or 0 for a free one"


def is_ip(name: str) -> bool:
    """True for an address that is a number."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
