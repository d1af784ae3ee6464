"""Pages that hold their answers: for files, and for cells of notebooks."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import (
    EmptyRowsWarning,
    Episode,
    NoAdvantageWarning,
    Trajectory,
    TrajectoryGroup,
    overviews,
    rollout,
    to_token_rows,
)
from otel_rollout.errors import ConfigurationError
from otel_rollout.view import notebook_cell
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import FOLDER, Page, as_json
from otel_rollout.view.html import InMemory, whole_page
from tests.kit.conversations import said, user
from tests.kit.recording import Clients, Recording
from tests.view.made import PAGE, Call, made

ONE: Any = {"rewards": [{"value": 1.0}]}
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 \U0001f600"
needs_build = pytest.mark.skipif(not FOLDER.is_dir(), reason="the page is not built")


def trajectory(id_: str = "t1", text: str = "hi", **fields: Any) -> Trajectory:
    """One of two calls, with tokens."""
    first = Call([user(text)], "one", prompt_ids=[1], ids=[2, 3])
    second = Call([user(text), said("one"), user("x")], prompt_ids=[1, 2, 3, 4], ids=[5])
    return made(first, second, id_=id_, **fields)


def held_in(page: str) -> Any:
    """The answers that a page holds."""
    found = re.findall(r'<script type="application/json" id="otel-rollout">(.*?)</script>', page)
    (data,) = found
    return json.loads(data)


def page_of(*trajectories: Trajectory, **options: Any) -> tuple[str, list[str]]:
    """A page, and what is not in it."""
    with InMemory(trajectories) as held:
        return whole_page(Answers(held), PAGE, title="a <b>", **options)


def test_a_page_holds_all_that_the_server_answers():
    """State, list, sums, details, tokens of every row and groups, as the server gives them."""
    members = [
        trajectory(f"t{n}", group_id="g", sample_index=n, rewards=[{"value": n}]) for n in (0, 1)
    ]
    page, left_out = page_of(*members)
    found = held_in(page)
    assert left_out == []
    with InMemory(members) as held:
        answers = Answers(held)
        assert found["state"] == answers.state({})
        assert found["summary"] == answers.summary({})
        assert found["trajectories"] == answers.trajectories({})
        assert found["details"]["t1"] == answers.trajectory({"id": "t1"})
        assert found["tokens"]["t1 0"] == answers.tokens({"id": "t1"})
        assert found["groups"] == [answers.group({"id": "g"})]
    assert sorted(found["tokens"]) == ["t0 0", "t1 0"]


def test_a_page_needs_nothing_else():
    """No address of another file, and a policy that allows its own script and style alone."""
    page, _ = page_of(trajectory())
    assert "src=" not in page
    assert "href=" not in page
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    assert "<title>a &lt;b&gt;</title>" in page


@given(st.text() | st.sampled_from([HOSTILE, "<!--<script>", "]]>", "&lt;"]))
def test_no_content_ends_the_element_it_stands_in(text: str):
    """Whatever an agent was told comes back as it was, and is no markup."""
    page, _ = page_of(trajectory(text=text))
    assert page.count("<script") == page.count("</script>") == 2
    node = held_in(page)["details"]["t1"]["nodes"][0]
    assert node["text"] == text.encode("utf-8", "replace").decode()


def test_a_script_that_holds_its_own_end_is_whole():
    """`</script>` in a text of the script does not end it."""
    page, _ = page_of(trajectory())
    assert r'"<\/script><\!--";' in page


def test_what_does_not_fit_is_named():
    """Details beyond the size are left out, the list stays; the page says so itself."""
    many = [trajectory(f"t{n}", "x" * 10_000) for n in range(20)]
    page, left_out = page_of(*many, most_bytes=60_000)
    found = held_in(page)
    assert found["trajectories"]["total"] == 20
    kept = len(found["details"])
    assert 0 < kept < 20
    assert left_out[-1] == f"the details of {20 - kept} of 20 trajectories"
    assert any("the details of" in error for error in found["state"]["errors"])
    assert len(page) < 120_000


def test_long_rows_are_cut_and_say_so():
    """The window has the length of the whole row."""
    long = made(Call([user("hi")], prompt_ids=[1], ids=list(range(30_000))))
    page, left_out = page_of(long)
    window = held_in(page)["tokens"]["t1 0"]
    assert (len(window["ids"]), window["length"]) == (20_000, 30_001)
    assert left_out == ["tokens from 20000 on of row 0 of trajectory t1"]


def test_the_first_trajectory_is_there_whatever_its_size():
    """A page about one trajectory is never empty."""
    page, _ = page_of(trajectory(text="x" * 10_000), most_bytes=100)
    assert list(held_in(page)["details"]) == ["t1"]


def shown(cell: str) -> Any:
    """The answers in a notebook's cell."""
    (source,) = re.findall(r'srcdoc="([^"]*)"', cell)
    return held_in(html.unescape(source))


def test_what_users_hold_is_shown_in_notebooks():
    """A trajectory, a group with its failures, an episode and token sequences."""
    one, other = trajectory("t1"), trajectory("t2")
    failed = trajectory("t3", status="error")
    for thing, ids in (
        (one, ["t1"]),
        (TrajectoryGroup([one, other], [failed]), ["t1", "t2", "t3"]),
        (Episode(trajectories=[one, other]), ["t1", "t2"]),
    ):
        assert sorted(shown(notebook_cell(thing, PAGE))["details"]) == ids
    rows = one.token_sequences(max_length=2)
    (detail,) = shown(notebook_cell(rows, PAGE))["details"].values()
    assert [(row["length"], row["trained"] > 0) for row in detail["rows"]] == [
        (2, True),
        (5, False),
    ]
    assert len(detail["completions"]) == 2
    with pytest.raises(TypeError, match="expected a trajectory"):
        notebook_cell(5, PAGE)


