"""The verb `doctor`: sets the process up as a program does, checks it, and prints the findings."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import os
import runpy
import shutil
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from otel_rollout.command.checks import Finding, check
from otel_rollout.errors import ConfigurationError
from otel_rollout.terminal import escaped, number_of
from otel_rollout.wiring import TruncationWarning, configure, shutdown


def doctor(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    findings = [*_set_up(options.setup), *check(server=options.server, model=options.model)]
    width = shutil.get_terminal_size((80, 24)).columns
    lines = textwrap.TextWrapper(width, subsequent_indent=" " * 9, break_on_hyphens=False)
    for each in findings:
        print(lines.fill(escaped(str(each))))
    levels = Counter(finding.level for finding in findings)
    print(f"\n{number_of(levels['problem'], 'problem')}, {number_of(levels['warning'], 'warning')}")
    shutdown(5_000)
    return int(levels["problem"] > 0)


def _set_up(target: str | None) -> Iterator[Finding]:
    """Run the set-up; a finding if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)  # the check reports it
        try:
            run_setup(target)
        except ConfigurationError as error:
            yield Finding("problem", "set-up", str(error))
        except (Exception, SystemExit) as error:  # whatever the user's set-up raises
            text = f"{target or 'configure()'} raised {type(error).__name__}: {error}"
            yield Finding("problem", "set-up", text)


def run_setup(target: str | None) -> None:
    """Set this process up as `target` does: a module, `module:function`, or a Python file.

    A function may be async. A file does not run as `__main__`. None is `configure()` without
    arguments. ConfigurationError if there is no such thing; what the set-up raises goes on.
    """
    name, _, function = (target or "").partition(":")
    if target is None:
        configure()
        return
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigurationError(f"there is no file {name!r}")
        found: Any = runpy.run_path(name, run_name="otel_rollout_setup")
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = vars(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            wanted = "package.module:function, package.module or a file.py"
            raise ConfigurationError(f"there is no module {name!r}: expected {wanted}") from None
    if function:
        if not callable(found.get(function)):
            raise ConfigurationError(f"{name!r} has no function {function!r}")
        if inspect.iscoroutine(result := found[function]()):
            asyncio.run(result)
