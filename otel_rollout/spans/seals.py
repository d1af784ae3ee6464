"""Lengths and checksums of a span's attributes, which show what was cut or changed on the way.

And the digest that names a content.

They are written as `name:number,name:number;`: some stores parse texts that are JSON and give back
objects. An object in the place of a text that was written is that text again if it is as long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.wire import dumps

try:  # 17 times as fast; not for every machine
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

_END = ";"
"""Last character, which no JSON ends with: a text that was cut lacks it."""
_ESCAPES = {"%": "%25", ",": "%2C", ":": "%3A", _END: "%3B"}
"""Characters of names that would end an entry; `%` is escaped first, and read back last."""
_entries = re.compile("([^,:;]*):([0-9]+)[,;]").findall
SUMMED = frozenset(
    (
        *(sc.ROLLOUT_REWARDS, sc.ROLLOUT_APPENDED, sc.REWARD),
        *(sc.REQUEST_KEY, sc.REQUEST_PARAMS, sc.REQUEST_RAW, sc.REQUEST_DIGEST),
        *(sc.REQUEST_SHARED, sc.RESPONSE_ID, sc.RESPONSE_BODY, sc.RESPONSE_EVENTS),
    )
)
"""Texts that decide what trains, but those that have digests: messages, long parameters and the
token ids of prompts."""
_MEASURED = frozenset((str, int, bool))  # a float is written by each store in a way of its own


def with_lengths(
    attributes: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    checksums: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The last attributes of a span of ours, with the lengths of all and checksums of some.

    before: those that were set earlier. checksums: those that are known.
    """
    sealed = dict(attributes)
    every = {**before, **sealed} if before else sealed
    if not {*map(type, every.values())} <= _MEASURED:
        every = {key: value for key, value in every.items() if isinstance(value, str | int)}
    known = (checksums or {}).get
    sums = {
        key: known(key) or crc32(text.encode("utf-8", "surrogatepass"))
        for key in filter(SUMMED.__contains__, every)
        if isinstance(text := every[key], str)
    }
    if sums:
        sealed[sc.CHECKSUMS] = every[sc.CHECKSUMS] = _form(*sums) % (*sums.values(),)
    sealed[sc.LENGTHS] = _form(*every) % tuple([len(f"{value!s}") for value in every.values()])
    return sealed


def digest_of(*parts: bytes | memoryview) -> bytes:
    """The 16-byte digest that names a content; `spans.writer` defines what is digested."""
    return blake2b(b"".join(parts), digest_size=16).digest()


def numbers_of(written: object) -> dict[str, int]:
    """The numbers by the whole names of attributes. ValueError if this cannot be read."""
    if isinstance(written, str) and written.endswith(_END):
        entries = _entries(written)
        if not len(entries) == written.count(":") == written.count(",") + 1:
            raise ValueError(f"expected name:number,name:number{_END} got {written!r:.80}")
        return {_name(name): int(number) for name, number in entries}
    raise ValueError(f"expected lengths or checksums of attributes, got {written!r:.80}")


def of_other_lengths(attributes: Mapping[str, Any], lengths: Mapping[str, int]) -> set[str]:
    """Names of attributes that are not as long as they were."""
    get = attributes.get
    return {
        name
        for name, length in lengths.items()
        if (
            len(value)
            if type(value := get(name)) is str
            else len(str(value))
            if type(value) is int
            else _length(value)
        )
        != length
    }


def of_other_checksums(attributes: Mapping[str, Any], written: object) -> set[str]:
    """Names of texts that are not those that were written. ValueError as `numbers_of` raises."""
    return {
        name
        for name, checksum in numbers_of(written).items()
        if isinstance(value := attributes.get(name), str)
        and crc32(value.encode("utf-8", "surrogatepass")) != checksum
    }


def as_written(attributes: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """The attributes with JSON texts in the place of the objects that a store made of them."""
    texts = dict(attributes)
    for name, length in lengths.items():
        value = texts.get(name)
        if isinstance(value, dict | list):
            try:
                text = dumps(value)
            except (TypeError, ValueError, RecursionError):  # such as bytes in it
                continue
            if len(text) == length:
                texts[name] = text
    return texts


@lru_cache(1024)  # a span of each kind has few sets of names, but for the user's
def _form(*names: str) -> str:
    """The entries of these names, with a place (`%d`) for the number of each."""
    return ",".join(f"{_short(name).replace('%', '%%')}:%d" for name in names) + _END


@cache
def _short(key: str) -> str:
    """The name without the prefix of ours, and with escapes."""
    name = key.removeprefix(sc.PREFIX) if key.startswith(f"{sc.PREFIX}.") else key
    for character, escape in _ESCAPES.items():
        name = name.replace(character, escape)
    return name


@lru_cache(4096)  # anybody's names
def _name(short: str) -> str:
    """The whole name that was shortened."""
    for character, escape in reversed(_ESCAPES.items()):
        short = short.replace(escape, character)
    return sc.PREFIX + short if short.startswith(".") else short


def _length(value: object) -> int | None:
    """Characters of a value as text; None for a float, which stores write in ways of their own."""
    if isinstance(value, str):
        return len(value)
    return len(str(value)) if isinstance(value, int) else None
