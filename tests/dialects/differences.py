"""What of a call on the wire is not in what was read of it, each difference by its name.

A difference is a `Fact`; one for which there is no fact is a text. Both sides are compared in full:
what is not compared here by a name of its own is different without a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from otel_rollout import Completion
from otel_rollout.rebuild.dialects.call import Fact
from otel_rollout.spans.exchange import Exchange
from otel_rollout.wire import Json

Difference = Fact | str

UNKNOWN_PARAMETERS = ("top_k", "return_token_ids")
"""What the recorded agents put into `extra_body`."""
_NO_PARAMETERS = {
    *("messages", "tools", "input", "prompt", "stream", "stream_options", "system"),
    *("instructions", "previous_response_id", "encoding_format", "model"),
}
_FIELDS = {
    "name": (Fact.NAMES, Fact.NAMES),
    "reasoning": (Fact.REQUEST_REASONING, Fact.REPLY_REASONING),
    "reasoning_content": (Fact.REQUEST_REASONING, Fact.REPLY_REASONING),
    "refusal": (Fact.REQUEST_REFUSAL, Fact.REPLY_REFUSAL),
    "function_call": (Fact.FUNCTION_CALL, Fact.FUNCTION_CALL),
}
"""The facts of a message's members: in a request, in a reply."""


def in_request(sent: dict[str, Any], exchange: Exchange) -> set[Difference]:
    """Differences of the request as it was sent from what was read."""
    read = exchange.request()
    found = set[Difference]()
    if sent.get("model") != read.get("model"):
        found.add(Fact.REQUEST_MODEL)
    for key in (sent.keys() | read.keys()) - _NO_PARAMETERS:
        if read.get(key) != sent.get(key):
            found.add(Fact.EXTRA_BODY if key in UNKNOWN_PARAMETERS else Fact.PARAMETERS)
    if sent.get("previous_response_id") != read.get("previous_response_id"):
        found.add(Fact.PREVIOUS)
    found |= _in_tools(sent.get("tools"), read.get("tools"))
    if "prompt" in sent and sent["prompt"] != read.get("prompt"):
        found.add("prompt")
    if "input" in sent and exchange.path == "/responses":
        if any(sent.get(key) != read.get(key) for key in ("input", "instructions")):
            found.add(Fact.INSTRUCTIONS if _items(sent) == _items(read) else "items")
        return found
    if sent.get("system") and _parts(sent["system"]) != _parts(read.get("system")):
        found |= _in_content(sent["system"], read.get("system"))
    before = _as_chat(sent) if "input" in sent else sent.get("messages", [])
    return found | in_messages(before, read.get("messages", []), is_reply=False)


def _items(request: dict[str, Any]) -> list[Any]:
    """The items of a request of the Responses API, its instructions the first of them."""
    system, items = request.get("instructions"), request["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return [*([{"role": "system", "content": system}] if system else []), *items]


def in_reply(sent: dict[str, Any], exchange: Exchange, of: list[Completion]) -> set[Difference]:
    """Differences of the reply as it was sent from what was read."""
    read = exchange.reply or {}
    found = set[Difference]()
    for key in (sent.keys() | read.keys()) - {"choices", "content", "output", "object", "type"}:
        one, two = _known(sent.get(key)), _known(read.get(key))
        if key == "usage" and "output" in sent and exchange.path != "/responses":
            one = {_CHAT_NAMES.get(name, name): number for name, number in (one or {}).items()}
        if one != two:
            found.add(_in_field(key, one, two))
    if "output" in sent and exchange.path == "/responses":
        return found | ({"items"} if read.get("output") != sent["output"] else set())
    choices = _choices(sent)
    by_index = {completion.choice_index: completion for completion in of}
    for choice in choices:
        completion = by_index.get(choice["index"])
        if completion is None:
            found.add(Fact.CHOICES)
            continue
        found |= _in_choice(choice, completion)
        if "message" in choice:
            message = completion.message or {}
            found |= in_messages([choice["message"]], [message], is_reply=True)
        elif (completion.message or {}).get("content") != choice.get("text"):
            found.add("text")
    if len(of) > len(choices):
        found.add(f"{len(of)} completions")
    return found


def _in_field(key: str, one: Any, two: Any) -> Difference:
    if key == "usage":
        if _totals(one) != _totals(two):
            return Fact.USAGE
        return Fact.USAGE_DETAILS
    return _REPLY_FIELDS.get(key, Fact.RESPONSE_FIELDS)


_REPLY_FIELDS = {
    "id": Fact.RESPONSE_ID,
    "model": Fact.RESPONSE_MODEL,
    "stop_reason": Fact.FINISH_REASON,
    "prompt_token_ids": Fact.TOKEN_IDS,
    "token_ids": Fact.TOKEN_IDS,
    "logprobs": Fact.LOGPROBS,
}


def _totals(said: Any) -> list[Any]:
    """Input and output tokens, whichever API counts them; of Anthropic's without cached ones."""
    said = said or {}
    return [said.get(f"{a}_tokens", said.get(f"{b}_tokens")) for a, b in _COUNTED]


_CHAT_NAMES = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_tokens_details": "prompt_tokens_details",
    "output_tokens_details": "completion_tokens_details",
}
_COUNTED = (("prompt", "input"), ("completion", "output"))


