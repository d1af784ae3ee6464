"""Where servers put token ids, log-probabilities and versions: vLLM, SGLang, llama.cpp, ART.

Pure: a choice and the reply around it in, what the server sent out. A server may send the same
thing in several places, and lose tokens in some of them (parsers of tool calls do). So the ids are
taken from the place that has most of them, the log-probabilities from one that has as many;
nothing is made up where no place has them, and whether all came is the server's own count to say.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from otel_rollout.wire.columns import (
    ID_PREFIX,
    ids_at,
    ids_of,
    ids_of_texts,
    is_known_logprob,
    listings,
)
from otel_rollout.wire.json import Json, PartlyRead, dumps, member_of
from otel_rollout.wire.params import is_constrained

IDS = ("token_ids", "response_token_ids", "tokens")
"""Members of a choice that list its token ids."""

LogprobsMode = Literal["raw", "processed", "constrained"]
"""Log-probabilities from before temperature and the like, from after them, or under a mask."""

_SAMPLED = "sampled_ids()"
_Fields = Mapping[str, Json]


def sampled_ids(choice: _Fields, reply: _Fields) -> Sequence[Json] | None:
    """The sampled token ids of a choice, as they came; None where the server sent none.

    vLLM and SGLang: `token_ids` (SGLang also `response_token_ids`). SGLang: `output_ids` of the
    reply's `sglext`, a list for each choice; `meta_info.output_token_logprobs`, triples of
    log-probability, id and text. llama.cpp: `tokens` of its own `/completion`. Entries of
    log-probabilities: llama.cpp's `id`, and tokens that are written as `token_id:1`.
    """
    if not isinstance(choice, PartlyRead):
        return _sampled_ids(choice, reply)
    if _SAMPLED not in choice.known:
        choice.known[_SAMPLED] = _sampled_ids(choice, reply)
    found: Sequence[Json] | None = choice.known[_SAMPLED]
    return found


def _sampled_ids(choice: _Fields, reply: _Fields) -> Sequence[Json] | None:
    given = [ids_at(choice, place) for place in IDS]
    of_choices, index = member_of(reply, "sglext", "output_ids"), choice.get("index", 0)
    if isinstance(of_choices, list) and index in range(len(of_choices)):
        given.append(ids_of(of_choices[index]))
    found = listed = max(given, key=len)
    for listing in listings(choice):
        if listing.length > len(found):
            found = listing.ids() or found
    if found is not listed and not _are_all(found, reply):
        return None
    return found or None


def _are_all(ids: Sequence[Json], reply: _Fields) -> bool:
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


def withholds_ids(choice: _Fields, reply: _Fields) -> bool:
    """True if the server names its token ids without sending them, as vLLM where nobody asks."""
    names = ((reply, "prompt_token_ids"), (choice, "token_ids"))
    return all(fields.get(name) is None for fields, name in names) and any(
        name in fields for fields, name in names
    )


def empty_ids(choice: _Fields) -> bool:
    """True if the server sent a list of token ids without one."""
    return any(choice.get(place) == [] for place in IDS)


def sampled_logprobs(choice: _Fields, count: int | None) -> array[float] | None:
    """The log-probabilities of a choice, NaN in the place of each unknown one.

    Of several lists that with `count` of them, if there is one, else the first.
    """
    first: array[float] | None = None
    for listing in listings(choice):
        values = listing.logprobs()
        if values is not None and count in (None, len(values)):
            return values
        first = values if first is None else first
    return first


def sampled_texts(choice: _Fields) -> list[bytes | None]:
    """The text of each sampled token, as log-probabilities have it; None where it is unknown."""
    return list(map(token_bytes, *written_tokens(choice)))


def written_tokens(choice: _Fields) -> tuple[Sequence[Json], Sequence[Json]]:
    """The sampled tokens as log-probabilities have them, and their bytes, for `token_bytes`."""
    for listing in listings(choice):
        if tokens := listing.column("token"):
            return tokens, listing.column("bytes") or [None] * len(tokens)
    return [], []


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
    for listing in listings(choice):
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
    if value is None or not is_known_logprob(value):
        return None
    if not isinstance(given, int):
        given = next(iter(ids_of_texts([text])), None)
    return Alternative(token_bytes(text, entry.get("bytes")), given, float(value))


def prompt_texts(choice: _Fields, reply: _Fields) -> dict[int, bytes]:
    """Texts of token ids of a prompt, where the server lists its log-probabilities (vLLM)."""
    found: dict[int, bytes] = {}
    for place in (choice.get("prompt_logprobs"), reply.get("prompt_logprobs")):
        for entries in place if isinstance(place, list) else ():
            for token, entry in entries.items() if isinstance(entries, Mapping) else ():
                known = token_bytes(member_of(entry, "decoded_token"), None)
                if known is not None and str(token).isdecimal():
                    found[int(token)] = known
    return found


def token_bytes(text: Json, given: Json) -> bytes | None:
    """The text of a token. None: unknown.

    One that is only a part of a character has its bytes there, or no text that can be used.
    """
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


def asked_ids(prompt: Json, params: _Fields, reply: _Fields) -> Sequence[Json] | None:
    """The token ids that the request itself has as its prompt, if the server counted as many.

    It may have cut them, or put some before them. `prompt` is what the request asks to complete;
    the `input_ids` of SGLang's chats stand for its messages.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    ids = ids_of(prompt) or ids_of(params.get("input_ids"))
    counted = (usage(reply) or {}).get("prompt_tokens")
    return ids if ids and counted == len(ids) else None


