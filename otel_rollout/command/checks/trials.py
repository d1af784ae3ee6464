"""The trials: rollouts that are run, to a model server of this process and to the user's.

Of two calls one is plain, the other streamed with tools: there servers and set-ups lose tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.provider import flat
from otel_rollout.providers import remove_processor
from otel_rollout.rebuild import reconstruct
from otel_rollout.record import TrajectorySpanProcessor, request_token_ids, rollout
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from otel_rollout.trajectory import Completion, Trajectory


class _Collecting(SpanProcessor):
    """Collects every span, as a backend that loses none would."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

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
        yield Finding.problem(
            "self-test",
            f"a rollout with two calls raised {type(error).__name__}: {error}",
        )
    finally:
        remove_processor(provider, collecting)


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


def _two_calls(provider: TracerProvider) -> Trajectory:
    replies: list[Reply | Raw | str] = [
        "I am well.",
        Reply(tool_calls=[ToolCall(TOOL["function"]["name"])]),
    ]
    with (
        ModelServer(replies) as server,
        _trial(provider, server.base_url) as (client, trajectory),
    ):
        client.chat.completions.create(
            model="self-test",
            messages=[{"role": "user", "content": "How are you?"}],
            extra_body={"return_token_ids": True},
            logprobs=True,
        )
        _stream_with_tools(client, "self-test")
    return trajectory


TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
"""A tool that a model may call."""


def model_server(provider: TracerProvider, address: str, model: str | None) -> Iterator[Finding]:
    """Make a streamed call with tools to the server, and compare what came with its own count.

    address: its base URL, such as `http://localhost:8000/v1`; the key is `OPENAI_API_KEY`.
    model: the model to ask. None: the first that it lists.
    """
    try:
        key = os.environ.get("OPENAI_API_KEY") or "none"
        with _trial(provider, address, key) as (client, trajectory):
            _stream_with_tools(client, model or _first_model(client, address))
    except Exception as error:  # whatever the user's server does to a call is a finding
        text = f"a streamed call with tools to {address} raised {type(error).__name__}: {error}"
        yield Finding.problem("model server", text)
        return
    completion = trajectory.completions[-1]
    problem = _lost_tokens(completion)
    call = _named(completion)
    if problem is None and completion.prompt_token_ids is None:
        problem = f"{call} has no token ids of its prompt: it does not train"
    if problem is not None:
        yield Finding.problem("model server", f"{address}: {problem}")
        return
    text = f"{address} sent the ids of all {completion.sampled_count} tokens that it sampled"
    if completion.stream:
        yield Finding.ok("model server", f"{text}, in {call}")
    else:
        more = "a client that streams reads nothing of such a reply, and streams were not checked"
        yield Finding("warning", "model server", f"{text}, in {call}: {more}")


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
    call = _named(streamed)
    counted, came = streamed.sampled_count, streamed.sampled_in_response
    if streamed.status != "complete":
        error = streamed.error or {}
        return f"{call} ended as {streamed.status!r}: {error.get('message')}"
    if came is None and (refused := streamed.exchange.refused) is not None:
        return (
            f"it refuses the fields that ask for token ids of {call} "
            f"({refused}): the call is made without them, and nothing of such calls trains"
        )
    if came is None:
        return f"{call} has no token ids: nothing of such calls trains"
    if counted is None:
        return (
            f"{call} has no count of its tokens, though "
            "stream_options.include_usage asked for it: whether all came is not known, and such "
            "calls do not train"
        )
    if counted != came:
        return (
            f"{call} sampled {counted} tokens and sent the ids of {came}: a "
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
    elif problem := _lost_tokens(trajectory.completions[-1]):
        wrong.append(problem)
    if trajectory.warnings:
        wrong.append(f"the trajectory says: {'; '.join(trajectory.warnings)}")
    for problem in wrong:
        yield Finding.problem("self-test", problem)
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
        yield Finding.ok(
            "self-test",
            f"a plain and a streamed call were recorded whole, and are rebuilt from their spans "
            f"(trace {trajectory.trace_id})",
        )
