"""The page in a real browser: every view, keys, links that are shared, colours, what is refused."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser

from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page
from otel_rollout.view.html import whole_page
from otel_rollout.view.index import Index
from tests.kit.conversations import user
from tests.kit.to_look_at import IMAGE_WIDTH, record_groups, record_hard, record_long
from tests.view.browser import Reader, Served, chromium, reading, serving
from tests.view.made import Call, line, scored, write

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three groups, a hard trajectory with its sub-agents, and one of 100,000 tokens."""
    path = tmp_path_factory.mktemp("look") / "run.jsonl"
    record_groups(path)
    record_hard(path)
    record_long(path)
    with serving(path) as served:
        yield served


@pytest.fixture
def reader(browser: Browser, served: Served) -> Iterator[Reader]:
    with reading(browser, served.url) as reader:
        yield reader


def hard(served: Served, view: str = "messages") -> str:
    return f"trajectory={served.id_of('swe_agent')}&view={view}"


# --- list


def test_the_list_has_a_line_per_trajectory_and_charts_of_all(reader: Reader):
    """Rows, the reward histogram, endings, groups, versions, and what does not train."""
    reader.open()
    reader.see(".table-foot", "16 of 16")
    assert reader.count(".virtual-row") == 16
    reader.see(".row", "swe_agent")
    for title in ("Reward", "Endings", "Findings", "Policy versions", "Groups"):
        reader.see(".panel h3", title)
    reader.see(".panel", "trip-2")
    assert reader.see(".status", "error").is_visible()


def test_a_bin_filters_when_it_is_clicked_and_again_when_it_is_clicked_anew(reader: Reader):
    """The click writes an expression, which is in the address."""
    reader.open()
    reader.see(".table-foot", "16 of 16")
    reader.tab.locator(".histogram.tall .bins button:enabled").first.click()
    reader.until("location.hash.includes('where=reward')")
    reader.until("!document.querySelector('.table-foot').textContent.includes('16 of')")
    reader.tab.get_by_label("Clear where").click()
    reader.see(".table-foot", "16 of 16")


def test_an_ending_and_a_version_filter_together(reader: Reader):
    """Clauses are joined, and a second click takes its clause away."""
    reader.open()
    reader.see(".count .status", "error").click()
    reader.see(".table-foot", "1 of 16")
    reader.see('input[name="where"]').press("End")
    reader.tab.locator(".panel", has_text="Policy versions").locator("button").first.click()
    reader.until("document.querySelector('input[name=where]').value.includes(' and ')")
    reader.see(".count[aria-pressed=true] .status", "error").click()
    reader.until("!document.querySelector('input[name=where]').value.includes('status')")


def test_a_wrong_expression_is_answered_beside_its_box(reader: Reader):
    """The server's own words say what is known."""
    reader.open()
    reader.see('input[name="where"]').fill("rewrd > 1")
    assert "rewrd" in reader.see(".filters .error").inner_text()
    assert reader.see('input[name="where"]').get_attribute("aria-invalid") == "true"
    reader.until("document.querySelectorAll('.row .open').length === 0")
    assert reader.tab.locator("main").inner_text().count("there is no field") == 1
    reader.see('input[name="where"]').fill("reward >= 0.5")
    reader.tab.locator(".filters .error").wait_for(state="detached")
    reader.see('input[name="where"]').fill("reward > 9")
    reader.see(".hint", "No trajectory matches.")
    assert reader.see(".facets").inner_text() == "Nothing is listed."
    reader.tab.get_by_role("button", name="Clear the filter").click()
    reader.see(".table-foot", "16 of 16")


def test_a_filter_is_there_as_a_command(reader: Reader, served: Served):
    """Quoted for a shell, and about the same trajectories."""
    reader.open("where=" + quote("name == \"swe_agent\" and name != 'x'"))
    reader.see(".table-foot", "1 of 16")
    reader.see(".as-commands summary").click()
    first, second = reader.see(".as-commands pre").inner_text().splitlines()
    assert shlex.split(second)[:2] == ["otel-rollout", "export"]
    words = shlex.split(first)
    assert words[:3] == ["otel-rollout", "list", str(served.path)]
    assert words[3:] == ["--where", "name == \"swe_agent\" and name != 'x'"]


