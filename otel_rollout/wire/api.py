"""The contract of a model API: how its requests, replies and streams are read.

One subclass of `ModelApi` for each API, in a module of its own; `otel_rollout.wire.apis` lists
them. The defaults are OpenAI's, so an API overrides only what it does in another way. Every
method is pure and takes wire JSON as it came, unchecked: a request or reply of another shape than
expected gives None or nothing, `merge` alone may raise. The agent's thread asks `path_of`,
`choices_asked`, `token_id_params`, `retrieved_id`, `framing` once for each call, `is_last` for each
chunk of a stream, and merges a stream that did not end as it should. The rest is asked when a
rollout is rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from otel_rollout.wire.conversation import MessagePath, extend
from otel_rollout.wire.json import (
    Bounded,
    Choice,
    Chunk,
    Json,
    JsonText,
    Message,
    Params,
    Reply,
    loads_bounded,
)
from otel_rollout.wire.merging import Merging
from otel_rollout.wire.message import Shapes
from otel_rollout.wire.params import sampling_params
from otel_rollout.wire.servers import usage
from otel_rollout.wire.sse import read_all

TAIL = 128
"""How many of the last bytes of a stream `ModelApi.is_last` is given."""

Framing: TypeAlias = Literal["events", "frames", "lines", "array"]
"""How the chunks of a stream are told apart: server-sent events, Amazon's binary frames, one JSON
object on each line, or the elements of one JSON array."""

TRUNCATED = (
    *("length", "limit", "max_tokens", "max_output_tokens"),
    *("model_context_window_exceeded", "model_length"),
)
"""Finish reasons of replies that a length limit ended, in lower case; proxies pass on those of
other APIs."""

_WHOLE = (
    *("stop", "stop_sequence", "eos", "eos_token", "word", "end_turn", "complete", "completed"),
    *("tool_call", "tool_calls", "tool_use", "function_call"),
)
"""Finish reasons of replies that the model ended itself, or a stop string did."""
_FAILED = ("error", "failed", "network_error")
"""Finish reasons of replies that an error of the server ended."""
_ABORTED = ("abort", "aborted")
"""Finish reasons of replies that the server gave up, as it does around an update of the weights."""

_LEAST = 2048
"""Characters of a reply; a shorter one costs less to be read as JSON."""
_ends_with_done = re.compile(rb"\ndata: ?\[DONE\]").search


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled choice of a reply, with the conversation that it answers."""

    index: int
    """Index of the choice in its reply, from 0."""
    choice: Choice
    """The choice as the server sent it, without a prompt that it echoes."""
    items: Sequence[Json]
    """What was sampled, in wire form: one message, or output items; empty if nothing was."""
    prompt: MessagePath | None
    """The conversation that was asked with; None where it is empty or not known."""


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one stream, parsed."""

    chunks: list[Chunk]
    """The JSON objects of the events, in order."""
    done: bool
    """True if `[DONE]` came."""
    error: Json
    """The error that the server reported inside the stream; None if it reported none."""


class ModelApi:
    """How one model API is read. Stateless; one instance serves all threads."""

    provider: str | None = None
    """Whose API it is, by the GenAI conventions' name; other servers serve it, too. None: no one's
    that has a name there."""
    paths: tuple[str, ...] = ()
    """Ends of the paths at which it is asked, such as `/chat/completions`."""
    model_path: re.Pattern[str] | None = None
    """Finds the end of a path in which the model is named, its group `model`. None: none has it."""
    conversation: str = "messages"
    """The member of a request that holds the conversation as a list of messages."""
    text: str = "prompt"
    """The member of a request that may hold a text or token ids instead."""
    shapes: Shapes = Shapes()
    """The shapes of parts that messages of this API may have beside plain text."""
    instructions: tuple[str, ...] = ()
    """Members of a request that are instructions, beside messages."""
    context: tuple[str, ...] = ("tools",)
    """Members of a request that the model sees before the conversation; `a.b` is `b` in `a`."""
    finish_names: tuple[str, ...] = ("finish_reason",)
    """Members of a choice that may say why it ended, the best first."""
    stop_names: tuple[str, ...] = ("stop_reason", "matched_stop")
    """Members of a choice that may hold the stop string or token id that ended it."""
    settings: tuple[str, ...] = ()
    """Members of a request that are objects of sampling parameters."""
    choices_name: str | None = "n"
    """The sampling parameter that asks for several choices. None: a reply has one."""
    choices_member: str = "choices"
    """The member of a reply that lists its choices."""
    token_id_members: Mapping[str, Params] = {}
    """Members that ask for token ids and log-probabilities, by the end of the path."""
    id_name: str | None = "id"
    """The member of a reply that is its id. None: replies of this API have none."""
    model_name: str = "model"
    """The member of a reply that names the model which answered."""
    usage_name: str = "usage"
    """The member of a reply that counts its tokens."""
    count_names: tuple[str, ...] = ()
    """Members of a reply that count its tokens without standing in `usage_name`."""
    delta_name: str | None = None
    """The member of a stream's chunks that is the next text of the model, and is nothing else in
    them. None: there is no such member."""
    last_marks: tuple[bytes, ...] = (b"[DONE]",)
    """Texts of which one is in the last event of a whole stream: only then `is_last` is asked."""
    shapes_vary: bool = False
    """True if its paths may be asked in several shapes, some of which are not read."""
    usual: Bounded[Any] | None = None
    """Reads replies that have only what servers usually send, as a type which names it. None: all
    are read as JSON."""
    keeps_tools: bool = False
    """True if a request that continues a reply by id has the tools of that reply's request."""

    # --- requests

    def path_of(self, path: str) -> str | None:
        """The end of `path` (without its query) by which the API is recognised; None if by none."""
        if self.model_path is not None:
            found = self.model_path.search(path)
            return found[0] if found else None
        return next((end for end in self.paths if path.endswith(end)), None)

    def choices_asked(self, params: Params) -> int:
        """Number of choices that a request asks for."""
        count = self.sampling(params).get(self.choices_name) if self.choices_name else None
        return count if isinstance(count, int) else 1

    def provider_of(self, path: str) -> str | None:
        """Whose API is asked at a path: `provider`, unless the path is only another server's."""
        return self.provider

    def token_id_params(self, path: str) -> Params | None:
        """Members that ask for token ids and log-probabilities; None if nothing does at `path`."""
        for end, members in self.token_id_members.items():
            if path.endswith(end):
                return members
        return None

    def request_model(self, path: str, params: Params) -> str | None:
        """The model that a request names, in its body or its path; None where it names none."""
        if self.model_path is not None:
            found = self.model_path.search(path.partition("?")[0])
            return unquote(found["model"]) if found else None
        model = params.get("model")
        return model if isinstance(model, str) else None

    def tools(self, params: Params) -> list[Json] | None:
        """The tool definitions of a request; None where it has none."""
        tools = params.get("tools")
        return tools if isinstance(tools, list) else None

    def instructions_of(self, params: Params) -> list[Message]:
        """The instructions beside the messages of a request, as messages."""
        found = [params[name] for name in self.instructions if params.get(name)]
        return [
            {**(value if isinstance(value, dict) else {"content": value}), "role": "system"}
            for value in found
        ]

    def sampling(self, params: Params) -> dict[str, Json]:
        """The sampling parameters that a request sets, those of its `settings` among them."""
        found = sampling_params(params)
        for name in self.settings:
            nested = params.get(name)
            found |= nested if isinstance(nested, Mapping) else {}
        return found

    def asked(self, params: Params, prompt: MessagePath | None) -> MessagePath | None:
        """The conversation of a request, given its list of messages if it has one.

        A text stands for the message of a user.
        """
        text = params.get(self.text) if prompt is None else None
        return extend(None, {"role": "user", "content": text}) if text else prompt

    def previous_reply(self, params: Params) -> Json:
        """Id of the reply that a request continues, where it names one; else None."""
        return params.get("previous_response_id")

    def conversation_id(self, params: Params) -> Json:
        """Id of the conversation on the server that a request continues; None if of none."""
        conversation = params.get("conversation")
        return conversation.get("id") if isinstance(conversation, Mapping) else conversation

    # --- streams

    def framing(self, path: str) -> Framing | None:
        """The framing of streams at `path` where the content type names none; None: not known."""
        return None

    def is_last(self, tail: bytes) -> bool:
        """True if the last event of a whole stream is in its last `TAIL` bytes.

        An event follows a line break, also the first one: a stream shorter than `TAIL` is given
        with one before it. An API whose last event is too long for that is known by `is_whole`
        alone.
        """
        return _ends_with_done(tail) is not None

    def read_chunks(self, datas: Sequence[str]) -> list[Json] | None:
        """The chunks that events have; None if one is no strict JSON, or nested too deep.

        Log-probabilities may be cut out in them, to stay so in the merged reply (`PartlyRead`).
        """
        return read_all(datas)

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        """True if these are events of this API. Exclusive among the APIs, as far as possible."""
        return any(map(self.is_own, chunks))

    def is_own(self, chunk: Chunk) -> bool:
        """True if this event shows that a stream is one of this API."""
        return False

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        """The reply that the server would have sent unstreamed; it may change the chunks.

        merging: puts pieces together, and takes what contradicts each other in them.
        It may raise AttributeError, KeyError, TypeError and ValueError for chunks that only
        seemed to be of this API.
        """
        raise TypeError(f"{type(self).__name__} has no streams")

    def is_whole(self, events: Events, body: Json, merging: Merging) -> bool | None:
        """True if the server said all it had to say of the choices that were asked for.

        None: only the end of the connection shows it. `body` is the merged reply, None if it could
        not be merged; `merging` is what it was merged with.
        """
        return events.error is None and (events.done or any(map(self.ends, events.chunks)))

    def ends(self, chunk: Chunk) -> bool:
        """True if this event comes only at the end of a whole reply."""
        return False

    # --- replies

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        """The choices of a reply, in its order; `prompt` is the request's list of messages."""
        items = self.sampled_items(reply)
        if items is not None:
            yield Sampled(0, reply, items, self.asked(params, prompt))

    def sampled_items(self, reply: Reply) -> Sequence[Json] | None:
        """What was sampled, where a reply is itself the one choice; None: it has none."""
        return None

    def empty_because(self, reply: Reply) -> str | None:
        """Why the server sampled nothing, as its reply says; None where it does not say."""
        return None

    def is_unread(self, reply: Json) -> bool:
        """True if the reply has a shape that is not read, where `shapes_vary`.

        It has no completions, and the trajectory says so. None: a stream that no API recognises.
        """
        return False

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        """How many tokens the server counted, in OpenAI's words; None where it did not say."""
        return usage(reply)

    def finish_reason(self, choice: Choice) -> str | None:
        """Why sampling ended, as the server said it; None where it did not."""
        reason = next(filter(None, map(choice.get, self.finish_names)), None)
        return reason if isinstance(reason, str) else None

    def stop_reason(self, choice: Choice) -> str | int | None:
        """The stop string or token id that ended it; None where the server did not say."""
        reasons = map(choice.get, self.stop_names)
        return next((r for r in reasons if isinstance(r, str | int) and r != ""), None)

    def is_truncated(self, choice: Choice, reply: Reply) -> bool:
        """True if the server says that a length limit ended it."""
        return _normalised(self.finish_reason(choice)) in TRUNCATED

    def is_stopped(self, choice: Choice, reply: Reply) -> bool:
        """True if neither the model nor a length limit ended it: a filter, an abort, an error.

        Also for a reason that is not known, and for one that the server sent as null.
        """
        reason = self.finish_reason(choice)
        if reason is None:
            return any(name in choice for name in self.finish_names)
        return _normalised(reason) not in _WHOLE and not self.is_truncated(choice, reply)

    def is_aborted(self, choice: Choice) -> bool:
        """True if the server gave the reply up while the model was sampling it."""
        return str(self.finish_reason(choice)).lower() in _ABORTED

    def is_failed(self, choice: Choice) -> bool:
        """True if an error of the server ended it, as its choice reports."""
        return bool(choice.get("error")) or _normalised(self.finish_reason(choice)) in _FAILED

    def read(self, text: str, *, tokens: bool = False) -> Json:
        """What the text of a reply says. ValueError where it is no JSON, or nested too deep.

        tokens: read token ids and log-probabilities with it; else they may be left to be read when
        somebody asks for them (`PartlyRead`), which costs more in all.
        """
        usual = self.usual if tokens else self.usual_but_tokens()
        found = usual(text) if usual is not None and len(text) > _LEAST else None
        reply = None if found is None else self.reply_of(found, JsonText(text))
        return loads_bounded(text) if reply is None else reply

    def usual_but_tokens(self) -> Bounded[Any] | None:
        """What reads the same as `usual` with the tokens cut out, where they can be."""
        return self.usual

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        """What `read` gives of a reply that was read as `usual` already, and is used up by this.

        None: read it by its text. whole: that text, for what is asked of it later.
        """
        return None

    def outcome(self, reply: Json) -> str | None:
        """How the call ended by its reply, as `Completion.status`; None: not known."""
        return None

    # --- replies that are made in the background

    def retrieved_id(self, path: str) -> str | None:
        """Id of the reply that a request to `path` retrieves; None if it retrieves none."""
        return None

    def is_unfinished(self, reply: Reply) -> bool:
        """True if the reply only says that it is still being made."""
        return False

    # --- people

    def tool_name(self, tool: Message) -> str | None:
        """The name inside a tool definition; None where it is simply the member `name`."""
        return None


def _normalised(reason: str | None) -> str:
    return str(reason).lower().replace("-", "_")
