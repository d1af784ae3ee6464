"""Requests of constrained decoding, of each API and server, and those that only look like it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire.params import is_constrained

SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CONSTRAINED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"json": {}}},
    {"structured_outputs": {"choice": ["a", "b"], "backend": "xgrammar"}},
    {"guided_json": SCHEMA},
    {"guided_json": {}},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": "root ::= x"},
    {"guided_decoding": {"json": SCHEMA}},
    {"structural_tag": "{}"},
    {"json_schema": "{}"},
    {"json_schema": {}},
    {"regex": "a"},
    {"ebnf": "a"},
    {"grammar": "root ::= x"},
    {"grammar": {"type": "json", "value": SCHEMA}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "structural_tag", "structures": []}},
    {"response_format": {"type": "grammar", "grammar": "x"}},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {"tool_choice": "required"},
    {"tool_choice": "any"},
    {"tool_choice": FUNCTION},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool", "name": "f"}},
    {"tool_choice": {"type": "function", "name": "f"}},
    {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}},
    {"function_call": {"name": "f"}},
    {"function_call": {"name": "f"}, "tool_choice": None},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "auto"},
    {"tools": [{"type": "custom", "custom": {"format": {"type": "grammar"}}}]},
    {"nvext": {"guided_regex": "a"}},
    {"format": "json"},
    {"format": SCHEMA},
    {"strict_tools": True, "tools": [FUNCTION]},
    {"tool_choice": "REQUIRED"},
    {"generationConfig": {"responseSchema": SCHEMA}},
    {"generationConfig": {"responseMimeType": "application/json"}},
    {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
    {"toolConfig": {"tools": [], "toolChoice": {"any": {}}}},
    {"toolConfig": {"tools": [], "toolChoice": {"tool": {"name": "f"}}}},
    {"logit_bias": {"5": -100}},
    {"logit_bias": [[5, False]]},
    {"allowed_token_ids": [1, 2]},
    {"bad_words": ["no"]},
    {"min_tokens": 3},
    {"sampling_params": {"min_new_tokens": 3}},
    {"ignore_eos": True},
    {"thinking_token_budget": 0},
    {"sampling_params": {"reasoning_max_tokens": 512}},
    {"no_repeat_ngram_size": 2},
    {"custom_logit_processor": "{}"},
    {"parameters": {"grammar": {"type": "regex", "value": "a"}}},
]
FREE: list[dict[str, Any]] = [
    {},
    {"format": ""},
    {"strict_tools": False, "tool_choice": "NONE"},
    {"generationConfig": {"responseMimeType": "text/plain"}},
    {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}},
    {"toolConfig": {"tools": [], "toolChoice": {"auto": {}}}},
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"text": {"verbosity": "low"}},
    {"output_config": {"effort": "low"}},
    {"structured_outputs": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": None, "disable_any_whitespace": True}},
    {"guided_json": None, "guided_decoding_backend": "xgrammar"},
    {"grammar": "", "json_schema": None, "regex": None},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
    {"tool_choice": None},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": {"type": "none"}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
    {"function_call": "auto"},
    {"tools": [FUNCTION, {"type": "function", "name": "f", "strict": False}]},
    {"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "none"},
    {"temperature": 0.0, "stop": ["x"], "logit_bias": {}, "bad_words": [], "ignore_eos": False},
    {"thinking_token_budget": None, "chat_template_kwargs": {"thinking_budget": 9}},
    {"min_tokens": 0, "allowed_token_ids": None, "no_repeat_ngram_size": 0},
]


@pytest.mark.parametrize("params", CONSTRAINED, ids=str)
def test_what_constrains(params: dict[str, Any]) -> None:
    """A schema, a grammar, a form of the reply, a call that has to be made."""
    assert is_constrained(params)
    assert is_constrained({"temperature": 1.0, **params})


@pytest.mark.parametrize("params", FREE, ids=str)
def test_what_does_not(params: dict[str, Any]) -> None:
    """Nothing, null, plain text, and tools that may be called."""
    assert not is_constrained(params)


NAMES = [next(iter(params)) for params in CONSTRAINED]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), ANY, max_size=4))
def test_any_request(params: dict[str, Any]) -> None:
    """No request of any shape raises."""
    assert is_constrained(params) in (True, False)
