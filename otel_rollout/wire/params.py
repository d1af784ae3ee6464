"""Parameters of requests that steer sampling, by the names that model servers give them. Pure.

Some constrain decoding: a grammar, a schema, a regular expression or a forced tool call takes
tokens away before the log-probabilities are computed, so what is reported as the model's own is
that of the masked distribution.
"""

from __future__ import annotations

from collections.abc import Mapping

from otel_rollout.wire.json import Json, Params, member_of

_LENGTH_LIMITS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    *("num_predict", "maxOutputTokens", "maxTokens"),
)

_REASONING = (
    *("reasoning", "reasoning_effort", "include_reasoning", "separate_reasoning"),
    *("thinking", "thinking_token_budget"),
)
"""Members that steer how long a model thinks, or what becomes of its thoughts."""

_MASKS = (
    *("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"),
    *("structural_tag", "json_schema", "regex", "ebnf", "grammar", "format", "strict_tools"),
    *("responseSchema", "responseJsonSchema", "allowed_token_ids", "bad_words"),
    *("bad_words_ids", "banned_tokens", "banned_strings", "custom_logit_processor", "ignore_eos"),
    *("logits_processors", "logit_processors", "thinking_token_budget", "reasoning_max_tokens"),
)
"""Members whose value is a constraint, by the names that servers give them. Some servers go on
after an end that `ignore_eos` ignores, others take it away. Budgets of thoughts force their end."""
_COUNTED_MASKS = ("min_tokens", "min_new_tokens", "no_repeat_ngram_size", "min_length")
"""Members that constrain where they are above 0: an end, or a repetition, is taken away."""
_COLLECTIONS = ("structured_outputs", "guided_decoding")
"""Members that hold constraints by name."""
_FORMATS = ("response_format", "output_format", "text", "output_config")
"""Members that name the form of the reply, themselves or in their member `format`."""
_NESTED = (
    *("nvext", "sampling_params", "generationConfig", "generation_config", "extra_body"),
    *("parameters", "options", "inferenceConfig", "additionalModelRequestFields"),
)
"""Members that hold further sampling parameters."""
_SEARCHES = ("use_beam_search", "beam_search", "beam_search_decoding")
"""Members that have a server search for the likeliest reply."""
_BEAMS = ("best_of", "num_beams", "beam_width", "beam_size", "n_beams", "num_beam_groups")
"""Members that do so, or have it choose among samples, where they are above 1."""
_MEDIA = (
    *("images", "image_data", "audio_data", "video_data", "multi_modal_data", "multimodal_data"),
    *("mm_data", "image", "audios", "videos"),
)
"""Members of a request, or of its prompt, that are images, sound or files beside the messages."""
_NEUTRAL: dict[str, tuple[Json, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "topP", "p", "typical_p", "tfs_z"), (1,)),
    **dict.fromkeys(("top_k", "topK", "k"), (0, -1)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "repetitionPenalty"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "mirostat"), (0,)),
    **dict.fromkeys(("frequencyPenalty", "presencePenalty", "dry_multiplier"), (0,)),
    **dict.fromkeys(("xtc_probability", "dynatemp_range", "smoothing_factor"), (0,)),
    "top_n_sigma": (0, -1),
}
"""Members that change the distribution which is sampled from, with the values that do not."""
_HOW = ("backend", "disable_any_whitespace", "whitespace_pattern", "disable_fallback")
"""Members of a collection that constrain nothing by themselves."""

