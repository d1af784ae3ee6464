"""The build of the page that is committed: small, whole, of exact versions, from nowhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from otel_rollout.view.built_page import Page

FOLDER = Path(__file__).parents[2] / "otel_rollout" / "view" / "page"
MOST_SCRIPT = 300_000


def _texts() -> dict[str, str]:
    return {name: body.decode() for name, (body, _) in Page.read().files.items()}


def test_the_build_is_three_files_with_names_that_do_not_change():
    """Whoever opens an old tab after an update finds the new script."""
    assert set(Page.read().files) == {"", "assets/app.js", "assets/app.css"}


def test_the_script_is_small():
    """Before compression."""
    assert len(_texts()["assets/app.js"].encode()) <= MOST_SCRIPT


def test_the_page_asks_for_nothing_from_elsewhere():
    """No address that is absolute in the page and its style; relative ones to its own files."""
    texts = _texts()
    assert re.findall(r"https?://|url\(|@import", texts[""] + texts["assets/app.css"]) == []
    links = re.findall(r'(?:src|href)="([^"]*)"', texts[""])
    assert sorted(links) == ["./assets/app.css", "./assets/app.js", "data:,"]


def test_the_page_needs_no_rights_that_its_policy_does_not_give():
    """No script or style inside the markup, nothing that is made code at run time."""
    page, script = _texts()[""], _texts()["assets/app.js"]
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page) == []
    assert re.findall(r"\beval\(|new Function\b|document\.write|insertAdjacentHTML", script) == []


def test_versions_are_exact_and_come_from_whatever_registry_is_set_up():
    """The lock file has checksums and no addresses of packages."""
    package = json.loads((FOLDER / "package.json").read_text())
    wanted = {**package["dependencies"], **package["devDependencies"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    del packages[""]
    assert all(entry["integrity"] and "resolved" not in entry for entry in packages.values())
    assert {f"node_modules/{name}" for name in wanted} <= set(packages)
