"""The libraries of the extra `gateway`, imported when a gateway is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from otel_rollout.errors import ConfigurationError


def library(name: str) -> Any:
    """A module of the extra. ConfigurationError where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigurationError(
            f"otel_rollout.gateway needs the package {name.partition('.')[0]}: "
            f"pip install 'otel-rollout[gateway]'"
        ) from None
