"""One model call, read from its exchange span: request, response, and how it ended."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from otel_rollout.spans.blobs import missing_in, with_blobs
from otel_rollout.spans.reply_form import USUAL, Form, Retried, unpacked
from otel_rollout.spans.token_paths import TokenPath, extend_tokens
from otel_rollout.wire import (
    OBJECT,
    Bounded,
    Json,
    JsonText,
    Merged,
    MessagePath,
    ModelApi,
    api_of,
    as_lines,
    context_key,
    copy_json,
    cut_value,
    dumps,
    dumps_strict,
    events_of,
    loads_bounded,
    merge,
    path_messages,
    unpack_events,
    wholly_read,
)

EXACT_SOURCE = "exchange"
"""`Exchange.source` of what was read from our own spans."""


LARGE = 1024
"""A message with more bytes is written only by its digest where it follows another prefix.

Such as the screenshots that an agent keeps while it shortens what is before them.
"""


# --- Reading


class RequestMembers:
    """The members of a request, `null` in the place of the conversation, read when asked for.

    Requests with the same members share them.
    """

    __slots__ = ("_context_key", "_params", "json")

    def __init__(self, json: Mapping[str, JsonText]) -> None:
        self.json = json
        """Each member by its name, in their order."""
        self._params: dict[str, Json] | None = None
        self._context_key: bytes | None = None

    @property
    def params(self) -> dict[str, Json]:
        """What they say."""
        if self._params is None:
            self._params = {name: member.value for name, member in self.json.items()}
        return self._params

    @property
    def context_key(self) -> bytes:
        """Equal for requests that may continue one another: same tools, same instructions."""
        if self._context_key is None:
            self._context_key = context_key(self.params)
        return self._context_key


def members_of(params: Mapping[str, Json]) -> RequestMembers:
    """The members with these values."""
    return RequestMembers({name: JsonText(None, value) for name, value in params.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Supplied:
    """Token ids that the model server was asked with in the place of the request's messages."""

    held: int
    """How many of them the conversation had before: prompt and reply of the call it continues."""
    prompt: TokenPath | None
    """All of them; None where a prefix of them is on a span that is missing."""

    @property
    def new(self) -> int | None:
        """How many of them are of messages that came since; None where that is not known."""
        return self.prompt.length - self.held if self.prompt else None


