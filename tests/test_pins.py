"""What is installed is pinned with hashes, and no file names a registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINS = sorted(ROOT.glob("requirements/*.txt"))


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.name)
def test_every_requirement_has_a_version_and_a_hash(path: Path):
    joined = path.read_text().replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if not re.match(r"\s*(#|$)", line)]
    assert lines
    pinned = re.compile(
        r"[a-z0-9._-]+(\[[a-z,-]+\])?==\S+( ;[^#]*?)?( +--hash=sha256:[0-9a-f]{64})+"
    )
    assert [line[:60] for line in lines if not pinned.fullmatch(line.strip())] == []


def test_every_package_of_the_page_has_its_digest():
    lock = json.loads((ROOT / "otel_rollout/view/page/package-lock.json").read_text())
    packages = [each for name, each in lock["packages"].items() if name]
    assert packages
    assert [each for each in packages if not each.get("integrity")] == []
    assert [each["resolved"] for each in packages if "resolved" in each] == []
