"""APIs whose replies have `choices`, as OpenAI's: what chat and text completions have in common.

Pure. Every field that a server puts on a chunk survives: texts of messages, token ids and
log-probabilities are chained, of other fields the last value wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, groupby
from typing import Any, TypeAlias

from msgspec import UNSET

from otel_rollout.wire.api import Events, ModelApi
from otel_rollout.wire.columns import (
    ENTRIES,
    LOGPROBS,
    Columns,
    columns_of_logprobs,
    id_array,
    listings,
    partly_read,
)
from otel_rollout.wire.json import (
    OBJECT,
    Bounded,
    Choice,
    Chunk,
    Cut,
    Json,
    JsonText,
    PartlyRead,
    Reply,
    as_objects,
    list_of,
    member_of,
    struct_of,
)
from otel_rollout.wire.merging import (
    SO_FAR,
    Element,
    Elements,
    GrowingParts,
    Merging,
    finish,
    index_of,
)
from otel_rollout.wire.servers import IDS, OF_CHOICE, OF_REPLY, VersionSpan, version_spans

_EXTENSION = "sglext"
"""SGLang's own fields of a reply, sent in one chunk or in two."""
_NAMING = {OF_CHOICE, *OF_REPLY}
"""Members of a choice, and of a reply, in which a server may name versions of its weights."""
_PADDING = "obfuscation"
"""Noise on the chunks of a stream, so that their lengths reveal nothing."""


def indexed_choices(reply: Reply, name: str = "choices") -> Iterator[tuple[int, Choice]]:
    """`(index, choice)` of each choice; their positions where the server gave no index from 0 on,
    or one to several.

    name: the member of the reply that is their list.
    """
    listed = reply.get(name)
    choices = listed if isinstance(listed, list) else ()
    found: dict[int, Choice] = {}
    for position, choice in enumerate(choices):
        if isinstance(choice, OBJECT):
            index = index_of(choice.get("index"))
            found[position if index is None else index] = choice
    if len(found) < len(choices):
        found = {place: each for place, each in enumerate(choices) if isinstance(each, OBJECT)}
    yield from found.items()


def _replies(logprobs: Any, ids: Any) -> Any:
    """The type of replies whose choices have log-probabilities and token ids of these types."""
    choice = {
        **dict.fromkeys(("index", "message", "text", "finish_reason", "stop_reason"), Any),
        "matched_stop": Any,
        **dict.fromkeys(("response_token_ids", "prompt_token_ids", "meta_info"), Any),
        **dict.fromkeys(("routed_experts", "hidden_states", "content_filter_results"), Any),
        **dict.fromkeys(("native_finish_reason", "error", *SO_FAR), Any),
        "logprobs": logprobs,
        "token_ids": ids,
    }
    reply = {
        **dict.fromkeys(("id", "object", "created", "model", "usage", "service_tier"), Any),
        **dict.fromkeys(("system_fingerprint", "prompt_logprobs", "prompt_token_ids"), Any),
        **dict.fromkeys(("prompt_text", "kv_transfer_params", "metadata", "metrics"), Any),
        **dict.fromkeys(("timings", "provider", _EXTENSION, "prompt_filter_results"), Any),
        "choices": list_of(struct_of("Choice", choice)),
        # llama.cpp's own, which are of a reply without choices
        **dict.fromkeys(("index", "content", "id_slot", "stop", "generation_settings"), Any),
        **dict.fromkeys(("tokens_predicted", "tokens_evaluated", "tokens_cached"), Any),
        **dict.fromkeys(("prompt", "has_new_line", "truncated", "stop_type"), Any),
        "stopping_word": Any,
        "tokens": list[int],
        "completion_probabilities": ENTRIES,
    }
    return struct_of("Reply", reply)


REPLY = _replies(LOGPROBS | None, list[int] | None)
"""What servers put on replies; one with anything else is read as a whole."""


@cache
def _but_tokens() -> Bounded[Any]:
    """Reads replies that are as usual, less than half as dear; made when it is first needed."""
    return Bounded(_replies(Cut, Cut), is_read=False)


