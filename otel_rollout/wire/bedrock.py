"""Amazon Bedrock's Converse API, and the models that Bedrock and Vertex AI pass a request on to.

Converse: messages of blocks, each an object with one member that says what it is. Its streams come
in Amazon's frames; `wire.framing` gives each event as an object with its type for the one member.
Replies have no id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.wire.anthropic import Messages
from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.chat import ChatCompletions
from otel_rollout.wire.conversation import MessagePath
from otel_rollout.wire.json import Chunk, Json, Message, Params, Reply, dumps, member_of
from otel_rollout.wire.merging import Elements, Merging, finish, finished_json
from otel_rollout.wire.message import Shapes, content_parts, reasoning_block, text_of
from otel_rollout.wire.parts import Media, Members, Other, Part, Text, ToolCall, ToolResult

_EVENTS = ("messageStart", "contentBlockStart", "contentBlockDelta", "messageStop")

_MEDIA = ("image", "document", "video", "audio")
_OBJECTS = ("toolUse", "toolResult", "reasoningContent", "citationsContent", *_MEDIA)


def _block(part: Members) -> Part | None:
    """A block, whose one member is an object with the name of its kind."""
    name = next(name for name in _OBJECTS if name in part)
    value = part[name]
    if not isinstance(value, Mapping):
        return None
    content = value.get("content")
    call_id = value.get("toolUseId")
    match name:
        case "toolUse":
            called = str(value.get("name"))
            return ToolCall(text_of(call_id), called, value.get("input"), [name, call_id])
        case "toolResult":
            failed = value.get("status") == "error"
            return ToolResult(text_of(call_id), content, content_parts(content), failed)
        case "reasoningContent":
            text = value.get("reasoningText")
            return reasoning_block(part, member_of(text, "text") if text else "redacted")
        case "citationsContent":
            return Other(name, part, " ".join(one.shown for one in content_parts(content)))
    data = text_of(member_of(value, "source", "bytes"))
    return Media(name, part, None, data, data and f"{name}/{value.get('format')}")


_SHAPES = Shapes(
    blocks={
        **dict.fromkeys(_OBJECTS, _block),
        "cachePoint": lambda part: Text(str(part.get("text") or "")),
        "json": lambda part: Other("json", part, dumps(part["json"])),
    },
    result_marks=(b'"toolResult"',),
)


class Converse(ModelApi):
    """`/model/{model}/converse` and `/converse-stream`."""

    provider = "aws.bedrock"
    model_path = re.compile(r"/model/(?P<model>.+)/converse(?:-stream)?$")
    shapes = _SHAPES
    instructions = ("system",)
    context = ("toolConfig.tools", "system")
    finish_names = ("stopReason",)
    stop_names = ()
    settings = ("inferenceConfig", "additionalModelRequestFields")
    choices_name = None
    id_name = None

    def tools(self, params: Params) -> list[Json] | None:
        tools = member_of(params, "toolConfig", "tools")
        return tools if isinstance(tools, list) else None

    def is_own(self, chunk: Chunk) -> bool:
        return not chunk.keys().isdisjoint(_EVENTS)

    def ends(self, chunk: Chunk) -> bool:
        return "messageStop" in chunk

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        body: dict[str, Any] = {}
        message: dict[str, Any] = {}
        blocks = Elements()
        for kind, event in (member for chunk in chunks for member in chunk.items()):
            if kind == "messageStart":
                message["role"] = event["role"]
            elif kind in ("contentBlockStart", "contentBlockDelta"):
                _merge_block(blocks, event, merging)
            elif kind in ("messageStop", "metadata"):
                body |= {name: value for name, value in event.items() if name != "p"}
        merging.check_calls(block for block in blocks.in_order() if "toolUse" in block)
        merging.check_repeats()
        merging.check_end(chunks, self.ends, *_EVENTS[:3])
        message["content"] = [_finished(block) for block in blocks.in_order()]
        return {**body, "output": {"message": message}}

    def sampled_items(self, reply: Reply) -> tuple[Json, ...] | None:
        message = member_of(reply, "output", "message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return None
        return ({"role": "assistant", **message},) if message["content"] else ()

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        counts = reply.get("usage")
        if not isinstance(counts, Mapping):
            return None
        return {
            "prompt_tokens": counts.get("inputTokens"),
            "completion_tokens": counts.get("outputTokens"),
            "total_tokens": counts.get("totalTokens"),
        }

    def tool_name(self, tool: Message) -> str | None:
        spec = tool.get("toolSpec")
        return str(spec.get("name")) if isinstance(spec, Mapping) else None


def _merge_block(blocks: Elements, event: Chunk, merging: Merging) -> None:
    """Add a start or a delta to its block; that of a text has no start."""
    index = event.get("contentBlockIndex")
    block = None if "start" in event else blocks.find(index)
    piece: Mapping[str, Json] = event.get("start") or event.get("delta") or {}
    if block is None or (index is None and block.keys().isdisjoint(piece)):
        block = blocks.open(index)
    elif len((block.keys() | piece.keys()) - {"citation"}) > 1:
        merging.contradicts("pieces of several types are in one content block")
    for kind, value in piece.items():
        if kind == "citation":
            merging.field(block, kind, [value])
        elif isinstance(value, list):  # of the result of a tool that the server ran
            merging.field(block.setdefault(kind, {}), "content", value)
        else:
            merging.field(block, kind, value)


def _finished(block: dict[str, Any]) -> Json:
    """The block as an unstreamed reply has it."""
    found = finish(block)
    use, thought = found.get("toolUse"), found.get("reasoningContent")
    if "citation" in found:
        content = [{"text": found.get("text", "")}]
        return {"citationsContent": {"content": content, "citations": found["citation"]}}
    if use is not None:
        use["input"] = finished_json(use["input"]) if use.get("input") else {}
    if thought is not None and "redactedContent" not in thought:
        found["reasoningContent"] = {"reasoningText": thought}
    return found


class PassedOn(ModelApi):
    """Paths that hand a request to a model in the model's own shape.

    `/model/{model}/invoke` and `/invoke-with-response-stream` of Bedrock, `:rawPredict` and
    `:streamRawPredict` of Vertex AI. Read are replies of Anthropic's models, those in the shape of
    Converse (Amazon Nova), and chat completions; of another shape only that they are not read.
    """

    provider = "aws.bedrock"
    model_path = re.compile(
        r"/(?:model|publishers/[^/]+/models)/(?P<model>.+)"
        r"(?:/invoke(?:-with-response-stream)?|:(?:r|streamR)awPredict)$"
    )
    instructions = ("system",)
    context = ("tools", "system", "toolConfig.tools")
    finish_names = ("stop_reason", "stopReason", "finish_reason")
    stop_names = ("stop_sequence",)
    shapes_vary = True
    settings = ("inferenceConfig",)
    apis: tuple[ModelApi, ...] = (Messages(), Converse(), ChatCompletions())
    """Those that a reply may be of."""
    last_marks = Messages.last_marks

    def provider_of(self, path: str) -> str | None:
        return self.provider if "/model/" in path else "gcp.vertex_ai"

    def tools(self, params: Params) -> list[Json] | None:
        found = (api.tools(params) for api in self.apis)
        return next((tools for tools in found if tools is not None), None)

    def is_own(self, chunk: Chunk) -> bool:
        return any(api.is_own(chunk) for api in self.apis)

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        return next(api.merge(chunks, merging) for api in self.apis if api.recognises(chunks))

    def is_last(self, tail: bytes) -> bool:
        return any(api.is_last(tail) for api in self.apis)

    def is_whole(self, events: Events, body: Json, merging: Merging) -> bool | None:
        api = next(api for api in self.apis if api.recognises(events.chunks))
        return api.is_whole(events, body, merging)

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        api = self._reader_of(reply)
        return iter(()) if api is None else api.sampled(params, prompt, reply)

    def _reader_of(self, reply: Reply) -> ModelApi | None:
        """The API in whose shape the reply is; None if it is in none of them."""
        return next((api for api in self.apis if list(api.sampled({}, None, reply))), None)

    def is_unread(self, reply: Json) -> bool:
        if not isinstance(reply, Mapping):
            return True
        return not reply.get("error") and self._reader_of(reply) is None

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        api = self._reader_of(reply)
        return super().usage(reply) if api is None else api.usage(reply)
