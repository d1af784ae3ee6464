"""The verb `view`: a page on this machine that shows trajectories, until it is told to stop.

The first line of its output is its address.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from otel_rollout.command.text import say
from otel_rollout.view import Answers, Index, Page, Server, Tokenizer


def view(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    page = Page.read()
    vocabulary = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    index = Index(
        options.sources,
        path=None if options.index is None else Path(options.index),
        cached=not options.no_cache,
        infer_rollouts=options.infer_rollouts,
    )
    with index:
        answers = Answers(
            index, jaeger=options.jaeger, vocabulary=vocabulary, where=options.where or ""
        )
        server = Server(
            answers, page, host=options.host, port=options.port, reachable=options.reachable
        )
        print(server.url, flush=True)
        if not options.no_browser and not webbrowser.open(server.url):
            say("no browser could be opened: open the address above")
        server.run()
    return 0