_LOGPROBS = struct_of("Logprobs", {"content": Cut, "refusal": None})
_DELTA = struct_of(
    "Delta",
    {
        "index": int | None,
        "delta": Any,
        **dict.fromkeys(("finish_reason", "native_finish_reason"), str | None),
        **dict.fromkeys(("stop_reason", "matched_stop"), int | str | None),
        "token_ids": list[Any] | None,
        "logprobs": _LOGPROBS | None,
    },
)
_CHUNK = struct_of(
    "Chunk",
    {
        **dict.fromkeys(("id", "object", "model", "service_tier", "provider"), str | None),
        **dict.fromkeys(("system_fingerprint", _PADDING), str | None),
        "created": int | None,
        "usage": dict[str, Any] | None,
        "prompt_token_ids": list[Any] | dict[str, Any] | None,
        "choices": list_of(_DELTA),
    },
)
"""What servers put on chunks; a stream with anything else is read as a whole."""
_chunks: Bounded[Any] = Bounded(list_of(_CHUNK))
_AT_ONCE = 1 << 18
"""Characters of chunks that are read in one call, while no other thread runs: 0.4 ms."""


def _taken_columns(choice: Any) -> dict[str, Columns | Sequence[int] | None]:
    """The arrays of a choice by the names of their members, which are taken out of it.

    What is cut out stays so.
    """
    found: dict[str, Columns | Sequence[int] | None] = {}
    if choice.logprobs and type(choice.logprobs) is not Cut:
        found["logprobs"], choice.logprobs = columns_of_logprobs(choice.logprobs), UNSET
    if choice.token_ids and type(choice.token_ids) is not Cut:
        found["token_ids"], choice.token_ids = id_array(choice.token_ids), UNSET
    return found


class ChoicesApi(ModelApi):
    """An API whose streams are chunks with choices."""

    usual = Bounded(REPLY, is_read=False)

    def usual_but_tokens(self) -> Bounded[Any]:
        return _but_tokens()

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        if found.completion_probabilities is not UNSET:
            return None
        return partly_read(found, whole, "choices", _taken_columns)

    def read_chunks(self, datas: Sequence[str]) -> list[Json] | None:
        found = list[Any]()
        count = 1 + len(datas) * _AT_ONCE // (1 + sum(map(len, datas)))
        with suppress(ValueError):  # of another shape
            for start in range(0, len(datas), count):
                text = f"[{','.join(datas[start : start + count])}]"
                if (chunks := _chunks(text)) is None:
                    return super().read_chunks(datas)
                found += chunks
            return _with_lists(as_objects(_joined(found)))
        return super().read_chunks(datas)

    def is_own(self, chunk: Chunk) -> bool:
        return isinstance(chunk.get("choices"), list)

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        return merge_choices(chunks, merging)

    def is_whole(self, events: Events, body: Json, merging: Merging) -> bool:
        if super().is_whole(events, body, merging):
            return True
        sampled = (body or {}).get("choices", ())
        finished = sum(isinstance(one.get("finish_reason"), str) for one in sampled)
        is_proved = events.error is None and not merging.proves_no_end
        return is_proved and finished >= max(1, merging.asked)


def merge_choices(chunks: Sequence[Chunk], merging: Merging) -> dict[str, Any]:
    """The reply that a stream of chunks with choices amounts to."""
    body: dict[str, Any] = {}
    choices = Elements()
    for chunk in chunks:
        for key, value in chunk.items():
            if key == "choices":
                for merged, choice in choices.each(value):
                    _merge_choice(merged, choice, merging)
            elif key == _EXTENSION and isinstance(value, dict):
                body[key] = {**(body.get(key) or {}), **value}
            elif (value is not None or key not in body) and key != _PADDING:
                body[key] = value
    found = {place if c.index is None else c.index: c for place, c in enumerate(choices.in_order())}
    _check(chunks, choices, merging)
    if body.get("object") == "chat.completion.chunk":
        body["object"] = "chat.completion"
    _add_versions(body, found, chunks)
    body["choices"] = [_with_cut(finish({"index": i, **each})) for i, each in found.items()]
    return body


