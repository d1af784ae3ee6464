"""Prints the tests of the rooms that a change touches, for `make quick`.

    python -m tests.kit.changed [ROOM ...]

The change is what differs from where the branch left main, with what is not committed. A room's
tests are the folder of its name; what all tests share touches all of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = "tests/test_rooms.py"
BESIDE_ROOMS = {
    "otel_rollout/wiring.py": "tests/test_configure.py",
    "otel_rollout/providers.py": "tests/test_configure.py",
    "otel_rollout/journal.py": "tests/test_journal.py",
    "otel_rollout/lines.py": "tests/test_lines.py",
    "README.md": "tests/test_docs.py",
    "docs": "tests/test_docs.py",
    "examples": "tests/test_examples.py",
    "otel_rollout/rebuild/dialects": "tests/dialects",
    "tests/conftest.py": "tests",
    "tests/kit": "tests",
}
"""The tests of files and folders that are not those of a room."""


def git(*arguments: str) -> str:
    """What git prints, or nothing if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def changed_paths() -> list[str]:
    """Files that differ from where the branch left main, and files that git does not know."""
    bases = (git("merge-base", "HEAD", name) for name in ("main", "origin/main"))
    base = next(filter(None, bases), "HEAD")
    others = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", base).split("\n"), *others.split("\n")]


def tests_of(path: str) -> str:
    """The tests of one file or room."""
    for start, tests in BESIDE_ROOMS.items():
        if f"{path}/".startswith(f"{start}/"):
            return tests
    parts = Path(path).parts
    return "/".join(("tests", *parts[1:2])) if parts[:1] in (("otel_rollout",), ("tests",)) else ""


def chosen(paths: Iterable[str]) -> list[str]:
    """The tests of these files, each once; all of them where one is of all."""
    tests = {ALWAYS, *map(tests_of, paths)}
    there = {name for name in tests if name and (ROOT / name).exists()}
    return ["tests"] if "tests" in there else sorted(there)


if __name__ == "__main__":
    rooms = [f"tests/{room}" for room in sys.argv[1:]]
    if unknown := [room for room in rooms if not (ROOT / room).is_dir()]:
        sys.exit(f"no tests of that name: {', '.join(unknown)}")
    print(*chosen(rooms or changed_paths()))
