"""The conversations that ART tokenises, as JSON: a `Choice` wherever a completion trains.

Invariant: each completion that a token sequence trains is a choice in exactly one history. ART from
0.5.20 on trains the ids of a choice behind the ids of its prompt. Before, it renders everything but
the choices anew, and a choice with tool calls that is not the last one twice (0.5.18): a history
for each call, that ends in its choice, is always exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from otel_rollout import (
    Completion,
    ExportError,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import (
    Dropped,
    Json,
    JsonRows,
    check_choice,
    copy_json,
    dropped_completions,
)

Mode = Literal["auto", "per_call", "conversation"]
OnMedia = Literal["drop", "keep"]
Unscored = Literal["error", "drop"]
_Key = tuple[str, int]


def to_art_row(
    group: TrajectoryGroup,
    *,
    mode: Mode = "auto",
    unscored: Unscored = "error",
    on_media: OnMedia = "drop",
) -> dict[str, Json]:
    """The group as JSON, from which `from_art_row` makes the live one.

    trajectories: fields of art.Trajectory, with all conversations in `histories`; a choice is an
    object without a `role`. exceptions: rollouts that failed without a reward. metadata.
    mode: "per_call" makes a history for each completion; "conversation" one for each conversation,
    and refuses what ART would tokenise wrongly; "auto" takes conversations where that is exact.
    unscored: "error" refuses a trajectory without a reward, "drop" leaves it out.
    on_media: "keep" trains replies in conversations with images, whose pixels ART finds in the
    messages before 0.5.20; "drop" does not.
    Rollouts that are not to be trained on (`@rollout(trainable=False)`) are left out.

    ExportError names the trajectory or completion that ART cannot carry, and what to do.
    """
    return art_group(group, mode=mode, unscored=unscored, on_media=on_media)


def art_group(
    group: TrajectoryGroup, *, mode: Mode, unscored: Unscored, on_media: OnMedia
) -> dict[str, Json]:
    check_choice("mode", mode, Mode)
    check_choice("unscored", unscored, Unscored)
    failures = list(group.failures)
    trajectories: list[dict[str, Json]] = []
    for trajectory in group:
        if not trajectory.trainable:
            continue
        if trajectory.status == "cancelled":
            failures.append(trajectory)
        elif trajectory.reward is not None or unscored == "error":
            trajectories.append(art_trajectory(trajectory, mode=mode, on_media=on_media))
    return {
        "trajectories": trajectories,
        "exceptions": [_exception(trajectory) for trajectory in failures],
        "metadata": {} if group.key is None else {"group_id": group.key},
    }


def art_trajectory(trajectory: Trajectory, *, mode: Mode, on_media: OnMedia) -> dict[str, Json]:
    check_choice("mode", mode, Mode)
    check_choice("on_media", on_media, OnMedia)
    if trajectory.reward is None:
        raise ExportError(
            f"{_named(trajectory)} has no reward, and ART has no unknown one: set "
            f"trajectory.reward, or leave it out with unscored='drop'"
        )
    rows = trajectory.token_sequences(on_media=on_media)
    trained = dict(_trained(rows))
    if not trained:
        reasons = dict.fromkeys(map(str, rows.dropped))
        raise ExportError(
            f"{_named(trajectory)} has nothing that trains: "
            f"{'; '.join(reasons) or 'it made no model call'}"
        )
    why = None if mode == "per_call" else _inexact(trajectory, rows)
    if why and mode == "conversation":
        raise ExportError(f"{_named(trajectory)}: {why}; use mode='per_call'")
    histories = (
        list(_calls(rows, trained))
        if why or mode == "per_call"
        else list(_conversations(trajectory, trained))
    )
    versions = trajectory.policy_versions
    named = {f"reward/{name}": float(reward) for name, reward in trajectory.rewards.items()}
    ids = {"trajectory_id": trajectory.id, "name": trajectory.name, "task_id": trajectory.task_id}
    metadata = {name: _scalar(value) for name, value in trajectory.metadata.items()}
    return {
        "histories": histories,
        "reward": float(trajectory.reward),
        "initial_policy_version": _version(versions[:1]),
        "final_policy_version": _version(versions[-1:]),
        "metrics": {**named, **trajectory.metrics},
        "metadata": {**{k: v for k, v in ids.items() if v is not None}, **metadata},
        "logs": trajectory.logs,
    }


def _trained(rows: list[TokenSequence]) -> Iterator[tuple[_Key, dict[str, Json]]]:
    """The choice of each completion that trains, by its span and index."""
    for row in rows:
        spans = zip(row.completions, row.spans, row.trains, strict=True)
        for completion, (_, start, end), trains in spans:
            if trains:
                choice = _choice(completion, row.token_ids[start:end], row.logprobs[start:end])
                # What ART from 0.5.20 on trains; before, it renders the prompt.
                choice["prompt_token_ids"] = row.token_ids[:start]
                yield _key(completion), choice


def _choice(completion: Completion, ids: list[int], logprobs: list[float]) -> dict[str, Json]:
    if not completion.exchange.path.split("?")[0].endswith("/chat/completions"):
        raise ExportError(
            f"completion {completion.id!r} was sampled through {completion.exchange.path!r}, and "
            f"ART renders messages of /chat/completions only: call that, or leave it out with "
            f"@rollout(trainable=False)"
        )
    if media := [kind for kind in completion.media if kind != "image_url"]:
        raise ExportError(
            f"completion {completion.id!r}: its conversation holds {', '.join(media)}, and ART "
            f"trains on text and images only; leave the trajectory out"
        )
    if any(map(math.isnan, logprobs)):
        raise ExportError(
            f"completion {completion.id!r}: ART trains tokens whose log-probability is known, got "
            f"{sum(map(math.isnan, logprobs))} of {len(ids)} unknown; ask the server for them "
            f"(`with otel_rollout.request_token_ids():`)"
        )
    entries: list[dict[str, Json]] = [{} for _ in ids]
    wire = completion.choice.get("logprobs")
    if isinstance(wire, dict):
        # ART reads the bytes of the first token as text, to see whether it starts to think.
        found = [*(wire.get("content") or ()), *(wire.get("refusal") or ())]
        entries = found if len(found) == len(ids) else entries
    content: list[dict[str, Json]] = [
        {
            "bytes": _text_bytes(entry.get("bytes")),
            "top_logprobs": [],
            "token": f"token_id:{token_id}",
            "logprob": logprob,
        }
        for entry, token_id, logprob in zip(entries, ids, logprobs, strict=True)
    ]
    own = {name: copy_json(completion.choice.get(name)) for name in _SPANS}
    return {
        "finish_reason": completion.finish_reason,
        "index": completion.choice_index,
        "message": copy_json(completion.message),
        "logprobs": {"content": content, "refusal": None},
        "token_ids": ids,
        **{name: spans for name, spans in own.items() if spans is not None},
    }


_SPANS = ("policy_token_spans", "prompt_policy_token_spans")
"""What ART's own server says of the policies; it needs more of them than other servers say."""


