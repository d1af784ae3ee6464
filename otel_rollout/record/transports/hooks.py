"""Hooks around methods of other libraries: put in once, found again, and taken out.

A library that is not needed is hooked when somebody imports it. What others put around a hook, or
in its place, is theirs: it stays when the hook goes.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

from otel_rollout.record.boundary import INCOMPLETE, guarded

logger = logging.getLogger("otel_rollout")


@dataclass(frozen=True, slots=True)
class Hook:
    """A wrapper, as `wrapt.FunctionWrapper` takes it, around one method of a library."""

    owner: str
    """Name of the class that has the method, in the module that is hooked. "": the module has it
    itself, as a function."""
    method: str
    wrapper: Callable[..., Any]
    required: bool = True
    """False if calls are recorded also where the library lacks the method."""

    @property
    def name(self) -> str:
        """The method as messages name it, `Class.method`."""
        return f"{self.owner}.{self.method}" if self.owner else self.method

    def owner_in(self, module: ModuleType) -> Any:
        """The class that has the method, or the module; `object` where it has no such class."""
        return getattr(module, self.owner, object) if self.owner else module

    def is_missing(self, module: ModuleType) -> bool:
        """True if this version of the library lacks a method that is required.

        One that the class only inherits is not the one that is hooked.
        """
        return self.required and self.method not in vars(self.owner_in(module))

    def is_in_place(self, module: ModuleType) -> bool:
        """True if the wrapper is on the method, also under those of others."""
        return self.layer(self.owner_in(module)) is not None

    def layer(self, owner: Any) -> Any:
        """The wrapped method, which may be under wrappers of others. None: it is not there."""
        method: Any = vars(owner).get(self.method)
        while method is not None and getattr(method, "_self_wrapper", None) is not self.wrapper:
            method = getattr(method, "__wrapped__", None)
        return method


class Hooks:
    """The hooks that are in place in this process."""

    def __init__(self) -> None:
        self.installed: list[tuple[Any, str, Any]] = []
        """Class or module, name of the method, and the wrapped method. Empty: hooks do nothing."""
        self._wanted = False
        """True if libraries that are imported from now on are hooked."""
        self._awaited: set[str] = set()
        """Modules whose import is waited for; wrapt keeps such a hook for good."""
        self._reported: set[str] = set()
        """Modules that were found to lack a method."""
        self._lock = threading.Lock()

    def install(self, name: str, hooks: tuple[Hook, ...]) -> None:
        """Hook the module of this name now if it is imported, else when it is.

        A version without the methods is left as it is, with one warning in the log.
        """
        self._wanted = True
        if name in sys.modules:
            # Another thread may be importing it: this waits for that thread.
            self._imported(hooks, importlib.import_module(name))
        elif name not in self._awaited:
            self._awaited.add(name)
            wrapt.register_post_import_hook(partial(self._imported, hooks), name)

    def remove(self) -> None:
        """Take all of them out again. One that others have wrapped stays, and does nothing."""
        with self._lock:
            self._wanted = False
            while self.installed:
                owner, name, layer = self.installed.pop()
                outermost: Any = vars(owner).get(name)
                if outermost is layer:
                    setattr(owner, name, outermost.__wrapped__)

    @guarded(INCOMPLETE)
    def _imported(self, hooks: tuple[Hook, ...], module: ModuleType) -> None:
        missing = [hook.name for hook in hooks if hook.is_missing(module)]
        if not missing:
            with self._lock:
                for hook in hooks if self._wanted else ():
                    self._put_in(hook, hook.owner_in(module))
        elif module.__name__ not in self._reported:
            self._reported.add(module.__name__)
            logger.warning(
                "calls of %s are not captured: this version has no %s",
                module.__name__.removesuffix("._base_client"),
                ", ".join(missing),
            )

    def _put_in(self, hook: Hook, owner: Any) -> None:
        """Wrap the method, or find the wrapper that is there: others may have wrapped it."""
        method, layer = vars(owner).get(hook.method), hook.layer(owner)
        if layer is None and method is not None:
            in_place: Any = self.installed  # true while it holds any: no function is called
            layer = wrapt.FunctionWrapper(method, hook.wrapper, enabled=in_place)
            setattr(owner, hook.method, layer)
        if layer is not None and all(layer is not known for _, _, known in self.installed):
            self.installed.append((owner, hook.method, layer))
