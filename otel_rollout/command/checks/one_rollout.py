"""The trial: a rollout with two calls, to a model server of this process, rebuilt from its spans.

One call is plain, the other streamed with tools: that is where servers and set-ups lose tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.provider import flat
from otel_rollout.rebuild import reconstruct
from otel_rollout.record import TrajectorySpanProcessor, request_token_ids, rollout
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from otel_rollout.trajectory import Completion, Trajectory
from otel_rollout.wiring import remove_processor


class _Collecting(SpanProcessor):
    """Collects every span, as a backend that loses none would."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def one_rollout(provider: TracerProvider) -> Iterator[Finding]:
    """Run a rollout with two calls, and compare it with the one rebuilt from its spans."""
    collecting = _Collecting()
    provider.add_span_processor(collecting)
    try:
        trajectory = _two_calls(provider)
        rebuilt = [t for t in reconstruct(collecting.spans) if t.id == trajectory.id]
        yield from _judge(trajectory, rebuilt)
    except Exception as error:  # whatever the set-up does to a rollout is a finding
        yield Finding(
            "problem",
            "self-test",
            f"a rollout with two calls raised {type(error).__name__}: {error}",
        )
    finally:
        remove_processor(provider, collecting)


def _two_calls(provider: TracerProvider) -> Trajectory:
    replies: list[Reply | Raw | str] = [
        "I am well.",
        Reply(tool_calls=[ToolCall(TOOL["function"]["name"])]),
    ]
    with (
        ModelServer(replies) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
        rollout("otel-rollout doctor", trainable=False) as trajectory,
    ):
        client.chat.completions.create(
            model="self-test",
            messages=[{"role": "user", "content": "How are you?"}],
            extra_body={"return_token_ids": True},
            logprobs=True,
        )
        stream_with_tools(client, "self-test")
        withhold(provider, trajectory)
    return trajectory


TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
"""A tool that a model may call."""


def stream_with_tools(client: openai.OpenAI, model: str) -> None:
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


def withhold(provider: TracerProvider, trajectory: Trajectory) -> None:
    """Keep the trajectory of a trial from the exporters."""
    for processor in flat(provider._active_span_processor):
        if isinstance(processor, TrajectorySpanProcessor):
            processor.withhold(trajectory.id)


def lost_tokens(streamed: Completion) -> str | None:
    """The problem of a streamed call: tokens that it has no ids of. None: it has all."""
    counted, came = streamed.sampled_count, streamed.sampled_in_response
    if streamed.status != "complete":
        error = streamed.error or {}
        return f"a streamed call with tools ended as {streamed.status!r}: {error.get('message')}"
    if came is None:
        return "a streamed call with tools has no token ids: nothing of such calls trains"
    if counted is None:
        return (
            "a streamed call with tools has no count of its tokens, though "
            "stream_options.include_usage asked for it: whether all came is not known, and such "
            "calls do not train"
        )
    if counted != came:
        return (
            f"a streamed call with tools sampled {counted} tokens and sent the ids of {came}: a "
            f"parser of the server loses some, as vLLM's do from 0.10.2 to 0.12. Such calls do "
            f"not train: use a newer server, or do not stream"
        )
    return None


def _judge(trajectory: Trajectory, rebuilt: list[Trajectory]) -> Iterator[Finding]:
    wrong: list[str] = []
    texts = [message.get("content") for message in trajectory.messages()]
    if texts != ["How are you?", "I am well."]:
        wrong.append(f"the trajectory of a call has the messages {texts!r}")
    elif trajectory.completions[0].token_ids is None:
        wrong.append("the token ids that the server sent are not in the trajectory")
    elif problem := lost_tokens(trajectory.completions[-1]):
        wrong.append(problem)
    if trajectory.warnings:
        wrong.append(f"the trajectory says: {'; '.join(trajectory.warnings)}")
    for problem in wrong:
        yield Finding("problem", "self-test", problem)
    if rebuilt != [trajectory]:
        yield Finding(
            "warning" if rebuilt else "problem",
            "self-test",
            "the trajectory that is rebuilt from the spans is not the one that was recorded: a "
            "processor or limit changes spans"
            if rebuilt
            else "no trajectory can be rebuilt from the spans of a rollout",
        )
    elif not wrong:
        yield Finding(
            "ok",
            "self-test",
            f"a plain and a streamed call were recorded whole, and are rebuilt from their spans "
            f"(trace {trajectory.trace_id})",
        )
