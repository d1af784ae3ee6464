"""Ids, log-probabilities and texts of sampled tokens, from each place where a choice lists them.

Pure. `servers` asks. Of a usual reply only the values that are asked for are read, into arrays.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType, defstruct

from otel_rollout.wire.json import (
    PASSED,
    Bounded,
    Cut,
    Json,
    JsonText,
    PartlyRead,
    as_objects,
    list_of,
    member_of,
    struct_of,
)

_Fields = Mapping[str, Json]
ID_PREFIX = "token_id:"
"""How a token is written by vLLM's `return_tokens_as_token_ids`."""
LARGEST_ID = (1 << 31) - 1
"""No token id is larger."""
_TEXTS = "tokens"
"""A member of a choice whose list may be of texts, too."""


def ids_of(value: Json) -> Sequence[Json]:
    """The value if it is a list that begins with a number; else none."""
    is_list = isinstance(value, list | array) and len(value) > 0
    return value if is_list and isinstance(value[0], int) else []


def ids_at(choice: _Fields, place: str) -> Sequence[Json]:
    """The token ids that a member of the choice lists, as it lists them; an array where that was
    left unread.
    """
    found = None
    if isinstance(choice, PartlyRead):
        if place not in choice.known and (cut := choice.cut(place)) is not None:
            ids = _ids.part(cut)
            choice.known[place] = None if ids is None else id_array(ids)
        found = choice.known.get(place)
    value: Sequence[Json] | None = choice.get(place) if found is None else found
    return ids_of(value) if place == _TEXTS or not isinstance(value, list | array) else value


_ids: Bounded[list[int]] = Bounded(list_of(int))


def id_array(ids: list[int]) -> Sequence[int]:
    """The ids in an array; as they are if they fit in none."""
    try:
        return token_array(ids)
    except OverflowError:
        return ids


def token_array(ids: Sequence[int]) -> array[int]:
    """The ids in an array. TypeError for what are no integers, OverflowError beyond 64 bits."""
    try:
        # An array makes each number by a call with a format; this is eight times as cheap.
        return array("i", struct.pack(f"{len(ids)}i", *ids))
    except struct.error:
        return array("q", ids)


class Columns(NamedTuple):
    """What was read of the tokens of one place."""

    logprobs: array[float]
    """Their log-probabilities, NaN in the place of each unknown one."""
    ids: Sequence[Json] | None
    """Their ids. None: they have none beside their texts, which may be written as ids."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A place that lists the sampled tokens."""

    length: int
    """Number of its tokens."""
    column: Callable[[str], Sequence[Json] | None]
    """What it has of each token: `token`, `bytes`, `id`, `logprob`, `top_logprobs`, `probs`. None:
    it has none such."""
    known: Columns | None = None
    """Log-probabilities and ids, if they were read already."""
    may_name: Callable[[str], bool] = bool
    """False if no text that was not read yet has this in it."""

    def logprobs(self) -> array[float] | None:
        """Its log-probabilities, NaN in the place of each unknown one; None: it has none."""
        if self.known is not None:
            return self.known.logprobs
        values = self.column("logprob")
        return None if values is None else _floats([*values])

    def ids(self) -> Sequence[Json]:
        """The ids of all tokens; [] if one of them has none."""
        ids = self.column("id") if self.known is None else self.known.ids
        if ids and isinstance(ids[0], int):
            return ids
        return ids_of_texts(self.column("token") or ()) if self.may_name(ID_PREFIX) else []


def ids_of_texts(tokens: Sequence[Json]) -> list[Json]:
    """The ids of tokens that are all written as such; [] if one of them is not."""
    if not tokens or not str(tokens[0]).startswith(ID_PREFIX):
        return []
    try:
        return [int(str(token).removeprefix(ID_PREFIX)) for token in tokens]
    except ValueError:
        return []


def listings(choice: _Fields) -> Iterator[Listing]:
    """The places, the best first."""
    usual = _usual(choice) if isinstance(choice, PartlyRead) else None
    return _read_listings(choice) if usual is None else iter((usual,))


