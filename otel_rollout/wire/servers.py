"""Where servers put token ids and log-probabilities: the replies of vLLM, SGLang and llama.cpp.

Pure: a choice and the reply around it in, what the server sent out. A server may send the same
thing in several places, and lose tokens in some of them (parsers of tool calls do). So the ids are
taken from the place that has most of them, the log-probabilities from one that has as many;
nothing is made up where no place has them, and whether all came is the server's own count to say.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from msgspec import UNSET

from otel_rollout.wire.json import Bounded, Json, PartlyRead, dumps, list_of, member_of, struct_of
from otel_rollout.wire.params import is_constrained

_IDS = ("token_ids", "response_token_ids", "tokens")
ID_PREFIX = "token_id:"
"""How a token is written by vLLM's `return_tokens_as_token_ids`."""

_Fields = Mapping[str, Json]


def sampled_ids(choice: _Fields, reply: _Fields) -> list[Json] | None:
    """The sampled token ids of a choice, as they came; None where the server sent none.

    vLLM and SGLang: `token_ids` (SGLang also `response_token_ids`). SGLang: `output_ids` of the
    reply's `sglext`, a list for each choice; `meta_info.output_token_logprobs`, triples of
    log-probability, id and text. llama.cpp: `tokens` of its own `/completion`. Entries of
    log-probabilities: llama.cpp's `id`, and tokens that are written as `token_id:1`.
    """
    given = [choice.get(place) for place in _IDS]
    of_choices, index = member_of(reply, "sglext", "output_ids"), choice.get("index", 0)
    if isinstance(of_choices, list) and index in range(len(of_choices)):
        given.append(of_choices[index])
    found = listed = max(map(_ids, given), key=len)
    for listing in _listings(choice):
        if listing.length > len(found):
            found = _ids_in(listing) or found
    if found is not listed and not _are_all(found, reply):
        return None
    return found or None


def _are_all(ids: list[Json], reply: _Fields) -> bool:
    """False if these ids, of single entries, are not as many as the server counted.

    llama.cpp leaves out the entries of tokens that are only a part of a character.
    """
    if _has_several(reply):
        return True  # the count is of all choices together
    counted = sampled_count(reply)
    return counted is None or counted == len(ids)


def _has_several(reply: _Fields) -> bool:
    choices = reply.get("choices")
    return isinstance(choices, list) and len(choices) > 1


def empty_ids(choice: _Fields) -> bool:
    """True if the server sent a list of token ids without one."""
    return any(choice.get(place) == [] for place in _IDS)


def sampled_logprobs(choice: _Fields, count: int | None) -> list[float | None] | None:
    """The log-probabilities of a choice, None in the place of each unknown one.

    Of several lists that with `count` of them, if there is one, else the first.
    """
    first: list[Json] | None = None
    for listing in _listings(choice):
        values = listing.column("logprob")
        if values is not None and (count is None or len(values) == count):
            return values if listing.is_known else _floats(values)
        if first is None:
            first = values
    return None if first is None else _floats(first)


