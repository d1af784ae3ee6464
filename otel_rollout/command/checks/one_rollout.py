"""The trial: a rollout with one call, to a model server of this process, rebuilt from its spans."""

from __future__ import annotations

from collections.abc import Iterator

import openai
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.provider import flat
from otel_rollout.rebuild import reconstruct
from otel_rollout.record import TrajectorySpanProcessor, rollout
from otel_rollout.testing import ModelServer
from otel_rollout.trajectory import Trajectory
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
    """Run a rollout with one call, and compare it with the one rebuilt from its spans."""
    collecting = _Collecting()
    provider.add_span_processor(collecting)
    try:
        trajectory = _one_call(provider)
        rebuilt = [t for t in reconstruct(collecting.spans) if t.id == trajectory.id]
        yield from _judge(trajectory, rebuilt)
    except Exception as error:  # whatever the set-up does to a rollout is a finding
        yield Finding(
            "problem",
            "self-test",
            f"a rollout with one call raised {type(error).__name__}: {error}",
        )
    finally:
        remove_processor(provider, collecting)


def _one_call(provider: TracerProvider) -> Trajectory:
    with (
        ModelServer("I am well.") as server,
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
        rollout("otel-rollout doctor", trainable=False) as trajectory,
    ):
        client.chat.completions.create(
            model="self-test",
            messages=[{"role": "user", "content": "How are you?"}],
            extra_body={"return_token_ids": True},
            logprobs=True,
        )
        for processor in flat(provider._active_span_processor):
            if isinstance(processor, TrajectorySpanProcessor):
                processor.withhold(trajectory.id)
    return trajectory


def _judge(trajectory: Trajectory, rebuilt: list[Trajectory]) -> Iterator[Finding]:
    wrong: list[str] = []
    texts = [message.get("content") for message in trajectory.messages()]
    if texts != ["How are you?", "I am well."]:
        wrong.append(f"the trajectory of a call has the messages {texts!r}")
    elif trajectory.completions[0].token_ids is None:
        wrong.append("the token ids that the server sent are not in the trajectory")
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
            f"a call was recorded whole, and is rebuilt from its spans (trace "
            f"{trajectory.trace_id})",
        )
