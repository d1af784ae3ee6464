"""The verb `view`: a page on this machine that shows trajectories, until it is stopped.

The first line of its output is its address.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sqlite3
import tempfile
import threading
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path

from otel_rollout.errors import RolloutError, SpanFormatError
from otel_rollout.terminal import note
from otel_rollout.trajectory import UNREADABLE
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page
from otel_rollout.view.html import DAMAGED, MOST_BYTES, whole_page
from otel_rollout.view.index import Index
from otel_rollout.view.sources import ERRORS_SHOWN, is_address
from otel_rollout.view.tokens import Tokenizer

_INDEX = "OTEL_ROLLOUT_VIEW_INDEX"


def view(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    page = Page.read()
    vocabulary = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    path = os.environ.get(_INDEX)
    index = Index(
        options.sources,
        path=Path(path) if path and not options.no_cache else None,
        cached=not options.no_cache,
        infer_rollouts=options.infer_rollouts,
        follow=options.html is None,
        report=_note_addresses if options.html is None else None,
    )
    with index:
        answers = Answers(
            index, jaeger=options.jaeger, vocabulary=vocabulary, where=options.where or ""
        )
        if options.html is not None:
            try:
                return _write(index, answers, page, options.html)
            except RolloutError:
                raise
            except (*UNREADABLE, sqlite3.Error) as error:
                raise SpanFormatError(
                    f"the index is damaged ({error!r:.200}): remove it ({index.path}), or read "
                    f"without one (--no-cache)"
                ) from error
        _serve(answers, page, options)
    return 0


def _note_addresses(errors: Sequence[str]) -> None:
    """Print which addresses could not be read; what is wrong in a file, the page lists alone."""
    for error in filter(is_address, errors):
        note(error)


def _serve(answers: Answers, page: Page, options: argparse.Namespace) -> None:
    from otel_rollout.view.server import REACHABLE, Server  # needs the extra, which --html does not

    server = Server(
        answers,
        page,
        host=options.host,
        port=options.port,
        reachable=os.environ.get(REACHABLE) == "1",
    )
    print(server.url, flush=True)
    # It ends as by Ctrl-C: the index is closed, and one that is not kept is removed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Its file is the user's alone (0600), and is kept while a browser may read it.
        with tempfile.NamedTemporaryFile(suffix=".html") as redirect:
            if not options.no_browser:
                # Beside the server: a browser of the terminal stays until it is closed.
                arguments = (server.url, redirect.name)
                threading.Thread(target=_open, args=arguments, daemon=True).start()
            server.run()
    finally:
        signal.signal(signal.SIGTERM, before)


def _open(url: str, redirect: str) -> None:
    """Open the address by a file of the user's that leads there.

    A browser's command line can be read by all users of the machine, and the address is a secret.
    """
    target = escape(url)
    Path(redirect).write_text(f'<meta http-equiv="refresh" content="0; url={target}">\n')
    if not webbrowser.open(Path(redirect).as_uri()):
        note("no browser could be opened: open the address above")


def _missing(sources: Sequence[str]) -> str:
    """What a page without a server says of a trajectory whose details it does not hold."""
    return (
        f"It has room for {MOST_BYTES // 1_000_000} MB of them: `otel-rollout view "
        f"{shlex.join(sources)}` shows all, and --html with a --where holds those that it keeps."
    )


def _write(index: Index, answers: Answers, page: Page, path: str) -> int:
    """Write one page; the exit status is 1 if something could not be read."""
    index.wait()
    title = ", ".join(os.path.basename(source) or source for source in index.sources)
    text, left_out = whole_page(
        answers, page, title=f"Trajectories of {title}", missing=_missing(index.sources)
    )
    Path(path).write_text(text, encoding="utf-8")
    for each in left_out[:ERRORS_SHOWN]:
        note(f"{path} does not hold {each}")
    for error in index.errors[:ERRORS_SHOWN]:
        note(error)
    return int(bool(index.errors) or any(each.startswith(DAMAGED) for each in left_out))
