"""Arguments of the command line: how one is declared, and what reads its text."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from otel_rollout.errors import ConfigurationError


def key_value(text: str) -> tuple[str, str]:
    """An option KEY=VALUE as a pair."""
    name, is_there, value = text.partition("=")
    if not name or not is_there:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name, value


def policy_version(text: str) -> str | int:
    """A version: a number where it is one, else the text."""
    return int(text) if text.isascii() and text.isdigit() else text


def lag(text: str) -> int:
    """A number of versions, 0 and more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of versions, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time of more than 0 seconds."""
    found = number(text)
    if found <= 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text!r}")
    return found


def number(text: str) -> float:
    """A finite number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return found


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def limits_of(prefix: str, kinds: Mapping[str, type[int | float]]) -> dict[str, Any]:
    """The limits that the environment gives, each in a variable of its name after the prefix.

    ConfigurationError for one that is no number of its kind, or not above 0.
    """
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        if text := os.environ.get(variable := prefix + name.upper()):
            try:
                found[name] = kind(text)
            except ValueError:
                found[name] = 0
            if not 0 < found[name] < math.inf:
                what = "a whole number" if kind is int else "a number"
                raise ConfigurationError(f"{variable}: expected {what} above 0, got {text!r:.100}")
    return found


class PrintVersion(argparse.Action):
    """Prints the version; what reads it takes longer to import than all else, so it is late."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, argparse.SUPPRESS, 0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(import_module("importlib.metadata").version("otel-rollout"))
        parser.exit()


Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **settings: Any) -> Argument:
    """An argument as `add_argument` takes it."""
    return names, settings


def flag(name: str, text: str) -> Argument:
    """A switch; `text` is its help."""
    return argument(name, action="store_true", help=text)


def option(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """An option with a value; `text` is its help."""
    return argument(name, metavar=metavar, help=text, **settings)
