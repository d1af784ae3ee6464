"""Texts that ask much of whoever reads Markdown: what models and tools write without malice."""

from __future__ import annotations

import random

BLANKS = {
    "numbered cells": "\n" + "1.    " * 14 + "x",
    "dashes": "\n" + "-    " * 10 + "x",
    "few dashes far apart": "\n" + ("-" + " " * 20) * 7,
    "dashes and tabs": "\n" + "-\t\t" * 18 + "x",
    "stars far apart": "\n" + ("*" + " " * 40) * 19 + "x",
    "plus signs": ("\n" + "+   " * 19) * 20,
    "a board": "\n".join(["  ".join("-+*>-+*>")] * 8),
    "a large board": "\n".join(["   ".join("-+*>1.-+*>1.")] * 200),
    "an aligned table": "\n".join("| " + " | ".join(["-   "] * 30) + " |" for _ in range(50)),
    "quoted far": "\n" + ">   " * 19 + "x",
    "nested lists": "\n".join("  " * depth + "- a" for depth in range(19)),
    "numbers": "\n" + "1234567890. " * 19,
    "one long number": "\n" + "1" * 100_000,
    "blank lines": "\n" * 20_000,
    "indented blank lines": "\n \t" * 20_000,
    "blanks": " " * 100_000 + "x",
    "a tool's tree": "\n".join(["+--   +--   -   >   file"] * 500),
    "closing brackets": "1)      " * 19 + "\n" + "1)  " * 200,
    "quotes and stars": "\n> *   > *   > *   > *   > *   > *   > *   > *   > *   > *   x" * 20,
}
"""Signs of lists and quotes with white space between them, by name."""
_SIGNS = (
    *(*"-+*>_`~[]()!|#=<&;:\\", "1.", "1)", "**", "```", "](", "- [ ]", "x", "http://", "\n"),
    *("é", "www.a", "a@b.", "<!--", "&amp", "|-|", "[a]: ", "\\`"),
)
_BETWEEN = ("", " ", "   ", "\t", "    ", "\n", " \n")


def made(draw: random.Random) -> str:
    """A text of some signs that are repeated with something between them."""
    lines = []
    for _ in range(draw.choice((1, 1, 2, 5))):
        signs = [draw.choice(_SIGNS) + draw.choice(_BETWEEN) for _ in range(draw.randint(1, 3))]
        lines.append("".join(signs) * draw.choice((5, 20, 60, 300, 2000)))
    return draw.choice(("", "\n")) + draw.choice(("", "\n", "x")).join(lines) + draw.choice("x \n")
