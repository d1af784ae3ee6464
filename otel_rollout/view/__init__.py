"""Trajectories to look at: filters over their overviews, an index of sources, the page.

All but the filters is loaded when it is first used; the server needs the extra `view`.
"""

from typing import TYPE_CHECKING

from otel_rollout.first_use import load_on_first_use
from otel_rollout.view.fields import COLUMNS, Field, row_of
from otel_rollout.view.where import Where

if TYPE_CHECKING:
    from otel_rollout.view.answers import Answers
    from otel_rollout.view.built import Page
    from otel_rollout.view.html import notebook_cell, whole_page
    from otel_rollout.view.index import Index
    from otel_rollout.view.server import Server
    from otel_rollout.view.tokens import Tokenizer
else:
    __getattr__ = load_on_first_use(
        __name__,
        {
            "answers": ("Answers",),
            "built": ("Page",),
            "html": ("notebook_cell", "whole_page"),
            "index": ("Index",),
            "server": ("Server",),
            "tokens": ("Tokenizer",),
        },
    )

__all__ = [
    "COLUMNS",
    "Answers",
    "Field",
    "Index",
    "Page",
    "Server",
    "Tokenizer",
    "Where",
    "notebook_cell",
    "row_of",
    "whole_page",
]
