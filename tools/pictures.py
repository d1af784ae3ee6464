"""Pictures of a run of examples/quickstart.py in Phoenix's real page, for docs/backends.md.

    make .venv-phoenix/.ready && apt-get install chromium
    .venv/bin/python tools/pictures.py

Starts Phoenix, runs the example against it, and opens its pages in a headless Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import quickstart  # noqa: E402

from otel_rollout.otlp import read_phoenix  # noqa: E402
from tests.backends.programs import start_phoenix  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
BROWSER = ("chromium", "chromium-browser", "google-chrome")
PROJECT = "travel-agent"
WIDTH, HEIGHT = 1500, 950
LOADING_MILLIS = 30_000
SPANS_SECONDS = 60.0


def take(browser: str, address: str, name: str) -> None:
    """A picture of the page at this address."""
    path = PICTURES / f"{name}.png"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--user-data-dir={profile}"]
        command += [f"--virtual-time-budget={LOADING_MILLIS}", f"--screenshot={path}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]


def main() -> None:
    """Run the example, and take the pictures of its first rollout."""
    browser = next(filter(None, map(shutil.which, BROWSER)), None)
    if browser is None:
        sys.exit(f"tools/pictures.py: none of {', '.join(BROWSER)} is installed")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, start_phoenix(Path(folder)) as phoenix:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = phoenix.url
        os.environ["OTEL_RESOURCE_ATTRIBUTES"] = f"openinference.project.name={PROJECT}"
        os.environ["JAEGER_UI"] = phoenix.url
        first, *_ = quickstart.main()
        deadline = time.monotonic() + SPANS_SECONDS
        while time.monotonic() < deadline:
            try:
                spans = list(read_phoenix(phoenix.url, PROJECT, first.trace_id))
            except LookupError:
                spans = []
            if any(span.span_id == first.span_id for span in spans):
                break
            time.sleep(1)
        (project,) = (
            row["id"] for row in get(f"{phoenix.url}/v1/projects") if row["name"] == PROJECT
        )
        rows = get(
            f"{phoenix.url}/v1/projects/{PROJECT}/spans?limit=1000&trace_id={first.trace_id}"
        )
        trace = f"{phoenix.url}/projects/{project}/traces/{first.trace_id}"
        llm = max(
            (row for row in rows if row["span_kind"] == "LLM"), key=lambda row: row["start_time"]
        )
        take(browser, f"{phoenix.url}/projects/{project}/traces", "phoenix-list")
        take(browser, trace, "phoenix-trace")
        take(browser, f"{trace}?selectedSpanNodeId={llm['id']}", "phoenix-llm-span")


if __name__ == "__main__":
    main()
