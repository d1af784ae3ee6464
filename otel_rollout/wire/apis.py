"""Every model API, listed once, and what is asked of all of them where a path names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from otel_rollout.wire.anthropic import Messages
from otel_rollout.wire.api import Events, ModelApi
from otel_rollout.wire.bedrock import Converse, PassedOn
from otel_rollout.wire.chat import ChatCompletions, Mistral
from otel_rollout.wire.cohere import CohereChat
from otel_rollout.wire.conversation import contents_key
from otel_rollout.wire.gemini import GenerateContent
from otel_rollout.wire.json import Json, Message, Params, member_of
from otel_rollout.wire.merging import Merging
from otel_rollout.wire.message import add_shapes
from otel_rollout.wire.ollama import Ollama
from otel_rollout.wire.responses import Responses
from otel_rollout.wire.sse import ends_an_event, parse_events, split_events
from otel_rollout.wire.text import TextCompletions

APIS: tuple[ModelApi, ...] = (
    Responses(),
    Mistral(),
    Messages(),
    ChatCompletions(),
    TextCompletions(),
    GenerateContent(),
    Ollama(),
    CohereChat(),
    Converse(),
    PassedOn(),
)
"""All APIs. Where several would take a path or a stream, the first of them does."""
for _api in APIS:
    add_shapes(_api.shapes)


@dataclass(frozen=True, slots=True)
class Merged:
    """A stream as one reply."""

    body: Json
    """The reply in unstreamed shape; None where no API recognises the events."""
    complete: bool | None
    """True if the reply came to its end, not merely that reading ended. None: unknown, since only
    the end of the connection shows it, or a stream may have a shape that is not read."""
    error: Json
    """The error that the server reported inside the stream, or None."""
    malformed: bool = False
    """True if an event that came as a whole is no JSON: clients give up on such a stream."""
    is_strict: bool = False
    """True if its events are strict JSON, so that its body is: it has no NaN."""
    contradictions: Sequence[str] = ()
    """What in the stream contradicts itself, so that the body may not be what was sampled."""


def api_of(path: str) -> ModelApi | None:
    """The API that is asked at a path (its query is ignored); None where no model generates."""
    return _api_of(path, APIS)


@lru_cache(maxsize=256)
def _api_of(path: str, apis: tuple[ModelApi, ...]) -> ModelApi | None:
    path = path.partition("?")[0]
    return next((api for api in apis if api.path_of(path) is not None), None)


_GENERATING = (
    *(":rawPredict", ":streamRawPredict"),
    *("/invoke", "/invoke-with-response-stream", "/converse", "/converse-stream"),
    *(":generateContent", ":streamGenerateContent"),
    *("/api/chat", "/api/generate", "/v2/chat", "/generate"),
)
"""Ends of further paths at which models generate, whether or not an API here reads them."""
_EMBEDDINGS = "/embeddings"
"""End of the path of an API that asks a model, but not to generate."""
_MODEL_PATHS = (_EMBEDDINGS, *_GENERATING, *(end for api in APIS for end in api.paths))
_LAST = frozenset(["/", *(end[-1] for end in _MODEL_PATHS)])


def asks_a_model(path: str) -> bool:
    """True if a POST to this path (without its query) asks a model, by its path alone."""
    if path[-1:] not in _LAST:  # asked for every request of a program
        return False
    return path.endswith(_MODEL_PATHS) or (path.endswith("/") and asks_a_model(path[:-1]))


def endpoint_of(path: str) -> str | None:
    """The path (without its query) that names a call, as a client library would name it.

    The part before it in an address differs from server to server. None where neither a
    model API nor the making of embeddings is known at the path.
    """
    path = path.removesuffix("/")
    api = api_of(path)
    if api is not None:
        return api.path_of(path)
    return _EMBEDDINGS if path.endswith(_EMBEDDINGS) else None


@lru_cache(maxsize=256)
def apis_of(path: str) -> tuple[ModelApi, ...]:
    """The API at a path, alone; all of them where the path names none."""
    api = api_of(path)
    return APIS if api is None else (api,)


@lru_cache
def _conversation_members(apis: tuple[ModelApi, ...]) -> frozenset[str]:
    return frozenset(api.conversation for api in apis)


def conversation_members() -> frozenset[str]:
    """The members of requests that may hold the conversation."""
    return _conversation_members(APIS)


@lru_cache
def _context_members(apis: tuple[ModelApi, ...]) -> tuple[tuple[str, ...], ...]:
    """The members that are context, each by its name or by the names that lead to it."""
    return tuple(dict.fromkeys(tuple(name.split(".")) for api in apis for name in api.context))


@lru_cache
def _context_names(apis: tuple[ModelApi, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[0] for names in _context_members(apis)))


def context_members() -> tuple[str, ...]:
    """The members of requests that the model sees before the conversation, each once."""
    return _context_names(APIS)


def context_of(params: Params) -> list[Json]:
    """What the model sees of a request before the conversation, in a fixed order."""
    return [
        params.get(names[0]) if len(names) == 1 else member_of(params, *names)
        for names in _context_members(APIS)
    ]


def context_key(params: Params) -> bytes:
    """Bytes that are equal for requests that may continue one another."""
    if params.keys().isdisjoint(context_members()):
        return b""
    return contents_key(context_of(params))


@lru_cache(maxsize=256)
def retrieval_of(path: str) -> tuple[ModelApi, str] | None:
    """The API, and the id of the reply, that a request to `path` retrieves; None if it is none."""
    for api in APIS:
        reply_id = api.retrieved_id(path)
        if reply_id is not None:
            return api, reply_id
    return None


def merge(events: str | Sequence[str], choices: int = 1, path: str = "") -> Merged:
    """Merge the server-sent events of one response to a request for `choices` choices.

    What contradicts itself in them is merged as far as it can be, and named.

    events: their text, or each without the empty line after it. The API at `path` is asked first
    whether it recognises them, then all.
    """
    events = split_events(events) if isinstance(events, str) else events
    chunks, done, is_strict = parse_events(events, apis_of(path)[0].read_chunks)
    if None in (chunks if done or ends_an_event(events) else chunks[:-1]):
        return Merged(None, False, None, malformed=True)
    chunks = [chunk for chunk in chunks if isinstance(chunk, dict)]
    error = _error_in(chunks)
    asked = apis_of(path) + APIS if path else APIS
    api = next((api for api in asked if api.recognises(chunks)), None)
    if api is None:
        varies = error is None and asked[0].shapes_vary
        return Merged(None, None if varies else done and error is None, error)
    parsed, merging = Events(chunks, done, error), Merging(choices)
    try:
        body = api.merge(chunks, merging)
    except (AttributeError, KeyError, TypeError, ValueError):  # of another shape than it seemed
        body = None
    is_whole = api.is_whole(parsed, body, merging)
    return Merged(_with(body, error), is_whole, error, False, is_strict, merging.contradictions)


def _with(body: Json, error: Json) -> Json:
    return {**body, "error": error} if body and error else body


def _error_in(chunks: Sequence[dict[str, Json]]) -> Json:
    """The last error that an event reports; some servers send the error itself."""
    for chunk in reversed(chunks):
        delta = chunk.get("delta")  # Cohere reports it at the end of a message
        ended = delta.get("error") if isinstance(delta, dict) else None
        is_error = "error" in (chunk.get("type"), chunk.get("object"))
        if found := chunk.get("error") or ended or (chunk if is_error else None):
            return found
    return None


def error_text(error: Json, *, message: str | None = None, status: int | None = None) -> str:
    """The message of an error that a server reported, and the codes that the message lacks.

    error: as the server sent it, an object or a text. None: not known.
    message: another wording of it, such as a client's. None: its own.
    status: the HTTP status that it came with, if that is one of an error. None: not known.

    Trainers' logs and retry policies go by these: "Rate limit reached (HTTP 429, rate_limited)".
    """
    fields = error if isinstance(error, Mapping) else {}
    found = message or fields.get("message") or ("" if error is None else error)
    text = str(found)
    code = _code_in(fields)
    words = [f"HTTP {status}"] if status is not None and str(status) not in text else []
    if code is not None and code not in text and code != str(status):
        words.append(f"code {code}" if code.isdigit() else code)
    return f"{text} ({', '.join(words)})" if words else text


def _code_in(fields: Mapping[str, Json]) -> str | None:
    """The most exact of the names that an error has for its kind."""
    named = (fields.get(name) for name in ("code", "type", "status"))
    return next((str(name) for name in named if isinstance(name, str | int) and name != ""), None)


def tool_name(tool: Message) -> str:
    """The name in a tool definition; where it has none its type, or else its first member."""
    names = (api.tool_name(tool) for api in APIS)
    found = next((name for name in names if name is not None), None)
    unnamed = tool.get("type", next(iter(tool), None))
    return str(tool.get("name", unnamed)) if found is None else found
