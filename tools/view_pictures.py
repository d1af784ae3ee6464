"""Pictures of the page of `otel-rollout view`, for the documentation.

    apt-get install chromium
    .venv/bin/python tools/view_pictures.py

Runs examples/quickstart.py, groups of short rollouts, and a hard one (forks, a compaction, a cut
call, sub-agents, 200 turns, 100,000 tokens), and opens their page in a headless Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import quickstart  # noqa: E402
from playwright.sync_api import Browser  # noqa: E402

from otel_rollout import JsonlTrajectoryExporter  # noqa: E402
from tests.kit.to_look_at import record_groups, record_hard  # noqa: E402
from tests.view.browser import Served, chromium, serving  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1400, 860
TURNS = 200
LINES = 42
"""Lines in each result of a tool, so that the longest row has 100,000 tokens."""


def pictures(served: Served) -> dict[str, str]:
    """The pictures, by their name, as addresses in the page."""
    hard, agent = served.id_of("swe_agent"), served.id_of("travel_agent", -4)
    return {
        "view-list": "",
        "view-group": "group=trip-2",
        "view-curves": "curve=policy_version",
        "view-search": "search=queryset+cache",
        "view-quickstart": f"trajectory={agent}",
        "view-messages": f"trajectory={hard}&history=0",
        "view-tokens": f"trajectory={hard}&view=tokens&row=0",
        "view-findings": f"trajectory={hard}&view=findings",
        "view-time": f"trajectory={hard}&view=time",
        "view-tokens-dark": f"trajectory={hard}&view=tokens&row=0&token=50300&signal=entropy",
    }


def take(browser: Browser, served: Served, name: str, address: str) -> None:
    """A picture of one view."""
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT},
        color_scheme="dark" if name.endswith("dark") else "light",
    )
    tab = context.new_page()
    tab.goto(f"{served.url}#{address}")
    tab.locator(".table-foot, .view > *, .column-cell, .points").first.wait_for(timeout=60_000)
    tab.wait_for_load_state("networkidle")
    if name.endswith("dark"):
        tab.keyboard.press("n")
        tab.wait_for_load_state("networkidle")
    path = PICTURES / f"{name}.png"
    tab.screenshot(path=path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    context.close()


def main() -> None:
    """Record the trajectories, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-120.jsonl"
        model = record_hard(path, turns=TURNS, padding=LINES)
        record_groups(path, groups=12, samples=8)
        JsonlTrajectoryExporter(path).export(quickstart.main())
        with serving(path, model) as served, chromium() as browser:
            for name, address in pictures(served).items():
                take(browser, served, name, address)


if __name__ == "__main__":
    main()
