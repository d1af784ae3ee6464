"""No regular expression of the package has repeats that overlap: those may take time for ever.

Two repeats side by side that match the same characters, or a repeat of what begins and ends with
such, are tried in every way to share a text between them. The page's own are checked by
`otel_rollout/view/page/regexps.mjs`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import otel_rollout

try:
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as parser

PACKAGE = Path(otel_rollout.__file__).parent
KNOWN = frozenset(map(chr, range(0x180)))
"""The characters that classes are compared by."""
MANY = 8
"""A repeat of fewer is none, nor is one of a fixed number."""
FUNCTIONS = ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub")


class Part(NamedTuple):
    """What a part of a pattern matches."""

    chars: frozenset[str] = frozenset()
    """Its characters, if it is one of them each time."""
    may_be_empty: bool = True
    heads: tuple[frozenset[str], ...] = ()
    """The characters of repeats that it may begin with, after nothing."""
    tails: tuple[frozenset[str], ...] = ()
    """The same at its end."""


def overlapping(pattern: str | bytes, flags: int = 0) -> bool:
    """True if repeats of the pattern overlap."""
    found: list[bool] = []
    part_of(parser.parse(pattern, flags), flags, found)
    return bool(found)


def part_of(sequence: Any, flags: int, found: list[bool]) -> Part:
    """A sequence of items. Something is added to `found` where two repeats of it overlap."""
    whole = Part()
    for operator, value in sequence:
        item = item_of(str(operator), operator, value, flags, found)
        if meet(whole.tails, item.heads):
            found.append(True)
        whole = Part(
            item.chars if len(sequence) == 1 else frozenset(),
            whole.may_be_empty and item.may_be_empty,
            whole.heads + (item.heads if whole.may_be_empty else ()),
            item.tails + (whole.tails if item.may_be_empty else ()),
        )
    return whole


def meet(some: tuple[frozenset[str], ...], others: tuple[frozenset[str], ...]) -> bool:
    """True if a set of these has a character of one of those."""
    return any(one & other for one in some for other in others)


def item_of(name: str, operator: Any, value: Any, flags: int, found: list[bool]) -> Part:
    """One item of a pattern."""
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = value
        body = part_of(inner, flags, found)
        if most > 1 and meet(body.tails, body.heads):
            found.append(True)
        own = (body.chars,) if body.chars and most >= max(MANY, least + 1) else ()
        may_be_empty = least == 0 or body.may_be_empty
        return Part(frozenset(), may_be_empty, own + body.heads, own + body.tails)
    if name == "BRANCH":
        parts = [part_of(each, flags, found) for each in value[1]]
        return Part(
            frozenset().union(*(part.chars for part in parts)),
            any(part.may_be_empty for part in parts),
            tuple(head for part in parts for head in part.heads),
            tuple(tail for part in parts for tail in part.tails),
        )
    if name == "SUBPATTERN":
        return part_of(value[-1], flags, found)
    if name == "GROUPREF":  # what the group matched, of which nothing is known here
        return Part(frozenset(KNOWN))
    if name in ("AT", "ASSERT", "ASSERT_NOT"):
        return Part()
    return Part(chars_of(operator, value, flags), may_be_empty=False)


def chars_of(operator: Any, value: Any, flags: int) -> frozenset[str]:
    """The known characters that a single item matches."""
    pattern: Any = parser.SubPattern(parser.State(), [(operator, value)])
    pattern.state.flags = flags
    compiled = re._compiler.compile(pattern, flags)  # type: ignore[attr-defined]
    return frozenset(char for char in KNOWN if compiled.fullmatch(char))


def written(path: Path) -> Iterator[tuple[str | bytes, int]]:
    """The patterns that a module writes out, and those that it has under a name, with their flags.

    What is put together inside a function is not found.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="re"), attr=name),
                args=[ast.Constant(value=str() | bytes() as pattern), *_],
            ) if name in FUNCTIONS:
                yield pattern, 0
    name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    if path.name in ("__main__.py",):
        return
    for each in vars(importlib.import_module(name.removesuffix(".__init__"))).values():
        own = getattr(each, "__self__", each)
        if isinstance(own, re.Pattern):
            yield own.pattern, own.flags & ~re.UNICODE


PATHS = sorted(PACKAGE.rglob("*.py"))


def test_no_repeats_overlap():
    """In no pattern of the package."""
    patterns = {(pattern, flags) for path in PATHS for pattern, flags in written(path)}
    assert len(patterns) > 50
    assert [each for each in patterns if overlapping(*each)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(?:[ \t]*[-+*>][ \t]*){20}", r"(a+)+b", r"^a*a*$", r"\s*\w*\s*", r"(?:x*|y)*", r".*.*"),
        *(r"[0-9]+(?:\d+)?x", r"(?:,?\s*\w?\s*)*", rb"[ \r]+\s+x", r"(?:(?:ab*)?b*c)*"),
    ],
)
def test_overlapping_repeats_are_found(pattern: str | bytes):
    """Side by side, after what may be empty, and where a repeat begins again."""
    assert overlapping(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"[ \t]*(?:[-+*>][ \t]*){20}", r'"(?:[^"\\]|\\.)*"', r"a*b*", r"\s*,\s*", r"(?:ab)*c"),
        *(r"\d{20}\d{20}", r"(?:a+b)*b*", r"\w+(?:\.\w+)*", r"(?=a*)a*"),
    ],
)
def test_others_are_not(pattern: str):
    """What stands between them is not optional, or has other characters."""
    assert not overlapping(pattern)
