"""Packages that only a part of the library needs: their import, and what to do without them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from otel_rollout.errors import ConfigurationError


def to_install(name: str) -> str:
    """How to install a distribution of this project, such as `otel-rollout[view]`."""
    return f"in a clone, make dist && pip install --find-links dist '{name}'"


def module_of(extra: str, module: str, needed_for: str) -> Any:
    """A module that the extra `extra` brings; ConfigurationError where it cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        raise ConfigurationError(
            f"{needed_for} needs the package {package}, which cannot be imported ({error}): "
            f"{to_install(f'otel-rollout[{extra}]')}"
        ) from None
