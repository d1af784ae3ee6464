"""An agent of your own in TRL's GRPOTrainer: the agent runs unchanged, and the trainer learns.

    python -m examples.train_trl --plot curve.png --out trajectories.jsonl   # a CPU, a minute
    python -m examples.train_trl --model Qwen/Qwen2.5-0.5B-Instruct --server http://localhost:8000

Needs trl, and exporters/trl. The agent is ordinary code with `@rollout` on it. The trainer asks for
rollouts (`rollout_func`) and gets a row of each, with exactly the ids that the model saw and said:
the first question is the prompt, and what the agent says between two replies is in the completion,
masked. A model learns what animals say: a tiny one that is made and served here, or with `--model`
one of the Hugging Face hub, on GPUs, whose vLLM server gets the trainer's weights at every step.
"""

import argparse
import asyncio
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
import transformers
from datasets import Dataset
from openai import AsyncOpenAI
from otel_rollout_trl import rollout_reward, to_trl_rollout
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import otel_rollout
from examples.folder_transfer import FolderTransfer
from examples.tiny_model import Policy
from otel_rollout import (
    JsonlTrajectoryExporter,
    Trajectory,
    gather_group,
    get_current_trajectory,
    rollout,
    to_token_rows,
)
from otel_rollout.testing import ModelServer

# --- the agent, and what it is asked to do

SOUNDS = {"cow": "moo", "duck": "quack"}
SAMPLES = 8  # rollouts of each task in a step: a group, whose rewards are compared


@rollout
async def listen(
    client: AsyncOpenAI, model: str, prompt: Sequence[Any], seed: int, max_tokens: int = 4
) -> str:
    """Ask an animal twice; the reward is the share of words that are the animal's sound."""
    messages, heard = list[Any](), list[str]()
    for question in (*prompt, {"role": "user", "content": "Say it again."}):
        messages.append(question)
        reply = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            seed=100 * seed + len(messages),  # servers draw alike for the same seed
            temperature=1.0,
        )
        said = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        heard += re.findall(r"[a-z]+", said.lower())
    (right,) = (SOUNDS[animal] for animal in SOUNDS if animal in prompt[0]["content"])
    get_current_trajectory().reward = heard.count(right) / max(len(heard), 1)
    return " ".join(heard)


# --- the loop


async def collect(
    url: str, model: str, prompts: Sequence[Any], samples: int, step: int
) -> list[Trajectory]:
    """Run a rollout for each prompt, concurrently; `samples` of each prompt are a group."""
    first = step * len(prompts)
    async with AsyncOpenAI(base_url=url, api_key="none-needed") as client:
        groups = await asyncio.gather(
            *(
                gather_group(
                    (
                        listen(client, model, prompts[number], first + number)
                        for number in range(start, start + samples)
                    ),
                    max_exceptions=0,  # TRL has no row for one that failed
                    policy_version=step,
                )
                for start in range(0, len(prompts), samples)
            )
        )
    return [trajectory for group in groups for trajectory in group]


def report(trajectories: Iterable[Trajectory]) -> None:
    """Print what of these trains and what does not, each reason once."""
    trajectories = list(trajectories)
    rows = to_token_rows(trajectories)
    trained, tokens = sum(sum(r["loss_mask"]) for r in rows), sum(len(r["input_ids"]) for r in rows)
    print(f"{len(trajectories)} rollouts: {len(rows)} rows, {trained} of {tokens} tokens train")
    level = {t.group_id for t in trajectories} - {r["group_id"] for r in rows if r["advantage"]}
    print(f"groups that teach nothing, since their rewards are equal: {len(level)}")
    for reason in dict.fromkeys(str(dropped) for dropped in rows.dropped):
        print(f"not trained: {reason}")
    for warning in dict.fromkeys(w for t in trajectories for w in t.warnings):
        print(f"warning: {warning}")