def sampled_texts(choice: _Fields) -> list[bytes | None]:
    """The text of each sampled token, as log-probabilities have it; None where it is unknown.

    A token that is only a part of a character has its bytes there, or no text that can be used.
    """
    for listing in _listings(choice):
        if tokens := listing.column("token"):
            given = listing.column("bytes") or [None] * len(tokens)
            return list(map(_token_bytes, tokens, given))
    return []


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that the server lists at a place, with its log-probability."""

    text: bytes | None
    """None: unknown, as where only its id came."""
    id: int | None
    logprob: float


def alternatives(choice: _Fields) -> list[list[Alternative]]:
    """The most likely tokens at the place of each sampled one; [] where the server lists none.

    `top_logprobs` of chats, of text completions (texts with numbers) and of the Responses API,
    `topCandidates` of Gemini, `probs` of older llama.cpp, `output_top_logprobs` of SGLang.
    """
    for listing in _listings(choice):
        for name in ("top_logprobs", "probs"):
            listed = [_listed(place) for place in listing.column(name) or ()]
            if any(listed):
                return listed
    return []


def _listed(place: Json) -> list[Alternative]:
    """The alternatives of one place, the most likely first."""
    if isinstance(place, Mapping) and isinstance(place.get("candidates"), list):
        place = place["candidates"]
    if isinstance(place, Mapping):
        place = [{"token": token, "logprob": value} for token, value in place.items()]
    found = [_alternative(each) for each in (place if isinstance(place, list) else ())]
    return sorted((each for each in found if each), key=lambda each: -each.logprob)


def _alternative(entry: Json) -> Alternative | None:
    if isinstance(entry, list) and len(entry) > 1:  # SGLang's
        entry = {"logprob": entry[0], "id": entry[1], "token": entry[2] if entry[2:] else None}
    if not isinstance(entry, Mapping):
        return None
    value, text = entry.get("logprob"), entry.get("token", entry.get("tok_str"))
    given = entry.get("id", entry.get("tokenId"))
    if value is None:
        value = entry.get("logProbability")
    if value is None and isinstance(entry.get("prob"), float) and entry["prob"] > 0:
        value = math.log(entry["prob"])
    if value is None or not _is_known(value):
        return None
    if not isinstance(given, int):
        given = next(iter(_ids_of_texts([text])), None)
    return Alternative(_token_bytes(text, entry.get("bytes")), given, float(value))


def prompt_texts(choice: _Fields, reply: _Fields) -> dict[int, bytes]:
    """Texts of token ids of a prompt, where the server lists its log-probabilities (vLLM)."""
    found: dict[int, bytes] = {}
    for place in (choice.get("prompt_logprobs"), reply.get("prompt_logprobs")):
        for entries in place if isinstance(place, list) else ():
            for token, entry in entries.items() if isinstance(entries, Mapping) else ():
                known = _token_bytes(member_of(entry, "decoded_token"), None)
                if known is not None and str(token).isdecimal():
                    found[int(token)] = known
    return found


def _token_bytes(text: Json, given: Json) -> bytes | None:
    if isinstance(given, list) and given:
        try:
            return bytes(given)
        except (TypeError, ValueError):
            return None
    if not isinstance(text, str) or not text or text.startswith(ID_PREFIX) or "\ufffd" in text:
        return None
    return text.encode("utf-8", "surrogatepass")


def prompt_ids(choice: _Fields, reply: _Fields) -> Iterator[Json]:
    """The places that may hold the token ids of a choice's prompt, the best first."""
    yield choice.get("prompt_token_ids")
    yield reply.get("prompt_token_ids")
    yield member_of(reply, "sglext", "input_ids")


def asked_ids(prompt: Json, params: _Fields, reply: _Fields) -> list[Json] | None:
    """The token ids that the request itself has as its prompt, if the server counted as many.

    It may have cut them, or put some before them. `prompt` is what the request asks to complete;
    the `input_ids` of SGLang's chats stand for its messages.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    ids = _ids(prompt) or _ids(params.get("input_ids"))
    counted = (usage(reply) or {}).get("prompt_tokens")
    return ids if ids and counted == len(ids) else None


def usage(reply: _Fields) -> dict[str, Json] | None:
    """How many tokens the server counted. llama.cpp's `/completion` has its own names for it."""
    said = reply.get("usage")
    if isinstance(said, dict):
        return said
    if isinstance(reply.get("tokens_predicted"), int):
        return {
            "prompt_tokens": reply.get("tokens_evaluated"),
            "completion_tokens": reply["tokens_predicted"],
        }
    return None


def sampled_count(reply: _Fields) -> int | None:
    """Number of sampled tokens that the server reports, in all choices; None if it reports none."""
    counts, timings = usage(reply) or {}, reply.get("timings")
    found = [counts.get(name) for name in ("completion_tokens", "output_tokens")]
    if isinstance(timings, Mapping) and not _has_several(reply):
        found.append(timings.get("predicted_n"))  # llama.cpp's, of its last choice
    return next((n for n in found if isinstance(n, int)), None)


def weight_version(choice: _Fields, reply: _Fields) -> str | int | None:
    """The version of the weights that sampled: SGLang's word, on the choice or on the reply."""
    for place in (choice.get("meta_info"), reply.get("metadata")):
        version = member_of(place, "weight_version")
        if isinstance(version, str | int):
            return version
    return None


def logprobs_mode(params: _Fields, choice: _Fields, reply: _Fields) -> _Mode | None:
    """Whether log-probabilities are those before or after temperature, top-p and the like.

    Those of constrained decoding are neither: the constraint took tokens away before.
    """
    if is_constrained(params):
        return "constrained"
    for place in (choice, reply, params):
        mode = place.get("logprobs_mode")
        if isinstance(mode, str):
            return _MODES.get(mode.removesuffix("_logprobs"))
    if isinstance(reply.get("tokens_predicted"), int):  # llama.cpp's own endpoint
        return "processed" if params.get("post_sampling_probs") else "raw"
    return None


_Mode = Literal["raw", "processed", "constrained"]
_MODES: dict[str, _Mode] = {"raw": "raw", "processed": "processed"}


def _ids(value: Json) -> list[Json]:
    return value if isinstance(value, list) and value and isinstance(value[0], int) else []


# --- the places that list the sampled tokens one by one


