"""Errors that servers report: their message, with the numbers and codes that belong to it."""

from __future__ import annotations

from collections.abc import Mapping

from otel_rollout.wire.json import Json


def error_text(error: Json, *, message: str | None = None, status: int | None = None) -> str:
    """The message of an error that a server reported, and the codes that the message lacks.

    error: as the server sent it, an object or a text. None: not known.
    message: another wording of it, such as a client's. None: its own.
    status: the HTTP status that it came with, if that is one of an error. None: not known.

    Trainers' logs and retry policies go by these: "Rate limit reached (HTTP 429, rate_limited)".
    """
    fields = error if isinstance(error, Mapping) else {}
    said = message or fields.get("message") or ("" if error is None else error)
    text = str(said)
    code = _code_in(fields)
    words = [f"HTTP {status}"] if status is not None and str(status) not in text else []
    if code is not None and code not in text and code != str(status):
        words.append(f"code {code}" if code.isdigit() else code)
    return f"{text} ({', '.join(words)})" if words else text


def _code_in(fields: Mapping[str, Json]) -> str | None:
    """The most exact of the names that an error has for its kind."""
    named = (fields.get(name) for name in ("code", "type", "status"))
    return next((str(name) for name in named if isinstance(name, str | int) and name != ""), None)
