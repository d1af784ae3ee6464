"""Files of documents: trajectories as other programs write them, and as exporters of ours do.

A file is one document, a list of them, or one on each line, indented or not. Beside a file of token
entries NeMo Gym keeps the state of its rollout, which may be that entries are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO

from otel_rollout import lines
from otel_rollout.errors import SpanFormatError
from otel_rollout.export.jsonl import content_lines
from otel_rollout.rebuild import documents
from otel_rollout.wire import Json, loads

OnError = Callable[[SpanFormatError], None]


def lines_of_documents(
    file: BinaryIO, name: str, known: documents.Documents, fail: OnError
) -> Iterator[bytes]:
    """The trajectories of a file of documents as lines of a file of trajectories.

    known: has those that came from other files; they do not come again.
    fail: called for each document that cannot be read; reading goes on.
    """
    is_state = name.endswith(_STATE)
    if is_state and os.path.exists(name.removesuffix(_STATE) + ".tokens.jsonl"):
        return  # that file gives the rollout
    for data, where in () if is_state else _values(file, name, fail):
        found = documents.documents_in(data)
        for number, document in enumerate(found, 1):
            try:
                for trajectory in known.read(document):
                    yield trajectory.to_json().encode() + b"\n"
            except SpanFormatError as error:
                place = f"{where}, element {number}" if found is data else where
                fail(SpanFormatError(f"{place}: {error}"))
    for trajectory in known.rollouts(
        lambda error: fail(SpanFormatError(f"{name}: {error}")), _state_of(name)
    ):
        yield trajectory.to_json().encode() + b"\n"


def _state_of(name: str) -> documents.CaptureState | None:
    """The state of the rollout of a file in a store of NeMo Gym; None for any other file."""
    stem = next((name[: -len(end)] for end in _OF_STORE if name.endswith(end)), None)
    if stem is None:
        return None
    state = _value(_content(stem + _STATE))
    members = state[0] if state is not None and isinstance(state[0], dict) else {}
    is_marked = members.get("incomplete") is True or bool(_content(f"{stem}.tokens.incomplete"))
    begun = _content(f"{stem}.tokens.intents").decode("utf-8", "replace").split()
    return documents.CaptureState(os.path.basename(stem), is_marked, frozenset(begun))


def _content(name: str) -> bytes:
    """The content of a file; b"" where it is not there."""
    with suppress(OSError), open(name, "rb") as file:
        return file.read(lines.LONGEST)
    return b""


_STATE = ".tokens.state.json"
_OF_STORE = (".tokens.jsonl", _STATE)


def _values(file: BinaryIO, name: str, fail: OnError) -> Iterator[tuple[Json, str]]:
    """The JSON values of a file, each with its place: one a line, or one over all of its lines."""
    held: list[bytes] = []
    """The lines of one value over several."""
    size = 0
    try:
        for number, line in _numbered(file, name):
            found = None if held else _value(line)
            size += len(line)
            if found is not None:
                yield found[0], f"{name}, line {number}"
            elif held or size == len(line):  # else lines were values
                held.append(line)
            else:
                fail(SpanFormatError(f"{name}, line {number}: it is not JSON"))
            if held and size > lines.LONGEST:
                raise SpanFormatError(f"its document is {lines.too_long()}")
    except SpanFormatError as error:
        fail(SpanFormatError(f"{name}: {error}"))
        return
    whole = _value(b"".join(held)) if held else None
    if whole is not None:
        yield whole[0], name
    elif held:
        fail(SpanFormatError(f"{name}: it is neither JSON nor lines of JSON: was it cut?"))


def _numbered(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, but blank ones. SpanFormatError for what cannot be read."""
    for number, line in enumerate(content_lines(file, name), 1):
        if line is None:
            raise SpanFormatError(f"line {number} is {lines.too_long()}")
        if not line.isspace():
            yield number, line


def _value(text: bytes) -> tuple[Json] | None:
    """What a text says, alone in a tuple; None if it is no JSON."""
    try:
        return (loads(text),)
    except (ValueError, RecursionError):
        return None
