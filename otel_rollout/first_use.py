"""Names of a package that load their module when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def load_on_first_use(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module-level `__getattr__` for `package`.

    `homes`: the names in each module of the package, the module's name relative to the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