def test_rates_are_curves_by_version_and_task(reader: Reader):
    """By a key, with an address of its own; a point is named, and leads to its trajectories."""
    reader.open()
    reader.see(".table-foot", "16 of 16")
    reader.press("c")
    reader.until("location.hash === '#curve=policy_version'")
    reader.see(".chart h2", "Pass rate and failures")
    reader.see(".chart .key", "failed")
    reader.tab.get_by_role("link", name="Task", exact=True).click()
    reader.until("location.hash === '#curve=task_id'")
    reader.see(".points th", "Task")
    first = reader.see(".points tbody tr").inner_text()
    reader.see(".points tr.chosen", first.split()[0])
    reader.tab.locator(".pass input").fill("0.9")
    reader.press("Enter")
    reader.until("location.hash.includes('pass=0.9')")
    reader.see(".curves-note", "A failure has not passed")
    reader.tab.locator("input[name=failures]").uncheck()
    reader.until("location.hash.includes('scored=only')")
    reader.see(".curves-note", "a reward alone")
    reader.tab.locator(".points tbody a").first.click()
    reader.until("location.hash.startsWith('#where=task_id')")
    count = first.split()[1]
    reader.see(".table-foot", f"{count} of 16")


def test_curves_open_on_the_newest_version_that_is_known(browser: Browser, tmp_path: Path):
    """Trajectories of no version are in the table alone, and the last of it."""
    path = write(tmp_path / "t.jsonl", *(versioned(f"t{n}", n) for n in (1, 2, None)))
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("curve=policy_version")
        reader.see(".points tbody tr:last-child", "not known")
        reader.see(".points tr.chosen", "2")
        reader.see(".curves-at", "1 trajectory")


def versioned(id_: str, version: int | None) -> dict[str, Any]:
    """A trajectory of this policy version."""
    made = scored(id_, 1.0)
    made["exchanges"][0]["policy_version"] = version
    return made


def test_a_wrong_threshold_is_answered_beside_the_curves(reader: Reader):
    """As a wrong filter is."""
    reader.open("curve=policy_version&pass=x")
    reader.see(".error", "expected a finite number")


@pytest.mark.parametrize("width", [1300, 1000, 480])
def test_nothing_scrolls_sideways(browser: Browser, served: Served, width: int):
    """Columns that have no room are left out; on a narrow page the charts are behind a button."""
    with reading(browser, served.url) as reader:
        reader.tab.set_viewport_size({"width": width, "height": 800})
        reader.open()
        reader.see(".row .open")
        for selector in (".row.heads", ".table > .virtual", ".table", "html"):
            reader.until(
                f"(e => e.scrollWidth <= e.clientWidth)(document.querySelector('{selector}'))"
            )
        if width == 480:
            assert not reader.tab.locator(".facets").is_visible()
            reader.tab.get_by_role("button", name="Charts", exact=True).click()
            reader.see(".panel h3", "Endings")


def test_words_are_searched_for_in_messages(reader: Reader):
    """Only trajectories that contain them stay, with the text around; a click leads to it."""
    reader.open("search=queryset")
    reader.see(".table-foot", "2 of 16")
    assert reader.see(".row:not(.heads)").inner_text().startswith("researcher")
    found = reader.see(".row .hit mark").inner_text()
    assert "queryset" in found.lower()
    reader.tab.locator(".row .open").first.click()
    reader.until("location.hash.includes('node=')")
    assert reader.tab.locator("input[name=find]").input_value() == found
    reader.see(".finder button", "found")


def test_names_and_metadata_are_facets(browser: Browser, tmp_path: Path):
    """A click on a value filters by it."""
    lines = [
        scored(f"t{n}", 1.0, name=name, metadata={"split": split, "hard": n > 1})
        for n, (name, split) in enumerate([("a", "train"), ("b", "train"), ("b", "test")])
    ]
    with (
        serving(write(tmp_path / "t.jsonl", *lines)) as served,
        reading(browser, served.url) as reader,
    ):
        for title, value, count in (
            ("Agent", "b", 2),
            ("split", "train", 2),
            ("hard", "true", 1),
        ):
            reader.open()
            reader.see(".table-foot", "3 of 3")
            panel = reader.tab.locator(".panel").filter(has_text=title)
            panel.get_by_role("button", name=value).first.click()
            reader.see(".table-foot", f"{count} of 3")


def test_heads_sort_both_ways(reader: Reader):
    """The first click puts the largest first; what is not known comes last either way."""
    reader.open()
    head = reader.see(".heads button", "Reward")
    head.click()
    reader.see("[role=columnheader][aria-sort=descending]", "Reward")
    reader.until("document.querySelector('.row:not(.heads) .column-reward').textContent === '1'")
    head.click()
    reader.see("[role=columnheader][aria-sort=ascending]", "Reward")
    reader.until("document.querySelector('.row:not(.heads) .column-reward').textContent === '0'")
    assert reader.tab.locator(".row .column-reward").last.inner_text() == "–"


