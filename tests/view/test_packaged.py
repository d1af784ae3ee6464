"""What of the page is in a distribution: the build in each, the sources in the source's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
FILES = ("package.json", "src/main.tsx", "built/index.html", "built/assets/app.js")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with a page, of which modules were installed."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "otel_rollout/view/page"
    for path in (*(page / name for name in (*FILES, "node_modules/x/y.py")), page / "../html.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "otel_rollout/__init__.py").touch()
    return tmp_path


def test_whoever_has_only_python_gets_the_page(tree: Path):
    """A wheel has the build, and neither its sources nor the modules that it was built with."""
    found = {file.distribution_path for file in WheelBuilder(str(tree)).recurse_included_files()}
    assert {each for each in found if "/page/" in each} == {
        "otel_rollout/view/page/built/index.html",
        "otel_rollout/view/page/built/assets/app.js",
    }
    assert "otel_rollout/view/html.py" in found


def test_the_source_distribution_has_the_sources(tree: Path):
    """All that is needed to build the page anew."""
    found = {file.distribution_path for file in SdistBuilder(str(tree)).recurse_included_files()}
    assert {each for each in found if "/page/" in each} == {
        f"otel_rollout/view/page/{name}" for name in FILES
    }
