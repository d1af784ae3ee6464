"""A tiny language model for the examples that train: made on the spot, it needs no download.

    python -m examples.tiny_model FOLDER              # a model that vLLM serves, on a CPU too
    python -m examples.tiny_model FOLDER --thinking   # one that thinks

`Policy` is a Llama of some ten thousand random weights with an id for each word, and an answer of
an OpenAI-compatible server: `ModelServer(policy.answer)` serves it, sampling with its present
weights. With `thinking=True` its chat template opens each reply with `<think>`, and leaves the
thoughts of earlier replies out, as those of Qwen3 and DeepSeek do.
"""

import argparse
import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from otel_rollout.testing import Raw

SPECIAL = ["<unknown>", "<user>", "<assistant>", "<end>"]
QUESTIONS = ["What", "does", "a", "cow", "duck", "say?", "Say", "it", "again."]
ANSWERS = ["moo", "quack", "woof", "meow", "oink", "baa", "tweet", "please", "thanks"]
THINK = ["<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message.role + '> ' + (message.content or '') + ' <end> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
THINKING_TEMPLATE = TEMPLATE.replace("'<assistant>'", "'<assistant> <think>'")


def tokenizer(thinking: bool = False) -> Any:
    """An id for each word, so that a reply is rendered to the ids that were sampled.

    With parts of words another spelling of the same text may be sampled than the one that the
    template gives in the next turn; then the rollout is two rows. The end alone is special to
    servers: they leave special tokens out of a reply's text, so that it would be rendered without.
    """
    words = SPECIAL + QUESTIONS + ANSWERS + (THINK if thinking else [])
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(WordLevel(vocabulary, "<unknown>"))
    inner.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<end>",
        eos_token="<end>",
        chat_template=THINKING_TEMPLATE if thinking else TEMPLATE,
    )


class Policy:
    """The model as a server has it."""

    def __init__(self, seed: int = 1, thinking: bool = False) -> None:
        self.thinking = thinking
        self.tokenizer = tokenizer(thinking)
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,  # enough that some tell the animals apart from the first step on
            num_key_value_heads=8,
            head_dim=32,  # vLLM's attention on a CPU has no smaller one
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,  # see `FolderTransfer`
            bos_token_id=None,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        self.model = LlamaForCausalLM(config)
        self._one_at_a_time = threading.Lock()
        self._seeds = itertools.count()

    def save(self, folder: str | Path) -> None:
        """Write weights and tokenizer, as trainers and vLLM read them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the trainer's weights, by name; between two replies, not during one."""
        mine = dict(self.model.named_parameters())
        with self._one_at_a_time, torch.no_grad():
            for name, tensor in weights:
                if name in mine:
                    mine[name].copy_(tensor)

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
            seed = request.get("seed", next(self._seeds))
            ids, logprobs = self.sample(prompt, seed, request["max_tokens"])
        words = self.tokenizer.convert_ids_to_tokens(ids)
        ended = words[-1] == "<end>"
        sampled = [
            {"token": word, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for word, logprob in zip(words, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "message": self._message(words[:-1] if ended else words),
            "finish_reason": "stop" if ended else "length",
            "token_ids": ids,
            "logprobs": {"content": sampled},
        }
        body = {
            "id": f"tiny-{seed}-{len(prompt)}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "prompt_token_ids": prompt,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }
        return Raw(body=json.dumps(body).encode())

    def _message(self, words: list[str]) -> dict[str, Any]:
        """The reply; of a thinking model the thoughts apart, all of it if they never end."""
        if not self.thinking:
            return {"role": "assistant", "content": " ".join(words)}
        end = words.index("</think>") if "</think>" in words else len(words)
        content = " ".join(words[end + 1 :]) or None
        return {"role": "assistant", "reasoning": " ".join(words[:end]), "content": content}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model into a folder."""
    parser = argparse.ArgumentParser(description="Writes a tiny model.")
    parser.add_argument("folder")
    parser.add_argument("--thinking", action="store_true", help="its replies begin with thoughts")
    options = parser.parse_args(arguments)
    Policy(thinking=options.thinking).save(options.folder)


if __name__ == "__main__":
    main()