def usage(reply: _Fields) -> dict[str, Json] | None:
    """How many tokens the server counted. llama.cpp's `/completion` has its own names for it."""
    counts = reply.get("usage")
    if isinstance(counts, dict):
        return counts
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


OF_CHOICE = "meta_info"
"""Member of a choice in which a server names the version of the weights that sampled it."""
OF_REPLY = ("sglext", "metadata")
"""Members of a reply in which a server does."""
_LISTS = (
    ("policy_token_spans", ("policy_version", "start_token", "end_token")),
    ("weight_versions", ("version", "start", "end")),
)
"""Lists of spans of versions, and the names of what each span has."""


class VersionSpan(NamedTuple):
    """Sampled tokens of one version of the policy; weights may change while a reply is sampled."""

    version: str | int
    start: int | None
    """Number of the first one in the reply. None: not known."""
    end: int | None
    """Number of the one after the last. None: not known."""


def version_spans(choice: _Fields, reply: _Fields) -> list[VersionSpan]:
    """The versions that sampled a choice, in order; [] where the server names none.

    SGLang: `weight_versions` of the choice's `meta_info`, or of the reply's `sglext` or `metadata`,
    which are of its first choice; else `weight_version`, that of the last token. ART:
    `policy_token_spans` of the choice.
    """
    whole = [place for place in map(reply.get, OF_REPLY) if place]
    own = choice.get(OF_CHOICE)
    for place in (choice, own, *(() if _has_several(reply) else whole)):
        if spans := list(_spans_in(place)):
            return spans
    for place in (own, *whole):
        version = member_of(place, "weight_version")
        if isinstance(version, str | int):
            return [VersionSpan(version, None, None)]
    return []


def _spans_in(place: Json) -> Iterator[VersionSpan]:
    """The spans that have a version in the lists of a place, but those of no token."""
    for name, (version, start, end) in _LISTS if place else ():
        spans = member_of(place, name)
        for span in spans if isinstance(spans, list) else ():
            named = member_of(span, version)
            numbers = [member_of(span, key) for key in (start, end)]
            if isinstance(named, str | int) and numbers != [0, 0]:
                yield VersionSpan(named, *(n if type(n) is int else None for n in numbers))


def is_partition(spans: list[VersionSpan], count: int | None) -> bool:
    """True if the spans cover the tokens from the first on, each once.

    count: the number of tokens, all of which they have to cover. None: not known.
    """
    position = 0
    for _, start, end in spans:
        if start != position or end is None or end <= start:
            return False
        position = end
    return count in (None, position)


def logprobs_mode(
    params: _Fields, choice: _Fields, reply: _Fields, configured: str | None
) -> LogprobsMode | None:
    """Whether log-probabilities are those before or after temperature, top-p and the like.

    Those of constrained decoding are neither: the constraint took tokens away before.
    configured: what the user says of the server; None: nothing.
    """
    if is_constrained(params):
        return "constrained"
    for place in (choice, reply, params):
        mode = place.get("logprobs_mode")
        if isinstance(mode, str):
            return _MODES.get(mode.removesuffix("_logprobs"))
    if isinstance(reply.get("tokens_predicted"), int):  # llama.cpp's own endpoint
        return "processed" if params.get("post_sampling_probs") else "raw"
    return _MODES.get(configured or "")


_MODES: dict[str, LogprobsMode] = {"raw": "raw", "processed": "processed"}


def without_tokens(reply: bytes) -> bytes:
    """A reply without token ids, and without log-probabilities, which have the tokens' texts.

    What is no JSON is left out whole if it names any of them.
    """
    try:
        return dumps(json.loads(reply, strict=False, object_hook=_without_tokens)).encode()
    except (ValueError, RecursionError):
        return b"" if any(name.encode() in reply for name in _TOKEN_MEMBERS) else reply


_TOKEN_MEMBERS = frozenset(
    {*IDS, "prompt_token_ids", "logprobs", "prompt_logprobs", "completion_probabilities"}
    | {"meta_info", "sglext", "logprobsResult"}
)


def _without_tokens(found: dict[str, Json]) -> Json:
    """An object without token ids and what has the texts of tokens.

    Ollama's ids are in a list `context`.
    """
    return {
        name: value
        for name, value in found.items()
        if name not in _TOKEN_MEMBERS and not (name == "context" and ids_of(value))
    }
