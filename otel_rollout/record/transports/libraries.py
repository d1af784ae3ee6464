"""Every HTTP library that is hooked, listed once."""

from otel_rollout.record.transports import aiohttp, httpx, lm15, urllib3
from otel_rollout.record.transports.hooks import Hook

TRANSPORTS: dict[str, tuple[Hook, ...]] = {
    "httpx": httpx.HOOKS,
    "httpx2": httpx.HOOKS,
    "aiohttp.client": aiohttp.HOOKS,
    "requests.sessions": urllib3.REQUESTS,
    "botocore.httpsession": urllib3.BOTOCORE,
    "lm15.transports._sync": lm15.HOOKS,
    "lm15.transports._async": lm15.ASYNC_HOOKS,
    "dspy._vendor.lm15.transports._sync": lm15.HOOKS,
    "dspy._vendor.lm15.transports._async": lm15.ASYNC_HOOKS,
    "urllib3.poolmanager": urllib3.POOL_MANAGER,
    "urllib3.connectionpool": urllib3.CONNECTION_POOL,
    "http.client": urllib3.HTTP_CLIENT,
}
"""The hooks of each library, by the module that has what they are on."""
