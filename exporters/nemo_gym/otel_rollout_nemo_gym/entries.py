"""Token entries of a trajectory, and the folder of them that Gym's TokenCaptureStore reads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_rollout import Completion, ConfigurationError, ExportError, Trajectory, TrajectoryGroup
from otel_rollout.export import CheckedOptions, Dropped, Json, dropped_completions, portable

VERSION = 1
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
_is_id = re.compile(r"[A-Za-z0-9._-]+").fullmatch
_READ = "nemo-gym"
"""Source of calls that were read of entries."""
_MADE = ("id", "object", "output", "token_ids", "logprobs", "prompt_token_ids")
"""Members of the reply of such a call that its entry has under other names."""
_STATE: dict[str, Json] = {
    "frozen": False,
    "retired": False,
    "incomplete": True,
    "snapshot_id": "",
    "version": 1,
    "entry_digests": {},
    "indexed_size": 0,
}


@dataclass(frozen=True, slots=True)
class Capture:
    """What Gym would have captured of a rollout."""

    rollout_id: str
    """Of letters, digits and `._-`."""
    entries: list[dict[str, Json]]
    """A `TokenEntry` for each reply with token ids and log-probabilities, in order."""
    incomplete: bool
    """True if a reply of the rollout has no entry, or calls of it were not captured: a trainer has
    to mask it."""


def to_token_entries(trajectory: Trajectory, *, metadata_id: str | None = None) -> Capture:
    """The token entries of a trajectory.

    metadata_id: name of the metadata that has Gym's id of the rollout. None: the trajectory's id.

    Each choice of a reply is an entry. Side calls are none, and so are calls that failed without a
    reply. model_call_id is the completion's id, made unique where it is not. ExportError for an id
    with other characters than Gym allows.
    """
    id_ = trajectory.id if metadata_id is None else trajectory.metadata.get(metadata_id)
    if not isinstance(id_, str) or not _is_id(id_):
        whose = "id" if metadata_id is None else f"metadata[{metadata_id!r}]"
        raise ExportError(
            f"trajectory {trajectory.id!r} ({trajectory.name!r}): expected an {whose} of letters, "
            f"digits and ._-, as NeMo Gym has them, got {id_!r}; give Gym's id in "
            f"rollout(metadata=...), and its name as metadata_id"
        )
    lacking = {
        _call(dropped.completion)
        for dropped in trajectory.token_sequences(on_failure="keep").dropped
        if dropped.completion and dropped.cause != "unresolved_retry"  # Gym finds these itself
    }
    said = [each for each in trajectory.completions if each.items and each.side_call is None]
    entries: dict[str, dict[str, Json]] = {}
    for completion in said:
        logprobs = completion.logprobs
        if _call(completion) in lacking or logprobs is None or None in logprobs:
            continue
        entry = _entry(completion, id_)
        name = str(entry["model_call_id"])
        if name in entries:
            name = entry["model_call_id"] = f"{name}.{completion.span_id}"
        entries[name] = entry
    is_whole = len(entries) == len(said) and not trajectory.missing_calls
    return Capture(id_, list(entries.values()), not is_whole or trajectory.status == "running")


def _call(completion: Completion) -> tuple[str, int]:
    return completion.span_id, completion.choice_index


def _entry(completion: Completion, rollout_id: str) -> dict[str, Json]:
    items = list(completion.items)
    if completion.exchange.source == _READ and isinstance(completion.response, dict):
        facts = {k: v for k, v in completion.response.items() if k not in _MADE}
    else:
        index, items = completion.choice_index, _output_items(completion)
        facts = {
            "schema_version": VERSION,
            "model_call_id": f"{completion.id}.{index}" if index else completion.id,
            "model": completion.model or completion.request_model or "",
            "token_item_index": len(items) - 1,
            "created_at": (completion.end_time_ns or 0) / 1e9,
        }
    entry = {
        "schema_version": facts.pop("schema_version", VERSION),
        "rollout_id": rollout_id,
        **{name: value for name, value in facts.items() if name != "rollout_id"},
        "prompt_token_ids": completion.prompt_token_ids,
        "generation_token_ids": completion.token_ids,
        "generation_log_probs": completion.logprobs,
        "output_items": items,
    }
    return dict(portable(entry))


def _output_items(completion: Completion) -> list[Json]:
    """What was sampled as items of the Responses API, messages as Gym makes items of them."""
    if completion.exchange.path.partition("?")[0].endswith("/responses"):
        items = [item for item in completion.items if isinstance(item, Mapping)]
    else:
        items = [{"type": "message", "role": "assistant", **(completion.message or {})}]
    return [{k: v for k, v in item.items() if k not in _TOKENS} for item in items]


@dataclass(frozen=True)
class NemoGymRows(CheckedOptions):
    """The exporter `nemo_gym`: a folder that Gym's TokenCaptureStore reads.

    ID.tokens.jsonl has the entries of a rollout, the first one also our own record of it.
    ID.tokens.state.json says `incomplete` where the rollout lacks ids.
    metadata_id: name of the metadata that has Gym's id of the rollout; not set: the
    trajectory's id.
    """

    metadata_id: str | None = None

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """A row for each trajectory, those that failed included: its id, entries, `incomplete`."""
        for trajectory in (*group, *group.failures):
            made = to_token_entries(trajectory, metadata_id=self.metadata_id)
            if made.entries:
                made.entries[0]["otel_rollout"] = {"trajectory": trajectory.to_json()}
            yield {
                "rollout_id": made.rollout_id,
                "incomplete": made.incomplete,
                "entries": list(made.entries),
            }

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no token sequence trains."""
        return dropped_completions((*group, *group.failures), on_failure="keep")

    def finish(self, rows: Path, output: Path) -> None:
        """Write the files of each rollout into a folder.

        ConfigurationError for two rollouts of one id: Gym would take them for one.
        """
        part = output.with_name(output.name + ".unfinished")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            with rows.open("rb") as lines:
                for row in map(json.loads, lines):
                    _write(part / row["rollout_id"], row)
            part.rename(output)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        rows.unlink()


def _write(stem: Path, row: Mapping[str, Any]) -> None:
    entries, state = Path(f"{stem}.tokens.jsonl"), Path(f"{stem}.tokens.state.json")
    if entries.exists() or state.exists():
        raise ConfigurationError(
            f"exporter 'nemo_gym': two trajectories have the rollout id {row['rollout_id']!r}, and "
            f"NeMo Gym would train them as one: leave one out (--where), or set metadata_id"
        )
    if row["entries"]:
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in row["entries"])
        entries.write_text(text)
    if row["incomplete"]:
        state.write_text(json.dumps(_STATE, sort_keys=True))