def test_the_list_grows_with_its_file(browser: Browser, tmp_path: Path):
    """What is appended is shown without a click."""
    path = tmp_path / "grows.jsonl"
    record_groups(path, groups=1, samples=2)
    with serving(path) as growing, reading(browser, growing.url) as reader:
        reader.open()
        reader.see(".table-foot", "2 of 2")
        first = path.read_text().splitlines()[0]
        with path.open("a") as file:
            file.write(first.replace('"id":"', '"id":"f') + "\n")
        reader.see(".table-foot", "3 of 3")


def test_an_empty_list_and_what_cannot_be_read_are_said(browser: Browser, tmp_path: Path):
    """A sentence where there is nothing; the problems of the sources behind a count."""
    path = tmp_path / "damaged.jsonl"
    record_groups(path, groups=1, samples=2)
    with path.open("a") as file:
        file.write('{"schema_version": 1, "id": 7}\n{}\n')
    with serving(path) as damaged, reading(browser, damaged.url) as reader:
        reader.open("where=reward+%3E+7")
        reader.see(".hint", "No trajectory matches.")
        reader.see(".problems summary", "problem").click()
        reader.see(".problems li", "line 3")


def test_a_server_that_is_gone_is_said(browser: Browser, tmp_path: Path):
    """What was loaded stays; the header tells that nothing new comes."""
    path = tmp_path / "gone.jsonl"
    record_groups(path, groups=1, samples=2)
    with ExitStack() as stack:
        gone = stack.enter_context(serving(path))
        with reading(browser, gone.url) as reader:
            reader.open()
            reader.see(".table-foot", "2 of 2")
            stack.close()
            reader.see(".state.bad", "does not answer")
            assert reader.count(".virtual-row") == 2


# --- keys and links


def test_the_list_is_read_with_keys_alone(reader: Reader, served: Served):
    """J and k choose, Enter opens, g leads back with the filter, / searches, ? helps."""
    reader.open("where=name+%3D%3D+%22travel_agent%22")
    reader.see(".table-foot", "12 of 16")
    reader.press("j", "j", "k")
    chosen = reader.see(".row.chosen").inner_text()
    assert chosen == reader.tab.locator(".virtual-row").nth(1).inner_text()
    reader.tab.locator(".table").focus()
    reader.press("Enter")
    reader.see(".tabs [aria-selected=true]", "Messages")
    reader.press("g")
    reader.see(".table-foot", "12 of 16")
    reader.press("/")
    assert reader.tab.evaluate("document.activeElement.name") == "search"
    reader.press("Escape", "?")
    reader.see(".help", "next, previous")
    reader.press("Escape")
    reader.tab.locator(".help").wait_for(state="detached")


def test_rows_are_reached_with_tab_and_the_focus_is_seen(reader: Reader):
    """Every row has a link; what has the focus has an outline."""
    reader.open()
    reader.see(".row .open")
    reader.tab.locator(".heads button").last.focus()
    reader.press("Tab")
    for _ in range(3):
        if "open" in (reader.tab.evaluate("document.activeElement.className") or ""):
            break
        reader.press("Tab")
    outline = reader.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert "open" in reader.tab.evaluate("document.activeElement.className")
    assert outline == "solid"


def test_numbers_open_views_and_escape_goes_back(reader: Reader, served: Served):
    """1 to 5 are the views of a trajectory, 6 is its group."""
    reader.open(hard(served))
    for key, view in zip("2345", ("Tokens", "Not trained", "Time", "Details"), strict=True):
        reader.see(".tabs")
        reader.press(key)
        reader.see(".tabs [aria-selected=true]", view)
    reader.press("6")
    reader.see(".group-view h1", "hard")
    reader.press("Escape")
    reader.see(".table-foot")


def test_a_rollout_whose_first_call_failed_opens_on_that_call(browser: Browser, tmp_path: Path):
    """Its request, the whole error and the status; also where another call failed elsewhere."""
    message = "the context is too long: " + "you requested 40112 tokens, " * 20 + "the end"
    failed = line("t1", Call([user("Where is Paris?")], None), status="error")
    failed["exchanges"][0] |= {
        "error": {"type": "BadRequestError", "message": message},
        "status_code": 400,
    }
    later = line("t2", Call([user("one")], "yes"), Call([user("two")], None))
    path = write(tmp_path / "t.jsonl", failed, later)
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("trajectory=t1")
        reader.see(".message", "Where is Paris?")
        note = reader.see(".failed-call", "BadRequestError").inner_text()
        assert message in note
        assert "HTTP status 400" in note
        reader.open("trajectory=t2")
        reader.see(".message", "one")
        reader.see(".branch.call", "call 1").click()
        reader.see(".message", "two")
        reader.see(".failed-call", "Timeout")


