"""The depth of JSON: what is nested too deep could be parsed, and not be written again."""

from __future__ import annotations

import re

DEEPEST = 850
"""Levels of lists and objects; no request or reply of a model has nearly as many."""
_USUAL = 32
"""Levels that are looked at together; deeper texts are read bracket by bracket."""

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_texts = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def check_depth(text: str) -> None:
    """ValueError for a JSON text that is nested deeper than `DEEPEST`; linear, and fast."""
    data = text.encode("utf-8", "surrogatepass")
    brackets = data.translate(None, _NOT_BRACKETS)
    for _ in range(_USUAL):
        if len(brackets) <= DEEPEST:
            return
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break  # there are brackets in texts
        brackets = fewer
    depth = 0
    for bracket in _texts.sub(b"", data).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
