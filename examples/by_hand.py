"""The same as `otel_rollout.configure()`, by hand, with public parts only.

For a program that has its own tracer provider and wants to see every step.
"""

import asyncio

from openai import AsyncOpenAI
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from otel_rollout import (
    InMemoryTrajectoryExporter,
    TrajectorySpanProcessor,
    gather_trajectory,
    rollout,
)
from otel_rollout.record import capture
from otel_rollout.testing import ModelServer

# The program's own provider, with its own span exporter.
provider = TracerProvider(resource=Resource.create({"service.name": "by-hand"}))
provider.add_span_processor(
    BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda span: f"span: {span.name}\n"))
)
trace.set_tracer_provider(provider)

# Makes trajectories of rollouts, and hands them to the exporter.
exporter = InMemoryTrajectoryExporter()
provider.add_span_processor(TrajectorySpanProcessor(exporter))

# LLM spans to look at, exchange spans to rebuild from, and the context in threads.
OpenAIInstrumentor(upload_base64_image=None).instrument(tracer_provider=provider)
capture.instrument()
ThreadingInstrumentor().instrument()


@rollout
async def summarize(client: AsyncOpenAI, text: str) -> str:
    """An agent of one call."""
    reply = await client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": f"Summarize: {text}"}]
    )
    return reply.choices[0].message.content or ""


async def main() -> None:
    """One run in production, one in training."""
    with ModelServer(token_ids=True, logprobs=True) as server:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none-needed") as client:
            print(await summarize(client, "a long text"))
            trajectory = await gather_trajectory(summarize(client, "a long text"))
    print(trajectory)
    assert exporter.get_finished_trajectories()[1] is trajectory


if __name__ == "__main__":
    asyncio.run(main())
    provider.shutdown()