def test_tokens_begin_with_the_main_conversation_and_name_the_tokenizer(
    browser: Browser, tmp_path: Path
):
    """Of several rows that of the first history; the page says where texts of prompts are from."""
    path = write(
        tmp_path / "t.jsonl",
        line("t1", Call([user("one")], "yes", [1, 2], [3]), Call([user("two")], "no", [5], [6])),
    )
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("trajectory=t1&view=tokens")
        reader.see(".hint-line", "--tokenizer m")
        shown = reader.tab.locator("select[name=row] option").first.text_content()
        assert shown
        assert shown.startswith("history 1 main")


def test_what_all_samples_share_stands_there_once(browser: Browser, tmp_path: Path):
    """Up to the first message that differs, be it in its reasoning alone."""
    thoughts = [{"role": "assistant", "content": "4", "reasoning_content": t} for t in ("a", "b")]
    samples = [
        line(f"t{n}", Call([user("2 + 2?")], thought), group_id="g", sample_index=n)
        for n, thought in enumerate(thoughts)
    ]
    path = write(tmp_path / "t.jsonl", *samples)
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("group=g")
        reader.see(".column-cell.shared", "2 + 2?")
        reader.see(".columns-row.differs .reasoning", "reasoning")
        assert reader.count(".column-cell") == 1 + 2


def test_a_link_leads_another_reader_to_the_same_token(
    browser: Browser, reader: Reader, served: Served
):
    """All of a place is in the address."""
    reader.open(f"{hard(served, 'tokens')}&signal=mask")
    reader.see(".token.chosen")
    reader.press("n", "ArrowRight")
    address = reader.tab.evaluate("location.hash").lstrip("#")
    assert re.search(r"token=\d+", address)
    with reading(browser, served.url) as other:
        other.open(address)
        assert other.see(".token.chosen").inner_text() == reader.see(".token.chosen").inner_text()
        assert other.see('select[name="signal"]').input_value() == "mask"


def test_the_browsers_way_back_is_the_readers_way_back(reader: Reader, served: Served):
    """Views are steps of the history; moves of a cursor are not."""
    reader.open()
    reader.see(".row .open", "swe_agent").click()
    reader.see(".tabs a", "Time").click()
    reader.see(".lane")
    reader.tab.go_back()
    reader.see(".messages")
    reader.tab.go_back()
    reader.see(".table-foot")


def test_what_is_not_there_is_said(reader: Reader):
    """A wrong id is answered with a sentence, not with an empty page."""
    reader.open("trajectory=nobody")
    assert "nobody" in reader.see(".hint.error").inner_text()


# --- groups and differences


def test_a_group_shows_its_samples_side_by_side(reader: Reader):
    """A column for each, reward and advantage above, and a mark where they part."""
    reader.open("group=trip-2")
    reader.see(".column-head", "sample 3")
    assert reader.count(".column-head") == 4
    reader.see(".column-cell", "I will look it up.")
    assert "About" in reader.see(".columns-row.differs").inner_text()
    assert reader.count(".columns-row.same") == 2
    assert (reader.see(".first-difference").get_attribute("href") or "").startswith("#diff=")


def calling(number: int) -> list[Any]:
    """A reply with long reasoning and two calls of tools, and what follows."""
    think = "The first entry of the traceback is that of a test. " * 10
    say = {
        "role": "assistant",
        "content": "Let me look. " * 100,
        "reasoning_content": f"{think}So I take number {number}. {think}",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in (
                ("search", '{"query": "a \\"b\\"", "limit": 12345678901234567890}'),
                ("write", '{"code": "x\\ny"}'),
                ("stop", "{}"),
                ("odd", '{"a": {"b": 1}}'),
            )
        ],
    }
    result = "\n".join(f"line {n}" for n in range(40))
    answer = {"role": "tool", "tool_call_id": "search", "content": result}
    return [Call([user("q")], say), Call([user("q"), say, answer], "done")]


@pytest.fixture
def calls(browser: Browser, tmp_path: Path) -> Iterator[Reader]:
    """Two samples of a group, of such replies."""
    path = tmp_path / "calls.jsonl"
    for n in range(2):
        write(path, line(f"t{n}", *calling(n), group_id="g", sample_index=n))
    with serving(path) as served, reading(browser, served.url) as reader:
        yield reader


def test_a_call_of_a_tool_reads_like_a_call(calls: Reader):
    """Short arguments stand in its brackets as they were written; a long result is folded."""
    calls.open("trajectory=t0")
    calls.see(".tool-name", 'search(query="a \\"b\\"", limit=12345678901234567890)')
    calls.see(".tool-name", "write(…)")
    calls.see(".tool-name", "stop()")
    calls.see(".tool-name", "odd(…)")
    result = calls.see(".tool-call .result")
    assert "line 7" in result.inner_text()
    assert "line 8" not in result.inner_text()
    calls.tab.get_by_role("button", name="show all 40 lines").click()
    calls.see(".tool-call .result", "line 39")


