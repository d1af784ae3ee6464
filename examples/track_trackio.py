"""Log every trajectory to trackio as it ends, and a table of all at the end.

    python examples/track_trackio.py             # on this machine; `trackio show` shows it

The hook is an exporter: whatever runs rollouts in this process, each of them is logged.
"""

import asyncio
import os
from collections.abc import Sequence

import openai
import trackio

import otel_rollout
from otel_rollout import Trajectory, gather_trajectories, overviews, record_reward, rollout
from otel_rollout.testing import ModelServer

FIGURES = ("reward", "turns", "sampled_tokens", "trained_tokens", "seconds")
COLUMNS = ["id", "name", "task_id", "status", *FIGURES]


class TrackioExporter:
    """Logs the figures of each trajectory, in the order in which they end."""

    blocking = True  # called on a thread of its own: a slow network does not hold up the agents

    def __init__(self, run: trackio.Run) -> None:
        self.run = run

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        for line in overviews(trajectories):
            figures = {f"rollout/{name}": getattr(line, name) for name in FIGURES}
            figures["rollout/failed"] = line.status != "complete"
            self.run.log({name: value for name, value in figures.items() if value is not None})

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass


@rollout
async def agent(client: openai.AsyncOpenAI, question: str) -> str:
    answer = await client.chat.completions.create(
        model=os.environ.get("OPENAI_MODEL", "m"), messages=[{"role": "user", "content": question}]
    )
    text = answer.choices[0].message.content or ""
    record_reward(float(question in text))
    return text


async def main() -> None:
    run = trackio.init(project="otel-rollout", embed=False)
    otel_rollout.configure("tracked-agent", exporters=[TrackioExporter(run)])
    with ModelServer(token_ids=True, logprobs=True) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none-needed")
        questions = (f"question {number}" for number in range(8))
        found = await gather_trajectories(agent(client, question) for question in questions)
        await client.close()
    otel_rollout.shutdown()  # every trajectory is logged by now
    table = overviews(found).to_pandas()[COLUMNS]
    trackio.log({"trajectories": trackio.Table(dataframe=table)})
    trackio.finish()
    print(f"{len(found)} trajectories are in the run {run.name}")


if __name__ == "__main__":
    asyncio.run(main())
