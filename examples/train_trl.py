"""An agent of your own in TRL's GRPOTrainer: the agent runs unchanged, and the trainer learns.

    python examples/train_trl.py        # half a minute on a CPU; needs trl, and exporters/trl

A tiny Qwen2 behind an OpenAI-compatible server on this machine learns what animals say. The agent
is ordinary code with `@rollout` on it. The trainer asks for rollouts (`rollout_func`) and gets a
row of each, with exactly the ids that the model saw and said: the first question is the prompt, and
what the agent says between two replies is in the completion, masked.

On GPUs `trl vllm-serve` takes the place of the server here: with `use_vllm=True` and
`vllm_mode="server"` the trainer sends it its weights before it asks for rollouts.
"""

import argparse
import asyncio
import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
import transformers
from datasets import Dataset
from openai import AsyncOpenAI
from otel_rollout_trl import rollout_reward, to_trl_rollout
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import otel_rollout
from otel_rollout import (
    Trajectory,
    gather_group,
    get_current_trajectory,
    request_token_ids,
    rollout,
)
from otel_rollout.testing import ModelServer, Raw

# --- the agent, and what it is asked to do

SOUNDS = {"cow": "moo", "duck": "quack"}


@rollout
async def listen(client: AsyncOpenAI, prompt: Sequence[Any], seed: int) -> str:
    """Ask an animal twice; the reward is the share of words that are the animal's sound."""
    messages, heard = list[Any](), list[str]()
    for question in (*prompt, {"role": "user", "content": "and again ?"}):
        messages.append(question)
        reply = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, seed=seed
        )
        said = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        heard += said.split()
    right = SOUNDS[prompt[0]["content"].split()[0]]
    get_current_trajectory().reward = heard.count(right) / max(len(heard), 1)
    return " ".join(heard)


# --- the model

SPECIAL = ["<pad>", "<unknown>", "<user>", "<assistant>", "<end>"]
QUESTIONS = ["cow", "duck", "and", "again", "?"]
ANSWERS = ["moo", "quack", "woof", "meow", "oink", "baa", "tweet", "please", "thanks"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message.role + '> ' + message.content + ' <end> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tokenizer() -> Any:
    """An id for each word, so that a reply is rendered to the ids that were sampled.

    With parts of words another spelling of the same text may be sampled than the one that the
    template gives in the next turn; then the run is two rows, and TRL's trainer takes one.
    """
    vocabulary = {word: number for number, word in enumerate(SPECIAL + QUESTIONS + ANSWERS)}
    words = Tokenizer(WordLevel(vocabulary, "<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unknown>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


class Policy:
    """The server's access to the trained model: samples with its current weights."""

    def __init__(self, seed: int = 0) -> None:
        self.tokenizer = tokenizer()
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=True,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        self.model = Qwen2ForCausalLM(config)
        self._one_at_a_time = threading.Lock()

    def sample(self, prompt: list[int], seed: int, most: int) -> tuple[list[int], list[float]]:
        """Ids and their log-probabilities, up to the end token or `most`."""
        random = torch.Generator().manual_seed(1000 * seed + len(prompt))
        ids, logprobs = list[int](), list[float]()
        while len(ids) < most and self.tokenizer.eos_token_id not in ids:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            row = torch.log_softmax(logits, dim=-1)
            ids.append(int(torch.multinomial(row.exp(), 1, generator=random)))
            logprobs.append(float(row[ids[-1]]))
        return ids, logprobs

    def answer(self, request: dict[str, Any]) -> Raw:
        """A chat completion as vLLM sends it where it is asked for token ids."""
        text = self.tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, tokenize=False
        )
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        with self._one_at_a_time:
            ids, logprobs = self.sample(prompt, request["seed"], request["max_tokens"])
        words = self.tokenizer.convert_ids_to_tokens(ids)
        ended = words[-1] == "<end>"
        sampled = [
            {"token": word, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for word, logprob in zip(words, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": " ".join(words[:-1] if ended else words)},
            "finish_reason": "stop" if ended else "length",
            "token_ids": ids,
            "logprobs": {"content": sampled},
        }
        body = {
            "id": f"tiny-{request['seed']}-{len(prompt)}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "prompt_token_ids": prompt,
            "choices": [choice],
        }
        return Raw(body=json.dumps(body).encode())


# --- the loop


async def collect(url: str, prompts: Sequence[Any], samples: int, step: int) -> list[Trajectory]:
    """Run a rollout for each prompt, concurrently; `samples` of each prompt are a group."""
    first = step * len(prompts)
    with request_token_ids():
        async with AsyncOpenAI(base_url=url, api_key="none-needed") as client:
            groups = await asyncio.gather(
                *(
                    gather_group(
                        (
                            listen(client, prompts[number], first + number)
                            for number in range(start, start + samples)
                        ),
                        max_exceptions=0,  # TRL has no row for one that failed
                        policy_version=step,
                    )
                    for start in range(0, len(prompts), samples)
                )
            )
    return [trajectory for group in groups for trajectory in group]


def rollouts_of(url: str, curve: list[float]) -> Callable[[list[Any], Any], dict[str, Any]]:
    """The `rollout_func`: gets each prompt `num_generations` times, returns a row for each."""

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        trajectories = asyncio.run(collect(url, prompts, trainer.num_generations, step))
        curve.append(fmean(trajectory.reward or 0.0 for trajectory in trajectories))
        print(f"step {step:2}  reward {curve[-1]:.3f}  {trajectories[0].output}")
        rows: dict[str, Any] = to_trl_rollout(trajectories, prompts)
        return rows

    return roll_out


def make_trainer(policy: Policy, url: str, curve: list[float], steps: int, folder: str) -> Any:
    """The real trainer, with settings for a tiny model on a CPU."""
    questions = [{"role": "user", "content": f"{animal} ?"} for animal in SOUNDS]
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        train_dataset=Dataset.from_list([{"prompt": [question]} for question in questions]),
        rollout_func=rollouts_of(url, curve),
        reward_funcs=rollout_reward,  # the reward that the rollout has
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8 * len(SOUNDS),
            num_generations=8,
            temperature=1.0,  # as the server samples
            learning_rate=5e-3,
            entropy_coef=0.05,  # else it soon says one word to both animals
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)  # `roll_out` prints
    return trainer


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a line for each step."""
    parser = argparse.ArgumentParser(description="GRPOTrainer learns from rollouts.")
    parser.add_argument("--steps", type=int, default=25)
    steps = parser.parse_args(arguments).steps
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # a tiny model is slower with more
    otel_rollout.configure(service_name="train-trl", request_token_ids=True)
    policy = Policy()
    with ModelServer(policy.answer) as server, tempfile.TemporaryDirectory() as folder:
        make_trainer(policy, server.base_url, [], steps, folder).train()
    otel_rollout.shutdown()


if __name__ == "__main__":
    main()
