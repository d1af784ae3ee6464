"""A Ray of this machine alone, for what needs a real one (`make test-ray`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_raylet_start_wait_time_s": "300",  # a machine that does other things, too
    "RAY_USAGE_STATS_ENABLED": "0",
}


def start() -> Any:
    """Start one; the module `ray`."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]  # else its processes ask a proxy for each other
    os.environ.update(_SETTINGS)
    import ray

    ray.init(
        num_cpus=8,  # what its actors ask for, not what there is
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        _node_ip_address="127.0.0.1",
    )
    return ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The module `ray`, started; it is stopped at the end of the session."""
    ray = start()
    yield ray
    ray.shutdown()
