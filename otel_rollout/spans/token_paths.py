"""Token ids of prompts and replies, as paths that store what calls share once."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from otel_rollout.wire import LARGEST_ID, token_array


@dataclass(slots=True, eq=False)
class TokenPath:
    """Token ids that share a prefix with those of earlier calls (None is the empty path)."""

    parent: TokenPath | None
    length: int
    """Number of all its ids."""
    typecode: str
    """That of an array which can hold all of its ids: "i"; "q" where some are beyond 32 bits."""
    text: str | None = None
    """`ids` as compact JSON, without brackets. None: it is not known."""
    _ids: array[int] | list[int] | None = None
    _same: TokenPath | None = None
    """One with the same ids, which are read for both."""
    _fits: int | None = None
    """A number that none of all its ids is beyond, each from 0 on. None: not known."""

    @property
    def ids(self) -> array[int] | list[int]:
        """The ids after those of `parent`, read when somebody asks; a list beyond 64 bits."""
        if self._ids is None:
            same = self._same
            self._ids = same.ids if same else _held(_read_ids(f"[{self.text}]"))
        return self._ids

    def _blocks(self) -> list[array[int] | list[int]]:
        blocks: list[array[int] | list[int]] = []
        path: TokenPath | None = self
        while path is not None:
            blocks.append(path.ids)
            path = path.parent
        return blocks[::-1]

    def to_array(self) -> array[int]:
        """All ids, first to last. OverflowError where one is beyond 64 bits."""
        ids = array(self.typecode)
        for block in self._blocks():
            is_same = isinstance(block, array) and block.typecode == self.typecode
            ids += block if is_same else array(self.typecode, block)  # type: ignore[arg-type]
        return ids

    def to_list(self) -> list[int]:
        """The same as a list."""
        try:
            return self.to_array().tolist()
        except OverflowError:
            return [*chain.from_iterable(self._blocks())]

    def first_wrong(self, largest: int = LARGEST_ID) -> tuple[int, int] | None:
        """Place and value of the first id that is below 0 or beyond `largest`; None: there is none.

        What was asked of a prefix is not looked at again.
        """
        unknown: list[TokenPath] = []
        path: TokenPath | None = self
        while path is not None and (path._fits is None or path._fits > largest):
            unknown.append(path)
            path = path.parent
        for node in reversed(unknown):
            if not _all_fit(ids := node.ids, largest):
                place = next(n for n, each in enumerate(ids) if not 0 <= each <= largest)
                return node.length - len(ids) + place, ids[place]
            node._fits = largest
        return None

    def after(self, path: TokenPath | None) -> TokenPath:
        """The path that continues `path` with the ids of this one, which has no parent."""
        if path is None:
            return self
        typecode, same = max(self.typecode, path.typecode), None if self._ids else self
        return TokenPath(path, self.length + path.length, typecode, self.text, self._ids, same)


def tokens_in(text: str) -> TokenPath:
    """The path of the ids that a text lists, JSON without its brackets. Usual ones are read later.

    ValueError for what lists no integers.
    """
    shape = b",%b," % text.encode().translate(_SHAPE)
    if not any(shape.find(each) >= 0 for each in _UNUSUAL) and f",{text}".find(",0") < 0:
        return TokenPath(None, shape.count(b",") - 1, "i", text)
    return extend_tokens(None, _read_ids(f"[{text}]"))


_read_ids = msgspec.json.Decoder(list[int]).decode
_SHAPE = bytes(c if c == ord(",") else ord("1" if chr(c).isdecimal() else "x") for c in range(256))
_UNUSUAL = (b"x", b",,", b"1" * 10)
"""What is not in the shape of usual ids, which have at most nine digits."""


def extend_tokens(path: TokenPath | None, ids: Sequence[int]) -> TokenPath:
    """The path that continues `path` with these ids. TypeError for what are no integers."""
    found = ids if isinstance(ids, array) else _held(ids)
    typecode = found.typecode if isinstance(found, array) else "q"
    return TokenPath(None, len(found), typecode, None, found).after(path)


def _held(ids: Sequence[int]) -> array[int] | list[int]:
    """The ids in an array; in a list where one is beyond 64 bits."""
    try:
        return token_array(ids)
    except OverflowError:
        return list(ids)


def _all_fit(ids: array[int] | list[int], largest: int) -> bool:
    """True if each id is from 0 to `largest`."""
    if isinstance(ids, array) and ids.typecode == "i" and largest == LARGEST_ID:
        return not ids.tobytes()[_SIGN::4].translate(None, _NOT_NEGATIVE)
    return not ids or (min(ids) >= 0 and max(ids) <= largest)


_SIGN = 3 if sys.byteorder == "little" else 0
"""Which byte of four has the sign of a number."""
_NOT_NEGATIVE = bytes(range(128))
