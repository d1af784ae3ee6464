"""Every HTTP library that is hooked, listed once."""

from otel_rollout.record.hooks import Hook
from otel_rollout.record.transports import aiohttp, botocore, httpx, lm15, requests, watched

TRANSPORTS: dict[str, tuple[Hook, ...]] = {
    "httpx": httpx.HOOKS,
    "httpx2": httpx.HOOKS,
    "aiohttp.client": aiohttp.HOOKS,
    "requests.sessions": requests.HOOKS,
    "botocore.httpsession": botocore.HOOKS,
    "lm15.transports._sync": lm15.HOOKS,
    "lm15.transports._async": lm15.ASYNC_HOOKS,
    "dspy._vendor.lm15.transports._sync": lm15.HOOKS,
    "dspy._vendor.lm15.transports._async": lm15.ASYNC_HOOKS,
    "urllib3.poolmanager": watched.URLLIB3_MANAGER,
    "urllib3.connectionpool": watched.URLLIB3_POOL,
    "http.client": watched.HTTP_CLIENT,
}
"""The hooks of each library, by the module that has what they are on."""