@dataclass(slots=True, eq=False)
class Exchange:
    """One model call: its request, its response, and how it ended."""

    span_id: str
    start_time_ns: int
    end_time_ns: int | None
    process: str
    """The process that made the call; `started` and `ended` compare only within one."""
    started: int
    """The rollout's logical clock when the call began."""
    ended: int
    """The rollout's logical clock when the last byte of the reply had come."""
    path: str
    status: str
    error: dict[str, str] | None
    attempts: int
    status_code: int | None
    policy_version: str | int | None
    stream: bool
    response_id: str | None
    """As capture found it without reading the response; see `reply_id`."""
    key: str | None
    """The member of the request that holds the conversation, such as `messages`."""
    members: RequestMembers
    """The members of the request, but the conversation."""
    raw_request: str | None
    """The request's text, where it is no JSON object."""
    prompt: MessagePath | None
    """The conversation of the request; None where it has none, or where that is not known."""
    prompt_is_known: bool
    """False if a span with a prefix of the conversation is missing."""
    body: str | JsonText | None
    """The response's text; prompt token ids are replaced by `{PACKED: index}`. None where
    nothing came, or events did."""
    events: str | None
    """The packed events of a streamed response, instead of `body`."""
    prompts: list[TokenPath | None]
    """The prompt token ids; None in the place of those of which a prefix is missing."""
    damage: list[str]
    """Warnings: what this span should hold and does not."""
    source: str = EXACT_SOURCE
    """Where it was read: `exchange`, our own span, or the name of a dialect."""
    lost: list[str] = field(default_factory=list)
    """What its dialect does not keep of this call, in words; [] for our own span."""
    supplied: Supplied | None = None
    """Token ids that a gateway sent for the messages; None: the messages were sent alone."""
    session: str | None = None
    """The session of its client, as a header of the request named it; None where none did."""
    refused: str | None = None
    """Names of fields that would have been added to ask for token ids, and that the server refuses
    at this path, with commas; None: it refused none."""
    policy_model: str | None = None
    """The model that is trained, as it was configured; None where it was not."""
    logprobs_mode: str | None = None
    """`raw` or `processed`, as it was configured for the server; None where it was not."""
    last_policy_version: str | int | None = None
    """The policy version when the reply had come; None: that of the call, or not known."""
    side_call: str | None = None
    """What rules of the user's own said when it was recorded: why it is a side call, "" where it
    is none. None: they said nothing, the rules of this version decide."""
    added: str | None = None
    """Members that were added to what the client wrote, as JSON. None: the client wrote all."""
    form: Form = USUAL
    """What of the reply was not as usual."""
    retried: Sequence[Retried] = ()
    """The replies after which the client asked once more."""
    has_blobs: bool = False
    """True if values of the response are beside the span: they are read when somebody asks."""
    tokens_first: bool = False
    """True if the tokens of the response will be asked for: it is read with them, in one pass."""
    _reply: Json = field(default=None, init=False)
    _is_read: bool = field(default=False, init=False)
    """Whether `_reply` is what the response says; it is parsed when somebody asks."""
    _contradictions: Sequence[str] = field(default=(), init=False)

    @property
    def params(self) -> dict[str, Json]:
        """The members of the request in their order; None in the place of the conversation."""
        return self.members.params

    @property
    def context_key(self) -> bytes:
        """Equal for requests that may continue one another: same tools, same instructions."""
        return self.members.context_key

    @property
    def reply(self) -> Json:
        """The response as JSON, a stream in unstreamed shape; None where it is no JSON.

        Prompt token ids are still replaced: see `token_ids`.
        """
        if not self._is_read:
            read = partial((api_of(self.path) or ModelApi()).read, tokens=self.tokens_first)
            try:
                self._reply = self._parse(read)
            except (ValueError, RecursionError):
                self._reply = None
            self._is_read = True
        return self._reply

    @property
    def contradictions(self) -> Sequence[str]:
        """What in its stream contradicts itself, as sentences; the reply may not be the sampled."""
        return self._contradictions if self.events is None or self.reply is not None else ()

    @property
    def reply_id(self) -> str | None:
        """The response id; None where the server gave none."""
        api = api_of(self.path)
        name = "id" if api is None else api.id_name
        found = self.reply.get(name) if isinstance(self.reply, OBJECT) else None
        return found if isinstance(found, str) and found else self.response_id

    @property
    def body_text(self) -> str | None:
        """`body`, made if nobody has asked for it before."""
        return self.body.text if isinstance(self.body, JsonText) else self.body

    def take(self, found: Any, whole: JsonText) -> None:
        """Take a response that was read as `REPLY`, with what gives its text: it is the body."""
        self.body = whole
        api = api_of(self.path)
        usual = None if api is None else api.usual
        is_usual = usual is not None and type(found) is usual.kind
        if api is not None and is_usual and self.events is None:
            self._reply = api.reply_of(found, whole)
            self._is_read = self._reply is not None

    def token_path(self, value: Json) -> TokenPath | None:
        """The ids that a field of `reply` stands for; None where there are none."""
        if isinstance(value, dict) and isinstance(index := value.get(PACKED), int):
            return self.prompts[index] if 0 <= index < len(self.prompts) else None
        if not isinstance(value, list | array) or not value:
            return None
        if isinstance(value, list) and set(map(type, value)) != {int}:
            return None  # no token ids, whatever it is called
        return extend_tokens(None, value)

    def request(self) -> Json:
        """The whole request as it was on the wire; its text where it was no JSON object."""
        if self.raw_request is not None:
            return self.raw_request
        if self.key is None:
            return copy_json(self.params)
        return {**copy_json(self.params), self.key: copy_json(path_messages(self.prompt))}

    def response(self) -> Json:
        """The whole response as it was on the wire, a stream in unstreamed shape.

        Its text where it is no JSON; None where nothing came.
        """
        try:
            return wholly_read(self._parse(loads_bounded, self._with_ids))
        except (ValueError, RecursionError):
            return self._with_ids(self._text())

    def before(self) -> dict[str, list[Json]]:
        """The members that were added to the request, each with a list of the value that the client
        wrote in its place, or with an empty one. ValueError where nobody wrote them.
        """
        before = {} if self.added is None else _read_added(self.added)
        if before is None:
            raise ValueError(f"expected lists by the names of members, got {self.added!r:.40}")
        return before

    def asked(self) -> Json:
        """The whole request as its client wrote it, before anything was added to it."""
        asked, before = self.request(), self.before()
        if not isinstance(asked, dict):
            return asked
        written = {name: values[0] for name, values in before.items() if values}
        return {name: asked[name] for name in asked if name not in before} | written

    def reply_bytes(self) -> bytes | None:
        """The response as it was on the wire, without its `Content-Encoding`.

        None where nothing came, and where a part of it is on a span that is missing. ValueError
        for what nobody recorded.
        """
        if self.is_unanswered or None in self.prompts:
            return None
        form = self.form
        if form.raw is not None:
            return unpacked(form.raw)
        text = self._with_ids(self._text(), form.separator or ",")
        if form.framing == "lines":
            return as_lines(text.encode())
        return (text if form.line_end is None else text.replace("\n", form.line_end)).encode()

    def _with_ids(self, text: str, separator: str = ",") -> str:
        """The response's text, or that of its events, with prompt token ids and blobs."""

        def ids(match: re.Match[str]) -> str:
            path = self.prompts[int(match[1])] if int(match[1]) < len(self.prompts) else None
            if path is None:
                return "null"
            return f"[{separator.join(map(str, path.to_list()))}]"

        return self._with_blobs(_packed_ids(ids, text) if self.prompts else text)

    def missing_blobs(self) -> list[str]:
        """Why values of the response cannot be read: tokens do not need them."""
        return missing_in(self.body_text or self.events or "") if self.has_blobs else []

    def _with_blobs(self, text: str) -> str:
        return with_blobs(text) if self.has_blobs else text

    def text(self) -> tuple[str | None, bool]:
        """The response as text, a stream in unstreamed shape; and whether it is strict JSON.

        None where nothing came, or events of an unknown shape or that contradict each other.
        """
        text, is_strict = self.body_text, False
        if self.events is not None:
            found = self._merged(events_of(self.events))
            body, is_strict = found.body, found.is_strict
            try:
                is_told = body is None or found.contradictions
                text = None if is_told else (dumps_strict if is_strict else dumps)(body)
            except (ValueError, RecursionError):
                text = None
        if text is not None:
            text = self._with_blobs(text)
        return text, text is not None and (is_strict or cut_value(text) is not None)

    @property
    def is_unanswered(self) -> bool:
        """True if no response came, or none is left on the span."""
        return self.body is None and self.events is None

    def _text(self) -> str:
        if self.events is not None:
            try:
                return "\n\n".join(unpack_events(self.events))
            except ValueError:  # nobody packed them: they stay as they are
                return self.events
        return self.body_text or ""

    def _parse(
        self, read: Callable[[str], Json], change: Callable[[str], str] | None = None
    ) -> Json:
        """The response as JSON, None where nothing came. ValueError where it is no JSON.

        change: changes its text, or that of its events, before it is read. None: as it is there.
        """
        if self.is_unanswered:
            return None
        if self.events is None:
            text = self._text()
            return read(text if change is None else change(text))
        merged = self._merged(events_of(self.events) if change is None else change(self._text()))
        self._contradictions = merged.contradictions
        if merged.body is None:
            raise ValueError("events of an unknown shape")
        return merged.body

    def _merged(self, events: str | Sequence[str]) -> Merged:
        api = api_of(self.path)
        choices = 1 if api is None else api.choices_asked(self.params)
        return merge(events, choices, self.path)


_read_added: Bounded[dict[str, list[Json]]] = Bounded(dict[str, list[Json]])


def unread(exchange: Exchange, error: Exception) -> Exchange:
    """The exchange without what was said in it: its request or response has an unknown shape."""
    return replace(
        exchange,
        members=RequestMembers({}),
        prompt=None,
        prompt_is_known=False,
        body=None,
        events=None,
        prompts=[],
        damage=[*exchange.damage, f"its request or response cannot be read ({error!r:.200})"],
    )


PACKED = "~packed"
"""The member of an object that replaces token ids in a response; the span has them elsewhere: their
number among these. Few responses have the first character of it, which is quickly looked for."""
PLACEHOLDER = f'{{"{PACKED}":'

_packed_ids = re.compile(rf"{re.escape(PLACEHOLDER)}(\d{{1,9}})\}}").sub
