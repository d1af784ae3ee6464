"""The form of a reply on the wire where it was unusual: with it a replay sends the same again."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.wire import Bounded

JSON, EVENTS = "application/json", "text/event-stream"
"""Content types that are usual, of a reply and of a stream."""


@dataclass(frozen=True, slots=True)
class Form:
    """What of a reply was not as usual: it is that of JSON, or of server-sent events."""

    type: str | None = None
    """Its content type, without a `charset=utf-8`. None: `JSON`, of a stream `EVENTS`."""
    headers: Mapping[str, str] | None = None
    """Headers of an error that its client goes by, such as `retry-after`. None: it has none."""
    line_end: str | None = None
    """What ends the lines of its events. None: a line feed."""
    separator: str | None = None
    """What is between the ids of its prompts. None: a comma alone."""
    framing: str | None = None
    """`lines` if the data of each event came as a line. None: it came as events."""
    raw: str | None = None
    """All of its bytes, as `packed` gives them, where none of these has them."""


USUAL = Form()
"""The form of most replies."""


@dataclass(frozen=True, slots=True)
class Retried:
    """A reply after which the client itself asked once more."""

    status: int
    form: Form = USUAL
    body: str | None = None
    """None: the client did not read it."""


_MOST_BYTES = 1 << 30
"""Bytes of a reply; no recorder keeps as many."""


def packed(raw: bytes) -> str:
    """Bytes as a text that any store keeps."""
    return b64encode(zlib.compress(raw)).decode()


def unpacked(text: str) -> bytes:
    """The inverse of `packed`. ValueError for anything else."""
    try:
        unpacking = zlib.decompressobj()
        raw = unpacking.decompress(b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"bytes of a reply that nobody packed: {error}") from None
    if not unpacking.eof:
        raise ValueError(f"a reply that was cut, or of more than {_MOST_BYTES} bytes")
    return raw


def with_line_feeds(events: bytes, unlike: dict[str, Any]) -> tuple[bytes, bool]:
    """Events with line feeds alone; True if `unlike` says what their lines had in place of them."""
    if b"\r" not in events:
        return events, True
    is_same = events.count(b"\r\n") == events.count(b"\r") == events.count(b"\n")
    if is_same:
        unlike["line_end"] = "\r\n"
    return events.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), is_same


_read_form: Bounded[Form] = Bounded(Form)
_read_retried: Bounded[list[Retried]] = Bounded(list[Retried])


def as_it_was(text: Callable[[str], str | None], damage: list[str]) -> dict[str, Any]:
    """The fields of an exchange by which its bytes can be made again, where they are not usual."""
    found: dict[str, Any] = {"added": text(sc.REQUEST_ADDED)}
    for name, key, read in (
        ("form", sc.RESPONSE_FORM, _read_form),
        ("retried", sc.EXCHANGE_RETRIED, _read_retried),
    ):
        if (written := text(key)) is not None:
            value = read(written)
            if value is None:
                damage.append(f"its {key} cannot be read ({written[:40]!r})")
            else:
                found[name] = value
    return found