def test_samples_show_the_reasoning_that_differs_and_more_of_what_is_cut(calls: Reader):
    """The difference is marked where it is, far inside of a long text."""
    calls.open("group=g")
    for n in range(2):
        calls.see(".columns-row.differs .compact-reasoning mark", f"{n}. The first entry")
    calls.see(".columns-row.differs .compact-reasoning", "… ")
    more = calls.tab.locator(".columns-row.differs .column-cell").first.get_by_role("button")
    assert more.all_inner_texts()[1] == "more (1,300 characters)"
    more.nth(1).click()
    calls.until(
        "document.querySelector('.differs .compact-reasoning + p').textContent.length === 1300"
    )


def test_any_two_of_a_group_are_compared(reader: Reader):
    """The two that were picked last, from the message and the token that differ."""
    reader.open("group=trip-0")
    for place in (0, 3):
        reader.tab.locator(".pick input").nth(place).check()
    reader.see("button.primary").click()
    assert "The first 2 messages are the same" in reader.see(".common").inner_text()
    assert reader.count(".common .token") == 2
    reader.tab.locator(".common a").first.click()
    reader.see(".token.chosen")


# --- a trajectory


def test_the_tree_tells_how_histories_came_from_each_other(reader: Reader, served: Served):
    """Forks, a restart after a compaction, a side call, failed and cut calls, sub-agents."""
    reader.open(hard(served))
    reader.see(".branch.main.chosen")
    for relation in ("fork", "restart", "separate"):
        reader.see(f".branch.{relation}")
    reader.see(".branch .tag", "side call")
    reader.see(".branch.call", "abandoned")
    reader.see(".branch.call", "error")
    reader.see(".branch.child", "researcher").click()
    reader.see(".head a", "inside swe_agent").click()
    reader.see(".branch.main")


def test_messages_are_shown_as_people_write_them(reader: Reader, served: Served):
    """Markdown, code, an image, a tool's call with its result, reasoning that is folded."""
    reader.open(f"{hard(served)}&history=1")  # the main one begins after a compaction
    assert reader.see(".markdown strong").inner_text() == "after"
    assert "total = sum" in reader.see(".markdown .code").inner_text()
    assert "AssertionError" in reader.see(".tool-call", "run_tests").inner_text()
    assert reader.tab.locator(".message.role-tool").count() == 0
    assert reader.tab.evaluate("document.querySelector('.content img').naturalWidth") == IMAGE_WIDTH
    thought = reader.tab.locator(".reasoning .plain").first
    assert not thought.is_visible()
    reader.tab.locator(".reasoning summary").first.click()
    assert "the filter is the first suspect" in thought.inner_text()
    reader.tab.get_by_label("Markdown").uncheck()
    reader.see(".content > .plain", "**after**")


def test_each_message_says_whether_it_trains_and_why_not(reader: Reader, served: Served):
    """Marks in one margin, the call's facts in the other, with a way to its tokens."""
    reader.open(hard(served))
    reader.see(".facts", "or more")  # a call that was cut: nobody knows how many it sampled
    reader.see(".message.trains .verdict", "trains")
    reader.see(".margin-right", "Qwen3-8B")
    reader.see(".branch", "fork").click()
    reader.see(".verdict", "trains in history 2")
    reader.see(".branch.separate").click()
    reader.see(".verdict", "side call")
    reader.see(".branch.main").click()
    reader.see(".message.trains .margin-right button", "its tokens").click()
    reader.see(".token.chosen")


def test_numbers_are_shown_as_they_were_written(browser: Browser, tmp_path: Path):
    """Of any size: browsers round whole numbers beyond 2**53, and write 1.0 as 1."""
    arguments = '{"id": 12345678901234567890, "share": 1.0, "name": "\\u00fc", "many": [1, {}]}'
    function = {"name": "f", "arguments": arguments}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": '{"id": -98765432109876543210}'}
    path = write(
        tmp_path / "a.jsonl",
        line(
            "t1",
            Call([user("hi")], asked),
            Call([user("hi"), asked, result], "done"),
            metadata={"seed": 11111111111111111111},
            output={"number": 22222222222222222222},
            metrics={"tests": -2.0, "loss": -1.5e-9},
        ),
    )
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("trajectory=t1")
        shown = reader.see(".tool-call", "12345678901234567890").inner_text()
        assert '"share": 1.0' in shown
        assert '"name": "ü"' in shown
        assert '"id": -98765432109876543210' in shown
        assert json.loads(shown[shown.index("{") : shown.index("}\n", shown.index("]")) + 1]) == (
            json.loads(arguments)
        )
        facts = reader.see(".facts", "tests").inner_text()
        assert "−2" in facts
        assert "−1.5e−9" in facts
        reader.open("trajectory=t1&view=raw")
        reader.see(".raw", "11111111111111111111")
        reader.see(".raw", "22222222222222222222")


