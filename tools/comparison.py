"""README's comparison with others: writes it from docs/comparison.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs" / "comparison.toml"
README = ROOT / "README.md"
BEGIN, END = "## How it compares\n\n", "\nEach cell's evidence"


def table(facts: dict[str, Any]) -> str:
    """The table in Markdown; ValueError for a cell without text, evidence or product."""
    products = facts["product"]
    keys = [product["key"] for product in products]
    names = [product["name"] for product in products]
    lines = [f"| | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    exporters = len([*(ROOT / "exporters").glob("*/pyproject.toml")])
    for row in facts["row"]:
        if sorted(row) != sorted([*keys, "what"]):
            raise ValueError(f"row {row.get('what')!r}: expected cells {keys}, got {[*row]}")
        if bare := [key for key in keys if not (len(row[key]) == 2 and row[key][1])]:
            raise ValueError(f"row {row['what']!r}: no evidence for {', '.join(bare)}")
        cells = (row[key][0].format(exporters=exporters) for key in keys)
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(readme: str, facts: dict[str, Any]) -> str:
    """The README with its table in the place of the one that is there."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README}: expected {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{head}{begin}{table(facts)}{end}{tail}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), tomllib.loads(SOURCE.read_text())))
    sys.exit()
