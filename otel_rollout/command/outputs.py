"""What a verb may write to: never what it reads, and no file of another kind."""

from __future__ import annotations

import argparse
import os

_REPLACED = ("output", "html")
"""Arguments that name a file which a verb replaces, or a folder that it adds to."""
_APPENDED = {"out": "trajectories", "spans": "spans"}
"""Arguments that name a file which a verb appends to, with what is in it."""
_BESIDE = (".part", ".groups")
"""Ends of the names of files that `export` keeps beside its output while it runs."""
_HEAD = 1 << 16
"""Bytes of the beginning of a file that show what it is."""


def check_outputs(options: argparse.Namespace) -> None:
    """SystemExit, before anything is opened, if an output of the verb is one of its sources, or has
    something that the verb would destroy.
    """
    sources = [*(getattr(options, "sources", None) or ()), *getattr(options, "started", ())]
    for argument in _REPLACED:
        name = getattr(options, argument, None)
        if name and name != "-":
            _check_replaced(options, name, sources)
    appended = {name: getattr(options, name, None) for name in _APPENDED}
    if appended["out"] and appended["spans"] and _is_same(appended["out"], appended["spans"]):
        options.wrong(f"--out and --spans: expected two files, got {appended['out']!r} for both")
    for argument, name in appended.items():
        kind = _kind_of(name) if name else None
        if kind is not None and kind != _wanted(options, argument):
            options.wrong(
                f"--{argument}: expected a new file or one of {_wanted(options, argument)}, and "
                f"{name!r} has {kind}: name another file"
            )


def _check_replaced(options: argparse.Namespace, name: str, sources: list[str]) -> None:
    for source in sources:
        for written in (name, *(name + end for end in _BESIDE)):
            if _is_same(source, written) or _is_inside(written, source):
                options.wrong(
                    f"-o: {name!r} would destroy the SOURCE {source!r}: name another file"
                )
    is_unfinished = os.path.isdir(name + _BESIDE[1])  # the same command goes on with it
    is_kept = os.path.isfile(name) and os.path.getsize(name) > 0 and not is_unfinished
    if is_kept and not options.force:
        options.wrong(
            f"{name!r} is there already: name another file, or give --force to replace it"
        )


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _is_inside(name: str, folder: str) -> bool:
    """True if the file is in a folder that is read, at any depth, or the folder is in it."""
    if not os.path.isdir(folder):
        return False
    paths = os.path.realpath(name), os.path.realpath(folder)
    return os.path.commonpath(paths) in paths


def _wanted(options: argparse.Namespace, argument: str) -> str:
    return "rows" if getattr(options, "to", None) else _APPENDED[argument]


def _kind_of(name: str) -> str | None:
    """What a file has; None where it is empty, or no file."""
    if not os.path.isfile(name):
        return None
    with open(name, "rb") as file:
        head = file.read(_HEAD).lstrip()
    if not head:
        return None
    marks = {b'"resourceSpans"': "spans", b'"schema_version"': "trajectories"}
    return next((kind for mark, kind in marks.items() if mark in head), "something else")