def test_an_error_is_told_first(browser: Browser, tmp_path: Path):
    """Above every view, also of a rollout that asked no model; the raw view has all of it."""
    error = {"type": "ValueError", "message": "boom <b>\n" + "x" * 500}
    path = write(tmp_path / "a.jsonl", line("t1", status="error", error=error))
    with serving(path) as served, reading(browser, served.url) as reader:
        reader.open("trajectory=t1")
        reader.see(".hint", "no model call of this rollout was captured")
        told = reader.see(".head-error", "ValueError boom <b> xxx")
        told.click()
        reader.see(".raw .cause", "x" * 500)


def test_brackets_go_through_histories_and_j_through_messages(reader: Reader, served: Served):
    """And the address follows."""
    reader.open(hard(served))
    reader.see(".branch.main.chosen")
    reader.press("]")
    reader.until("location.hash.includes('history=1')")
    reader.press("[")
    reader.until("location.hash.includes('history=0')")
    reader.press("j", "j")
    reader.until("location.hash.includes('node=')")
    reader.see(".message.chosen")


def test_a_text_is_found_in_its_history(reader: Reader, served: Served):
    """The search goes to the message, also in another history."""
    reader.open(hard(served))
    reader.see(".finder")
    reader.press("/")
    reader.tab.keyboard.type("Try another way")
    reader.press("Enter")
    reader.see(".finder button", "1 found").click()
    reader.see(".message.chosen", "Try another way.")


# --- tokens


def test_a_token_tells_all_that_is_known_of_it(reader: Reader, served: Served):
    """Under the pointer: id, text, log-probability, alternatives, completion."""
    reader.open(f"{hard(served, 'tokens')}&row=0")
    reader.tab.locator(".token:not(.context)").nth(2).hover()
    facts = reader.see(".token-facts", "log-probability").inner_text()
    for name in ("id", "position", "probability", "mask", "chatcmpl-"):
        assert name in facts
    assert "no top log-probabilities came" in facts
    reader.press("n")
    reader.see(".alternative")


def test_tokens_of_what_does_not_train_say_why(browser: Browser, tmp_path: Path):
    """A failed rollout: its tokens can be looked at, and no mark says that they train."""
    call = Call([user("hi")], "one", prompt_ids=[1, 2], ids=[3, 4])
    path = write(tmp_path / "a.jsonl", line("t1", call, status="error"))
    with serving(path) as failed, reading(browser, failed.url) as reader:
        reader.open("trajectory=t1&view=tokens")
        reader.see(".numbers", "4 tokens · 2 first prompt · 2 sampled · 0 train")
        facts = reader.see(".token-facts", "its rollout failed and has no reward")
        assert "0: sampled, not trained here" in facts.inner_text()
        facts.get_by_text("its message").click()
        reader.see(".verdict", "○ its rollout failed")
        assert reader.tab.locator(".message.trains").count() == 0
        reader.see(".tabs a", "Not trained").click()
        reader.see(".lead", "Nothing of this trajectory trains.")


def test_an_open_trajectory_follows_its_file(browser: Browser, tmp_path: Path):
    """One that takes its place, such as with a late reward, is shown without a click."""
    call = Call([user("hi")], "one", prompt_ids=[1, 2], ids=[3, 4])
    path = write(tmp_path / "a.jsonl", line("t1-long", call), line("t2", call))
    with serving(path) as growing, reading(browser, growing.url) as reader:
        reader.open("trajectory=t1&view=tokens")  # the beginning of its id
        reader.see(".facts", "none")
        reader.see(".numbers", "4 tokens")
        after = Call([user("hi")], "one", prompt_ids=[1, 2, 7], ids=[3, 4])
        write(path, {**line("t1-long", after), "reward": 0.25, "rewards": [{"value": 0.25}]})
        reader.see(".facts", "0.25")
        reader.see(".numbers", "5 tokens")
        reader.see(".token.chosen")


