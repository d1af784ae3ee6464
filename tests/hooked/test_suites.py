"""The own tests of HTTP libraries, plain and with every POST recorded: they end alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.hooked

HERE = Path(__file__).parent
SUITES = HERE.parents[1] / "build" / "suites"
OPENAI = [
    *("tests/test_client.py", "tests/test_streaming.py", "tests/test_response.py"),
    *("tests/test_legacy_response.py", "tests/lib/chat", "tests/lib/responses"),
]


def outcomes(
    suite: Path, tests: Sequence[str], report: Path, *plugin: str
) -> tuple[dict[str, str], int]:
    """How each test ended, and how many requests were recorded."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command.append("--continue-on-collection-errors")  # some want further libraries
    ran = subprocess.run(
        [*command, "-W", "ignore", f"--junitxml={report}", *plugin, *tests],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert report.exists(), ran.stdout + ran.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = next(
            (each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed"
        )
    counted = re.search(r"^recorded: (\d+)$", ran.stdout, re.MULTILINE)
    return found, int(counted[1]) if counted else 0


@pytest.mark.parametrize(
    ("library", "tests", "least"),
    [("requests", ["tests"], 20), ("httpx", ["tests"], 20), ("openai", OPENAI, 200)],
)
def test_a_library_passes_its_own_tests(
    library: str, tests: Sequence[str], least: int, tmp_path: Path
):
    (suite,) = SUITES.glob(f"{library}-*/")
    plain, _ = outcomes(suite, tests, tmp_path / "plain.xml")
    hooked, recorded = outcomes(suite, tests, tmp_path / "hooked.xml", "-p", "every_request")
    passed = [name for name, outcome in plain.items() if outcome == "passed"]
    print(f"{library}: {len(plain)} tests, {len(passed)} pass, {recorded} requests recorded")
    assert len(passed) > 0.9 * len(plain)
    assert {name: end for name, end in hooked.items() if end != plain.get(name)} == {}
    assert hooked.keys() == plain.keys()
    assert recorded >= least
