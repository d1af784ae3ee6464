"""Large values beside the spans: in their place is a reference, and a file is named by its digest.

A reference is a JSON object in the place of a JSON value, with the digest and the length of the
text of that value, so what is read back is that text, byte for byte, or nothing. Only texts of the
attributes that `rollout.blobs` names have references: no agent can write one that is read.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.extras import module_of
from otel_rollout.spans.seals import digest_of
from otel_rollout.wire import dumps

logger = logging.getLogger("otel_rollout")

BLOB_PLACES = "OTEL_ROLLOUT_BLOBS"
"""Environment variable with the places that blobs are read from: URLs with spaces between them."""
_MOST = 100
"""Blobs of one response that are looked for before they are asked for."""
_MARK = f'{{"{sc.BLOB}":'
_reference = re.compile(
    re.escape(_MARK) + r'\{"digest":"([0-9a-f]{32})","bytes":(\d{1,18}),"type":"[^"\\]*",'
    r'"uri":"((?:[^"\\]|\\.)*)"\}\}'
)


class Blob(NamedTuple):
    """A value that is beside its span, as its reference names it."""

    digest: str
    """That of its bytes, hex: `digest_of`."""
    size: int
    """Bytes."""
    uri: str
    """Where it was put."""

    def read(self) -> str:
        """The text of the value. SpanFormatError where it is not there, or is another one."""
        for place in map(_place, places()):
            if (size := place.size(self.digest)) is not None:
                data = place.content(self.digest) if size == self.size else None
                if data is None or digest_of(data).hex() != self.digest:
                    raise SpanFormatError(f"its blob {self.uri} is not what was written")
                return data.decode("utf-8", "replace")
        where = " or ".join(places()) or f"any place, since {BLOB_PLACES} names none"
        raise SpanFormatError(f"its blob {self.uri} of {self.size} bytes is not in {where}")


def places() -> list[str]:
    """The URLs of the places that blobs are read from."""
    return os.environ.get(BLOB_PLACES, "").split()


def has_reference(text: str) -> bool:
    """True if something in a text looks like a reference."""
    return _MARK in text


def blob_reference(digest: str, size: int, uri: str) -> str:
    """The JSON object that is written in the place of a value."""
    blob = {"digest": digest, "bytes": size, "type": "application/json", "uri": uri}
    return dumps({sc.BLOB: blob})


def blobs_named(names: str | None) -> list[str]:
    """The attributes with references, of the value of `rollout.blobs`."""
    return (names or "").split(",")


def blobs_in(text: str) -> Iterator[Blob]:
    """What the references in a text name."""
    for digest, size, uri in _reference.findall(text):
        yield Blob(digest, int(size), uri)


def whole_value(text: str) -> str:
    """The value that a text is, or is a reference to. SpanFormatError if that is not there."""
    found = _reference.fullmatch(text)
    return text if found is None else Blob(found[1], int(found[2]), found[3]).read()


def with_blobs(text: str) -> str:
    """The text with each value in its place; a reference to a blob that is not there stays."""

    def value(match: re.Match[str]) -> str:
        try:
            return Blob(match[1], int(match[2]), match[3]).read()
        except SpanFormatError:
            return match[0]

    return _reference.sub(value, text)


def missing_in(text: str) -> list[str]:
    """Why values of a text cannot be read: one sentence each. Nothing is read but sizes."""
    return [
        f"its blob {blob.uri} of {blob.size} bytes is not there"
        for blob in islice(dict.fromkeys(blobs_in(text)), _MOST)
        if not any(_place(place).size(blob.digest) == blob.size for place in places())
    ]


# --- files


class BlobPlace:
    """A folder of a file system that fsspec knows, by its URL, with a file for each blob.

    ConfigurationError without fsspec (the extra `blobs`), or what a file system needs.
    """

    def __init__(self, url: str) -> None:
        fsspec = module_of("blobs", "fsspec", f"a place of blobs ({url})")
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"a place of blobs: expected the URL of a folder of which fsspec knows the file "
                f"system, got {url!r} ({error})"
            ) from None

    def path(self, digest: str) -> str:
        """The path of a blob on the file system."""
        return f"{self._root}/{digest[:2]}/{digest}"

    def put(self, digest: str, data: bytes) -> str:
        """Write a blob, whole or not at all, unless it is there; its URI."""
        path = self.path(digest)
        if self.size(digest) != len(data):
            if "file" not in self._files.protocol:
                self._files.pipe_file(path, data)  # an object is put as a whole
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                part = f"{path}.{uuid.uuid4().hex}.unfinished"
                try:
                    with open(part, "wb") as file:
                        file.write(data)
                    os.replace(part, path)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(part)
        return str(self._files.unstrip_protocol(path))

    def size(self, digest: str) -> int | None:
        """Bytes of a blob; None if it is not there, or cannot be reached."""
        size: int | None = self._or_none(self._files.size, digest)
        return size

    def content(self, digest: str) -> bytes | None:
        """A blob; None if it is not there, or cannot be reached."""
        content: bytes | None = self._or_none(self._files.cat_file, digest)
        return content

    def _or_none(self, ask: Callable[[str], Any], digest: str) -> Any:
        try:
            return ask(self.path(digest))
        except Exception as error:  # whatever a file system of others raises
            if not isinstance(error, FileNotFoundError):
                logger.warning("the blob %s cannot be read: %r", self.path(digest), error)
            return None


@lru_cache(16)
def _place(url: str) -> BlobPlace:
    return BlobPlace(url)