def _in_choice(choice: dict[str, Any], completion: Completion) -> set[Difference]:
    found = set[Difference]()
    if "finish_reason" in choice and completion.finish_reason != choice["finish_reason"]:
        found.add(Fact.FINISH_REASON)
    if choice.get("token_ids") != completion.token_ids:
        found.add(Fact.TOKEN_IDS)
    scores = (choice.get("logprobs") or {}).get("content")
    if scores and completion.logprobs != [entry["logprob"] for entry in scores]:
        found.add(Fact.LOGPROBS)
    if not scores and choice.get("logprobs") and completion.logprobs is None:
        found.add(Fact.LOGPROBS)
    if choice.get("stop_reason") != completion.choice.get("stop_reason"):
        found.add(Fact.RESPONSE_FIELDS)
    return found


def _choices(sent: dict[str, Any]) -> list[dict[str, Any]]:
    if "output" in sent:
        (message,) = _items_as_chat(sent["output"])
        return [{"index": 0, "message": message}]
    if "content" in sent:
        return [{"index": 0, "message": {"role": "assistant", "content": sent["content"]}}]
    return list(sent["choices"])


# --- messages


def in_messages(
    sent: Sequence[dict[str, Any]], read: Sequence[dict[str, Any]], *, is_reply: bool
) -> set[Difference]:
    """Differences of messages, in order; roles and texts have no fact: they are never lost."""
    found = set[Difference]()
    if len(sent) != len(read):
        for fact, is_of in _DROPPED.items():
            if [m for m in sent if not is_of(m, sent)] == [m for m in read if not is_of(m, read)]:
                return {fact}
        found.add(f"{len(read)} messages instead of {len(sent)}")
    nothing: dict[str, Any] = {}
    for before, after in zip_longest(sent, read, fillvalue=nothing):
        if before.get("role") != after.get("role"):
            found.add(f"role {after.get('role')!r}")
        if _parts(before.get("content")) != _parts(after.get("content")):
            refused = _refusal(before)
            if refused and after.get("content") in (None, refused):
                found.add(_FIELDS["refusal"][is_reply])
            else:
                found |= _in_content(before.get("content"), after.get("content"))
        found |= _in_calls(before.get("tool_calls") or [], after.get("tool_calls") or [])
        for key in (before.keys() | after.keys()) - _COMPARED:
            if (before.get(key) or None) != (after.get(key) or None):
                facts = _FIELDS.get(key)
                found.add(facts[is_reply] if facts else f"{key} of a message")
    return found


def _is_custom(message: dict[str, Any], among: Sequence[dict[str, Any]]) -> bool:
    """Whether the message is a call of a custom tool, or its result."""
    made = [call for other in among for call in other.get("tool_calls") or ()]
    made = [call for call in made if call["type"] == "custom"]
    if any(call in made for call in message.get("tool_calls") or ()):
        return True
    return message.get("tool_call_id") in [call["id"] for call in made]


_DROPPED: dict[Fact, Callable[[dict[str, Any], Sequence[dict[str, Any]]], bool]] = {
    Fact.CUSTOM_TOOLS: _is_custom,
    Fact.FUNCTION_CALL: lambda message, _: bool(message.get("function_call")),
}
"""Facts whose messages an instrumentation may leave out."""
_COMPARED = {"role", "content", "tool_calls", "parsed"}
"""Members that are compared on their own; `parsed` is the client's, who adds it to a reply."""


def _refusal(message: dict[str, Any]) -> Any:
    """The text of a refusal, as a member or as a part. None: the message is none."""
    parts = _parts(message.get("content"))
    inner = [part.get("refusal") for part in parts]
    return message.get("refusal") or (inner[0] if inner else None)


