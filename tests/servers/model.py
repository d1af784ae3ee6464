"""A tiny language model, made on the spot: half a million weights, taught to think and call a tool.

A folder as Hugging Face has them (Qwen2, byte-level BPE, a chat template in Qwen3's style, which
leaves out the thinking of earlier turns), and the same weights as a file for llama.cpp. What the
model says need not be right; it has to open and close its thinking, call a tool, and stop.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

Message = dict[str, Any]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]

TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + tool|tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content and loop.index0 > last.user -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}
{{- call.function.arguments -}}
{%- else -%}
{{- call.function.arguments|tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = [PAD, "<|im_start|>", END]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
VOCABULARY, POSITIONS = 1000, 4096
"""Tokens at most, and how many of them in one conversation."""
STEPS, BATCH = 300, 10


def user(text: str) -> Message:
    """What somebody says to the model."""
    return {"role": "user", "content": text}


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer into the folder, and `model.gguf` beside them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine take minutes
    choose = random.Random(0)
    tokenizer = _tokenizer([_conversation(choose) for _ in range(400)])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        )
    )
    _teach(model, tokenizer, choose)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    _as_gguf(model, tokenizer, folder / "model.gguf")


def _conversation(choose: random.Random) -> tuple[list[Message], bool]:
    """Messages to learn from, and whether they have tools."""
    tools = choose.random() < 0.6
    parts = [_addition, _talk] if tools else [_talk]
    turns = [choose.choice(parts)(choose) for _ in range(choose.randrange(1, 4))]
    return [message for turn in turns for message in turn], tools


def _talk(choose: random.Random) -> list[Message]:
    a, b = choose.randrange(10), choose.randrange(10)
    said = choose.choice(
        [
            "One fish, two fish, red fish, blue fish. Stop.",
            "Zoë ate crème brûlée ☃ in Kraków, then 東京 🙂🙃.",
            f"The numbers are {a} and {b}, {a + 1} and {b + 1}.",
            "The quick brown fox jumps over the lazy dog. Stop.",
        ]
    )
    question = choose.choice(["Say something.", "Go on.", "Are you sure?", "Be brief.", "Why?"])
    return [user(question), _thought(choose, content=said)]


def _addition(choose: random.Random) -> list[Message]:
    a, b = choose.randrange(20), choose.randrange(20)
    call = {"function": {"name": "add", "arguments": json.dumps({"a": a, "b": b})}}
    return [
        user(f"Add {a} and {b}."),
        _thought(choose, tool_calls=[call]),
        {"role": "tool", "content": str(a + b)},
        _thought(choose, content=f"It is {a + b}."),
    ]


def _thought(choose: random.Random, **message: Any) -> Message:
    """A reply, with thinking or without."""
    thought = choose.choice(["", "Let me see.", "This is easy.", "Hmm, naïve ☃."])
    return {"role": "assistant", "reasoning_content": thought, **message}


def _tokenizer(conversations: list[tuple[list[Message], bool]]) -> Qwen2Tokenizer:
    """Qwen2's, with a vocabulary of our texts: vLLM and llama.cpp split text as that one does."""
    inner = Qwen2Tokenizer().backend_tokenizer
    texts = [str(m.get("content", "")) for messages, _ in conversations for m in messages]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*texts, json.dumps(TOOLS), TEMPLATE], trainer)
    learned = json.loads(inner.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    made = Qwen2Tokenizer(learned["vocab"], merges, eos_token=END, pad_token=PAD)
    made.add_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken(name, special=False) for name in MARKS])
    made.chat_template = TEMPLATE
    return made


def _teach(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, choose: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        texts = [_rendered(tokenizer, choose) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _rendered(tokenizer: Qwen2Tokenizer, choose: random.Random) -> str:
    messages, tools = _conversation(choose)
    text = tokenizer.apply_chat_template(messages, TOOLS if tools else None, tokenize=False)
    return str(text)


def _as_gguf(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(known, weights.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Qwen2Tokenizer) -> None:
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys(MARKS, gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in inner["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
