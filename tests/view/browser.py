"""A real browser on the real server; whatever the browser complains of fails the test."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Locator, Request, sync_playwright
from playwright.sync_api import Page as Tab

from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page
from otel_rollout.view.index import Index
from otel_rollout.view.server import Server
from otel_rollout.view.tokens import Vocabulary

_REFUSED = "Failed to load resource"
"""What the browser says of each answer with an error; tests of wrong questions expect them."""

_PATIENCE = 60
"""Seconds until a test fails: the machine may be slow."""


@dataclass
class Served:
    """A server of one file of trajectories."""

    url: str
    path: Path

    def id_of(self, name: str, place: int = 0) -> str:
        """The id of the trajectory whose name begins so."""
        return [
            trajectory.id
            for trajectory in JsonlTrajectoryExporter.read(self.path)
            if trajectory.name.startswith(name)
        ][place]


@contextmanager
def serving(path: Path, vocabulary: Vocabulary | None = None) -> Iterator[Served]:
    """The page of a file, until the end of the block."""
    with Index([str(path)], cached=False) as index:
        answers = Answers(index, jaeger="http://127.0.0.1:1/jaeger", vocabulary=vocabulary)
        server = Server(answers, Page.read())
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            index.wait()
            yield Served(server.url, path)
        finally:
            server.stop()
            thread.join()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    path = shutil.which("chromium")
    assert path, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Reader:
    """Somebody who looks at the page."""

    tab: Tab
    url: str
    complaints: list[str] = field(default_factory=list)
    """What the browser reported: errors of scripts, refused content, requests to elsewhere."""

    def open(self, address: str = "") -> None:
        """Go to an address in the page, anew."""
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.url}#{address}")

    def see(self, selector: str, text: str | None = None) -> Locator:
        """The first element like this with this text, once it is there and can be seen."""
        found = self.tab.locator(selector)
        found = found.first if text is None else found.filter(has_text=text).first
        found.wait_for()
        return found

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def count(self, selector: str) -> int:
        return self.tab.locator(selector).count()

    def until(self, condition: str) -> None:
        """Wait for a condition; the page's policy forbids to have the browser wait for it."""
        deadline = time.monotonic() + _PATIENCE
        while not self.tab.evaluate(condition):
            assert time.monotonic() < deadline, f"in vain: {condition}"
            self.tab.wait_for_timeout(30)


@contextmanager
def reading(browser: Browser, url: str, *, scheme: str = "light") -> Iterator[Reader]:
    """A fresh profile on the page of this address. What the browser complains of is an error."""
    dark = scheme == "dark"
    context = browser.new_context(
        viewport={"width": 1400, "height": 900}, color_scheme="dark" if dark else "light"
    )
    reader = Reader(context.new_page(), url)
    origin = url.split("/", 3)[2]

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_REFUSED):
            reader.complaints.append(message.text)

    def watch(request: Request) -> None:
        if not request.url.startswith(("data:", "about:", "file:", f"http://{origin}/")):
            reader.complaints.append(f"a request to {request.url}")

    reader.tab.on("console", listen)
    reader.tab.on("pageerror", lambda error: reader.complaints.append(str(error)))
    reader.tab.on("request", watch)
    reader.tab.set_default_timeout(_PATIENCE * 1000)
    yield reader
    context.close()
    assert reader.complaints == []
