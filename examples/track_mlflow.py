"""Log every trajectory to MLflow as it ends, and a table of all at the end.

    python examples/track_mlflow.py              # into mlflow.db; `mlflow ui` shows it
    MLFLOW_TRACKING_URI=http://... python examples/track_mlflow.py

The hook is an exporter: whatever runs rollouts in this process, each of them is logged.
"""

import asyncio
import os
from collections.abc import Sequence

import mlflow
import openai

import otel_rollout
from otel_rollout import Trajectory, gather_trajectories, overviews, record_reward, rollout
from otel_rollout.testing import ModelServer

FIGURES = ("reward", "turns", "sampled_tokens", "trained_tokens", "seconds")
COLUMNS = ["id", "name", "task_id", "status", *FIGURES]


class MlflowExporter:
    """Logs the figures of each trajectory, in the order in which they end."""

    blocking = True  # called on a thread of its own: a slow network does not hold up the agents

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.step = 0

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        for line in overviews(trajectories):
            figures = {f"rollout/{name}": getattr(line, name) for name in FIGURES}
            figures["rollout/failed"] = float(line.status != "complete")
            known = {name: value for name, value in figures.items() if value is not None}
            mlflow.log_metrics(known, step=self.step, run_id=self.run_id)
            self.step += 1

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
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db"))
    mlflow.set_experiment("otel-rollout")
    run = mlflow.start_run()
    otel_rollout.configure("tracked-agent", exporters=[MlflowExporter(run.info.run_id)])
    with ModelServer(token_ids=True, logprobs=True) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none-needed")
        questions = (f"question {number}" for number in range(8))
        found = await gather_trajectories(agent(client, question) for question in questions)
        await client.close()
    otel_rollout.shutdown()  # every trajectory is logged by now
    table = overviews(found).to_pandas()[COLUMNS]
    mlflow.log_table(table, "trajectories.json")
    mlflow.end_run()
    print(f"{len(found)} trajectories are in the run {run.info.run_id}")


if __name__ == "__main__":
    asyncio.run(main())
