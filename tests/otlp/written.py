"""Spans of every kind, and files that hold them."""

from __future__ import annotations

import math
from typing import Any

SCALARS: dict[str, Any] = {
    "text": "é \U0001f600 \u2028 \x00 \\u0000",
    "empty": "",
    "true": True,
    "false": False,
    "large": 2**63 - 1,
    "negative": -5,
    "float": 0.1,
    "whole float": 2.0,
}
VALUES: dict[str, Any] = {
    **SCALARS,
    "infinite": math.inf,
    "bytes": b"\x00\xff",
    "texts": ["a", ""],
    "ints": [1, -2],
    "none": [],
}
