"""Holds what mypy and pyright see of a user's project against the lines that are marked there.

    python tests/typing/check.py PYRIGHT

Prints the table of docs/types.md; the exit status is 1 where it differs, or where a checker sees an
error in a line that is right.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER = Path(__file__).with_name("user.py")
PAGE = ROOT / "docs/types.md"


def seen_by_mypy() -> set[int]:
    """The lines in which mypy sees an error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(USER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {int(line) for line in re.findall(r"user\.py:(\d+): error", done.stdout)}


def seen_by_pyright(pyright: str) -> set[int]:
    """The lines in which pyright sees an error."""
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, str(USER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {e["range"]["start"]["line"] + 1 for e in found if e["severity"] == "error"}


def main() -> int:
    """Compare, and print; the exit status."""
    seen = {"mypy": seen_by_mypy(), "pyright": seen_by_pyright(sys.argv[1])}
    lines = dict(enumerate(USER.read_text().splitlines(), 1))
    wrong = {number: text for number, text in lines.items() if "# wrong" in text}
    table = "| a user writes | mypy | pyright |\n|---|---|---|\n"
    for number, text in wrong.items():
        cells = ["an error" if number in found else "nothing" for found in seen.values()]
        table += f"| `{text.partition('#')[0].strip()}` | {' | '.join(cells)} |\n"
    print(table)
    false = {name: found - wrong.keys() for name, found in seen.items()}
    for name, found in false.items():
        for number in sorted(found):
            print(f"{name}: an error in a line that is right: {lines[number].strip()}")
    return int(any(false.values()) or table not in PAGE.read_text())


if __name__ == "__main__":
    sys.exit(main())
