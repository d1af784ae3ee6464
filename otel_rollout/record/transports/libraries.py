"""Every HTTP library that is hooked, listed once."""

from otel_rollout.record.hooks import Hook
from otel_rollout.record.transports import httpx

TRANSPORTS: dict[str, tuple[Hook, ...]] = {
    "httpx": httpx.HOOKS,
    "httpx2": httpx.HOOKS,
}
"""The hooks of each library, by the module that has what they are on."""
