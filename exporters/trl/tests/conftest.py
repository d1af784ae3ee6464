"""A tiny random Qwen2, and a tokenizer with the vocabulary and template of the model server."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from otel_rollout.testing import ByteTokenizer

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}{%- generation -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '{"name": ' + call.function.name|tojson + ', "arguments": ' -}}
{{- call.function.arguments|tojson + '}' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The ids of `ByteTokenizer`, and its chat template."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    specials = sorted(ByteTokenizer.special_tokens, key=ByteTokenizer.special_tokens.__getitem__)
    bytes_only.add_special_tokens([AddedToken(name, special=True) for name in specials])
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", pad_token="<|system|>"
    )
    made.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ö"}]
    rendered = made.apply_chat_template(messages, return_dict=False)
    assert rendered == ByteTokenizer().encode_messages(messages, add_generation_prompt=False)
    return made


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    """A few thousand random weights, the same ones for each test."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=ByteTokenizer.vocabulary_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            pad_token_id=256,
            eos_token_id=261,
        )
    )