def test_colours_say_one_signal_and_what_is_not_known(reader: Reader, served: Served):
    """Entropy has its own pattern where no alternatives came, never a colour."""
    reader.open(f"{hard(served, 'tokens')}&row=0")
    reader.see(".token[class*=heat-]")
    menu = reader.see('select[name="signal"]')
    shades = {
        "mask": ".token.trained",
        "sampled": ".token.trained",
        "advantage": ".token.gain-0",
        "version": ".token.version-0",
        "entropy": ".token.unknown:not(.swatch)",
    }
    for signal, shade in shades.items():
        menu.select_option(signal)
        reader.see(shade)
        assert reader.count(".legend li") >= 2
    first = reader.tab.locator(".token:not(.context):not(.swatch)").first
    assert "unknown" in (first.get_attribute("class") or "")


def test_spaces_and_ends_of_lines_are_seen_and_unknown_texts_are_ids(
    reader: Reader, served: Served
):
    """A token without a text shows its id."""
    reader.open(f"{hard(served, 'tokens')}&row=0")
    reader.see(".token .space", "␣")
    reader.see(".token .space", "⏎")
    assert reader.see(".token.id-only").inner_text().isdigit()
    assert "<|im_end|>" in reader.see(".token.special").inner_text()


def test_the_facts_of_a_token_are_below_the_tokens_of_a_narrow_page(
    browser: Browser, served: Served
):
    """Tokens have the whole width there."""
    with reading(browser, served.url) as reader:
        reader.tab.set_viewport_size({"width": 480, "height": 800})
        reader.open(hard(served, "tokens"))
        reader.see(".token.chosen")
        tokens, facts = (
            reader.see(selector).bounding_box() for selector in (".tokens", ".token-facts")
        )
        assert tokens
        assert facts
        assert (tokens["width"], facts["width"]) == (480, 480)
        assert tokens["y"] + tokens["height"] <= facts["y"] + 1


def test_keys_go_through_tokens_and_sampled_spans(reader: Reader, served: Served):
    """N and p, arrows, Home and End, and a number in the box."""
    reader.open(f"{hard(served, 'tokens')}&row=0")
    start = int(reader.see('input[name="token"]').input_value())
    reader.see(".token.chosen")
    reader.press("n")
    reader.until(f"+document.querySelector('input[name=token]').value > {start}")
    reader.press("p", "ArrowRight", "ArrowRight", "ArrowLeft")
    reader.until(f"+document.querySelector('input[name=token]').value === {start + 1}")
    reader.press("t")
    reader.tab.keyboard.type("7")
    reader.tab.locator('input[name="token"]').fill("7")
    reader.press("Enter")
    reader.until("location.hash.includes('token=7')")


def test_a_hundred_thousand_tokens_are_a_few_in_the_document(reader: Reader, served: Served):
    """Only what can be seen is drawn, at the start, in the middle and at the end."""
    reader.open(f"trajectory={served.id_of('reader')}&view=tokens&token=0")
    reader.see(".token.chosen")
    assert reader.count(".token") < 6000
    reader.press("End")
    reader.see('.token.chosen[data-token="99997"]')
    assert reader.count(".token") < 6000
    reader.tab.locator(".minimap").click(position={"x": 700, "y": 8})
    reader.until("Math.abs(+document.querySelector('input[name=token]').value - 50000) < 2000")
    reader.see(".token.chosen")


# --- findings, time, raw


def test_findings_name_their_cause_and_lead_to_their_message(reader: Reader, served: Served):
    """Each drop is there, with the completion that it is about."""
    reader.open(hard(served, "findings"))
    reader.see(".lead", "can be trained on")
    reader.see(".finding .cause", "it is a side call")
    reader.tab.locator(".finding", has_text="it is a side call").locator("button").click()
    reader.see(".branch.separate.chosen")


def test_calls_tools_and_sub_agents_are_on_one_axis(reader: Reader, served: Served):
    """What each bar is, in words; Enter on a call opens its message."""
    reader.open(hard(served, "time"))
    for kind in ("call", "bad", "side", "tools", "child"):
        reader.see(f".span.{kind}")
    reader.see(".lane-label", "1 main · The sum now runs")
    reader.see(".lane-label", "7 side call · Totals of orders")
    label = reader.tab.locator(".span.tools").first.get_attribute("aria-label") or ""
    assert label.startswith("tools: read_file")
    reader.tab.locator(".span.call").first.focus()
    reader.press("Enter")
    reader.see(".message.chosen")


def test_all_that_is_stored_can_be_read(reader: Reader, served: Served):
    """Logs first, with their escapes; metrics, metadata, parameters of calls, the way to Jaeger."""
    reader.open(hard(served, "raw"))
    reader.see(".raw .code", "\\x1b[31m1 failed")
    assert reader.see(".raw h2").inner_text() == "Logs"
    reader.see(".plain-table", "tests_passed")
    reader.see(".plain-table", "repository")
    reader.tab.locator(".raw-call summary").first.click()
    reader.see(".raw-call .code", "sampling")
    trace = reader.see(".head a", "trace in Jaeger").get_attribute("href") or ""
    assert trace.startswith("http://127.0.0.1:1/jaeger/trace/")