def rollouts_of(
    url: str, model: str, curve: list[float], transfer: FolderTransfer | None = None
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """The `rollout_func`: gets each prompt `num_generations` times, returns a row for each.

    transfer: brings the trainer's weights to the server first; None where TRL does, or where the
        server has the trainer's own model.
    """

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        if transfer:
            transfer.transfer(trainer.model.named_parameters())
        trajectories = asyncio.run(collect(url, model, prompts, trainer.num_generations, step))
        if not curve:
            report(trajectories)
        rows: dict[str, Any] = to_trl_rollout(trajectories, prompts)  # ExportError: TRL refuses
        curve.append(fmean(trajectory.reward or 0.0 for trajectory in trajectories))
        print(f"step {step:2}  reward {curve[-1]:.3f}  {trajectories[0].output}")
        return rows

    return roll_out


TINY = {
    "learning_rate": 8e-3,
    "entropy_coef": 0.05,  # else it soon says one word to both animals
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
"""Settings for a model of some ten thousand weights on a CPU."""


def questions() -> Dataset:
    """The tasks."""
    said = [{"role": "user", "content": f"What does a {animal} say?"} for animal in SOUNDS]
    return Dataset.from_list([{"prompt": [question]} for question in said])


def make_trainer(
    model: Any, tokenizer: Any, roll_out: Any, steps: int, folder: str, **settings: Any
) -> Any:
    """The real trainer."""
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=questions(),
        rollout_func=roll_out,
        reward_funcs=rollout_reward,  # the reward that the rollout has
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=SAMPLES * len(SOUNDS),
            num_generations=SAMPLES,
            temperature=1.0,  # as the agent samples
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
    )
    trainer.remove_callback(PrinterCallback)  # `roll_out` prints
    return trainer


def plot(curve: Sequence[float], path: str) -> None:
    """Draw the mean reward of each step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 2.6), layout="constrained")
    axes.plot(curve, "k-")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def arguments_of(description: str, steps: int) -> argparse.ArgumentParser:
    """The options of the examples that train."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--model", help="a name on the hub, or a folder; needs --server")
    parser.add_argument("--server", metavar="URL", help="vLLM that serves it, without /v1")
    parser.add_argument("--out", metavar="JSONL", help="trajectories, for `otel-rollout view`")
    parser.add_argument("--plot", metavar="PNG", help="picture of the rewards; needs matplotlib")
    return parser


def set_up(options: argparse.Namespace) -> None:
    """Record, and ask every call for token ids."""
    transformers.utils.logging.set_verbosity_error()
    otel_rollout.configure(
        service_name="train-trl",
        request_token_ids=True,
        exporters=[JsonlTrajectoryExporter(options.out)] if options.out else (),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a line for each step."""
    parser = arguments_of("GRPOTrainer learns from rollouts.", steps=30)
    options = parser.parse_args(arguments)
    if bool(options.model) != bool(options.server):
        parser.error("--model and --server belong together")
    set_up(options)
    curve = list[float]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        trainer = _trainer(options, folder, curve, stack)
        trainer.train()
    otel_rollout.shutdown()
    if options.plot:
        plot(curve, options.plot)


def _trainer(options: argparse.Namespace, folder: str, curve: list[float], stack: ExitStack) -> Any:
    """The trainer of the server that was named, or of the tiny model."""
    settings: dict[str, Any] = TINY
    if options.server:
        server, name, transfer = options.server.rstrip("/"), options.model, None
        model, tokenizer = options.model, None
        if torch.cuda.is_available():
            settings = {"use_vllm": True, "vllm_mode": "server", "learning_rate": 1e-5}
            settings["vllm_server_base_url"] = server
        else:
            transfer = FolderTransfer(server, f"{folder}/weights")
    else:
        torch.set_num_threads(1)  # a tiny model is slower with more
        policy, name, transfer = Policy(), "tiny", None
        model, tokenizer = policy.model, policy.tokenizer
        server = stack.enter_context(ModelServer(policy.answer)).base_url.removesuffix("/v1")
    roll_out = rollouts_of(f"{server}/v1", name, curve, transfer)
    return make_trainer(model, tokenizer, roll_out, options.steps, folder, **settings)


if __name__ == "__main__":
    main()