def _text_bytes(wire: Json) -> Json:
    """The bytes of a token, of one that is a part of a character none: ART would fail on them."""
    try:
        bytes(wire or ()).decode()
    except (TypeError, ValueError):
        return None
    return copy_json(wire)


def _calls(
    rows: list[TokenSequence], trained: dict[_Key, dict[str, Json]]
) -> Iterator[dict[str, Json]]:
    """A history for each call that trains: what it was asked, and its choice."""
    for row in rows:
        for completion, trains in zip(row.completions, row.trains, strict=True):
            if trains:
                yield {
                    "messages_and_choices": [
                        *completion.request_messages,
                        trained[_key(completion)],
                    ],
                    "tools": copy_json(completion.tools),
                }


def _conversations(
    trajectory: Trajectory, trained: dict[_Key, dict[str, Json]]
) -> Iterator[dict[str, Json]]:
    for history in trajectory.histories:
        items = [
            trained[_key(item.completion)]
            if item.trainable and item.completion and _key(item.completion) in trained
            else copy_json(item.message)
            for item in history.items
        ]
        if any("role" not in item for item in items):
            yield {"messages_and_choices": items, "tools": copy_json(history.tools)}


def _inexact(trajectory: Trajectory, rows: list[TokenSequence]) -> str | None:
    """The reason why ART would tokenise conversations otherwise than the model saw; None: exact."""
    in_rows = {tuple(map(_key, row.completions)) for row in rows}
    for history in trajectory.histories:
        completions = history.completions
        if not any(item.trainable for item in history.items):
            continue
        for completion in completions[:-1]:
            if (completion.message or {}).get("tool_calls"):
                return (
                    f"completion {completion.id!r} calls tools and is not the last of its "
                    f"conversation: ART would tokenise its calls twice"
                )
        if tuple(map(_key, completions)) not in in_rows:
            return (
                f"the conversation that ends in completion {completions[-1].id!r} is not one "
                f"token sequence (its tokens were rendered anew on the way, or some are not known)"
            )
    return None


def _exception(trajectory: Trajectory) -> dict[str, Json]:
    error = trajectory.error or {}
    return {
        "type": error.get("type") or trajectory.status,
        "message": error.get("message") or f"the rollout {trajectory.id} ended so",
        "traceback": error.get("traceback") or "",
    }


def _version(versions: list[str | int]) -> int | None:
    """ART counts steps; a version that is no number is not one of them."""
    return next((int(v) for v in versions if isinstance(v, int) or v.isdecimal()), None)


def _scalar(value: Json) -> Json:
    """Metadata of ART is flat: what is not goes in as its JSON text."""
    return json.dumps(value) if isinstance(value, dict | list) else value


def _key(completion: Completion) -> _Key:
    return completion.span_id, completion.choice_index  # not every server's ids are unique


def _named(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.id} ({trajectory.name!r})"


@dataclass(frozen=True)
class ArtRows(JsonRows):
    """The exporter `art`: a row for each group that has something, as of `to_art_row`.

    mode: "per_call" makes a history for each completion, "conversation" one for each conversation
    and refuses what ART would tokenise wrongly, "auto" takes conversations where that is exact.
    unscored: "error" refuses a trajectory without a reward, "drop" leaves it out.
    on_media: "keep" trains replies in conversations with images, "drop" does not.
    """

    mode: Mode = "auto"
    unscored: Unscored = "error"
    on_media: OnMedia = "drop"

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """One row; none for a group that has neither trajectories nor failures."""
        row = to_art_row(group, mode=self.mode, unscored=self.unscored, on_media=self.on_media)
        if row["trajectories"] or row["exceptions"]:
            yield row

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions of its trajectories that no choice trains."""
        return dropped_completions(filter(_is_scored, group), on_media=self.on_media)


def _is_scored(trajectory: Trajectory) -> bool:
    return (
        trajectory.trainable and trajectory.status != "cancelled" and trajectory.reward is not None
    )
