"""Names of a package that load their module when they are first used (PEP 562).

The list of the names is the package's `__init__.pyi`, which type checkers and editors read too.
Only packages whose modules are costly to import do this; the others import in their `__init__`.
And functions that are called when another module is imported.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

logger = logging.getLogger("otel_rollout")


def load_on_first_use(
    package: str, file: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` for a package whose `__init__.py` is `file`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    home_of = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own_name = home_of[name]
        value = getattr(import_module(module), own_name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return sorted(home_of), get, names


def loaded_on_first_call(module: str, name: str) -> Callable[..., Any]:
    """A function that calls the one of this name, whose module is imported at the first call."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(module), name)(*arguments)

    return call


def call_once_imported(awaited: Sequence[str], module: str, name: str) -> None:
    """Call the function of this name in a module once one of the awaited modules is imported.

    It runs inside that import, so what it raises is logged.
    """

    def call(_: object) -> None:
        try:
            getattr(import_module(module), name)()
        except Exception:
            logger.exception("%s.%s could not be called", module, name)

    watch = import_module("wrapt").register_post_import_hook
    for each in awaited:
        watch(call, each)