def test_a_cell_begins_with_what_it_is_of():
    """A group with its samples, rows of a trajectory with its tokens, overviews with a curve."""
    members = [trajectory(f"t{n}", group_id="g & h", reward=float(n)) for n in range(2)]
    assert shown(notebook_cell(TrajectoryGroup(members), PAGE))["start"] == "#group=g%20%26%20h"
    assert shown(notebook_cell(TrajectoryGroup([trajectory()]), PAGE))["start"] == ""
    cell = shown(notebook_cell(members[0].token_sequences(), PAGE))
    assert cell["start"] == f"#trajectory={next(iter(cell['details']))}&view=tokens"
    two = [trajectory("t1", task_id="a", **ONE), trajectory("t2", task_id="b", **ONE)]
    cell = shown(notebook_cell(overviews(two, pass_threshold=2), PAGE))
    assert cell["start"] == "#curve=task_id"
    assert [p["pass_rate"] for p in cell["curves"]["task_id"]["points"]] == [0.0, 0.0]
    assert [row["id"] for row in cell["trajectories"]["rows"]] == ["t1", "t2"]
    assert cell["state"]["errors"] == []
    assert cell["missing"]
    with pytest.raises(ConfigurationError, match="pass_threshold"):
        overviews(two, pass_threshold=float("nan"))


def test_rows_are_a_table_of_rows():
    """The first ones, what they train on, and how many replies are in none; texts are escaped."""
    many = [
        trajectory(f"{n:032x}", task_id="<b>\x1b", rewards=[{"value": n / 3}]) for n in range(25)
    ]
    with pytest.warns(NoAdvantageWarning):
        rows = to_token_rows(many)
    table = notebook_cell(rows)
    assert table.count("<tr>") == 21
    assert "<b>" not in table
    assert "&lt;b&gt;\\x1b" in table
    assert "25 rows; the first 20 are shown" in table
    assert "75 tokens train; 0 replies in no row" in table
    assert "<td>0.3333</td><td>–</td>" in table
    with pytest.warns(EmptyRowsWarning):
        assert "0 rows; 0 tokens train; 1 reply in no row" in notebook_cell(
            to_token_rows([made(Call([user("x")]))])
        )


@needs_build
def test_a_cell_is_small():
    """The code of the page is packed; the answers can be read, and found, in the notebook."""
    one = trajectory()
    cell = one._repr_html_()
    with InMemory([one]) as held:
        alone, _ = whole_page(Answers(held), Page.read(), title="x")
    assert len(cell) < 0.6 * len(alone)
    assert shown(cell)["details"]["t1"]["nodes"][0]["text"] == "hi"


def test_a_cell_is_a_frame_that_may_only_run_its_script():
    """It has no access to the notebook, its cookies or its server."""
    cell = notebook_cell(trajectory(text=HOSTILE), PAGE)
    assert cell.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    assert cell.count("<") == 2
    assert "allow-same-origin" not in cell


def test_a_running_rollout_is_shown_as_far_as_it_is(recording: Recording, clients: Clients):
    """And changes nothing of it."""
    client = clients.sync(clients.serve("Paris"))
    with rollout("agent") as live:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        (detail,) = shown(notebook_cell(live, PAGE))["details"].values()
        assert [node["text"] for node in detail["nodes"]] == ["hi", "Paris"]
        assert detail["overview"]["status"] == "running"
        live.reward = 1.0
    assert recording.trajectory.reward == 1.0


def test_a_trajectory_without_calls_is_shown():
    """One that was built by hand, and an empty group."""
    assert shown(notebook_cell(Trajectory(name="x"), PAGE))["trajectories"]["total"] == 1
    assert shown(notebook_cell(TrajectoryGroup([]), PAGE))["trajectories"]["total"] == 0


@needs_build
def test_the_method_that_notebooks_call():
    """`_repr_html_` of each gives the real page."""
    one = trajectory()
    for thing in (one, TrajectoryGroup([one]), Episode(trajectories=[one])):
        assert list(shown(thing._repr_html_())["details"]) == ["t1"]
    assert shown(overviews([one])._repr_html_())["details"] == {}
    assert "<table>" in to_token_rows([one])._repr_html_()
    assert shown(one.token_sequences()._repr_html_())["details"]


def test_who_shows_nothing_loads_nothing():
    """The page's room is loaded by the first cell, not with the classes."""
    code = "import sys, otel_rollout.export; sys.exit('otel_rollout.view' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_page_that_is_not_built_is_named(tmp_path: Path):
    """The error says how to build it."""
    with pytest.raises(ConfigurationError, match="make page"):
        Page.read(tmp_path)


@needs_build
def test_the_build_is_a_page():
    """It has one script and one style, which a page that holds its answers has inside."""
    page = Page.read()
    assert sorted(page.files) == ["", "assets/app.css", "assets/app.js"]
    with InMemory([trajectory()]) as held:
        text, _ = whole_page(Answers(held), page, title="x")
    assert "./assets" not in text
    assert 'id="otel-rollout"' in text


@given(st.recursive(st.floats() | st.text(), lambda inner: st.lists(inner) | st.tuples(inner)))
def test_all_json_is_json(value: Any):
    """As browsers read it, who know neither NaN nor lone surrogates."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(as_json({"value": value}).decode(), parse_constant=refuse)
