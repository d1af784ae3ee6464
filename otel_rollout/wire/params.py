"""Parameters of requests that steer sampling, by the names that model servers give them."""

from __future__ import annotations

from collections.abc import Mapping

from otel_rollout.wire.json import Json, Params

_LENGTH_LIMITS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    *("num_predict", "maxOutputTokens", "maxTokens"),
)

_REASONING = (
    *("reasoning", "reasoning_effort", "include_reasoning", "separate_reasoning"),
    *("thinking", "thinking_token_budget"),
)
"""Members that steer how long a model thinks, or what becomes of its thoughts."""

_SAMPLING = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "n", "seed", "best_of", "logit_bias"),
        *("stop", "stop_sequences", "stop_token_ids", "stop_regex", "ignore_eos"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "min_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "repetition_detection"),
        *("repeat_penalty", "repeat_last_n", "length_penalty", "typical_p", "top_n_sigma"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "samplers", "bad_words"),
        *("allowed_token_ids", "truncate_prompt_tokens", "logits_processors"),
        *("custom_logit_processor", "custom_params", "vllm_xargs", "post_sampling_probs"),
        *("logprobs_mode", "thinking_token_budget", "reasoning_effort", "reasoning", "thinking"),
        *("tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt"),
        # Constraints, by the names that servers give them.
        *("guided_json", "guided_json_object", "guided_decoding", "guided_regex"),
        *("guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
        *("json_schema", "regex", "ebnf", "grammar", "response_format", "output_format"),
        *("output_config", "text"),
        # Of Cohere, Ollama, Gemini and Bedrock.
        *("p", "k", "strict_tools", "safety_mode", "think", "format"),
    )
)


def sampling_params(params: Params) -> dict[str, Json]:
    """The sampling parameters among the members of a request."""
    return {key: value for key, value in params.items() if key in _SAMPLING}


def length_limit(params: Params) -> int | None:
    """The most tokens that a request allows a choice to have; None where it sets no limit."""
    limits = (params.get(name) for name in _LENGTH_LIMITS)
    return min((n for n in limits if isinstance(n, int) and n > 0), default=None)


def asks_for_reasoning(params: Params) -> bool:
    """True if a request has the model think, or has the server tell thoughts from the reply."""
    template = params.get("chat_template_kwargs")
    switches = template.items() if isinstance(template, Mapping) else ()
    return any(_is_on(params.get(name)) for name in _REASONING) or any(
        _is_on(value) for name, value in switches if "think" in name or "reason" in name
    )


def _is_on(value: Json) -> bool:
    if isinstance(value, Mapping):
        value = value.get("type", value.get("effort", True))
    return bool(value) and value not in ("none", "disabled")


def allows_no_token(params: Params) -> str | None:
    """The member by which a request allows a choice no token at all; None if none does so."""
    limits = ((name, params.get(name)) for name in _LENGTH_LIMITS)
    return next((name for name, n in limits if n == 0 and n is not False), None)
