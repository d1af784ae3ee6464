"""Mistral's endpoints beside `/chat/completions`: fill in the middle, and agents.

Their replies are those of chat completions. What Mistral serves at `/v1/chat/completions` is read
by `wire.chat`; the content of a reply may be a list there, with its reasoning as `thinking` parts.
"""

from __future__ import annotations

from otel_rollout.wire.chat import ChatCompletions


class Mistral(ChatCompletions):
    """`/fim/completions`, which is asked with a text, and `/agents/completions`."""

    provider = "mistral_ai"
    paths = ("/fim/completions", "/agents/completions")
    context = ("tools", "suffix", "agent_id")
