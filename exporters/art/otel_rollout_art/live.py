"""From rows to the live objects of ART, which alone can train: JSON of them loses the `Choice`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from otel_rollout import ExportError, Trajectory, TrajectoryGroup
from otel_rollout_art.rows import Mode, OnMedia, Unscored, art_group, art_trajectory

if TYPE_CHECKING:
    import art


def to_art_group(
    group: TrajectoryGroup,
    *,
    mode: Mode = "auto",
    unscored: Unscored = "error",
    on_media: OnMedia = "drop",
) -> art.TrajectoryGroup:
    """The group with its scored trajectories; rollouts that failed without a reward are exceptions.

    mode, on_media: as of `to_art_row`. unscored: ART has no unknown reward, so one that was not
    scored is an ExportError, or left out ("drop").
    """
    return from_art_row(art_group(group, mode=mode, unscored=unscored, on_media=on_media))


def to_art_trajectory(
    trajectory: Trajectory, *, mode: Mode = "auto", on_media: OnMedia = "drop"
) -> art.Trajectory:
    """The trajectory; ExportError if it is not scored, or has nothing that trains."""
    return _trajectory(art_trajectory(trajectory, mode=mode, on_media=on_media))


def from_art_row(row: Mapping[str, Any]) -> art.TrajectoryGroup:
    """The live group of a row. ExportError where it holds what ART's own types refuse."""
    import art
    from art.trajectories import PydanticException

    made = art.TrajectoryGroup(
        [_trajectory(trajectory) for trajectory in row["trajectories"]], metadata=row["metadata"]
    )
    made.exceptions = [PydanticException(**error) for error in row["exceptions"]]
    return made


def _trajectory(row: Mapping[str, Any]) -> art.Trajectory:
    import art
    from pydantic import ValidationError

    fields = dict(row)
    try:
        main, *others = [_history(history) for history in fields.pop("histories")]
        made = art.Trajectory(
            messages_and_choices=main.messages_and_choices, additional_histories=others, **fields
        )
        made.tools = main.tools
        return made
    except ValidationError as error:
        raise ExportError(
            f"trajectory {row['metadata'].get('trajectory_id')}: ART refuses it: {error}"
        ) from None


def _history(history: Mapping[str, Any]) -> Any:
    from art import trajectories

    # From 0.5.20 on `History` is of exchanges, and what it was has this name.
    legacy = getattr(trajectories, "LegacyHistory", None)
    if legacy and (shown := next(filter(_has_image, history["messages_and_choices"]), None)):
        raise ExportError(
            f"a message with an image, role {shown.get('role')!r}: ART from 0.5.20 on trains it "
            f"without the image; leave the trajectory out, or use openpipe-art<0.5.20"
        )
    items = [_item(item) for item in history["messages_and_choices"]]
    kind: Any = legacy or trajectories.History
    made = kind(messages_and_choices=items, tools=history["tools"])
    # The constructor puts the members of tools in an order of its own and leaves out those that it
    # does not know, and a chat template writes them as they are.
    made.tools = history["tools"]
    return made


def _has_image(item: Mapping[str, Any]) -> bool:
    parts = item.get("content")
    return isinstance(parts, list) and any(
        isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts
    )


def _item(item: Mapping[str, Any]) -> Any:
    from openai.types.chat.chat_completion import Choice

    return item if "role" in item else Choice.model_validate(item)