def _read_listings(choice: _Fields) -> Iterator[Listing]:
    logprobs, result, meta = map(choice.get, ("logprobs", "logprobsResult", "meta_info"))
    if isinstance(logprobs, list):
        yield _listing(_of_pieces(logprobs) or None)
    elif isinstance(logprobs, Mapping):
        values, tokens = logprobs.get("token_logprobs"), logprobs.get("tokens")
        if isinstance(values, list):
            columns = {"logprob": values, "token": tokens, **logprobs}
            length = len(tokens) if isinstance(tokens, list) else 0
            yield Listing(length, lambda name: _list_of(columns.get(name)))
        yield _listing(_chained(logprobs.get("content"), logprobs.get("refusal")))
    if isinstance(result, Mapping):  # Gemini's
        chosen, tops = result.get("chosenCandidates"), result.get("topCandidates")
        yield _listing(chosen or None, tops, id="tokenId", logprob="logProbability")
    if isinstance(output := choice.get("output"), list):  # of the Responses API
        yield _listing(_chained(*_logprobs_of_parts(output)) or None)
    yield _listing(choice.get("completion_probabilities"))
    if isinstance(meta, Mapping):
        rows = _list_of(meta.get("output_token_logprobs"))
        whole = all(isinstance(row, list) and len(row) > 1 for row in rows or ())
        tops = meta.get("output_top_logprobs")
        yield _listing(rows if whole else None, tops, logprob=0, id=1, token=2)


_ENTRY: Any = defstruct("Entry", [("logprob", float), ("id", int | UnsetType, UNSET)], gc=False)
ENTRIES = list_of(_ENTRY)
"""A list with an object for each token, as most APIs have it."""
_entries: Bounded[Any] = Bounded(ENTRIES)
LOGPROBS = struct_of(
    "Logprobs",
    {
        "content": ENTRIES,
        "refusal": None,
        "tokens": list[Cut],
        "token_logprobs": list[float | None],
        **dict.fromkeys(("top_logprobs", "text_offset"), Cut),
    },
)
"""The log-probabilities of a chat, or of a text completion, of which only numbers are read."""
_logprobs: Bounded[Any] = Bounded(LOGPROBS)
_CHOSEN: Any = defstruct("Chosen", [("tokenId", int), ("logProbability", float)], gc=False)
LOGPROBS_RESULT = struct_of(
    "LogprobsResult",
    {"chosenCandidates": list_of(_CHOSEN), "topCandidates": Cut, "logProbabilitySum": Cut},
)
"""The log-probabilities of a candidate of Gemini's."""


PIECES = list_of(
    defstruct("Piece", [("token_ids", list[int]), ("logprobs", list[float])], gc=False)
)
"""A list with an object for several tokens, as Cohere has it."""


def columns_of(entries: list[Any]) -> Columns | None:
    """The numbers of `ENTRIES`; None if their ids are not all there."""
    values = _floats([each.logprob for each in entries], are_floats=True)
    if not entries or entries[0].id is UNSET:
        return Columns(values, None)
    ids = [each.id for each in entries]
    return None if UNSET in ids else Columns(values, id_array(ids))


def columns_in(cuts: Sequence[Cut]) -> Columns | None:
    """The same of lists that were cut out, one after the other; None if one of them is no such."""
    lists = [found for found in map(_entries.part, cuts) if found is not None]
    entries = [*chain(*lists)]
    return columns_of(entries) if entries and len(lists) == len(cuts) else None


def columns_of_logprobs(found: Any) -> Columns | None:
    """The numbers of `LOGPROBS`; None where there is no list of them, or not all of one list."""
    if found is None:
        return None
    others = found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset
    if found.content is not UNSET:
        return None if any(each is not UNSET for each in others) else columns_of(found.content)
    tokens, values = others[:2]
    if tokens is UNSET or values is UNSET or found.refusal is not UNSET:
        return None
    return Columns(_floats(values), None) if len(tokens) == len(values) else None


def columns_of_result(found: Any) -> Columns | None:
    """The numbers of a `LOGPROBS_RESULT`; None where there are none."""
    chosen = found.chosenCandidates
    if not chosen:  # it may be UNSET
        return None
    values = _floats([each.logProbability for each in chosen], are_floats=True)
    return Columns(values, id_array([each.tokenId for each in chosen]))


def columns_of_pieces(pieces: list[Any]) -> Columns | None:
    """The numbers of `PIECES`; None if one of them has not as many as ids."""
    if any(len(each.token_ids) != len(each.logprobs) for each in pieces):
        return None
    ids = id_array([*chain.from_iterable(each.token_ids for each in pieces)])
    values = [*chain.from_iterable(each.logprobs for each in pieces)]
    return Columns(_floats(values, are_floats=True), ids) if ids else None


def partly_read(
    found: Any, whole: JsonText, name: str, take: Callable[[Any], dict[str, Any]]
) -> dict[str, Json] | None:
    """The reply that was read as a type, its choices as `PartlyRead`; None if it has no list.

    whole: its text. name: the member that is the list of its choices. take: takes members out of
    a choice, and returns what they say by their names.
    """
    choices = getattr(found, name)
    if choices is UNSET:
        return None
    known = list(map(take, choices))
    reply: dict[str, Json] = as_objects(found)
    reply[name] = [
        PartlyRead({**choice, **dict.fromkeys(columns, PASSED)}, whole, (name, place), columns)
        for place, (choice, columns) in enumerate(zip(reply[name], known, strict=True))
    ]
    return reply


