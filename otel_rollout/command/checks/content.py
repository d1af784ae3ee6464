"""Content: which spans have prompts and replies."""

from __future__ import annotations

from collections.abc import Iterator

from otel_rollout.command.checks.finding import Finding
from otel_rollout.record import process_state, switched_off


def content() -> Iterator[Finding]:
    """Where prompts and replies go."""
    rule, off = process_state.content, switched_off()
    if not rule.exported:
        yield Finding(
            "ok",
            "content",
            "prompts and replies are in the trajectories of this process and on no span that is "
            "exported: trajectories cannot be rebuilt from the spans",
        )
    elif off is not None and rule.is_whole:
        yield Finding(
            "warning",
            "content",
            f"{off} keeps prompts and replies off LLM spans, but exchange spans have them. "
            f"configure(content='none') keeps them off all spans that are exported",
        )
    elif rule.redact is not None:
        yield Finding(
            "ok",
            "content",
            "exchange spans have prompts and replies, redacted; LLM spans have none. Calls that "
            "are changed do not train",
        )
    else:
        yield Finding(
            "ok",
            "content",
            "prompts and replies are on LLM spans and on exchange spans, which go to every span "
            "exporter, and in trajectories" + _SHOWS[rule.shows],
        )


_SHOWS = {
    "new": ". In a rollout each LLM span shows what is new in its call; configure(content='full') "
    "shows whole conversations",
    "full": ". Each LLM span shows a whole conversation",
}
