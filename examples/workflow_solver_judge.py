"""A workflow of two agents: solvers propose, a judge chooses, each trains on its own reward.

    python examples/workflow_solver_judge.py    # on a model server of its own, or OPENAI_BASE_URL

Each agent is a `@rollout` function and so a trajectory; the workflow sets their rewards, and what
it made of its task is an episode. `run_workflows` runs every task several times.
"""

import asyncio
import os
import re
from contextlib import ExitStack
from typing import Any

from openai import AsyncOpenAI

import otel_rollout
from otel_rollout import (
    Episode,
    TerminationEvent,
    TerminationReason,
    Workflow,
    get_current_trajectory,
    rollout,
    to_token_rows,
)
from otel_rollout.testing import ModelServer, Reply
from otel_rollout.workflows import run_workflows

TASKS: list[dict[str, Any]] = [
    {"id": "sum", "question": "17 + 25?", "answer": 42},
    {"id": "product", "question": "6 * 8?", "answer": 48},
]


async def ask(client: AsyncOpenAI, messages: list[Any]) -> int | None:
    """The number that the model answers with."""
    model = os.environ.get("OPENAI_MODEL", "local")
    reply = await client.chat.completions.create(model=model, messages=messages, temperature=1)
    found = re.search(r"\d+", reply.choices[0].message.content or "")
    return int(found.group()) if found else None


@rollout
async def solver(client: AsyncOpenAI, task: dict[str, Any]) -> int | None:
    """Answers the question; its reward is 1 if it is right."""
    system = {"role": "system", "content": "Answer with a number."}
    answer = await ask(client, [system, {"role": "user", "content": task["question"]}])
    get_current_trajectory().reward = float(answer == task["answer"])
    return answer


@rollout
async def judge(client: AsyncOpenAI, task: dict[str, Any], answers: list[int | None]) -> int | None:
    """Chooses one of the answers; its reward is 1 if that one is right."""
    listed = "\n".join(f"{number}. {answer}" for number, answer in enumerate(answers, 1))
    question = f"Which is right for {task['question']}\n{listed}"
    system = {"role": "system", "content": "You judge answers. Say the number of the right one."}
    chosen = await ask(client, [system, {"role": "user", "content": question}])
    answer = answers[chosen - 1] if chosen and chosen <= len(answers) else None
    get_current_trajectory().reward = float(answer == task["answer"])
    return answer


class SolverJudge(Workflow):
    """Two solvers side by side, then the judge."""

    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        client = self.rollout_engine
        answers = await asyncio.gather(solver(client, task), solver(client, task))
        if await judge(client, task, [*answers]) is None:
            raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
        raise TerminationEvent(TerminationReason.ENV_DONE)

    def assign_episode_correctness(self, episode: Episode) -> None:
        episode.is_correct = any(t.reward == 1 for t in episode.trajectories if t.name == "judge")


class LocalModel:
    """The reply of the local server: a script instead of a model, so it is always the same."""

    def __init__(self) -> None:
        self.guesses = 0

    def __call__(self, request: dict[str, Any]) -> Reply:
        system, question = (message["content"] for message in request["messages"])
        if "judge" in system:
            return Reply("Answer 1." if "1. 42" in question else "Answer 2.")
        self.guesses += 1
        right = 42 if "17" in question else 48
        return Reply(str(right if self.guesses % 3 else right - 1))


def main() -> list[Episode]:
    """Run both tasks twice; print the trees of one episode and a line for each."""
    otel_rollout.configure(service_name="solver-judge", request_token_ids=True)
    with ExitStack() as stack:
        if "OPENAI_BASE_URL" not in os.environ:
            os.environ["OPENAI_BASE_URL"] = stack.enter_context(ModelServer(LocalModel())).base_url
            os.environ.setdefault("OPENAI_API_KEY", "none-needed")

        async def run() -> list[Episode]:
            async with AsyncOpenAI() as client:
                return await run_workflows(lambda: SolverJudge(client), TASKS, n_samples=2)

        episodes = asyncio.run(run())
    print(*episodes[0].trajectories, sep="\n\n", end="\n\n")
    for each in episodes:
        reason = each.termination_reason or TerminationReason.UNKNOWN
        print(f"{each.id:10} {reason.value} correct={each.is_correct} {each.metrics}")
    rows = to_token_rows(episodes, mask_reasons={TerminationReason.TIMEOUT})
    print(f"{len(rows)} rows to train on, {len(rows.masked)} trajectories masked")
    otel_rollout.shutdown()
    return episodes


if __name__ == "__main__":
    main()