def _in_calls(sent: list[dict[str, Any]], read: list[dict[str, Any]]) -> set[Difference]:
    found = set[Difference]()
    if len(sent) != len(read):
        plain = [call for call in sent if call["type"] != "custom"]
        if len(plain) == len(read):
            return {Fact.CUSTOM_TOOLS} | _in_calls(plain, read)
        return {"number of tool calls"}
    for one, two in zip(sent, read, strict=True):
        kinds = one.get("type", "function"), two.get("type", "function")
        said, heard = one.get(kinds[0]) or {}, two.get(kinds[1]) or {}
        if kinds[0] != kinds[1]:
            found.add("type of a tool call")
        if one.get("id") != two.get("id"):
            is_item = str(two.get("id")).startswith("fc_")
            found.add(Fact.CALL_IDS if is_item else "id of a tool call")
        if said.get("name") != heard.get("name"):
            found.add("name of a tool call")
        if said.get("input") != heard.get("input"):
            found.add("input of a tool call")
        if said.get("arguments") != heard.get("arguments"):
            same = _json(said.get("arguments")) == _json(heard.get("arguments"))
            found.add(Fact.ARGUMENTS if same else "arguments of a tool call")
    return found


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _in_content(sent: Json, read: Json) -> set[Difference]:
    one, two = _parts(sent), _parts(read)
    found = set[Difference]()
    images = [
        [p["image_url"] for p in parts if p.get("type") == "image_url"] for parts in (one, two)
    ]
    urls = [[image["url"] for image in those] for those in images]
    if not {url for url in urls[0] if url.startswith("data:")} <= set(urls[1]):
        found.add(Fact.IMAGES)
    elif urls[0] != urls[1]:
        found.add("images")
    details = [[image.get("detail") for image in those] for those in images]
    if details[0] != details[1]:
        found.add(Fact.DETAIL)
    one, two = [[p for p in parts if "image_url" not in p] for parts in (one, two)]
    if one == two:
        return found
    if _parts(_json(sent)) == two or (_texts(one) != _texts(two) == ["".join(_texts(one))]):
        return found | {Fact.PARTS}
    if [_unnamed(part) for part in one] == [_unnamed(part) for part in two]:
        return found | {Fact.FILES}
    if [_bare(part) for part in one] == [_bare(part) for part in two]:
        return found | {Fact.BLOCK_FIELDS}
    if [_unseen(part) for part in one] == [_unseen(part) for part in two]:
        return found | {Fact.IMAGES}
    return found | {f"content {str(read)[:60]!r}"}


def _parts(content: Json) -> list[Any]:
    """Content as a list of parts; a text and its only part are one, and so are forms of nothing."""
    if not content:
        return []
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def _bare(part: Any) -> Any:
    """A block without the members that are no content."""
    if not isinstance(part, dict):
        return part
    names = ("signature", "cache_control", "is_error", "citations", "caller")
    bare = {key: value for key, value in part.items() if key not in names}
    if part.get("type") == "tool_result":
        bare["content"] = [_bare(inner) for inner in _parts(part.get("content"))]
    return bare


def _unseen(part: Any) -> Any:
    """A block without the data of the images in it."""
    if part.get("type") == "image":
        return {"type": "image"}
    inner = part.get("content")
    inner = [_unseen(block) for block in inner] if isinstance(inner, list) else inner
    return {**part, "content": inner}


def _unnamed(part: Any) -> Any:
    """A part without what tells of a file how it is called, or of sound how it is coded."""
    kind = str(part.get("type"))
    inner = part.get(kind)
    if not isinstance(inner, dict):
        return part
    return {**part, kind: {**inner, "filename": None, "format": None}}


def _texts(parts: Iterable[Any]) -> list[str]:
    return [part.get("text", "") for part in parts]


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _known(v) for k, v in value.items() if v is not None}
    return value


# --- tools


def _in_tools(sent: Any, read: Any) -> set[Difference]:
    if not sent or sent == read:
        return set()
    if not read:
        is_strict = any("strict" in tool.get("function", tool) for tool in sent)
        is_custom = any(tool.get("type") == "custom" for tool in sent)
        lost = {Fact.STRICT: is_strict, Fact.CUSTOM_TOOLS: is_custom}
        return {Fact.TOOLS, *(fact for fact, there in lost.items() if there)}
    bare = [[_flat(tool) for tool in tools] for tools in (sent, read)]
    strict = [[tool.pop("strict", None) for tool in tools] for tools in bare]
    if bare[0] == bare[1]:
        return {Fact.STRICT} if strict[0] != strict[1] else set()
    known = [[tool for tool in tools if tool.get("type") != "custom"] for tools in bare]
    if known[0] != known[1]:
        return {"tools"}
    return {Fact.CUSTOM_TOOLS, *([Fact.STRICT] if strict[0] != strict[1] else [])}


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    kind = str(tool.get("type"))
    return {"type": kind, **(tool.get(kind) or {k: v for k, v in tool.items() if k != "type"})}


# --- items of the Responses API as chat messages


def _as_chat(sent: dict[str, Any]) -> list[dict[str, Any]]:
    items = sent["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    system = sent.get("instructions")
    return [*([{"role": "system", "content": system}] if system else []), *_items_as_chat(items)]


def _items_as_chat(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages: those that the model sampled one after the other are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind.endswith("_output"):
            result = {"tool_call_id": item["call_id"], "content": item["output"]}
            messages.append({"role": "tool", **result})
            continue
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        last = messages[-1]
        if kind == "message":
            last["content"] = "".join(part["text"] for part in item["content"])
        elif kind == "reasoning":
            last["reasoning_content"] = "".join(part["text"] for part in item["content"])
        else:
            name = "custom" if kind == "custom_tool_call" else "function"
            said = {k: item[k] for k in ("name", "arguments", "input") if k in item}
            call = {"id": item["call_id"], "type": name, name: said}
            last.setdefault("tool_calls", []).append(call)
    return messages