# --- colours and what is refused


def test_dark_is_the_systems_wish_or_the_readers(browser: Browser, served: Served):
    """The system decides at first; a choice stays for the next visit."""
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    with reading(browser, served.url, scheme="dark") as reader:
        reader.open()
        reader.see(".table-foot", "16")
        dark = reader.tab.evaluate(ground)
        reader.tab.get_by_label("Light or dark colours").click()
        reader.until("document.documentElement.dataset.theme === 'light'")
        assert reader.tab.evaluate(ground) != dark
        reader.open()
        reader.see(".table-foot", "16")
        assert reader.tab.evaluate("document.documentElement.dataset.theme") == "light"


def test_a_violation_of_the_policy_would_be_noticed(browser: Browser, served: Served):
    """The tests' own check: a script that is written into the page is refused, and reported."""
    with reading(browser, served.url) as reader:
        reader.open()
        reader.see(".table-foot", "16")
        reader.tab.evaluate(
            "document.body.append(Object.assign(document.createElement('script'),"
            "{textContent: 'window.broken = 1'}))"
        )
        assert reader.tab.evaluate("window.broken") is None
        (complaint,) = reader.complaints
        assert "Content Security Policy" in complaint
        reader.complaints.clear()


# --- without a server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The same page as one file, with two groups in it."""
    folder = tmp_path_factory.mktemp("alone")
    path, file = folder / "run.jsonl", folder / "page.html"
    record_groups(path, groups=2)
    with Index([str(path)], cached=False, follow=False) as index:
        index.wait()
        text, left_out = whole_page(Answers(index), Page.read(), title="A run")
    assert left_out == []
    file.write_text(text)
    return Served(file.as_uri(), path)


def test_a_page_that_holds_its_answers_needs_no_server(browser: Browser, alone: Served):
    """The same views from one file: list, search, order, group, difference, messages, tokens."""
    with reading(browser, alone.url) as reader:
        reader.open()
        reader.see(".table-foot", "8 of 8")
        assert reader.count('input[name="where"]') == 0
        reader.see(".heads button", "Reward").click()
        reader.see("[aria-sort=descending]")
        assert reader.tab.locator(".row .column-reward").last.inner_text() == "–"
        reader.tab.locator('input[name="search"]').fill("trip-1")
        reader.see(".table-foot", "4 of 8")
        reader.open("group=trip-0")
        assert reader.see(".columns-row.differs").is_visible()
        for place in (0, 3):
            reader.tab.locator(".pick input").nth(place).check()
        reader.see("button.primary").click()
        reader.see(".common", "The first 2 messages are the same")
        reader.open(f"trajectory={alone.id_of('travel_agent')}")
        reader.see(".message.trains")
        reader.press("2")
        reader.see(".token.chosen")
        reader.tab.locator(".token:not(.context)").nth(3).hover()
        reader.see(".token-facts", "log-probability")


def test_a_token_far_on_tells_where_its_text_is_from(browser: Browser, tmp_path: Path):
    """Of a page that holds its answers, beyond the tokens that are asked for at once."""
    entry = {"token": "yes", "logprob": -0.5}
    call = Call(
        [user("hi")],
        prompt_ids=list(range(5000)),
        ids=[9000],
        choice={"logprobs": {"content": [entry]}},
    )
    file = tmp_path / "page.html"
    with Index([str(write(tmp_path / "a.jsonl", line("t1", call)))], cached=False) as index:
        index.wait()
        file.write_text(whole_page(Answers(index), Page.read(), title="long")[0])
    with reading(browser, file.as_uri()) as reader:
        reader.open("trajectory=t1&view=tokens&token=5000")
        reader.see(".token.chosen", "yes")
        reader.see(".token-facts", "its log-probability")


def test_a_notebook_shows_a_trajectory_in_a_frame_without_rights(
    browser: Browser, alone: Served, tmp_path: Path
):
    """It begins with the trajectory; links and keys work where there is no address to write."""
    trajectory = next(JsonlTrajectoryExporter.read(alone.path))
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><title>n</title>{trajectory._repr_html_()}")
    with reading(browser, file.as_uri()) as reader:
        reader.open()
        frame = reader.tab.frame_locator("iframe")
        frame.locator(".message.trains").first.wait_for()
        frame.locator(".tabs a", has_text="Tokens").click()
        frame.locator(".token.chosen").wait_for()
        frame.locator(".crumbs a").click()
        frame.locator(".table-foot", has_text="1 of 1").wait_for()
