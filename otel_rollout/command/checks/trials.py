"""The trials: a rollout with a streamed call with tools, where servers and set-ups lose tokens.

Its model server is one of this process, or the user's, whose log-probabilities are measured too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from otel_rollout.command.checks.logprobs import LOGPROBS, measured
from otel_rollout.command.checks.process import Finding, flat
from otel_rollout.providers import remove_processor
from otel_rollout.rebuild import reconstruct
from otel_rollout.record import TrajectorySpanProcessor, public_address, request_token_ids, rollout
from otel_rollout.testing import ModelServer, Reply, ToolCall
from otel_rollout.trajectory import Completion, Trajectory

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
"""A tool that a model may call."""


class _Collecting(SpanProcessor):
    """Collects every span, as a backend that loses none would."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@contextmanager
def _trial(
    provider: TracerProvider, address: str, key: str = "none"
) -> Iterator[tuple[openai.OpenAI, Trajectory]]:
    """A client of the server in a rollout, whose trajectory goes to no exporter."""
    with (
        openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client,
        rollout("otel-rollout doctor", trainable=False) as trajectory,
    ):
        try:
            yield client, trajectory
        finally:
            for processor in flat(provider._active_span_processor):
                if isinstance(processor, TrajectorySpanProcessor):
                    processor.withhold(trajectory.id)


def one_rollout(provider: TracerProvider) -> Iterator[Finding]:
    """Run a rollout, and compare it with the one rebuilt from its spans."""
    collecting = _Collecting()
    provider.add_span_processor(collecting)
    try:
        reply = Reply(tool_calls=[ToolCall(TOOL["function"]["name"])])
        with ModelServer(reply) as server, _trial(provider, server.base_url) as (client, ours):
            _stream_with_tools(client, "self-test")
        wrong = [_lost_tokens(each) for each in ours.completions] or ["its call was not captured"]
        wrong += [f"the trajectory says: {warning}" for warning in ours.warnings]
        rebuilt = [each for each in reconstruct(collecting.spans) if each.id == ours.id]
        problems = [problem for problem in wrong if problem is not None]
    except Exception as error:  # whatever the set-up does to a rollout is a finding
        problems = [f"a rollout with a call raised {type(error).__name__}: {error}"]
    finally:
        remove_processor(provider, collecting)
    yield from (Finding("problem", "self-test", problem) for problem in problems)
    if problems:
        return
    if rebuilt != [ours]:
        text = "what is rebuilt from the spans is not the trajectory: a processor or limit changes"
        yield Finding("warning" if rebuilt else "problem", "self-test", f"{text} spans")
    else:
        text = f"a call was recorded whole, and is rebuilt from its span (trace {ours.trace_id})"
        yield Finding("ok", "self-test", text)


def model_server(provider: TracerProvider, address: str, model: str | None) -> Iterator[Finding]:
    """Make a streamed call with tools to the server, and compare what came with its own count.

    Then measure its log-probabilities. address: its base URL, such as `http://localhost:8000/v1`,
    or without a path; the key is `OPENAI_API_KEY`. model: the model to ask. None: the first that it
    lists.
    """
    if not address.partition("://")[2].partition("/")[2]:
        address = address.rstrip("/") + "/v1"
    shown, key = public_address(address), os.environ.get("OPENAI_API_KEY") or "none"
    try:
        with _trial(provider, address, key) as (client, trajectory):
            model = model or _first_model(client, shown)
            _stream_with_tools(client, model)
    except Exception as error:  # whatever the user's server does to a call is a finding
        text = f"a streamed call with tools to {shown} raised {type(error).__name__}: {error}"
        yield Finding("problem", "model server", text)
        return
    completion = trajectory.completions[-1]
    problem = _lost_tokens(completion)
    if problem is not None:
        yield Finding("problem", "model server", f"{shown}: {problem}")
    else:
        sent = f"{shown} sent the ids of all {completion.sampled_count} tokens that it sampled"
        more = "" if completion.stream else ": streams were not checked, and clients read none"
        level = "ok" if completion.stream else "warning"
        yield Finding(level, "model server", f"{sent}, in {_named(completion)}{more}")  # type: ignore[arg-type]
    if completion.status == "complete":
        try:
            with _trial(provider, address, key) as (client, trajectory):
                yield measured(client, model, trajectory)
        except Exception as error:  # likewise
            yield Finding("ok", LOGPROBS, f"not measurable: {type(error).__name__}: {error}")


def _named(completion: Completion) -> str:
    """The call that was made, as it was answered."""
    if completion.stream:
        return "a streamed call with tools"
    answered = completion.status == "complete"
    return "a call with tools that asked for a stream" + " and got a whole reply" * answered


def _first_model(client: openai.OpenAI, address: str) -> str:
    found = next(iter(client.models.list()), None)
    if found is None:
        raise ValueError(f"{address} lists no model: name one with --model")
    return found.id


def _stream_with_tools(client: openai.OpenAI, model: str) -> None:
    """Make a streamed call with a tool, asking for token ids, and read it to its end."""
    with request_token_ids():
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Look around, with the tool."}],
            tools=[TOOL],
            max_tokens=256,
            stream=True,
        )
        for _ in stream:
            pass


def _lost_tokens(streamed: Completion) -> str | None:
    """The problem of a streamed call: tokens that it has no ids of. None: it has all."""
    call, error = _named(streamed), streamed.error or {}
    counted, came = streamed.sampled_count, streamed.sampled_in_response
    if streamed.status != "complete":
        return f"{call} ended as {streamed.status!r}: {error.get('message')}"
    if came is None and (refused := streamed.exchange.refused) is not None:
        return f"it refuses the fields that ask for token ids of {call} ({refused}): nothing trains"
    if came is None:
        return f"{call} has no token ids: nothing of such calls trains"
    if counted is None:
        return f"{call} has no count of its tokens: whether all came is not known, nothing trains"
    if counted != came:
        return (
            f"{call} sampled {counted} tokens and sent the ids of {came}: a parser of the server "
            f"loses some. Such calls do not train: use a newer server, or do not stream"
        )
    if streamed.prompt_token_ids is None:
        return f"{call} has no token ids of its prompt: it does not train"
    return None