def _check(chunks: Sequence[Chunk], choices: Elements, merging: Merging) -> None:
    """Find what contradicts itself in merged choices.

    A stream is of two replies where its model changes, or its id within a choice; some servers
    give each chunk an id of its own.
    """
    merging.check_choices(choices)
    for choice in choices.in_order():
        if isinstance(calls := member_of(choice, "message", "tool_calls"), Elements):
            merging.check_calls(calls.in_order())
    merging.check_repeats()
    ids: dict[int, list[str]] = {}
    for chunk in chunks:
        merging.same("model", chunk.get("choices") and chunk.get("model"))
        if (id_ := chunk.get("id")) and isinstance(id_, str):
            for choice in chunk.get("choices") or ():
                ids.setdefault(index_of(choice.get("index")) or 0, []).append(id_)
    for found in ids.values():
        different = dict.fromkeys(found)
        if len(different) > 1 and not 2 < len(different) == len(found):
            merging.changed("id", *[*different][:2])


def _joined(chunks: list[Any]) -> list[Any]:
    """The chunks; those that follow each other and only add to the same choice are one."""
    found: list[Any] = []
    pieces: list[_Piece] = []
    for chunk in chunks:
        piece = _taken(chunk)
        if piece and pieces and chunk == found[-1] and not chunk.choices[0].finish_reason:
            pieces.append(piece)
            continue
        _put_back(found, pieces)
        found.append(chunk)
        pieces = [piece] if piece else []
    _put_back(found, pieces)
    return found


_Piece: TypeAlias = tuple[str, list[Json], bytes]
"""Text, token ids and the list of log-probabilities that a chunk adds; empty where it has none."""


def _taken(chunk: Any) -> _Piece | None:
    """What a chunk adds to its one choice, taken out of it. None: it may do more than that."""
    choices = chunk.choices
    if not choices or len(choices) > 1 or chunk.usage or chunk.prompt_token_ids:
        return None
    choice = choices[0]
    delta, ids, logprobs = choice.delta, choice.token_ids or [], choice.logprobs
    if type(delta) is not dict or type(text := delta.get("content")) is not str:
        return None
    if len(delta) > 1 and (len(delta) > 2 or type(delta.get("role")) is not str):
        return None
    listed = b""
    if logprobs:
        listed = b"" if logprobs.content is UNSET else bytes(logprobs.content)
        if listed[:1] != b"[":
            return None
        logprobs.content = UNSET
    if ids:
        choice.token_ids = _TAKEN
    delta["content"], chunk.obfuscation = "", UNSET
    return text, ids, listed


_TAKEN: list[Json] = [None]
"""Stands for token ids that were taken out of a chunk: all such chunks compare equal."""


def _put_back(chunks: list[Any], pieces: list[_Piece]) -> None:
    """Give the last of the chunks all that was taken out of it, and of those that followed it."""
    if pieces:
        choice = chunks[-1].choices[0]
        texts, ids, lists = zip(*pieces, strict=True)
        choice.delta["content"] = "".join(texts)
        if choice.token_ids is _TAKEN:
            choice.token_ids = [*chain.from_iterable(ids)]
        if choice.logprobs:
            choice.logprobs.content = _cut_of(lists)


def _cut_of(lists: Iterable[bytes]) -> Cut:
    """One list with the elements of all, each unread."""
    return Cut(b"[%b]" % b",".join(filter(None, [each[1:-1].strip() for each in lists])))


def _with_lists(chunks: list[Chunk]) -> list[Chunk]:
    """Chunks whose lists of log-probabilities are cut out: each is a list with that one cut."""
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            logprobs = choice.get("logprobs")
            if logprobs is not None and "content" in logprobs:
                text = bytes(logprobs["content"])
                if text.startswith(b"["):
                    logprobs["content"] = [logprobs["content"]]
                elif text == b"null":
                    logprobs["content"] = None
                else:
                    raise ValueError("expected a list of log-probabilities")
    return chunks


def _with_cut(choice: dict[str, Any]) -> Choice:
    """A merged choice, of which the log-probabilities stay cut out if they came so."""
    logprobs = choice.get("logprobs")
    content = member_of(logprobs, "content")
    if not (logprobs and content and isinstance(content[0], Cut)):
        return choice
    rest = b',"refusal":null' if len(logprobs) > 1 else b""
    whole = bytes(_cut_of(map(bytes, content)))
    return PartlyRead({**choice, "logprobs": Cut(b'{"content":%b%b}' % (whole, rest))})


