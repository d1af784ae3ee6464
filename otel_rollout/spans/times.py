"""Times as texts, in nanoseconds since 1970."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_time = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s?(?:(Z|UTC)|([+-]\d\d):?(\d\d)?)?"
).fullmatch


def nanoseconds_of(text: str) -> int:
    """The time of an ISO 8601 text, exactly; in UTC if it names no zone. ValueError otherwise."""
    match = _time(text)
    if match is None:
        raise ValueError(f"expected a time such as 2026-11-26T07:00:00.123456Z, got {text!r:.80}")
    day, clock, fraction, _, hours, minutes = match.groups()
    whole = datetime.fromisoformat(f"{day}T{clock}{hours or '+00'}:{minutes or '00'}")
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
