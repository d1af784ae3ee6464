"""The whole loop, small enough to read: an agent, its rollouts, and a model that learns from them.

    python examples/train_toy.py                        # half a minute on a CPU
    python examples/train_toy.py --steps 60 --plot reward.png

The model is two tables of numbers behind an OpenAI-compatible server on this machine. It learns,
from rewards alone, to unlock a door with the key of its colour and then to tell what is inside.
The agent is ordinary code with `@rollout` on it; the trainer reads `to_token_rows`, which has what
any trainer needs: the ids that the model saw and said, which of them it sampled, how probable they
were then, and how much better than its group the run went. The same seed gives the same numbers.
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

import otel_rollout
from otel_rollout import (
    TrajectoryGroup,
    gather_group,
    record_reward,
    request_token_ids,
    rollout,
    to_token_rows,
)
from otel_rollout.testing import ModelServer, Raw

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# --- the agent, and what it is asked to do


@dataclass(frozen=True)
class Door:
    """A task: a door, and the thing behind it."""

    colour: str
    """Colour of the door, by which the model knows it."""
    inside: str
    """The thing behind it."""
    missing: str
    """Another thing, which is not behind it."""


DOORS = [
    Door(colour, *things)
    for colour in ("red", "green", "blue")
    for things in (("gold", "dust"), ("dust", "gold"))
]
UNLOCK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "unlock",
        "description": "Try a key; says what is behind the door, or that it is stuck.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@rollout
async def explore(client: AsyncOpenAI, door: Door, seed: int) -> str:
    """Let the model try keys until it names the thing that it found."""
    messages: list[Any] = [{"role": "user", "content": f"{door.colour} door"}]
    opened, said = False, ""
    for _ in range(3):
        reply = await client.chat.completions.create(
            model="toy", messages=messages, tools=[UNLOCK], seed=seed
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            said = message.content or ""
            break
        for call in message.tool_calls:
            assert call.type == "function"
            fits = json.loads(call.function.arguments)["key"] == door.colour
            opened = opened or fits
            result = f"{door.inside} not {door.missing}" if fits else "stuck"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    record_reward(float(opened), name="opened", weight=0.5)
    record_reward(float(opened and said == f"found {door.inside}"), name="told", weight=0.5)
    return said


# --- the model

USER, TOOL, ASSISTANT, END = range(4)
WORDS = [
    *("<user>", "<tool>", "<assistant>", "<end>", "red", "green", "blue"),
    *("door", "unlock", "found", "gold", "dust", "not", "stuck"),
]
IDS = {word: number for number, word in enumerate(WORDS)}
GRAMMAR = {  # what it learned before: which words follow which, though not when to say what
    "<assistant>": "unlock found",
    "unlock": "red green blue",
    "red": "<end>",
    "green": "<end>",
    "blue": "<end>",
    "found": "gold dust",
    "gold": "<end>",
    "dust": "<end>",
}


def render(messages: Iterable[dict[str, Any]]) -> list[int]:
    """The chat template: a sampled message renders to the ids that were sampled."""
    ids: list[int] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        keys = ["unlock " + json.loads(call["function"]["arguments"])["key"] for call in calls]
        words = " ".join([message.get("content") or "", *keys]).split()
        ids += [IDS[f"<{message['role']}>"], *(IDS[word] for word in words), END]
    return [*ids, ASSISTANT]


class Policy:
    """A language model: the logits of a word are `after[word before it] + seen[what it sees]`.

    What it sees is the first word of the last message that is not its own.
    """

    def __init__(self, seed: int = 0) -> None:
        size = len(WORDS)
        self.after: Floats = np.zeros((size, size))
        self.seen: Floats = np.zeros((size, size))
        for word, others in GRAMMAR.items():
            self.after[IDS[word], [IDS[other] for other in others.split()]] = 5.0
        self.version = 0
        self._seed = seed

    def states(self, ids: Sequence[int]) -> Ints:
        """(T + 1, 2) before each word, and behind the last: the word before it, what it sees."""
        states = [(END, END)]
        for word in ids:
            before, sees = states[-1]
            states.append((word, word if before in (USER, TOOL) else sees))
        return np.array(states)

    def logprobs(self, states: Ints) -> Floats:
        """(T, words) log-probabilities of every word in each of the states."""
        logits = self.after[states[:, 0]] + self.seen[states[:, 1]]
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    def sample(self, prompt: list[int], seed: int, most: int = 4) -> tuple[list[int], list[float]]:
        """Ids and their log-probabilities, up to the end token or `most`."""
        random = np.random.default_rng([self._seed, seed, len(prompt)])
        ids, logprobs = list[int](), list[float]()
        while len(ids) < most and END not in ids:
            (row,) = self.logprobs(self.states(prompt + ids)[-1:])
            ids.append(int(random.choice(len(WORDS), p=np.exp(row))))
            logprobs.append(float(row[ids[-1]]))
        return ids, logprobs

    def answer(self, request: dict[str, Any]) -> Raw:
        """A chat completion as vLLM sends it: ids and log-probabilities for who asks for them."""
        prompt = render(request["messages"])
        ids, logprobs = self.sample(prompt, request["seed"])
        words, ended = [WORDS[i] for i in ids if i != END], ids[-1] == END
        message: dict[str, Any] = {"role": "assistant", "content": " ".join(words)}
        if calls := ended and words[:1] == ["unlock"]:
            function = {"name": "unlock", "arguments": json.dumps({"key": " ".join(words[1:])})}
            call = {"id": f"call-{len(prompt)}", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        sampled = [{"token": WORDS[i], "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop" if ended else "length",
        }
        if request.get("logprobs"):
            choice["logprobs"] = {"content": [{**each, "top_logprobs": []} for each in sampled]}
        body = {
            "id": f"toy-{self.version}-{request['seed']}-{len(prompt)}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [choice],
        }
        if request.get("return_token_ids"):
            body["prompt_token_ids"], choice["token_ids"] = prompt, ids
        return Raw(body=json.dumps(body).encode())

    def learn(self, rows: Sequence[dict[str, Any]], rate: float = 0.3, passes: int = 2) -> None:
        """Policy gradient: what went better than its group becomes more probable. A new version."""
        ids = np.concatenate([row["input_ids"] for row in rows])
        states = np.concatenate([self.states(row["input_ids"])[:-1] for row in rows])
        mask = np.concatenate([row["loss_mask"] for row in rows])
        then = np.concatenate([row["logprobs"] for row in rows])
        lengths = [len(row["input_ids"]) for row in rows]
        advantages = np.repeat([row["advantage"] for row in rows], lengths)
        for _ in range(passes):
            logprobs = self.logprobs(states)
            ratio = np.exp(logprobs[np.arange(len(ids)), ids] - then)  # 1 in the first pass
            weights = np.where(mask, advantages * ratio.clip(0.0, 2.0), 0.0)
            gradient = weights[:, None] * (np.eye(len(WORDS))[ids] - np.exp(logprobs))
            np.add.at(self.after, states[:, 0], rate * gradient)
            np.add.at(self.seen, states[:, 1], rate * gradient)
        self.version += 1


# --- the loop


async def collect(client: AsyncOpenAI, policy: Policy, samples: int) -> list[TrajectoryGroup]:
    """Run every task `samples` times, all concurrently."""

    async def group(number: int, door: Door) -> TrajectoryGroup:
        first = (policy.version * len(DOORS) + number) * samples
        return await gather_group(
            (explore(client, door, seed) for seed in range(first, first + samples)),
            group_id=f"{policy.version} {door.colour} {door.inside}",
            policy_version=lambda: policy.version,
        )

    return await asyncio.gather(*(group(*item) for item in enumerate(DOORS)))


def means(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The mean reward of all trajectories, and the means of its parts."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = {"reward": fmean(t.reward or 0.0 for t in trajectories)}
    for name in ("opened", "told"):
        rewards[name] = fmean(t.rewards[name] for t in trajectories)
    return rewards


async def train(policy: Policy, steps: int, samples: int = 8) -> list[dict[str, float]]:
    """Roll out and learn, repeatedly; returns the mean rewards of each step."""
    curve = []
    with ModelServer(policy.answer) as server, request_token_ids():
        async with AsyncOpenAI(base_url=server.base_url, api_key="none-needed") as client:
            for step in range(steps):
                groups = await collect(client, policy, samples)
                rows = [row for group in groups for row in to_token_rows(group)]
                policy.learn(rows)
                curve.append(means(groups))
                shown = "  ".join(f"{name} {value:.3f}" for name, value in curve[-1].items())
                trained = sum(sum(row["loss_mask"]) for row in rows)
                print(f"step {step:2}  {shown}  {len(rows)} rows, {trained} sampled tokens")
    return curve


def plot(curve: Sequence[dict[str, float]], path: str) -> None:
    """Draw the rewards over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 2.8), layout="constrained")
    for name, style in (("opened", "C0:"), ("told", "C1:"), ("reward", "k-")):
        axes.plot([rewards[name] for rewards in curve], style, label=name)
    axes.set(xlabel="step", ylabel="mean of the rollouts", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a line for each step."""
    parser = argparse.ArgumentParser(description="A toy model that learns from rollouts.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each of the six tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="PNG", help="where to draw the rewards")
    options = parser.parse_args(arguments)
    otel_rollout.configure(service_name="train-toy")
    curve = asyncio.run(train(Policy(options.seed), options.steps, options.samples))
    otel_rollout.shutdown()
    if options.plot:
        plot(curve, options.plot)


if __name__ == "__main__":
    main()
