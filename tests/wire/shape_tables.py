"""The tables of shapes that a test may add to."""

from __future__ import annotations

TABLES = ("TYPES", "BLOCKS", "MEMBERS", "ROLES", "PIECES", "RESULT_MARKS")
