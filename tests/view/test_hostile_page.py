"""The page on trajectories that want to be more than text, and on very large ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Error

from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page
from otel_rollout.view.html import InMemory, whole_page
from tests.kit.to_look_at import BIDI, ESCAPE, FORKS, LONG, record_hostile, record_said
from tests.view.browser import Reader, Served, chromium, reading, serving
from tests.view.odd_texts import BLANKS, made

pytestmark = [pytest.mark.browser, pytest.mark.slow]
VIEWS = ("messages", "tokens", "findings", "time", "raw")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Names and texts with scripts, a message of 50 MB, 10,000 forks."""
    path = tmp_path_factory.mktemp("look") / "hostile.jsonl"
    record_hostile(path)
    with serving(path) as served:
        yield served


@pytest.fixture
def reader(browser: Browser, served: Served) -> Iterator[Reader]:
    with reading(browser, served.url) as reader:
        yield reader


def nothing_ran(reader: Reader) -> bool:
    """True if no script of the data ran, and none of its markup is in the document."""
    found = (
        "document.querySelectorAll('#app script, #app iframe, img:not([src^=\"data:\"])').length"
    )
    return reader.tab.evaluate("window.broken") is None and reader.tab.evaluate(found) == 0


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_of_a_trajectory_runs(reader: Reader, served: Served, view: str):
    """In no view: names, ids, messages, arguments, logs and metadata are text."""
    reader.open(f"trajectory={served.id_of('hostile')}&view={view}")
    heading = reader.see(".head h1").inner_text()
    assert "<script>window.broken = 1</script>" in heading
    reader.see(".view > *")
    reader.tab.wait_for_load_state("networkidle")
    assert nothing_ran(reader)


def test_nothing_of_a_list_or_a_group_runs(reader: Reader):
    """The same where many trajectories are."""
    reader.open()
    reader.see(".row", "hostile <script>")
    assert nothing_ran(reader)
    reader.see(".groups a").click()
    reader.see(".column-head")
    assert nothing_ran(reader)


def test_what_turns_or_colours_text_is_escaped(reader: Reader, served: Served):
    """Bidirectional controls and ANSI escapes are seen, and do nothing."""
    reader.open(f"trajectory={served.id_of('hostile')}")
    reader.see(".head .escape", "\\u202e")
    reader.see(".head .escape", "\\x1b")
    reader.see(".tool-name .escape", "\\x1b")
    text = reader.see(".message .content").inner_text()
    assert not set(text) & {"\u202e", "\x1b"}
    assert reader.see(".message bdi").evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
    reader.press("2")
    reader.see(".token .escape", "\\u202e")


def test_links_lead_only_where_nothing_can_run(reader: Reader, served: Served):
    """A link of a script is text; images from elsewhere are not loaded."""
    reader.open(f"trajectory={served.id_of('hostile')}")
    reader.see(".message .address", "javascript:alert(1)")
    schemes = reader.tab.evaluate("[...document.links].map((link) => link.protocol)")
    assert set(schemes) <= {"http:", "https:", "mailto:"}
    reader.see(".message", "![image](http://127.0.0.1:1/x.png)")


def test_a_very_long_message_is_folded_and_shown_in_parts(reader: Reader, served: Served):
    """50 MB: a beginning at first, then as much as is asked for."""
    reader.open(f"trajectory={served.id_of('hostile')}")
    more = reader.see(".result .more")
    assert f"{LONG // 30 * 30:,}"[:6] in more.inner_text()
    assert len(reader.see(".result").inner_text()) < 25_000
    more.click()
    again = reader.see(".whole .more", "are shown")
    assert len(reader.see(".result").inner_text()) > 400_000
    again.click()
    reader.see(".whole .more", "1,000,000 of")


def test_ten_thousand_forks_are_a_few_in_the_document(reader: Reader, served: Served):
    """The tree says how many there are; only those that can be seen are drawn."""
    reader.open(f"trajectory={served.id_of('forked')}")
    reader.see(".tree h2", f"{FORKS:,} histories")
    reader.see(".branch.main.chosen")
    assert reader.count(".branch") < 100
    for _ in range(3):
        reader.press("]")
    reader.until("location.hash.includes('history=3')")
    reader.see(".branch.chosen.resample")
    reader.tab.locator(".tree .virtual").evaluate("e => e.scrollTo(0, e.scrollHeight)")
    reader.see(".tree h3", "more histories")
    assert reader.count(".branch") < 100
    reader.press("4")
    reader.see(".lane .span")
    assert reader.count(".lane") < 200


def show_each(browser: Browser, folder: Path, texts: Iterable[str]) -> None:
    """Show pages with one text each; the tab answers in time."""
    path, file = folder / "said.jsonl", folder / "page.html"
    with reading(browser, file.as_uri()) as reader:
        for text in texts:
            path.unlink(missing_ok=True)
            record_said(path, [text])
            with InMemory(JsonlTrajectoryExporter.read(path)) as held:
                file.write_text(whole_page(Answers(held), Page.read(), title="said")[0])
            reader.open()
            try:
                reader.see(".message", "Yes.")
            except Error as error:
                raise AssertionError(f"it stops the page: {text[:2000]!r}") from error
            assert reader.count(".message") == 2


def test_texts_that_ask_much_of_markdown(browser: Browser, tmp_path: Path):
    """Boards, tables and trees of tools are read in time."""
    assert len(BLANKS) == 19
    show_each(browser, tmp_path, BLANKS.values())


def test_any_text_is_shown_in_time(browser: Browser, tmp_path: Path):
    """Signs of Markdown, repeated, with anything between them."""
    draw = random.Random(1)
    show_each(browser, tmp_path, (made(draw) for _ in range(20)))


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(500, 504))
def test_many_texts_are_shown_in_time(browser: Browser, tmp_path: Path, seed: int):
    """The same for long: `make fuzz`."""
    draw = random.Random(seed)
    show_each(browser, tmp_path, (made(draw) for _ in range(250)))


_SIGNS = st.sampled_from([*"*_`~[]()<>!|#-+=\n \t\\&;:/.0ab\r", BIDI, ESCAPE, "\u200b", "\u2028"])
_WORDS = st.sampled_from(["<script>", "</script>", "<!--", "<img src=x onerror=y>", "javascript:"])
_TEXTS = st.lists(st.one_of(st.text(), _SIGNS, _WORDS), max_size=60).map("".join)


@settings(
    max_examples=10,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=12))
def test_whatever_is_said_is_shown_and_is_text(browser: Browser, tmp_path: Path, texts: list[str]):
    """Markdown or not: no markup of the data, nothing invisible that steers, all messages there."""
    path = tmp_path / "said.jsonl"
    path.unlink(missing_ok=True)
    record_said(path, texts)
    with InMemory(JsonlTrajectoryExporter.read(path)) as held:
        page, left_out = whole_page(Answers(held), Page.read(), title="said")
    assert left_out == []
    file = tmp_path / "page.html"
    file.write_bytes(page.encode("utf-8", "replace"))
    with reading(browser, file.as_uri()) as reader:
        reader.open()
        reader.see(".message")
        assert reader.count(".message") == len(texts) + 1
        assert nothing_ran(reader)
        shown = reader.tab.locator(".messages").inner_text()
        assert not set(shown) & {BIDI, ESCAPE[0], "\u2028"}
