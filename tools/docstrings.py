"""Docstrings on the documentation site: lines `name: text` become a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_item = re.compile(r"^(\*{0,2}\w+(?:, \w+)*): ")


def as_list(docstring: str) -> str:
    """The text with a list item for each option; code and other paragraphs stay as they are."""
    return "\n\n".join(map(_paragraph, docstring.split("\n\n")))


def _paragraph(text: str) -> str:
    if not _item.match(text):
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        found = _item.match(line)
        lines.append(f"* `{found[1]}`: {line[found.end() :]}" if found else f"  {line.strip()}")
    return "\n".join(lines)


class OptionLists(Extension):
    """Rewrites the docstring of every object that is shown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each module, class, function and attribute once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
