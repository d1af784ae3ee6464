"""Token entries of NeMo Gym's token capture: the ids and the reply of one model call each.

The entries of a rollout are a trajectory together, in any order. An entry has no request but its
token ids. The reply is kept with every other member of the entry, so that it is made of it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from otel_rollout.errors import SpanFormatError
from otel_rollout.rebuild.dialects import KEPT_BY_NONE, Fact, ForeignCall
from otel_rollout.rebuild.documents import Calls, Format, Members, list_of, nanoseconds, text
from otel_rollout.spans import PACKED
from otel_rollout.trajectory import Trajectory, sentences
from otel_rollout.wire import Json

_VERSION = 1
"""The last `schema_version` that is read."""
_SOURCE = "nemo-gym"
_IDS = ("prompt_token_ids", "generation_token_ids")
_ARRAYS = (*_IDS, "generation_log_probs")
_NAMED = ("rollout_id", "model_call_id", *_IDS)
_LOSES = KEPT_BY_NONE - {Fact.LOGPROBS, Fact.TOKEN_IDS} | frozenset(
    (
        *(Fact.PARAMETERS, Fact.TOOLS, Fact.PROMPT, Fact.FINISH_REASON),
        *(Fact.USAGE, Fact.CHOICES, Fact.RESPONSE_FIELDS, Fact.RESPONSE_ID),
    )
)


def _recognises(data: Members) -> bool:
    """True if a JSON object is an entry."""
    return data.keys() >= set(_NAMED)


def _rollout_of(data: Members) -> str:
    """The id of the rollout of an entry. SpanFormatError for an entry that is not whole."""
    version = data.get("schema_version", _VERSION)
    if not isinstance(version, int) or version > _VERSION:
        raise SpanFormatError(
            f"a token entry of schema_version {version!r}, and up to {_VERSION} is read: update "
            f"otel-rollout"
        )
    for name in ("rollout_id", "model_call_id"):
        if text(data[name]) is None:
            raise SpanFormatError(f"a token entry whose {name} is {data[name]!r:.40}, not a text")
    for name in _ARRAYS:
        types = (int,) if name in _IDS else (int, float)
        if data.get(name) != [] and list_of(data.get(name), *types) is None:
            raise SpanFormatError(f"a token entry whose {name} is no list of numbers")
    counts = [len(data[name]) for name in _ARRAYS[1:]]
    if counts[0] != counts[1]:
        raise SpanFormatError(f"a token entry with {counts[0]} ids and {counts[1]} log_probs")
    return str(data["rollout_id"])


def _read(rollout: Members) -> Iterator[Trajectory]:
    """The trajectory of the entries of a rollout."""
    entries = rollout["entries"]
    for entry in entries:
        own = entry.get("otel_rollout")
        if isinstance(own, Mapping) and isinstance(record := own.get("trajectory"), str):
            yield Trajectory.from_json(record)
            return
    calls = Calls(_SOURCE, _LOSES, rollout["rollout_id"])
    for entry in sorted(entries, key=_order):
        calls.add(_call(entry, calls), nanoseconds(entry.get("created_at")))
    missing = [sentences.NO_ENTRY()] if rollout["is_incomplete"] else []
    yield calls.trajectory(name=_SOURCE, missing_calls=missing, also_warns=missing)


def _order(entry: Members) -> tuple[int, int]:
    """By time, then as one goes on from the other."""
    return nanoseconds(entry.get("created_at")) or 0, len(entry["prompt_token_ids"])


def _call(entry: Members, calls: Calls) -> ForeignCall:
    model = text(entry.get("model"))
    request: dict[str, Json] = {"model": model} if model else {}
    call = ForeignCall("/responses", {**request, "input": []})
    others = {
        name: value for name, value in entry.items() if name not in (*_ARRAYS, "output_items")
    }
    call.reply = {
        "id": entry["model_call_id"],
        "object": "response",
        **others,
        "output": entry.get("output_items") or [],
        "token_ids": entry["generation_token_ids"],
        "logprobs": {"token_logprobs": entry["generation_log_probs"]},
    }
    if prompt := entry["prompt_token_ids"]:
        call.prompts.append(calls.prompt_path(prompt))
        call.reply["prompt_token_ids"] = {PACKED: 0}
    return call


FORMAT = Format(_SOURCE, _recognises, _read, rollout_of=_rollout_of)
