"""The calls of one document, as exchanges of a trajectory that says what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

from otel_rollout.rebuild.dialects import Fact, ForeignCall, exchange_of, lost_in
from otel_rollout.spans import (
    PACKED,
    Exchange,
    SpanRecord,
    TokenPath,
    digest_of,
    extend_tokens,
    nanoseconds_of,
)
from otel_rollout.trajectory import Trajectory, sentences
from otel_rollout.wire import Json, MessagePath, dumps, extend

Members = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of documents."""

    name: str
    """Its name, in `Completion.exchange.source`."""
    recognises: Callable[[Members], bool]
    """True if a JSON object is a document of it."""
    read: Callable[[Members], Iterator[Trajectory]]
    """The trajectories of a document; the first is its own. Raises anything for another shape."""
    is_list: Callable[[Json], bool] | None = None
    """True if a JSON value is a list which is a document. None: no list is."""
    list_member: str = ""
    """The member under which such a list is a document."""
    rollout_of: Callable[[Members], str] | None = None
    """The id of the rollout of a document which is one call of it: `read` takes an object with its
    `rollout_id`, its `entries`, and `is_incomplete`. None: a document is a trajectory."""


class Calls:
    """Model calls of a document in their order.

    source: the name of its format. loses: facts that the format does not record.
    id_: of the trajectory; the ids of its spans follow from it.
    """

    def __init__(self, source: str, loses: frozenset[Fact], id_: str) -> None:
        self._source, self._loses, self._id = source, loses, id_
        self._exchanges: list[Exchange] = []
        self._prompt: tuple[Sequence[Json], MessagePath | None] = (), None
        self._time = 0
        self._began: int | None = None
        """The first time that is known."""
        self._after: list[Json] = []
        self._tokens: tuple[list[int], TokenPath] | None = None

    def add(self, call: ForeignCall, time_ns: int | None = None) -> None:
        """Add a call. time_ns: when it was made, Unix nanoseconds; it is after those before it."""
        self._time = max(time_ns or 0, self._time + 1)
        if self._began is None and time_ns is not None:
            self._began = self._time
        span = SpanRecord(
            name="",
            trace_id="",
            span_id=digest_of(f"{self._id} {len(self._exchanges)}".encode())[:8].hex(),
            parent_span_id=None,
            start_time_ns=self._time,
            end_time_ns=self._time,
            attributes={},
        )
        lost = lost_in(call, self._loses)
        self._after = []
        self._exchanges.append(exchange_of(span, call, self._source, lost, self._path))

    def follow(self, messages: Iterable[Json]) -> None:
        """Note messages that came after the reply of the last call."""
        self._after += messages

    def _path(self, messages: Sequence[Json]) -> MessagePath | None:
        """The path of messages, which goes on from that of the call before if they do."""
        before, path = self._prompt
        if not all(map(is_, before, messages)) or len(before) > len(messages):
            before, path = (), None
        for message in messages[len(before) :]:
            path = extend(path, message)
        self._prompt = messages, path
        return path

    def prompt_path(self, ids: list[int]) -> TokenPath:
        """Prompt token ids as a path, which shares those of the call before that it begins with."""
        if self._tokens is None or ids[: len(self._tokens[0])] != self._tokens[0]:
            path = extend_tokens(None, ids)
        else:
            path = extend_tokens(self._tokens[1], ids[len(self._tokens[0]) :])
        self._tokens = ids, path
        return path

    def trajectory(self, *, also_warns: Iterable[str] = (), **facts: Any) -> Trajectory:
        """The trajectory of the calls. also_warns: more warnings. facts: parameters of it."""
        lost = {fact for exchange in self._exchanges for fact in exchange.lost}
        warning = sentences.FROM_DOCUMENT(
            format=repr(self._source), lost="; ".join(sorted(lost)) or "all of a call"
        )
        last = self._exchanges[-1] if self._exchanges else None
        key = (last.reply_id or f"span-{last.span_id}", 0) if last else None
        return Trajectory(
            **{
                "id": self._id,
                "status": "unknown",
                "start_time_ns": self._began or 0,
                "end_time_ns": None if self._began is None else self._time,
                "exchanges": self._exchanges,
                "appended": {key: self._after} if key and self._after else {},
                "warnings": [warning, *also_warns],
                "sealed": True,
                **facts,
            }
        )


def sampled(
    message: Json, *, ids: Sequence[int] | None = None, logprobs: Sequence[float] | None = None
) -> dict[str, Json]:
    """A choice of a chat completion: what was sampled, with its token ids where they are known."""
    choice: dict[str, Json] = {"index": 0, "message": message}
    if ids is not None:
        choice["token_ids"] = list(ids)
    if logprobs is not None:
        choice["logprobs"] = {"token_logprobs": list(logprobs)}
    return choice


def chat_reply(
    choice: Json, *, model: str | None, usage: Json, prompt: TokenPath | None
) -> dict[str, Json]:
    """A chat completion with one choice; `prompt`: of `ForeignCall.prompts`."""
    members = {"model": model, "usage": usage, "prompt_token_ids": prompt and {PACKED: 0}}
    return {
        "object": "chat.completion",
        "choices": [choice],
        **{name: value for name, value in members.items() if value is not None},
    }


def list_of(value: Json, *types: type) -> list[Any] | None:
    """A list of numbers of these types; None for anything else, and for an empty one."""
    is_list = isinstance(value, list) and len(value) > 0 and set(map(type, value)) <= set(types)
    return value if is_list else None


def text(value: Json) -> str | None:
    """A text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


def nanoseconds(value: Json) -> int | None:
    """Unix nanoseconds of seconds, or of a time as ISO 8601 writes it; None: it is neither."""
    if isinstance(value, str):
        with suppress(ValueError):
            return nanoseconds_of(value.strip())
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value * 1e6) * 1_000 if is_number and 0 < value < 1e11 else None


def digest(data: Json) -> str:
    """Hex digits that name the content of a document."""
    return digest_of(dumps(data).encode()).hex()