_SAMPLING = frozenset(
    (
        *("n", "seed"),
        *("stop", "stop_sequences", "stop_token_ids", "stop_regex"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
        *("logit_bias", "repetition_detection", "repeat_last_n", "length_penalty"),
        *("mirostat_tau", "mirostat_eta", "samplers", "truncate_prompt_tokens"),
        *("custom_params", "vllm_xargs", "post_sampling_probs"),
        *("logprobs_mode", "thinking_token_budget", "reasoning_effort", "reasoning", "thinking"),
        *("tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt"),
        # Of Cohere, Ollama, Gemini and Bedrock.
        *("p", "k", "safety_mode", "think"),
        *(*_MASKS, *_COUNTED_MASKS, *_COLLECTIONS, *_FORMATS, *_SEARCHES, *_BEAMS, *_NEUTRAL),
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
    for name in _LENGTH_LIMITS:
        if params.get(name) == 0 and params[name] is not False:
            return name
    return None


def searched_by(params: Params) -> str | None:
    """The member by which a request has the server search, or choose among samples: `best_of=4`."""
    for name in _SEARCHES:
        if _is_set(params.get(name)):
            return name
    for name in _BEAMS:
        if type(count := params.get(name)) is int and count > 1:
            return f"{name}={count}"
    return next(filter(None, map(searched_by, _nested(params))), None)


def media_beside(params: Params) -> list[str]:
    """The members of a request that are images, sound or files beside its messages."""
    prompt = params.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    holders = [params, *(each for each in prompts if isinstance(each, Mapping))]
    return [name for holder in holders for name in _MEDIA if holder.get(name)]


def samplers_of(params: Params) -> list[str]:
    """What of a request changes the distribution that is sampled from: `temperature=0.7`."""
    found = [
        f"{name}={value}"
        for name, neutral in _NEUTRAL.items()
        if _is_number(value := params.get(name)) and value not in neutral
    ]
    return [*found, *(each for nested in _nested(params) for each in samplers_of(nested))]


def _nested(params: Params) -> list[Params]:
    return [each for each in map(params.get, _NESTED) if isinstance(each, Mapping)]


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- constrained decoding


def is_constrained(params: Params) -> bool:
    """True if the request has the server constrain what is sampled."""
    return (
        bool(params.get("logit_bias"))
        or any(map(_is_set, map(params.get, _MASKS)))
        or any(map(_is_above_0, map(params.get, _COUNTED_MASKS)))
        or any(map(_has_constraint, map(params.get, _COLLECTIONS)))
        or any(map(_is_format, map(params.get, _FORMATS)))
        or any(map(_forces_a_call, map(params.get, ("tool_choice", "function_call"))))
        or _has_strict_tools(params)
        or _is_nested_choice(params.get("toolConfig"))
        or params.get("responseMimeType") in ("application/json", "text/x.enum")
        or any(map(is_constrained, _nested(params)))
    )


def _is_set(value: Json) -> bool:
    """Whether a constraint is set; an empty object is one, the JSON schema of any JSON."""
    return value is not None and value is not False and value != "" and value != []


def _is_above_0(value: Json) -> bool:
    return _is_number(value) and value > 0


def _has_constraint(value: Json) -> bool:
    return isinstance(value, Mapping) and any(
        _is_set(part) for name, part in value.items() if name not in _HOW
    )


def _is_format(value: Json) -> bool:
    if not isinstance(value, Mapping):
        return False
    value = value.get("format", value)
    kind = member_of(value, "type")
    return isinstance(kind, str) and kind != "text"


def _forces_a_call(choice: Json) -> bool:
    """Whether a tool has to be called: by its name, or any of them."""
    if isinstance(choice, Mapping):
        mode = choice.get("mode") or member_of(choice, "allowed_tools", "mode")
        choice = mode or choice.get("type") or "function"
    return isinstance(choice, str) and choice.lower() not in ("auto", "none", "")


def _is_nested_choice(config: Json) -> bool:
    """Whether Gemini's or Bedrock's `toolConfig` has a tool be called."""
    mode = str(member_of(config, "functionCallingConfig", "mode") or "auto")
    choice = member_of(config, "toolChoice")
    forced = isinstance(choice, Mapping) and not choice.keys() <= {"auto"}
    return forced or mode.lower() in ("any", "validated")


def _has_strict_tools(params: Params) -> bool:
    """Whether the arguments of a tool follow its schema strictly, if it is called at all."""
    tools, choice = params.get("tools"), params.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, Mapping) else choice
    return isinstance(tools, list) and choice != "none" and any(map(_is_strict, tools))


def _is_strict(tool: Json) -> bool:
    if not isinstance(tool, Mapping):
        return False
    return any(
        isinstance(body, Mapping)
        and (body.get("strict") is True or member_of(body, "format", "type") == "grammar")
        for body in (tool, tool.get("function"), tool.get("custom"))
    )
