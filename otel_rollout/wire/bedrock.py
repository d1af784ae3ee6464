"""Amazon Bedrock's Converse API, and the models that Bedrock and Vertex AI pass a request on to.

Converse: messages of blocks, each an object with one member that says what it is. Its streams come
in Amazon's frames; `wire.framing` gives each event as an object with its type for the one member.
Replies have no id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from otel_rollout.wire.anthropic import Messages
from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.chat import ChatCompletions
from otel_rollout.wire.conversation import MessagePath
from otel_rollout.wire.json import Chunk, Json, Message, Params, Reply, dumps
from otel_rollout.wire.message import Shapes, content_parts, reasoning_block, text_of
from otel_rollout.wire.parts import (
    Media,
    Members,
    Other,
    Part,
    Text,
    ToolCall,
    ToolResult,
)
from otel_rollout.wire.sse import try_loads

_EVENTS = ("messageStart", "contentBlockStart", "contentBlockDelta", "messageStop")

_converse = re.compile(r"/model/(.+)/converse(?:-stream)?$").search
_passed_on = re.compile(
    r"/model/(.+)/invoke(?:-with-response-stream)?$"
    r"|/publishers/[^/]+/models/([^/:]+):(?:r|streamR)awPredict$"
).search


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
            said = text.get("text") if isinstance(text, Mapping) else "redacted"
            return reasoning_block(part, said)
        case "citationsContent":
            return Other(name, part, " ".join(one.shown for one in content_parts(content)))
    source = value.get("source")
    data = text_of(source.get("bytes")) if isinstance(source, Mapping) else None
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
    shapes = _SHAPES
    instructions = ("system",)
    context = ("toolConfig.tools", "system")
    finish_names = ("stopReason",)
    stop_names = ()
    settings = ("inferenceConfig", "additionalModelRequestFields")
    id_name = None

    def path_of(self, path: str) -> str | None:
        found = _converse(path)
        return found[0] if found else None

    def choices_asked(self, params: Params) -> int:
        return 1

    def request_model(self, path: str, params: Params) -> str | None:
        found = _converse(path.partition("?")[0])
        return unquote(found[1]) if found else None

    def tools(self, params: Params) -> list[Json] | None:
        config = params.get("toolConfig")
        tools = config.get("tools") if isinstance(config, Mapping) else None
        return tools if isinstance(tools, list) else None

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return any(name in chunk for chunk in chunks for name in _EVENTS)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        body: dict[str, Any] = {}
        message: dict[str, Any] = {}
        blocks: dict[int, _Block] = {}
        for kind, event in (member for chunk in chunks for member in chunk.items()):
            if kind == "messageStart":
                message["role"] = event["role"]
            elif kind in ("contentBlockStart", "contentBlockDelta"):
                block = blocks.setdefault(event["contentBlockIndex"], _Block())
                block.add(event.get("start") or event.get("delta") or {})
            elif kind in ("messageStop", "metadata"):
                body |= {name: value for name, value in event.items() if name != "p"}
        message["content"] = [blocks[index].finished() for index in sorted(blocks)]
        return {**body, "output": {"message": message}}

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        return events.error is None and any("messageStop" in chunk for chunk in events.chunks)

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        output = reply.get("output")
        message = output.get("message") if isinstance(output, Mapping) else None
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            items = ({"role": "assistant", **message},) if message["content"] else ()
            yield Sampled(0, reply, items, prompt)

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        said = reply.get("usage")
        if not isinstance(said, Mapping):
            return None
        return {
            "prompt_tokens": said.get("inputTokens"),
            "completion_tokens": said.get("outputTokens"),
            "total_tokens": said.get("totalTokens"),
        }

    def tool_name(self, tool: Message) -> str | None:
        spec = tool.get("toolSpec")
        return str(spec.get("name")) if isinstance(spec, Mapping) else None


class _Block:
    """A block of a stream, put together from its start and its deltas."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        """The object inside the block, as its start and deltas have it."""
        self._kind = "text"
        self._pieces: dict[str, list[str]] = {}
        self._citations: list[Json] = []

    def add(self, said: Mapping[str, Json]) -> None:
        """Take in a start or a delta."""
        for kind, value in said.items():
            if kind == "citation":
                self._citations.append(value)
            elif isinstance(value, str):
                self._pieces.setdefault(kind, []).append(value)
            elif isinstance(value, Mapping):
                self._kind = kind
                for name, part in value.items():
                    if name in ("text", "input", "signature") and isinstance(part, str):
                        self._pieces.setdefault(name, []).append(part)
                    else:
                        self._fields[name] = part
            elif isinstance(value, list):  # of the result of a tool that the server ran
                self._kind = kind
                self._fields.setdefault("content", []).extend(value)

    def finished(self) -> Json:
        """The block as an unstreamed reply has it."""
        texts = {name: "".join(pieces) for name, pieces in self._pieces.items()}
        if self._citations:
            content = [{"text": texts.get("text", "")}]
            return {"citationsContent": {"content": content, "citations": self._citations}}
        if self._kind == "toolUse":
            parsed = try_loads(texts["input"]) if texts.get("input") else {}
            given = texts["input"] if parsed is None else parsed
            return {"toolUse": {**self._fields, "input": given}}
        if self._kind == "reasoningContent":
            inner = {"reasoningText": texts} if texts else self._fields
            return {"reasoningContent": inner}
        return texts if self._kind == "text" else {self._kind: self._fields}


class PassedOn(ModelApi):
    """Paths that hand a request to a model in the model's own shape.

    `/model/{model}/invoke` and `/invoke-with-response-stream` of Bedrock, `:rawPredict` and
    `:streamRawPredict` of Vertex AI. Read are replies of Anthropic's models, those in the shape of
    Converse (Amazon Nova), and chat completions; of another shape only that they are not read.
    """

    provider = "aws.bedrock"
    instructions = ("system",)
    context = ("tools", "system", "toolConfig.tools")
    finish_names = ("stop_reason", "stopReason", "finish_reason")
    stop_names = ("stop_sequence",)
    shapes_vary = True
    settings = ("inferenceConfig",)
    apis: tuple[ModelApi, ...] = (Messages(), Converse(), ChatCompletions())
    last_marks = Messages.last_marks
    """Those that a reply may be of."""

    def path_of(self, path: str) -> str | None:
        found = _passed_on(path)
        return found[0] if found else None

    def provider_of(self, path: str) -> str | None:
        return self.provider if "/model/" in path else "gcp.vertex_ai"

    def request_model(self, path: str, params: Params) -> str | None:
        found = _passed_on(path.partition("?")[0])
        return unquote(found[1] or found[2]) if found else None

    def tools(self, params: Params) -> list[Json] | None:
        found = (api.tools(params) for api in self.apis)
        return next((tools for tools in found if tools is not None), None)

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return any(api.recognises(chunks) for api in self.apis)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        return next(api.merge(chunks) for api in self.apis if api.recognises(chunks))

    def is_last(self, tail: bytes) -> bool:
        return any(api.is_last(tail) for api in self.apis)

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        api = next(api for api in self.apis if api.recognises(events.chunks))
        return api.is_whole(events, body, choices)

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        for api in self.apis:
            sampled = list(api.sampled(params, prompt, reply))
            if sampled:
                yield from sampled
                return

    def is_unread(self, reply: Json) -> bool:
        if not isinstance(reply, Mapping):
            return True
        return not (reply.get("error") or any(True for _ in self.sampled({}, None, reply)))

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        nova = Converse().usage(reply) if "output" in reply else None
        return nova or super().usage(reply)