@dataclass(frozen=True, slots=True)
class _Listing:
    """A place that lists the sampled tokens."""

    length: int
    """Number of its tokens."""
    column: Callable[[str], list[Json] | None]
    """What it has of each token: `token`, `bytes`, `id`, `logprob`, `top_logprobs`, `probs`. None:
    it has none such."""
    is_known: bool = False
    """True if each of its log-probabilities is one."""


def _listings(choice: _Fields) -> Iterator[_Listing]:
    """The places, the best first."""
    chat = _of_chat(choice) if isinstance(choice, PartlyRead) else None
    return _read_listings(choice) if chat is None else iter((chat,))


def _read_listings(choice: _Fields) -> Iterator[_Listing]:
    logprobs, result, meta = map(choice.get, ("logprobs", "logprobsResult", "meta_info"))
    if isinstance(logprobs, list):
        yield _listing(_of_pieces(logprobs) or None)
    elif isinstance(logprobs, Mapping):
        values, tokens = logprobs.get("token_logprobs"), logprobs.get("tokens")
        if isinstance(values, list):
            columns = {"logprob": values, "token": tokens, **logprobs}
            length = len(tokens) if isinstance(tokens, list) else 0
            yield _Listing(length, lambda name: _list_of(columns.get(name)))
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


_ENTRY = struct_of("Entry", {"logprob": float}, is_open=True)
_chat: Bounded[Any] = Bounded(struct_of("Logprobs", {"content": list_of(_ENTRY), "refusal": None}))


def _of_chat(choice: PartlyRead) -> _Listing | None:
    """The tokens of a usual chat, of which only the log-probabilities are read, and kept."""
    cut = choice.cut("logprobs")
    if cut is None or any(map(choice.get, _OTHER_PLACES)):
        return None
    values = choice.known.get("logprob")
    if values is None:
        found = _chat.part(cut)
        if found is None or found.content is UNSET:
            return None
        try:
            values = _floats(list(map(_logprob, found.content)))
            values = array("d", struct.pack(f"{len(values)}d", *values))
        except struct.error:  # one is unknown
            return None
        choice.known["logprob"] = values

    def column(name: str) -> list[Json] | None:
        if name == "logprob":
            return values.tolist()
        return _listing(choice["logprobs"]["content"]).column(name)

    return _Listing(len(values), column, is_known=True)


_logprob = attrgetter("logprob")
_OTHER_PLACES = ("logprobsResult", "output", "completion_probabilities", "meta_info")


def _listing(rows: Json, tops: Json = None, **names: str | int) -> _Listing:
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

    return _Listing(len(rows) if isinstance(rows, list) else 0, column)


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


def _ids_in(listing: _Listing) -> list[Json]:
    """The ids of all tokens; [] if one of them has none."""
    ids = listing.column("id")
    if ids and isinstance(ids[0], int):
        return ids
    return _ids_of_texts(listing.column("token") or [None])


def _ids_of_texts(tokens: list[Json]) -> list[Json]:
    """The ids of tokens that are all written as such; [] if one of them is not."""
    if not str(tokens[0]).startswith(ID_PREFIX):
        return []
    try:
        return [int(str(token).removeprefix(ID_PREFIX)) for token in tokens]
    except ValueError:
        return []


_UNKNOWN = -9999.0
"""Written by vLLM where a log-probability is not known, or is infinite."""
_LOWEST = -1e30
"""No log-probability is so low. llama.cpp writes the lowest 32-bit float there; other types have
lowest values near it, and integers none."""


def _floats(values: list[Json]) -> list[float | None]:
    if set(map(type, values)) == {float} and min(values) > _UNKNOWN and sum(values) < math.inf:
        return list(values)
    return [float(value) if _is_known(value) else None for value in values]


def _is_known(value: Json) -> bool:
    """Whether it is a log-probability, not what a server writes in the place of one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value == _UNKNOWN:
        return False
    return _LOWEST < value < -_LOWEST or value == -math.inf


def without_tokens(reply: bytes) -> bytes:
    """A reply without token ids, and without log-probabilities, which have the tokens' texts.

    What is no JSON is left out whole if it names any of them.
    """
    try:
        return dumps(json.loads(reply, strict=False, object_hook=_without_tokens)).encode()
    except (ValueError, RecursionError):
        return b"" if any(name.encode() in reply for name in _TOKEN_MEMBERS) else reply


_TOKEN_MEMBERS = frozenset(
    {*_IDS, "prompt_token_ids", "logprobs", "prompt_logprobs", "completion_probabilities"}
    | {"meta_info", "sglext", "logprobsResult"}
)


def _without_tokens(found: dict[str, Json]) -> Json:
    """An object without token ids and what has the texts of tokens.

    Ollama's ids are in a list `context`.
    """
    return {
        name: value
        for name, value in found.items()
        if name not in _TOKEN_MEMBERS and not (name == "context" and _ids(value))
    }