def _merge_choice(merged: Element, choice: dict[str, Any], merging: Merging) -> None:
    adds = merged.ends > 0 and _tokens_in(choice) != 0
    if adds:
        merged["finish_reason"] = None
    is_ended = merging.ended(merged, choice.get("finish_reason"), adds=adds)
    for key, value in choice.items():
        if key == "delta":
            _merge_delta(merged, value or {}, merging)
        elif key == "text":
            merging.field(merged, key, value)
        elif isinstance(value, list | dict):
            merging.whole(merged, key, value)
        elif key == "finish_reason":
            merged[key] = value if is_ended else merged.get(key)
        elif key != "index" and (value is not None or key not in merged):
            merged[key] = value


def _merge_delta(choice: dict[str, Any], delta: dict[str, Any], merging: Merging) -> None:
    message = choice.get("message")
    if message is None:
        message = choice["message"] = {"role": "assistant", "content": None}
    for name, part in delta.items():
        if name == "tool_calls":
            _merge_tool_calls(message, part or [], merging)
        elif name == "content" and (
            isinstance(part, list) or isinstance(message.get(name), GrowingParts)
        ):  # Mistral's, with its reasoning
            merging.parts(message, name, part)
        else:
            merging.field(message, name, part)


def _merge_tool_calls(
    message: dict[str, Any], deltas: list[dict[str, Json]], merging: Merging
) -> None:
    calls = message.setdefault("tool_calls", Elements())
    for call, delta in calls.each(deltas):
        is_sure = call.key is not None and not call.is_guessed
        for key, value in delta.items():
            if key != "index":
                merging.field(call, key, value, is_sure=is_sure)


# --- versions of the weights, which may change while a stream runs


def _add_versions(
    body: Mapping[str, Json], choices: Mapping[int, Element], chunks: Iterable[Chunk]
) -> None:
    """Give merged choices the spans of the versions that their chunks name, as SGLang has them."""
    if _NAMING.isdisjoint((*body, *next(iter(choices.values()), ()))):
        return
    found = _versions_in(chunks)
    for index, merged in choices.items():
        known, spans = version_spans(merged, {}), found.get(index)
        if spans and (not known or known[0].start is None):
            listed = [{k: v for k, v in span._asdict().items() if v is not None} for span in spans]
            merged[OF_CHOICE] = {**(merged.get(OF_CHOICE) or {}), "weight_versions": listed}


def _versions_in(chunks: Iterable[Chunk]) -> dict[int, list[VersionSpan]]:
    """The spans by the index of the choice: each chunk has all so far, or its own version."""
    so_far: dict[int, list[VersionSpan]] = {}
    own: dict[int, list[tuple[str | int | None, int | None]]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            index, spans = index_of(choice.get("index")) or 0, version_spans(choice, chunk)
            if spans and spans[0].start is not None:
                so_far[index] = spans
            elif (count := _tokens_in(choice)) != 0:
                version = spans[-1].version if spans else None
                own.setdefault(index, []).append((version, count))
    return {index: _in_turn(versions) for index, versions in own.items()} | so_far


def _in_turn(chunks: Sequence[tuple[str | int | None, int | None]]) -> list[VersionSpan]:
    """The spans of chunks, each with a version and a number of tokens (None: not known).

    They are without numbers where something is not known; [] if that leaves a single version.
    """
    is_counted = None not in chain.from_iterable(chunks)
    named = [(version, count or 0) for version, count in chunks if version is not None]
    spans: list[VersionSpan] = []
    position = 0
    for version, same in groupby(named, lambda chunk: chunk[0]):
        start, position = position, position + sum(count for _, count in same)
        spans.append(VersionSpan(version, *((start, position) if is_counted else (None, None))))
    return spans if is_counted or spans[1:] else []


def _tokens_in(choice: Choice) -> int | None:
    """Number of tokens of a chunk's choice; None: it has some, and they are not counted."""
    ids = [value for value in map(choice.get, IDS) if isinstance(value, list)]
    counted = max([*map(len, ids), *(listing.length for listing in listings(choice))], default=0)
    delta = choice.get("delta")
    values = [v for k, v in delta.items() if k != "role"] if isinstance(delta, Mapping) else []
    return counted or (None if any([*values, choice.get("text")]) else 0)
