"""The user's model server: does it give what training needs, also of a streamed call with tools?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
from opentelemetry.sdk.trace import TracerProvider

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.one_rollout import lost_tokens, stream_with_tools, withhold
from otel_rollout.record import rollout
from otel_rollout.trajectory import Trajectory

_SUBJECT = "model server"


def model_server(provider: TracerProvider, address: str, model: str | None) -> Iterator[Finding]:
    """Make a streamed call with tools to the server, and compare what came with its own count.

    address: its base URL, such as `http://localhost:8000/v1`; the key is `OPENAI_API_KEY`.
    model: the model to ask. None: the first that it lists.
    """
    try:
        trajectory = _one_call(provider, address, model)
    except Exception as error:  # whatever the user's server does to a call is a finding
        text = f"a streamed call with tools to {address} raised {type(error).__name__}: {error}"
        yield Finding("problem", _SUBJECT, text)
        return
    completion = trajectory.completions[-1]
    problem = lost_tokens(completion)
    if problem is None and completion.prompt_token_ids is None:
        problem = "a streamed call with tools has no token ids of its prompt: it does not train"
    if problem is not None:
        yield Finding("problem", _SUBJECT, f"{address}: {problem}")
    else:
        text = f"{address} sent the ids of all {completion.sampled_count} tokens that it sampled"
        yield Finding("ok", _SUBJECT, f"{text}, in a streamed call with tools")


def _one_call(provider: TracerProvider, address: str, model: str | None) -> Trajectory:
    key = os.environ.get("OPENAI_API_KEY") or "none"
    with (
        openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client,
        rollout("otel-rollout doctor", trainable=False) as trajectory,
    ):
        try:
            stream_with_tools(client, model or _first_model(client, address))
        finally:
            withhold(provider, trajectory)
    return trajectory


def _first_model(client: openai.OpenAI, address: str) -> str:
    found = next(iter(client.models.list()), None)
    if found is None:
        raise ValueError(f"{address} lists no model: name one with --model")
    return found.id
