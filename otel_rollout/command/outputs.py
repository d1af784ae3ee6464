"""What a verb may write to: never what it reads, and no file of another kind."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from otel_rollout import export, otlp
from otel_rollout.lines import STARTED

_REPLACED = ("output", "html")
"""Arguments that name a file which a verb replaces, or a folder that it adds to."""
_APPENDED = {"out": "trajectories", "spans": "spans"}
"""Arguments that name a file which a verb appends to, with what is in it."""
_BESIDE = (".part", ".groups")
"""Ends of the names of the file and the folder that `export` has beside its output meanwhile."""
_HEAD = 1 << 16
"""Bytes of the beginning of a file that show what it is."""


def check_outputs(options: argparse.Namespace) -> None:
    """SystemExit, before anything is opened, if an output would destroy or mix what is there."""
    sources = [*(getattr(options, "sources", None) or ()), *getattr(options, "started", ())]
    for argument in _REPLACED:
        name = getattr(options, argument, None)
        if argument == "html" and name == "-":
            options.wrong("--html: expected the name of a file, got '-': name another file")
        if name and name != "-":
            _check_replaced(options, name, sources)
    _check_appended(options)


def _check_appended(options: argparse.Namespace) -> None:
    appended = {name: getattr(options, name, None) for name in _APPENDED}
    out, spans = appended.values()
    if out and spans and any(_is_same(each, spans) for each in (out, out + STARTED)):
        options.wrong(f"--spans: {spans!r} is written by --out, too: name another file")
    for argument, name in appended.items():
        wanted = "rows" if getattr(options, "to", None) else _APPENDED[argument]
        if name and (kind := _kind_of(name, wanted)) != wanted:
            options.wrong(
                f"--{argument}: expected a new file or one of {wanted}, and {name!r} has {kind}: "
                f"name another file"
            )


def _check_replaced(options: argparse.Namespace, name: str, sources: list[str]) -> None:
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        return  # a device, or a pipe: nothing in it is destroyed
    path = os.path.realpath(name)
    beside = [path + end for end in _BESIDE] if options.verb == "export" else []
    for read in (each for source in sources for each in _read_with(source)):
        for written in (path, *beside):
            if _is_same(read, written) or _is_inside(written, read):
                options.wrong(f"-o: {name!r} would destroy the SOURCE {read!r}: name another file")
    is_unfinished = beside and os.path.isfile(os.path.join(beside[1], "trajectories"))
    if not options.force and not is_unfinished:  # the same command goes on with it
        _check_kept(options, name, *beside[:1])


def _check_kept(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if os.path.isfile(name) and os.path.getsize(name) > 0:
            advice = "name another file, or give --force to replace it"
            options.wrong(f"{name!r} is there already: {advice}")


def _read_with(source: str) -> Iterator[str]:
    """A source, and the files that are read with it, or are the record of its rollouts."""
    yield from ("/dev/stdin" if source == "-" else source, source + STARTED)
    yield from otlp.rotated_beside(source)
    if os.path.isdir(source):  # a link in it may lead out of it
        yield from (str(each) for each in Path(source).iterdir() if each.is_file())


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


def _kind_of(name: str, wanted: str) -> str:
    """What a file has, as its beginning shows; what is wanted if it is empty, or no file."""
    if not os.path.isfile(name) or not os.path.getsize(name):
        return wanted
    with open(name, "rb") as file:
        head, _, whole = export.begun_file(file, name)
        content = whole.read(_HEAD).lstrip()
    if export.layout_of(head) == "lines" and b'"trace_id"' in content:
        return "trajectories"
    if b'"resourceSpans"' in content:
        return "spans"
    return wanted if wanted == "rows" and content[:1] in (b"", b"{") else "something else"
