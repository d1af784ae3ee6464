"""Attributes of what users hold: a name that a class does not have is an error, with a hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import TypeVar

from otel_rollout.terminal import did_you_mean

Class = TypeVar("Class", bound=type)


class Fixed:
    """Base of classes with `__slots__`, whose instances take no other attributes.

    A subclass of such a class without `__slots__` takes any.
    """

    __slots__ = ("__weakref__",)

    def __setattr__(self, name: str, value: object) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            if hasattr(type(self), name):  # a property that cannot be set
                raise
            # Without `name` and `obj`: with them Python adds a suggestion of its own.
            raise AttributeError(_unknown(type(self), name)) from None


def frozen(hint: str) -> Callable[[Class], Class]:
    """A decorator for a frozen dataclass: setting an attribute raises an error with a hint.

    hint: what to do instead, as the end of a sentence.
    """

    def decorate(cls: Class) -> Class:
        def refuse(_: object, name: str, _value: object) -> None:
            known = f"{name} cannot be set" if hasattr(cls, name) else _unknown(cls, name)
            raise FrozenInstanceError(f"{cls.__name__} is read-only: {known}; {hint}")

        cls.__setattr__ = refuse  # type: ignore[assignment,method-assign]
        return cls

    return decorate


def _unknown(cls: type, name: str) -> str:
    public = [known for known in dir(cls) if not known.startswith("_")]
    hint = did_you_mean(name, public)
    if not hint and (own := [field for field in ("metadata", "info") if field in public]):
        hint = f"; values of your own go into `{own[0]}`"
    return f"{cls.__name__} has no attribute {name!r}{hint}"