def reply_partly_read(found: Any, whole: JsonText, columns: Mapping[str, Any]) -> Json:
    """The reply that was read as a type, and is itself the one choice.

    whole: its text. columns: what some of its members say, which are taken out of it.
    """
    for name in columns:
        setattr(found, name, UNSET)
    reply: dict[str, Json] = as_objects(found)
    if not columns:
        return reply
    return PartlyRead({**reply, **dict.fromkeys(columns, PASSED)}, whole, known={**columns})


def _usual(choice: PartlyRead) -> Listing | None:
    """The tokens as most APIs list them, of which only numbers are read."""
    known = choice.known
    if "logprobs" not in known and (cut := choice.cut("logprobs")) is not None:
        known["logprobs"] = columns_of_logprobs(_logprobs.part(cut))
    place = next((each for each in _PLACES if known.get(each) is not None), None)
    if place is not None and callable(known[place]):
        known[place] = known[place]()
    if place is None or known[place] is None:
        return None
    if _OTHERS not in known:
        known[_OTHERS] = any(choice.get(each) for each in _PLACES if each != place)
    if known[_OTHERS]:
        return None
    columns: Columns = known[place]
    return Listing(
        len(columns.logprobs),
        lambda name: next(_read_listings(choice)).column(name),
        columns,
        lambda text: choice.may_have(place, text),
    )


_OTHERS = "others()"
_PLACES = ("logprobs", "logprobsResult", "output", "completion_probabilities", "meta_info")


def _listing(rows: Json, tops: Json = None, **names: str | int) -> Listing:
    """A list of objects, or of lists. tops: a column beside it. names: keys that differ."""

    def column(name: str) -> list[Json] | None:
        if name == "top_logprobs" and isinstance(tops, list):
            return tops
        if not isinstance(rows, list):
            return None
        key: Json = names.get(name, name)
        try:
            return [row[key] for row in rows]
        except (LookupError, TypeError):
            return [row.get(key) for row in rows] if set(map(type, rows)) <= {dict} else None

    return Listing(len(rows) if isinstance(rows, list) else 0, column)


def _of_pieces(pieces: list[Json]) -> list[_Fields]:
    """An entry for each token: Ollama's are that already, Cohere's have several tokens each."""
    entries: list[_Fields] = []
    for piece in pieces:
        ids = member_of(piece, "token_ids")
        if not isinstance(ids, list):
            entries.append(piece)
            continue
        values = piece.get("logprobs")
        known = isinstance(values, list) and len(values) == len(ids)
        entries += [
            {"id": token, "logprob": value}
            for token, value in zip(ids, values if known else [None] * len(ids), strict=True)
        ]
    return entries


def _logprobs_of_parts(items: list[Json]) -> Iterator[Json]:
    for item in items:
        content = member_of(item, "content")
        for part in content if isinstance(content, list) else ():
            yield member_of(part, "logprobs")


def _chained(*lists: Json) -> list[Json] | None:
    """The elements of the lists among these; None where none is a list."""
    found = [entries for entries in lists if isinstance(entries, list)]
    filled = [entries for entries in found if entries]
    if len(filled) == 1:
        return filled[0]
    return [entry for entries in filled for entry in entries] if found else None


def _list_of(value: Json) -> list[Json] | None:
    return value if isinstance(value, list) else None


_UNKNOWN = -9999.0
"""Written by vLLM where a log-probability is not known, or is infinite."""
_PACKED_UNKNOWN = struct.pack("d", _UNKNOWN)
_LOWEST = -1e30
"""No log-probability is so low. llama.cpp writes the lowest 32-bit float there; other types have
lowest values near it, and integers none."""


def _floats(values: list[Json], *, are_floats: bool = False) -> array[float]:
    """The log-probabilities, NaN in the place of each unknown one."""
    if are_floats or {*map(type, values)} <= {float}:
        packed = struct.pack(f"{len(values)}d", *values)
        if _PACKED_UNKNOWN not in packed and math.hypot(*values) < -_LOWEST:
            return array("d", packed)
    return array("d", [float(value) if is_known_logprob(value) else math.nan for value in values])


def none_for_nan(values: Sequence[float]) -> list[float | None]:
    """The values, None in the place of each NaN."""
    if math.isnan(sum(values)):
        return [None if math.isnan(value) else value for value in values]
    return [*values]


def is_known_logprob(value: Json) -> bool:
    """Whether it is a log-probability, not what a server writes in the place of one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value == _UNKNOWN:
        return False
    return _LOWEST < value < -_LOWEST or value == -math.inf
