"""Content: what of prompts and replies may be on the spans that leave the process.

The one idea: content is taken off before a span has it, so that no exporter, whoever added it, can
send it. Trajectories of this process, and what trains on them, keep it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.wire import Json, dumps, loads

logger = logging.getLogger("otel_rollout")

Redact = Callable[[bytes], bytes]
SWITCHES = {
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "no_content",
    "TRACELOOP_TRACE_CONTENT": "false",
}
"""Variables that let instrumentations leave content out, with the value that does."""
_ON = {"", "true", "1", "yes", "on", "span_only", "span_and_event"}
"""Their values, in lower case, with which content is on spans: instrumentations leave it out with
any other, also with one that they do not know."""

_TEXTS = (
    sc.ROLLOUT_OUTPUT,
    sc.ROLLOUT_METADATA,
    sc.ROLLOUT_LOGS,
    sc.ROLLOUT_APPENDED,
    sc.ROLLOUT_STEPS,
    sc.ROLLOUT_EPISODE,
    sc.GEN_AI_TOOL_CALL_ARGUMENTS,
    sc.GEN_AI_TOOL_CALL_RESULT,
    sc.GEN_AI_EVALUATION_EXPLANATION,
    sc.GEN_AI_EVALUATION_SCORE_LABEL,
    sc.GEN_AI_INPUT_MESSAGES,
    sc.GEN_AI_OUTPUT_MESSAGES,
    sc.GEN_AI_SYSTEM_INSTRUCTIONS,
    sc.INPUT_VALUE,
    sc.OUTPUT_VALUE,
)
"""Attributes that are free text, or JSON with free text."""
_FREE = {
    sc.ROLLOUT_ERROR: ("message", "traceback"),
    sc.ROLLOUT_REWARDS: ("explanation", "label"),
    sc.REWARD: ("explanation", "label"),
}
"""Attributes that are a JSON object, or a list of them, with its members that are free text."""


@dataclass(frozen=True, slots=True)
class Content:
    """The rule for content on spans; that of a process is `process_state.content`."""

    exported: bool = True
    """False: no span that leaves the process has prompts, replies, or texts of the user."""
    shows: Literal["new", "full"] = "new"
    """The messages that an LLM span shows: those that are new in its call, or all of them."""
    redact: Redact | None = None
    """Changes the bytes of each request, response and text before it is recorded. None: nothing."""

    @property
    def is_whole(self) -> bool:
        """True if everything is recorded and exported as it was."""
        return self.exported and self.redact is None

    def body(self, body: bytes) -> tuple[bytes, bool]:
        """The body of a request or response to record, and True if it was redacted."""
        if self.redact is None:
            return body, False
        redacted = _redacted(self.redact, body)
        return redacted, redacted != body

    def recorded(self, text: str) -> str:
        """A text as it may be recorded: redacted."""
        if self.redact is None:
            return text
        return _redacted(self.redact, text.encode("utf-8", "backslashreplace")).decode()

    def value(self, value: Json) -> Json:
        """A JSON value as it may be recorded. None where redacting leaves no JSON."""
        if self.redact is None or value is None:
            return value
        try:
            return loads(self.recorded(dumps(value)))
        except (ValueError, RecursionError):
            return None

    def text(self, text: str) -> str:
        """A text, recorded as it is, as it may be on a span that is exported."""
        return text if self.exported else ""

    def shown(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a rollout, tool or reward as they may be on a span that is exported."""
        if self.exported:
            return dict(attributes)
        kept = {key: value for key, value in attributes.items() if key not in _TEXTS}
        return kept | {
            key: dumps(_without(loads(kept[key]), members))
            for key, members in _FREE.items()
            if isinstance(kept.get(key), str)
        }


def _redacted(redact: Redact, body: bytes) -> bytes:
    """The bytes redacted; none of them where that fails, since what they hold is not known."""
    try:
        redacted = redact(body)
        if not isinstance(redacted, bytes):
            raise TypeError(f"redact: expected bytes, got {type(redacted).__name__}")
        redacted.decode()
    except Exception:
        failed = "configure(redact=...) failed: the bytes that it was given are not recorded"
        logger.exception(failed)
        return b""
    return redacted


def _without(value: Json, members: tuple[str, ...]) -> Json:
    if isinstance(value, list):
        return [_without(row, members) for row in value]
    if isinstance(value, dict):
        return {name: member for name, member in value.items() if name not in members}
    return value


class ContentWarning(UserWarning):
    """Prompts and replies are on spans though a switch of the environment says otherwise."""


def content_rule(content: str | None = None, redact: Redact | None = None) -> Content:
    """The rule that these arguments of `configure` and the environment's switches give.

    A switch that turns content off is logged; `ContentWarning` where `configure` overrules it.
    ConfigurationError for a wrong argument.
    """
    if content not in ("new", "full", "none", None):
        raise ConfigurationError(
            f"configure(content=...): expected 'new', 'full' or 'none', got {content!r}"
        )
    if redact is not None and not callable(redact):
        raise ConfigurationError(
            f"configure(redact=...): expected a function of bytes to bytes, got {redact!r}"
        )
    off = switched_off()
    if off and content in ("new", "full"):
        warnings.warn(
            f"{off} says that spans have no prompts and replies, but configure(content="
            f"{content!r}) exports them on exchange spans. Leave content out, or the variable "
            "unset",
            ContentWarning,
            stacklevel=3,
        )
    elif off and content is None:
        logger.warning(
            "%s: spans are exported without prompts and replies, so trajectories cannot be rebuilt "
            "from them. configure(content='full') exports them",
            off,
        )
    return Content(
        exported=not off if content is None else content != "none",
        shows="full" if content == "full" else "new",
        redact=redact,
    )


def switched_off() -> str | None:
    """The switch of the environment by which content is on no span, as `NAME=value`; or None."""
    for name in SWITCHES:
        value = os.environ.get(name, "")
        if value.strip().lower() not in _ON:
            return f"{name}={value}"
    return None


@contextmanager
def switch_off() -> Iterator[None]:
    """Set the switches of the environment so that instrumentations leave content out."""
    before = {name: os.environ.get(name) for name in SWITCHES}
    os.environ.update(SWITCHES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
