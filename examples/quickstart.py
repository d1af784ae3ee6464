"""An agent with a tool loop and a parallel sub-agent: its runs become traces and trajectories.

    python examples/quickstart.py                          # on a model server of its own
    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python examples/quickstart.py
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python examples/quickstart.py

The agent is ordinary Python. All that was added is `@rollout`, and `with tool(...)` around the
tools to see them in the trace too.
"""

import asyncio
import json
import os
from contextlib import ExitStack
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

import otel_rollout
from otel_rollout import Trajectory, gather_trajectory, get_current_trajectory, rollout, tool
from otel_rollout.testing import ModelServer, Reply, ToolCall

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "distance",
            "description": "Kilometres between two cities.",
            "parameters": {
                "type": "object",
                "properties": {"origin": {"type": "string"}, "destination": {"type": "string"}},
                "required": ["origin", "destination"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "research",
            "description": "Ask a researcher about a city.",
            "parameters": {
                "type": "object",
                "properties": {"question": {"type": "string"}},
                "required": ["question"],
            },
        },
    },
]


# --- the agent, as it would be without this library


async def distance(origin: str, destination: str) -> str:
    """A tool: looks up a fact that the model does not know."""
    kilometres = {("Paris", "Rome"): 1106, ("Paris", "Oslo"): 1343}
    return f"{kilometres.get((origin, destination), 1000)} km"


async def research(client: AsyncOpenAI, model: str, question: str) -> str:
    """A sub-agent with a conversation of its own, streamed."""
    messages: list[Any] = [
        {"role": "system", "content": "You are a researcher. Answer in one sentence."},
        {"role": "user", "content": question},
    ]
    stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
    answer = ""
    async for chunk in stream:
        answer += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Are you sure?"},
    ]
    sure = await client.chat.completions.create(model=model, messages=messages)
    return f"{answer} {sure.choices[0].message.content}"


@rollout
async def travel_agent(client: AsyncOpenAI, model: str, task: str, expected: str) -> str:
    """The agent: calls the model and, in parallel, the tools it asks for, until it answers."""
    messages: list[Any] = [
        {"role": "system", "content": "You plan journeys. Use the tools."},
        {"role": "user", "content": task},
    ]

    async def run(call: Any) -> dict[str, str]:
        name, arguments = call.function.name, json.loads(call.function.arguments)
        with tool(name, call_id=call.id, arguments=arguments) as span:
            if name == "research":
                result = await research(client, model, arguments["question"])
            else:
                result = await distance(**arguments)
            span.result = result
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    for _ in range(5):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        messages += await asyncio.gather(*map(run, message.tool_calls))

    answer = message.content or ""
    get_current_trajectory().reward = 1.0 if expected in answer else 0.0
    return answer


# --- a model to run it on where there is none


class LocalModel:
    """The reply of the local server: a script instead of a model, so it is always the same."""

    def __init__(self) -> None:
        self.guesses = iter([False, True])

    def __call__(self, request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        last = messages[-1]
        city = "Rome" if "Rome" in messages[1]["content"] else "Oslo"
        if "researcher" in messages[0]["content"]:
            weather = "warm evenings" if city == "Rome" else "long days"
            return Reply("Yes." if "sure" in last["content"] else f"{city} has {weather} in May.")
        if last["role"] == "user":
            if city == "Oslo" and next(self.guesses, False):
                return Reply("About 900 km.")  # a sample that does not use its tools
            return Reply(
                tool_calls=[
                    ToolCall("distance", f'{{"origin": "Paris", "destination": "{city}"}}'),
                    ToolCall("research", f'{{"question": "What is {city} like in May?"}}'),
                ]
            )
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return Reply(f"It is {results[0]}. {results[1]}")


async def run(base_url: str | None, model: str) -> list[Trajectory]:
    """Two tasks, two samples each, all at the same time."""
    tasks = {
        "rome": ("How far is Rome from Paris?", "1106"),
        "oslo": ("How far is Oslo from Paris?", "1343"),
    }
    async with AsyncOpenAI(base_url=base_url) as client:
        return await asyncio.gather(
            *[
                gather_trajectory(
                    travel_agent(client, model, *task), task_id=name, group_id=name, sample_index=i
                )
                for name, task in tasks.items()
                for i in range(2)
            ]
        )


def main() -> list[Trajectory]:
    """Run, and print the trajectories."""
    otel_rollout.configure(service_name="travel-agent", request_token_ids=True)
    with ExitStack() as stack:
        base_url = os.environ.get("OPENAI_BASE_URL")
        if base_url is None:
            base_url = stack.enter_context(ModelServer(LocalModel())).base_url
            os.environ.setdefault("OPENAI_API_KEY", "none-needed")
        trajectories = asyncio.run(run(base_url, os.environ.get("OPENAI_MODEL", "local")))
    otel_rollout.shutdown()
    for trajectory in trajectories:
        print(trajectory)
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            jaeger = os.environ.get("JAEGER_UI", "http://127.0.0.1:16686")
            print(f"   trace: {jaeger}/trace/{trajectory.trace_id}")
        print()
    return trajectories


if __name__ == "__main__":
    main()
