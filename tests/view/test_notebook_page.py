"""The page in a notebook's cell, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_rollout import TrajectoryGroup, overviews
from tests.kit.conversations import user
from tests.view.browser import chromium
from tests.view.made import Call, made

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_links_stay_in_the_frame(tmp_path: Path):
    """A click on a trajectory opens it there, and leaves the notebook as it is."""
    group = TrajectoryGroup([made(Call([user("hi")], "hello there"), name="agent")])
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><h1>notebook</h1>{group._repr_html_()}")
    with chromium() as browser:
        tab = browser.new_page()
        complaints: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(notebook.as_uri())
        frame = tab.frame_locator("iframe")
        frame.get_by_text("agent").first.click()
        frame.get_by_text("hello there").first.wait_for()
        assert tab.url == notebook.as_uri()
        assert complaints == []


def test_a_group_begins_with_its_samples_and_overviews_with_curves(tmp_path: Path):
    """Each in a cell of its own, without a complaint of the browser."""
    members = [
        made(Call([user("hi")], f"answer {n}"), id_=f"t{n}", group_id="g", task_id=f"task-{n}")
        for n in range(2)
    ]
    cells = [each._repr_html_() for each in (TrajectoryGroup(members), overviews(members))]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html>{''.join(cells)}")
    with chromium() as browser:
        tab = browser.new_page()
        complaints: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(notebook.as_uri())
        group, curves = (tab.frame_locator("iframe").nth(n) for n in range(2))
        group.get_by_text("answer 1").first.wait_for()
        curves.locator(".points", has_text="task-1").wait_for()
        curves.get_by_role("link", name="Trajectories").click()
        curves.locator(".row .open").first.click()
        curves.get_by_text("Make the trajectory itself the value of a cell.").wait_for()
        assert complaints == []
